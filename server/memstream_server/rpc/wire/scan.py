"""Counts the fields of a serialised message before it is parsed: each may cost a hundred times its bytes in RAM.

The scan walks the wire format in the order in which protobuf parses it, and enters only fields that the message type
declares as messages. It stops at invalid bytes, where protobuf stops as well.
"""

from __future__ import annotations

from collections.abc import Generator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

STEP_FIELDS = 1_024
"""Fields counted between two pauses: half a millisecond."""
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


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this position, and the position after it."""
    value, shift = 0, 0
    while data[at] >= _CONTINUES:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise IndexError("a number has more than ten bytes")
    return value | data[at] << shift, at + 1
