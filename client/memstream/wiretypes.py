"""Converts times, durations, enums, metadata values and vectors; shared by the codecs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.containers import MessageMap
from google.protobuf.struct_pb2 import NULL_VALUE
from google.protobuf.timestamp_pb2 import Timestamp

from memstream.argument_types import show_value
from memstream.errors import InvalidArgument
from memstream.kinds import kind_of
from memstream.v1 import fragment_pb2
from memstream.values import MetadataValue, Vector

E = TypeVar("E", bound=StrEnum)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_METADATA = kind_of(MetadataValue)
_DEPTH_MAX = 8
"""Lists and dicts of metadata inside of one another."""


def invalid_field(field: str, description: str) -> InvalidArgument:
    """The error for an invalid field, as the server would report it."""
    return InvalidArgument(field, description)


class encoding:  # noqa: N801 - used as a statement
    """Context of building a message: turns protobuf's errors into an InvalidArgument that names `field`."""

    __slots__ = ("_field",)

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        refused = isinstance(error, AttributeError | OverflowError | TypeError | ValueError)
        if refused and not isinstance(error, InvalidArgument):
            raise InvalidArgument(self._field, str(error)) from error


def timestamp_to_wire(field: str, value: datetime) -> Timestamp:
    """Converts an aware datetime, to the microsecond."""
    kind_of(datetime).check(field, value)
    micros = (value - _EPOCH) // _MICROSECOND
    return Timestamp(seconds=micros // 1_000_000, nanos=micros % 1_000_000 * 1_000)


def timestamp_from_wire(value: Timestamp) -> datetime:
    """Converts to an aware datetime in UTC, to the microsecond."""
    return _EPOCH + timedelta(0, value.seconds, value.nanos // 1_000)


def optional_timestamp_from_wire(wire: Timestamp, given: bool) -> datetime | None:
    """As `moment`, for a field that may be unset."""
    return timestamp_from_wire(wire) if given else None


def optional_timestamp_to_wire(field: str, value: datetime | None) -> Timestamp | None:
    """As `timestamp`, for a value that may be None."""
    return None if value is None else timestamp_to_wire(field, value)


def duration_to_wire(value: timedelta) -> Duration:
    """Converts a timedelta, to the microsecond; seconds and nanos have the same sign, as protobuf requires."""
    micros = value // _MICROSECOND
    sign = -1 if micros < 0 else 1
    seconds, rest = divmod(abs(micros), 1_000_000)
    return Duration(seconds=sign * seconds, nanos=sign * rest * 1_000)


def duration_from_wire(value: Duration) -> timedelta:
    """Converts to a timedelta."""
    return timedelta(seconds=value.seconds, microseconds=value.nanos // 1_000)


def members_by_number(kind: type[E], descriptor: EnumDescriptor) -> dict[int, E]:
    """Maps wire numbers to members, for every member in the contract (UNSPECIFIED has none)."""
    prefix = descriptor.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {value.name.removeprefix(prefix): value.number for value in descriptor.values}
    return {numbers[member.name]: member for member in kind if member.name in numbers}


def metadata_value_to_wire(field: str, value: object, depth: int = 0) -> fragment_pb2.MetadataValue:
    """Converts a metadata value; bool is checked before int, its base class."""
    _METADATA.check(field, value)
    if isinstance(value, bool):
        return fragment_pb2.MetadataValue(bool_value=value)
    if isinstance(value, str):
        return fragment_pb2.MetadataValue(string_value=value)
    if isinstance(value, int | np.integer):
        return fragment_pb2.MetadataValue(int_value=int(value))
    if isinstance(value, float | np.floating):
        return fragment_pb2.MetadataValue(double_value=float(value))
    if value is None:
        return fragment_pb2.MetadataValue(null_value=NULL_VALUE)
    if depth == _DEPTH_MAX:
        raise invalid_field(field, f"is nested more than {_DEPTH_MAX} deep")
    if isinstance(value, list):
        held = [metadata_value_to_wire(f"{field}[{number}]", each, depth + 1) for number, each in enumerate(value)]
        return fragment_pb2.MetadataValue(list_value=fragment_pb2.MetadataList(values=held))
    if isinstance(value, dict):
        entries = {name: metadata_value_to_wire(f"{field}.{name}", each, depth + 1) for name, each in value.items()}
        return fragment_pb2.MetadataValue(map_value=fragment_pb2.MetadataMap(entries=entries))
    raise invalid_field(field, f"must be {_METADATA.name}, not {show_value(value)}")


def metadata_from_wire(wire: MessageMap[str, fragment_pb2.MetadataValue]) -> Mapping[str, MetadataValue]:
    """Converts metadata to Python values."""
    return {key: metadata_value_from_wire(value) for key, value in wire.items()}


def metadata_value_from_wire(value: fragment_pb2.MetadataValue) -> MetadataValue:
    """Converts a value of metadata."""
    kind = value.WhichOneof("kind")
    if kind == "int_value":
        return value.int_value
    if kind == "double_value":
        return value.double_value
    if kind == "bool_value":
        return value.bool_value
    if kind == "list_value":
        return [metadata_value_from_wire(each) for each in value.list_value.values]
    if kind == "map_value":
        return {name: metadata_value_from_wire(each) for name, each in value.map_value.entries.items()}
    return None if kind == "null_value" else value.string_value


def pack_floats(number: int, vector: Vector) -> bytes:
    """Encodes a packed `repeated float` field with that number as wire bytes, to be merged into a message.

    Assigning 1,536 floats one by one takes 21 to 224 µs, this takes 1.6 µs.
    """
    try:
        given = np.asarray(vector)
        if given.size and given.dtype.kind not in "fiu":  # numpy would convert strings, bools and None
            raise invalid_field("embedding", f"must be a vector of numbers, not of {given.dtype.name}")
        with np.errstate(over="ignore"):
            array: npt.NDArray[np.float32] = np.ascontiguousarray(given, dtype="<f4")
    except (TypeError, OverflowError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise invalid_field("embedding", f"must be a vector of numbers: {error}") from error
    if array.ndim != 1 or array.size == 0:
        raise invalid_field("embedding", f"must have one dimension and not be empty, not shape {array.shape}")
    if not np.isfinite(array).all():
        raise invalid_field("embedding", "must be finite")
    data = array.tobytes()
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
