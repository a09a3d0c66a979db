"""The dense leg in RAM: exact cosines over the unit vectors of a memory."""

from __future__ import annotations

from types import TracebackType

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Blocks, Growing
from memstream_server.core.values import Vector

Cosines = npt.NDArray[np.float32]
_LARGE_BYTES = 32 << 20
"""20,000 vectors of 384 dimensions: one or two milliseconds of memory bandwidth."""


class DenseMatrix:
    """float32 vectors by slot; a slot may have none. Mutable, with a single owner."""

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
        """Numbers per vector."""
        return self._dimension

    @property
    def large(self) -> bool:
        """Whether cosines take long enough to be computed by a `scan` in another thread."""
        return len(self) * self._dimension * 4 > _LARGE_BYTES

    @property
    def bytes(self) -> int:
        """RAM in bytes, for the limit on active memories."""
        return self._vectors.nbytes + self._present.nbytes

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Slots with a vector, bool[n]."""
        return self._present.view

    def append(self, vector: Vector | None) -> int:
        """Add the next slot, with or without a vector; return it. Raises ValueError for a wrong dimension."""
        self._check_dimension(vector)
        row = np.zeros(self._dimension, np.float32) if vector is None else vector
        self.extend(row[None], np.array([vector is not None]))
        return len(self) - 1

    def extend(
        self, vectors: npt.NDArray[np.float32], present: npt.NDArray[np.bool_] | None = None, adopt: bool = False
    ) -> None:
        """Add slots for the rows of `vectors` (count, dimension); only the `present` rows (None: all) are vectors.

        `adopt` keeps the array without a copy: use it for large arrays, and do not write to it afterwards.
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

    def views(self) -> list[npt.NDArray[np.float32]]:
        """The rows of all slots in blocks, without a copy; a slot without a vector has zeros."""
        return self._vectors.views()

    def set(self, slot: int, vector: Vector | None) -> None:
        """Set, replace or remove (None) a vector. Raises ValueError for a wrong dimension."""
        self._check_dimension(vector)
        self._missing += int(self._present.view[slot]) - (vector is not None)
        self._vectors[slot] = 0 if vector is None else vector
        self._present.view[slot] = vector is not None
        for scan in self._scans:
            scan.changed.add(slot)

    def vector(self, slot: int) -> Vector | None:
        """A copy of the vector at a slot; None if it has none."""
        return self._vectors[slot].copy() if self._present.view[slot] else None

    def cosines(self, query: Vector) -> Cosines:
        """float32[n], NaN for slots without a vector. `query`: unit length. Raises ValueError for a wrong dimension."""
        self._check_dimension(query)
        return self._mask_missing(_dot_products(self._vectors.views(), query))

    def scan(self, query: Vector) -> Scan:
        """A scan that computes `cosines` in another thread. Raises ValueError for a wrong dimension."""
        self._check_dimension(query)
        return Scan(self, query)

    def _mask_missing(self, cosines: Cosines) -> Cosines:
        if self._missing:
            cosines[~self._present.view] = np.nan
        return cosines

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots, renumbered in that order; release the memory of the others."""
        self._vectors.keep(slots)
        self._present.keep(slots)
        self._missing = int((~self._present.view).sum())
        for scan in self._scans:
            scan.void = True

    def _check_dimension(self, vector: Vector | None) -> None:
        if vector is not None and vector.shape != (self._dimension,):
            raise ValueError(f"a vector of this space has {self._dimension} numbers, not shape {vector.shape}")


class Scan:
    """Cosines computed in another thread while the owner keeps changing the matrix.

    The owner creates the scan, enters it, and reads `cosines` at the end; in between any thread may call `compute`.
    `cosines` recomputes the slots that changed meanwhile, so its result is current at the time of the read.
    """

    def __init__(self, matrix: DenseMatrix, query: Vector) -> None:
        self.changed: set[int] = set()
        """Slots written since the scan began."""
        self.void = False
        """Whether slots were renumbered since the scan began."""
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
        """Compute all cosines. May read a row while it is written; the slot is then in `changed`."""
        self._computed = _dot_products(self._views, self._query)

    def cosines(self) -> Cosines:
        """Current cosines, as DenseMatrix.cosines returns them."""
        matrix, done = self._matrix, len(self._computed)
        if self.void:
            return matrix.cosines(self._query)
        later = [*self.changed, *range(done, len(matrix))]
        cosines = np.empty(len(matrix), np.float32)
        cosines[:done] = self._computed
        if later:
            cosines[later] = np.stack([matrix._vectors[slot] for slot in later]) @ self._query
        return matrix._mask_missing(cosines)


def _dot_products(views: list[npt.NDArray[np.float32]], query: Vector) -> Cosines:
    products: Cosines = np.concatenate([view @ query for view in views])
    return products
