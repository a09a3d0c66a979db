"""Constraints in annotations (bounds, secrets, collections), and how errors display a rejected value."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """In an annotation, `Annotated[int, Bounds(0, 10)]`: both bounds are inclusive."""

    low: float
    high: float


Int32: TypeAlias = Annotated[int, Bounds(-INT32_MAX - 1, INT32_MAX)]
"""An int32."""
Count: TypeAlias = Annotated[int, Bounds(0, INT32_MAX)]
"""A non-negative int32."""
Position: TypeAlias = Annotated[int, Bounds(0, INT64_MAX)]
"""A sequence number, revision or other position: a non-negative int64."""
Moment: TypeAlias = Position | datetime
"""A moment of a memory: a revision, or a time with a zone."""
Seconds: TypeAlias = Annotated[float, Bounds(0, 1e9)]
"""A non-negative number of seconds that clocks can represent."""
KeepaliveSeconds: TypeAlias = Annotated[float, Bounds(0.001, INT32_MAX / 1000)]
"""gRPC takes milliseconds as an int32."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ListLike(Protocol[T_co]):
    """A list, a tuple or similar; excludes strings (they contain only strings) and mappings (they have no index)."""

    def __contains__(self, value: object, /) -> bool: ...
    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...
    def index(self, value: Any, /) -> int: ...
    def count(self, value: Any, /) -> int: ...


Several: TypeAlias = ListLike[T] | AbstractSet[T]
"""A list, tuple or set; a type checker rejects a string or a mapping."""
Items: TypeAlias = ListLike[T] | AbstractSet[T] | Iterator[T]
"""A list, tuple, set or iterator."""


LocalSetting: TypeAlias = str | int | float | bool | Path | None
"""A setting of a server that memstream.local starts; None leaves it at its default."""


class Secret:
    """In an annotation: errors never show the value."""


class VectorLike:
    """In an annotation: a numpy array or a sequence of numbers; the codec checks it."""


def show_value(value: object) -> str:
    """The value as an error message shows it: short, on one line."""
    if value is None:
        return "None"
    if isinstance(value, str | bytes):
        return f"{'the string' if isinstance(value, str) else 'the bytes'} {quote_text(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, bool | int | float):
        return f"{value!r} ({type(value).__name__})"
    return with_article(type(value))


def quote_text(text: str | bytes) -> str:
    """A text as an error message shows it: escaped, truncated."""
    return f"{text[:_SHOWN_CHARS]!a}{'...' if len(text) > _SHOWN_CHARS else ''}"


def with_article(kind: type) -> str:
    """The class name with its article, for an error message."""
    return f"{'an' if kind.__name__[:1].lower() in 'aeiou' else 'a'} {kind.__name__}"
