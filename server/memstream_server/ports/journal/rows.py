"""Fragments as they are written and read: one as a Row, many by column as a Block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from memstream_server.core.values import Enhancement, Fragment


class Terms(Struct, frozen=True):
    """Lexical terms of a text: parallel little-endian arrays. hashes: u64 ascending; counts: u16."""

    hashes: bytes
    counts: bytes
    version: int = 0
    """The analyzer's version, below 65,536; 0: from before versions were stored."""


_NO_TERMS = Terms(b"", b"")


@dataclass(frozen=True, slots=True)
class Row:
    """A fragment with its terms and vectors."""

    fragment: Fragment
    terms: Terms | None = None
    """None keeps the stored terms."""
    vector: bytes | None = None
    """float32 little-endian in the space `fragment.model`; None keeps the stored vector."""
    beside: tuple[str, bytes] | None = None
    """(space, vector) in another space than fragment.model."""
    replaces: bool = False
    """The content changed: all its stored vectors are deleted first."""
    computed: str = ""
    """The space, of `vector` or of `beside`, whose vector follows from the fragment's indexed text: the journal stores
    none, and computes it when it is read."""


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Fragments with terms and vectors by column: several objects per fragment would be too many."""

    fragments: Sequence[Fragment]
    hashes: npt.NDArray[np.uint64]
    """The terms of all fragments, concatenated, as in Terms."""
    counts: npt.NDArray[np.uint16]
    """Parallel to `hashes`."""
    sizes: npt.NDArray[np.int64]
    """Number of terms of each fragment."""
    vectored: npt.NDArray[np.bool_]
    """Which fragments have a vector in `vectors`."""
    vectors: npt.NDArray[np.float32]
    """Vectors of these fragments, (count, dimension)."""
    versions: npt.NDArray[np.uint16]
    """The analyzer's version of each fragment's terms."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> RowBlock:
        """Convert rows to columns; a row without terms has none."""
        terms = [row.terms or _NO_TERMS for row in rows]
        packed = [row.vector for row in rows if row.vector is not None]
        return cls(
            fragments=[row.fragment for row in rows],
            hashes=np.frombuffer(b"".join([each.hashes for each in terms]), "<u8"),
            counts=np.frombuffer(b"".join([each.counts for each in terms]), "<u2"),
            sizes=np.array([len(each.counts) // 2 for each in terms], np.int64),
            vectored=np.array([row.vector is not None for row in rows], np.bool_),
            vectors=np.frombuffer(b"".join(packed), "<f4").reshape(len(packed), -1 if packed else 0),
            versions=np.array([each.version for each in terms], np.uint16),
        )

    def select(self, which: npt.NDArray[np.bool_]) -> RowBlock:
        """The block of these fragments, bool[fragments]."""
        return RowBlock(
            fragments=[each for each, wanted in zip(self.fragments, which.tolist(), strict=True) if wanted],
            hashes=self.hashes[np.repeat(which, self.sizes)],
            counts=self.counts[np.repeat(which, self.sizes)],
            sizes=self.sizes[which],
            vectored=self.vectored[which],
            vectors=self.vectors[which[self.vectored]],
            versions=self.versions[which],
        )

    def iterate_rows(self) -> Iterator[Row]:
        """Convert to rows; a fragment without terms has None."""
        ends, vectors = np.cumsum(self.sizes).tolist(), iter(self.vectors)
        columns = (self.fragments, ends, self.sizes, self.versions.tolist(), self.vectored)
        for fragment, end, size, version, vectored in zip(*columns, strict=True):
            hashes, counts = self.hashes[end - size : end], self.counts[end - size : end]
            terms = Terms(hashes.tobytes(), counts.tobytes(), version) if size else None
            yield Row(fragment, terms, next(vectors).tobytes() if vectored else None)


class Origin(Enum):
    """Where the vector of an anchor comes from, so that the journal does not store what it has or can compute."""

    GIVEN = auto()
    """It is stored as it is."""
    INDEXED = auto()
    """It is the fragment's vector in the same space."""
    CONTENT = auto()
    """It follows from the fragment's content, in a space that is computed."""
    KEPT = auto()
    """The stored anchor has it, in this space."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """The short-term data of a held fragment; replaces what is stored."""

    id: str
    vector: bytes | None
    enhancements: tuple[Enhancement, ...]
    model: str = ""
    """The space of `vector`."""
    beside: tuple[str, bytes | None] | None = None
    """(space, vector of the same content in another space); None keeps the stored one."""
    origin: Origin = Origin.GIVEN
    """Of `vector`."""
    origin_beside: Origin = Origin.GIVEN
    """Of the vector in `beside`."""
