"""Arrays that grow at the end: the storage of everything recall keeps per fragment."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64
BLOCK = 1_024
"""Rows of one block: 1.5 MB of the usual vectors, which take a millisecond to copy."""
Scalar = TypeVar("Scalar", bound=np.generic)


class Growing(Generic[Scalar]):
    """A numpy array with amortised append. `view` is valid until the next append; columns > 0 makes it 2-D.

    Grows by half, not by doubling, and to `most` where that is enough.
    """

    def __init__(self, dtype: type[Scalar], columns: int = 0, most: int = 0) -> None:
        self._shape = (columns,) if columns else ()
        self._most = most
        self._data: npt.NDArray[Scalar] = np.empty((_FIRST_CAPACITY, *self._shape), dtype)
        self._grown(0)

    def _grown(self, count: int) -> None:
        self._count = count
        self.view = self._data[:count]
        """The values so far, without a copy; may be written to. Kept, for it is read far more often than it grows."""

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        return self._data.nbytes

    def append(self, value: Any) -> None:
        """Add one value (a row, if 2-D)."""
        self.reserve(1)
        self._data[self._count] = value
        self._grown(self._count + 1)

    def extend(self, values: npt.ArrayLike) -> None:
        """Add many values (rows, if 2-D)."""
        added = np.asarray(values, self._data.dtype)
        self.reserve(len(added))
        self._data[self._count : self._count + len(added)] = added
        self._grown(self._count + len(added))

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only the values at `slots`, in that order; spare room is given back."""
        self._data = self.view[slots]
        self._grown(len(slots))

    def clear(self, release: bool = False) -> None:
        """No values; the room stays, if it is not to be released."""
        if release:
            self._data = np.empty((_FIRST_CAPACITY, *self._shape), self._data.dtype)
        self._grown(0)

    def reserve(self, more: int) -> None:
        """Room for so many more."""
        needed = self._count + more
        if needed <= len(self._data):
            return
        room = max(needed, len(self._data) * 3 // 2, _FIRST_CAPACITY)
        grown = np.empty((min(room, max(needed, self._most or room)), *self._shape), self._data.dtype)
        grown[: self._count] = self.view
        self._data = grown
        self._grown(self._count)


class Blocks(Generic[Scalar]):
    """Rows that grow at the end, block by block: one that is full is never copied again.

    In one array the vectors of a memory of 16,000 fragments, 24 MB, were copied at once and held everything up for
    30 to 80 ms each time they outgrew it. The first block is as large as what was reserved.
    """

    def __init__(self, dtype: type[Scalar], columns: int) -> None:
        self._dtype = dtype
        self._columns = columns
        self._first = BLOCK
        """Rows of the first block; all others have BLOCK."""
        self._blocks = [self._new()]

    def _new(self) -> Growing[Scalar]:
        return Growing(self._dtype, self._columns, BLOCK)

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def __getitem__(self, slot: int) -> npt.NDArray[Scalar]:
        """A row; may be written to."""
        block, place = divmod(slot - self._first, BLOCK)
        row: npt.NDArray[Scalar] = self._blocks[block + 1].view[place] if block >= 0 else self._blocks[0].view[slot]
        return row

    @property
    def nbytes(self) -> int:
        """Bytes held, spare room included."""
        return sum(each.nbytes for each in self._blocks)

    def views(self) -> list[npt.NDArray[Scalar]]:
        """All rows in order, without a copy."""
        return [each.view for each in self._blocks]

    def reserve(self, rows: int) -> None:
        """Room for so many at once, while there are none."""
        if not len(self) and rows > BLOCK:
            self._first = rows
            self._blocks[0].reserve(rows)

    def extend(self, rows: npt.NDArray[Scalar]) -> None:
        """Add many."""
        taken = 0
        while taken < len(rows):
            room = (BLOCK if len(self._blocks) > 1 else self._first) - len(self._blocks[-1])
            if not room:
                self._blocks.append(self._new())
                self._blocks[-1].reserve(BLOCK)
                continue
            some = rows[taken : taken + room]
            self._blocks[-1].extend(some)
            taken += len(some)

    def keep(self, slots: npt.NDArray[np.int64]) -> None:
        """Only the rows at `slots`, which ascend; the room of the others is given back."""
        views, self._blocks, self._first = self.views(), [self._new()], BLOCK
        before = 0
        for view in views:
            first, end = np.searchsorted(slots, [before, before + len(view)])
            self.extend(view[slots[first:end] - before])
            before += len(view)
