"""Watches: a memory's committed transitions in order, read from the journal, woken by commits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstream_server.core.events import Event
from memstream_server.engine.errors import CursorCompacted, CursorVoid, MemoryDeleted

if TYPE_CHECKING:
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import MemoryRecord

PAGE = 256
"""Transitions per read, at most; the journal returns fewer if they are large. Bounds the RAM of a slow consumer."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One consumer that waits for commits, and the latest revision."""

    revision: int
    gone: bool = False
    """The memory was deleted."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_commit(self, timeout_s: float) -> bool:
        """Wait for the next commit; False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return False
        return True


class Watchers:
    """The consumers that wait for commits, by memory."""

    def __init__(self, journal: Journal, quiet_s: float = 5.0) -> None:
        """quiet_s: after so long without a commit a watch reads the journal and sends a progress mark."""
        self._journal = journal
        self.quiet_s = quiet_s
        self._waiting: dict[str, set[Waiter]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def notify_commit(self, uid: str, revision: int) -> None:
        """Called after every commit."""
        for waiting in self._waiting.get(uid, ()):
            waiting.revision = max(waiting.revision, revision)
            waiting.news.set()

    def notify_deleted(self, uid: str) -> None:
        """Called after a deletion."""
        for waiting in self._waiting.get(uid, ()):
            waiting.gone = True
            waiting.news.set()

    @contextmanager
    def add_waiter(self, record: MemoryRecord, waiting: Waiter | None = None) -> Iterator[Waiter]:
        """A consumer that is notified of the memory's commits during the block; one may wait for several memories."""
        waiting = waiting or Waiter(record.revision)
        self._waiting[record.uid].add(waiting)
        try:
            yield waiting
        finally:
            self._waiting[record.uid].discard(waiting)
            if not self._waiting[record.uid]:
                del self._waiting[record.uid]

    async def watch(
        self, record: MemoryRecord, uid: str, revision: int, ordinal: int
    ) -> AsyncGenerator[tuple[str, int, int, tuple[Event, ...]], None]:
        """(uid, revision, time in µs, events) of each transition after the cursor; a progress mark has no events.

        The first progress mark follows when every transition that was committed at the start was returned. Skips the
        first `ordinal` events of the first transition. Raises CursorVoid, CursorCompacted.
        """
        if uid and uid != record.uid:
            raise CursorVoid(
                f"the memory {record.namespace}/{record.name} was created again, or restored from a backup; list it "
                "and watch from there"
            )
        with self.add_waiter(record) as waiting:
            seen, skip, started = revision, ordinal, False
            while True:
                waiting.news.clear()
                page = await self._journal.list_events(record.uid, seen, PAGE)
                if waiting.gone:
                    raise _deleted_error(record)
                # `record` is older than the page: either its last revision is pruned,
                if not page and record.revision > seen:
                    await self.read_current(record)  # or the memory is deleted
                    raise _compacted_error(record.revision)
                for recorded in page:
                    if recorded.revision > seen + 1:
                        raise _compacted_error(recorded.revision - 1)
                    events, skip = recorded.events[skip:], 0
                    seen = recorded.revision
                    if events:
                        yield record.uid, seen, recorded.time_us, events
                if page and seen < waiting.revision:
                    continue
                if not started:
                    started = True
                    yield record.uid, seen, 0, ()
                if not await waiting.wait_for_commit(self.quiet_s):
                    record = await self.read_current(record)
                    waiting.revision = max(waiting.revision, record.revision)
                    if record.revision == seen:
                        yield record.uid, seen, 0, ()

    async def read_current(self, record: MemoryRecord) -> MemoryRecord:
        """The memory's current record. Raises MemoryNotFound."""
        current = await self._journal.get_memory(record.namespace, record.name)
        if current is None or current.uid != record.uid:
            raise _deleted_error(record)
        return current


def _deleted_error(record: MemoryRecord) -> MemoryDeleted:
    return MemoryDeleted(f"memory {record.namespace}/{record.name} was deleted")


def _compacted_error(oldest: int) -> CursorCompacted:
    return CursorCompacted(
        f"events up to revision {oldest} have been pruned; list the fragments and watch from there",
        oldest_revision=oldest,
    )
