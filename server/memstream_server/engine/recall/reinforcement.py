"""Reinforcement: after an answer has gone out, what it found is offered to short-term and counted as accessed.

The offer runs in the background and may be lost with the process: nothing was acknowledged about it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

import numpy as np
import structlog

from memstream_server.core.filters import visible
from memstream_server.core.tiers import Recollected, recollect
from memstream_server.core.values import Fragment, Vector
from memstream_server.engine.errors import EngineError
from memstream_server.engine.memory.decide import effective_policy, jobs_of
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import compares_content, enhances_short_term
from memstream_server.engine.requests import Query, RecallAnswer
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.writing import Access, Accesses
from memstream_server.ports.models import ModelError

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.embedding_spaces import Embedding

log = structlog.get_logger(__name__)

CONTENT_VECTORS_BYTES_MAX = 32 << 20
"""Content vectors of recalled fragments kept, of all memories, so that a model is rarely asked twice for one text."""
OFFERS_MAX = 64
"""Offers waiting at once; past it the oldest waiting are let go, so that reading never becomes a backlog."""
WRITTEN_TOGETHER = 64
"""Fragments whose accesses are one write, of one memory or of several: each may be a page of the journal, and whoever
observes waits behind them."""


class Reinforcement:
    """Access statistics and offers of all memories. One background task each; started and stopped by the engine."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._accesses: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        """By memory and the epoch at which this process has it."""
        self._offers: asyncio.Queue[tuple[Actor, tuple[Fragment, ...]]] = asyncio.Queue(OFFERS_MAX)
        self._content: OrderedDict[tuple[str, str, int, str], Vector] = OrderedDict()
        """By memory, fragment, its version and the space: an imported memory has the ids of the one exported."""
        self._told: asyncio.Queue[tuple[Actor, Query, RecallAnswer]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops = (self._told_loop(), self._offer_loop(), self._access_loop())
        self._tasks = [asyncio.create_task(each) for each in loops]

    async def stop(self) -> None:
        """Drop waiting offers, write the accesses counted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._told.empty():
            self._recalled(*self._told.get_nowait())
        await self._write_accesses()

    def recalled(self, actor: Actor, query: Query, answer: RecallAnswer) -> None:
        """Told once an answer is complete. What follows from it is done once it is on its way to whoever asked.

        That is the turn of the event loop after the next: before anything that whoever asked can do with the answer.
        """
        self._told.put_nowait((actor, query, answer))

    async def _told_loop(self) -> None:
        while True:
            await self._next_told()  # whose actor nobody holds once it returns

    async def _next_told(self) -> None:
        told = await self._told.get()
        await asyncio.sleep(0)  # in this turn the answer is sent
        try:
            self._recalled(*told)
        except Exception:  # one answer that breaks must not end all reinforcement
            log.exception("reinforcement_broke")
        finally:
            self._told.task_done()

    def _recalled(self, actor: Actor, query: Query, answer: RecallAnswer) -> None:
        fragments = tuple(found.fragment for found in answer.recollections)
        now_us = self._runtime.clock.now_us()
        working = actor.working
        working.recalled(query.session, fragments, now_us)
        self.accessed(actor, [fragment.id for fragment in fragments], now_us)
        policy = working.record.policy
        wanted = policy.recall.reinforce if query.reinforce is None else query.reinforce
        if (
            wanted
            and fragments
            and enhances_short_term(working.record.kind, working.record.policy)
            and working.state.short_term
        ):
            self.offer(actor, fragments)

    def offer(self, actor: Actor, fragments: Sequence[Fragment]) -> None:
        """Let these enhance what short-term holds, soon. The oldest waiting offer leaves when too many wait."""
        if self._offers.full():
            self._offers.get_nowait()
            self._offers.task_done()
        self._offers.put_nowait((actor, tuple(fragments)))

    def accessed(self, actor: Actor, ids: Sequence[str], now_us: int) -> None:
        """Count an access of each, in RAM now and in the journal soon."""
        counts = self._accesses.setdefault((actor.uid, actor.working.record.epoch), {})
        for id_ in ids:
            count, _ = counts.get(id_, (0, 0))
            counts[id_] = (count + 1, now_us)
        actor.working.columns.touch(actor.working.columns.slots(ids), now_us)
        actor.working.contents.accessed(ids, now_us)

    # ---- offers
    async def _offer_loop(self) -> None:
        while True:
            await self._next_offer()

    async def _next_offer(self) -> None:
        actor, fragments = await self._offers.get()
        try:
            await self._offer(actor, fragments)
        except (EngineError, ModelError, JournalError) as error:
            log.info("reinforcement_skipped", reason=error)
        except Exception:  # one offer that breaks must not end all reinforcement
            log.exception("reinforcement_broke")
        finally:
            self._offers.task_done()

    async def settled(self) -> None:
        """Waits until every offer made so far has been decided."""
        await self._told.join()
        await self._offers.join()

    async def _offer(self, actor: Actor, fragments: tuple[Fragment, ...]) -> None:
        held = actor.working.held_ids()
        new = [fragment for fragment in fragments if fragment.id not in held]
        if not new:
            return
        space = actor.working.embedding
        async with self._turn(actor, space):
            vectors = await self._content_vectors(actor, new, space)
        pairs = zip(new, vectors, strict=True)
        found = [Recollected(one.id, one.content, vector, one.structured) for one, vector in pairs]
        versions = {one.id: one.version for one in new}

        async def decide(now: Actor) -> Decision | None:
            async with self._runtime.turns.of(now.working.record.namespace):
                if now.working.embedding is not space:
                    return None  # what was compared is of the former model
                stale = now.working.stale
                return self._decide(now, [one for one in found if versions[one.id] >= stale.get(one.id, 0)])

        await actor.run(decide)

    def _turn(self, actor: Actor, space: Embedding) -> AbstractAsyncContextManager[None]:
        """To make vectors, where no model is waited for."""
        turns, namespace = self._runtime.turns, actor.working.record.namespace
        return turns.of(namespace) if space.model.instant else contextlib.nullcontext()

    def forget(self, ids: Collection[str]) -> None:
        """Nothing made of what these fragments said is to be kept."""
        for key in [key for key in self._content if key[1] in ids]:
            del self._content[key]

    def _decide(self, actor: Actor, found: list[Recollected]) -> Decision | None:
        working = actor.working
        policy = effective_policy(working.record.policy, self._models)
        there = visible(working.columns, self._runtime.clock.now_us(), policy.retention.ttl_s)
        here = [one for one in found if (slot := working.columns.slot(one.id)) is not None and there[slot]]
        transition = recollect(working.state, here, policy, working.embedding.model.similarity_min)
        if not transition.events:
            return None
        return Decision(transition=transition, jobs=jobs_of(working, transition, (), self._runtime))

    async def _content_vectors(self, actor: Actor, fragments: list[Fragment], space: Embedding) -> list[Vector | None]:
        """Comparable with the vectors of held fragments: of the content, or the indexed ones by policy."""
        record = actor.working.record
        by_content = compares_content(record.kind, record.policy)
        stored = [one.id for one in fragments if one.own_vector or not by_content]
        read = actor.working.vectors(stored)
        unread = [id_ for id_ in stored if id_ not in read]
        packed = await self._storage.journal.get_vectors(record.uid, space.name, unread) if unread else {}
        embedded = [one for one in fragments if by_content and not one.own_vector]
        keys = {one.id: (record.uid, one.id, one.version, space.name) for one in embedded}
        missing = [one for one in embedded if keys[one.id] not in self._content]
        if missing:
            rows = await self._models.gatherer.content_vectors([one.content for one in missing], record, space)
            for fragment, row in zip(missing, rows, strict=True):
                self._content[keys[fragment.id]] = row
        made = {id_: self._content[key] for id_, key in keys.items()}
        known = read | {id_: vector for id_, raw in packed.items() if (vector := unpacked(raw)) is not None} | made
        found = [known.get(one.id) for one in fragments]
        while len(self._content) * space.model.dimension * 4 > CONTENT_VECTORS_BYTES_MAX:
            self._content.popitem(last=False)
        return found

    # ---- accesses
    async def _access_loop(self) -> None:
        while True:
            await asyncio.sleep(self._runtime.limits.access_interval_s)
            await self._write_accesses()

    async def _write_accesses(self) -> None:
        counted, self._accesses = self._accesses, {}
        lost: list[tuple[Accesses, JournalError]] = []
        together: list[Accesses] = []
        room = WRITTEN_TOGETHER
        for (uid, epoch), counts in counted.items():
            left = [Access(id_, count, time_us) for id_, (count, time_us) in counts.items()]
            while left:
                some, left = left[:room], left[room:]
                together.append(Accesses(uid, epoch, tuple(some)))
                room -= len(some)
                if not room:
                    lost += await self._not_written(together)
                    together, room = [], WRITTEN_TOGETHER
        lost += await self._not_written(together)
        if lost:  # statistics: that is not an error, but is said
            log.warning("accesses_not_written", count=sum(len(one.each) for one, _ in lost), error=lost[0][1])

    async def _not_written(self, accesses: Sequence[Accesses]) -> list[tuple[Accesses, JournalError]]:
        """What is given to the journal at once is one commit there; what cannot be written fails by itself."""
        writing = (self._storage.journal.add_accesses(one) for one in accesses)
        lost = []
        for one, error in zip(accesses, await asyncio.gather(*writing, return_exceptions=True), strict=True):
            if isinstance(error, JournalError):
                lost.append((one, error))
            elif error is not None:
                raise error
        return lost


def unpacked(raw: bytes | None) -> Vector | None:
    """A vector as the journal keeps it, or none."""
    return None if raw is None else np.frombuffer(raw, dtype="<f4")
