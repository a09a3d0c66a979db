"""The engine's front, called by the rpcs.

The streams are here; memories and fragments as resources are in `memories` and `fragments`. Each call finds the
memory's actor and passes it the work. Starts and stops the background tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from memstream_server.core.events import Event, EventType
from memstream_server.engine.background.feeds import Feeds
from memstream_server.engine.background.indexer import Indexer
from memstream_server.engine.background.jobs import Jobs, Reflecting
from memstream_server.engine.background.retention import Purging, Retention
from memstream_server.engine.background.standing_blocks import StandingBlocks
from memstream_server.engine.background.vectors import Compaction, MissingVectors
from memstream_server.engine.blocks import Blocks
from memstream_server.engine.conflicts import Conflicts
from memstream_server.engine.errors import (
    NOT_READ,
    EngineError,
    JournalUnavailable,
    MemoryDeleted,
    ModelMismatch,
    map_write_errors,
)
from memstream_server.engine.fragments import Fragments
from memstream_server.engine.memories import Memories
from memstream_server.engine.memory.batch_calls import BatchCalls
from memstream_server.engine.memory.image_changes import drop_outdated_images
from memstream_server.engine.memory.ingest import ObserveSession, open_session
from memstream_server.engine.operations.erase import Erasing
from memstream_server.engine.operations.reembed import Reembedding, Reindexing
from memstream_server.engine.operations.runner import OperationRunner
from memstream_server.engine.operations.transfer.export_memory import Exporter
from memstream_server.engine.operations.transfer.import_memory import Importer
from memstream_server.engine.recall.past import Past
from memstream_server.engine.recall.recall import Recaller, Shared
from memstream_server.engine.recall.recall_receipts import RecallReceipts
from memstream_server.engine.recall.reinforcement import Reinforcement
from memstream_server.engine.recall.scopes import SeveralMemories
from memstream_server.engine.recall.standing_query import OpenQueries, OpenQuery, StandingQuery, as_standing
from memstream_server.engine.recall.watch import Watchers
from memstream_server.engine.requests import (
    AckLevel,
    AsOf,
    Change,
    NewBatch,
    NewObservation,
    ProducerProgress,
    Query,
    RecallAnswer,
    RejectedObservation,
)
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.engine.runtime.registry import Registry
from memstream_server.engine.status import Info, MemoryStats, Serving, WriteStatus
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Answer, Recorded, Space
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import EmbeddingModel, ModelState, Spent

if TYPE_CHECKING:
    from memstream_server.core.values import State
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.recall.answers import PartialAnswer
    from memstream_server.engine.runtime.dependencies import EngineParts

log = structlog.get_logger(__name__)

__all__ = ["Engine", "ObserveSession"]

JOURNAL_TIMEOUT_S = 3.0
"""Timeout of the journal in health checks."""
BOUND_INTERVAL_S = 1.0
"""How often the bounds of active memories, which grow with use, are enforced."""


class Engine:
    """All memories of this process. The composition root makes it, then calls `start` and finally `stop`."""

    def __init__(
        self,
        parts: EngineParts,
        space: Space,
        *,
        journal_name: str = "",
        scorer_model: str = "",
        insight_model: str = "",
        spent: Sequence[Spent] = (),
    ) -> None:
        storage, models, runtime = parts.storage, parts.models, parts.runtime
        _check_space(space, models.embedding_model)
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self.clock = runtime.clock
        self._lease = parts.lease
        self._journal = storage.journal
        self._names = journal_name, scorer_model, insight_model
        self._spent = spent
        self.ownership = Ownership(storage.processes, storage.journal, runtime.clock, parts.lease)
        self._registry = Registry(storage, models, runtime, self.ownership, self)
        self._indexer = Indexer(storage, models, runtime, self._registry, space)
        self._recaller = Recaller(storage, models, runtime, self._indexer)
        self._jobs = Jobs(storage, models, runtime, self._registry, self._recaller)
        self._missing_vectors = MissingVectors(storage, models, runtime, self.ownership, self._jobs)
        self._retention = Retention(storage, runtime, self._registry)
        self._compaction = Compaction(storage, self._registry)
        self._reinforcement = Reinforcement(storage, models, runtime)
        self.open_queries = OpenQueries(runtime, self._registry)
        self._watchers = Watchers(storage.journal, storage.poll_interval_s)
        self.operations = OperationRunner(
            storage.operations, runtime.clock, runtime.ids, runtime.failure_of, self.ownership
        )
        self.reembedding = Reembedding(storage, models, runtime, self._registry, self._indexer)
        self.reindexing = Reindexing(self.operations, self._indexer, self.reembedding, self._missing_vectors)
        self.erasing = Erasing(
            self.operations, storage, models, runtime, self._registry, self._indexer, self._reinforcement
        )
        self.purging = Purging(self.operations, self._retention, self._registry)
        self.memories = Memories(storage, models, runtime, self._registry, self._handle_deleted)
        self.blocks = Blocks(storage.blocks, storage.journal, runtime.clock, storage.poll_interval_s, runtime.limits)
        self.standing_blocks = StandingBlocks(parts, self._registry, self._recaller, self.blocks, insight_model)
        self.conflicts = Conflicts(storage, runtime, self._registry)
        self.fragments = Fragments(storage, models, runtime, self._registry)
        self.feeds = Feeds(storage, runtime, self.fragments)
        self.past = Past(storage, models, runtime, self._registry)
        self.recall_receipts = RecallReceipts(storage, models, runtime, self._registry, self.past, self._recaller)
        self.exporter = Exporter(storage.journal, storage.conversations, parts.transfers, runtime.clock.now_us)
        self.importer = Importer(
            storage, models, runtime, self._registry, self.operations, self.memories.remove_memory, parts.transfers
        )
        self.scopes = SeveralMemories(
            storage.journal,
            runtime.clock,
            self._registry,
            self._recaller,
            self._reinforcement,
            self.open_queries,
            self._watchers,
            self.rank,
        )
        self.reflecting = Reflecting(self.operations, self._jobs, self._registry, storage, models, runtime)
        self._batch_calls = BatchCalls(storage, runtime, self._ask_index)
        self._journal_check: asyncio.Task[int] | None = None
        self._writing_check: asyncio.Task[None] | None = None
        self.writing = WriteStatus()
        """Renewed by `check_serving`."""
        self._following_servers: asyncio.Task[None] | None = None
        self._enforcing_bounds: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the background tasks and resume the work of an earlier process. Does not wait for the index."""
        await self._drop_outdated_images()
        await self.ownership.start()
        await self.reembedding.resume()
        self._indexer.start()
        self._reinforcement.start()
        self._jobs.start()
        self._missing_vectors.start()
        self._retention.start()
        self._compaction.start()
        self.feeds.start()
        self.standing_blocks.start()
        self._enforcing_bounds = asyncio.create_task(self._enforce_bounds())
        await self.importer.cleanup.start()
        if self.ownership.shared:
            self._following_servers = asyncio.create_task(self._follow_servers())
            return
        for uid in await self._journal.pending_memories():
            self._registry.revive_memory(uid)
        await self.operations.resume()

    async def _follow_servers(self) -> None:
        """With a shared journal: follow the other servers, and resume the work of those that ended."""
        while True:
            for step in (
                self._drop_outdated_images,  # first: a switch of the embedding space may take long
                self.reembedding.follow_store,
                self._revive_abandoned,
                self.operations.resume,
            ):
                try:
                    await step()
                except (JournalError, EngineError) as error:
                    log.warning("follow_servers_failed", step=step.__name__, error=error)
            await asyncio.sleep(self._lease.renew_s)

    async def _drop_outdated_images(self) -> None:
        await drop_outdated_images(self._storage.images, self._journal)

    async def _revive_abandoned(self) -> None:
        for uid in await self.ownership.list_abandoned():
            self._registry.revive_memory(uid)
        self._jobs.notify_jobs()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop everything in order: recalls and sessions first, the index's write-behind last."""
        if self._following_servers is not None:
            self._following_servers.cancel()
            await asyncio.gather(self._following_servers, return_exceptions=True)
        if self._enforcing_bounds is not None:
            self._enforcing_bounds.cancel()
        checks = [check for check in (self._journal_check, self._writing_check) if check is not None]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await self.operations.stop()
        await self.reembedding.stop()
        await self.importer.cleanup.stop()
        await self._retention.stop()
        await self._compaction.stop()
        await self.feeds.stop()
        await self.standing_blocks.stop()
        await self._missing_vectors.stop()
        await self._jobs.stop()
        await self.scopes.stop()
        await self._reinforcement.stop()
        await self._registry.close()
        # before the index, which may take seconds: other servers wait for the memories
        await self.ownership.release_all()
        await self._indexer.stop(grace_s)
        await self.ownership.stop()

    async def wait_for_compaction(self) -> None:
        """Until the vectors of an earlier server are converted."""
        await self._compaction.wait()

    @property
    def dimension(self) -> int:
        """Vector dimension."""
        return self._models.embedding_model.dimension

    def memory_stats(self) -> MemoryStats:
        """Use of RAM now."""
        actors = self._registry.list_busy()
        return MemoryStats(
            memories=len(self._registry),
            size_bytes=self._registry.size_bytes,
            backlog=sum(actor.producers.backlog for actor in actors),
            sessions=sum(actor.producers.sessions for actor in actors),
            producers=sum(len(actor.producers.list_all()) for actor in actors),
            watchers=len(self._watchers),
            owned=self.ownership.taken if self.ownership.shared else len(self._registry),
        )

    def info(self) -> Info:
        """The models and stores of the engine, and what is degraded now."""
        journal, scorer, insight = self._names
        return Info(
            self._models.embedding_model,
            scorer,
            insight,
            self._storage.index.description,
            journal,
            "; ".join(filter(None, self._list_degraded())),
            self._spent,
            self._models.statuses,
        )

    def _list_degraded(self) -> list[str]:
        problems = self._journal.write_problem, self._indexer.degraded, self._count_unindexed()
        return [*problems, *self._failing_models()]

    def _count_unindexed(self) -> str:
        """How many active memories need an index that this server does not have; empty if none does."""
        if not self._runtime.limits.newest_vectors:
            return ""
        count = sum(actor.working.dense is None for actor in self._registry.list_actors())
        return f"no Milvus (milvus_uri) for {count} memories that do not fit in RAM" if count else ""

    @property
    def index_degraded(self) -> str:
        """Why the vector index is incomplete; empty if it is complete."""
        return self._indexer.degraded

    def _failing_models(self) -> list[str]:
        failing = [one for one in self._models.statuses if one.state is ModelState.FAILING]
        return [f"{one.role} {one.model} fails: {one.error}" for one in failing]

    async def check_serving(self) -> Serving:
        """Check stores and models. Sends the journal a small query with a timeout."""
        answers = await self._journal_answers()
        self.writing.set_problem(self._journal.write_problem)
        return Serving(
            self.ownership.is_valid() and answers,
            not self._indexer.degraded,
            not self.writing.problem,
            {one.role: one.state is not ModelState.FAILING for one in self._models.statuses},
        )

    async def _journal_answers(self) -> bool:
        if self._writing_check is None or self._writing_check.done():
            self._writing_check = asyncio.create_task(self._journal.check_writing())  # a disk that hangs keeps it
        if self._journal_check is None:
            self._journal_check = asyncio.create_task(self._journal.outbox_last())
        await asyncio.wait({self._journal_check}, timeout=JOURNAL_TIMEOUT_S)
        if not self._journal_check.done():
            return False  # no second query: each occupies one of the journal's few readers
        asked, self._journal_check = self._journal_check, None
        return asked.exception() is None

    async def run_maintenance(self) -> None:
        """Forget, erase and prune what is due now instead of at the next interval."""
        await self._retention.run_round()

    async def stored_answer(self, request: str) -> Answer | None:
        """The earlier answer to a request_id."""
        return await self._journal.get_answer(request)

    # ---- streams
    async def open_observe(
        self, namespace: str, name: str, producer: str, outcomes: bool = False, related: int = 0
    ) -> ObserveSession:
        """Open a session, the producer's only one; `outcomes` keeps the outcomes of its observations, each with up to
        `related` related statements.

        Raises MemoryNotFound, StorageIsFull.
        """
        async with self._registry.use(namespace, name) as actor:
            session = await map_write_errors(open_session(actor, producer, outcomes=outcomes))
            session.name_related(related)
            self._ask_index(session)
            return session

    async def observe_batch(
        self,
        namespace: str,
        name: str,
        producer: str,
        first_sequence: int,
        items: Sequence[NewObservation | RejectedObservation],
        level: AckLevel,
        request_id: str = "",
        digest: bytes = b"",
        related: int = 0,
    ) -> ProducerProgress:
        """Observe one batch up to the requested level; see NewBatch and batch_calls.py."""
        batch = NewBatch(producer, first_sequence, items, level, request_id, digest, related)
        async with self._registry.use(namespace, name) as actor:
            return await self._batch_calls.observe_batch(actor, batch)

    async def recall(self, namespace: str, name: str, query: Query) -> RecallAnswer:
        """Answer one query; cancellable. Afterwards the recalled fragments are offered to short-term, unless the query
        is of the past."""
        part = await self.rank(namespace, name, query)
        answer = await self._recaller.complete([part], query)
        if part.actor is not None:
            self._reinforcement.queue_answer(part.actor, query, answer)
        return answer

    async def rank(self, namespace: str, name: str, query: Query, shared: Shared | None = None) -> PartialAnswer:
        """What a memory says to a query, and the receipt of it that the query asks for."""
        if query.as_of is not None:
            return await self._rank_past(namespace, name, query, query.as_of, shared)
        async with self._registry.use(namespace, name) as actor:
            rank = partial(self._rank_current, actor, query, shared)
            part = await (self.recall_receipts.rank_and_keep(actor, query, rank) if query.receipt else rank())
            return dataclasses.replace(part, actor=actor)

    async def _rank_past(
        self, namespace: str, name: str, query: Query, as_of: AsOf, shared: Shared | None
    ) -> PartialAnswer:
        """Rank the memory as it was; nothing is reinforced."""
        try:
            async with self.past.limit_loads():
                past = await self.past.load(namespace, name, as_of)
                query = replace(
                    query, now_us=past.time_us if query.now_us is None else query.now_us, expiry_us=past.time_us
                )
                part = await self._recaller.rank(past, query, shared)
        except JournalError as error:
            raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error
        gone = f"{len(past.missing)} fragments of that revision have left the memory since" if past.missing else ""
        degraded = "; ".join(filter(None, (part.answer.degraded, gone)))
        answer = replace(part.answer, degraded=degraded, as_of_revision=part.answer.revision)
        return dataclasses.replace(part, answer=answer)

    async def follow_query(
        self,
        namespace: str,
        name: str,
        query: Query,
        again: Callable[[], Awaitable[None]],
        listed: OpenQuery | None = None,
    ) -> AsyncGenerator[Change, None]:
        """The answer to a standing query, then each change of it; see standing_query.py. The caller closes the
        generator.

        `again` is awaited before every ranking after the first; its errors end the query. `listed` is what a list shows
        of it.
        """
        query, listed = as_standing(query), listed or OpenQuery()
        record = await self._registry.read_record(namespace, name)
        standing = StandingQuery(self._watchers, self._runtime.clock)
        with standing, self.open_queries.keep([record.uid], listed):
            while True:
                standing.waiting.news.clear()
                async with self._registry.use(namespace, name) as actor:
                    if actor.uid != record.uid:
                        raise MemoryDeleted(f"memory {namespace}/{name} was deleted, and another memory has its name")
                    standing.watch([actor.working.record])
                    part = await self._rank_current(actor, query, Shared(standing.vectors))
                    change = standing.next_change(await self._recaller.complete([part], query))
                    if change is not None:
                        self._reinforcement.queue_answer(actor, query, change.answer)
                if change is not None:
                    listed.change_us, listed.recollections = self._runtime.clock.now_us(), len(change.ids)
                    yield change
                query = replace(query, min_revision=0, preferred=standing.ids)
                await standing.wait_until_due()
                await again()

    async def _rank_current(self, actor: Actor, query: Query, shared: Shared | None) -> PartialAnswer:
        self._check_current(actor)
        try:
            part = await self._recaller.rank(actor, query, shared)
        except JournalError as error:
            raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error
        self._check_current(actor)
        return part

    def _check_current(self, actor: Actor) -> None:
        actor.raise_if_failed()
        self.ownership.check_lease()

    async def watch(
        self, namespace: str, name: str, uid: str, revision: int, ordinal: int
    ) -> AsyncGenerator[tuple[str, int, int, tuple[Event, ...]], None]:
        """(uid, revision, time in µs, events) of each transition after the cursor; see rpc/streams.py."""
        record = await self._registry.read_record(namespace, name)
        async with contextlib.aclosing(self._watchers.watch(record, uid, revision, ordinal)) as steps:
            async for step in steps:
                yield step

    async def reinforce_fragments(self, namespace: str, name: str, ids: Sequence[str]) -> None:
        """Offer fragments to short-term as if they had just been recalled."""
        async with self._registry.use(namespace, name) as actor:
            found = await self._journal.get_fragments(actor.uid, ids)
            self._reinforcement.offer_fragments(actor, found)
            await self._reinforcement.wait_for_offers()

    async def wait_for_reinforcement(self) -> None:
        """Wait until the offers of all earlier recalls are decided."""
        await self._reinforcement.wait_for_offers()

    # ---- internal
    async def _enforce_bounds(self) -> None:
        """Enforce the bounds of active memories periodically."""
        while True:
            await asyncio.sleep(BOUND_INTERVAL_S)
            await self._registry.enforce_bounds()

    def _ask_index(self, session: ObserveSession) -> None:
        """Wake the indexer: after a reload only the next read of the outbox shows what is indexed."""
        if session.indexed_behind:
            self._indexer.notify_rows(0)

    def _handle_deleted(self, uid: str) -> None:
        """The memory was deleted: end its watches and remove it from the index."""
        self._watchers.notify_deleted(uid)
        self.blocks.notify_deleted(uid)
        self.standing_blocks.notify()
        self._indexer.notify_rows(1)

    # ---- EngineEvents
    def on_commit(self, uid: str, recorded: Recorded, commit: Commit, before: State) -> None:
        """Wake the tasks that depend on the commit."""
        self._registry.mark_changed(uid)
        self._watchers.notify_commit(uid, recorded.revision)
        self._indexer.notify_rows(len(commit.index))
        if commit.jobs:
            self._jobs.notify_jobs()
        if uid in self.standing_blocks.memories:
            self.standing_blocks.notify()
        actor = self._registry.peek(uid)
        if actor is not None:
            self._reinforcement.keep_vectors(actor, before, commit.rows)
        for event in recorded.events:
            if event.type in (EventType.ECHOED, EventType.REPEATED) and actor is not None:
                self._reinforcement.count_accesses(actor, [event.fragment], recorded.time_us)
        self._runtime.metrics.count_events(recorded)

    def on_actor_lost(self, uid: str, error: Exception) -> None:
        """Load the memory again."""
        self._registry.handle_lost_actor(uid, error)


def _check_space(space: Space, embedding: EmbeddingModel) -> None:
    if space.model != embedding.name or space.dimension != embedding.dimension:
        raise ModelMismatch(
            f"the data holds vectors of {space.model} ({space.dimension} dimensions), this server is set up for "
            f"{embedding.name} ({embedding.dimension}). Start it with embedding set to "
            "the former model. To change the model, set the new one as next_embedding and run "
            "`memstream reindex --embed`"
        )
