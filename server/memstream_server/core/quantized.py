"""int8 copies of vectors: a quarter of the RAM, a scan of a quarter of the bytes, and a bound on every error.

Each row has its own scale, its largest component / 127. For a query q and a vector v with copies q' and v',
|q.v - q'.v'| <= |q - q'| |v| + |q'| |v - v'|; both differences are measured when the copies are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import simsimd

from memstream_server.core.arrays import Growing, Parts

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
_CODE_MAX = 127
_COLUMNS = ("scales", "lengths", "losses")
_UNIT_ROUNDOFF = 2.0**-24
"""Of float32: a sum of n products is off by less than n times this share of the product of the lengths."""


class QuantizedRows:
    """Copies by slot, in blocks that are never moved. Mutable, with a single owner."""

    def __init__(self) -> None:
        self._columns = tuple(Growing(np.float32) for _ in _COLUMNS)
        """By slot: scale, length of the vector, length of its difference to the copy."""
        self._release_blocks()

    def _release_blocks(self) -> None:
        self._codes: list[Codes] = []
        self._ends: list[int] = []
        """Slots up to the end of each block."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(each.nbytes for each in self._columns) + sum(each.nbytes for each in self._codes)

    def extend(self, vectors: Floats) -> None:
        """Add copies of these rows (count, dimension)."""
        codes, values = _quantize(vectors)
        for column, each in zip(self._columns, values, strict=True):
            column.extend(each)
        self._add_block(codes)

    def pack(self) -> Parts:
        """Everything, for an image."""
        columns = {name: column.view for name, column in zip(_COLUMNS, self._columns, strict=True)}
        return Parts(columns | {"codes": np.concatenate(self._codes)} if self._codes else {}, {})

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty."""
        if parts.arrays:
            for name, column in zip(_COLUMNS, self._columns, strict=True):
                column.extend(parts.arrays[name])
            self._add_block(parts.own_array("codes"))

    def _add_block(self, codes: Codes) -> None:
        if len(codes):
            self._ends.append(len(self) + len(codes))
            self._codes.append(codes)

    def put(self, slot: int, vector: Floats) -> None:
        """Overwrite a copy."""
        codes, values = _quantize(vector[None])
        self._row(slot)[:] = codes
        for column, each in zip(self._columns, values, strict=True):
            column.view[slot] = each[0]

    def _row(self, slot: int) -> Codes:
        """(1, dimension)"""
        block = bisect_right(self._ends, slot)
        row = slot - self._ends[block] + len(self._codes[block])
        return self._codes[block][row : row + 1]

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots (ascending), renumbered in that order; release the memory of the others."""
        blocks, ends = self._codes, self._ends
        self._release_blocks()
        for codes, end in zip(blocks, ends, strict=True):
            first, last = np.searchsorted(slots, [end - len(codes), end])
            self._add_block(codes[slots[first:last] - (end - len(codes))])
        for column in self._columns:
            column.keep(slots)

    def query(self, vector: Floats) -> QuantizedQuery:
        """The products of all rows with a vector. Any thread may compute them while the owner changes rows."""
        return QuantizedQuery(vector, list(self._codes), [column.view for column in self._columns])

    def query_one(self, vector: Floats, slot: int) -> QuantizedQuery:
        """The same for a single row."""
        return QuantizedQuery(vector, [self._row(slot)], [column.view[slot : slot + 1] for column in self._columns])


class QuantizedQuery:
    """Inner products of a vector with some rows, estimated from the copies of both."""

    def __init__(self, vector: Floats, blocks: Sequence[Codes], columns: Sequence[Floats]) -> None:
        self._vector = vector
        self._blocks = blocks
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def compute(self) -> tuple[Floats, Floats]:
        """The products and bounds on their errors, float32[rows]."""
        query, ((scale,), (length,), (loss,)) = _quantize(self._vector[None])
        scales, lengths, losses = self._columns
        values, end = np.empty(len(self), np.float32), 0
        for codes in self._blocks:
            start, end = end, end + len(codes)
            # Without `out`: each call of simsimd 6.5 with it takes a reference to None too many.
            values[start:end] = np.asarray(simsimd.cdist(query, codes, "dot"))
        values *= scales
        values *= scale
        rounding = 2 * query.shape[1] * _UNIT_ROUNDOFF
        errors = losses * (length + loss)  # the copy of the query is at most that long
        errors += lengths * np.float32(loss + rounding * length)
        return values, errors


def bytes_per_row(dimension: int) -> int:
    """RAM of one copy."""
    return dimension + 3 * 4


def _quantize(vectors: Floats) -> tuple[Codes, tuple[Floats, Floats, Floats]]:
    """(codes (rows, dimension), (scales, lengths, lengths of the differences))."""
    largest = np.maximum(vectors.max(axis=1), -vectors.min(axis=1))
    scales = np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(_CODE_MAX)
    rounded = np.rint(vectors / scales[:, None])
    codes = rounded.astype(np.int8)
    rounded *= scales[:, None]
    rounded -= vectors
    return codes, (scales, _lengths(vectors), _lengths(rounded))


def _lengths(vectors: Floats) -> Floats:
    lengths: Floats = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
    return lengths
