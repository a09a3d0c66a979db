"""What goes in and comes out as frozen values: times are aware datetimes in UTC, vectors one-dimensional numpy arrays.

The meaning of every field is written in the contract (memstream/v1/*.proto); here are the types a Python program sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypedDict, overload

import numpy as np
import numpy.typing as npt

from memstream.argument_types import Count, Position, Seconds, Several, VectorLike
from memstream.arguments import check_fields
from memstream.errors import MemstreamError

Vector: TypeAlias = Annotated[npt.NDArray[np.floating[Any]] | Sequence[float], VectorLike]
"""An embedding: one-dimensional, finite, of the server's dimension; sent as float32, normalised by the server."""
MetadataValue: TypeAlias = str | int | float | bool


class Tier(StrEnum):
    """Where a fragment is."""

    SENSORY = "sensory"
    SHORT_TERM = "short_term"
    LONG_TERM = "long_term"


class FragmentKind(StrEnum):
    """How a fragment came to be."""

    OBSERVATION = "observation"
    INSIGHT = "insight"


class MemoryKind(StrEnum):
    """Which tiers a memory has."""

    SENSORY = "sensory"
    SHORT_TERM = "short_term"
    ENHANCED_SHORT_TERM = "enhanced_short_term"
    LONG_TERM = "long_term"
    HYBRID = "hybrid"


class AckLevel(StrEnum):
    """How far an observation has come: durable, visible to every recall, in the vector index."""

    RECEIVED = "received"
    STORED = "stored"
    INDEXED = "indexed"


class EventType(StrEnum):
    """The steps a fragment takes. UNKNOWN stands for one that is newer than this SDK."""

    UNKNOWN = "unknown"
    OBSERVED = "observed"
    FILTERED = "filtered"
    ADMITTED = "admitted"
    ENHANCED = "enhanced"
    WEAKENED = "weakened"
    PROMOTED = "promoted"
    OVERFLOWED = "overflowed"
    DROPPED = "dropped"
    REPEATED = "repeated"
    ECHOED = "echoed"
    REFLECTED = "reflected"
    MERGED = "merged"
    UPDATED = "updated"
    FORGOTTEN = "forgotten"
    RESTORED = "restored"
    ERASED = "erased"
    UNVECTORED = "unvectored"
    VECTORED = "vectored"
    RATED = "rated"
    MODEL_ASKED = "model_asked"
    MEMORY_CREATED = "memory_created"
    MEMORY_UPDATED = "memory_updated"
    IMPORTED = "imported"


class EventReason(StrEnum):
    """Why a fragment left. UNKNOWN stands for one that is newer than this SDK."""

    UNKNOWN = "unknown"
    BELOW_THRESHOLD = "below_threshold"
    NO_NEXT_TIER = "no_next_tier"
    CAPACITY = "capacity"
    CLEARED = "cleared"
    EXPIRED = "expired"
    RETENTION = "retention"
    REQUESTED = "requested"


class Capability(StrEnum):
    """A part of the contract that a server may or may not have. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    WATCH = "watch"
    CONVERSATIONS = "conversations"
    LIFECYCLE = "lifecycle"
    ERASE = "erase"
    EXPORT = "export"
    OPERATIONS = "operations"
    REFLECTION = "reflection"
    SUBSCRIBE = "subscribe"


class ModelState(StrEnum):
    """Whether a model of the server answers. UNKNOWN: it was not asked yet, or the state is newer than this SDK."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    FAILING = "failing"


class OperationState(StrEnum):
    """Where an operation stands. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@check_fields
@dataclass(frozen=True, slots=True)
class Structured:
    """One step of an agent in parts; empty fields were not given. The values are embedded and indexed, not the keys."""

    question: str = ""
    thought: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observation: str = ""


class ObservationFields(TypedDict, total=False):
    """What may be said of an observation beside its words; see Observation."""

    speaker: str
    session: str
    observe_time: datetime | None
    importance: float | None
    metadata: Mapping[str, MetadataValue]
    embedding: Vector | None
    expire_time: datetime | None
    ttl: timedelta | None
    external_id: str
    token_count: Count


@check_fields
@dataclass(frozen=True, slots=True)
class Observation:
    """What is perceived.

    `importance` in [0, 1] skips the scorer; `session` empty takes the stream's; `observe_time` None takes the server's
    clock; at most one of `expire_time` and `ttl`; an `external_id` that exists replaces what its fragment has from you.
    """

    body: str | Structured
    speaker: str = ""
    session: str = ""
    observe_time: datetime | None = None
    importance: float | None = None
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict[str, MetadataValue])
    embedding: Vector | None = field(default=None, compare=False)
    expire_time: datetime | None = None
    ttl: timedelta | None = None
    external_id: str = ""
    token_count: Count = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """An observation once it is in a memory, or an insight. `content` is empty where `structured` is given."""

    id: str
    kind: FragmentKind
    tier: Tier | None
    content: str
    structured: Structured | None
    merged_text: str
    speaker: str
    session: str
    importance: float
    observe_time: datetime | None
    create_time: datetime | None
    access_time: datetime | None
    access_count: int
    enhancement_count: int
    duplicate_count: int
    sources: tuple[str, ...]
    metadata: Mapping[str, MetadataValue]
    expire_time: datetime | None
    pinned: bool
    external_id: str
    model: str
    etag: str
    forget_time: datetime | None
    token_count: int


@check_fields
@dataclass(frozen=True, slots=True)
class Filter:
    """Which fragments are meant; conditions are joined by AND, an empty one does not restrict.

    `metadata` maps a key to the value it must have, or to a collection of values of which it must have one.
    `observe_time_min` is inclusive, `observe_time_max` exclusive.
    """

    sessions: Several[str] = ()
    speakers: Several[str] = ()
    kinds: Several[FragmentKind] = ()
    tiers: Several[Tier] = ()
    observe_time_min: datetime | None = None
    observe_time_max: datetime | None = None
    importance_min: float | None = None
    importance_max: float | None = None
    metadata: Mapping[str, MetadataValue | Several[MetadataValue]] = field(
        default_factory=dict[str, "MetadataValue | Several[MetadataValue]"]
    )
    exclude_ids: Several[str] = ()


@check_fields
@dataclass(frozen=True, slots=True)
class Weights:
    """alpha x recency + beta x relevance + gamma x importance, each 0 to 100; None: by policy."""

    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None


class RecallOptions(TypedDict, total=False):
    """How a query is answered; what is not given, or None, is decided by the memory's policy.

    `limit` recollections; `min_revision` waits (within `timeout_s`) until that revision is visible; `explain` says how
    each score came about; up to `near_misses` fragments that came close are named with the stage that removed them;
    `token_budget` bounds ranking and working memory together; `now` is the time recency counts from; `filter` binds
    working memory, too; `fold` False gives recollections that say the same a place each.
    """

    embedding: Vector | None
    now: datetime | None
    limit: Count | None
    weights: Weights | None
    min_relevance: float | None
    filter: Filter | None
    min_revision: Position | None
    explain: bool | None
    near_misses: Count | None
    reinforce: bool | None
    token_budget: Count | None
    omit_working_memory: bool | None
    fold: bool | None
    timeout_s: Seconds | None


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One part of a score: value x weight = contribution."""

    name: str
    value: float
    weight: float
    contribution: float
    details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a score came about: the contributions sum to it."""

    parts: tuple[ScorePart, ...]
    formula: str


@dataclass(frozen=True, slots=True)
class Recollection:
    """A fragment that was recalled, and its scores; `explanation` is None unless asked for.

    `folded_ids` are the other fragments that say the same: they take no place of their own in the answer.
    """

    fragment: Fragment
    score: float
    relevance: float
    rank: int
    truncated: bool
    explanation: Explanation | None
    folded_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A fragment that came close, and the stage that removed it."""

    fragment_id: str
    stage: str
    score: float | None
    relevance: float | None


@dataclass(frozen=True, slots=True)
class Answer(Sequence[Recollection]):
    """What the memory knows: a sequence of recollections, best first, and what else the server says of the query.

    `working_memory` is the short-term tier in order; `timings` are seconds by step; `degraded` is empty unless
    the answer lacks something: a leg of the search, or importances; `best_relevance` is of all candidates, returned or
    not.
    """

    recollections: tuple[Recollection, ...]
    working_memory: tuple[Fragment, ...]
    revision: int
    eligible: int
    considered: int
    best_relevance: float
    degraded: str
    near_misses: tuple[NearMiss, ...]
    timings: Mapping[str, float]
    tokens: int

    @overload
    def __getitem__(self, index: int) -> Recollection: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Recollection, ...]: ...
    def __getitem__(self, index: int | slice) -> Recollection | tuple[Recollection, ...]:
        return self.recollections[index]

    def __len__(self) -> int:
        return len(self.recollections)

    def __iter__(self) -> Iterator[Recollection]:
        return iter(self.recollections)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an observation when it was stored: its id, or the fragment it was counted on."""

    sequence: int
    fragment_id: str
    type: EventType
    other_id: str
    tier: Tier | None


@dataclass(frozen=True, slots=True)
class Rejected:
    """An observation refused before it was received: its number and why."""

    sequence: int
    error: MemstreamError


@dataclass(frozen=True, slots=True)
class Resumption:
    """What the server said of a producer's earlier numbers to a stream that was opened with `known_sequence`.

    Refusals from `rejected_since` on are complete, outcomes from `outcomes_since` on of what was stored by then: both
    are `known_sequence` + 1, or more where older ones are no longer kept. Without `outcomes` there are none.
    """

    rejected: tuple[Rejected, ...]
    outcomes: tuple[Outcome, ...]
    rejected_since: int
    outcomes_since: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """How far a batch has come: last numbers, the revision that shows it, what was refused, what became of it."""

    received: int
    stored: int
    indexed: int
    revision: int
    rejected: tuple[Rejected, ...]
    outcomes: tuple[Outcome, ...]
