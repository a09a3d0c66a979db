"""`ports.conversation_records.SessionStore` on the journal's database: same file, writer and snapshots.

A page limits every list, so rows are read without bulk statements.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from sqlalchemy import ColumnElement, Connection, delete, select

from memstream_server.adapters.journal.database.database import Read, SharedRun, Write
from memstream_server.adapters.journal.sql import codec, export_reads, joint_writes, messages, states
from memstream_server.adapters.journal.sql import conversation_copies as copies
from memstream_server.adapters.journal.sql import conversation_records as records
from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.messages import find_row, get_or_create, get_row, update_row
from memstream_server.adapters.journal.sql.schema import conversations, key_range, plans, row_key
from memstream_server.ports.conversation_records import (
    ConversationChange,
    ConversationQuery,
    ConversationRecord,
    Feed,
    JointWrites,
    StateDocument,
    StateName,
    StateScope,
)
from memstream_server.ports.conversations import (
    NEVER,
    TO_DO,
    AnswerOf,
    Appended,
    ConversationName,
    ConversationScan,
    Details,
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

T = TypeVar("T")
_ERASED_AT_ONCE = 10
"""Conversations of a user that one write hides."""
PART_ROWS = hidden.SLICE_BYTES // joint_writes.BYTES_OF_ROW
_COPIES = 4
"""How often a copy of a conversation that is changed meanwhile is begun."""


class SqlConversations:
    """`ports.conversation_records.SessionStore` over a journal's writer and readers."""

    def __init__(self, write: Write, read: Read) -> None:
        self._write = write
        self._read = read
        self._purges: WeakValueDictionary[str, SharedRun] = WeakValueDictionary()
        """By namespace."""

    async def append_message(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        async with self.store_bodies(conversation.namespace, [message.body], now_us) as stored:
            return await self._write_with_answer(
                lambda c: messages.append_message(c, conversation, message, now_us, stored),
                2 + joint_writes.cost_messages([message], stored),
                True,
                answer,
            )

    async def append_messages(
        self,
        conversation: ConversationName,
        given: Sequence[Message],
        condition: Precondition,
        now_us: int,
        answer: AnswerOf[Appended] = None,
    ) -> Appended:
        async with self.store_bodies(conversation.namespace, [one.body for one in given], now_us) as stored:
            return await self._write_with_answer(
                lambda c: messages.append_messages(c, conversation, given, condition, now_us, stored),
                2 + joint_writes.cost_messages(given, stored),
                True,
                answer,
            )

    @asynccontextmanager
    async def store_bodies(
        self, namespace: str, given: Sequence[bytes | None], now_us: int, staged: str = hidden.HIDDEN
    ) -> AsyncIterator[Mapping[bytes, int]]:
        bodies = hidden.select_large(given)
        if not bodies:
            yield {}
            return
        name = f"{staged}.{secrets.token_hex(8)}"
        expires_us = now_us + hidden.WRITING_US if namespace else None
        numbers: list[int] = await self._write(
            lambda c: [
                hidden.create_hidden(c, namespace, f"{name}.{place}", expires_us) for place in range(len(bodies))
            ],
            len(bodies),
            True,
        )
        stored = dict(zip(bodies, numbers, strict=True))
        try:
            for rows in hidden.split_bodies(stored):
                await self._write(lambda c, rows=rows: hidden.write_bodies(c, rows), PART_ROWS, True)  # type: ignore[misc]
            yield stored
        finally:
            await self._discard_unused(namespace, numbers)

    async def _discard_unused(self, namespace: str, numbers: Sequence[int]) -> None:
        """Delete what is still hidden and has no message: a write failed, or found its message there."""
        if not namespace:
            return  # the import that has staged it removes it
        with suppress(JournalError):  # the write's outcome stands; `prune_conversations` deletes what is left
            if await self._read(lambda c: hidden.list_unused(c, numbers)):
                for number in await self._write(lambda c: hidden.release_unused(c, numbers), len(numbers), False):
                    await self._purge(number)

    async def _purge(self, number: int) -> None:
        while not await self._write(lambda c: hidden.purge_slice(c, number), hidden.SLICE_ROWS, False):
            pass

    async def purge_deleted(self, namespace: str) -> None:
        with suppress(JournalError):  # the write before is done; `prune_conversations` purges what is left
            await self._purge_deleted(namespace)

    async def _purge_deleted(self, namespace: str) -> None:
        """Delete, slice by slice, the rows of what was deleted in a namespace before. Calls meanwhile delete theirs:
        with them, none would end."""
        await self._purges.setdefault(namespace, SharedRun()).run(partial(self._purge_listed, namespace))

    async def _purge_listed(self, namespace: str) -> None:
        for _ in range(2):  # a purged message leaves the parts of its body
            for number in await self._read(partial(hidden.list_deleted, namespace=namespace)):
                await self._purge(number)

    async def list_messages(self, conversation: ConversationName, query: MessageQuery) -> list[Message]:
        return await self._read(lambda c: messages.read_messages(c, conversation, query))

    async def get_message(self, conversation: ConversationName, which: int | str) -> Message:
        return await self._read(lambda c: messages.read_message(c, conversation, which))

    async def last_message(self, conversation: ConversationName) -> Message:
        return await self._read(lambda c: messages.read_last_message(c, conversation))

    async def replace_message(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        async with self.store_bodies(conversation.namespace, [message.body], now_us) as stored:
            done = await self._write_with_answer(
                lambda c: messages.replace_message(c, conversation, message, now_us, stored),
                2 + joint_writes.cost_messages([message], stored),
                True,
                answer,
            )
        await self.purge_deleted(conversation.namespace)
        return done

    async def remove_messages(
        self, conversation: ConversationName, removal: Removal, now_us: int, answer: AnswerOf[Removed] = None
    ) -> Removed:
        done: Removed = await self._copy_slices(
            conversation.namespace,
            lambda c, begun: copies.remove_slice(c, conversation, removal, now_us, begun),
            False,
            answer,
        )
        await self.purge_deleted(conversation.namespace)
        return done

    async def pop_message(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[Message] = None
    ) -> Message:
        done = await self._write_with_answer(
            lambda c: messages.pop_message(c, conversation, last_number), 3, False, answer
        )
        await self.purge_deleted(conversation.namespace)
        return done

    async def _copy_slices(
        self,
        namespace: str,
        work: Callable[[Connection, copies.Copy | str], copies.Copy | T],
        adds: bool,
        answer: AnswerOf[T],
    ) -> T:
        """Work slice by slice until it gives what is not a copy. It begins again if its source was changed."""

        def both(connection: Connection, begun: copies.Copy | str) -> copies.Copy | T:
            done = work(connection, begun)
            if not isinstance(done, copies.Copy):
                put_answer(connection, None if answer is None else answer(done))
            return done

        for left in reversed(range(_COPIES)):
            done: copies.Copy | T | str = f"{hidden.HIDDEN}.{secrets.token_hex(8)}"
            number = 0
            try:
                while isinstance(done, copies.Copy | str):
                    begun = done
                    done = await self._write(lambda c, begun=begun: both(c, begun), hidden.SLICE_ROWS, adds)  # type: ignore[misc]
                    number = done.number if isinstance(done, copies.Copy) else number
                return done
            except copies.SourceChanged:
                if not left:
                    raise
            finally:
                await self._discard_unused(namespace, [number])
        raise AssertionError("unreachable")

    async def get_status(self, conversation: ConversationName) -> Status:
        return await self._read(lambda c: _read_status(c, conversation))

    async def complete_conversation(
        self, conversation: ConversationName, now_us: int, answer: AnswerOf[None] = None
    ) -> None:
        await self._write_with_answer(lambda c: _complete_conversation(c, conversation, now_us), 2, False, answer)

    async def delete_messages(self, conversation: ConversationName, now_us: int, answer: AnswerOf[int] = None) -> int:
        of_count = None if answer is None else (lambda done: answer(done.count))
        return (await self.remove_messages(conversation, Removal(from_number=1), now_us, of_count)).count

    async def save_plans(
        self,
        conversation: ConversationName,
        plans: Sequence[Plan],
        now_us: int,
        answer: AnswerOf[tuple[Plan, ...]] = None,
    ) -> tuple[Plan, ...]:
        rows = 2 + 2 * len(plans)
        return await self._write_with_answer(lambda c: _save_plans(c, conversation, plans, now_us), rows, True, answer)

    async def list_plans(self, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
        return await self._read(lambda c: _read_plans(c, conversation, query))

    async def change_plan(
        self,
        conversation: ConversationName,
        number: int,
        change: PlanChange,
        now_us: int,
        answer: AnswerOf[Plan] = None,
    ) -> Plan:
        return await self._write_with_answer(
            lambda c: _change_plan(c, conversation, number, change, now_us), 2, True, answer
        )

    async def remove_plans(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        return await self._write_with_answer(lambda c: _remove_plans(c, conversation), 1_000, False, answer)

    async def list_names(self, namespace: str, after: str, limit: int) -> list[str]:
        return await self._read(lambda c: export_reads.list_conversation_names(c, namespace, after, limit))

    async def scan_conversation(self, conversation: ConversationName, visit: Callable[[ConversationScan], T]) -> T:
        return await self._read(lambda c: export_reads.scan_conversation(c, conversation, visit))

    async def stage_rows(
        self, staged: str, create_time_us: int, messages: Sequence[Message], plans: Sequence[Plan]
    ) -> None:
        async with self.store_bodies("", [one.body for one in messages], 0, staged) as stored:
            rows = 2 + joint_writes.cost_messages(messages, stored) + len(plans)
            await self._write(
                lambda c: copies.put_staged(c, staged, create_time_us, messages, plans, stored), rows, True
            )

    async def publish_staged(
        self, staged: str, conversation: ConversationName, status: Status, details: Details
    ) -> None:
        async with self.store_bodies("", [details.state], 0, staged) as stored:
            rows = 3 + len(details.labels) + joint_writes.cost_document(details.state or b"", stored)

            def publish(connection: Connection) -> None:
                number = copies.publish_staged(connection, staged, conversation, status)
                records.put_details(connection, conversation, number, details, stored)
                of_state = conversations.c.number.in_(stored.values())
                copies.publish_parts(connection, conversation.namespace, of_state)

            await self._write(publish, rows, False)

    async def discard_staged(self, staged: str) -> None:
        number = await self._read(lambda c: copies.find_staged(c, staged))
        if number is not None:
            await self._purge(number)

    # ---- conversations as wholes, and state
    async def get_conversation(self, conversation: ConversationName) -> ConversationRecord:
        return await self._read(lambda c: records.get_record(c, conversation))

    async def list_conversations(self, query: ConversationQuery) -> list[ConversationRecord]:
        return await self._read(lambda c: records.list_records(c, query))

    async def update_conversation(
        self,
        conversation: ConversationName,
        change: ConversationChange,
        now_us: int,
        answer: AnswerOf[ConversationRecord] = None,
    ) -> ConversationRecord:
        return await self._write_with_answer(
            lambda c: records.update_record(c, conversation, change, now_us), 5, True, answer
        )

    async def delete_conversation(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[int] = None
    ) -> int:
        count = await self._write_with_answer(
            lambda c: records.delete_record(c, conversation, last_number), 5, False, answer
        )
        await self.purge_deleted(conversation.namespace)
        return count

    async def fork_conversation(
        self,
        source: ConversationName,
        target: ConversationName,
        number: int | None,
        now_us: int,
        answer: AnswerOf[ConversationRecord] = None,
    ) -> ConversationRecord:
        return await self._copy_slices(
            target.namespace, lambda c, begun: copies.fork_slice(c, source, target, number, now_us, begun), True, answer
        )

    async def get_state(self, name: StateName) -> StateDocument:
        return await self._read(lambda c: states.get_state(c, name))

    async def get_states(self, names: Sequence[StateName], bytes_max: int) -> list[StateDocument | None]:
        return await self._read(lambda c: states.get_states(c, names, bytes_max))

    async def set_state(
        self, name: StateName, document: bytes, version: int | None, now_us: int, answer: AnswerOf[StateDocument] = None
    ) -> StateDocument:
        async with self.store_bodies(name.namespace, [document], now_us) as stored:
            done = await self._write_with_answer(
                lambda c: states.set_state(c, name, document, version, now_us, stored),
                3 + joint_writes.cost_document(document, stored),
                True,
                answer,
            )
        await self.purge_deleted(name.namespace)
        return done

    async def list_states(
        self, namespace: str, after: tuple[str, str], limit: int
    ) -> list[tuple[StateName, StateDocument]]:
        return await self._read(lambda c: states.list_states(c, namespace, after, limit))

    async def delete_state(self, name: StateName, version: int | None = None, answer: AnswerOf[bool] = None) -> bool:
        done = await self._write_with_answer(lambda c: states.delete_state(c, name, version), 1, False, answer)
        await self.purge_deleted(name.namespace)
        return done

    async def erase_user(self, namespace: str, user: str) -> tuple[int, bool]:
        names = {user, *await self._read(lambda c: records.list_names_of(c, namespace, user))}
        # First, because a repeat of a call that was cut off finds no names of conversations that are gone.
        await self._empty_answers(namespace, names)
        count = 0
        while erased := await self._write(
            lambda c: records.erase_user(c, namespace, user, _ERASED_AT_ONCE), 5 * _ERASED_AT_ONCE, False
        ):
            count += len(erased)
            names.update(erased)
        await self._purge_deleted(namespace)
        had_state = await self.delete_state(StateName(namespace, StateScope.USER, user))
        await self._purge_deleted(namespace)
        await self._empty_answers(namespace, names)  # what was stored meanwhile
        return count, had_state

    async def _empty_answers(self, namespace: str, names: set[str]) -> None:
        keys = await self._read(lambda c: records.find_answers(c, namespace, names))
        if keys:
            await self._write(lambda c: records.empty_answers(c, keys), len(keys), False)

    async def list_due_feeds(self, after: int, limit: int) -> list[Feed]:
        return await self._read(lambda c: records.list_due_feeds(c, after, limit))

    async def write_together(self, joint: JointWrites) -> None:
        rows = sum(joint_writes.cost_rows(write, joint.stored) for write in joint.writes)
        await self._write(lambda c: joint_writes.write_together(c, joint), rows, True)

    async def prune_conversations(self, now_us: int, limit: int) -> int:
        count = await self._write(lambda c: records.prune_expired(c, now_us, limit), 5 * limit, False)
        while (number := await self._read(lambda c: hidden.find_due(c, now_us))) is not None:
            await self._purge(number)
        return count

    async def _write_with_answer(
        self, work: Callable[[Connection], T], rows: int, adds: bool, answer: AnswerOf[T]
    ) -> T:
        """Run the work and store the answer to the request in one transaction."""

        def both(connection: Connection) -> T:
            done = work(connection)
            put_answer(connection, None if answer is None else answer(done))
            return done

        return await self._write(both, rows, adds)


# ---- conversations


def _read_status(connection: Connection, conversation: ConversationName) -> Status:
    found = find_row(connection, conversation)
    if found is None:
        return NEVER
    return Status(found.last_number, bool(found.completed), found.completions, found.completed_number)


def _complete_conversation(connection: Connection, conversation: ConversationName, now_us: int) -> None:
    row = get_or_create(connection, conversation, now_us)
    if not row.completed:
        update_row(
            connection, row.number, completed=True, completions=row.completions + 1, completed_number=row.last_number
        )


# ---- plans


def _save_plans(
    connection: Connection, conversation: ConversationName, given: Sequence[Plan], now_us: int
) -> tuple[Plan, ...]:
    row = get_or_create(connection, conversation, now_us)
    saved = tuple(replace(plan, create_time_us=now_us, update_time_us=now_us) for plan in given)
    copies.put_plans(connection, row.number, saved)
    return saved


def _read_plans(connection: Connection, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
    number = get_row(connection, conversation).number
    _, high = key_range(number)
    wanted: list[ColumnElement[bool]] = [plans.c.key.between(row_key(number, query.after) + 1, high)]
    if query.numbers:
        wanted.append(plans.c.key.in_([row_key(number, each) for each in query.numbers]))
    if query.to_do:
        wanted.append(plans.c.state.in_([state.value for state in TO_DO]))
    statement = select(plans.c.payload).where(*wanted).order_by(plans.c.key).limit(query.limit)
    return [codec.decode_plan(blob) for blob in connection.execute(statement).scalars()]


def _remove_plans(connection: Connection, conversation: ConversationName) -> int:
    """Delete all rows in one transaction, because the answer has their number."""
    low, high = key_range(get_row(connection, conversation, lock=True).number)
    return connection.execute(delete(plans).where(plans.c.key.between(low, high))).rowcount


def _change_plan(
    connection: Connection, conversation: ConversationName, sub_task: int, change: PlanChange, now_us: int
) -> Plan:
    number = get_row(connection, conversation).number
    statement = select(plans.c.payload).where(plans.c.key == row_key(number, sub_task))
    blob = connection.execute(statement).scalar_one_or_none()
    if blob is None:
        raise NotThere(f"the conversation {conversation} has no plan {sub_task}", conversation)
    old = codec.decode_plan(blob)
    plan = replace(
        old,
        state=old.state if change.state is None else change.state,
        retry_times=old.retry_times if change.retry_times is None else change.retry_times,
        agent=old.agent if change.agent is None else change.agent,
        agent_model=old.agent_model if change.agent_model is None else change.agent_model,
        result=old.result if change.result is None else change.result,
        update_time_us=now_us,
    )
    copies.put_plans(connection, number, [plan])
    return plan
