"""Bodies of requests and responses: binary protobuf and protobuf's JSON.

Rule 1. A request body becomes the bytes of its message, which the request reader bounds and parses like a gRPC message.
Rule 2. JSON is parsed here, so its size and number of elements are bounded first. An unknown field is an error: a
misspelt one would otherwise be dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from memstream_server.engine.errors import InvalidField
from memstream_server.rpc.http.errors import connect_error
from memstream_server.rpc.request_reader import RequestReader

JSON_BYTES_FACTOR = 4
"""A JSON body may have this many times the bytes of the largest message: escapes, base64 and digits are longer."""
_DEPTH_MAX = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """A response message of a class, or its bytes."""

    kind: type[Message]
    message: Message | bytes

    def serialize(self) -> bytes:
        """The binary form."""
        return self.message if isinstance(self.message, bytes) else self.message.SerializeToString()

    def parse(self) -> Message:
        """The message."""
        return self.kind.FromString(self.message) if isinstance(self.message, bytes) else self.message


class BinaryCodec:
    """Protobuf's binary form."""

    def name(self) -> str:
        """The part of the content type."""
        return "proto"

    def encode(self, reply: Reply) -> bytes:
        """The body of a response."""
        return reply.serialize()

    def decode(self, data: bytes | bytearray, _kind: type[Any]) -> bytes:
        """The bytes of a request message."""
        return bytes(data)


class JsonCodec:
    """Protobuf's JSON form."""

    def __init__(self, reader: RequestReader, paths: dict[type[Any], str]) -> None:
        """`paths`: the rpc of each request class."""
        self._reader = reader
        self._paths = paths

    def name(self) -> str:
        """The part of the content type."""
        return "json"

    def encode(self, reply: Reply) -> bytes:
        """The body of a response."""
        value = json_format.MessageToDict(reply.parse())
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

    def decode(self, data: bytes | bytearray, kind: type[Any]) -> bytes:
        """The bytes of a request message. Raises ConnectError."""
        bounds = self._reader.find_rpc(self._paths[kind])
        try:
            self._check_bounds(data, bounds.bytes_max, bounds.fields_max)
            if not bytes(data).lstrip().startswith(b"{"):
                raise InvalidField(f"the body is not JSON of {kind.DESCRIPTOR.name}: it must be an object")
            message = json_format.Parse(bytes(data), kind(), max_recursion_depth=_DEPTH_MAX)
        except InvalidField as error:
            raise connect_error(error) from None
        except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
            text = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise connect_error(InvalidField(f"the body is not JSON of {kind.DESCRIPTOR.name}: {text}")) from None
        return bytes(message.SerializeToString())

    def _check_bounds(self, data: bytes | bytearray, bytes_max: int, fields_max: int) -> None:
        if len(data) > JSON_BYTES_FACTOR * bytes_max:
            raise InvalidField(
                f"the body has {len(data)} bytes, this rpc takes at most {JSON_BYTES_FACTOR * bytes_max} of JSON"
            )
        if sum(data.count(mark) for mark in (b",", b"[", b"{")) > fields_max:
            raise InvalidField(f"the body has more than {fields_max} elements")
