"""Evaluates a search's filter on values, and a listing's conditions on namespaces."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from memstream.argument_types import show_value
from memstream.errors import InvalidArgument
from memstream.langgraph.naming import Namespace

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


class Condition(Protocol):
    """LangGraph's MatchCondition: a prefix or suffix path, in which "*" matches any label."""

    @property
    def match_type(self) -> Literal["prefix", "suffix"]: ...
    @property
    def path(self) -> Sequence[str]: ...


def check_filter(filter: object, path: str = "filter") -> None:
    """Raises InvalidArgument for an invalid filter: an unknown operator, or an operator with an invalid value.

    `$or`, `$and` and similar are not supported: in place of a key they would be taken for a key of the value.
    """
    if filter is None and path == "filter":
        return
    if not isinstance(filter, Mapping):
        raise InvalidArgument(path, f"must be a mapping of keys to values or operators, not {show_value(filter)}")
    operators = path != "filter" and any(str(key).startswith("$") for key in filter)
    for key, wanted in filter.items():
        place = f"{path}.{key}"
        if not isinstance(key, str):
            raise InvalidArgument(f"a key of {path}", f"must be a string, not {show_value(key)}")
        if operators:
            _check_operator(place, key, wanted)
        elif key.startswith("$"):
            raise InvalidArgument(place, f"there is no operator {key!r} here: a filter has keys, and all must match")
        elif isinstance(wanted, Mapping):
            check_filter(wanted, place)


def _check_operator(place: str, name: str, wanted: object) -> None:
    if name not in ("$eq", "$ne", *_ORDERS):
        raise InvalidArgument(place, f"there is no operator {name!r}: use one of $eq, $ne, {', '.join(_ORDERS)}")
    if name in _ORDERS and not (_is_number(wanted) or isinstance(wanted, str)):
        raise InvalidArgument(place, f"must be a number or a string to be compared with, not {show_value(wanted)}")


def passes_filter(value: Mapping[str, Any], filter: Mapping[str, Any] | None) -> bool:
    """Whether a value matches every key of a checked filter."""
    return all(_meets_filter(value.get(key), wanted) for key, wanted in (filter or {}).items())


def _meets_filter(value: object, wanted: object) -> bool:
    if isinstance(wanted, Mapping):
        if any(str(key).startswith("$") for key in wanted):
            return all(_compares(value, name, other) for name, other in wanted.items())
        return isinstance(value, Mapping) and all(_meets_filter(value.get(key), each) for key, each in wanted.items())
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(_meets_filter(*pair) for pair in zip(value, wanted, strict=True))
        )
    return _equal(value, wanted)


def _compares(value: object, name: str, other: object) -> bool:
    if name == "$eq":
        return _equal(value, other)
    if name == "$ne":
        return not _equal(value, other)
    comparable = (_is_number(value) and _is_number(other)) or (isinstance(value, str) and isinstance(other, str))
    return comparable and _ORDERS[name](value, other)


def _equal(value: object, other: object) -> bool:
    # As in JSON: true is not a number.
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def meets_conditions(namespace: Namespace, conditions: Iterable[Condition] | None) -> bool:
    """Whether a namespace matches all conditions. Raises InvalidArgument for an unknown match_type."""
    return all(_meets_condition(namespace, each) for each in conditions or ())


def _meets_condition(namespace: Namespace, condition: Condition) -> bool:
    path, count = condition.path, len(condition.path)
    if condition.match_type not in ("prefix", "suffix"):
        raise InvalidArgument("match_type", f"must be 'prefix' or 'suffix', not {show_value(condition.match_type)}")
    if len(namespace) < count:
        return False
    part = namespace[:count] if condition.match_type == "prefix" else namespace[len(namespace) - count :]
    return all(wanted in ("*", label) for wanted, label in zip(path, part, strict=True))
