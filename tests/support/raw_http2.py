"""Hand-written HTTP/2 frames, for traffic that no client library would send."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def request(path: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    """The header block of a gRPC call, every header as a literal."""
    headers = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    )
    return b"".join(b"\0" + _encode_text(name) + _encode_text(value) for name, value in headers)


def _encode_text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, bytearray([127])
    while rest >= 128:
        length.append(rest % 128 + 128)
        rest //= 128
    return bytes(length) + bytes([rest]) + data


class Raw:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *parts: bytes) -> None:
        self._writer.write(b"".join(parts))
        await self._writer.drain()

    async def frames(self) -> AsyncIterator[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) of each received frame until the server closes the connection."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                length = int.from_bytes(head[:3])
                payload = await self._reader.readexactly(length)
                yield head[3], head[4], int.from_bytes(head[5:]), payload
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def wait_for_end(self) -> None:
        """Wait until the server closes the connection."""
        async for _ in self.frames():
            pass

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def raw(address: str) -> AsyncIterator[Raw]:
    """Connect to host:port without sending anything."""
    host, _, port = address.rpartition(":")
    connection = Raw(*await asyncio.open_connection(host, int(port)))
    try:
        yield connection
    finally:
        connection.close()
