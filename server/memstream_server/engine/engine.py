"""The engine's front: what the wire calls. Finds the memory's actor and hands the work to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import structlog

from memstream_server.core.enhancement import merged_text
from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import Filter, passes
from memstream_server.core.values import Enhancement, Fragment, Tier
from memstream_server.engine import lifecycle, putting
from memstream_server.engine.decision import Decision
from memstream_server.engine.erasing import Erasing
from memstream_server.engine.errors import (
    EngineError,
    EtagMismatch,
    FragmentNotFound,
    JournalUnavailable,
    MemoryExists,
    MemoryNotFound,
    ModelMismatch,
    StorageIsFull,
)
from memstream_server.engine.forgetting import Forgetting
from memstream_server.engine.indexing import Indexer
from memstream_server.engine.jobs import Jobs
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.operations import OperationRunner
from memstream_server.engine.producers import ObserveSession
from memstream_server.engine.purging import Purging
from memstream_server.engine.recalling import recall
from memstream_server.engine.reembedding import Reembedding
from memstream_server.engine.reflecting import Reflecting
from memstream_server.engine.registry import Registry
from memstream_server.engine.reindexing import Reindexing
from memstream_server.engine.reinforcing import Reinforcement
from memstream_server.engine.requests import (
    AckLevel,
    AnswerOf,
    Changed,
    MemoryChange,
    NewMemory,
    NewObservation,
    Once,
    Progress,
    Put,
    Query,
    RecallAnswer,
    Refusal,
    Statistics,
    memory_etag,
)
from memstream_server.engine.transfer.transfers import Transfers
from memstream_server.engine.watching import Watchers
from memstream_server.ports.journal import (
    AlreadyExists,
    Answer,
    Commit,
    Conflict,
    FragmentQuery,
    JournalError,
    MemoryRecord,
    Recorded,
    Space,
    StorageFull,
)
from memstream_server.ports.models import EmbeddingModel, Spent

if TYPE_CHECKING:
    from memstream_server.engine.actor import Actor
    from memstream_server.engine.dependencies import Dependencies

log = structlog.get_logger(__name__)
T = TypeVar("T")

__all__ = ["Engine", "Info", "ObserveSession"]

BOUND_INTERVAL_S = 1.0
"""How often active memories, which grow, are held to their bounds."""
PAGE = 200
"""Fragments read at once while a filter is applied."""


@dataclass(frozen=True, slots=True)
class Info:
    """What the engine works with."""

    embedding: EmbeddingModel
    scorer_model: str
    insight_model: str
    index: str
    journal: str
    degraded: str
    spent: Sequence[Spent] = ()


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the engine holds in RAM, over all active memories."""

    memories: int
    size_bytes: int
    backlog: int
    """Observations received and not yet stored."""
    sessions: int
    producers: int
    watchers: int


class Engine:
    """All memories of this process. Made by the composition root; `start` before use, `stop` after."""

    def __init__(
        self,
        dependencies: Dependencies,
        space: Space,
        *,
        journal_name: str = "",
        scorer_model: str = "",
        insight_model: str = "",
        spent: Sequence[Spent] = (),
    ) -> None:
        if space.model != dependencies.embedding.name or space.dimension != dependencies.embedding.dimension:
            raise ModelMismatch(
                f"the data holds vectors of {space.model} ({space.dimension} dimensions), this server is set up for "
                f"{dependencies.embedding.name} ({dependencies.embedding.dimension}). Start it with embedding set to "
                "the former model; to change the model, set the other one as next_embedding beside it and run "
                "`memstream reindex --embed`"
            )
        self._dependencies = dependencies
        self._journal = dependencies.journal
        self._names = journal_name, scorer_model, insight_model
        self._spent = spent
        self._registry = Registry(dependencies)
        self.ownership = self._registry.ownership
        self._indexer = Indexer(dependencies, self._registry, space)
        self._jobs = Jobs(dependencies, self._registry)
        self._forgetting = Forgetting(dependencies, self._registry)
        self._reinforcement = Reinforcement(dependencies)
        self._watchers = Watchers(dependencies.journal, dependencies.quiet_s)
        self.operations = OperationRunner(
            dependencies.operations, dependencies.clock, dependencies.ids, dependencies.failure_of, self.ownership
        )
        self.reembedding = Reembedding(dependencies, self._registry, self._indexer)
        self.reindexing = Reindexing(self.operations, self._indexer, self.reembedding)
        self.erasing = Erasing(self.operations, dependencies, self._registry, self._indexer, self._reinforcement)
        self.purging = Purging(self.operations, self._forgetting, self._registry)
        self.transfers = Transfers(
            dependencies, self._registry, self.operations, lambda record: self._delete(record, None)
        )
        self.reflecting = Reflecting(self.operations, self._jobs, self._registry, dependencies)
        self._deletions: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._bounding: asyncio.Task[None] | None = None
        dependencies.committed = self._committed
        dependencies.index_lost = self._indexer.lost
        dependencies.index_degraded = lambda: self._indexer.degraded
        dependencies.lost = self._registry.lost

    async def start(self) -> None:
        """Begin background work and finish what an earlier process had received. Does not wait for the index."""
        await self.ownership.start()
        await self.reembedding.resume()
        self._indexer.start()
        self._reinforcement.start()
        self._jobs.start()
        self._forgetting.start()
        self._bounding = asyncio.create_task(self._bound())
        await self.transfers.start()
        if self.ownership.shared:
            self._sweeping = asyncio.create_task(self._sweep())
            return
        for uid in await self._journal.pending_memories():
            self._registry.revive(uid)
        await self.operations.resume()

    async def _sweep(self) -> None:
        """Where there are other servers: follow them, and go on with what those left that ended."""
        while True:
            for step in (self.reembedding.notice, self._revive_abandoned, self.operations.resume):
                try:
                    await step()
                except (JournalError, EngineError) as error:
                    log.warning("not_swept", step=step.__name__, error=str(error))
            await asyncio.sleep(self._dependencies.lease.renew_s)

    async def _revive_abandoned(self) -> None:
        for uid in await self.ownership.abandoned():
            self._registry.revive(uid)
        if self.ownership.leads:
            self._jobs.entered()

    async def stop(self, grace_s: float = 5.0) -> None:
        """End everything in order: recalls and sessions first, the index's write-behind last."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        if self._bounding is not None:
            self._bounding.cancel()
        await self.operations.stop()
        await self.reembedding.stop()
        await self.transfers.stop()
        await self._forgetting.stop()
        await self._jobs.stop()
        await self._reinforcement.stop()
        await self._registry.close()
        await self._indexer.stop(grace_s)
        await self.ownership.stop()

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self._dependencies.embedding.dimension

    def held(self) -> Holdings:
        """What is in RAM now."""
        actors = self._registry.actors()
        return Holdings(
            memories=len(actors),
            size_bytes=sum(actor.working.size_bytes for actor in actors),
            backlog=sum(actor.receiving.backlog for actor in actors),
            sessions=sum(actor.receiving.sessions for actor in actors),
            producers=sum(len(actor.receiving.producers()) for actor in actors),
            watchers=len(self._watchers),
        )

    def info(self) -> Info:
        """What the engine works with, and what is degraded now."""
        journal, scorer, insight = self._names
        return Info(
            self._dependencies.embedding,
            scorer,
            insight,
            self._dependencies.index.description,
            journal,
            self._indexer.degraded,
            self._spent,
        )

    # ---- memories
    async def create_memory(self, new: NewMemory, answer: AnswerOf | None = None) -> tuple[MemoryRecord, bool]:
        """(the memory, whether it is new). Raises MemoryExists unless `exist_ok`."""
        existing = await self._journal.get_memory(new.namespace, new.name)
        if existing is None:
            record = self._new_record(new)
            try:
                await self._write(
                    self._journal.create_memory(
                        record, (Event(EventType.MEMORY_CREATED, ""),), None if answer is None else answer(record)
                    )
                )
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
        now_us = self._dependencies.clock.now_us()
        return MemoryRecord(
            uid=self._dependencies.ids.next(),
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

    async def clone_memory(
        self, namespace: str, name: str, new_namespace: str, new_name: str, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """A new memory of that kind, policy and labels, without content. Raises MemoryNotFound, MemoryExists."""
        source = await self._registry.record(namespace, name)
        new = NewMemory(new_namespace, new_name, source.kind, source.policy, source.labels)
        return (await self.create_memory(new, answer))[0]

    async def get_memory(self, namespace: str, name: str) -> MemoryRecord:
        """Raises MemoryNotFound."""
        return await self._registry.record(namespace, name)

    async def list_memories(self, namespace: str, after: str, limit: int) -> list[MemoryRecord]:
        """Ascending by name, after `after`."""
        return await self._journal.list_memories(namespace, after, limit)

    async def list_namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        """(namespace, memories) ascending, after `after`."""
        return await self._journal.list_namespaces(after, limit)

    async def update_memory(
        self, namespace: str, name: str, change: MemoryChange, answer: AnswerOf | None = None
    ) -> MemoryRecord:
        """The memory as changed. Raises EtagMismatch when `change.etag` is given and not current."""
        made: list[MemoryRecord] = []
        async with self._registry.use(namespace, name) as actor:

            def decide(now: Actor) -> Decision:
                record, now_us = now.working.record, self._dependencies.clock.now_us()
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

    async def delete_memory(self, namespace: str, name: str, etag: str = "", answer: Answer | None = None) -> None:
        """The memory and all it holds are gone for good. Raises EtagMismatch, MemoryNotFound."""
        record = await self._registry.record(namespace, name)
        _check_etag(etag, record)
        deleting = asyncio.create_task(self._delete(record, answer))
        self._deletions.add(deleting)
        deleting.add_done_callback(self._deletions.discard)
        await asyncio.shield(deleting)  # once begun it ends, whoever waits for it

    async def _delete(self, record: MemoryRecord, answer: Answer | None) -> None:
        with self._registry.deleting(record):
            try:
                # Taken first where others could: else it would live on in the RAM of whoever takes it meanwhile.
                epoch = await self._write(self.ownership.take(record.uid)) if self.ownership.shared else None
                await self._write(self._journal.delete_memory(record.uid, answer, epoch))
            except JournalUnavailable:  # it may have happened
                self._registry.reread(record.uid)
                raise
            self._registry.deleted(record)
        self._watchers.committed(record.uid)
        self._indexer.entered(1)

    async def stored_answer(self, request: str) -> Answer | None:
        """The answer a request_id got before."""
        return await self._journal.answer(request)

    async def statistics(self, namespace: str, name: str) -> Statistics:
        """How much the memory holds."""
        record = await self._registry.record(namespace, name)
        counts = await self._journal.counts(record.uid)
        actor = self._registry.peek(record.uid)
        return Statistics(record.revision, counts, actor is not None, 0 if actor is None else actor.working.size_bytes)

    # ---- fragments
    async def get_fragment(
        self, namespace: str, name: str, id: str = "", external_id: str = ""
    ) -> tuple[Fragment, str, int]:
        """(fragment, merged text of a promoted one, the memory's revision). Raises FragmentNotFound."""
        record = await self._registry.record(namespace, name)
        if external_id:
            async with self._registry.use(namespace, name) as actor:
                id = actor.working.id_of(external_id)
                self.ownership.check(actor)
        found = await self._journal.fragments(record.uid, [id]) if id else []
        if not found:
            key = external_id or id
            raise FragmentNotFound(f"there is no fragment {key!r} in {namespace}/{name}", id=key)
        return found[0], await self._merged(record, found[0]), record.revision

    async def _merged(self, record: MemoryRecord, fragment: Fragment) -> str:
        """The text of a promoted fragment with its enhancers', each once. Derived, so that no text is stored twice.

        An enhancer received before the anchor was a recollection, whose text is not merged.
        """
        if record.policy.short_term.merge_content or not fragment.sources:
            return ""
        sources = await self._journal.fragments(record.uid, fragment.sources)
        told = tuple(Enhancement(one.id, one.content, recollection=one.position < fragment.position) for one in sources)
        return merged_text(fragment, told, recollections=False)

    async def fragments(self, namespace: str, name: str, ids: Sequence[str]) -> list[Fragment]:
        """Those of the ids that exist."""
        record = await self._registry.record(namespace, name)
        return await self._journal.fragments(record.uid, ids)

    async def list_fragments(
        self, namespace: str, name: str, chosen: Filter, forgotten: bool, after: int, limit: int
    ) -> tuple[list[Fragment], int | None, int, str]:
        """(fragments in order of receipt, where the next page starts or None, revision, memory uid)."""
        record = await self._registry.record(namespace, name)
        found: list[Fragment] = []
        while True:
            query = FragmentQuery(
                tiers=chosen.tiers,
                sessions=chosen.sessions,
                speakers=chosen.speakers,
                kinds=tuple(kind.value for kind in chosen.kinds),
                forgotten=forgotten,
                after=after,
                limit=PAGE,
            )
            page = await self._journal.list_fragments(record.uid, query)
            for fragment in page:
                if passes(fragment, chosen):
                    found.append(fragment)
                    if len(found) > limit:
                        return found[:limit], found[limit - 1].position, record.revision, record.uid
            if len(page) < PAGE:
                return found, None, record.revision, record.uid
            after = page[-1].position

    async def put_fragment(
        self, namespace: str, name: str, new: NewObservation, etag: str = "", once: Once[Put] | None = None
    ) -> Put:
        """Observe, or update the fragment of that external_id. Raises EtagMismatch."""
        async with self._registry.use(namespace, name) as actor:
            return await putting.put(actor, new, etag, self._dependencies, once)

    async def update_fragment(
        self, namespace: str, name: str, change: FragmentChange, once: Once[tuple[Fragment, int]] | None = None
    ) -> tuple[Fragment, int]:
        """(the fragment as changed, revision). Raises FragmentNotFound, EtagMismatch."""
        async with self._registry.use(namespace, name) as actor:
            return await lifecycle.update(actor, change, self._dependencies, once)

    async def forget_fragments(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[Changed] | None = None
    ) -> Changed:
        """By ids or by filter. Restorable within the policy's grace."""
        async with self._registry.use(namespace, name) as actor:
            ids = await self._ids(actor, which, forgotten=False)
            return await lifecycle.forget(actor, ids, self._dependencies, once)

    async def restore_fragments(
        self, namespace: str, name: str, which: Sequence[str] | Filter, once: Once[Changed] | None = None
    ) -> Changed:
        """By ids or by filter. Raises ModelDown."""
        async with self._registry.use(namespace, name) as actor:
            ids = await self._ids(actor, which, forgotten=True)
            return await lifecycle.restore(actor, ids, self._dependencies, once)

    async def _ids(self, actor: Actor, which: Sequence[str] | Filter, forgotten: bool) -> Sequence[str]:
        if isinstance(which, Filter):
            return await lifecycle.matching(actor.uid, which, forgotten, self._dependencies)
        return which

    async def clear_memory(
        self, namespace: str, name: str, tiers: Sequence[Tier], once: Once[Changed] | None = None
    ) -> Changed:
        """Fragments of these tiers leave for good; no tiers are all."""
        async with self._registry.use(namespace, name) as actor:
            return await lifecycle.clear(actor, tiers, self._dependencies, once)

    async def maintain(self) -> None:
        """Forget, erase and prune what is due, now and not at the next interval."""
        await self._forgetting.round()

    # ---- streams
    async def open_observe(self, namespace: str, name: str, producer: str) -> ObserveSession:
        """The producer's one open stream. Raises MemoryNotFound, StorageIsFull."""
        async with self._registry.use(namespace, name) as actor:
            session = await self._write(actor.receiving.open_session(producer))
            self._ask_index(session)
            return session

    async def observe_batch(
        self,
        namespace: str,
        name: str,
        producer: str,
        first_sequence: int,
        items: Sequence[NewObservation | Refusal],
        level: AckLevel,
        request_id: str = "",
    ) -> Progress:
        """One batch to the level asked for. A request_id without a producer makes the batch a producer of its own."""
        one_call = not producer and bool(request_id)
        if one_call:
            producer, first_sequence = f"request:{request_id}", 1
        async with self._registry.use(namespace, name) as actor:
            if producer:
                session = await self._write(actor.receiving.open_session(producer, one_call=one_call))
            else:
                session, first_sequence = actor.receiving.anonymous(), 1
            self._ask_index(session)
            try:
                await session.submit(first_sequence, items)
                return await session.reached(level, first_sequence + len(items) - 1)
            finally:
                session.close()

    async def recall(self, namespace: str, name: str, query: Query) -> RecallAnswer:
        """Answer one query; cancellable. What it found is offered to short-term afterwards."""
        async with self._registry.use(namespace, name) as actor:
            self.ownership.check(actor)
            try:
                answer = await recall(actor, query, self._dependencies)
            except JournalError as error:
                raise JournalUnavailable(f"the journal could not be read: {error}", retry_after_s=0.5) from error
            self.ownership.check(actor)
            self._reinforcement.recalled(actor, query, answer)
            return answer

    async def watch(
        self, namespace: str, name: str, uid: str, revision: int, ordinal: int
    ) -> AsyncGenerator[tuple[str, int, int, tuple[Event, ...]], None]:
        """(uid, revision, time in µs, events) of each transition after the cursor; see watching.py."""
        record = await self._registry.record(namespace, name)
        async with contextlib.aclosing(self._watchers.watch(record, uid, revision, ordinal)) as steps:
            async for step in steps:
                yield step

    async def reinforce(self, namespace: str, name: str, ids: Sequence[str]) -> None:
        """Offer fragments to short-term as if they had just been recalled."""
        async with self._registry.use(namespace, name) as actor:
            found = await self._journal.fragments(actor.uid, ids)
            self._reinforcement.offer(actor, found)
            await self._reinforcement.settled()

    async def settled(self) -> None:
        """Waits until what recalls so far have offered to short-term is decided."""
        await self._reinforcement.settled()

    # ---- inside
    async def _bound(self) -> None:
        """Holds what is in RAM to its bounds."""
        while True:
            await asyncio.sleep(BOUND_INTERVAL_S)
            self._registry.shrink()

    def _ask_index(self, session: ObserveSession) -> None:
        """After a memory was read again nobody knows what of it is indexed until the outbox is next looked at."""
        if session.indexed_behind:
            self._indexer.entered(0)

    def _committed(self, uid: str, recorded: Recorded, commit: Commit) -> None:
        self._watchers.committed(uid, recorded.revision)
        self._indexer.entered(len(commit.index))
        if commit.jobs:
            self._jobs.entered()
        actor = self._registry.peek(uid)
        for event in recorded.events:
            if event.type is EventType.ECHOED and actor is not None:
                self._reinforcement.accessed(actor, event.fragment, recorded.time_us)
        self._dependencies.metrics.events(recorded)

    async def _write(self, writing: Awaitable[T]) -> T:
        """A journal write with its refusals as the engine's."""
        try:
            return await writing
        except StorageFull as error:
            raise StorageIsFull(str(error), retry_after_s=5.0) from error
        except AlreadyExists:
            raise
        except Conflict as error:
            raise MemoryNotFound(f"the memory was deleted meanwhile: {error}") from error
        except JournalError as error:
            raise JournalUnavailable(f"the journal refused: {error}", retry_after_s=0.5) from error


def _check_etag(etag: str, record: MemoryRecord) -> None:
    if etag and etag != memory_etag(record):
        raise EtagMismatch(
            f"memory {record.namespace}/{record.name} has changed since; read it again", etag=memory_etag(record)
        )
