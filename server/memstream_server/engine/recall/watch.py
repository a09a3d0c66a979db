"""Watching: a memory's committed transitions in order, from the journal, woken by commits."""

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
"""Transitions read at once, at the most: the journal gives fewer that are large. All that is held of a slow watcher."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One who waits for a memory's commits: woken by them, and how far they have come."""

    revision: int
    gone: bool = False
    """The memory was deleted."""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def woken(self, timeout_s: float) -> bool:
        """Waits for the next commit; False when none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return False
        return True


class Watchers:
    """Who waits for which memory's next commit."""

    def __init__(self, journal: Journal, quiet_s: float = 5.0) -> None:
        """quiet_s: after so long without a commit a progress mark is given, and the journal is looked at."""
        self._journal = journal
        self.quiet_s = quiet_s
        self._waiting: dict[str, set[Waiting]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def committed(self, uid: str, revision: int) -> None:
        """Told after every commit."""
        for waiting in self._waiting.get(uid, ()):
            waiting.revision = max(waiting.revision, revision)
            waiting.news.set()

    def deleted(self, uid: str) -> None:
        """Told after a memory was deleted."""
        for waiting in self._waiting.get(uid, ()):
            waiting.gone = True
            waiting.news.set()

    @contextmanager
    def waiting(self, record: MemoryRecord) -> Iterator[Waiting]:
        """Is told of the memory's commits from here on."""
        waiting = Waiting(record.revision)
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
        """(uid, revision, time in µs, events) of each transition after the cursor; empty events are a progress mark.

        Of the first transition the `ordinal` events already seen are left out. Raises CursorVoid, CursorCompacted.
        """
        if uid and uid != record.uid:
            raise CursorVoid(
                f"the memory {record.namespace}/{record.name} was made anew, or restored from a backup, since; list it "
                "and watch from there"
            )
        with self.waiting(record) as waiting:
            seen, skip = revision, ordinal
            while True:
                waiting.news.clear()
                page = await self._journal.list_events(record.uid, seen, PAGE)
                if waiting.gone:
                    raise _deleted(record)
                if not page and record.revision > seen:  # `record` was read before: its last revision is pruned,
                    await self.current(record)  # or the memory deleted
                    raise _compacted(record.revision)
                for recorded in page:
                    if recorded.revision > seen + 1:
                        raise _compacted(recorded.revision - 1)
                    events, skip = recorded.events[skip:], 0
                    seen = recorded.revision
                    if events:
                        yield record.uid, seen, recorded.time_us, events
                if page and seen < waiting.revision:
                    continue
                if not await waiting.woken(self.quiet_s):
                    record = await self.current(record)
                    waiting.revision = max(waiting.revision, record.revision)
                    if record.revision == seen:
                        yield record.uid, seen, 0, ()

    async def current(self, record: MemoryRecord) -> MemoryRecord:
        """The memory as it is now. Raises MemoryNotFound."""
        current = await self._journal.get_memory(record.namespace, record.name)
        if current is None or current.uid != record.uid:
            raise _deleted(record)
        return current


def _deleted(record: MemoryRecord) -> MemoryDeleted:
    return MemoryDeleted(f"memory {record.namespace}/{record.name} was deleted")


def _compacted(oldest: int) -> CursorCompacted:
    return CursorCompacted(
        f"events up to revision {oldest} are no longer kept; list the fragments and watch from there",
        oldest_revision=oldest,
    )
