"""Watching: a memory's committed transitions in order, from the journal, woken by commits."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstream_server.core.events import Event
from memstream_server.engine.errors import CursorCompacted, CursorVoid, MemoryNotFound

if TYPE_CHECKING:
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import MemoryRecord

PAGE = 256
"""Transitions read at once, at the most: the journal gives fewer that are large. All that is held of a slow watcher."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One watch: woken by commits, and how far they have come."""

    revision: int
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Watchers:
    """Who waits for which memory's next commit."""

    def __init__(self, journal: Journal, quiet_s: float = 5.0) -> None:
        """quiet_s: after so long without a commit a progress mark is given, and the journal is looked at."""
        self._journal = journal
        self._quiet_s = quiet_s
        self._waiting: dict[str, set[_Waiting]] = defaultdict(set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def committed(self, uid: str, revision: int = 0) -> None:
        """Told after every commit, and of a deletion without a revision."""
        for waiting in self._waiting.get(uid, ()):
            waiting.revision = max(waiting.revision, revision)
            waiting.news.set()

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
        waiting = _Waiting(record.revision)
        self._waiting[record.uid].add(waiting)
        try:
            seen, skip = revision, ordinal
            while True:
                waiting.news.clear()
                page = await self._journal.events(record.uid, seen, PAGE)
                if not page and record.revision > seen:  # `record` was read before: its last revision is pruned,
                    await self._read(record)  # or the memory deleted
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
                if not await _woken(waiting.news, self._quiet_s):
                    record = await self._read(record)
                    waiting.revision = max(waiting.revision, record.revision)
                    if record.revision == seen:
                        yield record.uid, seen, 0, ()
        finally:
            self._waiting[record.uid].discard(waiting)
            if not self._waiting[record.uid]:
                del self._waiting[record.uid]

    async def _read(self, record: MemoryRecord) -> MemoryRecord:
        """The memory as it is now. Raises MemoryNotFound."""
        current = await self._journal.get_memory(record.namespace, record.name)
        if current is None or current.uid != record.uid:
            raise MemoryNotFound(f"memory {record.namespace}/{record.name} was deleted")
        return current


def _compacted(oldest: int) -> CursorCompacted:
    return CursorCompacted(
        f"events up to revision {oldest} are no longer kept; list the fragments and watch from there",
        oldest_revision=oldest,
    )


async def _woken(news: asyncio.Event, quiet_s: float) -> bool:
    try:
        async with asyncio.timeout(quiet_s):
            await news.wait()
    except TimeoutError:
        return False
    return True
