"""Attacks on a server, each run in a separate process until its standard input ends.

    python -m tests.support.attacks ADDRESS NAME     (a bearer token in MEMSTREAM_ATTACK_TOKEN, none if unset)

Prints "begun", and at the end one line of JSON with the number of calls by status. An attack that has sent everything
keeps its connections open until the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

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
NAMESPACE = "MEMSTREAM_ATTACK_NAMESPACE"
_STREAM = "/memstream.v1.StreamService/"
_MEMORY = "/memstream.v1.MemoryService/"
CANCEL = (8).to_bytes(4)
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
MB = 1 << 20
_came: Counter[str] = Counter()


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of the wire format."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def varint(value: int) -> bytes:
    """A number of the wire format."""
    parts = bytearray()
    while value >= 128:
        parts.append(value % 128 + 128)
        value //= 128
    return bytes([*parts, value])


def namespace() -> str:
    """The namespace of the attacker's own memories."""
    return os.environ.get(NAMESPACE, "attacker")


def named() -> bytes:
    """The first two fields of most requests: namespace and memory."""
    return field(1, namespace().encode()) + field(2, b"m")


# ---- messages that are small to send and large to hold
def empty_observations(size: int) -> bytes:
    """ObserveBatch with nothing but empty observations."""
    return named() + b"\x32\x00" * (size // 2)


def empty_ids(size: int) -> bytes:
    """ForgetFragments by a filter with nothing but empty ids."""
    return named() + field(4, b"\x0a\x00" * (size // 2))


def nested(size: int) -> bytes:
    """Unknown sub-messages, nested as deep as the size allows."""
    inner = b""
    while len(inner) < size // 16:
        inner = field(2, inner)
    return inner


def unknown_fields(size: int) -> bytes:
    """Fields that no message has."""
    return named() + b"\xf8\x7f\x01" * (size // 3)


def unknown_groups(size: int) -> bytes:
    """Begin and end groups that no message has."""
    return named() + b"\xfb\x7f\xfc\x7f" * (size // 4)


def packed_floats(size: int) -> bytes:
    """One vector that fills the message."""
    return named() + field(4, field(4, bytes(size // 4 * 4)))


def single_floats(size: int) -> bytes:
    """The numbers of a vector, each as its own field."""
    return named() + field(4, b"\x25\0\0\0\0" * (size // 5))


def metadata_entries(size: int) -> bytes:
    """One observation with nothing but metadata entries, all with different keys."""
    entries = b"".join(field(7, field(1, number.to_bytes(3).hex().encode())) for number in range(size // 10))
    return named() + field(6, entries)


def empty_conditions(size: int) -> bytes:
    """A query with nothing but empty conditions."""
    return named() + field(4, field(9, b"\x42\x00" * (size // 2)))


# ---- calls
def channel(address: str) -> grpc.aio.Channel:
    """A separate connection."""
    return grpc.aio.insecure_channel(address, options=[*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])


def headers() -> list[tuple[str, str]]:
    """The credential, if there is one."""
    token = os.environ.get(TOKEN)
    return [("authorization", f"Bearer {token}")] if token else []


async def called(
    open_channel: grpc.aio.Channel, path: str, body: bytes, compression: grpc.Compression | None = None
) -> None:
    """Make one call with one message and count its outcome."""
    call = open_channel.unary_unary(path)(body, metadata=headers(), compression=compression)
    try:
        await call
        _came["OK"] += 1
    except grpc.aio.AioRpcError as error:
        _came[error.code().name] += 1


async def calls_again(
    address: str, path: str, body: bytes, at_once: int, compression: grpc.Compression | None = None
) -> None:
    """Repeat the same call on each connection."""

    async def one() -> None:
        while True:
            async with channel(address) as opened:
                for _ in range(20):
                    await called(opened, path, body, compression)
                    await asyncio.sleep(0.02)

    await asyncio.gather(*(one() for _ in range(at_once)))


def messages(
    make: Callable[[int], bytes], path: str, size: int, at_once: int = 4, compression: grpc.Compression | None = None
) -> Callable[[str], Awaitable[None]]:
    """An attack with such calls."""

    async def attack(address: str) -> None:
        await calls_again(address, path, make(size), at_once, compression)

    return attack


# ---- connections written by hand
async def hello(connection: Raw) -> None:
    """Send the start of an HTTP/2 connection."""
    await connection.send(PREFACE, frame(SETTINGS))


async def drained(connection: Raw) -> None:
    """Read and acknowledge the server's frames, and count the calls that it ends."""
    async for kind, flags, _, payload in connection.frames():
        if kind == SETTINGS and not flags:
            await connection.send(frame(SETTINGS, 1))
        elif kind == PING and not flags:
            await connection.send(frame(PING, 1, 0, payload))
        elif kind == RST_STREAM:
            _came["reset by the server"] += 1
        elif kind == HEADERS and flags & END_STREAM:
            _came["ended by the server"] += 1
    _came["connections closed by the server"] += 1


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Raw]:
    """A connection whose incoming frames are read."""
    async with raw(address) as connection:
        reading = asyncio.create_task(drained(connection))
        try:
            await hello(connection)
            yield connection
        finally:
            reading.cancel()


class Flowing:
    """A connection that sends as much as the server's flow-control windows allow."""

    FRAME = 16_384
    PATIENCE_S = 2.0

    def __init__(self, connection: Raw) -> None:
        self.send = connection.send
        self._connection = connection
        self._windows: Counter[int] = Counter({0: 65_535})
        self._initial = 65_535
        self._moved = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, address: str) -> AsyncIterator[Flowing]:
        async with raw(address) as connection:
            made = cls(connection)
            reading = asyncio.create_task(made._read())
            try:
                await hello(connection)
                yield made
            finally:
                reading.cancel()

    async def flow(self, stream: int, body: bytes) -> None:
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
            _came["bytes"] += size
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
                _came["ended by the server"] += 1
            self._moved.set()


def opening(path: str, stream: int, more: Sequence[tuple[str, str]] = ()) -> bytes:
    """HEADERS of a call."""
    return frame(HEADERS, END_HEADERS, stream, request(path, [*headers(), *more]))


def message(body: bytes) -> bytes:
    """An uncompressed gRPC message."""
    return b"\0" + len(body).to_bytes(4) + body


async def storm(address: str, parts: Callable[[int], bytes], per_s: int) -> None:
    """Send `parts` for stream after stream, at most `per_s` a second; reconnect when the server closes."""
    while True:
        with contextlib.suppress(ConnectionError):
            async with connected(address) as connection:
                for first in range(1, 1 << 30, 200):
                    await connection.send(*(parts(stream) for stream in range(first, first + 200, 2)))
                    _came["sent"] += 100
                    await asyncio.sleep(100 / per_s)
        await asyncio.sleep(0.05)


async def rapid_resets(address: str) -> None:
    """Calls that are reset at once: 4,000 a second over two connections."""

    def parts(stream: int) -> bytes:
        return opening(_STREAM + "RecallOnce", stream) + frame(RST_STREAM, 0, stream, CANCEL)

    await asyncio.gather(*(storm(address, parts, 2_000) for _ in range(2)))


async def cancelled_calls(address: str) -> None:
    """Complete calls that are cancelled at once: 2,700 a second (40,000 in 15 s) over four connections."""
    body = message(named() + field(4, field(2, b"what is my name?")))

    def parts(stream: int) -> bytes:
        whole = opening(_STREAM + "RecallOnce", stream) + frame(DATA, END_STREAM, stream, body)
        return whole + frame(RST_STREAM, 0, stream, CANCEL)

    await asyncio.gather(*(storm(address, parts, 675) for _ in range(4)))


async def bursts(address: str) -> None:
    """250 complete calls at the same moment on each of twelve connections, repeatedly."""
    body = message(named() + field(4, field(2, b"what is my name?")))

    async def one() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                async with connected(address) as connection:
                    for first in range(1, 1 << 30, 500):
                        calls = range(first, first + 500, 2)
                        path = _STREAM + "RecallOnce"
                        await connection.send(
                            *(opening(path, stream) + frame(DATA, END_STREAM, stream, body) for stream in calls)
                        )
                        _came["sent"] += 250
                        await asyncio.sleep(2.0)

    await asyncio.gather(*(one() for _ in range(12)))


async def cancelled_under_way(address: str) -> None:
    """As above with a gRPC client, which cancels each call a few milliseconds after its start."""
    body = named() + field(4, field(2, b"what is my name?"))

    async def one(opened: grpc.aio.Channel) -> None:
        while True:
            call = opened.unary_unary(_STREAM + "RecallOnce")(body, metadata=headers())
            await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=0.005)
            _came["answered" if call.done() else "cancelled"] += 1
            call.cancel()

    async with channel(address) as first, channel(address) as second:
        await asyncio.gather(*(one(opened) for opened in (first, second) for _ in range(50)))


async def half_bodies(address: str) -> None:
    """600 calls with headers and half a message of 1 MB each, never finished, over six connections."""
    half = b"\0" + (1 << 20).to_bytes(4) + b"x" * 16_000
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            connection = await stack.enter_async_context(connected(address))
            for stream in range(1, 201, 2):
                await connection.send(opening(_STREAM + "ObserveBatch", stream), frame(DATA, 0, stream, half))
                _came["sent"] += 1
        await asyncio.Event().wait()


async def half_bodies_that_flow(address: str) -> None:
    """200 streams on two connections, each with all but the last byte of the largest accepted message."""

    async def one() -> None:
        with contextlib.suppress(ConnectionError):
            async with Flowing.connected(address) as connection:
                for stream in range(1, 201, 2):
                    await connection.send(opening(_STREAM + "Observe", stream))
                    body = b"\0" + (4 * MB - 64).to_bytes(4) + bytes(4 * MB - 65)
                    await connection.flow(stream, body)
                    _came["sent"] += 1
                await asyncio.Event().wait()

    await asyncio.gather(one(), one())
    await asyncio.Event().wait()


def compressed(make: Callable[[int], bytes], size: int) -> Callable[[str], Awaitable[None]]:
    """Four connections that repeat a call with one gzip-compressed message."""

    async def one(address: str, body: bytes) -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                async with Flowing.connected(address) as connection:
                    for stream in range(1, 201, 2):
                        await connection.send(opening(_STREAM + "ObserveBatch", stream, [("grpc-encoding", "gzip")]))
                        await connection.flow(stream, b"\1" + len(body).to_bytes(4) + body)
                        await connection.send(frame(DATA, END_STREAM, stream))
                        _came["sent"] += 1
                        await asyncio.sleep(0.05)

    async def attack(address: str) -> None:
        body = gzip.compress(make(size), 9)
        await asyncio.gather(*(one(address, body) for _ in range(4)))

    return attack


async def half_prefaces(address: str) -> None:
    """600 connections that send half of the HTTP/2 preface, and reconnect when closed."""

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError):
                async with raw(address) as connection:
                    _came["connections"] += 1
                    await connection.send(PREFACE[:12])
                    await connection.ended()
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(600)))


async def streams(address: str, path: str, body: bytes, count: int) -> None:
    """Open `count` streams at once and keep them open; reopen each one that ends."""

    async def one(opened: grpc.aio.Channel) -> None:
        while True:
            call = opened.unary_stream(path)(body, metadata=headers())
            _came["opened"] += 1
            try:
                async for _ in call:
                    pass
                _came["OK"] += 1
            except grpc.aio.AioRpcError as error:
                _came[error.code().name] += 1
            await asyncio.sleep(1.0)

    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(channel(address)) for _ in range(8)]
        await asyncio.gather(*(one(opened[number % 8]) for number in range(count)))


async def watches(address: str) -> None:
    """4,300 watches of one tenant."""
    await streams(address, _STREAM + "Watch", named(), 4_300)


async def health_watches(address: str) -> None:
    """4,300 watches of the health service, which needs no credentials."""
    await streams(address, "/grpc.health.v1.Health/Watch", b"", 4_300)


async def large_headers(address: str) -> None:
    """Calls with the longest accepted headers: 500 a second."""
    more = [(f"x-filler-{number}", "v" * 1_000) for number in range(14)]

    def parts(stream: int) -> bytes:
        body = message(named())
        return opening(_STREAM + "RecallOnce", stream, more) + frame(DATA, END_STREAM, stream, body)

    await storm(address, parts, 500)


async def queries(address: str) -> None:
    """A Recall stream with as many queries as possible, whose answers are not read."""
    body = field(2, field(1, b"%d") + field(2, b"what is my name?"))

    async def one(opened: grpc.aio.Channel) -> None:
        while True:
            call = opened.stream_stream(_STREAM + "Recall")(metadata=headers())
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(field(1, named()))
                for number in range(100_000):
                    await call.write(body.replace(b"%d", b"%02d" % (number % 100)))
                    _came["sent"] += 1
            _came[(await call.code()).name] += 1
            await asyncio.sleep(0.1)

    async with channel(address) as opened:
        await asyncio.gather(*(one(opened) for _ in range(8)))


ATTACKS: dict[str, Callable[[str], Awaitable[None]]] = {
    "empty_observations": messages(empty_observations, _STREAM + "ObserveBatch", 4 * MB - 64),
    "empty_observations_16_mb": messages(empty_observations, _STREAM + "ObserveBatch", 16 * MB - 64),
    "empty_observations_gzip": compressed(empty_observations, 16 * MB - 64),
    "gzip_bomb": compressed(bytes, 1_000 * MB),
    "empty_conditions": messages(empty_conditions, _STREAM + "RecallOnce", 256 * 1024 - 64, 64),
    "empty_ids": messages(empty_ids, _MEMORY + "ForgetFragments", 4 * MB - 64),
    "nested": messages(nested, _STREAM + "ObserveBatch", 4 * MB),
    "unknown_fields": messages(unknown_fields, _STREAM + "RecallOnce", 4 * MB - 64),
    "unknown_groups": messages(unknown_groups, _STREAM + "RecallOnce", 4 * MB - 64),
    "packed_floats": messages(packed_floats, _STREAM + "RecallOnce", 4 * MB - 64),
    "single_floats": messages(single_floats, _STREAM + "RecallOnce", 4 * MB - 64),
    "metadata_entries": messages(metadata_entries, _STREAM + "ObserveBatch", 3 * MB),
    "health_message": messages(unknown_fields, "/grpc.health.v1.Health/Check", 4 * MB - 64),
    "rapid_resets": rapid_resets,
    "cancelled_calls": cancelled_calls,
    "bursts": bursts,
    "cancelled_under_way": cancelled_under_way,
    "half_bodies": half_bodies,
    "half_bodies_that_flow": half_bodies_that_flow,
    "half_prefaces": half_prefaces,
    "watches": watches,
    "health_watches": health_watches,
    "large_headers": large_headers,
    "queries": queries,
}


async def main(address: str, name: str) -> None:
    """Run the attack until standard input ends."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    attack = asyncio.ensure_future(ATTACKS[name](address))
    print("begun", flush=True)
    ended = asyncio.create_task(reader.read())
    await asyncio.wait({attack, ended}, return_when=asyncio.FIRST_COMPLETED)
    if attack.done():
        attack.result()
        await ended
    print(json.dumps(_came), flush=True)
    os._exit(0)  # closes all connections


if __name__ == "__main__":
    os.nice(5)
    asyncio.run(main(sys.argv[1], sys.argv[2]))
