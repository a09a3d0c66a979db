"""A memory of a few turns as records, receipts and commits, for tests of a journal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from memstream_server.core.policy import DEFAULT
from memstream_server.core.values import Fragment, MemoryKind, Tier
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import Changes, LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Row, RowBlock, Terms
from memstream_server.ports.journal.writing import BatchReceipt, Commit, Rejection

Opener = Callable[[], Awaitable[Journal]]
MODEL = "hashing-4"
DAY_US = 24 * 3600 * 1_000_000


@dataclass
class Now:
    """A clock that a test sets."""

    us: int = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.us


def record(uid: str = "u1", name: str = "joy", namespace: str = "comedy") -> MemoryRecord:
    return MemoryRecord(
        uid=uid,
        namespace=namespace,
        name=name,
        kind=MemoryKind.HYBRID,
        policy=DEFAULT,
        seed=b"0123456789abcdef",
        labels=(("team", "writers"),),
        create_time_us=1,
        update_time_us=2,
    )


def fragment(position: int, tier: Tier = Tier.LONG_TERM, **changes: object) -> Fragment:
    plain = Fragment(
        id=f"F{position:025d}",
        content=f"turn {position}: 我叫 Bob",
        tier=tier,
        session="monday",
        speaker="user",
        create_time_us=1_000 + position,
        access_time_us=1_000 + position,
        model=MODEL,
        position=position,
    )
    return plain.but(**changes)


def vector(position: int) -> bytes:
    return np.array([position, 1, 2, 3], dtype="<f4").tobytes()


def row(one: Fragment) -> Row:
    return Row(one, Terms(np.arange(3, dtype="<u8").tobytes(), np.ones(3, dtype="<u2").tobytes()), vector(one.position))


def digest(sequence: int) -> bytes:
    return sequence.to_bytes(16, "big")


def receipt(first: int, count: int, position: int, *, epoch: int = 1, rejected: tuple[int, ...] = ()) -> BatchReceipt:
    numbers = range(first, first + count)
    kept = [number for number in numbers if number not in rejected]
    fragments = tuple(fragment(position + place, Tier.SENSORY) for place in range(len(kept)))
    return BatchReceipt(
        memory="u1",
        epoch=1,
        producer="p",
        producer_epoch=epoch,
        first_sequence=first,
        hashes=tuple(digest(number) for number in numbers),
        fragments=fragments,
        sequences=tuple(kept),
        importances=tuple(0.25 if number % 2 else None for number in kept),
        vectors={one.id: vector(one.position) for one in fragments[:1]},
        rejections=tuple(Rejection(number, 3, "CONTENT_EMPTY", "empty", {"limit": "1"}) for number in rejected),
        position=position,
    )


def transition(revision: int, **parts: object) -> Commit:
    return Commit(memory="u1", epoch=1, revision=revision, time_us=revision * 10, **parts)  # type: ignore[arg-type]


class Gathered:
    """A Gathering that keeps its blocks."""

    def __init__(self) -> None:
        self.told: list[bool | str] = []
        self.blocks: list[RowBlock] = []

    def restore(self, record: MemoryRecord, vectors_max: int, changes: Changes) -> None:
        """Reads the blocks."""

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None:
        self.told.append(all_vectors)

    def add(self, block: RowBlock) -> None:
        self.blocks.append(block)

    def end(self) -> None:
        self.told.append("end")


async def image(journal: Journal, vectors_max: int = 100) -> LoadedMemory:
    return await journal.load_memory("u1", MODEL, vectors_max)
