"""Kinds of values: each Kind checks a value and describes in a sentence what is wrong with it.

`takes` checks only the value itself, `check` also its contents; `accepts_at_once` is the fast path for common values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any

import numpy as np

from memstream.argument_types import INT64_MAX, quote_text, show_value, with_article
from memstream.errors import InvalidArgument


class Kind:
    """A set of allowed values. `name` describes one value, `plural` several."""

    name: str
    plural: str

    def takes(self, value: object) -> bool:
        """Whether the value is of this kind, without checking its contents."""
        raise NotImplementedError

    def accepts_at_once(self, value: Any) -> bool:
        """Fast path: True accepts the value; False means that the full check is needed."""
        return False

    def check(self, path: str, value: object) -> None:
        """Raises InvalidArgument, which names `path`."""
        if self.accepts_at_once(value):
            return
        if not self.takes(value):
            raise InvalidArgument(path, f"must be {self.name}, not {self.describe(value)}")
        self.check_inside(path, value)

    def check_inside(self, path: str, value: Any) -> None:
        """Checks the contents. Raises InvalidArgument."""

    def describe(self, value: object) -> str:
        """What came."""
        return show_value(value)


class Plain(Kind):
    """Instances of classes."""

    def __init__(self, name: str, plural: str, *classes: type) -> None:
        self.name, self.plural, self._classes = name, plural, classes

    def takes(self, value: object) -> bool:
        return isinstance(value, self._classes)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ in self._classes


class Anything(Kind):
    name, plural = "anything", "anything"

    def takes(self, value: object) -> bool:
        return True


class Text(Kind):
    name, plural = "a string", "strings"

    def takes(self, value: object) -> bool:
        return isinstance(value, str)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ is str and value.isascii()

    def check_inside(self, path: str, value: Any) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                path, f"has a lone surrogate ({value[error.start]!a}) at character {error.start + 1}"
            ) from None


class Whole(Kind):
    name, plural = "a whole number", "whole numbers"

    def __init__(self, low: float = -INT64_MAX - 1, high: float = INT64_MAX) -> None:
        self._low, self._high = low, high

    def takes(self, value: object) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ is int and self._low <= value <= self._high

    def check_inside(self, path: str, value: Any) -> None:
        if not self._low <= value <= self._high:
            raise InvalidArgument(path, f"must be between {self._low} and {self._high}, not {show_value(value)}")


class Number(Kind):
    name, plural = "a number", "numbers"

    def __init__(self, low: float = -math.inf, high: float = math.inf) -> None:
        self._low, self._high = low, high

    def takes(self, value: object) -> bool:
        return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ is float and self._low <= value <= self._high and math.isfinite(value)

    def check_inside(self, path: str, value: Any) -> None:
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise InvalidArgument(path, f"must be a finite number, not {show_value(value)}")
        if not self._low <= value <= self._high:
            raise InvalidArgument(path, f"must be between {self._low} and {self._high}, not {show_value(value)}")


class Time(Kind):
    name, plural = "an aware datetime", "aware datetimes"

    def takes(self, value: object) -> bool:
        return isinstance(value, datetime)

    def check_inside(self, path: str, value: Any) -> None:
        if value.utcoffset() is None:
            raise InvalidArgument(path, "must be an aware datetime (datetime.now(UTC)), not one without a time zone")


class Choice(Kind):
    """Members of an enum, or their values."""

    def __init__(self, enum: type[Enum]) -> None:
        self._enum = enum
        self._values = [str(member.value) for member in enum]
        self.name = f"one of {', '.join(value for value in self._values if value != 'unknown')}"
        self.plural = f"values among {self.name.removeprefix('one of ')}"

    def takes(self, value: object) -> bool:
        if isinstance(value, Enum):
            return isinstance(value, self._enum)
        return isinstance(value, str) and value in self._values


class OneOf(Kind):
    def __init__(self, values: tuple[object, ...]) -> None:
        self._values = values
        self.name = self.plural = " or ".join(map(repr, values))

    def takes(self, value: object) -> bool:
        return any(isinstance(value, type(each)) and value == each for each in self._values)


class Items(Kind):
    """Collections of values; items of an iterator are checked as they are consumed."""

    def __init__(self, element: Kind, base: type, examples: str) -> None:
        self._element, self._base = element, base
        self.name = self.plural = f"{examples} of {element.plural}"

    def takes(self, value: object) -> bool:
        return isinstance(value, self._base) and not isinstance(value, str | bytes | bytearray | memoryview | Mapping)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ in (list, tuple) and self.takes(value) and all(map(self._element.accepts_at_once, value))

    def check_inside(self, path: str, value: Any) -> None:
        if isinstance(value, Collection):
            for number, item in enumerate(value):
                self._element.check(f"{path}[{number}]", item)

    def describe(self, value: object) -> str:
        if isinstance(value, str) and self._element.takes(value):
            return f"{show_value(value)}; for one, write [{quote_text(value)}]"
        return show_value(value)


class FixedTuple(Kind):
    """Tuples of fixed length."""

    def __init__(self, elements: Sequence[Kind]) -> None:
        self._elements = elements
        self.name = self.plural = f"a tuple of {' and '.join(kind.name for kind in elements)}"

    def takes(self, value: object) -> bool:
        return isinstance(value, tuple) and len(value) == len(self._elements)

    def check_inside(self, path: str, value: Any) -> None:
        for number, (kind, item) in enumerate(zip(self._elements, value, strict=True)):
            kind.check(f"{path}[{number}]", item)


class Map(Kind):
    def __init__(self, key: Kind, value: Kind) -> None:
        self._key, self._value = key, value
        self.name = self.plural = f"a mapping of {key.plural} to {value.plural}"

    def takes(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def accepts_at_once(self, value: Any) -> bool:
        return value.__class__ is dict and all(
            self._key.accepts_at_once(key) and self._value.accepts_at_once(item) for key, item in value.items()
        )

    def check_inside(self, path: str, value: Any) -> None:
        for key, item in value.items():
            self._key.check(f"a key of {path}", key)
            self._value.check(f"{path}.{key if isinstance(key, str) else show_value(key)}", item)


class VectorOfNumbers(Kind):
    name, plural = "a numpy array or a sequence of numbers", "numpy arrays or sequences of numbers"

    def takes(self, value: object) -> bool:
        return isinstance(value, np.ndarray | Sequence) and not isinstance(value, str | bytes)


class Options(Kind):
    """Mappings with the keys of a TypedDict."""

    def __init__(self, inside: Mapping[str, Kind]) -> None:
        self._inside = inside
        self.name = self.plural = f"a mapping with keys among {', '.join(inside)}"

    def takes(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def check_inside(self, path: str, value: Any) -> None:
        for key, item in value.items():
            kind = self._inside.get(key) if isinstance(key, str) else None
            if kind is None:
                raise InvalidArgument(path, f"has no key {show_value(key)}; there are {', '.join(self._inside)}")
            kind.check(f"{path}.{key}", item)


_EXAMPLES: dict[type, object] = {str: "x", int: 1, float: 1.0, bool: True, type(None): None, dict: {}, list: []}
"""Kinds of the most common classes."""


class Either(Kind):
    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = kinds
        self._first = {
            each: next(kind for kind in kinds if kind.takes(example))
            for each, example in _EXAMPLES.items()
            if any(kind.takes(example) for kind in kinds)
        }
        numbers = any(isinstance(kind, Number) for kind in kinds)
        named = [kind for kind in kinds if not (numbers and isinstance(kind, Whole))]
        self.name, self.plural = (
            _join_names([kind.name for kind in named]),
            _join_names([kind.plural for kind in named]),
        )

    def takes(self, value: object) -> bool:
        return any(kind.takes(value) for kind in self._kinds)

    def accepts_at_once(self, value: Any) -> bool:
        first = self._first.get(value.__class__)
        return first is not None and first.accepts_at_once(value)

    def check_inside(self, path: str, value: Any) -> None:
        next(kind for kind in self._kinds if kind.takes(value)).check_inside(path, value)

    def describe(self, value: object) -> str:
        descriptions = [kind.describe(value) for kind in self._kinds]
        return next((text for text in descriptions if text != show_value(value)), show_value(value))


class Hidden(Kind):
    """Values that errors never show."""

    def __init__(self, kind: Kind) -> None:
        self._kind, self.name, self.plural = kind, kind.name, kind.plural

    def takes(self, value: object) -> bool:
        return self._kind.takes(value)

    def describe(self, value: object) -> str:
        return with_article(type(value))


class Function(Kind):
    name, plural = "a function", "functions"

    def takes(self, value: object) -> bool:
        return callable(value)


def _join_names(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
