"""Reads filters of fragments, from messages and from their text.

The text of a filter becomes the message that says the same, and is read like one: it can say no more, and its bounds
are those of messages. docs/filters.md has the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message
from msgspec import UNSET

from memstream.v1 import fragment_pb2
from memstream_server.core.filters import Filter
from memstream_server.core.metadata import Condition, read_time_us
from memstream_server.core.values import METADATA_DEPTH_MAX, MetadataValue
from memstream_server.rpc import validation as check
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations, quote_text
from memstream_server.rpc.wire import scalars
from memstream_server.rpc.wire.fragments import KINDS, TIERS

_LISTS = ("sessions", "speakers", "kinds", "metadata", "exclude_ids", "tiers", "external_id_prefixes")
_CONDITIONS_MAX = 1_000
"""Maximum number of entries in one list of a filter."""
_FILTERS_MAX = 32
"""Maximum number of filters in a list of a filter,"""
_FILTERS_INSIDE_MAX = 8
"""how deep they may be inside of one another,"""
_FILTERS_IN_ALL_MAX = 256
"""and how many they are with all that is inside."""
_SEARCHES_MAX = 16
"""Tests of metadata in a whole filter that read every value under their key: all but equality at the top."""
_EXPRESSION_BYTES_MAX = 4_096
_DIGITS_OF_INT64 = 19
_BOUNDS = ("at_least", "above", "at_most", "below")
_Filter = fragment_pb2.FragmentFilter
_Condition = fragment_pb2.MetadataCondition


def read_filter(found: Violations, message: _Filter, limits: RequestLimits, field: str) -> Filter:
    """The selected fragments; an empty message selects all."""
    return _Reader(found, limits).read(message, field, 0)


@dataclass(slots=True)
class _Reader:
    """Reads one filter with all that is inside."""

    found: Violations
    limits: RequestLimits
    filters: int = 0
    searches: int = 0

    def read(self, message: _Filter, field: str, depth: int) -> Filter:
        """depth: number of filters that it is inside of."""
        found = self.found
        self.filters += 1
        if self.filters > _FILTERS_IN_ALL_MAX:
            if self.filters == _FILTERS_IN_ALL_MAX + 1:
                found.add(field, f"is one filter more than the {_FILTERS_IN_ALL_MAX} that a filter may have inside")
            return Filter()
        for name in _LISTS:
            if len(getattr(message, name)) > _CONDITIONS_MAX:
                found.add(f"{field}.{name}", f"has more than {_CONDITIONS_MAX} entries")
                return Filter()
        for number, each in enumerate(message.exclude_ids):
            check.fragment_id(found, f"{field}.exclude_ids[{number}]", each)
        chosen = Filter(
            sessions=self._read_names(f"{field}.sessions", message.sessions),
            speakers=self._read_names(f"{field}.speakers", message.speakers),
            kinds=KINDS.read_all(found, f"{field}.kinds", message.kinds),
            tiers=TIERS.read_all(found, f"{field}.tiers", message.tiers),
            observe_from_us=_read_time(found, message, field, "observe_time_min"),
            observe_until_us=_read_time(found, message, field, "observe_time_max"),
            create_from_us=_read_time(found, message, field, "create_time_min"),
            create_until_us=_read_time(found, message, field, "create_time_max"),
            importance_min=_read_importance(found, message, field, "importance_min"),
            importance_max=_read_importance(found, message, field, "importance_max"),
            external_id_prefixes=self._read_names(f"{field}.external_id_prefixes", message.external_id_prefixes),
            metadata=tuple(
                [self._read_condition(each, f"{field}.metadata[{at}]") for at, each in enumerate(message.metadata)]
            ),
            excluded=tuple(message.exclude_ids),
            all_of=self._read_all(message.all_of, f"{field}.all_of", depth),
            any_of=self._read_all(message.any_of, f"{field}.any_of", depth),
            none_of=self._read_all(message.none_of, f"{field}.none_of", depth),
        )
        _check_order(found, f"{field}.observe_time_max", chosen.observe_from_us, chosen.observe_until_us)
        _check_order(found, f"{field}.create_time_max", chosen.create_from_us, chosen.create_until_us)
        _check_order(found, f"{field}.importance_max", chosen.importance_min, chosen.importance_max)
        if message.expression:
            said = self._read_all(
                [self._parse(message.expression, f"{field}.expression")], f"{field}.expression", depth
            )
            chosen = replace(chosen, all_of=(*chosen.all_of, *said))
        return chosen

    def _parse(self, text: str, field: str) -> _Filter:
        if len(text.encode()) > _EXPRESSION_BYTES_MAX:
            self.found.add(field, f"has more than {_EXPRESSION_BYTES_MAX} bytes")
            return _Filter()
        try:
            return _Text(text).read()
        except _Unreadable as error:
            self.found.add(field, str(error))
            return _Filter()

    def _read_all(self, messages: Sequence[_Filter], field: str, depth: int) -> tuple[Filter, ...]:
        if not messages:
            return ()
        if depth == _FILTERS_INSIDE_MAX:
            self.found.add(field, f"is inside of {depth} filters, more are not allowed")
            return ()
        if len(messages) > _FILTERS_MAX:
            self.found.add(field, f"has more than {_FILTERS_MAX} entries")
            return ()
        return tuple([self.read(each, f"{field}[{number}]", depth + 1) for number, each in enumerate(messages)])

    def _read_names(self, field: str, values: Iterable[str]) -> tuple[str, ...]:
        names = tuple(values)
        for number, each in enumerate(names):
            check.check_identifier(self.found, f"{field}[{number}]", each, self.limits)
        return names

    def _read_condition(self, message: _Condition, field: str) -> Condition:
        found = self.found
        for name, key in (("key", message.key), *((f"path[{at}]", each) for at, each in enumerate(message.path))):
            scalars.metadata_key(found, f"{field}.{name}", key)
        if len(message.path) >= METADATA_DEPTH_MAX:
            found.add(f"{field}.path", f"has {METADATA_DEPTH_MAX} names or more: nothing is nested that deeply")
        read = [scalars.metadata_value(found, f"{field}.values[{at}]", each) for at, each in enumerate(message.values)]
        condition = Condition(
            key=message.key,
            values=tuple([value for value in read if value is not UNSET]),
            path=tuple(message.path),
            time_from_us=_read_time(found, message, field, "time_min"),
            time_until_us=_read_time(found, message, field, "time_max"),
            prefix=message.prefix if message.HasField("prefix") else None,
            exists=message.exists if message.HasField("exists") else None,
            any=message.any,
            **{name: self._read_bound(message, field, name) for name in _BOUNDS if _has_field(message, name)},
        )
        self._check_tests(message, condition, field)
        return condition

    def _read_bound(self, message: _Condition, field: str, name: str) -> str | int | float | None:
        value = scalars.metadata_value(self.found, f"{field}.{name}", getattr(message, name))
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return value
        if value is not UNSET:
            self.found.add(f"{field}.{name}", "must be a number or a text")
        return None

    def _check_tests(self, message: _Condition, condition: Condition, field: str) -> None:
        tests = replace(condition, key="", path=(), exists=None, any=False)
        if tests == Condition("") and not message.values and condition.exists is None:
            self.found.add(f"{field}.values", "needs at least one value, or another test")
        if condition.exists is False and (tests != Condition("") or condition.any):
            self.found.add(f"{field}.exists", "is false beside other tests: what does not exist passes none")
        _check_order(self.found, f"{field}.time_max", condition.time_from_us, condition.time_until_us)
        if (
            condition.path
            or condition.any
            or replace(tests, values=()) != Condition("")
            or condition.exists is not None
        ):
            self.searches += 1
            if self.searches == _SEARCHES_MAX + 1:
                self.found.add(field, f"is one more than the {_SEARCHES_MAX} tests other than equality of a filter")


def _read_time(found: Violations, message: Message, field: str, name: str) -> int | None:
    return scalars.time_us(found, f"{field}.{name}", getattr(message, name)) if _has_field(message, name) else None


def _read_importance(found: Violations, message: _Filter, field: str, name: str) -> float | None:
    return (
        check.check_bounds(found, f"{field}.{name}", getattr(message, name), 0, 1)
        if _has_field(message, name)
        else None
    )


def _check_order(found: Violations, field: str, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low > high:
        found.add(field, "is below the lower bound")


def _has_field(message: Message, name: str) -> bool:
    return message.HasField(name)  # the stub accepts only literals


# ---- text
class _Unreadable(Exception):
    """The text is no filter; the message says why, and where."""


_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\w.])'
    r"|(?P<sign>\^=|!=|<=|>=|[=<>(),.])|(?P<name>\w+)|(?P<end>$))"
)
_WORDS = {"and", "or", "not", "in", "exists", "any", "true", "false", "null"}
_SIGNS = ("=", "!=", "<", "<=", ">", ">=", "^=")
_CONSTANTS: dict[str, MetadataValue] = {"true": True, "false": False, "null": None}
_TEXT_FIELDS = {"speaker": "speakers", "session": "sessions", "kind": "kinds", "tier": "tiers", "id": "exclude_ids"}
_KINDS = {kind.value: KINDS.numbers[kind] for kind in KINDS.numbers if kind is not None}
_TIERS = {tier.value: TIERS.numbers[tier] for tier in TIERS.numbers if tier is not None}


class _Text:
    """A filter as text: or, and, not, parentheses, and tests of a field."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        at = 0
        while at <= len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise _Unreadable(f"cannot be read at character {at + 1}: {quote_text(text[at : at + 20])}")
            self._tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup) + 1))
            if match.lastgroup == "end":
                break
            at = match.end()
        self._at = 0
        self._depth = 0

    def read(self) -> _Filter:
        """Raises _Unreadable."""
        chosen = self._read_or()
        if self._tokens[self._at][0] != "end":
            raise self._error("the end, and or or")
        return chosen

    def _error(self, wanted: str) -> _Unreadable:
        kind, token, at = self._tokens[self._at]
        return _Unreadable(f"has {'its end' if kind == 'end' else quote_text(token)} at character {at}, not {wanted}")

    def _takes(self, token: str) -> bool:
        kind, text, _ = self._tokens[self._at]
        if kind == "text" or text.lower() != token:
            return False
        self._at += 1
        return True

    def _want(self, token: str) -> None:
        if not self._takes(token):
            raise self._error(quote_text(token))

    def _read_or(self) -> _Filter:
        each = self._read_list("or", self._read_and)
        return each[0] if len(each) == 1 else _Filter(any_of=each)

    def _read_and(self) -> _Filter:
        each = self._read_list("and", self._read_not)
        return each[0] if len(each) == 1 else _Filter(all_of=each)

    def _read_list(self, joined_by: str, read: Callable[[], _Filter]) -> list[_Filter]:
        found = [read()]
        while self._takes(joined_by):
            found.append(read())
        return found

    def _read_not(self) -> _Filter:
        if self._takes("not"):
            return _Filter(none_of=[self._read_inside(self._read_not)])
        if self._takes("("):
            chosen = self._read_inside(self._read_or)
            self._want(")")
            return chosen
        return self._read_test()

    def _read_inside(self, read: Callable[[], _Filter]) -> _Filter:
        self._depth += 1
        if self._depth > 4 * _FILTERS_INSIDE_MAX:
            raise _Unreadable("has too many parentheses inside of one another")
        chosen = read()
        self._depth -= 1
        return chosen

    def _read_test(self) -> _Filter:
        if self._takes("exists"):
            condition = self._read_path()
            condition.exists = True
            return _Filter(metadata=[condition])
        if self._takes("any"):
            condition = self._read_path()
            condition.any = True
            return self._read_metadata(condition)
        kind, name, _ = self._tokens[self._at]
        if kind == "name" and name.lower() == "metadata":
            return self._read_metadata(self._read_path())
        if kind != "name" or name.lower() in _WORDS:
            raise self._error("a field")
        self._at += 1
        name = name.lower()
        if name in _TEXT_FIELDS:
            return self._read_text_field(name)
        readers: dict[str, Callable[[], _Filter]] = {
            "importance": self._read_importance,
            "external_id": self._read_external_id,
            "observe_time": lambda: self._read_time("observe_time"),
            "create_time": lambda: self._read_time("create_time"),
        }
        if name not in readers:
            self._at -= 1
            fields = ", ".join((*_TEXT_FIELDS, *readers, "metadata.KEY"))
            raise self._error(f"a field: those are {fields}")
        return readers[name]()

    def _read_path(self) -> _Condition:
        self._want("metadata")
        names: list[str] = []
        while self._takes("."):
            kind, text, _ = self._tokens[self._at]
            if kind not in ("name", "text", "number"):
                raise self._error("a key")
            self._at += 1
            names.append(_unquote(text) if kind == "text" else text)
        if not names:
            raise self._error("a dot and a key")
        return _Condition(key=names[0], path=names[1:])

    def _read_sign(self, *signs: str) -> str:
        sign = next((each for each in (*signs, "in") if self._takes(each)), None)
        if sign is None:
            raise self._error(f"one of {', '.join((*signs, 'in'))}")
        return sign

    def _read_value(self) -> MetadataValue:
        kind, text, _ = self._tokens[self._at]
        if kind == "text":
            value: MetadataValue = _unquote(text)
        elif kind == "number":
            whole = text.lstrip("-").isdigit() and len(text) < _DIGITS_OF_INT64
            value = int(text) if whole else float(text)
        elif text.lower() in _CONSTANTS:
            value = _CONSTANTS[text.lower()]
        else:
            raise self._error('a value: "text", a number, true, false or null')
        self._at += 1
        return value

    def _read_values(self, sign: str) -> list[MetadataValue]:
        """One, or those in parentheses after `in`."""
        if sign != "in":
            return [self._read_value()]
        self._want("(")
        values = [self._read_value()]
        while self._takes(","):
            values.append(self._read_value())
        self._want(")")
        return values

    def _read_texts(self, sign: str) -> list[str]:
        at = self._at
        values = self._read_values(sign)
        if not all(isinstance(each, str) for each in values):
            self._at = at
            raise self._error("a text in quotes")
        return [str(each) for each in values]

    def _read_metadata(self, condition: _Condition) -> _Filter:
        sign = self._read_sign(*_SIGNS)
        if sign == "^=":
            condition.prefix = self._read_texts(sign)[0]
        elif sign in ("=", "!=", "in"):
            for value in self._read_values(sign):
                scalars.write_value(condition.values.add(), value)
        else:
            name = {"<": "below", "<=": "at_most", ">": "above", ">=": "at_least"}[sign]
            if self._takes("time"):
                self._want("(")
                self._set_time(condition, "time", sign)
                self._want(")")
            else:
                scalars.write_value(getattr(condition, name), self._read_value())
        chosen = _Filter(metadata=[condition])
        return _Filter(none_of=[chosen]) if sign == "!=" else chosen

    def _read_text_field(self, name: str) -> _Filter:
        sign = self._read_sign("=", "!=")
        values: list[str] = self._read_texts(sign)
        known = {"kind": _KINDS, "tier": _TIERS}.get(name)
        if known is not None and not all(each in known for each in values):
            self._at -= 1
            raise self._error(f"one of {', '.join(known)}")
        given = [known[each] for each in values] if known is not None else values
        chosen = _Filter(**{_TEXT_FIELDS[name]: given})  # type: ignore[arg-type]  # the field's own list
        return _Filter(none_of=[chosen]) if (sign == "!=") != (name == "id") else chosen

    def _read_external_id(self) -> _Filter:
        self._want("^=")
        return _Filter(external_id_prefixes=self._read_texts("^="))

    def _read_importance(self) -> _Filter:
        sign, at = self._read_sign("<=", ">="), self._at
        value = self._read_value()
        if sign == "in" or isinstance(value, bool) or not isinstance(value, int | float):
            self._at = at
            raise self._error("a number from 0 to 1 after <= or >=")
        return _Filter(importance_min=value) if sign == ">=" else _Filter(importance_max=value)

    def _read_time(self, name: str) -> _Filter:
        chosen = _Filter()
        self._set_time(chosen, name, self._read_sign("<", ">="))
        return chosen

    def _set_time(self, message: _Filter | _Condition, name: str, sign: str) -> None:
        at = self._at
        time_us = read_time_us(self._read_texts(sign)[0]) if sign in ("<", ">=") else None
        if time_us is None:
            self._at = at
            raise self._error('a time such as "2026-05-08T12:00:00Z" after < or >=')
        scalars.write_time(getattr(message, f"{name}_{'min' if sign == '>=' else 'max'}"), time_us)


def _unquote(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise _Unreadable(f"has a text with an escape that is none: {quote_text(text)}") from error
