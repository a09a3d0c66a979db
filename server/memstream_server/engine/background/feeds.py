"""Feeds memories with the messages of conversations, in the background.

Rule 1. The observations of messages and the number up to which they are fed are one transaction: a message is observed
exactly once, whatever ends between two steps and however many servers try.
Rule 2. A feed that cannot continue (no such memory, a quota, another owner) holds up no other one; it is tried again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import structlog

from memstream_server.core.values import Role
from memstream_server.engine.background.task import BackgroundTask, wait_for_news
from memstream_server.engine.errors import EngineError, OwnedElsewhere
from memstream_server.engine.requests import NewObservation, Put
from memstream_server.ports.conversation_records import AdvanceFeed, Feed, JointWrites
from memstream_server.ports.conversations import Message, MessageQuery
from memstream_server.ports.journal.errors import JournalError, PreconditionFailed

if TYPE_CHECKING:
    from memstream_server.engine.fragments import Fragments
    from memstream_server.engine.runtime.dependencies import Runtime, Storage

log = structlog.get_logger(__name__)

RETRY_S = 5.0
"""How often feeds are looked for that nothing announced: of other servers, and those that could not continue."""
PAUSE_S = 0.05
"""Between two looks: appends that follow each other are fed together."""
FEEDS, MESSAGES = 100, 64
"""Feeds listed, and messages observed, at once."""
TEXT_BYTES_MAX = 32_768
"""A longer text is no observation, and a body of four times as much is not read."""
_ROLES = {
    "user": Role.USER,
    "human": Role.USER,
    "assistant": Role.ASSISTANT,
    "ai": Role.ASSISTANT,
    "model": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
}


class Feeds(BackgroundTask):
    """One background task. The engine starts and stops it."""

    def __init__(self, storage: Storage, runtime: Runtime, fragments: Fragments) -> None:
        self._store = storage.conversations
        self._runtime = runtime
        self._fragments = fragments
        self._news = asyncio.Event()
        self._waiting: set[int] = set()
        """Conversations, by number, whose feed could not continue: said once in the log."""

    def notify(self) -> None:
        """Messages were appended, or a feed was set."""
        self._news.set()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self.run_round()
            except JournalError as error:
                log.warning("feeds_failed", error=error)
            await asyncio.sleep(PAUSE_S)
            await wait_for_news(self._news, RETRY_S)

    async def run_round(self) -> None:
        """Feed all that is due."""
        after = 0
        while due := await self._store.list_due_feeds(after, FEEDS):
            for feed in due:
                await self._feed_guarded(feed)
            after = due[-1].number

    async def _feed_guarded(self, feed: Feed) -> None:
        try:
            while (reached := await self._feed_page(feed)) < feed.last_number:
                feed = feed.from_number(reached)
            self._waiting.discard(feed.number)
        except (OwnedElsewhere, PreconditionFailed):
            return  # the memory's owner feeds it; or the conversation was deleted, or is fed otherwise now
        except (EngineError, JournalError) as error:
            if feed.number not in self._waiting:
                log.warning("feed_waits", number=feed.number, error=error)
            self._waiting.add(feed.number)

    async def _feed_page(self, feed: Feed) -> int:
        """Observe the next messages; the number up to which all are fed."""
        query = MessageQuery(after=feed.fed_number, limit=MESSAGES)
        found = await self._store.list_messages(feed.conversation, query)
        whole = list(takewhile(lambda one: one.is_whole, found))
        reached = feed.last_number if len(whole) == len(found) < MESSAGES else whole[-1].number
        reached = max(reached, whole[-1].number if whole else 0)
        read = [_read_observation(feed.conversation.name, one) for one in whole]
        puts = [(new, "") for new in read if new is not None]

        def join(_: Sequence[Put]) -> JointWrites:
            advance = AdvanceFeed(feed.number, feed.memory, feed.fed_number, reached)
            return JointWrites((advance,), self._runtime.clock.now_us(), lambda _: None)

        if puts:
            await self._fragments.put_together(feed.conversation.namespace, feed.memory, puts, join)
        else:
            await self._store.write_together(join(()))
        return reached


def _read_observation(conversation: str, message: Message) -> NewObservation | None:
    """A message as an observation; None if it says nothing that can be one."""
    text = message.content or _text_of(message.body)
    if not text.strip() or len(text.encode()) > TEXT_BYTES_MAX:
        return None
    return NewObservation(
        content=text,
        speaker=message.name or message.sender,
        role=_ROLES.get(message.role.lower()),
        session=conversation,
        observe_time_us=message.create_time_us if message.time_us is None else message.time_us,
        metadata=message.metadata,
        external_id=f"{conversation}#{message.number}",
    )


def _text_of(body: bytes | None) -> str:
    """What a framework's message says: a JSON text, or its parts of text."""
    if body is None or len(body) > 4 * TEXT_BYTES_MAX:
        return ""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):  # JSON that Python does not load: a number of thousands of digits
        return ""
    return "\n".join(_list_texts(said, 0)).encode(errors="replace").decode()


def _list_texts(value: Any, depth: int) -> list[str]:
    """Texts under the names that frameworks use: `content` (a text or parts), `text`, `parts`."""
    if isinstance(value, str):
        return [value]
    if depth > 3:
        return []
    if isinstance(value, list):
        return [text for one in value for text in _list_texts(one, depth + 1)]
    if isinstance(value, dict):
        named = next((value[name] for name in ("content", "text", "parts") if name in value), None)
        return [] if named is None else _list_texts(named, depth + 1)
    return []
