"""Arguments and results as frozen values: times are aware datetimes in UTC, vectors one-dimensional numpy arrays.

The contract (memstream/v1/*.proto) documents every field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from memstream.argument_types import Count, Moment, Position, Seconds, Several, VectorLike
from memstream.arguments import check_fields
from memstream.conflict_values import Related
from memstream.errors import MemstreamError

Vector: TypeAlias = Annotated[npt.NDArray[np.floating[Any]] | Sequence[float], VectorLike]
"""An embedding: one-dimensional, finite, of the server's dimension; sent as float32, normalised by the server."""
MetadataValue: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any] | None
"""What JSON has: lists and dicts hold the same, eight deep at most."""
Scalar: TypeAlias = str | int | float | bool | None
"""A value of metadata that is neither a list nor a dict."""


class Tier(StrEnum):
    """Where a fragment is."""

    SENSORY = "sensory"
    SHORT_TERM = "short_term"
    LONG_TERM = "long_term"


class FragmentKind(StrEnum):
    """The origin of a fragment."""

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
    """The progress of an observation: durable, visible to every recall, in the vector index."""

    RECEIVED = "received"
    STORED = "stored"
    INDEXED = "indexed"


class EventType(StrEnum):
    """The steps of a fragment. UNKNOWN: newer than this SDK."""

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
    SUPERSEDED = "superseded"
    SUPERSESSION_UNDONE = "supersession_undone"
    CONFLICT_SUSPECTED = "conflict_suspected"
    CONFLICT_RESOLVED = "conflict_resolved"
    CONFLICT_ENDED = "conflict_ended"
    RECALLED = "recalled"


class Role(StrEnum):
    """What a speaker is to the conversation. Recall ranks a user's message together with the assistant's reply."""

    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"
    SYSTEM = "system"


class Truth(StrEnum):
    """Which fragments are returned: only current ones, or superseded and not valid ones too."""

    CURRENT = "current"
    ALL = "all"


class TruthStatus(StrEnum):
    """Whether the content of a fragment is current. UNKNOWN: the server is older than this field, or newer than this
    SDK."""

    UNKNOWN = "unknown"
    CURRENT = "current"
    SUPERSEDED = "superseded"
    NOT_YET_VALID = "not_yet_valid"
    NO_LONGER_VALID = "no_longer_valid"


class EventReason(StrEnum):
    """Why a fragment left. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    BELOW_THRESHOLD = "below_threshold"
    NO_NEXT_TIER = "no_next_tier"
    CAPACITY = "capacity"
    CLEARED = "cleared"
    EXPIRED = "expired"
    RETENTION = "retention"
    REQUESTED = "requested"


class Capability(StrEnum):
    """An optional part of the contract. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    WATCH = "watch"
    CONVERSATIONS = "conversations"
    LIFECYCLE = "lifecycle"
    ERASE = "erase"
    EXPORT = "export"
    OPERATIONS = "operations"
    REFLECTION = "reflection"
    SUBSCRIBE = "subscribe"
    BLOCKS = "blocks"


class ModelState(StrEnum):
    """Whether a model of the server responds. UNKNOWN: not called yet, or newer than this SDK."""

    UNKNOWN = "unknown"
    SERVING = "serving"
    FAILING = "failing"


class OperationState(StrEnum):
    """The state of an operation. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@check_fields
@dataclass(frozen=True, slots=True)
class Structured:
    """One step of an agent; empty fields were not given. Values are embedded and indexed, keys are not."""

    question: str = ""
    thought: str = ""
    phase: str = ""
    action_intention: str = ""
    action_reason: str = ""
    action: str = ""
    action_input: str = ""
    observation: str = ""


class ObservationFields(TypedDict, total=False):
    """Optional fields of an observation; see Observation."""

    speaker: str
    role: Role | None
    session: str
    observe_time: datetime | None
    importance: float | None
    metadata: Mapping[str, MetadataValue]
    embedding: Vector | None
    expire_time: datetime | None
    ttl: timedelta | None
    external_id: str
    token_count: Count
    supersedes: Several[str]
    valid_from: datetime | None
    valid_until: datetime | None


@check_fields
@dataclass(frozen=True, slots=True)
class Observation:
    """Text or a structured step, with optional fields.

    `role`: what the speaker is; None lets the server decide by the speaker's name or by the length of what they say.
    `importance` in [0, 1] skips the scorer; an empty `session` means the stream's; without an `observe_time` it is the
    server's clock; at most one of `expire_time` and `ttl`; an existing `external_id` replaces the client's fields of
    its fragment. `supersedes`: ids or external_ids of what it corrects; `valid_from` and `valid_until` (exclusive)
    bound the time in which it is true.
    """

    body: str | Structured
    speaker: str = ""
    role: Role | None = None
    session: str = ""
    observe_time: datetime | None = None
    importance: float | None = None
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict[str, MetadataValue])
    embedding: Vector | None = field(default=None, compare=False)
    expire_time: datetime | None = None
    ttl: timedelta | None = None
    external_id: str = ""
    token_count: Count = 0
    supersedes: Several[str] = ()
    valid_from: datetime | None = None
    valid_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Fragment:
    """An observation or insight. `content` is empty if `structured` is set. `hidden_characters`: nobody sees them."""

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
    superseded_by: str = ""
    supersedes: tuple[str, ...] = ()
    supersede_time: datetime | None = None
    valid_from: datetime | None = None
    valid_until: datetime | None = None
    last_observe_time: datetime | None = None
    role: Role | None = None
    hidden_characters: tuple[str, ...] = ()


@check_fields
@dataclass(frozen=True, slots=True)
class Condition:
    """Tests of one value of metadata; all that are given must hold, and one must be given.

    `values`: the value is one of these. `path`: names inside of dicts under the key, which lead to the value.
    `at_least`, `above`, `at_most`, `below`: numbers compare with numbers, texts with texts. `time_min` (inclusive),
    `time_max` (exclusive): the value is a text with a time of ISO 8601. `prefix`: it is a text that begins with this.
    `exists`: whether there is a value; None is one. `any`: the value is a list, and one of its elements passes.
    """

    values: Several[MetadataValue] = ()
    path: Several[str] = ()
    at_least: str | int | float | None = None
    above: str | int | float | None = None
    at_most: str | int | float | None = None
    below: str | int | float | None = None
    time_min: datetime | None = None
    time_max: datetime | None = None
    prefix: str | None = None
    exists: bool | None = None
    any: bool = False


@check_fields
@dataclass(frozen=True, slots=True)
class Filter:
    """Selects fragments; conditions are combined with AND, an empty one does not restrict. `&`, `|` and `~` combine
    filters.

    `metadata` maps a key to its required value, to a collection of accepted values, or to a Condition. Times: `_min` is
    inclusive, `_max` exclusive. Filters inside: each of `all_of` holds too, at least one of `any_of`, and none of
    `none_of`. `expression`: a filter as text, which holds too: 'metadata.n >= 3 and not speaker = "Bob"'.
    """

    sessions: Several[str] = ()
    speakers: Several[str] = ()
    kinds: Several[FragmentKind] = ()
    tiers: Several[Tier] = ()
    observe_time_min: datetime | None = None
    observe_time_max: datetime | None = None
    importance_min: float | None = None
    importance_max: float | None = None
    metadata: Mapping[str, Scalar | Several[Scalar] | Condition] = field(
        default_factory=dict[str, "Scalar | Several[Scalar] | Condition"]
    )
    exclude_ids: Several[str] = ()
    all_of: Several[Filter] = ()
    any_of: Several[Filter] = ()
    none_of: Several[Filter] = ()
    external_id_prefixes: Several[str] = ()
    create_time_min: datetime | None = None
    create_time_max: datetime | None = None
    expression: str = ""

    def __and__(self, other: Filter) -> Filter:
        return Filter(all_of=(self, other))

    def __or__(self, other: Filter) -> Filter:
        return Filter(any_of=(self, other))

    def __invert__(self) -> Filter:
        return Filter(none_of=(self,))


@check_fields
@dataclass(frozen=True, slots=True)
class Weights:
    """alpha x recency + beta x relevance + gamma x importance, each 0 to 100; None means the policy's."""

    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None


@check_fields
@dataclass(frozen=True, slots=True)
class Scope:
    """Memories of a recall over several: exactly one of `memory` ("namespace/name"), `prefix` of such paths, and
    `labels` (of `namespace`, or of all namespaces).

    `weight`: the score times this decides the place of a recollection. `limit`: most recollections of each of these
    memories. `filter`: holds for them in addition to that of the query. `min_revision`: of a `memory`.
    """

    memory: str = ""
    prefix: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    namespace: str = ""
    weight: float | None = None
    limit: Count | None = None
    filter: Filter | None = None
    min_revision: Position = 0


class RecallOptions(TypedDict, total=False):
    """Options of a query; the memory's policy decides those that are missing or None.

    `limit`: number of recollections. `min_revision`: waits (within `timeout_s`) until that revision is visible.
    `explain`: adds the parts of each score. `near_misses`: adds up to that many fragments that were nearly returned,
    with the stage that removed them. `token_budget`: limits ranking and working memory together. `now`: reference time
    of recency and of phrases of time. `filter`: applies to working memory too. `fold`: False ranks recollections with
    the same content separately. `weak_below`: best relevance below which the answer is marked weak; 0 never marks it.
    `time_zone`: IANA name of the zone in which days begin for phrases such as "yesterday" (default UTC).
    `interpret_time`: False treats such phrases as words alone. `truth`: ALL returns superseded fragments, and those
    outside their validity, too. `as_of`: ranks the memory as it was at that revision or time. `receipt`: keeps a
    receipt of the recall, for `list_receipts` and `replay`.
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
    weak_below: float | None
    truth: Truth | None
    time_zone: str | None
    interpret_time: bool | None
    as_of: Moment | None
    receipt: bool | None
    timeout_s: Seconds | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a stored observation: its fragment's id, or `other_id`, the fragment that it was counted on.
    `related`: the nearest earlier statements of its speaker, if asked for."""

    sequence: int
    fragment_id: str
    type: EventType
    other_id: str
    tier: Tier | None
    related: tuple[Related, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """A rejection: the number of an observation refused before it was received, and the error."""

    sequence: int
    error: MemstreamError


@dataclass(frozen=True, slots=True)
class Resumption:
    """Results of a producer's earlier numbers, for a stream opened with `known_sequence`.

    Rejections are complete from `rejected_since` on, outcomes of stored observations from `outcomes_since` on. Both are
    `known_sequence` + 1, or more if the server no longer keeps older ones. Without `outcomes` there are no outcomes.
    """

    rejected: tuple[Rejected, ...]
    outcomes: tuple[Outcome, ...]
    rejected_since: int
    outcomes_since: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The progress of a batch: last numbers by level, the revision that shows it, rejections and outcomes."""

    received: int
    stored: int
    indexed: int
    revision: int
    rejected: tuple[Rejected, ...]
    outcomes: tuple[Outcome, ...]
