"""What is asked for and what comes back: a page of fragments, or a whole memory at one revision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from memstream_server.core.values import Fragment, Held, Tier
from memstream_server.ports.journal.records import MemoryRecord, Producer
from memstream_server.ports.journal.rows import Anchor, Block, Row
from memstream_server.ports.journal.writing import Outcome, Receipt, Rejection


@dataclass(frozen=True, slots=True)
class FragmentQuery:
    """What `list_fragments` selects, ascending by position after `after`. Empty tuples select all."""

    tiers: tuple[Tier, ...] = ()
    sessions: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    forgotten: bool = False
    """True selects forgotten fragments instead of live ones."""
    after: int = -1
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Image:
    """All that an active memory needs in RAM, read at one revision.

    `blocks` are every fragment in order of position (forgotten ones included) with terms, and vectors of the space
    asked for: all of them up to `vectors_max`, beyond it only those the index cannot have yet (fragments before
    long-term, and fragments in the outbox). None are here where they were given to a Gathering.
    `sensory` and `short_term` are the held ones in order, with content vectors and enhancements.
    `pending` are receipts not yet stored, in order of position; one whose items were all rejected is never pending.
    A producer's `stored` covers what was rejected behind its last stored item.
    """

    record: MemoryRecord
    blocks: tuple[Block, ...]
    sensory: tuple[Held, ...]
    short_term: tuple[Held, ...]
    pending: tuple[Receipt, ...]
    producers: tuple[Producer, ...]
    next_position: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """What the blocks hold, one by one."""
        return tuple(row for block in self.blocks for row in block.rows())


@dataclass(frozen=True, slots=True)
class KeptReceipt:
    """What is kept of a receipt: its numbers, what was refused, and what became of the rest."""

    first_sequence: int
    last_sequence: int
    rejections: tuple[Rejection, ...]
    outcomes: tuple[Outcome, ...] | None
    """None where none are kept, or while the batch is not stored."""


class Gathering(Protocol):
    """Takes what a memory holds while it is read, a block at a time and in a thread of the journal's.

    Not all at once: what lives no longer than a block costs neither room nor the garbage collector's time.
    """

    def begin(self, all_vectors: bool) -> None:
        """Called first, and once more where the reading begins anew; whether every vector comes (see Image)."""
        ...

    def add(self, block: Block) -> None:
        """The next ones in order of position; the block's arrays are the taker's."""
        ...

    def end(self) -> None:
        """That was all."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryScan:
    """All of a memory at one revision, for as long as the scan lasts."""

    record: MemoryRecord
    total: int
    """Fragments, forgotten ones included."""
    next_position: int
    first_pending: int | None
    """Least position received and not stored."""
    anchors: Mapping[str, Anchor]
    pages: Callable[[], Iterator[list[tuple[Fragment, bytes | None]]]]
    """Fragments in order of position, each with its vector where that was asked for."""
