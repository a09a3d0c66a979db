"""The dense leg in RAM: exact cosines of one memory's unit vectors."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Blocks, Growing
from memstream_server.core.values import Vector

Cosines = npt.NDArray[np.float32]
_LARGE_BYTES = 32 << 20
"""20,000 vectors of 384: what is read of RAM in a millisecond or two."""


class DenseMatrix:
    """float32 vectors by slot, missing ones allowed. Mutable, with a single owner."""

    def __init__(self, dimension: int) -> None:
        self._vectors = Blocks(np.float32, dimension)
        self._present = Growing(np.bool_)
        self._dimension = dimension
        self._missing = 0
        self._scans: list[Scan] = []

    def __len__(self) -> int:
        return len(self._present)

    @property
    def dimension(self) -> int:
        """Length of each vector."""
        return self._dimension

    @property
    def large(self) -> bool:
        """Whether cosines take so long that they are better computed by a `scan`, beside the owner."""
        return len(self) * self._dimension * 4 > _LARGE_BYTES

    @property
    def bytes(self) -> int:
        """Memory held, for the bound on active memories."""
        return self._vectors.nbytes + self._present.nbytes

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which slots have a vector, bool[n]."""
        return self._present.view

    def append(self, vector: Vector | None) -> int:
        """Add the next slot, with or without a vector. Returns the slot. Raises ValueError for another length."""
        self._check(vector)
        row = np.zeros(self._dimension, np.float32) if vector is None else vector
        self.extend(row[None], np.array([vector is not None]))
        return len(self) - 1

    def extend(
        self, vectors: npt.NDArray[np.float32], present: npt.NDArray[np.bool_] | None = None, adopt: bool = False
    ) -> None:
        """Add many slots, those `present` (all, if None) with a vector: (count, dimension).

        `adopt`: kept as they are, without a copy; there should be many, and nobody writes to them any more.
        """
        if present is None:
            present = np.ones(len(vectors), np.bool_)
        if len(vectors) < len(present):
            some, vectors = vectors, np.zeros((len(present), self._dimension), np.float32)
            if len(some):
                vectors[present] = some
        if adopt:
            self._vectors.adopt(vectors)
        else:
            self._vectors.extend(vectors)
        self._present.extend(present)
        self._missing += int((~present).sum())

    def set(self, slot: int, vector: Vector | None) -> None:
        """Fill in, replace or take away a vector. Raises ValueError for another length."""
        self._check(vector)
        self._missing += int(self._present.view[slot]) - (vector is not None)
        self._vectors[slot] = 0 if vector is None else vector
        self._present.view[slot] = vector is not None
        for scan in self._scans:
            scan.changed.add(slot)

    def vector(self, slot: int) -> Vector | None:
        """A copy of a slot's vector; None where it has none."""
        return self._vectors[slot].copy() if self._present.view[slot] else None

    def cosines(self, query: Vector) -> Cosines:
        """float32[n], NaN where a slot has no vector. `query` of unit length. Raises ValueError for another length."""
        self._check(query)
        return self._without_missing(_products(self._vectors.views(), query))

    def scan(self, query: Vector) -> Scan:
        """`cosines`, computed elsewhere; see Scan. Raises ValueError for another length."""
        self._check(query)
        return Scan(self, query)

    def _without_missing(self, cosines: Cosines) -> Cosines:
        if self._missing:
            cosines[~self._present.view] = np.nan
        return cosines

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only these slots stay, renumbered in that order; the room of the others is given back."""
        self._vectors.keep(slots)
        self._present.keep(slots)
        self._missing = int((~self._present.view).sum())
        for scan in self._scans:
            scan.void = True

    def _check(self, vector: Vector | None) -> None:
        if vector is not None and vector.shape != (self._dimension,):
            raise ValueError(f"a vector of this space has {self._dimension} numbers, not shape {vector.shape}")


class Scan:
    """Cosines computed in another thread while the owner goes on changing the matrix.

    The owner makes it, enters it and asks it for `cosines`; in between anyone may `compute`. What changed meanwhile is
    computed once more, so that the cosines are those of the moment they are asked for.
    """

    def __init__(self, matrix: DenseMatrix, query: Vector) -> None:
        self.changed: set[int] = set()
        """Slots that were set since."""
        self.void = False
        """Whether slots were renumbered since."""
        self._matrix = matrix
        self._query = query
        self._views = matrix._vectors.views()
        self._computed: Cosines = np.empty(0, np.float32)

    def __enter__(self) -> Scan:
        self._matrix._scans.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._matrix._scans.remove(self)

    def compute(self) -> None:
        """The long part. A row may be half written while it is read: its slot is then among the changed."""
        self._computed = _products(self._views, self._query)

    def cosines(self) -> Cosines:
        """As DenseMatrix.cosines, now."""
        matrix, done = self._matrix, len(self._computed)
        if self.void:
            return matrix.cosines(self._query)
        later = [*self.changed, *range(done, len(matrix))]
        cosines = np.empty(len(matrix), np.float32)
        cosines[:done] = self._computed
        if later:
            cosines[later] = np.stack([matrix._vectors[slot] for slot in later]) @ self._query
        return matrix._without_missing(cosines)


def _products(views: list[npt.NDArray[np.float32]], query: Vector) -> Cosines:
    products: Cosines = np.concatenate([view @ query for view in views])
    return products
