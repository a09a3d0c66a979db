"""The write-behind of the vector index: one task that writes the outbox into the index, in one process at a time.

Rule 1. Rows are upserted, then flushed, then marked done: a crash in between only repeats them.
Rule 2. A round ends at the last row that the outbox had when it began: with steady writes the outbox is never empty.
Rows are marked done by id, and each is processed as the journal has it now, so their order does not matter. With a
shared journal the other processes follow the outbox (`IndexFollower`).
Rule 3. A lost index is filled again from the journal; meanwhile recalls report `degraded`.
Rule 4. After an open, the index is compared with the journal between rounds, one memory at a time: it may have lost
acknowledged writes (power loss), and may contain fragments that the journal lacks (a restored backup). Differences are
entered into the outbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import structlog

from memstream_server.engine.memory.producers import ProducerState
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Indexable, IndexEntry, Space

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import IndexEntry


log = structlog.get_logger(__name__)

UPSERT_ROWS = 2_048
"""Rows per upsert."""
FOLLOW_INTERVAL_S = 1.0
"""How often a process that does not lead checks the progress of the leader."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
POLL_INTERVAL_S = 0.05
"""How often a call that waits for the indexer checks its progress."""
RECONCILE_PAUSE_FACTOR = 4
"""Pause between comparisons of the index with the journal, as a multiple of the last one's duration."""
REBUILDING = "the vector index is being rebuilt"

_Key: TypeAlias = tuple[str, str]
"""(memory, fragment)"""
PAGE = 1_000
"""Memories read at once."""


class Indexer:
    """The engine starts and stops it, and notifies it of every commit."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry, space: Space
    ) -> None:
        self.degraded = "the vector index is starting"
        """Why the index is incomplete; empty if it is complete."""
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._registry = registry
        self._wanted: list[Space] = [space]
        """The space in force, and the next one while it is filled."""
        self._space_to_remove: Space | None = None
        self._removed = asyncio.Event()
        self._open_spaces: list[str] = []
        """Models of the spaces with an open collection."""
        self._waiting = 0
        self._since_s: float | None = None
        """When the oldest waiting row was entered; None if no row waits or another process entered it."""
        self._wake = asyncio.Event()
        self._full = asyncio.Event()
        self._open = False
        self._missing = False
        self._fills = False
        """Whether the open index is new or was empty, and is not known to have all rows."""
        self._reconciler = IndexReconciler(storage, models)
        self._leads = True
        """Whether this process wrote the index in the last cycle; before the first one the comparison is new anyway."""
        self._asked = self._dropped = self._rebuilt = 0
        """Counters of rebuilds: requested, of these with the old content dropped, and of these complete."""
        self._refilled = 0
        """Rows of the last refill: a small one may end before a caller reads the outbox."""
        self._written = 0
        """Rows done since the start, oldest first."""
        self.overlays = IndexOverlays(storage.journal, runtime, registry)
        self._follower = IndexFollower(storage.journal, registry)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, which opens the index."""
        self._task = asyncio.create_task(self._run())

    def report_lost(self) -> None:
        """A search found that the index is gone. The index reports it only once, to the first search."""
        self._missing = True
        self.degraded = REBUILDING
        self._wake_now()

    async def stop(self, grace_s: float) -> None:
        """Flush the waiting rows if that fits into the grace period; the rest stays in the outbox."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._open and not self.degraded and self._registry.ownership.leads:
            try:
                async with asyncio.timeout(grace_s):
                    await self._drain_outbox()
            except (TimeoutError, IndexUnavailable, JournalError) as error:
                log.info("outbox_not_flushed", error=error)

    def notify_rows(self, rows: int) -> None:
        """Called after every commit, with the number of rows that it added to the outbox."""
        self._waiting += rows
        if rows and self._since_s is None:
            self._since_s = self._runtime.clock.monotonic_s()
        self._wake.set()
        if self._waiting >= self._runtime.limits.flush_rows:
            self._full.set()

    async def rebuild_index(self, at: Callable[[int, int], Awaitable[None]]) -> None:
        """Empty the index and fill it again; returns when done. Concurrent calls share one rebuild.

        `at` is awaited with rows done and rows in total. Its errors end the wait, not the rebuild.
        """
        # A rebuild that has dropped the content before this call may have read rows that were wrong then: it does not
        # count. So what is asked, dropped and complete are numbers, not conditions.
        self._asked += 1
        ticket, done, total = self._asked, 0, 0
        while self._rebuilt < ticket:
            if self._dropped < ticket:
                self._wake_now()  # again: a finished round has reset the event
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._dropped >= ticket:
                left = await self._storage.journal.outbox_size()
                total = max(total, left, self._refilled)
                done = max(done, total - left)  # rows of new commits are in the outbox too
            await at(done, total)
        await at(total, total)

    async def erase_deleted(self, at: Callable[[], Awaitable[None]]) -> bool:
        """Remove deleted rows from the index's files, and repeat while the index is away; `at` as above. False: this
        index cannot, rebuild it."""
        while True:
            try:
                return await self._storage.index.erase_deleted()
            except IndexUnavailable as error:
                log.info("index_not_erased_yet", reason=error)
                await asyncio.sleep(RETRY_S)
                await at()

    # ---- two spaces
    def use_spaces(self, space: Space, beside: Space | None = None) -> None:
        """From the next round on, write the space in force and `beside`, if given."""
        self._wanted = [each for each in (space, beside) if each is not None]
        self._wake_now()

    async def remove_space(self, space: Space) -> None:
        """Drop the collection of a space that is not in use; returns when it is gone."""
        self._space_to_remove = space
        self._removed.clear()
        self._wake_now()
        await self._removed.wait()

    async def wait_until_open(self, space: Space, at: Callable[[], Awaitable[None]]) -> None:
        """Wait until the collection of that space is open. Awaits `at` meanwhile; its errors end the wait."""
        while space.model not in self._open_spaces:
            self._wake_now()
            await asyncio.sleep(POLL_INTERVAL_S)
            await at()

    async def wait_for_outbox(self, at: Callable[[], Awaitable[None]]) -> None:
        """Wait until the current rows of the outbox are indexed, whatever follows; `at` as above."""
        # Rows are done oldest first, so a count names the last one, though new rows follow without end.
        wanted = self._written + await self._storage.journal.outbox_size()
        while self._written < wanted:
            self._wake_now()
            await asyncio.sleep(POLL_INTERVAL_S)
            await at()

    async def _adopt_spaces(self) -> None:
        index = self._storage.index
        for space in self._wanted:
            if space.model not in self._open_spaces:
                await index.add_space(space)  # its missing rows are in the outbox, or will be
                self._open_spaces.append(space.model)
        if self._space_to_remove is not None:
            self._open_spaces = [model for model in self._open_spaces if model != self._space_to_remove.model]
            await index.remove_space(self._space_to_remove)
            self._space_to_remove, self._reconciler = None, IndexReconciler(self._storage, self._models)
            self._removed.set()

    async def wait_for_memory(self, uid: str, at: Callable[[], Awaitable[None]]) -> None:
        """Wait until the memory's current rows of the outbox are indexed and flushed; `at` as above."""
        journal = self._storage.journal
        _, last = (await journal.outbox_rows([uid])).get(uid, (0, 0))
        while 0 < (await journal.outbox_rows([uid])).get(uid, (0, 0))[0] <= last:
            self._wake_now()
            await asyncio.sleep(POLL_INTERVAL_S)
            await at()

    # ---- the task
    async def _run(self) -> None:
        pause = RETRY_S
        while True:
            try:
                if not self._open:
                    await self._open_index()
                await self._run_cycle()
                pause = RETRY_S
            except IndexLost as error:
                log.warning("index_lost", reason=error)
                self.degraded = f"{REBUILDING}: {error}"
                await self._handle_lost_index()
            except (IndexUnavailable, JournalError) as error:
                log.warning("index_unavailable", reason=error, retry_in_s=pause)
                self.degraded = str(error)
                pause = await self._retry_later(pause)
            except Exception as error:  # an unexpected error must not stop the indexer
                log.exception("index_failed", retry_in_s=pause)
                self.degraded = f"the vector index failed: {type(error).__name__}"
                pause = await self._retry_later(pause)

    async def _retry_later(self, pause: float) -> float:
        """Wait before a failed step is tried again. Returns the next pause."""
        await asyncio.sleep(pause)
        self._wake_now()
        return min(pause * 2, RETRY_MAX_S)

    def _wake_now(self) -> None:
        """Start the next round without new rows: a failed one has consumed its wake-up."""
        self._wake.set()
        self._full.set()

    async def _open_index(self) -> None:
        wanted = list(self._wanted)
        to_fill = await self._storage.index.open(*wanted)
        self._open_spaces = [space.model for space in wanted]
        self._fills = to_fill
        if to_fill:
            self.degraded = REBUILDING  # until the first cycle has filled it
            await self._refill_outbox()
        else:
            self.degraded = ""
        self._open = True
        self._reconciler = IndexReconciler(self._storage, self._models)
        self.notify_rows(await self._storage.journal.outbox_size())

    async def _refill_outbox(self) -> None:
        self._refilled = rows = await self._storage.journal.outbox_refill()
        log.info("index_refill", rows=rows)
        self.notify_rows(max(rows, 1))
        self._full.set()

    async def _handle_lost_index(self) -> None:
        try:
            await self._refill_outbox()
        except JournalError as error:
            log.warning("refill_failed", reason=error)
            await asyncio.sleep(RETRY_S)
            self._open = False  # the next open finds it lost again

    async def _run_cycle(self) -> None:
        await self.overlays.drop_settled()
        await self._wait_for_work()
        if self._missing:
            self._missing = False
            raise IndexLost("a search found that it is empty")
        await self._drop_if_asked()
        await self._adopt_spaces()
        dropped, led = self._dropped, self._leads
        self._leads = self._registry.ownership.leads
        if not self._leads:
            await self._follow_leader(dropped)
            return
        if not led:  # a leader without an index may have dropped rows
            self._reconciler = IndexReconciler(self._storage, self._models)
            if self._fills:
                await self._refill_outbox()
        await self._drain_outbox()
        if self._registry.ownership.shared:
            self.overlays.add_indexed(await self._follower.check_outbox())  # rows that another process wrote earlier
        self.degraded, self._fills = "", False
        self._rebuilt = dropped

    async def _follow_leader(self, dropped: int) -> None:
        """Another process writes the index: check how far it is."""
        self._wake.clear()
        self._full.clear()
        self._waiting = 0
        # needed again if this process becomes the leader
        self._reconciler = IndexReconciler(self._storage, self._models)
        self.overlays.add_indexed(await self._follower.check_outbox())
        if not (self.degraded or self._rebuilt < dropped) or await self._storage.journal.outbox_size():
            return
        if self._fills and await differs_from_journal(self._storage, self._models):
            return  # the leader has no index, and has dropped the rows
        self.degraded, self._fills = "", False
        self._rebuilt = dropped

    async def _drop_if_asked(self) -> None:
        """Start a requested rebuild. A crash after it leaves an empty index, which the next open fills."""
        if self._dropped < self._asked:
            asked = self._asked
            self.degraded = REBUILDING
            await self._storage.index.drop_all()
            self._dropped, self._open = asked, False
            await self._open_index()

    async def _wait_for_work(self) -> None:
        """Wait until rows have waited for the interval, until there are enough, or until overlay vectors can be
        dropped.
        """
        limits = self._runtime.limits
        if self._registry.ownership.shared:  # other processes add rows too, without waking this one
            longest_s = limits.flush_interval_s if self._registry.ownership.leads else FOLLOW_INTERVAL_S
            await self._wait_and_reconcile(self._full, min(limits.flush_interval_s, longest_s))
            return
        due = self.overlays.next_due_s()
        if not self._wake.is_set():
            await self._wait_and_reconcile(self._wake, due)
        if self._wake.is_set():  # rows that came during a round have waited since then
            waited_s = 0.0 if self._since_s is None else self._now_s() - self._since_s
            await self._wait_and_reconcile(self._full, max(0.0, limits.flush_interval_s - waited_s))

    async def _wait_and_reconcile(self, event: asyncio.Event, timeout_s: float | None) -> None:
        """Wait for the event; meanwhile compare the index with the journal if that is not done."""
        now_s = asyncio.get_running_loop().time  # the timeout runs on this clock, whatever clock the engine has
        until_s = math.inf if timeout_s is None else now_s() + timeout_s
        while not event.is_set() and (left_s := until_s - now_s()) > 0:
            pause_s = left_s
            if self._registry.ownership.leads and not self._reconciler.done:
                began_s = now_s()
                entries = await self._reconciler.reconcile_next()
                if entries:
                    self.notify_rows(entries)
                pause_s = min(left_s, RECONCILE_PAUSE_FACTOR * (now_s() - began_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if pause_s == math.inf else pause_s):
                    await event.wait()

    async def _drain_outbox(self) -> None:
        self._wake.clear()
        self._full.clear()
        self._waiting = 0
        since_s, began_s = self._since_s, self._runtime.clock.monotonic_s()
        reached = [
            (state, state.stored) for actor in self._registry.list_actors() for state in actor.producers.list_all()
        ]
        last = await self._storage.journal.outbox_last()  # with steady writes the outbox is never found empty
        while entries := await self._storage.journal.read_outbox(self._runtime.limits.flush_rows):
            await self._adopt_spaces()
            await self._write_entries(entries)
            await self._storage.index.flush()
            await self._storage.journal.outbox_done([entry.id for entry, _ in entries])
            self.overlays.add_flushed([entry for entry, _ in entries])
            self._written += len(entries)
            self._runtime.metrics.set_outbox(await self._storage.journal.outbox_size())
            if entries[-1][0].id >= last:
                break  # later rows wait for their own interval
        mark_indexed(reached)
        if since_s is not None:
            self._runtime.metrics.count_indexed(self._runtime.clock.monotonic_s() - since_s)
        self._since_s = began_s if self._waiting else None

    async def _write_entries(self, entries: Sequence[tuple[IndexEntry, Indexable | None]]) -> None:
        # By memory and fragment: an imported memory has the fragment ids of its export.
        latest = {(entry.memory, entry.fragment): found for entry, found in entries}
        for model in self._open_spaces:
            vectors = await self._read_vectors(latest, model)
            gone: dict[str, list[str]] = defaultdict(list)
            for memory, id_ in latest:
                if (memory, id_) not in vectors:
                    gone[memory].append(id_)
            keys = sorted(vectors)  # groups the rows of a memory
            for start in range(0, len(keys), UPSERT_ROWS):
                slice_ = keys[start : start + UPSERT_ROWS]
                points = [Point(*key, np.frombuffer(vectors[key], dtype="<f4")) for key in slice_]
                await self._storage.index.upsert(points, model)
            for memory, ids in gone.items():
                await self._storage.index.delete(memory, ids, model)

    async def _read_vectors(self, latest: Mapping[_Key, Indexable | None], model: str) -> dict[_Key, bytes]:
        """The vectors, in the space of `model`, of the fragments that belong in the index."""
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

    def _now_s(self) -> float:
        return self._runtime.clock.monotonic_s()


class IndexReconciler:
    """Compares all memories, one after another. Only the process that writes the index uses it, between its writes."""

    def __init__(self, storage: Storage, models: EngineModels) -> None:
        self.done = False
        self._storage = storage
        self._models = models
        self._uids: AsyncIterator[str] | None = None
        self._made = 0

    async def reconcile_next(self) -> int:
        """Compare the next memory; returns how many entries it needed. An idle index is not compared.

        After IndexUnavailable or JournalError the next call starts with the first memory.
        """
        if self._storage.index.is_idle:
            self.done = True
            return 0
        uids, self._uids = self._uids or _list_uids(self._storage), None
        uid = await anext(uids, None)
        if uid is None:
            self.done = True
            if self._made:
                log.warning("index_reconciled", entries=self._made)
            return 0
        entries = await _find_differences(uid, self._storage, self._models)
        if entries:
            await self._storage.journal.outbox_enter(entries)
            self._made += len(entries)
        self._uids = uids
        return len(entries)


async def differs_from_journal(storage: Storage, models: EngineModels) -> bool:
    """Whether the index of some memory lacks fragments, or has others. Changes nothing; any process may call it."""
    async for uid in _list_uids(storage):
        if await _find_differences(uid, storage, models):
            return True
    return False


async def _find_differences(uid: str, storage: Storage, models: EngineModels) -> list[IndexEntry]:
    journal = storage.journal
    there = set(await storage.index.list_ids(uid, models.embedding_model.name))
    wanted = set(await journal.list_indexable(uid))  # after the index, so that new fragments do not appear orphaned
    different = there ^ wanted
    if different:  # some may be in the outbox
        different -= await journal.outbox_fragments(uid)
    # the indexer finds out whether each is missing or orphaned
    return [IndexEntry(uid, id_) for id_ in sorted(different)]


async def _list_uids(storage: Storage) -> AsyncIterator[str]:
    after_namespace = ""
    while namespaces := await storage.journal.list_namespaces(after_namespace, PAGE):
        for namespace, _ in namespaces:
            after = ""
            while records := await storage.journal.list_memories(namespace, after, PAGE):
                for record in records:
                    yield record.uid
                after = records[-1].name
        after_namespace = namespaces[-1][0]


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """The stored numbers at one check, and the memory's last outbox row then."""

    reached: list[tuple[ProducerState, int]]
    fresh: list[str]
    last: int


class IndexFollower:
    """Follows the index for the memories active in this process."""

    def __init__(self, journal: Journal, registry: Registry) -> None:
        self._journal = journal
        self._registry = registry
        self._marks: dict[Actor, _Mark] = {}

    async def check_outbox(self) -> dict[str, list[str]]:
        """Mark what is indexed. Returns the newly indexed fragments by memory."""
        waiting = [actor for actor in self._registry.list_actors() if actor in self._marks or _is_behind(actor)]
        seen = {actor: _Mark(_stored_numbers(actor), actor.working.list_unsettled(), 0) for actor in waiting}
        rows = await self._journal.outbox_rows([actor.uid for actor in waiting]) if waiting else {}
        flushed: dict[str, list[str]] = {}
        marks: dict[Actor, _Mark] = {}
        for actor in waiting:
            mark, (first, last) = self._marks.get(actor), rows.get(actor.uid, (0, 0))
            if not last:
                mark = seen[actor]
            elif mark is None or first > mark.last:
                marks[actor] = _Mark(seen[actor].reached, seen[actor].fresh, last)
            else:
                marks[actor], mark = mark, None
            if mark is not None:
                mark_indexed(mark.reached)
                flushed[actor.uid] = mark.fresh
        self._marks = marks
        return flushed


def _stored_numbers(actor: Actor) -> list[tuple[ProducerState, int]]:
    return [(state, state.stored) for state in actor.producers.list_all()]


def _is_behind(actor: Actor) -> bool:
    return bool(actor.working.list_unsettled()) or any(
        state.indexed < state.stored for state in actor.producers.list_all()
    )


def mark_indexed(reached: Sequence[tuple[ProducerState, int]]) -> None:
    """The outbox was empty after these numbers were stored: they are indexed, or need no index."""
    for state, stored in reached:
        if stored > state.indexed:
            state.indexed = stored
            state.notify_session()


class IndexOverlays:
    """Recently flushed fragments of all memories, oldest flush first."""

    def __init__(self, journal: Journal, runtime: Runtime, registry: Registry) -> None:
        self._journal = journal
        self._runtime = runtime
        self._registry = registry
        self._flushed: deque[tuple[float, dict[str, list[str]]]] = deque()
        """(when it may be dropped, fragments by memory)"""

    def list_unsettled(self, uid: str) -> list[str]:
        """Fragments of a memory that were flushed so recently that the index may not show them yet."""
        return [id_ for _, flushed in self._flushed for id_ in flushed.get(uid, ())]

    def next_due_s(self) -> float | None:
        """Seconds until the next vectors may be dropped; None if there are none."""
        return max(0.0, self._flushed[0][0] - self._now_s()) if self._flushed else None

    def add_flushed(self, entries: Sequence[IndexEntry]) -> None:
        """Start the time of fragments that were flushed just now."""
        by_memory: dict[str, list[str]] = defaultdict(list)
        for entry in entries:
            by_memory[entry.memory].append(entry.fragment)
        self._add(by_memory)

    def add_indexed(self, there: Mapping[str, Sequence[str]]) -> None:
        """Start the time of fragments that another process has indexed; each counts from its first sighting."""
        new = {uid: set(ids).difference(self.list_unsettled(uid)) for uid, ids in there.items()}
        self._add({uid: sorted(ids) for uid, ids in new.items() if ids})

    def _add(self, flushed: Mapping[str, list[str]]) -> None:
        if flushed:
            self._flushed.append((self._now_s() + self._runtime.limits.fresh_s, dict(flushed)))

    async def drop_settled(self) -> None:
        """Drop vectors from the overlays after `fresh_s`, except those of fragments that changed since."""
        while self._flushed and self._flushed[0][0] <= self._now_s():
            flushed = self._flushed[0][1]
            for memory in list(flushed):
                actor, again = self._registry.peek(memory), set[str]()
                if actor is not None and actor.working.fresh:
                    again = await self._journal.outbox_fragments(memory)
                ids = flushed.pop(memory)
                if actor is not None:
                    actor.working.drop_flushed(set(ids) - again - set(self.list_unsettled(memory)))
            self._flushed.popleft()

    def _now_s(self) -> float:
        return self._runtime.clock.monotonic_s()
