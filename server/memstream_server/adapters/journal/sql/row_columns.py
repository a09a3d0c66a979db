"""Rows by column: the values of a text or blob column are concatenated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias


class Packed(NamedTuple):
    """A column of texts or blobs: all bytes, and the length of each value; None for NULL."""

    data: bytes
    sizes: Sequence[int | None]
    text: bool = False

    def values(self) -> Iterator[Any]:
        """Each value: str, bytes or None."""
        end = 0
        for size in self.sizes:
            if size is None:
                yield None
                continue
            start, end = end, end + size
            yield self.data[start:end].decode() if self.text else self.data[start:end]


Column: TypeAlias = list[int | None] | Packed
"""One value per row."""


def pack_blobs(values: Sequence[bytes | None]) -> Packed:
    """Concatenate blobs."""
    return Packed(b"".join(filter(None, values)), [None if value is None else len(value) for value in values])


def to_rows(columns: Sequence[Column]) -> list[list[Any]]:
    """Convert columns to rows."""
    apart = [column.values() if isinstance(column, Packed) else column for column in columns]
    return [list(row) for row in zip(*apart, strict=True)]
