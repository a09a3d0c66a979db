"""The engine's front: what the wire calls.

Memories and fragments as resources are `memories` and `fragments`; the streams are here. Finds the memory's actor and
hands the work to it. Starts and stops what runs in the background.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from memstream_server.core.events import Event, EventType
from memstream_server.engine.background.indexer import Indexer
from memstream_server.engine.background.jobs import Jobs
from memstream_server.engine.background.retention import Forgetting
from memstream_server.engine.errors import (
    NOT_READ,
    EngineError,
    JournalUnavailable,
    MemoryDeleted,
    ModelMismatch,
    written,
)
from memstream_server.engine.fragments import Fragments
from memstream_server.engine.memories import Memories
from memstream_server.engine.memory.batch_calls import BatchCalls
from memstream_server.engine.memory.producers import ObserveSession
from memstream_server.engine.operations.erase import Erasing
from memstream_server.engine.operations.purge import Purging
from memstream_server.engine.operations.reembed import Reembedding
from memstream_server.engine.operations.reflect import Reflecting
from memstream_server.engine.operations.reindex import Reindexing
from memstream_server.engine.operations.runner import OperationRunner
from memstream_server.engine.operations.transfer.transfers import Transfers
from memstream_server.engine.recall.recall import Recaller
from memstream_server.engine.recall.reinforcement import Reinforcement
from memstream_server.engine.recall.standing_query import Standing, standing
from memstream_server.engine.recall.watch import Watchers
from memstream_server.engine.requests import (
    AckLevel,
    Change,
    NewBatch,
    NewObservation,
    Progress,
    Query,
    RecallAnswer,
    Refusal,
)
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.engine.runtime.registry import Registry
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Answer, Recorded
from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import EmbeddingModel, ModelState, ModelStatus, Spent

if TYPE_CHECKING:
    from memstream_server.core.values import Vector
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineParts

log = structlog.get_logger(__name__)

__all__ = ["Engine", "Info", "ObserveSession"]

JOURNAL_PATIENCE_S = 3.0
"""How long the journal may take to answer before it is said not to serve."""
BOUND_INTERVAL_S = 1.0
"""How often active memories, which grow, are held to their bounds."""


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
    models: Sequence[ModelStatus] = ()


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
    """Watches and standing queries."""
    owned: int
    """Memories that no other server may change: where others share the journal, those taken; alone, those held."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Which of the parts behind the engine serve now."""

    journal: bool
    """It answers, and where others share it this process's lease holds."""
    index: bool
    """It answers and holds all it should but for what is on its way."""
    models: Mapping[str, bool] = field(default_factory=dict)
    """By role: whether its last call succeeded, or none was made."""


class Engine:
    """All memories of this process. Made by the composition root; `start` before use, `stop` after."""

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
        _check_space(space, models.embedding)
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._lease = parts.lease
        self._journal = storage.journal
        self._names = journal_name, scorer_model, insight_model
        self._spent = spent
        self.ownership = Ownership(storage.processes, storage.journal, runtime.clock, parts.lease)
        self._registry = Registry(storage, models, runtime, self.ownership, self)
        self._indexer = Indexer(storage, models, runtime, self._registry, space)
        self._recaller = Recaller(storage, models, runtime, self._indexer)
        self._jobs = Jobs(storage, models, runtime, self._registry, self._recaller)
        self._forgetting = Forgetting(storage, runtime, self._registry)
        self._reinforcement = Reinforcement(storage, models, runtime)
        self._watchers = Watchers(storage.journal, storage.poll_interval_s)
        self.operations = OperationRunner(
            storage.operations, runtime.clock, runtime.ids, runtime.failure_of, self.ownership
        )
        self.reembedding = Reembedding(storage, models, runtime, self._registry, self._indexer)
        self.reindexing = Reindexing(self.operations, self._indexer, self.reembedding)
        self.erasing = Erasing(
            self.operations, storage, models, runtime, self._registry, self._indexer, self._reinforcement
        )
        self.purging = Purging(self.operations, self._forgetting, self._registry)
        self.memories = Memories(storage, models, runtime, self._registry, self._gone)
        self.fragments = Fragments(storage, models, runtime, self._registry)
        self.transfers = Transfers(
            storage, models, runtime, self._registry, self.operations, self.memories.remove, parts.transfers
        )
        self.reflecting = Reflecting(self.operations, self._jobs, self._registry, storage, models, runtime)
        self._batch_calls = BatchCalls(storage, runtime, self._ask_index)
        self._asking: asyncio.Task[int] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._bounding: asyncio.Task[None] | None = None

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
                    log.warning("not_swept", step=step.__name__, error=error)
            await asyncio.sleep(self._lease.renew_s)

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
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self.operations.stop()
        await self.reembedding.stop()
        await self.transfers.stop()
        await self._forgetting.stop()
        await self._jobs.stop()
        await self._reinforcement.stop()
        await self._registry.close()
        await self.ownership.release_all()  # before the index, which may take seconds: others wait for the memories
        await self._indexer.stop(grace_s)
        await self.ownership.stop()

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return self._models.embedding.dimension

    def held(self) -> Holdings:
        """What is in RAM now."""
        actors = self._registry.actors()
        return Holdings(
            memories=len(actors),
            size_bytes=self._registry.size_bytes,
            backlog=sum(actor.receiving.backlog for actor in actors),
            sessions=sum(actor.receiving.sessions for actor in actors),
            producers=sum(len(actor.receiving.producers()) for actor in actors),
            watchers=len(self._watchers),
            owned=self.ownership.taken if self.ownership.shared else len(actors),
        )

    def info(self) -> Info:
        """What the engine works with, and what is degraded now."""
        journal, scorer, insight = self._names
        return Info(
            self._models.embedding,
            scorer,
            insight,
            self._storage.index.description,
            journal,
            "; ".join(filter(None, (self._indexer.degraded, *self._failing_models()))),
            self._spent,
            self._models.statuses,
        )

    @property
    def index_degraded(self) -> str:
        """Why the vector index does not have all it should; empty when it does."""
        return self._indexer.degraded

    def _failing_models(self) -> list[str]:
        failing = [one for one in self._models.statuses if one.state is ModelState.FAILING]
        return [f"{one.role} {one.model} fails: {one.error}" for one in failing]

    async def serving(self) -> Serving:
        """Ask the journal for something small, for a bounded time."""
        return Serving(
            self.ownership.valid() and await self._journal_answers(),
            not self._indexer.degraded,
            {one.role: one.state is not ModelState.FAILING for one in self._models.statuses},
        )

    async def _journal_answers(self) -> bool:
        if self._asking is None:
            self._asking = asyncio.create_task(self._journal.outbox_last())
        await asyncio.wait({self._asking}, timeout=JOURNAL_PATIENCE_S)
        if not self._asking.done():
            return False  # and no second question: each keeps one of the journal's few readers
        asked, self._asking = self._asking, None
        return asked.exception() is None

    async def maintain(self) -> None:
        """Forget, erase and prune what is due, now and not at the next interval."""
        await self._forgetting.round()

    async def stored_answer(self, request: str) -> Answer | None:
        """The answer a request_id got before."""
        return await self._journal.get_answer(request)

    # ---- streams
    async def open_observe(self, namespace: str, name: str, producer: str, outcomes: bool = False) -> ObserveSession:
        """The producer's one open stream; `outcomes` keeps what becomes of what it sends.

        Raises MemoryNotFound, StorageIsFull.
        """
        async with self._registry.use(namespace, name) as actor:
            session = await written(actor.receiving.open_session(producer, outcomes=outcomes))
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
        digest: bytes = b"",
    ) -> Progress:
        """One batch to the level asked for; see NewBatch and batch_calls.py."""
        batch = NewBatch(producer, first_sequence, items, level, request_id, digest)
        async with self._registry.use(namespace, name) as actor:
            return await self._batch_calls.observe(actor, batch)

    async def recall(self, namespace: str, name: str, query: Query) -> RecallAnswer:
        """Answer one query; cancellable. What it found is offered to short-term afterwards."""
        async with self._registry.use(namespace, name) as actor:
            answer = await self._recall(actor, query)
            self._reinforcement.recalled(actor, query, answer)
            return answer

    async def follow(
        self, namespace: str, name: str, query: Query, again: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[Change, None]:
        """The answer to a standing query, then each change of it; see standing.py. To be closed.

        `again` is awaited before each ranking but the first; what it raises ends it.
        """
        query = standing(query)
        record = await self._registry.record(namespace, name)
        with self._watchers.waiting(record) as waiting:
            told = Standing(self._watchers, record, waiting, self._runtime.clock)
            while True:
                waiting.news.clear()
                async with self._registry.use(namespace, name) as actor:
                    if actor.uid != record.uid:
                        raise MemoryDeleted(f"memory {namespace}/{name} was deleted, and another one has its name")
                    told.retention = actor.working.record.policy.retention
                    change = told.change(await self._recall(actor, query, told.vectors))
                    if change is not None:
                        self._reinforcement.recalled(actor, query, change.answer)
                if change is not None:
                    yield change
                query = replace(query, min_revision=0, preferred=told.ids)
                await told.due()
                await again()

    async def _recall(self, actor: Actor, query: Query, vectors: dict[str, Vector] | None = None) -> RecallAnswer:
        self._check_current(actor)
        try:
            answer = await self._recaller.recall(actor, query, vectors)
        except JournalError as error:
            raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error
        self._check_current(actor)
        return answer

    def _check_current(self, actor: Actor) -> None:
        actor.raise_if_failed()
        self.ownership.check()

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
            found = await self._journal.get_fragments(actor.uid, ids)
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
            await self._registry.shrink()

    def _ask_index(self, session: ObserveSession) -> None:
        """After a memory was read again nobody knows what of it is indexed until the outbox is next looked at."""
        if session.indexed_behind:
            self._indexer.entered(0)

    def _gone(self, uid: str) -> None:
        """The memory was deleted: whoever watches it is told, and the index has to let go of it."""
        self._watchers.deleted(uid)
        self._indexer.entered(1)

    # ---- EngineEvents
    def committed(self, uid: str, recorded: Recorded, commit: Commit) -> None:
        """Wake what depends on the memory's commits."""
        self._watchers.committed(uid, recorded.revision)
        self._indexer.entered(len(commit.index))
        if commit.jobs:
            self._jobs.entered()
        actor = self._registry.peek(uid)
        for event in recorded.events:
            if event.type in (EventType.ECHOED, EventType.REPEATED) and actor is not None:
                self._reinforcement.accessed(actor, [event.fragment], recorded.time_us)
        self._runtime.metrics.count_events(recorded)

    def actor_lost(self, uid: str, error: Exception) -> None:
        """Load the memory again."""
        self._registry.handle_lost_actor(uid, error)


def _check_space(space: Space, embedding: EmbeddingModel) -> None:
    if space.model != embedding.name or space.dimension != embedding.dimension:
        raise ModelMismatch(
            f"the data holds vectors of {space.model} ({space.dimension} dimensions), this server is set up for "
            f"{embedding.name} ({embedding.dimension}). Start it with embedding set to "
            "the former model; to change the model, set the other one as next_embedding beside it and run "
            "`memstream reindex --embed`"
        )
