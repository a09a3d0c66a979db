"""Writes: a BatchReceipt makes observations *received*, a Commit makes a transition *stored*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from msgspec import Struct

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import Policy
from memstream_server.core.suspicions import ConflictDecision, Suspicion
from memstream_server.core.values import Fragment, Tier
from memstream_server.ports.conversation_records import JointWrites
from memstream_server.ports.journal.records import Answer, IndexEntry, Job, Labels, RecallReceipt
from memstream_server.ports.journal.rows import Anchor, Row


@dataclass(frozen=True, slots=True)
class Rejection:
    """An observation refused before *received*; it keeps its sequence number and its answer."""

    sequence: int
    code: int
    """Value of google.rpc.Code."""
    reason: str
    """Name of a memstream.v1.ErrorReason."""
    message: str
    details: Mapping[str, str] = field(default_factory=dict)
    """Goes into ErrorInfo.metadata."""


class Related(Struct, frozen=True, gc=False, array_like=True):
    """An earlier statement that is near to an observation."""

    fragment: str
    share: float
    """Of the words of the shorter of the two."""


class Outcome(Struct, frozen=True, gc=False, array_like=True):
    """The outcome of a stored observation. Encoded as an array of its fields: append new ones at the end."""

    sequence: int
    fragment: str
    type: EventType
    other: str
    tier: Tier | None
    related: tuple[Related, ...] = ()
    """The earlier statements that are nearest to it, if its batch asks for them."""

    def for_batch(self, sequence: int, related: int) -> Outcome:
        """The same outcome for a number of a batch that asks for so many related statements."""
        return Outcome(sequence, self.fragment, self.type, self.other, self.tier, self.related[:related])


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of a receipt's observations, kept with the receipt."""

    producer: str
    last_sequence: int
    each: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class BatchReceipt:
    """A batch of one producer's observations, made durable together: *received*.

    `fragments` are the accepted items with id, position and times; `vectors` has vectors that the client supplied, by
    fragment id. The batch's sequence numbers are first_sequence .. first_sequence + count - 1; `hashes` has a 16-byte
    content hash for each of them, rejected ones included.
    """

    memory: str
    epoch: int
    producer: str
    """Empty for writes without sequence numbers (`ObserveBatch` without a producer, Put)."""
    producer_epoch: int
    first_sequence: int
    hashes: tuple[bytes, ...]
    fragments: tuple[Fragment, ...]
    sequences: tuple[int, ...]
    """The sequence number of each of `fragments`."""
    importances: tuple[float | None, ...] = ()
    """Importance that the client supplied for each of `fragments`; None: use the scorer or the default."""
    vectors: dict[str, bytes] = field(default_factory=dict)
    rejections: tuple[Rejection, ...] = ()
    model: str = ""
    """The space of `vectors`; empty: the space in force."""
    position: int = 0
    """Position of the first fragment, or the next position if all were rejected: the batch's place in the order."""
    outcomes: bool = False
    """Whether to keep the outcomes of its observations with it (`Commit.outcomes`)."""
    related: int = 0
    """How many related statements each outcome names."""
    answer: Answer | None = None
    """The answer to the call, written with the receipt. An empty response is a placeholder that the commit which stores
    the batch replaces (`Commit.answers`)."""

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.hashes) - 1


@dataclass(frozen=True, slots=True)
class Resolution:
    """The decision about a suspicion."""

    newer: str
    older: str
    decision: ConflictDecision
    note: str
    time_us: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """A fragment whose content or attributes a commit replaces: the journal keeps what it said as a version."""

    fragment: str
    event: EventType
    principal: str
    """Who replaced it; empty without authentication, and for the server itself."""
    space: str
    """The space in force: the version keeps the fragment's vector in it."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What a decision writes beside its transition, and its commit as it is. A field at its default changes nothing."""

    forgotten_versions: tuple[str, ...] = ()
    """Ids of fragments whose versions are deleted, because they may hold erased words."""
    jobs: tuple[Job, ...] = ()
    finish_jobs: tuple[str, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    """New ones. Those that name a fragment of `removed`, or whose content a row replaces, are deleted; open ones also
    if they name a fragment that a row says is superseded."""
    resolutions: tuple[Resolution, ...] = ()
    policy: Policy | None = None
    labels: Labels | None = None
    name: tuple[str, str] | None = None
    """New (namespace, name). Raises AlreadyExists if another memory has it."""
    namespace_max: int = 0
    """Limit of memories in that namespace, this one included, 0: none. Raises NamespaceFull."""
    answer: Answer | None = None
    joint: JointWrites | None = None
    """Writes to conversations in the same transaction. Raises PreconditionFailed if one of theirs does not hold."""
    answers: tuple[Answer, ...] = ()
    """Answers to calls whose batches are stored; they replace the placeholders of `receive`."""
    outcomes: tuple[Outcomes, ...] = ()
    """Kept for clients that resume."""
    recall_receipt: RecallReceipt | None = None
    """A receipt to keep; its RECALLED is among the events."""
    erased: tuple[str, ...] = ()
    """Ids of which no trace may remain. Stored answers that name them are emptied (a repeat finds a digest that never
    matches), and receipts of stored observations of the memory are deleted. Answers to ObserveBatch of the memory hold
    only ids and lose only their digests."""


EFFECTS = tuple(each.name for each in fields(Effects))


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit(Effects):
    """One transition of one memory, atomic. Raises its revision by one."""

    memory: str
    epoch: int
    revision: int
    """Expected revision; the commit sets revision + 1."""
    time_us: int
    events: tuple[Event, ...] = ()
    rows: tuple[Row, ...] = ()
    """New or changed fragments, complete. For existing ones `touch` writes the access statistics, so that none are lost
    or counted twice."""
    removed: tuple[str, ...] = ()
    """Ids of fragments to delete, with vectors, terms, anchors and lineage."""
    added: int = 0
    """How many more fragments the memory has that are not forgotten."""
    replaced: tuple[Replaced, ...] = ()
    """Fragments in `rows` of which a version is kept first."""
    versions_max: int = 0
    """Versions of each of these fragments that are kept; older ones are deleted."""
    versions_since_us: int = 0
    """Versions of these fragments that were replaced before this time are deleted."""
    anchors: tuple[Anchor, ...] = ()
    released: tuple[str, ...] = ()
    """Ids whose anchors are deleted, because they left short-term."""
    receipts: tuple[BatchReceipt, ...] = ()
    """Batches that this commit receives and stores at once: numbered as by `receive`, without a pending payload.
    Nothing received before them is pending: their producers' earlier batches are stored."""
    stored_positions: tuple[int, ...] = ()
    """Positions of receipts that are stored now; their payloads are deleted."""
    producers: tuple[tuple[str, int], ...] = ()
    """(producer, stored) to set."""
    index: tuple[IndexEntry, ...] = ()
    reflection_aggregate: float | None = None
    recall_receipts_max: int = 0
    """Receipts that are kept, the latest ones: applies with a new receipt or a new policy."""
    erased_evidence: tuple[str, ...] = ()
    """Ids of fragments whose content leaves for good. Receipts that rank one of them say so and lose their query, as do
    those whose query shares a word with one."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access statistics of one fragment: the count is added, the later time wins."""

    fragment: str
    count: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Accesses:
    """Access statistics of a memory's fragments, written without a revision. Losing them is no error."""

    memory: str
    epoch: int
    each: tuple[Access, ...]
