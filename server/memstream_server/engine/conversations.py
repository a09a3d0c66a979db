"""Conversations for the rpcs: maps store errors to engine errors, sets times, and notifies watches.

A watch ends when its conversation is completed: already, later, or in between if the conversation was reopened since.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from memstream_server.engine.background.task import wait_for_news
from memstream_server.engine.errors import (
    ConversationNotFound,
    EtagMismatch,
    InvalidField,
    MemoryExists,
    RequestIdConflict,
    write_error,
)
from memstream_server.engine.quotas import check_bytes
from memstream_server.engine.runtime.call_context import complete_task
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.settings import EngineLimits
from memstream_server.ports.conversation_records import (
    AppendMessages,
    ConversationChange,
    ConversationQuery,
    ConversationRecord,
    ConversationResult,
    ConversationWrite,
    JointWrites,
    RemovesTooMany,
    ReplaceMessage,
    SessionStore,
    SetState,
    StateDiffers,
    StateDocument,
    StateName,
    UpdateConversation,
)
from memstream_server.ports.conversations import (
    AnswerOf,
    Appended,
    ClientIdTaken,
    ConversationExists,
    ConversationName,
    LastNumberDiffers,
    Message,
    MessageQuery,
    NotThere,
    Plan,
    PlanChange,
    PlanQuery,
    Precondition,
    Removal,
    Removed,
    Status,
)
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer

if TYPE_CHECKING:
    from memstream_server.engine.background.feeds import Feeds
    from memstream_server.engine.fragments import Fragments
    from memstream_server.engine.requests import NewObservation, Put

T = TypeVar("T")
NO_LIMITS = EngineLimits()
PAGE = 256
"""Messages that a watch reads at once."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """Writes that are done together. `puts`: (observation, etag as of `Fragments.put`) into `memory`, with different
    external ids."""

    namespace: str
    writes: Sequence[ConversationWrite] = ()
    memory: str = ""
    puts: Sequence[tuple[NewObservation, str | None]] = ()
    request: str = ""
    """Key of the request_id; empty: repeats are not detected."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a transaction has done: a result for each of its writes, and for each of its puts."""

    results: Sequence[ConversationResult]
    puts: Sequence[Put]


class Conversations:
    """All conversations. Methods raise ConversationNotFound, StorageIsFull, QuotaExceeded, JournalUnavailable, and
    those that append or replace messages EtagMismatch, MemoryExists, RequestIdConflict.

    They raise JournalUnavailable also if a concurrent call has answered the request_id: rpc/idempotency.py then returns
    that answer.
    """

    def __init__(
        self,
        store: SessionStore,
        journal: Journal,
        clock: Clock,
        quiet_s: float = 5.0,
        limits: EngineLimits = NO_LIMITS,
        fragments: Fragments | None = None,
        feeds: Feeds | None = None,
    ) -> None:
        """quiet_s: how often an idle watch reads the store. Writes of other processes wake no watch of this one.

        fragments: of all memories, for transactions that put some. feeds: are notified of messages.
        """
        self._fragments = fragments
        self._feeds = feeds
        self._store = store
        self._journal = journal
        self._clock = clock
        self._quiet_s = quiet_s
        self._limits = limits
        self._waiting: dict[ConversationName, set[asyncio.Event]] = defaultdict(set)
        self._writing: set[asyncio.Task[Any]] = set()

    async def stored_answer(self, request: str) -> Answer | None:
        """The earlier answer to a request_id."""
        return await _map_errors(self._journal.get_answer(request))

    async def append_message(
        self, conversation: ConversationName, message: Message, answer: AnswerOf[Message] = None
    ) -> Message:
        """The message with its number and times. Wakes the watches."""
        await self._check_bytes(conversation.namespace)
        writing = self._store.append_message(conversation, message, self._clock.now_us(), answer)
        return await self._write_shielded([conversation], writing)

    async def append_messages(
        self,
        conversation: ConversationName,
        messages: Sequence[Message],
        condition: Precondition,
        answer: AnswerOf[Appended] = None,
    ) -> Appended:
        """All or none. Wakes the watches."""
        await self._check_bytes(conversation.namespace)
        writing = self._store.append_messages(conversation, messages, condition, self._clock.now_us(), answer)
        return await self._write_shielded([conversation], writing)

    async def list_messages(self, conversation: ConversationName, query: MessageQuery) -> list[Message]:
        """In order of number."""
        return await _map_errors(self._store.list_messages(conversation, query))

    async def get_message(self, conversation: ConversationName, which: int | str) -> Message:
        """The message with its body, by its number or its client id."""
        return await _map_errors(self._store.get_message(conversation, which))

    async def last_message(self, conversation: ConversationName) -> Message:
        """The message with the highest number."""
        return await _map_errors(self._store.last_message(conversation))

    async def complete(self, conversation: ConversationName, answer: AnswerOf[None] = None) -> None:
        """End the watches. Creates the conversation if necessary: a watch may wait for one without messages."""
        await self._write_shielded(
            [conversation], self._store.complete_conversation(conversation, self._clock.now_us(), answer)
        )

    async def delete_messages(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        """Returns how many were deleted."""
        return await _map_errors(self._store.delete_messages(conversation, self._clock.now_us(), answer))

    async def replace_message(
        self, conversation: ConversationName, message: Message, answer: AnswerOf[Message] = None
    ) -> Message:
        """The message that is there now. Watches do not show it."""
        await self._check_bytes(conversation.namespace)
        return await _map_errors(self._store.replace_message(conversation, message, self._clock.now_us(), answer))

    async def remove_messages(
        self, conversation: ConversationName, removal: Removal, answer: AnswerOf[Removed] = None
    ) -> Removed:
        """How many were deleted, and what is last now."""
        return await _map_errors(self._store.remove_messages(conversation, removal, self._clock.now_us(), answer))

    async def pop_message(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[Message] = None
    ) -> Message:
        """The message that was the last."""
        return await _map_errors(self._store.pop_message(conversation, last_number, answer))

    async def save_plans(
        self, conversation: ConversationName, plans: Sequence[Plan], answer: AnswerOf[tuple[Plan, ...]] = None
    ) -> tuple[Plan, ...]:
        """The plans with their times. A plan with an existing number replaces it."""
        await self._check_bytes(conversation.namespace)
        return await _map_errors(self._store.save_plans(conversation, plans, self._clock.now_us(), answer))

    async def list_plans(self, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
        """Ascending by number."""
        return await _map_errors(self._store.list_plans(conversation, query))

    async def change_plan(
        self, conversation: ConversationName, number: int, change: PlanChange, answer: AnswerOf[Plan] = None
    ) -> Plan:
        """The changed plan."""
        await self._check_bytes(conversation.namespace)
        return await _map_errors(self._store.change_plan(conversation, number, change, self._clock.now_us(), answer))

    async def remove_plans(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        """Returns how many were removed."""
        return await _map_errors(self._store.remove_plans(conversation, answer))

    async def get_conversation(self, conversation: ConversationName) -> ConversationRecord:
        """What it is now."""
        return await _map_errors(self._store.get_conversation(conversation))

    async def list_conversations(self, query: ConversationQuery) -> list[ConversationRecord]:
        """By name, or the latest first."""
        return await _map_errors(self._store.list_conversations(query))

    async def update_conversation(
        self, conversation: ConversationName, change: ConversationChange, answer: AnswerOf[ConversationRecord] = None
    ) -> ConversationRecord:
        """The conversation as changed."""
        await self._check_bytes(conversation.namespace)
        updating = self._store.update_conversation(conversation, change, self._clock.now_us(), answer)
        return await self._write_shielded([], updating)

    async def delete_conversation(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[int] = None
    ) -> int:
        """How many messages it had. Watches wait for another one of that name."""
        return await _map_errors(self._store.delete_conversation(conversation, last_number, answer))

    async def fork_conversation(
        self,
        source: ConversationName,
        target: ConversationName,
        number: int | None,
        answer: AnswerOf[ConversationRecord] = None,
    ) -> ConversationRecord:
        """The new conversation."""
        await self._check_bytes(target.namespace)
        forking = self._store.fork_conversation(source, target, number, self._clock.now_us(), answer)
        return await _map_errors(forking)

    async def get_state(self, name: StateName) -> StateDocument:
        """The document."""
        return await _map_errors(self._store.get_state(name))

    async def get_states(self, names: Sequence[StateName], bytes_max: int) -> list[StateDocument | None]:
        """As many documents, from the first, as `bytes_max` holds; None for those that do not exist."""
        return await _map_errors(self._store.get_states(names, bytes_max))

    async def set_state(
        self, name: StateName, document: bytes, version: int | None, answer: AnswerOf[StateDocument] = None
    ) -> StateDocument:
        """The document as written."""
        await self._check_bytes(name.namespace)
        return await _map_errors(self._store.set_state(name, document, version, self._clock.now_us(), answer))

    async def delete_state(self, name: StateName, version: int | None = None, answer: AnswerOf[bool] = None) -> bool:
        """Whether there was one."""
        return await _map_errors(self._store.delete_state(name, version, answer))

    async def erase_user(self, namespace: str, user: str) -> tuple[int, bool]:
        """How many conversations were deleted, and whether there was a state. Leaves nothing in the journal's files."""
        erased = await _map_errors(self._store.erase_user(namespace, user))
        await _map_errors(self._journal.scrub_files())
        return erased

    @property
    def dimension(self) -> int:
        """Vector dimension of the fragments."""
        return 0 if self._fragments is None else self._fragments.dimension

    async def write_together(self, given: Transaction, answer: Callable[[Written], Answer] | None = None) -> Written:
        """All in one transaction, or nothing. Wakes the watches. Raises also MemoryNotFound, AlreadyAnswered."""
        appended = [one.conversation for one in given.writes if isinstance(one, AppendMessages)]
        return await self._write_shielded(appended, self._write_together(given, answer))

    async def _write_together(self, given: Transaction, answer: Callable[[Written], Answer] | None) -> Written:
        written: list[Written] = []

        def join(puts: Sequence[Put]) -> JointWrites:
            def finish(results: Sequence[ConversationResult]) -> Answer | None:
                written.append(Written(results, puts))
                return None if answer is None else answer(written[-1])

            return JointWrites(given.writes, self._clock.now_us(), finish, stored)

        await self._check_bytes(given.namespace)
        bodies = [body for one in given.writes for body in _bodies_of(one)]
        async with self._store.store_bodies(given.namespace, bodies, self._clock.now_us()) as stored:
            if given.puts:
                assert self._fragments is not None
                await self._fragments.put_together(given.namespace, given.memory, given.puts, join, given.request)
            else:
                await self._store.write_together(join(()))
        if any(not isinstance(one, AppendMessages | UpdateConversation) for one in given.writes):
            await _map_errors(self._store.purge_deleted(given.namespace))
        return written[-1]  # of the try that was committed

    async def watch(self, conversation: ConversationName, after: int) -> AsyncGenerator[list[Message], None]:
        """Pages of messages after a number, as they arrive; returns when the conversation is completed.

        A watch that finds no message at its start begins with an empty page.
        """
        news = asyncio.Event()
        self._waiting[conversation].add(news)
        try:
            before: Status | None = None
            started = False
            while True:
                news.clear()
                # The status is read first: a later page contains every message that it counts.
                status = await _map_errors(self._store.get_status(conversation))
                before = before or status
                ended = status.completed or status.completions > before.completions
                page, full = await self._read_page(conversation, after, status)
                shown = [message for message in page if not ended or message.number <= status.completed_number]
                if shown:
                    after = shown[-1].number
                if shown or not (started or ended):
                    yield shown
                started = True
                if ended and (not full or len(shown) < len(page)):
                    return
                if not full:
                    await wait_for_news(news, self._quiet_s)
        finally:
            self._waiting[conversation].discard(news)
            if not self._waiting[conversation]:
                del self._waiting[conversation]

    async def _check_bytes(self, namespace: str) -> None:
        await check_bytes(self._journal, self._limits, namespace)

    async def _read_page(
        self, conversation: ConversationName, after: int, status: Status
    ) -> tuple[list[Message], bool]:
        """(messages, whether there may be more): as many as PAGE, or as are read with their bodies."""
        if status.last_number <= after:
            return [], False
        found = await self.list_messages(conversation, MessageQuery(after=after, limit=PAGE))
        whole = list(takewhile(lambda one: one.is_whole, found))
        return whole, len(found) == PAGE or len(whole) < len(found)

    async def _write_shielded(self, changed: Sequence[ConversationName], writing: Awaitable[T]) -> T:
        # The watches are notified even if the caller is cancelled.
        return await complete_task(self._write_and_notify(changed, writing), self._writing)

    async def _write_and_notify(self, changed: Sequence[ConversationName], writing: Awaitable[T]) -> T:
        written = await _map_errors(writing)
        for conversation in changed:
            for event in self._waiting.get(conversation, ()):
                event.set()
        if self._feeds is not None:
            self._feeds.notify()
        return written


def _bodies_of(write: ConversationWrite) -> Sequence[bytes | None]:
    match write:
        case AppendMessages():
            return [message.body for message in write.messages]
        case ReplaceMessage():
            return (write.message.body,)
        case SetState():
            return (write.document,)
        case _:
            return ()


async def _map_errors(work: Awaitable[T]) -> T:
    """Raise the store's errors as engine errors."""
    try:
        return await work
    except NotThere as error:
        raise ConversationNotFound(str(error), conversation=error.conversation.name) from error
    except ConversationExists as error:
        named = error.conversation
        raise MemoryExists(str(error), namespace=named.namespace, conversation=named.name) from error
    except LastNumberDiffers as error:
        raise EtagMismatch(f"{error}: read again, then decide", etag=error.last_number) from error
    except StateDiffers as error:
        raise EtagMismatch(f"{error}: read again, then decide", etag=error.version) from error
    except RemovesTooMany as error:
        raise InvalidField(f"{error}: delete them by RemoveMessages") from error
    except ClientIdTaken as error:
        raise RequestIdConflict(f"{error}: give every message its own") from error
    except JournalError as error:  # includes StaleWrite: a concurrent call stored the answer, which the rpc returns
        raise write_error(error) from error
