"""Parses a line of input: plain text, or a JSON object with the fields of an observation."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from memstream.codec import observation_to_wire
from memstream.errors import MemstreamError
from memstream.times import read_time, read_zone
from memstream.values import MetadataValue, Observation, Role, Structured


class Format(StrEnum):
    """Formats of input. AUTO: JSONL if the first non-blank line is a JSON object, else lines.

    AUTO rejects a document that begins like JSON but has not one object per line: an array, or an object over lines.
    """

    AUTO = "auto"
    LINES = "lines"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True)
class MalformedLine:
    """Why a line cannot be sent."""

    problem: str


_DOCUMENT = re.compile(r'\[\s*(\{.*)?|\{\s*("[^"]*"\s*(:.*)?)?', re.DOTALL)
"""The first line of an array of objects, or of an object over several lines."""
_DOCUMENT_PROBLEM = (
    "begins a JSON document, but the input needs one JSON object per line: convert it, for example with "
    "jq -c '.[]', or pass --format lines to send each line as text"
)
_CONVERT = 'convert it to JSON Lines ({"text": ..., "speaker": ..., "time": ...}), or pass --format lines'
_COLUMNS = "text|content|message|body|speaker|author|timestamp|time|date"
_FOREIGN = tuple(
    (re.compile(pattern, re.IGNORECASE), problem)
    for pattern, problem in (
        (
            r"\u200e?\[?\d{1,4}[./-]\d{1,2}[./-]\d{2,4},? \d{1,2}[:.]\d\d([:.]\d\d)?(\s[ap]\.?m\.?)?(\]| [-\u2013]) \S",
            "begins a WhatsApp export: use memstream import, or pass --format lines",
        ),
        (
            rf'(?=.*[,;\t])(?=(.*[,;\t])?"?({_COLUMNS})"?([,;\t]|$))("?\w+"?[,;\t])+"?\w+"?$',
            f"begins a table (CSV), whose columns would become one text: {_CONVERT}",
        ),
        (r"<(!doctype|html|\?xml)\b", f"begins HTML or XML: {_CONVERT}"),
        (r"WEBVTT\b", f"begins subtitles, whose times would be lost: {_CONVERT}"),
        (r"From \S+@\S+ .*\d{4}$", f"begins a mailbox (mbox): {_CONVERT}"),
        (r"%PDF-\d", "begins a PDF file: extract its text first"),
        (r"PK\x03\x04", "begins a ZIP archive: memstream import reads those of chats; otherwise unpack it first"),
        (r"SQLite format 3\x00", "begins a SQLite database: memstream import reads those of LangGraph and Chroma"),
        (r'\{"type": ?"export"', "begins an export of memstream: use memstream import"),
    )
)
"""First lines of files that hold something else than observations, and what to do."""


class RecordReader:
    """Parses the lines of one file into observations, in order."""

    def __init__(self, form: Format, time_zone: str = "") -> None:
        """`time_zone`: of dates, and of times without one, in records that name none."""
        self._form = form
        self._zone = time_zone
        self._first = True
        self._foreign = ""

    def read_line(self, line: bytes) -> Observation | MalformedLine | None:
        """Parses a line; None for a blank one."""
        if self._first:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        if not line.strip():
            return None
        self._first = False
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            packed = line.startswith(b"\x1f\x8b")
            return MalformedLine(
                "begins a gzip file: unpack it first" if packed else f"is not UTF-8 at byte {error.start + 1}"
            )
        if self._form is Format.AUTO:
            self._form, self._foreign = _recognize_form(text)
        if self._foreign:
            return MalformedLine(self._foreign)
        return Observation(text) if self._form is Format.LINES else parse_record(text, self._zone)


def _recognize_form(text: str) -> tuple[Format, str]:
    """The form of an input with this first line, and why it is no input."""
    for pattern, problem in _FOREIGN:
        if pattern.match(text):
            return Format.LINES, problem
    start = text.strip()
    if _is_object(start):
        return Format.JSONL, ""
    return Format.LINES, _DOCUMENT_PROBLEM if _DOCUMENT.fullmatch(start) else ""


def _is_object(text: str) -> bool:
    if not text.startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class _DuplicateKey(ValueError):
    """A duplicate key of an object, of which json would keep the last."""


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _DuplicateKey(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def parse_record(text: str, time_zone: str = "") -> Observation | MalformedLine:
    """Parses a JSON object; its keys are one of BODIES, any of FIELDS, and ZONE, which replaces `time_zone`."""
    try:
        value = json.loads(text, object_pairs_hook=_reject_duplicates)
    except _DuplicateKey as error:
        return MalformedLine(str(error))
    except (ValueError, RecursionError) as error:
        return MalformedLine(f"is not JSON: {error}")
    if not isinstance(value, dict):
        return MalformedLine(f"is {_describe_type(value)}, not a JSON object")
    try:
        parsed = _parse_fields(value, time_zone)  # before the body, to report a misspelt "text"
        observation = Observation(_parse_body(value), **parsed)
        observation_to_wire(observation)  # reject it before it gets a number
    except (MemstreamError, ValueError) as error:
        return MalformedLine(str(error))
    return observation


def _parse_body(value: Mapping[str, Any]) -> str | Structured:
    given = [key for key in BODIES if value.get(key) is not None]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(BODIES)}; has {' and '.join(given) or 'none'}")
    body = value[given[0]]
    if given[0] != "structured":
        return _parse_text(given[0], body)
    parts = {field.name for field in fields(Structured)}
    if not isinstance(body, dict) or not body.keys() <= parts:
        raise ValueError(f"structured must be an object of {', '.join(sorted(parts))}")
    return Structured(**{name: _parse_text(f"structured.{name}", part) for name, part in body.items()})


def _parse_fields(value: Mapping[str, Any], time_zone: str) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    zone = time_zone if value.get(ZONE) is None else _parse_text(ZONE, value[ZONE])
    read_zone(zone)
    for key, item in value.items():
        if key in BODIES or key == ZONE:
            continue
        if item is None:
            if key in _NEVER_NULL:
                raise ValueError(f"{key} is null: leave it out for now, the moment at which the server receives it")
            continue
        if key not in FIELDS:
            known = ", ".join([*BODIES, *FIELDS, ZONE])
            raise ValueError(
                f"{key!r} is not a field of an observation (those are {known}); put other values into metadata"
            )
        name, read = FIELDS[key]
        if name in parsed:
            raise ValueError(f"{name} is given twice")
        parsed[name] = _parse_time(key, item, zone) if read is _parse_time else read(key, item)
    return parsed


def _describe_type(value: object) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _parse_text(key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, is {_describe_type(value)}")
    return value


def _parse_role(key: str, value: object) -> Role:
    try:
        return Role(_parse_text(key, value))
    except ValueError as error:
        raise ValueError(f"{key} must be user, assistant, tool or system, is {value!r}") from error


def _parse_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number, is {_describe_type(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{key}: {error}") from error


def _parse_integer(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key} must be a whole number, is {_describe_type(value)}")
    return value


def _parse_time(key: str, value: object, time_zone: str = "") -> datetime:
    given = value if isinstance(value, str) else _parse_number(key, value)
    try:
        # A date that ends a validity includes its day.
        return read_time(given, time_zone, until=key == "valid_until")
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _parse_duration(key: str, value: object) -> timedelta:
    try:
        return timedelta(seconds=_parse_number(key, value))
    except OverflowError as error:
        raise ValueError(f"{key}: {error}") from error


def _parse_metadata(key: str, value: object) -> dict[str, MetadataValue]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, is {_describe_type(value)}")
    return value


def _parse_vector(key: str, value: object) -> list[float]:
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list of numbers, is {_describe_type(value)}")
    return [_parse_number(key, item) for item in value]


def _parse_keys(key: str, value: object) -> list[str]:
    if isinstance(value, list):
        return [_parse_text(f"{key}[{number}]", each) for number, each in enumerate(value, 1)]
    return [_parse_text(key, value)]


ZONE = "time_zone"
"""Key of the zone of a record's dates, and of its times without one."""
BODIES = ("text", "content", "structured")
"""Keys of the content; a record has exactly one."""
FIELDS: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "speaker": ("speaker", _parse_text),
    "role": ("role", _parse_role),
    "session": ("session", _parse_text),
    "time": ("observe_time", _parse_time),
    "observe_time": ("observe_time", _parse_time),
    "importance": ("importance", _parse_number),
    "metadata": ("metadata", _parse_metadata),
    "external_id": ("external_id", _parse_text),
    "embedding": ("embedding", _parse_vector),
    "expire_time": ("expire_time", _parse_time),
    "ttl": ("ttl", _parse_duration),
    "token_count": ("token_count", _parse_integer),
    "supersedes": ("supersedes", _parse_keys),
    "valid_from": ("valid_from", _parse_time),
    "valid_until": ("valid_until", _parse_time),
}
"""Other keys of a record: the observation's field and the parser of its value. null means absent."""
_NEVER_NULL = ("time", "observe_time")
"""A time that is not known would become the present."""
