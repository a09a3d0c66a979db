"""What many rows look like when they are read at once: by column, texts and blobs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias


class Packed(NamedTuple):
    """A column of texts or blobs: the bytes of all, and how many each has; None for NULL."""

    data: bytes
    sizes: Sequence[int | None]
    text: bool = False

    def values(self) -> Iterator[Any]:
        """One by one: str or bytes, or None."""
        end = 0
        for size in self.sizes:
            if size is None:
                yield None
                continue
            start, end = end, end + size
            yield self.data[start:end].decode() if self.text else self.data[start:end]


Column: TypeAlias = list[int | None] | Packed
"""By row."""


def packed(values: Sequence[bytes | None]) -> Packed:
    """Blobs side by side."""
    return Packed(b"".join(filter(None, values)), [None if value is None else len(value) for value in values])


def by_row(columns: Sequence[Column]) -> list[list[Any]]:
    """The same by row."""
    apart = [column.values() if isinstance(column, Packed) else column for column in columns]
    return [list(row) for row in zip(*apart, strict=True)]
