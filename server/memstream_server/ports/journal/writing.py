"""What is written: a Receipt makes observations *received*, a Commit makes a transition *stored*."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import Policy
from memstream_server.core.values import Fragment, Tier
from memstream_server.ports.journal.records import Answer, IndexEntry, Job
from memstream_server.ports.journal.rows import Anchor, Row


@dataclass(frozen=True, slots=True)
class Rejection:
    """An item refused before *received*; it keeps its sequence number and its answer."""

    sequence: int
    code: int
    """A google.rpc.Code."""
    reason: str
    """A name of memstream.v1.ErrorReason."""
    message: str
    details: Mapping[str, str] = field(default_factory=dict)
    """For ErrorInfo.metadata."""


class Outcome(Struct, frozen=True, gc=False, array_like=True):
    """What became of an observation when it was stored. Kept as an array of its fields: add new ones at the end."""

    sequence: int
    fragment: str
    type: EventType
    other: str
    tier: Tier | None

    def of(self, sequence: int) -> Outcome:
        """The same of the observation with that number."""
        return Outcome(sequence, self.fragment, self.type, self.other, self.tier)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of a receipt's observations, kept with it."""

    producer: str
    last_sequence: int
    each: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A batch of one producer's observations, made durable together: what *received* means.

    `fragments` are the accepted items with id, position and times given; `vectors` holds a client's own
    vector for a fragment id. Sequence numbers of the batch are first_sequence .. first_sequence + count - 1;
    `hashes` has one 16-byte content hash each, rejected ones included.
    """

    memory: str
    epoch: int
    producer: str
    """Empty for unsequenced writes (`ObserveBatch` without a producer, Put): nothing to repeat, no sequence kept."""
    producer_epoch: int
    first_sequence: int
    hashes: tuple[bytes, ...]
    fragments: tuple[Fragment, ...]
    sequences: tuple[int, ...]
    """The sequence number of each of `fragments`."""
    importances: tuple[float | None, ...] = ()
    """The client's own importance of each of `fragments`; None asks the scorer or the default."""
    vectors: dict[str, bytes] = field(default_factory=dict)
    rejections: tuple[Rejection, ...] = ()
    model: str = ""
    """The space of `vectors`; empty is the one in force."""
    position: int = 0
    """Position of the first fragment (the next one when all were rejected): the batch's place in the order."""
    outcomes: bool = False
    """Whether what becomes of its observations is to be kept with it (`Commit.outcomes`)."""
    answer: Answer | None = None
    """The answer to the call that brought it, written with it. One with an empty response is not given yet: the commit
    that stores the batch completes it (`Commit.answers`)."""

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.hashes) - 1


@dataclass(frozen=True, slots=True)
class Commit:
    """One transition of one memory. All of it or nothing; raises its revision by exactly one."""

    memory: str
    epoch: int
    revision: int
    """Expected before; revision + 1 after."""
    time_us: int
    events: tuple[Event, ...] = ()
    rows: tuple[Row, ...] = ()
    """Fragments that are new or changed, whole, in their final form. Of one that exists, the access statistics are
    left to `touch`, so that none is lost or counted twice."""
    removed: tuple[str, ...] = ()
    """Ids that left for good: fragment, vectors, terms, anchor and lineage rows go."""
    anchors: tuple[Anchor, ...] = ()
    released: tuple[str, ...] = ()
    """Ids whose anchor rows go: they left short-term."""
    receipts: tuple[Receipt, ...] = ()
    """Batches that are received by being stored: numbered as `receive` does it, without a payload that waits. Nothing
    that was received before them waits either: their producers have stored all up to them."""
    stored_positions: tuple[int, ...] = ()
    """Positions of the receipts consumed: their payloads go."""
    producers: tuple[tuple[str, int], ...] = ()
    """(producer, stored) to set."""
    index: tuple[IndexEntry, ...] = ()
    jobs: tuple[Job, ...] = ()
    finish_jobs: tuple[str, ...] = ()
    reflection_aggregate: float | None = None
    policy: Policy | None = None
    labels: tuple[tuple[str, str], ...] | None = None
    name: tuple[str, str] | None = None
    """(namespace, name) to go by from now on. Raises AlreadyExists when another memory has it."""
    namespace_max: int = 0
    """Memories that namespace may hold with it, 0: no limit. Raises NamespaceFull."""
    answer: Answer | None = None
    answers: tuple[Answer, ...] = ()
    """Answers to the calls whose batches are stored; in place of what `receive` wrote of them."""
    outcomes: tuple[Outcomes, ...] = ()
    erased: tuple[str, ...] = ()
    """Ids of which nothing they said before is to be kept: stored answers that name them are emptied (a repeat finds a
    digest that is nobody's), and the receipts of what the memory's producers have stored go. Of the memory's answers
    to ObserveBatch, which hold ids alone, only the digests go."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access statistics of one fragment. Counts add, times take the later."""

    fragment: str
    count: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Accesses:
    """Of a memory's fragments, written without a revision: lost ones are not an error."""

    memory: str
    epoch: int
    each: tuple[Access, ...]
