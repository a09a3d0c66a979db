"""The dense leg in RAM: exact cosines of one memory's unit vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memstream_server.core.arrays import Blocks, Growing
from memstream_server.core.values import Vector


class DenseMatrix:
    """float32 vectors by slot, missing ones allowed. Mutable, with a single owner."""

    def __init__(self, dimension: int) -> None:
        self._vectors = Blocks(np.float32, dimension)
        self._present = Growing(np.bool_)
        self._dimension = dimension
        self._missing = 0

    def __len__(self) -> int:
        return len(self._present)

    @property
    def dimension(self) -> int:
        """Length of each vector."""
        return self._dimension

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

    def vector(self, slot: int) -> Vector | None:
        """A copy of a slot's vector; None where it has none."""
        return self._vectors[slot].copy() if self._present.view[slot] else None

    def cosines(self, query: Vector) -> npt.NDArray[np.float32]:
        """float32[n], NaN where a slot has no vector. `query` of unit length. Raises ValueError for another length."""
        self._check(query)
        cosines: npt.NDArray[np.float32] = np.concatenate([block @ query for block in self._vectors.views()])
        if self._missing:
            cosines[~self._present.view] = np.nan
        return cosines

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only these slots stay, renumbered in that order; the room of the others is given back."""
        self._vectors.keep(slots)
        self._present.keep(slots)
        self._missing = int((~self._present.view).sum())

    def _check(self, vector: Vector | None) -> None:
        if vector is not None and vector.shape != (self._dimension,):
            raise ValueError(f"a vector of this space has {self._dimension} numbers, not shape {vector.shape}")
