"""What every part of the engine is given by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memstream_server.core.policy import Policy, ShortTermKind
from memstream_server.core.values import MemoryKind
from memstream_server.engine.clock import Clock, Ids
from memstream_server.engine.embeddings import Embeddings
from memstream_server.engine.errors import CapabilityMissing
from memstream_server.engine.gather import Gatherer
from memstream_server.engine.ownership import LeaseTimes
from memstream_server.engine.reranking import Reranking
from memstream_server.engine.settings import Limits
from memstream_server.engine.turns import Turns
from memstream_server.ports.index import VectorIndex
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import MemoryRecord, Recorded
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import Analyzer, EmbeddingModel, Insights, ModelState, ModelStatus
from memstream_server.ports.operations import Failure, Operations
from memstream_server.ports.processes import Processes

if TYPE_CHECKING:
    from memstream_server.engine.actor import Actor
    from memstream_server.engine.transfer.transfers import TransferSettings


QUIET_S, QUIET_SHARED_S = 5.0, 1.0


class Metrics(Protocol):
    """Counts of what happens, without memory or user ids."""

    def received(self, observations: int, rejected: int, seconds: float) -> None:
        """A batch was made durable, so long after it came."""
        ...

    def stored(self, observations: int, seconds: float | None) -> None:
        """A batch's decisions were committed, so long after it came; None for one that an earlier process received."""
        ...

    def indexed(self, seconds: float) -> None:
        """What waited longest for the vector index is there now, so long after it was stored."""
        ...

    def committed(self, seconds: float) -> None: ...

    def events(self, recorded: Recorded) -> None: ...

    def recalled(self, seconds: float, degraded: bool) -> None: ...

    def outbox(self, depth: int) -> None: ...


@dataclass(slots=True, eq=False)
class Dependencies:
    """Shared by actors, recalls, the indexer and jobs. `committed`, `lost` and `index_...` are set by the engine."""

    journal: Journal
    index: VectorIndex
    analyzer: Analyzer
    embeddings: Embeddings
    gatherer: Gatherer
    insights: Insights | None
    clock: Clock
    ids: Ids
    limits: Limits
    turns: Turns
    metrics: Metrics
    committed: Callable[[str, Recorded, Commit], None]
    """Told after every commit, once RAM shows it: (memory uid, what was recorded, the commit)."""
    index_lost: Callable[[], None]
    """Told when a search found the index lost."""
    lost: Callable[[Actor], None]
    """Told when an actor is finished before its time."""
    operations: Operations
    failure_of: Callable[[Exception], Failure]
    """What a client may read of an error."""
    transfers: TransferSettings
    reranking: Reranking | None = None
    """None without a reranker."""
    models: Sequence[ModelStatus] = ()
    """How the calls of each model go."""
    index_degraded: Callable[[], str] = str
    """Why the index does not have all it should; empty when it does."""
    processes: Processes | None = None
    """Of a journal that other servers may write too."""
    lease: LeaseTimes = field(default_factory=LeaseTimes)

    @property
    def quiet_s(self) -> float:
        """After so long without news a watch looks by itself: another process's commits wake nobody here."""
        return QUIET_S if self.processes is None else QUIET_SHARED_S

    @property
    def embedding(self) -> EmbeddingModel:
        """The model of the space in force."""
        return self.embeddings.in_force.model

    def failing(self, role: str) -> str:
        """Why the model of a role gives no answers; empty while it does, and where there is none."""
        return next((one.error for one in self.models if one.role == role and one.state is ModelState.FAILING), "")

    async def understand(self, policy: Policy) -> None:
        """To be awaited before texts of a memory are analyzed. Raises CapabilityMissing."""
        try:
            await self.analyzer.prepare(policy.language)
        except ValueError as error:
            raise CapabilityMissing(f"policy.language is {policy.language}: {error}", capability="LANGUAGE") from error

    def enhances(self, record: MemoryRecord) -> bool:
        """Whether newcomers are compared with what short-term holds."""
        if record.kind is MemoryKind.HYBRID:
            return record.policy.short_term.kind is ShortTermKind.ENHANCED
        return record.kind is MemoryKind.ENHANCED_SHORT_TERM
