"""Memories as resources: created, cloned, read, changed, deleted."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType
from memstream_server.core.retention import is_expired
from memstream_server.core.values import FragmentKind, Tier
from memstream_server.engine.errors import EtagMismatch, JournalUnavailable, MemoryExists, written
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.requests import AnswerOf, MemoryChange, NewMemory, Statistics, memory_etag
from memstream_server.ports.journal.errors import AlreadyExists
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Answer, Counts, MemoryRecord

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

PAGE = 500
"""Fragments read at once."""


class Memories:
    """All memories there are. `gone` is told the uid of each that was deleted."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry, gone: Callable[[str], None]
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry
        self._gone = gone
        self._deletions: set[asyncio.Task[None]] = set()

    async def create(self, new: NewMemory, answer: AnswerOf | None = None) -> tuple[MemoryRecord, bool]:
        """(the memory, whether it is new). Raises MemoryExists unless `exist_ok`, QuotaExceeded, CapabilityMissing."""
        existing = await self._journal.get_memory(new.namespace, new.name)
        if existing is None:
            await self._models.prepare_language(new.policy)
            record = self._new_record(new)
            made = (Event(EventType.MEMORY_CREATED, ""),)
            stored = None if answer is None else answer(record)
            most = self._runtime.limits.namespace_memories_max
            try:
                await written(self._journal.create_memory(record, made, stored, most))
            except AlreadyExists:
                existing = await self._journal.get_memory(new.namespace, new.name)
            else:
                return record, True
        if existing is not None and new.exist_ok:
            return await self._registry.record(new.namespace, new.name), False
        raise MemoryExists(
            f"memory {new.namespace}/{new.name} exists; pass exist_ok to use it, or choose another name",
            namespace=new.namespace,
            memory=new.name,
        )

    def _new_record(self, new: NewMemory) -> MemoryRecord:
        now_us = self._runtime.clock.now_us()
        return MemoryRecord(
            uid=self._runtime.ids.next(),
            namespace=new.namespace,
            name=new.name,
            kind=new.kind,
            policy=new.policy,
            seed=os.urandom(16),
            labels=new.labels,
            revision=1,
            create_time_us=now_us,
            update_time_us=now_us,
        )

    async def clone(
        self, namespace: str, name: str, new_namespace: str, new_name: str, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """A new memory of that kind, policy and labels, without content. Raises MemoryNotFound, MemoryExists."""
        source = await self._registry.record(namespace, name)
        new = NewMemory(new_namespace, new_name, source.kind, source.policy, source.labels)
        return (await self.create(new, answer))[0]

    async def get(self, namespace: str, name: str) -> MemoryRecord:
        """Raises MemoryNotFound."""
        return await self._registry.record(namespace, name)

    async def page(self, namespace: str, after: str, limit: int, prefix: str = "") -> list[MemoryRecord]:
        """Ascending by name, after `after`, names that begin with `prefix`."""
        return await self._journal.list_memories(namespace, after, limit, prefix)

    async def namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        """(namespace, memories) ascending, after `after`."""
        return await self._journal.list_namespaces(after, limit)

    async def update(
        self, namespace: str, name: str, change: MemoryChange, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """The memory as changed. Raises EtagMismatch when `change.etag` is given and not current."""
        made: list[MemoryRecord] = []
        if change.policy is not None:
            await self._models.prepare_language(change.policy)
        async with self._registry.use(namespace, name) as actor:

            def decide(now: Actor) -> Decision:
                record, now_us = now.working.record, self._runtime.clock.now_us()
                _check_etag(change.etag, record)
                after = replace(
                    record,
                    policy=change.policy or record.policy,
                    labels=record.labels if change.labels is None else change.labels,
                    revision=record.revision + 1,
                    update_time_us=now_us,
                )
                made.append(after)
                decision = Decision(
                    policy=change.policy,
                    labels=change.labels,
                    events=(Event(EventType.MEMORY_UPDATED, ""),),
                    answer=None if answer is None else answer(after),
                    time_us=now_us,
                )
                return now.settle(decision)

            await actor.run(decide)
            return made[0]

    async def delete(self, namespace: str, name: str, etag: str = "", answer: Answer | None = None) -> None:
        """The memory and all it holds are gone for good. Raises EtagMismatch, MemoryNotFound."""
        record = await self._registry.record(namespace, name)
        _check_etag(etag, record)
        deleting = asyncio.create_task(self.remove(record, answer))
        self._deletions.add(deleting)
        deleting.add_done_callback(self._deletions.discard)
        await asyncio.shield(deleting)  # once begun it ends, whoever waits for it

    async def remove(self, record: MemoryRecord, answer: Answer | None = None) -> None:
        """As `delete`; whoever gives up waiting for it cuts it off."""
        ownership = self._registry.ownership
        with self._registry.deleting(record):
            try:
                # Taken first where others could: else it would live on in the RAM of whoever takes it meanwhile.
                epoch = await written(ownership.take(record.uid)) if ownership.shared else None
                await written(self._journal.delete_memory(record.uid, answer, epoch))
            except JournalUnavailable:  # it may have happened
                self._registry.reread(record.uid)
                raise
            self._registry.deleted(record)
        self._gone(record.uid)

    async def statistics(self, namespace: str, name: str) -> Statistics:
        """How much the memory holds."""
        record = await self._registry.record(namespace, name)
        counts = await self._counts(record, self._runtime.clock.now_us())
        actor = self._registry.peek(record.uid)
        return Statistics(record.revision, counts, actor is not None, 0 if actor is None else actor.working.size_bytes)

    async def _counts(self, record: MemoryRecord, now_us: int) -> Counts:
        """Without what has expired. What the policy's ttl has reached comes first in order of receipt."""
        counts, retention, after = await self._journal.count_fragments(record.uid, now_us), record.policy.retention, -1
        tiers: Counter[Tier] = Counter()
        insights = 0
        while retention.ttl_s:
            page = await self._journal.list_fragments(record.uid, FragmentQuery(after=after, limit=PAGE))
            aged = [one for one in page if one.expire_time_us is None and is_expired(one, now_us, retention)]
            tiers.update(one.tier for one in aged)
            insights += sum(one.kind is FragmentKind.INSIGHT for one in aged)
            if len(page) < PAGE or page[-1].create_time_us > now_us - retention.ttl_s * 1_000_000:
                break
            after = page[-1].position
        return replace(
            counts,
            sensory=counts.sensory - tiers[Tier.SENSORY],
            short_term=counts.short_term - tiers[Tier.SHORT_TERM],
            long_term=counts.long_term - tiers[Tier.LONG_TERM],
            insights=counts.insights - insights,
        )


def _check_etag(etag: str, record: MemoryRecord) -> None:
    if etag and etag != memory_etag(record):
        raise EtagMismatch(
            f"memory {record.namespace}/{record.name} has changed since; read it again", etag=memory_etag(record)
        )
