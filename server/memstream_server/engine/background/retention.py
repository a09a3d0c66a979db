"""Forgetting by age, strength and room, the erasure of what was forgotten long enough ago, and the events' retention.

Rule 1. Every step is a small decision in its memory's order, so that streams go on between them; what is due is looked
for outside that order and looked at again inside it.
Rule 2. A memory that fails is passed over until the next round; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from memstream_server.core import lifecycle, retention
from memstream_server.core.events import Reason
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.errors import EngineError
from memstream_server.engine.lifecycle import some
from memstream_server.engine.memory.decision import Decision
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import MemoryRecord

if TYPE_CHECKING:
    from memstream_server.core.transition import Transition
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

BATCH = 128
"""Fragments forgotten or erased by one decision; transitions pruned by one write."""
PAGE = 500
"""Fragments or memories read at once."""
LOOKS_A_HALF_LIFE = 100
"""How often all strengths are computed: often enough that none is more than 1 % below the minimum when it is seen."""
_SECOND_US = 1_000_000

_Decide = Callable[["Actor", list[Fragment]], "Transition"]


class Forgetting:
    """One background task, a round every `maintenance_interval_s`. Started and stopped by the engine."""

    def __init__(self, storage: Storage, runtime: Runtime, registry: Registry) -> None:
        self._storage = storage
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry
        self._looked_us: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._one_round = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """What a round had not come to is found again after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._runtime.limits.maintenance_interval_s)
            try:
                await self.round()
            except (EngineError, JournalError) as error:
                log.warning("maintenance_failed", error=error)

    async def round(self) -> None:
        """Everything that is due now."""
        async with self._one_round:
            now_us = self._runtime.clock.now_us()
            tended = await self._registry.ownership.tended()
            await self._expire(now_us, tended)
            while await self._journal.prune_answers(BATCH) >= BATCH:
                pass
            forgotten = dict(await self._journal.oldest_forgotten())
            there: set[str] = set()
            async for record in self.memories():
                there.add(record.uid)
                if not tended(record.uid):
                    continue
                try:
                    await self._tend(record, now_us, forgotten.get(record.uid))
                except (EngineError, JournalError) as error:
                    log.warning("memory_not_maintained", memory=record.uid, error=error)
            self._looked_us = {uid: at_us for uid, at_us in self._looked_us.items() if uid in there}
            self._counted = {uid: revision for uid, revision in self._counted.items() if uid in there}

    async def memories(self, namespace: str = "", name: str = "") -> AsyncIterator[MemoryRecord]:
        """Those of the namespace and name; empty strings do not restrict."""
        after = ""
        while page := await self._journal.all_memories(after, PAGE):
            for record in page:
                if namespace in ("", record.namespace) and name in ("", record.name):
                    yield record
            after = page[-1].uid

    async def _tend(self, record: MemoryRecord, now_us: int, oldest_forgotten_us: int | None) -> None:
        policy = record.policy.retention
        if policy.ttl_s:
            await self._age(record, now_us)
        if policy.retention_min and self._is_time(record, now_us):
            await self._fade(record, now_us)
        if policy.long_term_capacity and self._counted.get(record.uid) != record.revision:
            await self._make_room(record, now_us)
        before_us = now_us - policy.forget_grace_s * _SECOND_US
        if oldest_forgotten_us is not None and oldest_forgotten_us <= before_us:
            async for _ in self._erase(record.uid, before_us):
                pass
        if policy.event_retention_s:
            await self._prune(record.uid, now_us - policy.event_retention_s * _SECOND_US)

    # ---- by age
    async def _expire(self, now_us: int, tended: Callable[[str], bool]) -> None:
        """Fragments with an expiry of their own, of all memories that this process tends."""
        failed: set[str] = set()
        while due := await self._due(now_us, lambda uid: uid not in failed and tended(uid)):
            left, passed = 0, len(failed)
            for uid in dict.fromkeys(uid for uid, _ in due):
                ids = [id_ for memory, id_ in due if memory == uid]
                try:
                    left += await self._forget(uid, ids, Reason.EXPIRED, now_us)
                except (EngineError, JournalError) as error:
                    log.warning("not_expired", memory=uid, error=error)
                    failed.add(uid)  # the next round looks again
            if not left and passed == len(failed):  # what is due changed meanwhile
                return

    async def _due(self, now_us: int, tended: Callable[[str], bool]) -> list[tuple[str, str]]:
        """The most overdue; what other processes will forget must not hide them."""
        limit = BATCH
        while True:
            due = await self._journal.list_expired(now_us, limit)
            mine = [one for one in due if tended(one[0])]
            if mine or len(due) < limit:
                return mine[:BATCH]
            limit *= 2

    async def _age(self, record: MemoryRecord, now_us: int) -> None:
        """The policy's ttl. In order of receipt the old come first, so the first young one ends the search."""
        born_us = now_us - record.policy.retention.ttl_s * _SECOND_US
        async for page in self._live(record.uid, ()):
            old = [one for one in page if one.create_time_us <= born_us]
            await self._forget_due(record, old, Reason.EXPIRED, now_us)
            if len(old) < len(page):
                return

    # ---- by strength
    def _is_time(self, record: MemoryRecord, now_us: int) -> bool:
        pause_us = record.policy.retention.strength_half_life_s * _SECOND_US // LOOKS_A_HALF_LIFE
        if now_us - self._looked_us.get(record.uid, -pause_us) < pause_us:
            return False
        self._looked_us[record.uid] = now_us
        return True

    async def _fade(self, record: MemoryRecord, now_us: int) -> None:
        async for page in self._live(record.uid, ()):
            await self._forget_due(record, page, Reason.RETENTION, now_us)

    async def _make_room(self, record: MemoryRecord, now_us: int) -> None:
        """The weakest long-term fragments beyond the capacity."""
        policy = record.policy.retention
        over = (await self._journal.count_fragments(record.uid)).long_term - policy.long_term_capacity
        if over > 0:
            ids: list[str] = []
            strengths: list[float] = []
            async for page in self._live(record.uid, (Tier.LONG_TERM,)):
                free = [one for one in page if not one.pinned]
                ids += [one.id for one in free]
                strengths += [retention.compute_strength(one, now_us, policy.strength_half_life_s) for one in free]
            weakest = retention.select_weakest(ids, strengths, over)
            for start in range(0, len(weakest), BATCH):
                await self._forget(record.uid, weakest[start : start + BATCH], Reason.CAPACITY, now_us)
        self._counted[record.uid] = record.revision

    async def _live(self, uid: str, tiers: tuple[Tier, ...]) -> AsyncIterator[list[Fragment]]:
        after = -1
        while page := await self._journal.list_fragments(uid, FragmentQuery(tiers=tiers, after=after, limit=PAGE)):
            yield page
            after = page[-1].position

    async def _forget_due(self, record: MemoryRecord, page: Sequence[Fragment], reason: Reason, now_us: int) -> None:
        ids = [one.id for one in retention.find_due(page, now_us, record.policy.retention)[reason]]
        for start in range(0, len(ids), BATCH):
            await self._forget(record.uid, ids[start : start + BATCH], reason, now_us)

    async def _forget(self, uid: str, ids: Sequence[str], reason: Reason, now_us: int) -> int:
        """How many of `ids` were still due and are forgotten."""

        def decide(now: Actor, found: list[Fragment]) -> Transition:
            if reason is Reason.CAPACITY:
                leaving = [one for one in found if one.tier is Tier.LONG_TERM]
            else:
                leaving = retention.find_due(found, now_us, now.working.record.policy.retention)[reason]
            return lifecycle.forget_fragments(now.working.state, leaving, now_us, reason)

        return len((await self._decide(uid, ids, decide)).puts)

    # ---- for good
    async def purge(self, record: MemoryRecord) -> AsyncIterator[int]:
        """Erase what a memory forgot longer ago than its grace; yields how many went, some at a time."""
        before_us = self._runtime.clock.now_us() - record.policy.retention.forget_grace_s * _SECOND_US
        async for erased in self._erase(record.uid, before_us):
            yield erased

    async def _erase(self, uid: str, before_us: int) -> AsyncIterator[int]:
        """Fragments whose grace has passed. ERASED and not DROPPED, because content and vectors go from everywhere."""

        def decide(now: Actor, found: list[Fragment]) -> Transition:
            past = [one for one in found if one.forget_time_us is not None and one.forget_time_us <= before_us]
            return lifecycle.erase_fragments(now.working.state, past, Reason.EXPIRED)

        while ids := await self._journal.list_purgeable(uid, before_us, BATCH):
            erased = len((await self._decide(uid, ids, decide)).removed)
            if not erased:
                return
            yield erased

    async def _prune(self, uid: str, before_us: int) -> None:
        """Events past their retention. A watch from before them is told that they are compacted."""
        oldest = await self._journal.list_events(uid, 0, 1)
        while oldest and oldest[0].time_us < before_us:
            if await self._journal.prune_events(uid, before_us, BATCH) < BATCH:
                return
            oldest = await self._journal.list_events(uid, 0, 1)

    async def _decide(self, uid: str, ids: Sequence[str], decide: _Decide) -> Transition:
        made: list[Transition] = []

        async def deciding(now: Actor) -> Decision | None:
            made.append(decide(now, await some(now, ids, self._storage)))
            return Decision(transition=made[0]) if made[0].events else None

        async with self._registry.use_uid(uid) as actor:
            await actor.run(deciding)
        return made[0]
