"""The dense leg in RAM: cosines over the unit vectors of a memory.

A small memory keeps float32 vectors. A large one keeps int8 copies of all but its newest rows (`QuantizedRows`): their
cosines are estimates with bounds, and the caller reads the few vectors that can matter from the journal.

The copies take a quarter of the RAM, and a scan reads a quarter of the bytes. Each row has its own scale, its largest
component / 127. For a query q and a vector v with copies q' and v', |q.v - q'.v'| <= |q - q'| |v| + |q'| |v - v'|; both
differences are measured when the copies are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt
import simsimd

from memstream_server.core.arrays import BLOCK, BlockArray, Growing, Parts, allocated_bytes
from memstream_server.core.values import Vector

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
        return allocated_bytes(self._columns) + sum([each.nbytes for each in self._codes])

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


Cosines = npt.NDArray[np.float32]
Estimates = tuple[Cosines, Cosines | None]
"""Cosines by slot, NaN for slots without a vector, and bounds on their errors; None: all are exact."""
_ROWS = 8
"""Rows that BLAS multiplies at once, or a multiple of it."""
_LARGE_BYTES = 4 << 20
"""2,600 vectors of 384 dimensions: a third of a millisecond, which is not to be in one step with the words' part."""
QUANTIZED_BYTES = 64 << 20
"""A matrix of more bytes keeps int8 copies; below, reading vectors costs more CPU than a scan of copies saves."""
_QUANTIZED_AT_ONCE = 2
"""Blocks quantized per extension, about a millisecond each, so that a growing memory does not block the event loop."""
_CHANGED_MAX = 1_024
"""Changed vectors of quantized rows that are kept in float32."""


def count_fitting(room_bytes: int, dimension: int) -> int:
    """Number of vectors that fit into that RAM, as int8 copies if they are that many."""
    return room_bytes // (bytes_per_row(dimension) if room_bytes >= QUANTIZED_BYTES else 4 * dimension)


class DenseMatrix:
    """Vectors by slot; a slot may have none. Mutable, with a single owner."""

    def __init__(self, dimension: int, quantizes: bool = True) -> None:
        """`quantizes`: may keep int8 copies once it is large."""
        self._quantizes = quantizes
        self._copies = QuantizedRows()
        """Of the first slots, if the memory is large,"""
        self._changed: dict[int, Vector] = {}
        """and those of their vectors that changed since."""
        self._vectors = BlockArray(np.float32, dimension)
        """The other slots."""
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
        """Whether cosines take long enough to be computed by a `scan` in another thread, or are estimates."""
        return self.quantized > 0 or len(self) * self._dimension * 4 > _LARGE_BYTES

    @property
    def quantized(self) -> int:
        """Number of slots, from the first, whose vectors are not in RAM."""
        return len(self._copies)

    @property
    def bytes(self) -> int:
        """RAM in bytes, for the limit on active memories."""
        changed = len(self._changed) * self._dimension * 4
        return self._vectors.nbytes + self._present.nbytes + self._copies.nbytes + changed

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
        if self._quantizes and (self.quantized or len(self) * self._dimension * 4 > QUANTIZED_BYTES):
            self._quantize_oldest()

    def _quantize_oldest(self) -> None:
        for _ in range(_QUANTIZED_AT_ONCE):
            vectors = self._vectors.take_first()
            if vectors is None:
                break
            self._copies.extend(vectors)

    def pack(self) -> Parts:
        """Everything, for an image."""
        self._copy_changed()
        copies = {f"copies.{name}": array for name, array in self._copies.pack().arrays.items()}
        return Parts(copies | {"vectors": np.concatenate(self._vectors.views()), "present": self._present.view}, {})

    def unpack(self, parts: Parts) -> None:
        """Become what was packed, from empty. Raises ValueError if it has int8 copies and this one may not."""
        prefix = "copies."
        copies = {name.removeprefix(prefix): array for name, array in parts.arrays.items() if name.startswith(prefix)}
        if copies and not self._quantizes:
            raise ValueError("int8 copies instead of vectors")
        self._copies.unpack(Parts(copies, {}, parts.mapped))
        present, vectors = parts.arrays["present"], parts.arrays["vectors"]
        if self.quantized + len(vectors) != len(present):
            raise ValueError("slots without a row")
        if copies:
            vectors = vectors.copy()  # a view of these few rows would keep the whole image in RAM
        for start in range(0, len(vectors), BLOCK):
            self._vectors.adopt(vectors[start : start + BLOCK])
        self._present.extend(present)
        self._missing = int((~present).sum())

    def set(self, slot: int, vector: Vector | None) -> None:
        """Set, replace or remove (None) a vector. Raises ValueError for a wrong dimension."""
        self._check_dimension(vector)
        self._missing += int(self._present.view[slot]) - (vector is not None)
        self._present.view[slot] = vector is not None
        self._mark_changed(slot)
        if slot >= self.quantized:
            self._vectors[slot - self.quantized] = 0 if vector is None else vector
        elif vector is not None:
            self._changed[slot] = vector.copy()
        else:
            self._changed.pop(slot, None)
            self._copies.put(slot, np.zeros(self._dimension, np.float32))
        if len(self._changed) > _CHANGED_MAX:
            self._copy_changed()

    def _copy_changed(self) -> None:
        for each, changed in self._changed.items():
            self._mark_changed(each)
            self._copies.put(each, changed)
        self._changed = {}

    def _mark_changed(self, slot: int) -> None:
        for scan in self._scans:
            scan.changed.add(slot)

    def vector(self, slot: int) -> Vector | None:
        """A copy of the vector at a slot; None if it has none in RAM."""
        if not self._present.view[slot]:
            return None
        if slot < self.quantized:
            changed = self._changed.get(slot)
            return None if changed is None else changed.copy()
        return self._vectors[slot - self.quantized].copy()

    def has_unread(self, slot: int) -> bool:
        """Whether a slot has a vector, but only its int8 copy is in RAM."""
        return slot < self.quantized and bool(self._present.view[slot]) and slot not in self._changed

    def cosines(self, query: Vector) -> Cosines:
        """float32[n], NaN for slots without a vector; estimates for the `quantized` slots.

        `query`: unit length. Raises ValueError for a wrong dimension.
        """
        return self.estimate(query)[0]

    def estimate(self, query: Vector) -> Estimates:
        """The cosines, with bounds on their errors."""
        self._check_dimension(query)
        if not self.quantized:
            return self._mask_missing(_scan_exactly(self._vectors.views(), query)), None
        return self._correct(_scan_all(self._copies.query(query), self._vectors.views(), query), query, ())

    def scan(self, query: Vector) -> Scan:
        """A scan that computes `estimate` in another thread. Raises ValueError for a wrong dimension."""
        self._check_dimension(query)
        return Scan(self, query)

    def _correct(self, estimates: Estimates, query: Vector, later: Iterable[int]) -> Estimates:
        """Complete earlier estimates: add the slots that are new since, and compute those in `later` again."""
        computed, bounds = estimates
        stale = {*later, *range(len(computed), len(self)), *self._changed}
        if not stale:
            return self._mask_missing(computed), bounds
        cosines, errors = np.empty(len(self), np.float32), np.zeros(len(self), np.float32)
        cosines[: len(computed)] = computed
        if bounds is not None:
            errors[: len(computed)] = bounds
        known = [slot for slot in stale if slot >= self.quantized or slot in self._changed]
        if known:
            cosines[known], errors[known] = multiply_rows(np.stack([self._row(slot) for slot in known]), query), 0
        for slot in stale.difference(known):
            (cosines[slot],), (errors[slot],) = self._copies.query_one(query, slot).compute()
        return self._mask_missing(cosines), errors if self.quantized else None

    def _row(self, slot: int) -> Vector:
        changed = self._changed.get(slot)
        return self._vectors[slot - self.quantized] if changed is None else changed

    def _mask_missing(self, cosines: Cosines) -> Cosines:
        if self._missing:
            cosines[~self._present.view] = np.nan
        return cosines

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only these slots (ascending), renumbered in that order; release the memory of the others."""
        first = self.quantized
        self._copies.keep(slots[slots < first])
        self._vectors.keep(slots[self.quantized :] - first)
        places = {slot: place for place, slot in enumerate(slots[: self.quantized].tolist())}
        self._changed = {places[slot]: vector for slot, vector in self._changed.items() if slot in places}
        self._present.keep(slots)
        self._missing = int((~self._present.view).sum())
        for scan in self._scans:
            scan.void = True

    def _check_dimension(self, vector: Vector | None) -> None:
        if vector is not None and vector.shape != (self._dimension,):
            raise ValueError(f"a vector of this space has {self._dimension} numbers, not shape {vector.shape}")


class Scan:
    """Estimates computed in another thread while the owner keeps changing the matrix.

    The owner creates the scan, enters it, and reads `estimate`; in between any thread may call `compute`. `estimate`
    computes again the slots that changed meanwhile, so its result is current at the time of the read.
    """

    def __init__(self, matrix: DenseMatrix, query: Vector) -> None:
        self.changed: set[int] = set()
        """Slots written since the scan began."""
        self.void = False
        """Whether slots were renumbered since the scan began."""
        self._matrix = matrix
        self._query = query
        self._copies = matrix._copies.query(query)
        self._views = matrix._vectors.views()
        self._computed: Estimates = np.empty(0, np.float32), None

    def __enter__(self) -> Scan:
        self._matrix._scans.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._matrix._scans.remove(self)

    def compute(self) -> None:
        """Compute all cosines. May read a row while it is written; the slot is then in `changed`."""
        self._computed = _scan_all(self._copies, self._views, self._query)

    def estimate(self) -> Estimates:
        """Current cosines, as DenseMatrix.estimate returns them."""
        if self.void:
            return self._matrix.estimate(self._query)
        return self._matrix._correct(self._computed, self._query, self.changed)


def _scan_all(copies: QuantizedQuery, views: list[npt.NDArray[np.float32]], query: Vector) -> Estimates:
    if not len(copies):
        return _scan_exactly(views, query), None
    cosines, bounds = copies.compute()
    errors = np.zeros(len(bounds) + sum(map(len, views)), np.float32)
    errors[: len(bounds)] = bounds
    return np.concatenate([cosines, _scan_exactly(views, query)]), errors


def _scan_exactly(views: list[npt.NDArray[np.float32]], query: Vector) -> Cosines:
    cosines: Cosines = np.concatenate([multiply_rows(view, query) for view in views])
    return cosines


def multiply_rows(rows: npt.NDArray[np.float32], query: Vector) -> Cosines:
    """The inner product of each row with `query`, to the last bit the same whatever other rows there are.

    A BLAS of one thread adds up the last few rows of a matrix in another order: they are padded to a full group.
    """
    products, whole = np.empty(len(rows), np.float32), len(rows) - len(rows) % _ROWS
    if whole:
        np.dot(rows[:whole], query, out=products[:whole])
    if whole < len(rows):
        last = np.zeros((_ROWS, rows.shape[1]), np.float32)
        last[: len(rows) - whole] = rows[whole:]
        products[whole:] = np.dot(last, query)[: len(rows) - whole]
    return products
