"""Retention: forgets by age, strength and capacity, erases after the grace period, and prunes events.

Rule 1. Every step is a small decision in its memory's order, so that streams continue in between. Due fragments are
found outside of that order and checked again inside it.
Rule 2. If a memory fails, the round continues with the others, and the next round tries it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from memstream_server.core import lifecycle, retention
from memstream_server.core.events import Reason
from memstream_server.core.values import Fragment, Tier
from memstream_server.engine.background.task import BackgroundTask
from memstream_server.engine.errors import EngineError, MemoryNotFound, OwnedElsewhere
from memstream_server.engine.lifecycle import read_fragments
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.operations.runner import POLL_INTERVAL_S, AnswerOf, OperationRunner, Progress
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.core.transition import Transition
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

BATCH = 128
"""Fragments forgotten or erased per decision; transitions pruned per write."""
EXPIRED_AT_ONCE = 10
"""Conversations deleted per write."""
PAGE = 500
"""Fragments or memories read at once."""
CHECKS_PER_HALF_LIFE = 100
"""Computations of all strengths per half-life: a fragment falls at most 1 % below the minimum before it is forgotten.
"""
_SECOND_US = 1_000_000

_Decide = Callable[["Actor", list[Fragment]], "Transition"]


class Retention(BackgroundTask):
    """One background task with a round every `maintenance_interval_s`. The engine starts and stops it."""

    def __init__(self, storage: Storage, runtime: Runtime, registry: Registry) -> None:
        self._storage = storage
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry
        self._computed_us: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._one_round = asyncio.Lock()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._runtime.limits.maintenance_interval_s)
            try:
                await self.run_round()
            except (EngineError, JournalError) as error:
                log.warning("maintenance_failed", error=error)

    async def run_round(self) -> None:
        """Do everything that is due now."""
        async with self._one_round:
            now_us = self._runtime.clock.now_us()
            tended = await self._registry.ownership.select_tended()
            await self._forget_expired(now_us, tended)
            while await self._journal.prune_answers(BATCH) >= BATCH:
                pass
            while await self._storage.conversations.prune_conversations(now_us, EXPIRED_AT_ONCE) >= EXPIRED_AT_ONCE:
                pass
            forgotten = dict(await self._journal.oldest_forgotten())
            there: set[str] = set()
            async for record in self._registry.list_memories():
                there.add(record.uid)
                if not tended(record.uid):
                    continue
                try:
                    await self._maintain_memory(record, now_us, forgotten.get(record.uid))
                except (EngineError, JournalError) as error:
                    log.warning("memory_not_maintained", memory=record.uid, error=error)
            self._computed_us = {uid: at_us for uid, at_us in self._computed_us.items() if uid in there}
            self._counted = {uid: revision for uid, revision in self._counted.items() if uid in there}

    async def list_forgetful(self, namespace: str, name: str) -> AsyncIterator[MemoryRecord]:
        """The memories of that namespace and name that have forgotten fragments; an empty string matches all."""
        uids = [uid for uid, _ in await self._journal.oldest_forgotten()]
        for start in range(0, len(uids), PAGE):
            for record in await self._journal.get_records(uids[start : start + PAGE]):
                if namespace in ("", record.namespace) and name in ("", record.name):
                    yield record

    async def _maintain_memory(self, record: MemoryRecord, now_us: int, oldest_forgotten_us: int | None) -> None:
        policy = record.policy.retention
        if policy.ttl_s:
            await self._forget_aged(record, now_us)
        if policy.retention_min and self._strengths_are_due(record, now_us):
            await self._forget_faded(record, now_us)
        if policy.long_term_capacity and self._counted.get(record.uid) != record.revision:
            await self._enforce_capacity(record, now_us)
        before_us = now_us - policy.forget_grace_s * _SECOND_US
        if oldest_forgotten_us is not None and oldest_forgotten_us <= before_us:
            async for _ in self._erase_forgotten(record.uid, before_us):
                pass
        if policy.event_retention_s:
            oldest_us = now_us - policy.event_retention_s * _SECOND_US
            await self._prune_events(record.uid, oldest_us)
            await self._journal.prune_recall_receipts(record.uid, oldest_us)  # they cannot be replayed any more
        if kept_s := record.policy.history.version_retention_s:
            await self._journal.prune_versions(record.uid, now_us - kept_s * _SECOND_US)

    # ---- by age
    async def _forget_expired(self, now_us: int, tended: Callable[[str], bool]) -> None:
        """Forget fragments with an expiry time, in all memories that this process maintains."""
        failed: set[str] = set()
        while due := await self._list_due(now_us, lambda uid: uid not in failed and tended(uid)):
            left, passed = 0, len(failed)
            for uid in dict.fromkeys(uid for uid, _ in due):
                ids = [id_ for memory, id_ in due if memory == uid]
                try:
                    left += await self._forget_fragments(uid, ids, Reason.EXPIRED, now_us)
                except (EngineError, JournalError) as error:
                    log.warning("expiry_failed", memory=uid, error=error)
                    failed.add(uid)  # the next round tries it again
            if not left and passed == len(failed):  # what was due has changed meanwhile
                return

    async def _list_due(self, now_us: int, tended: Callable[[str], bool]) -> list[tuple[str, str]]:
        """The most overdue fragments. Those that other processes maintain must not hide them."""
        limit = BATCH
        while True:
            due = await self._journal.list_expired(now_us, limit)
            mine = [one for one in due if tended(one[0])]
            if mine or len(due) < limit:
                return mine[:BATCH]
            limit *= 2

    async def _forget_aged(self, record: MemoryRecord, now_us: int) -> None:
        """The policy's ttl. Old fragments come first in order of receipt, so the first young one ends the search."""
        born_us = now_us - record.policy.retention.ttl_s * _SECOND_US
        async for page in self._live_pages(record.uid, ()):
            old = [one for one in page if one.create_time_us <= born_us]
            await self._forget_due(record, old, Reason.EXPIRED, now_us)
            if len(old) < len(page):
                return

    # ---- by strength
    def _strengths_are_due(self, record: MemoryRecord, now_us: int) -> bool:
        pause_us = record.policy.retention.strength_half_life_s * _SECOND_US // CHECKS_PER_HALF_LIFE
        if now_us - self._computed_us.get(record.uid, -pause_us) < pause_us:
            return False
        self._computed_us[record.uid] = now_us
        return True

    async def _forget_faded(self, record: MemoryRecord, now_us: int) -> None:
        async for page in self._live_pages(record.uid, ()):
            await self._forget_due(record, page, Reason.RETENTION, now_us)

    async def _enforce_capacity(self, record: MemoryRecord, now_us: int) -> None:
        """Forget the weakest long-term fragments beyond the capacity."""
        policy = record.policy.retention
        over = (await self._journal.count_fragments(record.uid)).long_term - policy.long_term_capacity
        if over > 0:
            ids: list[str] = []
            strengths: list[float] = []
            async for page in self._live_pages(record.uid, (Tier.LONG_TERM,)):
                free = [one for one in page if not one.pinned]
                ids += [one.id for one in free]
                strengths += [retention.compute_strength(one, now_us, policy.strength_half_life_s) for one in free]
            weakest = retention.select_weakest(ids, strengths, over)
            for start in range(0, len(weakest), BATCH):
                await self._forget_fragments(record.uid, weakest[start : start + BATCH], Reason.CAPACITY, now_us)
        self._counted[record.uid] = record.revision

    async def _live_pages(self, uid: str, tiers: tuple[Tier, ...]) -> AsyncIterator[list[Fragment]]:
        after = -1
        while page := await self._journal.list_fragments(uid, FragmentQuery(tiers=tiers, after=after, limit=PAGE)):
            yield page
            after = page[-1].position

    async def _forget_due(self, record: MemoryRecord, page: Sequence[Fragment], reason: Reason, now_us: int) -> None:
        ids = [one.id for one in retention.find_due(page, now_us, record.policy.retention)[reason]]
        for start in range(0, len(ids), BATCH):
            await self._forget_fragments(record.uid, ids[start : start + BATCH], reason, now_us)

    async def _forget_fragments(self, uid: str, ids: Sequence[str], reason: Reason, now_us: int) -> int:
        """Forget those of `ids` that are still due; returns how many."""

        def decide(now: Actor, found: list[Fragment]) -> Transition:
            if reason is Reason.CAPACITY:
                leaving = [one for one in found if one.tier is Tier.LONG_TERM]
            else:
                leaving = retention.find_due(found, now_us, now.working.record.policy.retention)[reason]
            return lifecycle.forget_fragments(now.working.state, leaving, now_us, reason)

        return len((await self._run_decision(uid, ids, decide)).puts)

    # ---- permanently
    async def purge_memory(self, record: MemoryRecord) -> AsyncIterator[int]:
        """Erase fragments that were forgotten longer ago than the grace period; yields the number of each step."""
        before_us = self._runtime.clock.now_us() - record.policy.retention.forget_grace_s * _SECOND_US
        async for erased in self._erase_forgotten(record.uid, before_us):
            yield erased

    async def _erase_forgotten(self, uid: str, before_us: int) -> AsyncIterator[int]:
        """Erase fragments after their grace period. The event is ERASED, not DROPPED: content and vectors leave every
        store.
        """

        def decide(now: Actor, found: list[Fragment]) -> Transition:
            past = [one for one in found if one.forget_time_us is not None and one.forget_time_us <= before_us]
            return lifecycle.erase_fragments(now.working.state, past, Reason.EXPIRED)

        while ids := await self._journal.list_purgeable(uid, before_us, BATCH):
            erased = len((await self._run_decision(uid, ids, decide)).removed)
            if not erased:
                return
            yield erased

    async def _prune_events(self, uid: str, before_us: int) -> None:
        """Prune events past their retention. An older watch fails with CursorCompacted."""
        oldest = await self._journal.list_events(uid, 0, 1)
        while oldest and oldest[0].time_us < before_us:
            if await self._journal.prune_events(uid, before_us, BATCH) < BATCH:
                return
            oldest = await self._journal.list_events(uid, 0, 1)

    async def _run_decision(self, uid: str, ids: Sequence[str], decide: _Decide) -> Transition:
        made: list[Transition] = []

        async def decide_now(now: Actor) -> Decision | None:
            made.append(decide(now, await read_fragments(now, ids, self._storage)))
            return Decision(transition=made[0]) if made[0].events else None

        async with self._registry.use_uid(uid) as actor:
            await actor.run(decide_now)
        return made[0]


class Purging:
    """The operation "purge": erases forgotten fragments after their grace period now instead of at the next round."""

    def __init__(self, runner: OperationRunner, retention: Retention, registry: Registry) -> None:
        self._runner = runner
        self._retention = retention
        self._registry = registry
        runner.register_type("purge", "fragments", self._run_purge)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Purge a memory, a namespace, or everything. Raises MemoryNotFound."""
        if memory:
            await self._registry.read_record(namespace, memory)
        return await self._runner.start("purge", namespace, memory, "{}", answer)

    async def _run_purge(self, operation: Operation, progress: Progress) -> None:
        done = operation.done
        elsewhere: list[str] = []
        async for record in self._retention.list_forgetful(operation.namespace, operation.memory):
            try:
                async for erased in self._retention.purge_memory(record):
                    done += erased
                    await progress.report_done(done, 0)
            except MemoryNotFound:  # the memory was deleted with all its content
                continue
            except OwnedElsewhere:
                if operation.memory:
                    raise
                elsewhere.append((await self._runner.start("purge", record.namespace, record.name, "{}")).id)
        for id in elsewhere:  # their owners run these
            while not (part := await self._runner.get(id)).ended:
                await asyncio.sleep(POLL_INTERVAL_S)
                await progress.report_done(done, 0)
            done += part.done
            await progress.report_done(done, 0)
        await progress.report_done(done, done)
