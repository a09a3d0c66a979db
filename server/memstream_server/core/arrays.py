"""Append-only numpy arrays: the storage of everything that recall keeps per fragment."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

_FIRST_BYTES = 512
"""Initial capacity in bytes; larger if the first values need more,"""
_FIRST_ROWS = 8
"""and at least this many rows."""
BLOCK = 1_024
"""Rows of one block: 1.5 MB of 384-dimensional vectors, copied in about a millisecond."""
Scalar = TypeVar("Scalar", bound=np.generic)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What an image keeps of a structure: arrays by name, and values that msgpack can hold."""

    arrays: Mapping[str, npt.NDArray[Any]]
    values: Mapping[str, Any]
    mapped: bool = False
    """The arrays are a file's pages: writable without a change of the file, and in RAM only while they are used."""

    def own_array(self, name: str) -> npt.NDArray[Any]:
        """An array that may be kept and changed: a copy, unless it is mapped. Raises KeyError."""
        return self.arrays[name] if self.mapped else self.arrays[name].copy()


class Growing(Generic[Scalar]):
    """A numpy array with amortised append. `view` is valid until the next append; the array is 2-D if columns > 0.

    Capacity grows by half, not by doubling, and stops at `most` if that suffices.
    """

    def __init__(self, dtype: type[Scalar], columns: int = 0, most: int = 0) -> None:
        self._shape = (columns,) if columns else ()
        self._most = most
        self._data: npt.NDArray[Scalar] = np.empty((0, *self._shape), dtype)
        self._count = 0
        self.view = self._data
        """The values without a copy; writable. Cached, because reads are far more frequent than appends."""

    def _set_count(self, count: int) -> None:
        self._count = count
        self.view = self._data[:count]

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare capacity included."""
        return self._data.nbytes

    def append(self, value: Any) -> None:
        """Add one value (a row, if 2-D)."""
        count = self._count
        if count == len(self._data):
            self._grow(count + 1)
        self._data[count] = value
        self._count = count + 1
        self.view = self._data[: count + 1]

    def extend(self, values: npt.ArrayLike) -> None:
        """Add many values (rows, if 2-D)."""
        if isinstance(values, list) and len(values) == 1:
            # As `append`: a fifth of the time, and a single observation makes about twenty such calls.
            count = self._count + 1
            if count > len(self._data):
                self._grow(count)
            self._data[count - 1] = values[0]
            self._count = count
            self.view = self._data[:count]
            return
        added = np.asarray(values, self._data.dtype)
        count = self._count + len(added)
        if count > len(self._data):
            self._grow(count)
        self._data[self._count : count] = added
        self._count = count  # as `_set_count`: an activation makes a hundred such calls
        self.view = self._data[:count]

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only the values at `slots`, in that order; release spare capacity."""
        self._data = self.view[slots]
        self._set_count(len(slots))

    def clear(self, release: bool = False) -> None:
        """Remove all values; keep the capacity unless `release` is set."""
        if release:
            self._data = np.empty((0, *self._shape), self._data.dtype)
        self._set_count(0)

    def _grow(self, needed: int) -> None:
        """Move the values to a larger array; the caller sets `view`."""
        first = max(_FIRST_BYTES // (self._data.itemsize * math.prod(self._shape)), _FIRST_ROWS)
        room = max(needed, len(self._data) * 3 // 2, first)
        grown = np.empty((min(room, max(needed, self._most or room)), *self._shape), self._data.dtype)
        grown[: self._count] = self.view
        self._data = grown


def allocated_bytes(columns: Iterable[Growing[Any]]) -> int:
    """Those of several arrays, spare capacity included."""
    return sum([column._data.nbytes for column in columns])


def add_places(columns: Iterable[Growing[Any]], added: int = 1) -> None:
    """Add so many values to each, which the caller then sets: in one call, for a small batch has thirty columns."""
    for column in columns:
        count = column._count + added
        if count > len(column._data):
            column._grow(count)
        column._count = count
        column.view = column._data[:count]


class BlockArray(Generic[Scalar]):
    """Append-only rows in blocks: a full block is never copied again.

    In a single array, each growth copied all vectors (24 MB for 16,000 fragments) and blocked the event loop for
    30 to 80 ms. An adopted block keeps the number of rows that it has.
    """

    def __init__(self, dtype: type[Scalar], columns: int) -> None:
        self._dtype = dtype
        self._columns = columns
        self._release_storage()

    def _release_storage(self) -> None:
        self._full: list[npt.NDArray[Scalar]] = []
        self._ends: list[int] = []
        """Rows up to the end of each full block."""
        self._last = Growing(self._dtype, self._columns, BLOCK)

    @property
    def _full_rows(self) -> int:
        """Rows in full blocks."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self._full_rows + len(self._last)

    def _locate_slot(self, slot: int) -> tuple[int, int]:
        """(block, row in it)."""
        block = bisect_right(self._ends, slot)
        return block, slot - (self._ends[block - 1] if block else 0)

    def __getitem__(self, slot: int) -> npt.NDArray[Scalar]:
        """One row; read-only for the caller."""
        block, place = self._locate_slot(slot)
        row: npt.NDArray[Scalar] = (self._full[block] if block < len(self._full) else self._last.view)[place]
        return row

    def __setitem__(self, slot: int, row: npt.ArrayLike) -> None:
        block, place = self._locate_slot(slot)
        if block == len(self._full):
            self._last.view[place] = row
            return
        if not self._full[block].flags.writeable:
            self._full[block] = self._full[block].copy()
        self._full[block][place] = row

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare capacity included."""
        return sum(each.nbytes for each in self._full) + self._last.nbytes

    def views(self) -> list[npt.NDArray[Scalar]]:
        """The blocks in order, without a copy."""
        return [*self._full, self._last.view]

    def extend(self, rows: npt.NDArray[Scalar]) -> None:
        """Add many rows."""
        taken = 0
        while taken < len(rows):
            some = rows[taken : taken + BLOCK - len(self._last)]
            self._last.extend(some)
            taken += len(some)
            if len(self._last) == BLOCK:
                self._end_block()

    def adopt(self, rows: npt.NDArray[Scalar]) -> None:
        """Add rows as a block of their own, without a copy. The caller must not write to them afterwards."""
        if len(self._last):
            self._end_block()
        self._full.append(rows)
        self._ends.append(self._full_rows + len(rows))

    def take_first(self) -> npt.NDArray[Scalar] | None:
        """Remove the oldest full block and return it; None if no block is full. The other rows are renumbered."""
        if not self._full:
            return None
        first = self._full.pop(0)
        self._ends = [end - len(first) for end in self._ends[1:]]
        return first

    def _end_block(self) -> None:
        self._ends.append(len(self))
        self._full.append(self._last.view)
        self._last = Growing(self._dtype, self._columns, BLOCK)

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Keep only the rows at `slots` (ascending); release the memory of the others."""
        views, before = self.views(), 0
        self._release_storage()
        for view in views:
            first, end = np.searchsorted(slots, [before, before + len(view)])
            self.extend(view[slots[first:end] - before])
            before += len(view)


def mark_firsts(ordered: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """The first of each run of equal values, as bool[n]."""
    firsts = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=firsts[1:])
    return firsts


def sort_distinct(*arrays: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The distinct values of all arrays, ascending.

    np.unique, np.union1d, np.isin and np.median import numpy.ma at their first call: one MB, and a RecursionError in
    one of two threads that do so at once.
    """
    ordered = np.sort(np.concatenate(arrays))
    return ordered[mark_firsts(ordered)]


def finish(parts: Generator[None, None, Result]) -> Result:
    """The result of a generator that pauses, without a pause."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return cast("Result", end.value)
