"""A fragment as it is written and read: one by one as a Row, many of them by column as a Block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Enhancement, Fragment


@dataclass(frozen=True, slots=True)
class Terms:
    """A text's lexical terms: parallel little-endian arrays, packed. hashes u64 ascending, counts u16."""

    hashes: bytes
    counts: bytes


_NO_TERMS = Terms(b"", b"")


@dataclass(frozen=True, slots=True)
class Row:
    """A fragment with what recall needs beside it."""

    fragment: Fragment
    terms: Terms | None = None
    """None leaves the terms already stored for this id as they are."""
    vector: bytes | None = None
    """float32 little-endian in the space named by fragment.model; None leaves what is stored."""
    beside: tuple[str, bytes] | None = None
    """(space, vector): its vector in another space than fragment.model's."""
    replaces: bool = False
    """It says something else than before: whatever vector it had goes first."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Fragments with what recall needs beside them, by column: a memory has too many for several objects each."""

    fragments: Sequence[Fragment]
    hashes: npt.NDArray[np.uint64]
    """The terms of all, one fragment's after another's, as in Terms."""
    counts: npt.NDArray[np.uint16]
    """Beside `hashes`."""
    sizes: npt.NDArray[np.int64]
    """How many terms each fragment has."""
    vectored: npt.NDArray[np.bool_]
    """Which fragments have a vector here."""
    vectors: npt.NDArray[np.float32]
    """Those of these fragments, (count, dimension)."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Block:
        """The same by column; missing terms as none."""
        terms = [row.terms or _NO_TERMS for row in rows]
        packed = [row.vector for row in rows if row.vector is not None]
        return cls(
            fragments=[row.fragment for row in rows],
            hashes=np.frombuffer(b"".join([each.hashes for each in terms]), "<u8"),
            counts=np.frombuffer(b"".join([each.counts for each in terms]), "<u2"),
            sizes=np.array([len(each.counts) // 2 for each in terms], np.int64),
            vectored=np.array([row.vector is not None for row in rows], np.bool_),
            vectors=np.frombuffer(b"".join(packed), "<f4").reshape(len(packed), -1 if packed else 0),
        )

    def rows(self) -> Iterator[Row]:
        """One by one; no terms as None."""
        ends, vectors = np.cumsum(self.sizes).tolist(), iter(self.vectors)
        for fragment, end, size, vectored in zip(self.fragments, ends, self.sizes, self.vectored, strict=True):
            hashes, counts = self.hashes[end - size : end], self.counts[end - size : end]
            terms = Terms(hashes.tobytes(), counts.tobytes()) if size else None
            yield Row(fragment, terms, next(vectors).tobytes() if vectored else None)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The short-term side of a held fragment: replaces what was stored for it."""

    id: str
    vector: bytes | None
    enhancements: tuple[Enhancement, ...]
    model: str = ""
    """The space of `vector`."""
    beside: tuple[str, bytes | None] | None = None
    """(space, vector of the same content in another space); None keeps what is stored."""
