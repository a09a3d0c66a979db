"""Reinforcement: after an answer is sent, offers its fragments to short-term and counts their accesses.

Rule 1. A recall that reinforces nothing, by its query or else by the policy, is no access. If it names a session, what
it returned is remembered for the echoes of that session, in RAM only; otherwise nothing of it remains.

Offers run in the background. A crash may lose them: they are never acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import structlog

from memstream_server.core.enhancement import may_hit
from memstream_server.core.filters import visible
from memstream_server.core.tiers import Recollected, recollect
from memstream_server.core.values import Fragment, State, Tier, Vector
from memstream_server.engine.errors import EngineError
from memstream_server.engine.memory.decide import effective_policy, jobs_of
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import compares_content, enhances_short_term
from memstream_server.engine.requests import Query, RecallAnswer
from memstream_server.engine.runtime.turns import charge_callback
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.rows import Row
from memstream_server.ports.journal.writing import Access, Accesses
from memstream_server.ports.models import ModelError

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage

log = structlog.get_logger(__name__)

CONTENT_VECTORS_BYTES_MAX = 32 << 20
"""Cached content vectors of recalled fragments, over all memories: a text rarely needs a second model call."""
OFFERS_MAX = 64
"""Queued offers; when full, the oldest is dropped, so that recalls never build a backlog."""
COUNTED_AT_ONCE = 128
"""Accesses counted between two looks of the event loop for events: 1,000 take 2 to 5 ms."""
WRITTEN_TOGETHER = 64
"""Fragments per write of access statistics, over one or several memories: each may touch another page of the journal,
and observations wait for the write.
"""


class Reinforcement:
    """Access statistics and offers of all memories, with one background task each. The engine starts and stops it."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._accesses: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
        """Access counts by memory and the epoch at which this process owns it."""
        self._offers: asyncio.Queue[tuple[Actor, tuple[Fragment, ...]]] = asyncio.Queue(OFFERS_MAX)
        self._content: OrderedDict[tuple[str, str, int, str], Vector] = OrderedDict()
        """Vectors by memory, fragment, version and space; an imported memory has the fragment ids of its export."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Work after answers, in order."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loops = (self._offer_loop(), self._access_loop())
        self._tasks = [asyncio.create_task(each) for each in loops]

    async def stop(self) -> None:
        """Drop waiting offers and write the counted accesses."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._waiting:
            self._work_on()
        await self._write_accesses()

    def queue_answer(self, actor: Actor, query: Query, answer: RecallAnswer) -> None:
        """Queue a complete answer; it is processed when it is on its way to the caller.

        That is two event-loop iterations later: before the caller can react to the answer.
        """
        self._waiting.append(partial(self._handle_answer, actor, query, answer))
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self._work_on)  # a task would be resumed twice for each answer

    def _work_on(self) -> None:
        """Do the next piece of work, in the context of a call: its account pays."""
        if not self._waiting:
            return  # done earlier, by `stop` or `wait_for_offers`
        began_s = perf_counter()
        try:
            self._waiting.popleft()()
        except Exception:  # one failing answer must not end all reinforcement
            log.exception("reinforcement_failed")
        charge_callback(began_s)

    def _handle_answer(self, actor: Actor, query: Query, answer: RecallAnswer) -> None:
        fragments = [found.fragment for found in answer.recollections]
        replies = [found.companion.fragment for found in answer.recollections if found.companion is not None]
        now_us = self._runtime.clock.now_us()
        working, policy = actor.working, actor.working.record.policy
        wanted = policy.recall.reinforce if query.reinforce is None else query.reinforce
        if wanted or query.session:
            working.remember_recalled(query.session, fragments + replies, now_us)
        if not wanted:
            return
        self.count_accesses(actor, [fragment.id for fragment in fragments + replies], now_us)
        if fragments and enhances_short_term(working.record.kind, policy) and working.state.short_term:
            self.offer_fragments(actor, fragments)

    def offer_fragments(self, actor: Actor, fragments: Sequence[Fragment]) -> None:
        """Queue an enhancement of short-term by these fragments. A full queue drops its oldest offer."""
        if self._offers.full():
            self._offers.get_nowait()
            self._offers.task_done()
        self._offers.put_nowait((actor, tuple(fragments)))

    def count_accesses(self, actor: Actor, ids: Sequence[str], now_us: int) -> None:
        """Count an access of each fragment, in RAM now and in the journal later; of many, the rest afterwards."""
        ids, rest = ids[:COUNTED_AT_ONCE], ids[COUNTED_AT_ONCE:]
        if rest:
            self._waiting.append(partial(self.count_accesses, actor, rest, now_us))
            asyncio.get_running_loop().call_soon(self._work_on)
        counts = self._accesses.setdefault((actor.uid, actor.working.record.epoch), {})
        for id_ in ids:
            count, _ = counts.get(id_, (0, 0))
            counts[id_] = (count + 1, now_us)
        actor.working.columns.touch(actor.working.columns.slots(ids), now_us)
        actor.working.fragment_cache.count_access(ids, now_us)

    # ---- offers
    async def _offer_loop(self) -> None:
        while True:
            await self._next_offer()

    async def _next_offer(self) -> None:
        actor, fragments = await self._offers.get()
        try:
            await self._make_offer(actor, fragments)
        except (EngineError, ModelError, JournalError) as error:
            log.info("reinforcement_skipped", reason=error)
        except Exception:  # one failing offer must not end all reinforcement
            log.exception("reinforcement_failed")
        finally:
            self._offers.task_done()

    async def wait_for_offers(self) -> None:
        """Wait until every earlier offer has been decided."""
        while self._waiting:
            self._work_on()
        await self._offers.join()

    async def _make_offer(self, actor: Actor, fragments: tuple[Fragment, ...]) -> None:
        held = actor.working.held_ids()
        new = [fragment for fragment in fragments if fragment.id not in held]
        if not new:
            return
        space = actor.working.embedding
        vectors = await self._content_vectors(actor, new, space)
        working = actor.working
        anchors, policy = working.state.short_term, working.record.policy.short_term
        # Without a possible hit the offer changes nothing, so that its place among the decisions does not matter.
        if working.embedding is not space or not may_hit(anchors, vectors, policy, space.model.fitted.similarity_min):
            return
        pairs = zip(new, vectors, strict=True)
        found = [Recollected(one.id, one.content, vector, one.structured) for one, vector in pairs]
        versions = {one.id: one.version for one in new}

        def decide(now: Actor) -> Decision | None:
            if now.working.embedding is not space:
                return None  # the vectors belong to the former model
            stale = now.working.stale
            return self._decide_offer(now, [one for one in found if versions[one.id] >= stale.get(one.id, 0)])

        await actor.run(decide)

    def keep_vectors(self, actor: Actor, before: State, rows: Sequence[Row]) -> None:
        """Keep the content vectors of fragments that a commit moved from short-term to long-term: an answer that has
        one is offered without a model call. `before`: the tiers before the commit.
        """
        record, space = actor.working.record, actor.working.embedding
        if not before.short_term or not compares_content(record.kind, record.policy):
            return
        held = {one.fragment.id: one for one in before.short_term}
        for each in [row.fragment for row in rows if row.fragment.tier is Tier.LONG_TERM and row.fragment.id in held]:
            vector = held[each.id].vector
            if vector is not None and not each.own_vector and each.content == held[each.id].fragment.content:
                self._content[record.uid, each.id, each.version, space.name] = vector
        self._drop_oldest_vectors(space)

    def _drop_oldest_vectors(self, space: Embedding) -> None:
        while len(self._content) * space.model.dimension * 4 > CONTENT_VECTORS_BYTES_MAX:
            self._content.popitem(last=False)

    def forget_vectors(self, ids: Collection[str]) -> None:
        """Drop cached vectors of erased or changed texts."""
        for key in [key for key in self._content if key[1] in ids]:
            del self._content[key]

    def _decide_offer(self, actor: Actor, found: list[Recollected]) -> Decision | None:
        working = actor.working
        policy = effective_policy(working.record.policy, self._models)
        there = visible(working.columns, self._runtime.clock.now_us(), policy.retention.ttl_s)
        here = [
            one
            for one in found
            if (slot := working.columns.slot(one.id)) is not None
            and there[slot]
            and not working.columns.is_superseded(slot)
        ]
        transition = recollect(working.state, here, policy, working.embedding.model.fitted.similarity_min)
        if not transition.events:
            return None
        return Decision(transition=transition, jobs=jobs_of(working, transition, (), self._runtime))

    async def _content_vectors(self, actor: Actor, fragments: list[Fragment], space: Embedding) -> list[Vector | None]:
        """Vectors comparable with those of held fragments: of the content or of the indexed text, as the policy
        says.
        """
        record, in_space = actor.working.record, space.name
        by_content = compares_content(record.kind, record.policy)
        stored = [one.id for one in fragments if one.own_vector or not by_content]
        known = actor.working.get_vectors(stored)
        if unread := [id_ for id_ in stored if id_ not in known]:
            packed = await self._storage.journal.get_vectors(record.uid, in_space, unread)
            known |= {id_: vector for id_, raw in packed.items() if (vector := unpack_vector(raw)) is not None}
        embedded = {
            (record.uid, one.id, one.version, in_space): one for one in fragments if by_content and not one.own_vector
        }
        missing = [key for key in embedded if key not in self._content]
        if missing:
            texts = [embedded[key].content for key in missing]
            rows = await self._models.enricher.embed_contents(texts, record, space)
            self._content.update(zip(missing, rows, strict=True))
        known |= {key[1]: self._content[key] for key in embedded}
        found = [known.get(one.id) for one in fragments]
        self._drop_oldest_vectors(space)
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
                    lost += await self._write_batch(together)
                    together, room = [], WRITTEN_TOGETHER
        lost += await self._write_batch(together)
        if lost:  # lost statistics are no error, but worth a warning
            log.warning("accesses_not_written", count=sum(len(one.each) for one, _ in lost), error=lost[0][1])

    async def _write_batch(self, accesses: Sequence[Accesses]) -> list[tuple[Accesses, JournalError]]:
        """Concurrent writes share a commit of the journal. Returns those that failed."""
        writing = (self._storage.journal.add_accesses(one) for one in accesses)
        lost = []
        for one, error in zip(accesses, await asyncio.gather(*writing, return_exceptions=True), strict=True):
            if isinstance(error, JournalError):
                lost.append((one, error))
            elif error is not None:
                raise error
        return lost


def unpack_vector(raw: bytes | None) -> Vector | None:
    """A vector in the journal's format, or None."""
    return None if raw is None else np.frombuffer(raw, dtype="<f4")
