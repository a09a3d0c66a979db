"""Requests to the engine and its answers, as domain values (microseconds, arrays, tuples)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from enum import StrEnum
from typing import Generic, TypeVar

from msgspec import Struct

from memstream_server.core.filters import Filter, Unmatched
from memstream_server.core.lexical import WordStatistics
from memstream_server.core.policy import Policy, Truth
from memstream_server.core.ranking import NearMiss
from memstream_server.core.scores import Scored
from memstream_server.core.suspicions import Suspicion
from memstream_server.core.time_phrases.recognition import TimePhrase
from memstream_server.core.values import Fragment, MemoryKind, Metadata, Role, Structured, TruthStatus, Vector
from memstream_server.ports.journal.records import Answer, Counts, Labels, MemoryRecord
from memstream_server.ports.journal.rows import Terms
from memstream_server.ports.journal.writing import Outcome, Rejection

T = TypeVar("T")

RELATED_MAX = 10
"""Related statements that an outcome names at most."""
AnswerOf = Callable[[MemoryRecord], Answer]
"""Makes the stored answer to a request_id from the call's result."""


@dataclass(frozen=True, slots=True)
class Once(Generic[T]):
    """A call whose repeats get the first answer: the key of its request_id, and a function from its result to the
    answer.
    """

    key: str
    answer: Callable[[T], Answer] | None = None
    """None: the joint writes of the decision store it."""


class AckLevel(StrEnum):
    """How far an observation has been processed."""

    RECEIVED = "received"
    STORED = "stored"
    INDEXED = "indexed"


class NewObservation(Struct, frozen=True, gc=False, eq=False):
    """A validated observation of a request. The receipt assigns ids, order and times."""

    content: str
    structured: Structured | None = None
    speaker: str = ""
    role: Role | None = None
    session: str = ""
    observe_time_us: int | None = None
    importance: float | None = None
    metadata: Metadata = ()
    vector: Vector | None = None
    """Unit length, in the server's dimension."""
    expire_time_us: int | None = None
    ttl_us: int | None = None
    external_id: str = ""
    token_count: int = 0
    supersedes: tuple[str, ...] = ()
    """Ids or external ids of the fragments that it corrects."""
    valid_from_us: int | None = None
    valid_until_us: int | None = None
    digest: bytes = b""
    """16-byte hash of the observation as sent: distinguishes a repeat from a conflict."""


@dataclass(frozen=True, slots=True)
class RejectedObservation:
    """An item that validation refused; it keeps its number in the batch. `digest` as in NewObservation."""

    code: int
    reason: str
    message: str
    digest: bytes
    details: Mapping[str, str] = field(default_factory=dict)
    """For ErrorInfo.metadata."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A producer's levels when its stream opens."""

    received: int
    stored: int
    producer_epoch: int
    memory_uid: str
    revision: int


@dataclass(frozen=True, slots=True)
class ProducerProgress:
    """A producer's progress: cumulative levels, and what is new since the last call."""

    received: int
    stored: int
    indexed: int
    revision: int
    """The revision that made `stored` true."""
    rejected: tuple[Rejection, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A call that observes one batch. Without a producer its numbers start at 1."""

    producer: str
    first_sequence: int
    items: Sequence[NewObservation | RejectedObservation]
    level: AckLevel
    request_id: str = ""
    digest: bytes = b""
    """Hash of the whole request: distinguishes a repeat of the request_id from a conflict."""
    related: int = 0
    """How many related statements each outcome names."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Rejections and outcomes that are sent again, up to number `upto`."""

    upto: int
    rejected: tuple[Rejection, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True)
class NewMemory:
    """A request to create a memory."""

    namespace: str
    name: str
    kind: MemoryKind
    policy: Policy
    labels: Labels = ()
    exist_ok: bool = False


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """A request to change policy or labels; None keeps a value."""

    policy: Policy | None = None
    labels: Labels | None = None
    etag: str = ""


@dataclass(frozen=True, slots=True)
class ChangeCount:
    """How many fragments a call changed, and the revision after it."""

    count: int
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """The fragment of a put; None if the memory's policy did not keep it."""

    fragment: Fragment | None
    created: bool
    revision: int


@dataclass(frozen=True, slots=True)
class AsOf:
    """The moment of a read of the past; one of the two is set."""

    revision: int | None = None
    time_us: int | None = None


class Query(Struct, frozen=True, gc=False, eq=False):
    """A recall; None takes the policy's value."""

    text: str
    vector: Vector | None = None
    now_us: int | None = None
    limit: int | None = None
    alpha: float | None = None
    beta: float | None = None
    gamma: float | None = None
    min_relevance: float | None = None
    filter: Filter = Filter()
    min_revision: int = 0
    wait_s: float = 10.0
    """How long to wait for min_revision, at most the call's deadline."""
    time_s: float | None = None
    """The caller's timeout for the answer; None if it has none."""
    explain: bool = False
    near_misses: int = 0
    reinforce: bool | None = None
    """Whether the recall is an access of its fragments and offers them to short-term; None: by the policy."""
    token_budget: int = 0
    session: str = ""
    working_memory: bool = True
    fold: bool | None = None
    """Whether recollections with the same meaning are folded into one."""
    weak_below: float | None = None
    """Best relevance below which the answer is marked weak; 0 never marks it."""
    truth: Truth | None = None
    """Whether only current fragments are returned."""
    zone: tzinfo = UTC
    """The time zone in which days begin for phrases of time."""
    interpret_time: bool = True
    """Whether phrases of time in the text are interpreted."""
    preferred: frozenset[str] = frozenset()
    """Of a standing query: ids of its last answer; folding keeps these."""
    as_of: AsOf | None = None
    """The moment to rank the memory of; None: the present."""
    expiry_us: int | None = None
    """The time that expiry counts at; None: the server's clock."""
    receipt: bytes = b""
    """The query as the client sent it, if it asks for a receipt."""
    unembedded: str = ""
    """Of a replay: why there was no query vector; the text is not embedded then."""
    words: tuple[WordStatistics, ...] = ()
    """Of a query over several memories: how often its words occur in all of them, for each language."""


class ChainLink(Struct, frozen=True, gc=False):
    """A fragment in a chain of supersessions."""

    id: str
    observe_time_us: int
    status: TruthStatus


class Recollection(Struct, frozen=True, gc=False, eq=False):
    """A recalled fragment with its scores."""

    fragment: Fragment
    scored: Scored
    truncated: bool = False
    folded: tuple[str, ...] = ()
    """Ids of the candidates folded into it."""
    status: TruthStatus = TruthStatus.CURRENT
    chain: tuple[ChainLink, ...] = ()
    """The fragments of its chain of supersessions, older before newer; empty without one."""
    suspicions: tuple[Suspicion, ...] = ()
    """Open suspicions about it, as the newer or the older of two."""
    later_id: str = ""
    """A later statement of its speaker that may replace it, and stands before it; empty without one."""
    companion: Recollection | None = None
    """The reply to it; has no companion and no rank of its own."""
    memory: str = ""
    """The memory that holds it, "namespace/name", in an answer of several."""

    @property
    def compared(self) -> tuple[object, ...]:
        """What a standing query sends a recollection again for; not its scores, which change with time."""
        reply = None if self.companion is None else self.companion.fragment
        companion = None if reply is None else (reply.id, reply.version)
        folded = tuple(sorted(self.folded))
        return self.fragment.version, self.truncated, folded, self.status, self.suspicions, self.later_id, companion


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What an answer was computed from, besides the memory at its revision."""

    policy: Policy
    now_us: int
    expiry_us: int
    space: str
    """Name of the embedding space."""
    vector: Vector | None
    embedded: bool
    """Whether the embedder made the vector, instead of the client."""
    terms: Terms
    """Of the query's words."""
    suspicions: tuple[Suspicion, ...]
    """The open suspicions about candidates."""
    accesses: tuple[tuple[str, int], ...]
    """See Found."""
    indexed: bool
    """Whether the vector index chose the candidates."""


class RecallAnswer(Struct, frozen=True, gc=False, eq=False):
    """The whole answer to a query."""

    revision: int
    recollections: tuple[Recollection, ...]
    working_ids: tuple[str, ...]
    working: tuple[Fragment, ...]
    """Short-term fragments in order, without those among the recollections."""
    eligible: int
    considered: int
    best_relevance: float
    degraded: str
    near_misses: tuple[NearMiss, ...]
    timings_s: Mapping[str, float]
    tokens: int
    formula: str
    weak: bool = False
    """Whether the best result shares no word with the query but names, or is below the floor that was set."""
    validity_change_us: int | None = None
    """When the next validity in the memory begins or ends."""
    interpreted: tuple[TimePhrase, ...] = ()
    """The phrases of time in the text, with their windows."""
    as_of_revision: int = 0
    """Of a query with as_of: the revision that was ranked; else 0."""
    unmatched: tuple[Unmatched, ...] = ()
    """What of the filter no fragment can match."""
    receipt_id: str = ""
    """The receipt that was kept; empty without one."""
    evidence: Evidence | None = None
    """Of a query that asks for a receipt."""
    memories: tuple[MemoryAnswer, ...] = ()
    """Of a query over several memories."""


class MemoryAnswer(Struct, frozen=True, gc=False, eq=False):
    """What one of several memories contributed to an answer."""

    memory: str
    """"namespace/name"."""
    answer: RecallAnswer
    """Its own answer, as if it had been asked alone."""
    recollections: int = 0
    """How many of the whole answer are from it."""
    working_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Memories that a query is asked in: a named one, else those of `prefix`, else those of `labels`."""

    query: Query
    """What each of them is asked."""
    message: bytes
    """The same as a message of the contract, for other servers."""
    weight: float = 1.0
    memory: tuple[str, str] | None = None
    """(namespace, name)."""
    prefix: str = ""
    """Of "namespace/name"."""
    namespace: str = ""
    """Of the labels; empty for all namespaces."""
    labels: Labels = ()


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """The difference between two answers to a standing query."""

    answer: RecallAnswer
    """Its recollections are the new and changed ones; all other fields describe the whole answer."""
    ranks: tuple[int, ...]
    """Ranks of these recollections, starting at 1."""
    ids: tuple[str, ...]
    """Ids of the whole answer, best first."""
    retracted: tuple[str, ...]
    """Ids that have left the answer."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Fragment counts of a memory and its size in RAM."""

    revision: int
    counts: Counts
    active: bool
    active_bytes: int


def memory_etag(record: MemoryRecord) -> str:
    """Changes with every change of policy or labels."""
    return f"{record.uid}-{record.update_time_us:x}"


def fragment_etag(fragment: Fragment) -> str:
    """Changes with every change of the fragment except its access statistics; empty for a fragment of the past."""
    if not fragment.version:
        return ""
    return f"{fragment.id}-{fragment.version:x}"
