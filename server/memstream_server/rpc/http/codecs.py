"""Bodies of requests and responses: binary protobuf and protobuf's JSON.

Rule 1. A request body becomes the bytes of its message, which the request reader bounds and parses like a gRPC message.
Rule 2. JSON is parsed here, so its size and number of elements are bounded first. An unknown field is an error: a
misspelt one would otherwise be dropped. So is a field that one object has twice, under one name or both.
Rule 3. ConnectRPC calls its codecs and compressions on the event loop, in one piece: they pass on what they get. Large
bodies are parsed and compressed in threads before and after.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from connectrpc.code import Code
from connectrpc.compression import Compression
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from memstream_server.engine.errors import InvalidField
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.rpc.http.errors import connect_error
from memstream_server.rpc.request_reader import GZIP, RequestReader, decompress
from memstream_server.rpc.validation import quote_text

JSON_BYTES_FACTOR = 4
"""A JSON body may have this many times the bytes of the largest message: escapes, base64 and digits are longer."""
_DEPTH_MAX = 64
_UNREADABLE = {
    RecursionError: "is nested too deeply",
    SystemError: "a name has half of a surrogate pair",  # protobuf looks such a name up
}
_PARSED_AT_ONCE = 4_096
"""Bytes of JSON that are parsed on the event loop: half a millisecond."""
_COMPRESSED_AT_ONCE = 16_384
"""Bytes of a response that are compressed on the event loop."""
_GZIP_LEVEL = 1
"""Six takes 2.6 times as long for an eighth less."""
WRITTEN_PER_SLICE = 8
"""Entries of a list that are written between two looks at the clock,"""
_WRITTEN_AT_ONCE = 4_096
"""if they have at most so many bytes: larger ones are divided themselves."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response message of a class, or its bytes."""

    kind: type[Message]
    message: Message | bytes
    body: Body | None = None
    """Its form in the response, if it was made by `write_body`."""

    def serialize(self) -> bytes:
        """The binary form."""
        return self.message if isinstance(self.message, bytes) else self.message.SerializeToString()

    def parse(self) -> Message:
        """The message."""
        return self.kind.FromString(self.message) if isinstance(self.message, bytes) else self.message


class Body(bytes):
    """The body of a response, with its compressed form if that was made."""

    compressed: bytes | None = None


class JsonText(bytes):
    """The body of a request in JSON, as it came."""


class Gzip(Compression):
    """Request bodies stay compressed: who reads them decompresses them in a thread."""

    def name(self) -> str:
        """The content encoding."""
        return "gzip"

    def compress(self, data: bytes | bytearray | memoryview) -> bytes:
        """The form made by `write_body`, or else that of a small body, such as an error."""
        made = data.compressed if isinstance(data, Body) else None
        return gzip.compress(data, compresslevel=_GZIP_LEVEL) if made is None else made

    def decompress(self, data: bytes | bytearray | memoryview, _read_max_bytes: int | None = None) -> bytes:
        """The data as they are. Raises ConnectError if they do not begin as gzip data do."""
        if data and bytes(data[:2]) != GZIP:
            raise ConnectError(Code.INVALID_ARGUMENT, "the body is not in order: it is not compressed with gzip")
        return bytes(data)


class BinaryCodec:
    """Protobuf's binary form."""

    def name(self) -> str:
        """The part of the content type."""
        return "proto"

    def encode(self, reply: Reply) -> bytes:
        """The body of a response."""
        return reply.serialize() if reply.body is None else reply.body

    def decode(self, data: bytes | bytearray, _kind: type[Any]) -> bytes:
        """The bytes of a request message."""
        return bytes(data)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises InvalidField if a name is in it twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidField(f"the name {quote_text(twice)} is in one object twice")
    return value


def _check_names(value: dict[str, Any], kind: Descriptor) -> None:
    """Raises InvalidField if an object has a field by both of its names, newMemory and new_memory."""
    if kind.full_name.startswith("google.protobuf."):  # their JSON has forms of its own
        return
    given: dict[int, str] = {}
    for name, held in value.items():
        field: FieldDescriptor | None = kind.fields_by_camelcase_name.get(name) or kind.fields_by_name.get(name)
        if field is None:  # protobuf names it
            continue
        if field.number in given:
            raise InvalidField(f"the field {field.name} is in one object twice: {given[field.number]} and {name}")
        given[field.number] = name
        if field.message_type is None:
            continue
        inner: Descriptor | None = field.message_type
        if field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"].message_type
            held = list(held.values()) if isinstance(held, dict) else []
        for each in held if isinstance(held, list) else [held]:
            if inner is not None and isinstance(each, dict):
                _check_names(each, inner)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def write_body(reply: Reply, as_json: bool, compressed: bool) -> Reply:
    """The reply with its body, which is made and compressed with pauses or in a thread."""
    body = Body(await write_json(reply.parse()) if as_json else reply.serialize())
    if compressed and len(body) > _COMPRESSED_AT_ONCE:
        body.compressed = await run_in_thread(partial(gzip.compress, body, compresslevel=_GZIP_LEVEL))
    return Reply(reply.kind, reply.message, body)


async def write_json(message: Message) -> bytes:
    """The JSON form, made with pauses: that of 1,000 recollections takes a tenth of a second."""
    return (await _write_object(message)).encode()


async def _write_object(message: Message) -> str:
    rest = type(message)()
    rest.CopyFrom(message)
    parts: dict[str, str] = {}
    for field, held in message.ListFields():
        if not _is_ours(field):
            continue
        rest.ClearField(field.name)
        if isinstance(held, Message):
            parts[field.json_name] = await _write_object(held)
            continue
        entries: list[str] = []
        async for some in in_slices(held, WRITTEN_PER_SLICE):
            entries += [
                _dump(json_format.MessageToDict(each))
                if each.ByteSize() <= _WRITTEN_AT_ONCE
                else await _write_object(each)
                for each in some
            ]
        parts[field.json_name] = f"[{','.join(entries)}]"
    parts |= {name: _dump(value) for name, value in json_format.MessageToDict(rest).items()}
    in_order = (field.json_name for field, _ in message.ListFields())
    return "{" + ",".join(f"{_dump(name)}:{parts[name]}" for name in in_order if name in parts) + "}"


def _is_ours(field: FieldDescriptor) -> bool:
    """Whether the field has messages of our contract; those of protobuf have JSON forms of their own."""
    kind = field.message_type
    return kind is not None and kind.full_name.startswith("memstream.") and not kind.GetOptions().map_entry


class JsonCodec:
    """Protobuf's JSON form."""

    def name(self) -> str:
        """The part of the content type."""
        return "json"

    def encode(self, reply: Reply) -> bytes:
        """The body of a response."""
        return _dump(json_format.MessageToDict(reply.parse())).encode() if reply.body is None else reply.body

    def decode(self, data: bytes | bytearray, _kind: type[Any]) -> JsonText:
        """The body of a request, for `read_json`."""
        return JsonText(data)


class JsonReader:
    """Parses the JSON of requests."""

    def __init__(self, reader: RequestReader) -> None:
        self._reader = reader

    async def read_json(self, text: bytes, kind: type[Any], path: str, holder: str) -> bytes:
        """The bytes of a request message of an rpc, parsed in a thread if it is large. Raises ConnectError."""
        if len(text) <= _PARSED_AT_ONCE and text[:2] != GZIP:
            return self._parse(text, kind, path)
        async with self._reader.examine_alone(holder):
            if text[:2] == GZIP:
                unzipped = await decompress(text, JSON_BYTES_FACTOR * self._reader.find_rpc(path).bytes_max)
                if isinstance(unzipped, str):
                    raise connect_error(InvalidField(unzipped))
                text = unzipped
            return await run_in_thread(partial(self._parse, text, kind, path))

    def _parse(self, data: bytes, kind: type[Any], path: str) -> bytes:
        bounds = self._reader.find_rpc(path)
        try:
            self._check_bounds(data, bounds.bytes_max, bounds.fields_max)
            value = json.loads(data, object_pairs_hook=_without_repeats)
            if not isinstance(value, dict):
                raise InvalidField(f"the body is not JSON of {kind.DESCRIPTOR.name}: it must be an object")
            _check_names(value, kind.DESCRIPTOR)
            message = json_format.ParseDict(value, kind(), max_recursion_depth=_DEPTH_MAX)
        except InvalidField as error:
            raise connect_error(error) from None
        except (json_format.ParseError, ValueError, RecursionError, SystemError) as error:
            text = _UNREADABLE.get(type(error), str(error))
            raise connect_error(InvalidField(f"the body is not JSON of {kind.DESCRIPTOR.name}: {text}")) from None
        return bytes(message.SerializeToString())

    def _check_bounds(self, data: bytes | bytearray, bytes_max: int, fields_max: int) -> None:
        if len(data) > JSON_BYTES_FACTOR * bytes_max:
            raise InvalidField(
                f"the body has {len(data)} bytes, this rpc takes at most {JSON_BYTES_FACTOR * bytes_max} of JSON"
            )
        if sum(data.count(mark) for mark in (b",", b"[", b"{")) > fields_max:
            raise InvalidField(f"the body has more than {fields_max} elements")
