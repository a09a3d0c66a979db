"""Derives the Kind (what an argument may be) from an annotation.

Rules beyond the annotation: a bool is not a number, numbers are finite, times have a zone, strings are valid UTF-8, and
a string is not a collection of strings.
"""

from __future__ import annotations

import types
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from memstream.argument_types import Bounds, ListLike, Secret, VectorLike, with_article
from memstream.value_kinds import (
    Anything,
    Choice,
    Either,
    FixedTuple,
    Function,
    Hidden,
    Items,
    Kind,
    Map,
    Number,
    OneOf,
    Options,
    Plain,
    Text,
    Time,
    VectorOfNumbers,
    Whole,
)

_NOTHING = Plain("None", "None", type(None))
_PLAIN: dict[object, Kind] = {
    Any: Anything(),
    object: Anything(),
    None: _NOTHING,
    type(None): _NOTHING,
    str: Text(),
    int: Whole(),
    float: Number(),
    bool: Plain("a bool", "bools", bool),
    bytes: Plain("bytes", "bytes", bytes),
    datetime: Time(),
    timedelta: Plain("a timedelta", "timedeltas", timedelta),
}
_ITEMS: dict[object, tuple[type, str]] = {
    Collection: (Collection, "a list, tuple or set"),
    Sequence: (Sequence, "a list or tuple"),
    Iterable: (Iterable, "an iterable"),
    AsyncIterable: (AsyncIterable, "an asynchronous iterable"),
}


@cache
def kind_of(hint: Any) -> Kind:
    """The Kind of an annotation."""
    if (plain := _PLAIN.get(hint)) is not None:
        return plain
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind_of_annotated(inside[0], inside[1:])
    if origin in (Union, types.UnionType):
        return _kind_of_union(inside)
    if origin is Literal:
        return OneOf(inside)
    if origin is Required:
        return kind_of(inside[0])
    if origin in _ITEMS:
        return Items(kind_of(inside[0]), *_ITEMS[origin])
    if origin is tuple:
        return _kind_of_tuple(inside)
    if origin is Mapping:
        return Map(kind_of(inside[0]), kind_of(inside[1]))
    if origin is Callable:
        return Function()
    return _kind_of_class(origin or hint)


def _kind_of_tuple(inside: tuple[Any, ...]) -> Kind:
    if inside[-1] is ...:
        return Items(kind_of(inside[0]), tuple, "a tuple")
    return FixedTuple([kind_of(each) for each in inside])


def _kind_of_class(kind: Any) -> Kind:
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        return Options({name: kind_of(hint) for name, hint in hints.items()})
    if issubclass(kind, Enum):
        return Choice(kind)
    if getattr(kind, "_is_protocol", False):
        return Anything()
    return Plain(with_article(kind), f"{kind.__name__}s", kind)


def _kind_of_annotated(hint: Any, notes: tuple[object, ...]) -> Kind:
    for note in notes:
        if note is VectorLike:
            return VectorOfNumbers()
        if note is Secret:
            return Hidden(kind_of(hint))
        if isinstance(note, Bounds):
            return Whole(note.low, note.high) if hint is int else Number(note.low, note.high)
    return kind_of(hint)


def _kind_of_union(hints: tuple[Any, ...]) -> Kind:
    origins = {get_origin(each) for each in hints}
    kinds: list[Kind] = []
    for each in hints:
        if get_origin(each) is ListLike:
            base, examples = _ITEMS[Iterable if Iterator in origins else Collection]
            kinds.append(Items(kind_of(get_args(each)[0]), base, examples))
        elif ListLike not in origins or get_origin(each) not in (AbstractSet, Iterator):
            kinds.append(kind_of(each))
    if any(isinstance(kind, Anything) for kind in kinds):
        return _PLAIN[Any]
    last = [kind for kind in kinds if kind is _NOTHING]
    return Either([*(kind for kind in kinds if kind is not _NOTHING), *last]) if kinds[1:] else kinds[0]
