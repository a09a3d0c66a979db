"""Bodies of requests and responses: binary protobuf and protobuf's JSON; statuses as errors of Connect.

Rule 1. A request body becomes the bytes of its message, which the request reader bounds and parses like a gRPC message.
Rule 2. JSON is parsed here, so its size and number of elements are bounded first. An unknown field is an error: a
misspelt one would otherwise be dropped. So is a field that one object has twice, under one name or both. A value of
metadata may be plain JSON: "x", 5, 2.5, true. The texts of errors are ours: the parser's words change with its version.
Rule 3. ConnectRPC calls its codecs and compressions on the event loop, in one piece: they pass on what they get. Large
bodies are parsed and compressed in threads before and after.
"""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import grpc
import protobuf
from connectrpc.code import Code
from connectrpc.compression import Compression
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.request import Headers
from google.protobuf import any_pb2, descriptor_pool, json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from protobuf import wkt

from memstream.v1 import fragment_pb2
from memstream_server.engine.errors import InvalidField
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.rpc.errors import status_of_any
from memstream_server.rpc.http.long_strings import PIECE_BYTES, LongStrings, TooManyElements, take_long_strings
from memstream_server.rpc.request_reader import GZIP, RequestReader, decompress
from memstream_server.rpc.validation import invalid_field, quote_text
from memstream_server.rpc.wire.scan import merge_in_slices

JSON_BYTES_FACTOR = 4
"""A JSON body may have this many times the bytes of the largest message: escapes, base64 and digits are longer."""
_DEPTH_MAX = 64
_UNREADABLE: dict[type[Exception], str] = {
    RecursionError: "is nested too deeply",
    SystemError: "a name has half of a surrogate pair",  # protobuf looks such a name up
}
_FAILURES = (json_format.ParseError, ValueError, OverflowError, RecursionError, SystemError)
"""What protobuf raises for JSON that is no message: OverflowError for an enum or a list element of Infinity."""
_METADATA_VALUE = fragment_pb2.MetadataValue.DESCRIPTOR
_FORMS = {
    "MetadataValue": "a text, a number, true, false, null, a list or an object",
    "Timestamp": 'a time such as "2026-05-08T12:00:00Z"',
    "Duration": 'a duration in seconds such as "10s"',
    "FieldMask": 'names of fields with commas, such as "policy,labels",',
}
_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number of 32 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number of 32 bits that is not negative",
    FieldDescriptor.CPPTYPE_INT64: "a whole number of 64 bits",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 64 bits that is not negative",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
}
_SHOWN_CHARS = 100
"""Of a long string that an error may quote."""
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


def _find_field(kind: Descriptor, name: str) -> FieldDescriptor | None:
    found: FieldDescriptor | None = kind.fields_by_camelcase_name.get(name) or kind.fields_by_name.get(name)
    return found


def _complete_values(value: dict[str, Any], kind: Descriptor) -> None:
    """Writes plain values of metadata as messages. Raises InvalidField if an object has a field by both of its names,
    newMemory and new_memory."""
    if kind.full_name.startswith("google.protobuf."):  # their JSON has forms of its own
        return
    given: dict[int, str] = {}
    for name, held in value.items():
        field = _find_field(kind, name)
        if field is None:
            continue
        if field.number in given:
            raise InvalidField(f"the field {field.name} is in one object twice: {given[field.number]} and {name}")
        given[field.number] = name
        if field.message_type is None:
            continue
        inner: Descriptor | None = field.message_type
        if field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"].message_type
        if inner is None:
            continue
        if inner is _METADATA_VALUE:
            held = value[name] = _metadata_values(held, inner is field.message_type and not field.is_repeated)
        held = list(held.values()) if isinstance(held, dict) and inner is not field.message_type else held
        for each in held if isinstance(held, list) else [held]:
            if isinstance(each, dict):
                _complete_values(each, inner)


def _metadata_values(held: Any, single: bool) -> Any:
    """The plain values of a field of metadata as JSON of MetadataValue."""
    if single:
        return _metadata_value(held)
    if isinstance(held, dict):
        return {key: _metadata_value(each) for key, each in held.items()}
    return [_metadata_value(each) for each in held] if isinstance(held, list) else held


def _metadata_value(value: Any) -> Any:
    """A plain value as the JSON of MetadataValue; any other as it is."""
    if value is None:
        return {"nullValue": None}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, list):
        return {"listValue": {"values": value}}
    if isinstance(value, dict) and not (len(value) == 1 and _find_field(_METADATA_VALUE, next(iter(value)))):
        return {"mapValue": {"entries": value}}
    names = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return {names[type(value)]: value} if type(value) in names else value


def _explain_object(value: Any, kind: Descriptor, path: str) -> InvalidField:
    """Why a value is not the JSON of a message: the first field that cannot be read alone."""
    if not isinstance(value, dict):
        return invalid_field(path, f"is {_show(value)}, an object is wanted")
    for name, held in value.items():
        where = f"{path}.{name}" if path else name
        field = _find_field(kind, name)
        if field is None:
            near = get_close_matches(name, [each.camelcase_name for each in kind.fields], 1)
            meant = f": did you mean {near[0]}?" if near else ""
            return invalid_field(where, f"is no field of {kind.name}{meant}")
        if not _is_readable({name: held}, kind):
            return _explain_field(held, kind, field, name, where)
    choices = (f"{', '.join(each.camelcase_name for each in one.fields)}" for one in kind.oneofs)
    return invalid_field(path or "body", f"has more than one of {' or of '.join(choices)}")


def _explain_field(held: Any, kind: Descriptor, field: FieldDescriptor, name: str, where: str) -> InvalidField:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        if not isinstance(held, dict):
            return invalid_field(where, f"is {_show(held)}, an object is wanted")
        value = inner.fields_by_name["value"]
        for key, each in held.items():
            if not _is_readable({name: {key: each}}, kind):
                return _explain_value(each, value, f"{where}[{quote_text(key)}]")
    elif field.is_repeated:
        if not isinstance(held, list):
            return invalid_field(where, f"is {_show(held)}, a list is wanted")
        for place, each in enumerate(held):
            if not _is_readable({name: [each]}, kind):
                return _explain_value(each, field, f"{where}[{place}]")
    return _explain_value(held, field, where)


def _explain_value(held: Any, field: FieldDescriptor, where: str) -> InvalidField:
    inner = field.message_type
    if inner is not None and inner is not _METADATA_VALUE and not inner.full_name.startswith("google.protobuf."):
        return _explain_object(held, inner, where)
    if inner is _METADATA_VALUE and isinstance(held, dict) and len(held) == 1:
        held = next(iter(held.values()))  # perhaps a plain value, as it came
    if inner is not None:
        wanted = _FORMS.get(inner.name, f"the JSON of {inner.full_name}")
    elif field.enum_type is not None:
        wanted = f"one of {', '.join(value.name for value in field.enum_type.values)}"
    else:
        wanted = _SCALARS.get(field.cpp_type, "a string")
        if field.type == FieldDescriptor.TYPE_BYTES:
            wanted = "a string in base64"
    return invalid_field(where, f"is {_show(held)}, {wanted} is wanted")


def _is_readable(value: dict[str, Any], kind: Descriptor) -> bool:
    try:
        json_format.ParseDict(value, GetMessageClass(kind)(), max_recursion_depth=_DEPTH_MAX)
    except _FAILURES:
        return False
    return True


def _show(value: Any) -> str:
    if isinstance(value, str):
        return quote_text(value)
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return json.dumps(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def write_body(reply: Reply, as_json: bool, compressed: bool) -> Reply:
    """The reply with its body, which is made and compressed with pauses or in a thread."""
    message = reply.message
    if as_json and isinstance(message, bytes):
        message = await merge_in_slices(reply.kind(), message)
    body = Body(await write_json(message) if as_json and isinstance(message, Message) else reply.serialize())
    if compressed and len(body) > _COMPRESSED_AT_ONCE:
        body.compressed = await run_in_thread(partial(gzip.compress, body, compresslevel=_GZIP_LEVEL))
    return Reply(reply.kind, reply.message, body)


async def write_json(message: Message) -> bytes:
    """The JSON form, made with pauses: that of 1,000 recollections takes a tenth of a second."""
    return (await _write_object(message)).encode()


async def _write_object(message: Message) -> str:
    if message.ByteSize() <= _WRITTEN_AT_ONCE:
        return _dump(json_format.MessageToDict(message))
    rest = type(message)()
    parts: dict[str, str] = {}
    for field, held in message.ListFields():
        if not _is_ours(field):
            _copy_field(rest, field, held)
            continue
        if isinstance(held, Message):
            parts[field.json_name] = await _write_object(held)
            continue
        entries: list[str] = []
        async for some in in_slices(held, WRITTEN_PER_SLICE):
            entries += [await _write_object(each) for each in some]
        parts[field.json_name] = f"[{','.join(entries)}]"
    parts |= {name: _dump(value) for name, value in json_format.MessageToDict(rest).items()}
    in_order = (field.json_name for field, _ in message.ListFields())
    return "{" + ",".join(f'"{name}":{parts[name]}' for name in in_order if name in parts) + "}"


def _copy_field(into: Message, field: FieldDescriptor, held: Any) -> None:
    if field.is_repeated:
        getattr(into, field.name).MergeFrom(held)
    elif field.message_type is not None:
        getattr(into, field.name).CopyFrom(held)
    else:
        setattr(into, field.name, held)


def _is_ours(field: FieldDescriptor) -> bool:
    """Whether the field has messages of our contract; those of protobuf have JSON forms of their own."""
    kind = field.message_type
    return kind is not None and kind.full_name.startswith("memstream.") and not kind.GetOptions().map_entry


def _explain_failure(error: Exception, value: Any, kind: Descriptor) -> InvalidField:
    """The error of a body that cannot be read; `value`: what its JSON has, None if it is no JSON."""
    if isinstance(error, RecursionError | SystemError):
        return InvalidField(f"the body is not JSON of {kind.name}: {_UNREADABLE[type(error)]}")
    if value is not None:
        return _explain_object(value, kind, "")
    if isinstance(error, json.JSONDecodeError):
        return InvalidField(f"the body is not JSON: line {error.lineno}, column {error.colno}")
    if isinstance(error, UnicodeDecodeError):
        return InvalidField(f"the body is not JSON: byte {error.start + 1} is not UTF-8")
    return InvalidField("the body is not JSON: a number has too many digits")


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
        bounds, value, taken = self._reader.find_rpc(path), None, LongStrings(data)
        try:
            taken = self._take_strings(data, bounds.bytes_max, bounds.fields_max)
            value = taken.load(_without_repeats)
            if not isinstance(value, dict):
                raise InvalidField(f"the body is not JSON of {kind.DESCRIPTOR.name}: it must be an object")
            _complete_values(value, kind.DESCRIPTOR)
            message = json_format.ParseDict(value, kind(), max_recursion_depth=_DEPTH_MAX)
            if taken.strings and not taken.fill(message, value):  # one is where only protobuf can read it
                message = json_format.ParseDict(taken.restore(value), kind(), max_recursion_depth=_DEPTH_MAX)
            return bytes(message.SerializeToString())
        except InvalidField as error:
            raise connect_error(error) from None
        except _FAILURES as error:
            raise connect_error(_explain_failure(error, taken.restore(value, _SHOWN_CHARS), kind.DESCRIPTOR)) from None

    def _take_strings(self, data: bytes, bytes_max: int, fields_max: int) -> LongStrings:
        if len(data) > JSON_BYTES_FACTOR * bytes_max:
            raise InvalidField(
                f"the body has {len(data)} bytes, this rpc takes at most {JSON_BYTES_FACTOR * bytes_max} of JSON"
            )
        if len(data) <= PIECE_BYTES and len(data) <= fields_max:
            return LongStrings(data)
        try:
            return take_long_strings(data, fields_max)
        except TooManyElements:
            raise InvalidField(f"the body has more than {fields_max} elements") from None


_CODES = {
    code.value[0]: Code(code.name.lower().replace("cancelled", "canceled"))
    for code in grpc.StatusCode
    if code is not grpc.StatusCode.OK
}
_RETRY_INFO = error_details_pb2.RetryInfo.DESCRIPTOR.full_name


class _ReadableDetail(ErrorDetail):
    """A detail that also appears as JSON, under the key `debug` of Connect, for clients without protobuf."""

    def __init__(self, detail: any_pb2.Any) -> None:
        super().__init__(wkt.Any(type_url=detail.type_url, value=detail.value))
        message = GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(detail.TypeName()))()
        detail.Unpack(message)
        self._readable = protobuf.message_from_json_value(wkt.Struct, MessageToDict(message))

    def value(self, *_: object) -> protobuf.Message:  # type: ignore[override]  # ConnectRPC writes JSON only of its own messages
        """The message as a JSON object."""
        return self._readable


def connect_error_of(status: status_pb2.Status) -> ConnectError:
    """The error of a status."""
    return ConnectError(_CODES.get(status.code, Code.UNKNOWN), status.message, map(_ReadableDetail, status.details))


def connect_error(error: BaseException) -> ConnectError:
    """The error of an exception; a defect is logged, and its text stays here."""
    return connect_error_of(status_of_any(error))


def set_error_headers(error: ConnectError, headers: Headers) -> None:
    """Sets what HTTP clients know: Retry-After, in whole seconds, and WWW-Authenticate."""
    for each in error.details:
        if each.type_name == _RETRY_INFO:
            delay = error_details_pb2.RetryInfo.FromString(each.message_bytes).retry_delay
            headers["retry-after"] = str(math.ceil(delay.ToTimedelta().total_seconds()))
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
