"""Converts enums, times, durations, vectors and metadata."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from datetime import UTC, tzinfo
from enum import StrEnum
from typing import Any, Generic, TypeVar
from zoneinfo import ZoneInfo

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import NULL_VALUE
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec import UNSET, UnsetType

from memstream.v1 import fragment_pb2
from memstream_server.core.values import METADATA_DEPTH_MAX, Metadata, MetadataValue, Vector
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import Violations, quote_text

E = TypeVar("E", bound=StrEnum)

_SECONDS_MIN, _SECONDS_MAX = -62_135_596_800, 253_402_300_799
"""Years 1 to 9999, the range of google.protobuf.Timestamp."""
DURATION_MAX_S = 3_153_600_000
"""A hundred years."""
METADATA_KEY_BYTES_MAX = 128
_ZONE_CHARACTERS_MAX = 64


class Enums(Generic[E]):
    """One enum of the domain and its twin `wire` in the contract, whose values are PREFIX_NAME; 0 is UNSPECIFIED.

    `wire` is an EnumTypeWrapper; the generated stubs give each one a type of its own.
    """

    def __init__(self, wire: Any, domain: type[E]) -> None:
        self.wire = wire
        prefix = wire.keys()[0].removesuffix("UNSPECIFIED")
        numbers = dict(wire.items())
        pairs = [(numbers[prefix + each.name], each) for each in domain if prefix + each.name in numbers]
        self._from: dict[int, E] = dict(pairs)
        self.numbers: dict[E | None, Any] = {None: 0} | {each: number for number, each in pairs}
        """The contract's numbers, typed Any for the generated constructors; 0 for None."""

    def read_value(self, found: Violations, field: str, value: int, default: E) -> E:
        """The domain's value; `default` for UNSPECIFIED."""
        if value == 0:
            return default
        if value not in self._from:
            found.add(field, self._refuse(value))
        return self._from.get(value, default)

    def read_all(self, found: Violations, field: str, values: Iterable[int]) -> tuple[E, ...]:
        """The domain's values; empty if UNSPECIFIED, which means any, is among them."""
        given = list(values)
        unknown = [each for each in given if each and each not in self._from]
        for each in unknown[:3]:
            found.add(field, self._refuse(each))
        return () if 0 in given else tuple(self._from[each] for each in given if each in self._from)

    def _refuse(self, value: int) -> str:
        known = ", ".join(f"{number} {each.name}" for number, each in self._from.items())
        return f"has no value {value} (of {known})"

    def __contains__(self, value: E) -> bool:
        return value in self.numbers


def time_us(found: Violations, field: str, value: Timestamp) -> int:
    """Microseconds since the epoch."""
    if not (_SECONDS_MIN <= value.seconds <= _SECONDS_MAX and 0 <= value.nanos < 1_000_000_000):
        found.add(field, "must be a time in the years 1 to 9999")
        return 0
    return value.seconds * 1_000_000 + value.nanos // 1_000


def read_zone(found: Violations, field: str, name: str) -> tzinfo:
    """A time zone by its IANA name; UTC if empty."""
    if not name:
        return UTC
    try:
        if len(name) > _ZONE_CHARACTERS_MAX:
            raise ValueError(name)
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # unknown; no name at all; a directory of the database
        found.add(field, f"is {quote_text(name)}: the IANA database has no such time zone; one is 'Europe/Berlin'")
        return UTC


def timestamp_message(value_us: int) -> Timestamp:
    """A Timestamp."""
    message = Timestamp()
    write_time(message, value_us)
    return message


def write_time(message: Timestamp, value_us: int) -> None:
    """Writes a time into a field; this takes half the time of building a message and copying it."""
    message.seconds, micros = divmod(value_us, 1_000_000)
    message.nanos = micros * 1_000


def duration_us(found: Violations, field: str, value: Duration) -> int:
    """Microseconds of a positive duration of at most a hundred years."""
    length_us = value.seconds * 1_000_000 + value.nanos // 1_000
    if abs(value.nanos) >= 1_000_000_000 or not 0 < length_us <= DURATION_MAX_S * 1_000_000:
        found.add(field, f"must be a duration above 0 and up to {DURATION_MAX_S:,} seconds")
    return length_us


def duration_message(value_s: float) -> Duration:
    """A Duration."""
    micros = round(value_s * 1_000_000)
    return Duration(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1_000)


def read_vector(found: Violations, field: str, values: Any, dimension: int) -> Vector | None:
    """A `repeated float` as an array of unit length; None when it is empty or invalid."""
    if not values:
        return None
    if len(values) != dimension:
        found.add(field, f"has {len(values)} numbers, the server's model has {dimension}")
        return None
    numbers: Vector = np.array(values, np.float32)
    if not np.isfinite(numbers).all():
        found.add(field, "has a number that is not finite")
        return None
    wide = numbers.astype(np.float64)  # squares of large float32 numbers overflow
    largest = float(np.abs(wide).max())
    if largest == 0.0:
        found.add(field, "is zero: it has no direction")
        return None
    wide /= largest
    unit: Vector = (wide / np.linalg.norm(wide)).astype(np.float32)
    return unit


def metadata_value(
    found: Violations, field: str, value: fragment_pb2.MetadataValue, depth: int = 1
) -> MetadataValue | UnsetType:
    """The value that is set; UNSET if none is, or if it is nested too deeply or no finite number."""
    kind = value.WhichOneof("kind")
    if kind is None:
        found.add(field, "has no value")
        return UNSET
    if kind in ("list_value", "map_value"):
        return _read_nested(found, field, value, depth)
    if kind == "null_value":
        return None
    held: MetadataValue = getattr(value, kind)
    if isinstance(held, float) and not math.isfinite(held):
        found.add(field, "must be a finite number")
        return UNSET
    return held


def _read_nested(
    found: Violations, field: str, value: fragment_pb2.MetadataValue, depth: int
) -> MetadataValue | UnsetType:
    if depth > METADATA_DEPTH_MAX:
        found.add(field, f"is nested more than {METADATA_DEPTH_MAX} deep")
        return UNSET
    if value.WhichOneof("kind") == "list_value":
        return [
            held
            for number, each in enumerate(value.list_value.values)
            if (held := metadata_value(found, f"{field}[{number}]", each, depth + 1)) is not UNSET
        ]
    entries = value.map_value.entries
    return {
        metadata_key(found, field, key): held
        for key in sorted(entries)
        if (held := metadata_value(found, f"{field}[{quote_text(key)}]", entries[key], depth + 1)) is not UNSET
    }


def _count_bytes(value: MetadataValue) -> int:
    """As the limit on metadata counts: of texts and keys their UTF-8, of anything else eight."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, list):
        return 8 + sum(map(_count_bytes, value))
    if isinstance(value, dict):
        return 8 + sum(len(key.encode()) + _count_bytes(held) for key, held in value.items())
    return 8


def read_metadata(
    found: Violations, field: str, values: Mapping[str, fragment_pb2.MetadataValue], limits: RequestLimits
) -> Metadata:
    """Sorted pairs."""
    if not values:
        return ()
    if len(values) > limits.metadata_entries_max:
        found.add(field, f"has {len(values)} entries, at most {limits.metadata_entries_max} are allowed")
        return ()
    pairs: list[tuple[str, MetadataValue]] = []
    size = 0
    for key in sorted(values):
        metadata_key(found, field, key)
        held = metadata_value(found, f"{field}[{quote_text(key)}]", values[key])
        if held is not UNSET:
            size += len(key.encode()) + _count_bytes(held)
            pairs.append((key, held))
    if size > limits.metadata_bytes_max:
        found.add(field, f"has {size} bytes, at most {limits.metadata_bytes_max} are allowed")
    return tuple(pairs)


def metadata_key(found: Violations, field: str, key: str) -> str:
    """Validates a metadata key: not empty, at most 128 bytes."""
    if not key or len(key.encode()) > METADATA_KEY_BYTES_MAX:
        found.add(field, f"has the key {quote_text(key)}: 1 to {METADATA_KEY_BYTES_MAX} bytes are allowed")
    return key


def metadata_of(values: Mapping[str, fragment_pb2.MetadataValue]) -> Metadata:
    """Sorted pairs of a server's message; what this version does not know is left out."""
    trusted = Violations()
    return tuple(
        (key, held) for key in sorted(values) if (held := metadata_value(trusted, key, values[key])) is not UNSET
    )


def write_metadata(target: MutableMapping[str, fragment_pb2.MetadataValue], values: Metadata) -> None:
    """Writes pairs into a message's map."""
    for key, value in values:
        write_value(target[key], value)


def write_value(held: fragment_pb2.MetadataValue, value: MetadataValue) -> None:
    """Writes a value into an empty message."""
    if isinstance(value, bool):  # before int, because a bool is an int
        held.bool_value = value
    elif isinstance(value, int):
        held.int_value = value
    elif isinstance(value, float):
        held.double_value = value
    elif isinstance(value, str):
        held.string_value = value
    elif value is None:
        held.null_value = NULL_VALUE
    elif isinstance(value, list):
        held.list_value.SetInParent()
        for each in value:
            write_value(held.list_value.values.add(), each)
    else:
        held.map_value.SetInParent()
        write_metadata(held.map_value.entries, tuple(value.items()))
