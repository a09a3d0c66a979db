"""Checks of request fields: each finding is a violation with a dotted path; all are raised together as one
InvalidField."""

from __future__ import annotations

import re

from memstream_server.core.printable import number_text
from memstream_server.engine.errors import FieldViolation, InvalidField
from memstream_server.rpc.errors import violation_text
from memstream_server.rpc.limits import RequestLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9\-_.~]*")
_FRAGMENT_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
PAGE_SIZE_DEFAULT = 100
VIOLATIONS_MAX = 64
"""Violations of one request that are kept; a response lists fewer."""


class Violations:
    """Collects the violations of one request; `check` raises them."""

    __slots__ = ("_prefix", "found")

    def __init__(self, prefix: str = "", found: list[FieldViolation] | None = None) -> None:
        self._prefix = prefix
        self.found = [] if found is None else found

    def within(self, prefix: str) -> Violations:
        """Collects for the same request, with the fields of a message in it: `writes[0].`."""
        return Violations(self._prefix + prefix, self.found)

    def add(self, field: str, description: str) -> None:
        if len(self.found) < VIOLATIONS_MAX:
            self.found.append(FieldViolation(self._prefix + field, description))

    def check(self) -> None:
        """Raises InvalidField if there are violations."""
        if self.found:
            raise InvalidField(violation_text(self.found), violations=tuple(self.found))


def invalid_field(field: str, description: str) -> InvalidField:
    """The error for one field."""
    violation = FieldViolation(field, description)
    return InvalidField(violation_text([violation]), violations=(violation,))


def quote_text(value: str) -> str:
    """A client's text as an error may repeat it: quoted and short."""
    return ascii(value if len(value) <= 40 else value[:40] + "...")


def check_name(found: Violations, field: str, value: str, limits: RequestLimits) -> str:
    """Validates the name of a namespace or memory."""
    if not value:
        found.add(field, "is required")
    elif len(value) > limits.name_bytes_max:
        found.add(field, f"has {len(value)} characters, at most {limits.name_bytes_max} are allowed")
    elif not _NAME.fullmatch(value):
        place = next((n for n, one in enumerate(value) if not _NAME.fullmatch(f"a{one}")), 0)
        allowed = 'letters, digits, "-", "_", "." and "~" are allowed, beginning with a letter or a digit'
        found.add(field, f"is {quote_text(value)}, with {_describe_character(value, place)}: {allowed}")
    return value


def _describe_character(text: str, place: int) -> str:
    return f"{text[place]!a} (U+{ord(text[place]):04X}) as character {place + 1}"


def memory_name(
    found: Violations, namespace: str, memory: str, limits: RequestLimits, prefix: str = ""
) -> tuple[str, str]:
    """Validates (namespace, name) of the memory in the fields `namespace` and `memory`."""
    return check_name(found, f"{prefix}namespace", namespace, limits), check_name(
        found, f"{prefix}memory", memory, limits
    )


def check_identifier(found: Violations, field: str, value: str, limits: RequestLimits, required: bool = False) -> str:
    """Validates a producer, session, speaker, key or request id: any text without control characters."""
    if not value:
        if required:
            found.add(field, "is required")
        return value
    size = len(value) if value.isascii() else len(value.encode())
    if size > limits.name_bytes_max:
        found.add(field, f"has {size} bytes, at most {limits.name_bytes_max} are allowed")
    elif control := _CONTROL.search(value):
        character = _describe_character(value, control.start())
        found.add(field, f"is {quote_text(value)}, with {character}: control characters are not allowed")
    return value


def fragment_id(found: Violations, field: str, value: str) -> str:
    """Validates a fragment's id."""
    if not _FRAGMENT_ID.fullmatch(value):
        found.add(
            field, f"is {quote_text(value)}: an id has 26 characters of Crockford base 32 (0-9, A-Z without I L O U)"
        )
    return value


def check_bounds(found: Violations, field: str, value: float, low: float, high: float) -> float:
    """Validates a number between two inclusive bounds."""
    if not low <= value <= high:  # also true for NaN
        bounds = f"{number_text(low)} and {number_text(high)}"
        found.add(field, f"must be between {bounds}, is {number_text(value)}")
    return value


def read_etag(found: Violations, etag: str, chars_max: int) -> int:
    """The version that an etag is, at most `chars_max` digits."""
    if not (etag.isascii() and etag.isdigit() and len(etag) <= chars_max):
        found.add("etag", "is not one that the server gave")
        return 0
    return int(etag)


def not_negative(found: Violations, field: str, value: int) -> int:
    """Validates a count or a revision."""
    if value < 0:
        found.add(field, f"must not be negative, is {value}")
    return value


def page_size(found: Violations, value: int, limits: RequestLimits) -> int:
    """The size of a page: 0 means the default; larger values are lowered to the maximum."""
    not_negative(found, "page_size", value)
    return min(value or PAGE_SIZE_DEFAULT, limits.page_size_max)
