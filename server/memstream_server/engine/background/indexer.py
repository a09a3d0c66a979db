"""The write-behind of the vector index: one task that brings the outbox into the index, at one process at a time.

Rule 1. Rows are upserted, then flushed, then marked done: a crash in between only repeats them.
Rule 2. A round ends with what was in the outbox when it began, for with steady writes there is always more. Entries are
done by their ids, and each is worked on as the journal has it now, so order does not matter. Where several processes
share the journal the others follow the outbox (following.py).
Rule 3. An index that is lost is filled again from the journal; meanwhile recall says what is degraded.
Rule 4. Between rounds, and never for longer than one memory takes, an index just opened is compared with the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import structlog

from memstream_server.engine.background.index_follower import Following, indexed
from memstream_server.engine.background.index_reconciler import Reconciliation
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Indexable, IndexEntry
from memstream_server.ports.journal.spaces import Space

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

UPSERT_ROWS = 2_048
"""Rows of one upsert."""
FOLLOW_S = 1.0
"""How often a process that does not lead looks how far the one that does has come."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
LOOK_S = 0.2
"""How often whoever waits for a rebuild looks how far it is."""
REST = 4
"""Between comparisons of the index with the journal, in times that the last one took: there is no hurry."""
REBUILDING = "the vector index is being rebuilt"

_Key: TypeAlias = tuple[str, str]
"""Memory and fragment."""


class Indexer:
    """Started and stopped by the engine; told of every commit."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry, space: Space
    ) -> None:
        self.degraded = "the vector index is starting"
        """Why the index does not answer; empty when it does."""
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._wanted: list[Space] = [space]
        """The space in force, and another that is to be filled, too."""
        self._doomed: Space | None = None
        self._removed = asyncio.Event()
        self._held: list[str] = []
        """Names of the spaces whose collections are open."""
        self._waiting = 0
        self._since_s: float | None = None
        """Since when the oldest of those that wait have waited; None where none does, or nobody here entered it."""
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._open = False
        self._missing = False
        self._reconciliation = Reconciliation(storage, models)
        self._asked = self._dropped = self._rebuilt = 0
        """Rebuilds asked for, of these those whose old content is gone, and of these those that are complete."""
        self._refilled = 0
        """Rows that the last filling began with: a small one is over before anyone looks at the outbox."""
        self._written = 0
        """Entries done since the start, the oldest first."""
        self._settling: deque[tuple[float, dict[str, list[str]]]] = deque()
        self._following = Following(storage.journal, registry)
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
        if self._open and not self.degraded and self._registry.ownership.leads:
            try:
                async with asyncio.timeout(grace_s):
                    await self._drain()
            except (TimeoutError, IndexUnavailable, JournalError) as error:
                log.info("outbox_left", error=error)

    def entered(self, rows: int) -> None:
        """Told after every commit, with the rows it entered into the outbox."""
        self._waiting += rows
        if rows and self._since_s is None:
            self._since_s = self._runtime.clock.monotonic_s()
        self._wake.set()
        if self._waiting >= self._runtime.limits.flush_rows:
            self._full.set()

    async def rebuild(self, at: Callable[[int, int], Awaitable[None]]) -> None:
        """Drop all that the index holds and fill it again; returns when that is done, by one rebuild for all who wait.

        `at` is told rows done and rows to do. What it raises ends the waiting, not a rebuild that was begun.
        """
        self._asked += 1
        ticket, done, total = self._asked, 0, 0
        while self._rebuilt < ticket:
            if self._dropped < ticket:
                self._hurry()  # again: emptying the outbox takes what was said before it as done
            await asyncio.sleep(LOOK_S)
            if self._dropped >= ticket:
                left = await self._storage.journal.outbox_size()
                total = max(total, left, self._refilled)
                done = max(done, total - left)  # what is written meanwhile waits there, too
            await at(done, total)
        await at(total, total)

    # ---- two spaces
    def keep(self, space: Space, beside: Space | None = None) -> None:
        """From the next round on: the space in force, and another whose collection is to have everything, too."""
        self._wanted = [each for each in (space, beside) if each is not None]
        self._hurry()

    async def remove(self, space: Space) -> None:
        """Drop the collection of a space that is not kept; returns when it is gone."""
        self._doomed = space
        self._removed.clear()
        self._hurry()
        await self._removed.wait()

    async def opened(self, space: Space, at: Callable[[], Awaitable[None]]) -> None:
        """Waits until that space's collection is written, too. What `at` raises, asked meanwhile, ends it."""
        while space.model not in self._held:
            self._hurry()
            await asyncio.sleep(LOOK_S)
            await at()

    async def abreast(self, at: Callable[[], Awaitable[None]]) -> None:
        """Waits until the collections have what is in the outbox now, whatever comes after it; `at` as above."""
        wanted = self._written + await self._storage.journal.outbox_size()
        while self._written < wanted:
            self._hurry()
            await asyncio.sleep(LOOK_S)
            await at()

    def settling(self, uid: str) -> list[str]:
        """What of a memory was flushed so lately that the index's readers may not see it."""
        return [id_ for _, flushed in self._settling for id_ in flushed.get(uid, ())]

    async def _adopt(self) -> None:
        index = self._storage.index
        for space in self._wanted:
            if space.model not in self._held:
                await index.add_space(space)  # what it lacks waits in the outbox, or is about to
                self._held.append(space.model)
        if self._doomed is not None:
            self._held = [model for model in self._held if model != self._doomed.model]
            await index.remove_space(self._doomed)
            self._doomed, self._reconciliation = None, Reconciliation(self._storage, self._models)
            self._removed.set()

    async def caught_up(self, uid: str, at: Callable[[], Awaitable[None]]) -> None:
        """Waits until all of a memory that is in the outbox now is in the index, flushed; `at` as above."""
        journal = self._storage.journal
        _, last = (await journal.outbox_rows([uid])).get(uid, (0, 0))
        while 0 < (await journal.outbox_rows([uid])).get(uid, (0, 0))[0] <= last:
            self._hurry()
            await asyncio.sleep(LOOK_S)
            await at()

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
                log.warning("index_lost", reason=error)
                self.degraded = f"{REBUILDING}: {error}"
                await self._lost()
            except (IndexUnavailable, JournalError) as error:
                log.warning("index_unavailable", reason=error, retry_in_s=pause)
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
        wanted = list(self._wanted)
        to_fill = await self._storage.index.open(*wanted)
        self._held = [space.model for space in wanted]
        if to_fill:
            self.degraded = REBUILDING  # until the first cycle has filled it
            await self._refill()
        else:
            self.degraded = ""
        self._open = True
        self._reconciliation = Reconciliation(self._storage, self._models)
        self.entered(await self._storage.journal.outbox_size())

    async def _refill(self) -> None:
        self._refilled = rows = await self._storage.journal.outbox_refill()
        log.info("index_refill", rows=rows)
        self.entered(max(rows, 1))
        self._full.set()

    async def _lost(self) -> None:
        try:
            await self._refill()
        except JournalError as error:
            log.warning("refill_failed", reason=error)
            await asyncio.sleep(RETRY_S)
            self._open = False  # open again, and find it lost again

    async def _cycle(self) -> None:
        await self._settle()
        await self._pause()
        if self._missing:
            self._missing = False
            raise IndexLost("a search found it empty")
        await self._drop()
        await self._adopt()
        dropped = self._dropped
        if not self._registry.ownership.leads:
            await self._follow(dropped)
            return
        await self._drain()
        if self._registry.ownership.shared:
            self._notice(await self._following.look())  # what another process brought in before
        self.degraded = ""
        self._rebuilt = dropped

    async def _follow(self, dropped: int) -> None:
        """Another process brings the outbox into the index: see how far it has come."""
        self._wake.clear()
        self._full.clear()
        self._waiting = 0
        self._reconciliation = Reconciliation(self._storage, self._models)  # to be done if this process leads one day
        self._notice(await self._following.look())
        if (self.degraded or self._rebuilt < dropped) and not await self._storage.journal.outbox_size():
            self.degraded = ""
            self._rebuilt = dropped

    async def _drop(self) -> None:
        """What a rebuild begins with. A crash after it finds the index empty, and fills it too."""
        if self._dropped < self._asked:
            asked = self._asked
            self.degraded = REBUILDING
            await self._storage.index.drop_all()
            self._dropped, self._open = asked, False
            await self._begin()

    async def _pause(self) -> None:
        """Until rows have waited for the interval, enough of them are there, or an overlay is due to settle."""
        limits = self._runtime.limits
        if self._registry.ownership.shared:  # rows come from elsewhere, too, and wake nobody here
            longest_s = limits.flush_interval_s if self._registry.ownership.leads else FOLLOW_S
            await self._wait(self._full, min(limits.flush_interval_s, longest_s))
            return
        due = max(0.0, self._settling[0][0] - self._now()) if self._settling else None
        if not self._wake.is_set():
            await self._wait(self._wake, due)
        if self._wake.is_set():  # what came while a round was under way has waited since then
            waited_s = 0.0 if self._since_s is None else self._now() - self._since_s
            await self._wait(self._full, max(0.0, limits.flush_interval_s - waited_s))

    async def _wait(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """For the event; meanwhile the index is compared with the journal, if that is still to be done."""
        now_s = asyncio.get_running_loop().time  # what is waited for passes by this one, whatever clock the engine has
        until_s = math.inf if timeout_s is None else now_s() + timeout_s
        while not event.is_set() and (left_s := until_s - now_s()) > 0:
            pause_s = left_s
            if self._registry.ownership.leads and not self._reconciliation.done:
                began_s = now_s()
                entries = await self._reconciliation.step()
                if entries:
                    self.entered(entries)
                pause_s = min(left_s, REST * (now_s() - began_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if pause_s == math.inf else pause_s):
                    await event.wait()

    async def _drain(self) -> None:
        self._wake.clear()
        self._full.clear()
        self._waiting = 0
        since_s, began_s = self._since_s, self._runtime.clock.monotonic_s()
        reached = [(state, state.stored) for actor in self._registry.actors() for state in actor.receiving.producers()]
        last = await self._storage.journal.outbox_last()  # with steady writes the outbox is never found empty
        while entries := await self._storage.journal.read_outbox(self._runtime.limits.flush_rows):
            await self._adopt()
            await self._write(entries)
            await self._storage.index.flush()
            await self._storage.journal.outbox_done([entry.id for entry, _ in entries])
            self._flushed(entries)
            self._written += len(entries)
            self._runtime.metrics.set_outbox_depth(await self._storage.journal.outbox_size())
            if entries[-1][0].id >= last:
                break  # what came meanwhile waits for its own time
        indexed(reached)
        if since_s is not None:
            self._runtime.metrics.time_indexing(self._runtime.clock.monotonic_s() - since_s)
        self._since_s = began_s if self._waiting else None

    async def _write(self, entries: Sequence[tuple[IndexEntry, Indexable | None]]) -> None:
        # By both: an imported memory has the ids of the one that was exported.
        latest = {(entry.memory, entry.fragment): found for entry, found in entries}
        for model in self._held:
            vectors = await self._vectors(latest, model)
            gone: dict[str, list[str]] = defaultdict(list)
            for memory, id_ in latest:
                if (memory, id_) not in vectors:
                    gone[memory].append(id_)
            keys = sorted(vectors)  # a memory's together
            for start in range(0, len(keys), UPSERT_ROWS):
                slice_ = keys[start : start + UPSERT_ROWS]
                points = [Point(*key, np.frombuffer(vectors[key], dtype="<f4")) for key in slice_]
                await self._storage.index.upsert(points, model)
            for memory, ids in gone.items():
                await self._storage.index.delete(memory, ids, model)

    async def _vectors(self, latest: Mapping[_Key, Indexable | None], model: str) -> dict[_Key, bytes]:
        """Of what belongs in the index: its vectors in that space."""
        found: dict[_Key, bytes] = {}
        elsewhere: dict[str, list[str]] = defaultdict(list)
        for (memory, id_), there in latest.items():
            if there is not None and there.vector is not None and there.model == model:
                found[memory, id_] = there.vector
            elif there is not None:
                elsewhere[memory].append(id_)
        for memory, ids in elsewhere.items():
            vectors = await self._storage.journal.get_vectors(memory, model, ids)
            found |= {(memory, id_): vector for id_, vector in vectors.items()}
        return found

    def _flushed(self, entries: Sequence[tuple[IndexEntry, Indexable | None]]) -> None:
        by_memory: dict[str, list[str]] = defaultdict(list)
        for entry, _ in entries:
            by_memory[entry.memory].append(entry.fragment)
        self._settles(by_memory)

    def _settles(self, flushed: dict[str, list[str]]) -> None:
        if flushed:
            self._settling.append((self._now() + self._runtime.limits.fresh_s, dict(flushed)))

    def _notice(self, there: Mapping[str, Sequence[str]]) -> None:
        """What every look finds in the index until the overlay lets go of it; its time is counted from the first."""
        new = {uid: set(ids).difference(self.settling(uid)) for uid, ids in there.items()}
        self._settles({uid: sorted(ids) for uid, ids in new.items() if ids})

    async def _settle(self) -> None:
        """Flushed long enough ago: the overlay lets go, but of what has changed since, whose own time is to come."""
        while self._settling and self._settling[0][0] <= self._now():
            flushed = self._settling[0][1]
            for memory in list(flushed):
                actor, again = self._registry.peek(memory), set[str]()
                if actor is not None and actor.working.fresh:
                    again = await self._storage.journal.outbox_fragments(memory)
                ids = flushed.pop(memory)
                if actor is not None:
                    actor.working.flushed(set(ids) - again - set(self.settling(memory)))
            self._settling.popleft()

    def _now(self) -> float:
        return self._runtime.clock.monotonic_s()
