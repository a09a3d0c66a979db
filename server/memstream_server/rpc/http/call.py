"""One HTTP request as a gRPC context: what the interceptors and handlers ask of the transport."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Never

import grpc
import grpc.aio
from google.rpc import status_pb2

from memstream_server.engine.errors import InvalidField
from memstream_server.rpc.errors import STATUS_KEY
from memstream_server.rpc.validation import quote_text

_HOP_BY_HOP = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-encoding",
        "content-length",
        "content-type",
        "cookie",
        "host",
        "keep-alive",
        "te",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that describe the HTTP message, or that no handler may see."""
Metadata = tuple[tuple[str, str | bytes], ...]


class HttpCall:
    """A context for one request message. It has the methods of grpc.aio.ServicerContext that the server uses."""

    prepaid = True
    """The bytes of the body are already on the caller's account."""

    def __init__(self, metadata: Metadata, peer: str, remaining_s: float | None, uris: Sequence[bytes] = ()) -> None:
        """`uris`: those of the client certificate."""
        self._metadata = metadata
        self._peer = peer
        self._uris = list(uris)
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._deadline_s = None if remaining_s is None else loop.time() + remaining_s
        self._messages: list[bytes] = []
        self._is_open = False
        self.writer: Callable[[Any], Awaitable[None]] | None = None
        """Takes what is written; set for a stream that event_stream.py makes."""
        self._code: grpc.StatusCode | None = None
        self._trailing: Metadata = ()
        self.initial: Metadata = ()
        self.status: status_pb2.Status | None = None
        """The status that ended the call."""

    def receive(self, *messages: bytes, is_open: bool = False) -> None:
        """Sets the request messages; `is_open`: the client may send more until it disconnects."""
        self._messages, self._is_open = list(messages), is_open

    async def read(self) -> Any:
        """The next request message; after the last one EOF."""
        if self._messages:
            return self._messages.pop(0)
        if self._is_open:
            await asyncio.Event().wait()  # until the call is cancelled
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        """Sends a message beside those that the handler yields."""
        if self.writer is None:
            raise RuntimeError(f"this call over HTTP writes no {type(message).__name__}")
        await self.writer(message)

    def invocation_metadata(self) -> Metadata:
        """The request's headers."""
        return self._metadata

    def peer(self) -> str:
        """The client's address, written as gRPC writes it."""
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        """The URIs of the client certificate, under gRPC's name."""
        return {"peer_uri": self._uris} if self._uris else {}

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._loop.time())

    def cancelled(self) -> bool:
        """False: ConnectRPC cancels the task when the client disconnects."""
        return False

    def code(self) -> grpc.StatusCode | None:
        """The status code, once the call was aborted."""
        return self._code

    async def send_initial_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Sets headers of the response."""
        self.initial = tuple(metadata)

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Sets trailing metadata, which become headers of a unary response."""
        self._trailing = tuple(metadata)

    def trailing_metadata(self) -> Metadata:
        """The trailing metadata set so far."""
        return self._trailing

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        """Ends the call. Raises grpc.aio.AbortError."""
        self._code, self._trailing = code, tuple(trailing_metadata)
        status = status_pb2.Status(code=code.value[0], message=details)
        for key, value in self._trailing:
            if key == STATUS_KEY and isinstance(value, bytes):
                status.ParseFromString(value)
        self.status = status
        raise grpc.aio.AbortError


def metadata_of(headers: Iterable[tuple[str, str]]) -> Metadata:
    """Headers as gRPC metadata; values of names in -bin are base64. Raises InvalidField for a malformed one."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name in _HOP_BY_HOP or name.startswith((":", "connect-")):
            continue
        if not name.endswith("-bin"):
            found.append((name, value))
            continue
        try:
            found.append((name, base64.b64decode(value + "=" * (-len(value) % 4), validate=True)))
        except binascii.Error as error:
            raise InvalidField(f"the header {quote_text(name)} must be base64") from error
    return tuple(found)


def peer_of(client: tuple[str, int] | None) -> str:
    """gRPC's text of a client address; "unix:" without one."""
    if client is None:
        return "unix:"
    host, port = client
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return "unix:"
    return f"ipv6:%5B{host}%5D:{port}" if version == 6 else f"ipv4:{host}:{port}"
