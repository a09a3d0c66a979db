"""Takes the long strings out of a JSON text, so that no step holds the interpreter for longer than a piece of one.

`json` reads a string of megabytes in one step, protobuf searches it for halves of surrogate pairs in another, and while
a thread is in such a step nothing else runs. Here a long string is found and decoded in pieces, between which the event
loop may run. A short mark is in its place when the text is parsed; the message gets the string itself.
"""

from __future__ import annotations

import json
import re
import secrets
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from memstream_server.engine.errors import InvalidField

PIECE_BYTES = 65_536
"""Read in one step: some 0.3 ms."""
LEVELS_MAX = 100
"""Protobuf reads no message that is nested so deeply."""
SHORT_BYTES = 1_024
_SHORT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
"""A string that ends."""
_REST = re.compile(rb'[^"\\]*+(?:\\(?:[^u]|u[^"\\]{4})[^"\\]*+)*+', re.DOTALL)
"""The rest of a string, up to its end or to an escape that is cut or wrong."""
_LATER_HALF = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_IS_NAME = re.compile(rb"[ \t\r\n]*:")


class TooManyElements(Exception):
    """The text has more elements than allowed."""


@dataclass(slots=True)
class LongStrings:
    """A JSON text without its long strings."""

    text: bytes
    """With a mark for each."""
    strings: dict[str, str] = field(default_factory=dict)
    """By mark."""
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(bytes, characters) of each in the text as it came, by mark."""
    _left: set[str] = field(default_factory=set)
    """What `fill` has not put into the message."""

    def load(self, hook: Callable[[list[tuple[str, Any]]], dict[str, Any]]) -> Any:
        """The value with marks. Raises what `json.loads` raises, with the place in the text as it came."""
        try:
            return json.loads(self.text, object_pairs_hook=hook)
        except UnicodeDecodeError as error:
            error.start += self._taken(self.text[: error.start].decode(errors="replace"), 0)
            raise
        except json.JSONDecodeError as error:
            error.colno += self._taken(error.doc[: error.pos].rpartition("\n")[2], 1)
            raise

    def _taken(self, before: str, unit: int) -> int:
        """Bytes (0) or characters (1) that marks before a place have replaced."""
        return sum(size[unit] - len(mark) for mark, size in self.sizes.items() if mark in before)

    def restore(self, value: Any, chars_max: int | None = None, levels: int = LEVELS_MAX) -> Any:
        """A parsed value with the strings in the places of their marks; of each at most `chars_max`, and a sign."""
        if isinstance(value, str) and value in self.strings:
            return self.strings[value] if chars_max is None else f"{self.strings[value][:chars_max]}…"
        if not (levels and self.strings):
            return value
        if isinstance(value, list):
            return [self.restore(each, chars_max, levels - 1) for each in value]
        if isinstance(value, dict):
            return {name: self.restore(each, chars_max, levels - 1) for name, each in value.items()}
        return value

    def fill(self, message: Message, value: dict[str, Any]) -> bool:
        """Put the strings into the message that was parsed from `value`; whether each has its place."""
        self._left = set(self.strings)
        self._fill(message, value)
        return not self._left

    def _fill(self, message: Message, value: dict[str, Any]) -> None:
        kind: Any = message.DESCRIPTOR
        for name, held in value.items():
            one: FieldDescriptor | None = kind.fields_by_camelcase_name.get(name) or kind.fields_by_name.get(name)
            if one is None or held is None:
                continue
            if one.message_type is not None and one.message_type.full_name.startswith("google.protobuf."):
                continue  # its JSON has a form of its own
            if isinstance(held, dict) and not (one.message_type and one.message_type.GetOptions().map_entry):
                self._fill(getattr(message, one.name), held)
            elif isinstance(held, dict):
                self._fill_map(getattr(message, one.name), held, one)
            elif isinstance(held, list):
                self._fill_list(getattr(message, one.name), held, one)
            elif isinstance(held, str) and held in self.strings:
                setattr(message, one.name, self._convert(held, one))

    def _fill_map(self, entries: Any, held: dict[str, Any], one: Any) -> None:
        for key, each in held.items():
            if isinstance(each, dict):
                self._fill(entries[key], each)
            elif isinstance(each, str) and each in self.strings:
                entries[key] = self._convert(each, one.message_type.fields_by_name["value"])

    def _fill_list(self, entries: Any, held: list[Any], one: FieldDescriptor) -> None:
        for place, each in enumerate(held):
            if isinstance(each, dict):
                self._fill(entries[place], each)
            elif isinstance(each, str) and each in self.strings:
                entries[place] = self._convert(each, one)

    def _convert(self, mark: str, one: FieldDescriptor) -> str | bytes:
        self._left.discard(mark)
        found = self.strings[mark]
        if one.type != FieldDescriptor.TYPE_BYTES:
            return found
        return urlsafe_b64decode(found + "=" * (4 - len(found) % 4))  # as protobuf does


def take_long_strings(data: bytes, elements_max: int) -> LongStrings:
    """The text without strings of more than PIECE_BYTES. Raises TooManyElements, InvalidField, and what `json.loads`
    raises. Elements, outside of strings, are counted by what begins or separates them; an element has two strings at
    most."""
    found = LongStrings(data)
    key, kept = secrets.token_urlsafe(12), 0
    parts: list[bytes] = []
    count = strings = place = 0
    while True:
        start = data.find(b'"', place)
        count += _count_elements(data, place, len(data) if start < 0 else start)
        if max(count, strings // 2) > elements_max:
            raise TooManyElements
        if start < 0:
            break
        strings += 1
        if (short := _SHORT.match(data, start, start + SHORT_BYTES)) is not None:
            place = short.end()
            continue
        pieces = list(_split_string(data, start + 1))
        place = (pieces[-1][1] if pieces else start + 1) + 1
        if len(pieces) < 2 or data[place - 1 : place] != b'"':  # short, or without an end, which `json.loads` says
            continue
        if _IS_NAME.match(data, place):
            raise InvalidField(f"a name in the body has {place - start - 2} bytes")
        mark = f"{key}{len(found.strings):04d}"
        found.strings[mark] = "".join(_decode_piece(data, *piece) for piece in pieces)
        chars = sum(len(data[low:high].decode()) for low, high in pieces)
        found.sizes[mark] = place - start - 2, chars
        parts += (data[kept : start + 1], mark.encode())
        kept = place - 1
    found.text = b"".join((*parts, data[kept:]))
    return found


def _count_elements(data: bytes, start: int, end: int) -> int:
    count = 0
    for low in range(start, end, PIECE_BYTES):
        count += sum(data.count(mark, low, min(low + PIECE_BYTES, end)) for mark in (b",", b"[", b"{"))
    return count


def _split_string(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """(start, end) of pieces up to the quotation mark that ends a string, none within an escape or a character."""
    while True:
        reached = _REST.match(data, start, start + PIECE_BYTES)
        end = start if reached is None else reached.end()
        if _LATER_HALF.match(data, end):
            end += 6  # the former half is in this piece
        elif start + PIECE_BYTES - 6 <= end < len(data):
            end -= next((back for back in range(4) if data[end - back] & 0xC0 != 0x80), 0)
        ends = end >= len(data) or data[end] == ord('"')
        if end == start and not ends:  # at a wrong escape, which whoever reads this piece says
            end, ends = len(data), True
        yield start, end
        if ends:
            return
        start = end


def _decode_piece(data: bytes, start: int, end: int) -> str:
    """Raises what `json.loads` raises, with the position in the whole text."""
    try:
        piece = data[start:end].decode()
        found: str = json.loads(f'"{piece}"') if "\\" in piece or not piece.isprintable() else piece
        found.encode()
    except UnicodeDecodeError as error:
        raise UnicodeDecodeError("utf-8", data, start + error.start, start + error.end, error.reason) from None
    except UnicodeEncodeError:
        raise InvalidField("the body has half of a surrogate pair in a string") from None
    except json.JSONDecodeError as error:
        before = data[: start + len(piece[: error.pos - 1].encode())].decode(errors="replace")
        raise json.JSONDecodeError(error.msg, before, len(before)) from None
    return found
