"""A keep-alive HTTP/1.1 connection that costs little: the benchmarks measure the server, not a client library."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

END = 0b10
"""The flag of the last envelope of a Connect stream."""


class RawHttp:
    """One connection to `address`; one request at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._writer is not None
        self._writer.close()

    async def call(self, path: str, content_type: str, body: bytes) -> bytes:
        """The body of the answer. Raises RuntimeError if the status is not 200."""
        return b"".join([each async for each in self._answer(path, content_type, body)])

    async def stream(self, path: str, codec: str, body: bytes) -> AsyncIterator[bytes]:
        """The messages of a Connect stream. Raises RuntimeError if it ends with an error."""
        envelope, rest = struct.pack(">BI", 0, len(body)) + body, b""
        async for chunk in self._answer(path, f"application/connect+{codec}", envelope):
            rest += chunk
            at = 0
            while len(rest) - at >= 5:
                flag, size = struct.unpack_from(">BI", rest, at)
                if len(rest) - at < 5 + size:
                    break
                message, at = rest[at + 5 : at + 5 + size], at + 5 + size
                if not flag & END:
                    yield message
                elif b'"error"' in message:
                    raise RuntimeError(message.decode())
            rest = rest[at:]

    async def _answer(self, path: str, content_type: str, body: bytes) -> AsyncIterator[bytes]:
        assert self._reader is not None
        assert self._writer is not None
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines[1:] if line)
        if b" 200 " not in lines[0] + b" ":
            raise RuntimeError(lines[0].decode())
        if b"content-length" in headers:
            yield await self._reader.readexactly(int(headers[b"content-length"]))
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
