"""Arrays that grow at the end: the storage of everything recall keeps per fragment."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64
Scalar = TypeVar("Scalar", bound=np.generic)


class Growing(Generic[Scalar]):
    """A numpy array with amortised append. `view` is valid until the next append; columns > 0 makes it 2-D.

    Grows by half, not by doubling: the vectors of a large memory are most of its RAM.
    """

    def __init__(self, dtype: type[Scalar], columns: int = 0) -> None:
        self._shape = (columns,) if columns else ()
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
        grown = np.empty((max(needed, len(self._data) * 3 // 2, _FIRST_CAPACITY), *self._shape), self._data.dtype)
        grown[: self._count] = self.view
        self._data = grown
        self._grown(self._count)
