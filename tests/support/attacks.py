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
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from tests.support.attack_connections import (
    OPTIONS as OPTIONS,  # for tests
)
from tests.support.attack_connections import (
    FlowingConnection,
    attack_with_message,
    auth_headers,
    call_headers,
    grpc_message,
    open_channel,
    open_connection,
    outcomes,
    send_storm,
)
from tests.support.attack_messages import (
    empty_conditions,
    empty_ids,
    empty_observations,
    encode_field,
    memory_fields,
    metadata_entries,
    nest_messages,
    packed_floats,
    single_floats,
    unknown_fields,
    unknown_groups,
)
from tests.support.raw_http2 import DATA, END_STREAM, PREFACE, RST_STREAM, frame, raw
from tests.support.waiting import until

_STREAM = "/memstream.v1.StreamService/"
_MEMORY = "/memstream.v1.MemoryService/"
CANCEL = (8).to_bytes(4)
MB = 1 << 20


async def rapid_resets(address: str) -> None:
    """Calls that are reset at once: 4,000 a second over two connections."""

    def parts(stream: int) -> bytes:
        return call_headers(_STREAM + "RecallOnce", stream) + frame(RST_STREAM, 0, stream, CANCEL)

    await asyncio.gather(*(send_storm(address, parts, 2_000) for _ in range(2)))


async def cancelled_calls(address: str) -> None:
    """Complete calls that are cancelled at once: 2,700 a second (40,000 in 15 s) over four connections."""
    body = grpc_message(memory_fields() + encode_field(4, encode_field(2, b"what is my name?")))

    def parts(stream: int) -> bytes:
        whole = call_headers(_STREAM + "RecallOnce", stream) + frame(DATA, END_STREAM, stream, body)
        return whole + frame(RST_STREAM, 0, stream, CANCEL)

    await asyncio.gather(*(send_storm(address, parts, 675) for _ in range(4)))


async def send_bursts(address: str) -> None:
    """250 complete calls at the same moment on each of twelve connections, repeatedly once all have ended."""
    body = grpc_message(memory_fields() + encode_field(4, encode_field(2, b"what is my name?")))

    async def one() -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                async with open_connection(address) as connection:
                    for first in range(1, 1 << 30, 500):
                        calls = range(first, first + 500, 2)
                        path = _STREAM + "RecallOnce"
                        await connection.send(
                            *(call_headers(path, stream) + frame(DATA, END_STREAM, stream, body) for stream in calls)
                        )
                        outcomes["sent"] += 250
                        await asyncio.sleep(2.0)
                        await _all_ended()

    await asyncio.gather(*(one() for _ in range(12)))


async def _all_ended() -> None:
    """Wait until the server has ended the calls, or for 30 s: on a busy machine bursts must not pile up for ever."""

    async def ended() -> bool:
        return outcomes["ended by the server"] + outcomes["reset by the server"] >= outcomes["sent"]

    with contextlib.suppress(TimeoutError):
        await until(ended, deadline_s=30)


async def cancelled_under_way(address: str) -> None:
    """As above with a gRPC client, which cancels each call a few milliseconds after its start."""
    body = memory_fields() + encode_field(4, encode_field(2, b"what is my name?"))

    async def one(opened: Any) -> None:
        while True:
            call = opened.unary_unary(_STREAM + "RecallOnce")(body, metadata=auth_headers())
            await asyncio.wait({asyncio.ensure_future(call.code())}, timeout=0.005)
            outcomes["answered" if call.done() else "cancelled"] += 1
            call.cancel()

    async with open_channel(address) as first, open_channel(address) as second:
        await asyncio.gather(*(one(opened) for opened in (first, second) for _ in range(50)))


async def half_bodies(address: str) -> None:
    """600 calls with headers and half a message of 1 MB each, never finished, over six connections."""
    half = b"\0" + (1 << 20).to_bytes(4) + b"x" * 16_000
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(6):
            connection = await stack.enter_async_context(open_connection(address))
            for stream in range(1, 201, 2):
                await connection.send(call_headers(_STREAM + "ObserveBatch", stream), frame(DATA, 0, stream, half))
                outcomes["sent"] += 1
        await asyncio.Event().wait()


async def half_bodies_that_flow(address: str) -> None:
    """200 streams on two connections, each with all but the last byte of the largest accepted message."""

    async def one() -> None:
        with contextlib.suppress(ConnectionError):
            async with FlowingConnection.open(address) as connection:
                for stream in range(1, 201, 2):
                    await connection.send(call_headers(_STREAM + "Observe", stream))
                    body = b"\0" + (4 * MB - 64).to_bytes(4) + bytes(4 * MB - 65)
                    await connection.send_body(stream, body)
                    outcomes["sent"] += 1
                await asyncio.Event().wait()

    await asyncio.gather(one(), one())
    await asyncio.Event().wait()


def attack_with_gzip(make: Callable[[int], bytes], size: int) -> Callable[[str], Awaitable[None]]:
    """Four connections that repeat a call with one gzip-compressed message."""

    async def one(address: str, body: bytes) -> None:
        while True:
            with contextlib.suppress(ConnectionError):
                async with FlowingConnection.open(address) as connection:
                    for stream in range(1, 201, 2):
                        await connection.send(
                            call_headers(_STREAM + "ObserveBatch", stream, [("grpc-encoding", "gzip")])
                        )
                        await connection.send_body(stream, b"\1" + len(body).to_bytes(4) + body)
                        await connection.send(frame(DATA, END_STREAM, stream))
                        outcomes["sent"] += 1
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
                    outcomes["connections"] += 1
                    await connection.send(PREFACE[:12])
                    await connection.wait_for_end()
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one() for _ in range(600)))


async def keep_streams_open(address: str, path: str, body: bytes, count: int) -> None:
    """Open `count` streams at once and keep them open; reopen each one that ends."""

    async def one(opened: Any) -> None:
        while True:
            call = opened.unary_stream(path)(body, metadata=auth_headers())
            outcomes["opened"] += 1
            try:
                async for _ in call:
                    pass
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1
            await asyncio.sleep(1.0)

    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(open_channel(address)) for _ in range(8)]
        await asyncio.gather(*(one(opened[number % 8]) for number in range(count)))


async def open_watches(address: str) -> None:
    """4,300 watches of one tenant."""
    await keep_streams_open(address, _STREAM + "Watch", memory_fields(), 4_300)


async def health_watches(address: str) -> None:
    """4,300 watches of the health service, which needs no credentials."""
    await keep_streams_open(address, "/grpc.health.v1.Health/Watch", b"", 4_300)


async def large_headers(address: str) -> None:
    """Calls with the longest accepted headers: 500 a second."""
    more = [(f"x-filler-{number}", "v" * 1_000) for number in range(14)]

    def parts(stream: int) -> bytes:
        body = grpc_message(memory_fields())
        return call_headers(_STREAM + "RecallOnce", stream, more) + frame(DATA, END_STREAM, stream, body)

    await send_storm(address, parts, 500)


async def send_queries(address: str) -> None:
    """A Recall stream with as many queries as possible, whose answers are not read."""
    body = encode_field(2, encode_field(1, b"%d") + encode_field(2, b"what is my name?"))

    async def one(opened: Any) -> None:
        while True:
            call = opened.stream_stream(_STREAM + "Recall")(metadata=auth_headers())
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(encode_field(1, memory_fields()))
                for number in range(100_000):
                    await call.write(body.replace(b"%d", b"%02d" % (number % 100)))
                    outcomes["sent"] += 1
            outcomes[(await call.code()).name] += 1
            await asyncio.sleep(0.1)

    async with open_channel(address) as opened:
        await asyncio.gather(*(one(opened) for _ in range(8)))


ATTACKS: dict[str, Callable[[str], Awaitable[None]]] = {
    "empty_observations": attack_with_message(empty_observations, _STREAM + "ObserveBatch", 4 * MB - 64),
    "empty_observations_16_mb": attack_with_message(empty_observations, _STREAM + "ObserveBatch", 16 * MB - 64),
    "empty_observations_gzip": attack_with_gzip(empty_observations, 16 * MB - 64),
    "gzip_bomb": attack_with_gzip(bytes, 1_000 * MB),
    "empty_conditions": attack_with_message(empty_conditions, _STREAM + "RecallOnce", 256 * 1024 - 64, 64),
    "empty_ids": attack_with_message(empty_ids, _MEMORY + "ForgetFragments", 4 * MB - 64),
    "nested": attack_with_message(nest_messages, _STREAM + "ObserveBatch", 4 * MB),
    "unknown_fields": attack_with_message(unknown_fields, _STREAM + "RecallOnce", 4 * MB - 64),
    "unknown_groups": attack_with_message(unknown_groups, _STREAM + "RecallOnce", 4 * MB - 64),
    "packed_floats": attack_with_message(packed_floats, _STREAM + "RecallOnce", 4 * MB - 64),
    "single_floats": attack_with_message(single_floats, _STREAM + "RecallOnce", 4 * MB - 64),
    "metadata_entries": attack_with_message(metadata_entries, _STREAM + "ObserveBatch", 3 * MB),
    "health_message": attack_with_message(unknown_fields, "/grpc.health.v1.Health/Check", 4 * MB - 64),
    "rapid_resets": rapid_resets,
    "cancelled_calls": cancelled_calls,
    "bursts": send_bursts,
    "cancelled_under_way": cancelled_under_way,
    "half_bodies": half_bodies,
    "half_bodies_that_flow": half_bodies_that_flow,
    "half_prefaces": half_prefaces,
    "watches": open_watches,
    "health_watches": health_watches,
    "large_headers": large_headers,
    "queries": send_queries,
}


_FIRST_CALL_S = 60


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
    for _ in range(_FIRST_CALL_S):
        if not outcomes:  # on a busy machine the first call may not have ended yet
            await asyncio.sleep(1.0)
    print(json.dumps(outcomes), flush=True)
    os._exit(0)  # closes all connections


def run() -> None:
    """Run the attack whose address and name are in `sys.argv`."""
    os.nice(5)
    asyncio.run(main(sys.argv[1], sys.argv[2]))


if __name__ == "__main__":
    run()
