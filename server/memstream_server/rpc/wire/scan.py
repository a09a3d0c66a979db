"""Counts the fields of a serialised message before it is parsed: each may cost a hundred times its bytes in RAM. Splits
a large one into parts that are parsed one by one.

The scan walks the wire format in the order in which protobuf parses it, and enters only fields that the message type
declares as messages. It stops at invalid bytes, where protobuf stops as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TypeVar, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from memstream_server.engine.runtime.turns import pause_if_due

M = TypeVar("M", bound=Message)

STEP_FIELDS = 1_024
"""Fields counted between two pauses: half a millisecond."""
PART_BYTES = 65_536
"""About the size of a part of a message,"""
PART_FIELDS = 2_048
"""and its fields at most: a millisecond."""
Table = dict[int, "Table"]
"""The tables of a message type's sub-messages, by field tag."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GROUP_ENDS = (3, 4)
_CONTINUES = 0x80


def sub_messages(message: Descriptor, known: dict[str, Table] | None = None) -> Table:
    """The table of a message type."""
    known = {} if known is None else known
    if message.full_name in known:  # a type may contain itself
        return known[message.full_name]
    table = known[message.full_name] = {}
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            table[field.number << 3 | _BYTES] = sub_messages(field.message_type, known)
    return table


def may_exceed(data: bytes, fields_max: int) -> bool:
    """Whether data of this size can have more than `fields_max` fields: a field has at least two bytes."""
    return len(data) > 2 * fields_max


def exceeds_fields(data: bytes, table: Table, fields_max: int) -> Generator[None, None, bool]:
    """Whether the message has more than `fields_max` fields, including those of its sub-messages; stops counting there.

    A generator that pauses after every STEP_FIELDS, so that a scan does not block the event loop.
    """
    try:
        return (yield from _exceeds_bounds(data, table, fields_max))
    except IndexError:  # the message ends inside a field
        return False


def _exceeds_bounds(data: bytes, table: Table, fields_max: int) -> Generator[None, None, bool]:
    at, end, count = 0, len(data), 0
    outer: list[tuple[int, Table]] = []
    while True:
        while at >= end:
            if not outer:
                return False
            end, table = outer.pop()
        count += 1
        if count > fields_max:
            return True
        if not count % STEP_FIELDS:
            yield
        tag, at = data[at], at + 1
        if tag >= _CONTINUES:
            tag, at = _varint(data, at - 1)
        kind = tag & 7
        if kind == _BYTES:
            length, at = data[at], at + 1
            if length >= _CONTINUES:
                length, at = _varint(data, at - 1)
            inner = table.get(tag)
            if inner is None:
                at += length
            elif at + length > end:
                return False
            else:
                outer.append((end, table))
                end, table = at + length, inner
        elif kind == _VARINT:
            while data[at] >= _CONTINUES:
                at += 1
            at += 1
        elif kind == _FIXED32:
            at += 4
        elif kind == _FIXED64:
            at += 8
        elif kind not in _GROUP_ENDS:
            return False


def split_message(data: bytes, message: Descriptor) -> Iterator[bytes]:
    """Parts of a serialised message, each of about PART_BYTES, or of PART_FIELDS fields: merged one after the other,
    they are the whole message. An embedded message that is not repeated is split, too: parts of it merge.

    From where the data are not in order, they are one part, as they are.
    """
    yield from _split_fields(data, 0, len(data), message)


async def merge_in_slices(message: M, data: bytes) -> M:
    """The message, into which a serialised one was merged. Raises DecodeError."""
    for part in split_message(data, cast("Descriptor", message.DESCRIPTOR)):
        message.MergeFromString(part)
        await pause_if_due()
    return message


def _split_fields(data: bytes, at: int, end: int, message: Descriptor) -> Iterator[bytes]:
    began = at
    try:
        while at < end:
            fields = 0
            while at < end and at - began <= PART_BYTES and fields < PART_FIELDS:
                fields, field_at = fields + 1, at
                tag, at = _varint(data, at)
                body_at, at = _skip_value(data, at, end, tag)
                if at - body_at > PART_BYTES and (inner := _embedded(message, tag)) is not None:
                    if field_at > began:
                        yield data[began:field_at]
                    for part in _split_fields(data, body_at, at, inner):
                        yield encode_field(tag >> 3, part)
                    began = at
            if at > began:
                yield data[began:at]
            began = at
    except IndexError:  # the message ends inside a field
        yield data[began:end]


def _skip_value(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    """(where the value's content begins, the position after it). Raises IndexError if it is not before `end`."""
    kind, after = tag & 7, end + 1
    if kind == _BYTES:
        length, at = _varint(data, at)
        after = at + length
    elif kind == _VARINT:
        after = _varint(data, at)[1]
    elif kind in (_FIXED32, _FIXED64):
        after = at + (4 if kind == _FIXED32 else 8)
    if after > end:  # or a group, which no message of the contract has
        raise IndexError("the message ends inside a field")
    return at, after


def _embedded(message: Descriptor, tag: int) -> Descriptor | None:
    """The type of a field with one embedded message."""
    field = message.fields_by_number.get(tag >> 3)
    if field is None or tag & 7 != _BYTES or field.is_repeated:
        return None
    return field.message_type


def encode_field(number: int, value: bytes) -> bytes:
    """A field with a serialised message."""
    return _write_varint(number << 3 | _BYTES) + _write_varint(len(value)) + value


def _write_varint(value: int) -> bytes:
    written = bytearray()
    while value >= _CONTINUES:
        written.append(value & 0x7F | _CONTINUES)
        value >>= 7
    written.append(value)
    return bytes(written)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this position, and the position after it."""
    value, shift = 0, 0
    while data[at] >= _CONTINUES:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise IndexError("a number has more than ten bytes")
    return value | data[at] << shift, at + 1
