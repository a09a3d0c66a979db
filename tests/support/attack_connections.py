"""Calls and hand-written HTTP/2 connections of attacks, with a count of their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tests.support.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Raw,
    frame,
    raw,
    request,
)

TOKEN = "MEMSTREAM_ATTACK_TOKEN"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
outcomes: Counter[str] = Counter()
"""How the calls of this process ended, by status or label."""


# ---- calls
def open_channel(address: str) -> Any:
    """A separate connection."""
    return grpc.aio.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def auth_headers() -> list[tuple[str, str]]:
    """The credential, if there is one."""
    token = os.environ.get(TOKEN)
    return [("authorization", f"Bearer {token}")] if token else []


async def make_call(opened: Any, path: str, body: bytes, compression: grpc.Compression | None = None) -> None:
    """Make one call with one message and count its outcome."""
    call = opened.unary_unary(path)(body, metadata=auth_headers(), compression=compression)
    try:
        await call
        outcomes["OK"] += 1
    except grpc.aio.AioRpcError as error:
        outcomes[error.code().name] += 1


async def repeat_call(
    address: str, path: str, body: bytes, at_once: int, compression: grpc.Compression | None = None
) -> None:
    """Repeat the same call on each connection."""

    async def one() -> None:
        while True:
            async with open_channel(address) as opened:
                for _ in range(20):
                    await make_call(opened, path, body, compression)
                    await asyncio.sleep(0.02)

    await asyncio.gather(*(one() for _ in range(at_once)))


def attack_with_message(
    make: Callable[[int], bytes], path: str, size: int, at_once: int = 4, compression: grpc.Compression | None = None
) -> Callable[[str], Awaitable[None]]:
    """An attack with such calls."""

    async def attack(address: str) -> None:
        await repeat_call(address, path, make(size), at_once, compression)

    return attack


# ---- connections written by hand
async def start_http2(connection: Raw) -> None:
    """Send the start of an HTTP/2 connection."""
    await connection.send(PREFACE, frame(SETTINGS))


async def acknowledge_frames(connection: Raw) -> None:
    """Read and acknowledge the server's frames, and count the calls that it ends."""
    async for kind, flags, _, payload in connection.frames():
        if kind == SETTINGS and not flags:
            await connection.send(frame(SETTINGS, 1))
        elif kind == PING and not flags:
            await connection.send(frame(PING, 1, 0, payload))
        elif kind == RST_STREAM:
            outcomes["reset by the server"] += 1
        elif kind == HEADERS and flags & END_STREAM:
            outcomes["ended by the server"] += 1
    outcomes["connections closed by the server"] += 1


@contextlib.asynccontextmanager
async def open_connection(address: str) -> AsyncIterator[Raw]:
    """A connection whose incoming frames are read."""
    async with raw(address) as connection:
        reading = asyncio.create_task(acknowledge_frames(connection))
        try:
            await start_http2(connection)
            yield connection
        finally:
            reading.cancel()


class FlowingConnection:
    """A connection that sends as much as the server's flow-control windows allow."""

    FRAME = 16_384
    PATIENCE_S = 2.0

    def __init__(self, connection: Raw) -> None:
        self.send = connection.send
        self._connection = connection
        self._windows: Counter[int] = Counter({0: 65_535})
        self._initial = 65_535
        self._moved = asyncio.Event()
        self._sent: Counter[int] = Counter()
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self.closed = False

    def unfinished_bytes(self) -> int:
        """Bytes sent on streams that the server has not ended."""
        if self.closed:
            return 0
        return sum(size for stream, size in self._sent.items() if stream not in self.ended)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, address: str) -> AsyncIterator[FlowingConnection]:
        async with raw(address) as connection:
            made = cls(connection)
            reading = asyncio.create_task(made._read())
            try:
                await start_http2(connection)
                yield made
            finally:
                reading.cancel()

    async def send_body(self, stream: int, body: bytes) -> None:
        """Send `body` on the stream, as far as the windows allow."""
        at = 0
        while at < len(body):
            size = min(len(body) - at, self._initial + self._windows[stream], self._windows[0], self.FRAME)
            if size <= 0:
                self._moved.clear()
                try:
                    await asyncio.wait_for(self._moved.wait(), self.PATIENCE_S)
                except TimeoutError:
                    return
                continue
            await self.send(frame(DATA, 0, stream, body[at : at + size]))
            at += size
            outcomes["bytes"] += size
            self._sent[stream] += size
            self._windows.subtract({0: size, stream: size})

    async def _read(self) -> None:
        async for kind, flags, stream, payload in self._connection.frames():
            if kind == SETTINGS and not flags:
                for start in range(0, len(payload), 6):
                    if payload[start : start + 2] == b"\0\4":
                        self._initial = int.from_bytes(payload[start + 2 : start + 6])
                await self._connection.send(frame(SETTINGS, 1))
            elif kind == WINDOW_UPDATE:
                self._windows[stream] += int.from_bytes(payload)
            elif kind == PING and not flags:
                await self._connection.send(frame(PING, 1, 0, payload))
            elif kind == HEADERS and flags & END_STREAM:
                outcomes["ended by the server"] += 1
                self.ended.add(stream)
            self._moved.set()
        self.closed = True


def call_headers(path: str, stream: int, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """HEADERS of a call."""
    return frame(HEADERS, END_HEADERS, stream, request(path, [*auth_headers(), *more]))


def grpc_message(body: bytes) -> bytes:
    """An uncompressed gRPC message."""
    return b"\0" + len(body).to_bytes(4) + body


async def send_storm(address: str, parts: Callable[[int], bytes], per_s: int) -> None:
    """Send `parts` for stream after stream, at most `per_s` a second; reconnect when the server closes."""
    while True:
        with contextlib.suppress(ConnectionError):
            async with open_connection(address) as connection:
                for first in range(1, 1 << 30, 200):
                    await connection.send(*(parts(stream) for stream in range(first, first + 200, 2)))
                    outcomes["sent"] += 100
                    await asyncio.sleep(100 / per_s)
        await asyncio.sleep(0.05)
