"""What annotations say beyond a type, and how an error shows a value that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Bounds:
    """In an annotation, `Annotated[int, Bounds(0, 10)]`: both belong to the range."""

    low: float
    high: float


Int32: TypeAlias = Annotated[int, Bounds(-INT32_MAX - 1, INT32_MAX)]
"""A whole number of 32 bits."""
Count: TypeAlias = Annotated[int, Bounds(0, INT32_MAX)]
"""A whole number, not negative."""
Position: TypeAlias = Annotated[int, Bounds(0, INT64_MAX)]
"""A number, revision or other place in an order, not negative."""
Seconds: TypeAlias = Annotated[float, Bounds(0, 1e9)]
"""Not negative, and within what clocks can count."""
KeepaliveSeconds: TypeAlias = Annotated[float, Bounds(0.001, INT32_MAX / 1000)]
"""What gRPC takes, in milliseconds, as an int32."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ListLike(Protocol[T_co]):
    """A list, a tuple or the like: no string, which contains strings alone, and no mapping, which has no places."""

    def __contains__(self, value: object, /) -> bool: ...
    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...
    def index(self, value: Any, /) -> int: ...
    def count(self, value: Any, /) -> int: ...


Several: TypeAlias = ListLike[T] | AbstractSet[T]
"""A list, tuple or set; a string or a mapping is a mistake that a type checker finds."""
Items: TypeAlias = ListLike[T] | AbstractSet[T] | Iterator[T]
"""The same, or what gives one item after another."""


class Secret:
    """In an annotation: no error shows the value."""


class VectorLike:
    """In an annotation: a numpy array or a sequence of numbers, which the codec checks."""


def show_value(value: object) -> str:
    """What came, as an error may repeat it: short, and on one line."""
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
    """A text as an error may repeat it."""
    return f"{text[:_SHOWN_CHARS]!a}{'...' if len(text) > _SHOWN_CHARS else ''}"


def with_article(kind: type) -> str:
    """A class as an error names it."""
    return f"{'an' if kind.__name__[:1].lower() in 'aeiou' else 'a'} {kind.__name__}"
