"""What the parts of the engine use, grouped: storage, models, runtime. The composition root fills the groups.

Imports no module of the engine that imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memstream_server.core.policy import Policy
from memstream_server.core.values import State
from memstream_server.engine.errors import CapabilityMissing
from memstream_server.engine.memory.enrich import Embeddings, Enricher
from memstream_server.engine.recall.reranking import Reranking
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.engine.settings import EngineLimits, LeaseTimes, TransferSettings
from memstream_server.ports.blocks import BlockStore
from memstream_server.ports.conversation_records import SessionStore
from memstream_server.ports.images import NO_IMAGES, Images
from memstream_server.ports.index import VectorIndex
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import Analyzer, ConflictJudge, EmbeddingModel, Insights, ModelState, ModelStatus
from memstream_server.ports.operations import OperationFailure, Operations
from memstream_server.ports.processes import Processes

POLL_ALONE_S, POLL_SHARED_S = 5.0, 1.0


class EngineCounts(Protocol):
    """Counts events and durations, without memory or user ids."""

    def count_received(self, observations: int, rejected: int, seconds: float) -> None:
        """A batch became durable `seconds` after its arrival."""
        ...

    def count_stored(self, observations: int, seconds: float | None) -> None:
        """A batch was committed `seconds` after its arrival; None if an earlier process received it."""
        ...

    def count_indexed(self, seconds: float) -> None:
        """The oldest row of a flush reached the vector index `seconds` after it was stored."""
        ...

    def count_commit(self, seconds: float) -> None: ...

    def count_events(self, recorded: Recorded) -> None: ...

    def count_recall(self, seconds: float, degraded: bool) -> None: ...

    def set_outbox(self, depth: int) -> None: ...


class EngineEvents(Protocol):
    """What an actor reports to the engine."""

    def on_commit(self, uid: str, recorded: Recorded, commit: Commit, before: State) -> None:
        """The memory committed, and its working set shows the commit. `before`: its tiers before the commit."""
        ...

    def on_actor_lost(self, uid: str, error: Exception) -> None:
        """The memory's actor failed with `error`."""
        ...


class IndexHealth(Protocol):
    """Whether the vector index is complete."""

    @property
    def degraded(self) -> str:
        """Why the index is incomplete; empty if it is complete."""
        ...

    def report_lost(self) -> None:
        """A search found that the index is gone."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The stores."""

    journal: Journal
    index: VectorIndex
    operations: Operations
    conversations: SessionStore
    blocks: BlockStore
    processes: Processes | None = None
    """None if no other server can write to the journal."""
    images: Images = NO_IMAGES

    @property
    def poll_interval_s(self) -> float:
        """How often an idle watch reads the journal. Commits of other processes wake no watch of this one."""
        return POLL_ALONE_S if self.processes is None else POLL_SHARED_S


@dataclass(frozen=True, slots=True, eq=False)
class EngineModels:
    """The analyzer and the models."""

    analyzer: Analyzer
    embeddings: Embeddings
    enricher: Enricher
    insights: Insights | None = None
    judge: ConflictJudge | None = None
    reranking: Reranking | None = None
    statuses: Sequence[ModelStatus] = ()

    @property
    def embedding_model(self) -> EmbeddingModel:
        """The model of the space in force."""
        return self.embeddings.in_force.model

    def error_of(self, role: str) -> str:
        """Why the model of a role fails; empty if it works, or if there is none."""
        return next((one.error for one in self.statuses if one.role == role and one.state is ModelState.FAILING), "")

    async def prepare_language(self, policy: Policy) -> None:
        """Load the analyzer of the policy's language; call before texts of the memory are analyzed.

        Raises CapabilityMissing.
        """
        try:
            await self.analyzer.prepare(policy.language)
        except ValueError as error:
            raise CapabilityMissing(f"policy.language is {policy.language}: {error}", capability="LANGUAGE") from error


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """Clock, ids, limits, metrics."""

    clock: Clock
    ids: Ids
    limits: EngineLimits
    metrics: EngineCounts
    failure_of: Callable[[Exception], OperationFailure]
    """What a client may read of an error."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineParts:
    """Everything that an engine is made of. Only `Engine.__init__` reads it."""

    storage: Storage
    models: EngineModels
    runtime: Runtime
    transfers: TransferSettings
    lease: LeaseTimes = field(default_factory=LeaseTimes)
