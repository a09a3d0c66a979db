"""The write-behind of the vector index: one task per process that brings the outbox into the index.

Rule 1. Rows are upserted, then flushed, then marked done: a crash in between only repeats them.
Rule 2. Entries are done by their ids, and each is worked on as the journal has it now, so order does not matter.
Rule 3. An index that is lost is filled again from the journal; meanwhile recall says what is degraded.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog

from memstream_server.engine.producers import ProducerState
from memstream_server.engine.reconciling import reconcile
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal import IndexEntry, JournalError, Row, Space

if TYPE_CHECKING:
    from memstream_server.engine.dependencies import Dependencies
    from memstream_server.engine.registry import Registry

log = structlog.get_logger(__name__)

UPSERT_ROWS = 2_048
"""Rows of one upsert."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
LOOK_S = 0.2
"""How often whoever waits for a rebuild looks how far it is."""
REBUILDING = "the vector index is being rebuilt"


class Indexer:
    """Started and stopped by the engine; told of every commit."""

    def __init__(self, dependencies: Dependencies, registry: Registry, space: Space) -> None:
        self.degraded = "the vector index is starting"
        """Why the index does not answer; empty when it does."""
        self._dependencies = dependencies
        self._registry = registry
        self._space = space
        self._waiting = 0
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._open = False
        self._missing = False
        self._reconciled = False
        self._asked = self._dropped = self._rebuilt = 0
        """Rebuilds asked for, of these those whose old content is gone, and of these those that are complete."""
        self._settling: deque[tuple[float, dict[str, list[str]]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; the index is opened in the background."""
        self._task = asyncio.create_task(self._run())

    def lost(self) -> None:
        """Told when a search found the index lost: it says so only once, to whoever asks first."""
        self._missing = True
        self.degraded = REBUILDING
        self._hurry()

    async def stop(self, grace_s: float) -> None:
        """Bring what waits into the index if that is quick; the outbox keeps what is left."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._open and not self.degraded:
            try:
                async with asyncio.timeout(grace_s):
                    await self._drain()
            except (TimeoutError, IndexUnavailable, JournalError) as error:
                log.info("outbox_left", reason=str(error) or "no time left")

    def entered(self, rows: int) -> None:
        """Told after every commit, with the rows it entered into the outbox."""
        self._waiting += rows
        self._wake.set()
        if self._waiting >= self._dependencies.limits.flush_rows:
            self._full.set()

    async def rebuild(self, at: Callable[[int, int], Awaitable[None]]) -> None:
        """Drop all that the index holds and fill it again; returns when that is done, by one rebuild for all who wait.

        `at` is told rows done and rows to do. What it raises ends the waiting, not a rebuild that was begun.
        """
        self._asked += 1
        ticket, total = self._asked, 0
        self._hurry()
        while self._rebuilt < ticket:
            await asyncio.sleep(LOOK_S)
            left = await self._dependencies.journal.outbox_size() if self._dropped >= ticket else 0
            total = max(total, left)
            await at(total - left, total)
        await at(total, total)

    # ---- the task
    async def _run(self) -> None:
        pause = RETRY_S
        while True:
            try:
                if not self._open:
                    await self._begin()
                await self._cycle()
                pause = RETRY_S
            except IndexLost as error:
                log.warning("index_lost", reason=str(error))
                self.degraded = f"{REBUILDING}: {error}"
                await self._lost()
            except (IndexUnavailable, JournalError) as error:
                log.warning("index_unavailable", reason=str(error), retry_in_s=pause)
                self.degraded = str(error)
                pause = await self._again(pause)
            except Exception as error:  # an engine's own error, or a mistake: the outbox must not wait for ever
                log.exception("index_failed", retry_in_s=pause)
                self.degraded = f"the vector index failed: {type(error).__name__}"
                pause = await self._again(pause)

    async def _again(self, pause: float) -> float:
        """Wait before a failed step is tried again. Returns the next pause."""
        await asyncio.sleep(pause)
        self._hurry()
        return min(pause * 2, RETRY_MAX_S)

    def _hurry(self) -> None:
        """What is left to do waits for no new rows: a write that failed has taken its wake-up with it."""
        self._wake.set()
        self._full.set()

    async def _begin(self) -> None:
        if await self._dependencies.index.open(self._space):
            self.degraded = REBUILDING  # until the first cycle has filled it
            await self._refill()
        else:
            self.degraded = ""
        self._open = True
        self._reconciled = False
        self.entered(await self._dependencies.journal.outbox_size())

    async def _refill(self) -> None:
        rows = await self._dependencies.journal.outbox_refill()
        log.info("index_refill", rows=rows)
        self.entered(max(rows, 1))
        self._full.set()

    async def _lost(self) -> None:
        try:
            await self._refill()
        except JournalError as error:
            log.warning("refill_failed", reason=str(error))
            await asyncio.sleep(RETRY_S)
            self._open = False  # open again, and find it lost again

    async def _cycle(self) -> None:
        self._settle()
        await self._pause()
        if self._missing:
            self._missing = False
            raise IndexLost("a search found it empty")
        await self._drop()
        dropped = self._dropped
        await self._drain()
        self.degraded = ""
        self._rebuilt = dropped
        if not self._reconciled:
            await self._reconcile()

    async def _drop(self) -> None:
        """What a rebuild begins with. A crash after it finds the index empty, and fills it too."""
        if self._dropped < self._asked:
            asked = self._asked
            self.degraded = REBUILDING
            await self._dependencies.index.drop()
            self._dropped, self._open = asked, False
            await self._begin()

    async def _reconcile(self) -> None:
        """Once after every opening, when the outbox is empty: then what differs is not just on its way."""
        entries = await reconcile(self._dependencies)
        self._reconciled = True
        if entries:
            log.warning("index_reconciled", entries=entries)
            self.entered(entries)

    async def _pause(self) -> None:
        """Until rows have waited for the interval, enough of them are there, or an overlay is due to settle."""
        limits = self._dependencies.limits
        due = max(0.0, self._settling[0][0] - self._now()) if self._settling else None
        if not self._wake.is_set() and self._reconciled:
            await _wait(self._wake, due)
        if self._wake.is_set():
            await _wait(self._full, limits.flush_interval_s)

    async def _drain(self) -> None:
        dependencies = self._dependencies
        self._wake.clear()
        self._full.clear()
        self._waiting = 0
        reached = [(state, state.stored) for actor in self._registry.actors() for state in actor.producers()]
        while entries := await dependencies.journal.outbox(dependencies.limits.flush_rows):
            await self._write(entries)
            await dependencies.index.flush()
            await dependencies.journal.outbox_done([entry.id for entry, _ in entries])
            self._flushed(entries)
            dependencies.metrics.outbox(await dependencies.journal.outbox_size())
        _indexed(reached)

    async def _write(self, entries: Sequence[tuple[IndexEntry, Row | None]]) -> None:
        latest = {entry.fragment: (entry, row) for entry, row in entries}
        points: list[Point] = []
        gone: dict[str, list[str]] = defaultdict(list)
        for entry, row in latest.values():
            if row is None or row.vector is None:
                gone[entry.memory].append(entry.fragment)
            elif row.fragment.model == self._space.model:
                points.append(Point(entry.memory, entry.fragment, np.frombuffer(row.vector, dtype="<f4")))
        points.sort(key=lambda point: point.memory)
        for start in range(0, len(points), UPSERT_ROWS):
            await self._dependencies.index.upsert(points[start : start + UPSERT_ROWS])
        for memory, ids in gone.items():
            await self._dependencies.index.delete(memory, ids)

    def _flushed(self, entries: Sequence[tuple[IndexEntry, Row | None]]) -> None:
        by_memory: dict[str, list[str]] = defaultdict(list)
        for entry, _ in entries:
            by_memory[entry.memory].append(entry.fragment)
        self._settling.append((self._now() + self._dependencies.limits.fresh_s, dict(by_memory)))

    def _settle(self) -> None:
        """Flushed long enough ago: the overlay lets go."""
        while self._settling and self._settling[0][0] <= self._now():
            for memory, ids in self._settling.popleft()[1].items():
                actor = self._registry.peek(memory)
                if actor is not None:
                    actor.working.flushed(ids)

    def _now(self) -> float:
        return self._dependencies.clock.monotonic_s()


def _indexed(reached: Sequence[tuple[ProducerState, int]]) -> None:
    """The outbox was empty after these numbers were stored: they are indexed, or need no index."""
    for state, stored in reached:
        if stored > state.indexed:
            state.indexed = stored
            state.tell()


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
