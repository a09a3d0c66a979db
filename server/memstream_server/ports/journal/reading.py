"""Queries and results: a page of fragments, a whole memory at one revision, the scan for an export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memstream_server.core.suspicions import ConflictDecision, Suspicion
from memstream_server.core.values import Fragment, Held, Tier
from memstream_server.ports.blocks import Block as MemoryBlock
from memstream_server.ports.blocks import BlockName
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery
from memstream_server.ports.journal.records import MemoryRecord, Producer, Recorded
from memstream_server.ports.journal.rows import Anchor, Row, RowBlock
from memstream_server.ports.journal.writing import BatchReceipt, Outcome, Rejection


@dataclass(frozen=True, slots=True)
class FragmentQuery:
    """Selects fragments for `list_fragments`, ascending by position after `after`. Empty tuples select all."""

    tiers: tuple[Tier, ...] = ()
    sessions: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    """In any spelling that core/speakers.py takes for the same."""
    kinds: tuple[str, ...] = ()
    forgotten: bool | None = False
    """True selects forgotten fragments instead of live ones; None selects both."""
    after: int = -1
    limit: int = 100


@dataclass(frozen=True, slots=True)
class LoadedMemory:
    """The data of an active memory, read at one revision.

    `blocks` are all fragments by position (forgotten ones included) with terms, and vectors of the requested space: all
    vectors up to `vectors_max`; beyond that only those that may not be in the index yet (fragments before long-term,
    and fragments in the outbox). Empty if a Gathering took the blocks.
    `sensory` and `short_term` are the held fragments in order, with content vectors and enhancements.
    `pending` are receipts that are not stored yet, by position; a receipt with only rejections is never pending.
    A producer's `stored` includes rejections after its last stored item.
    """

    record: MemoryRecord
    blocks: tuple[RowBlock, ...]
    sensory: tuple[Held, ...]
    short_term: tuple[Held, ...]
    pending: tuple[BatchReceipt, ...]
    producers: tuple[Producer, ...]
    next_position: int
    suspicions: tuple[Suspicion, ...] = ()
    """Those that are not decided, and the pairs that a decision keeps apart."""

    @classmethod
    def of_created(cls, record: MemoryRecord) -> LoadedMemory:
        """What a load of a memory reads that has only been created."""
        return cls(record, blocks=(), sensory=(), short_term=(), pending=(), producers=(), next_position=0)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all blocks."""
        return tuple(row for block in self.blocks for row in block.iterate_rows())


@dataclass(frozen=True, slots=True)
class StoredConflict:
    """A suspicion as it is stored."""

    suspicion: Suspicion
    decision: ConflictDecision | None = None
    """None while it is open."""
    note: str = ""
    decide_time_us: int | None = None


@dataclass(frozen=True, slots=True)
class KeptReceipt:
    """What is kept of a receipt: sequence numbers, rejections, and outcomes."""

    first_sequence: int
    last_sequence: int
    rejections: tuple[Rejection, ...]
    outcomes: tuple[Outcome, ...] | None
    """None if the receipt keeps no outcomes or the batch is not stored yet."""


class Changes(Protocol):
    """Reads, in the snapshot of a load, what was committed after an earlier revision. Valid during `restore`."""

    time_us: int
    """Time of the commit that made the present revision; 0 if the log does not reach back to it."""

    def read_accesses(self) -> tuple[list[int], list[int]]:
        """(positions of the fragments with counted accesses, times of the last ones)."""
        ...

    def read_log(self, revision: int, limit: int) -> list[Recorded]:
        """Up to `limit` transitions from `revision` on, fewer if they are large."""
        ...

    def read_blocks(self, ids: Collection[str]) -> Iterator[RowBlock]:
        """These fragments by position, with all vectors of the requested space; unknown ids are skipped."""
        ...


class Gathering(Protocol):
    """Takes the blocks of a memory while it is read, in a thread of the journal.

    Taken block by block, short-lived objects cost neither RAM nor garbage collection.
    """

    def restore(self, record: MemoryRecord, vectors_max: int, changes: Changes) -> Sequence[str] | None:
        """Called first, and again if the read restarts. Take all blocks of an earlier revision from elsewhere, and
        apply `changes`.

        Returns the ids of the fragments before long-term that are not forgotten, by position; then nothing follows.
        None: `begin` and the blocks follow.
        """
        ...

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None:
        """Called before the first block; `all_vectors`: see LoadedMemory."""
        ...

    def add(self, block: RowBlock) -> None:
        """The next fragments by position; the callee owns the block's arrays."""
        ...

    def end(self) -> None:
        """Called after the last block."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryScan:
    """A whole memory at one revision; valid during the scan."""

    record: MemoryRecord
    total: int
    """Number of fragments, forgotten ones included."""
    next_position: int
    first_pending: int | None
    """Least position that is received and not stored."""
    anchors: Mapping[str, Anchor]
    conflicts: Mapping[str, tuple[StoredConflict, ...]]
    """Open and decided suspicions by the id of the newer fragment."""
    blocks: tuple[MemoryBlock, ...]
    """All kept versions of its blocks, in ascending order,"""
    block_version: int
    """and the last version that was given to one."""
    pages: Callable[[], Iterator[list[tuple[Fragment, bytes | None]]]]
    """Fragments by position, each with its vector if requested."""


@dataclass(frozen=True, slots=True, eq=False)
class MomentQuery:
    """What a turn of an agent reads."""

    memories: Sequence[str] = ()
    """Uids of those whose revision is wanted."""
    blocks: Sequence[BlockName] = ()
    conversation: ConversationName | None = None
    messages: MessageQuery = field(default_factory=MessageQuery)
    fragments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ids by uid; also what `next_of` names, over at most `steps` steps."""
    next_of: Callable[[Fragment], str] | None = None
    """The id of another fragment; empty: none."""
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """What is in one snapshot of the database."""

    revisions: Mapping[str, int]
    """By uid, of the memories that exist."""
    blocks: Mapping[BlockName, MemoryBlock]
    messages: Sequence[Message]
    """Empty, too, if there is no such conversation."""
    fragments: Mapping[str, Mapping[str, Fragment]]
    """By uid and id, those that exist."""
