"""Memories as resources: create, clone, read, change, delete."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Event, EventType
from memstream_server.core.retention import is_expired
from memstream_server.core.values import FragmentKind, Tier
from memstream_server.engine.errors import EtagMismatch, JournalUnavailable, MemoryExists, map_write_errors
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.quotas import check_bytes
from memstream_server.engine.requests import AnswerOf, MemoryChange, NewMemory, Statistics, memory_etag
from memstream_server.engine.runtime.call_context import complete
from memstream_server.ports.journal.errors import AlreadyExists
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Answer, Counts, Labels, MemoryRecord, NamespaceBytes

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

PAGE = 500
"""Fragments read at once."""


class Memories:
    """All memories. Calls `gone` with the uid of each deleted one."""

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
        """(the memory, whether it is new). Raises MemoryExists unless `exist_ok`, QuotaExceeded, CapabilityMissing.

        Without `exist_ok` the write alone finds one that exists, and an earlier answer.
        """
        existing = await self._journal.get_memory(new.namespace, new.name) if new.exist_ok else None
        if existing is None:
            await check_bytes(self._journal, self._runtime.limits, new.namespace)
            await self._models.prepare_language(new.policy)
            record = self._new_record(new)
            made = (Event(EventType.MEMORY_CREATED, ""),)
            stored = None if answer is None else answer(record)
            most = self._runtime.limits.namespace_memories_max
            try:
                await map_write_errors(self._journal.create_memory(record, made, stored, most))
            except AlreadyExists:
                existing = await self._journal.get_memory(new.namespace, new.name)
            else:
                if not self._registry.ownership.shared:
                    self._registry.record_name(record, created=True)
                return record, True
        if existing is not None and new.exist_ok:
            return await self._registry.read_record(new.namespace, new.name), False
        raise MemoryExists(
            f"memory {new.namespace}/{new.name} exists; pass exist_ok to use it, or choose another name",
            namespace=new.namespace,
            memory=new.name,
        )

    def _new_record(self, new: NewMemory) -> MemoryRecord:
        now_us = self._runtime.clock.now_us()
        return MemoryRecord(
            uid=self._runtime.ids.next_id(),
            namespace=new.namespace,
            name=new.name,
            kind=new.kind,
            policy=new.policy,
            seed=os.urandom(16),
            labels=new.labels,
            revision=1,
            create_time_us=now_us,
            update_time_us=now_us,
            change_time_us=now_us,
        )

    async def clone(
        self, namespace: str, name: str, new_namespace: str, new_name: str, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """Create a memory with the same kind, policy and labels, without content. Raises MemoryNotFound,
        MemoryExists.
        """
        source = await self._registry.read_record(namespace, name)
        new = NewMemory(new_namespace, new_name, source.kind, source.policy, source.labels)
        return (await self.create(new, answer))[0]

    async def get(self, namespace: str, name: str) -> MemoryRecord:
        """Raises MemoryNotFound."""
        return await self._registry.read_record(namespace, name)

    async def list_page(
        self, namespace: str, after: str, limit: int, prefix: str = "", labels: Labels = ()
    ) -> list[MemoryRecord]:
        """Memories in order of name, after `after`, with names that begin with `prefix` and with all of `labels`."""
        return await self._journal.list_memories(namespace, after, limit, prefix, labels)

    async def list_namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        """(namespace, number of memories) of those that store anything, in order of namespace, after `after`."""
        return await self._journal.list_namespaces(after, limit)

    async def read_bytes(self, namespaces: Sequence[str]) -> dict[str, NamespaceBytes]:
        """What those of the namespaces store that store anything."""
        return await self._journal.read_bytes(namespaces)

    @property
    def byte_quotas(self) -> tuple[int, int]:
        """(bytes that a namespace may store, bytes of receipts); 0 is no limit."""
        limits = self._runtime.limits
        return limits.namespace_bytes_max, limits.namespace_receipts_bytes_max

    async def update(
        self, namespace: str, name: str, change: MemoryChange, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """The changed memory. Raises EtagMismatch if `change.etag` is given and not current."""
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
                return now.settle_tiers(decision)

            await actor.run(decide)
            return made[0]

    async def delete(self, namespace: str, name: str, etag: str = "", answer: Answer | None = None) -> None:
        """Delete the memory and all its content permanently. Raises EtagMismatch, MemoryNotFound."""
        record = await self._registry.read_record(namespace, name)
        _check_etag(etag, record)
        deleting = asyncio.create_task(self.remove_memory(record, answer))
        self._deletions.add(deleting)
        deleting.add_done_callback(self._deletions.discard)
        await complete(deleting)  # the deletion completes even if the caller is cancelled

    async def remove_memory(self, record: MemoryRecord, answer: Answer | None = None) -> None:
        """As `delete`, but a cancelled caller cancels it."""
        ownership = self._registry.ownership
        with self._registry.mark_deleting(record):
            try:
                await self._storage.images.remove(record.uid, durable=True)
                # With a shared journal, take the memory first: otherwise its next owner could keep it in RAM.
                epoch = await map_write_errors(ownership.take_memory(record.uid)) if ownership.shared else None
                await map_write_errors(self._journal.delete_memory(record.uid, answer, epoch))
            except JournalUnavailable:  # the deletion may have happened
                self._registry.reread_memory(record.uid)
                raise
            self._registry.forget_deleted(record)
        self._gone(record.uid)

    async def get_statistics(self, namespace: str, name: str) -> Statistics:
        """Fragment counts and the size in RAM."""
        record = await self._registry.read_record(namespace, name)
        counts = await self._count_unexpired(record, self._runtime.clock.now_us())
        actor = self._registry.peek(record.uid)
        return Statistics(record.revision, counts, actor is not None, 0 if actor is None else actor.working.size_bytes)

    async def _count_unexpired(self, record: MemoryRecord, now_us: int) -> Counts:
        """Counts without expired fragments. Those beyond the policy's ttl come first in order of receipt."""
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
