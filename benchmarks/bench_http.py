"""Calls and server streams over the HTTP port, vs the same over gRPC.

    python benchmarks/bench_http.py [--full | --tiny] [--rounds N] [--json FILE]

One server with both ports and one memory. Rounds alternate between gRPC, Connect with binary messages, and Connect with
JSON; requests are prepared and answers are not parsed, so a figure is that of server and transport. A call's latency
is measured on one connection; its rate and the server's CPU with 8 calls in flight, on one gRPC channel or on 8
keep-alive connections. The stream is Watch from the first revision, which sends the events of one commit per message.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from claims import CPU, Claim, make_claim, run_standalone
from google.protobuf import json_format
from google.protobuf.message import Message
from raw_http import RawHttp
from report import Report, Size, percentile
from served import BenchServer
from texts import SentenceSource

import memstream
from memstream.v1 import event_pb2, memory_service_pb2, stream_service_pb2

HELD = {Size.TINY: 20, Size.SHORT: 500, Size.FULL: 2_000}
"""Commits, of one observation each, in the memory at the start."""
CALLS = {Size.TINY: 10, Size.SHORT: 400, Size.FULL: 2_000}
"""Calls of each measurement."""
STREAMS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 10}
"""Whole streams of each measurement."""
ROUNDS = {Size.TINY: 1, Size.SHORT: 5, Size.FULL: 9}
IN_FLIGHT = 8
GRPC, PROTO, JSON = "gRPC", "Connect, binary", "Connect, JSON"
TRANSPORTS = (GRPC, PROTO, JSON)
STREAM = "Watch"
COLUMNS = ("p50 ms", "p99 ms", "calls/s", "messages/s", CPU)
_SERVICE = "/memstream.v1."


@dataclass(frozen=True, slots=True)
class Request:
    """A prepared request."""

    path: str
    message: Message

    def encode(self, transport: str) -> bytes:
        """The request's body."""
        if transport == JSON:
            return json_format.MessageToJson(self.message).encode()
        return self.message.SerializeToString()


def unary_requests(memory: memstream.Memory, question: str) -> dict[str, Request]:
    """The calls that are measured: the cheapest one, and one that does work."""
    namespace, name = memory.namespace, memory.name
    query = stream_service_pb2.RecallQuery(text=question, limit=5, reinforce=False)
    return {
        "GetMemory": Request(
            f"{_SERVICE}MemoryService/GetMemory",
            memory_service_pb2.GetMemoryRequest(namespace=namespace, memory=name),
        ),
        "RecallOnce": Request(
            f"{_SERVICE}StreamService/RecallOnce",
            stream_service_pb2.RecallOnceRequest(namespace=namespace, memory=name, query=query),
        ),
    }


def free_address() -> str:
    """A loopback address whose port is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
    return f"{host}:{port}"


Call = Callable[[bytes], Awaitable[bytes]]
Stream = Callable[[bytes], AsyncIterator[bytes]]


class Transport:
    """Connections of one transport; the rpcs take and give bytes."""

    def __init__(self, name: str, grpc_address: str, http_address: str) -> None:
        self.name = name
        self._codec = "json" if name == JSON else "proto"
        self._addresses = grpc_address, http_address
        self._stack = AsyncExitStack()
        self._channel: Any = None
        self._connections: list[RawHttp] = []

    async def __aenter__(self) -> Transport:
        if self.name == GRPC:
            self._channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(self._addresses[0]))
        else:
            opened = [RawHttp(self._addresses[1]) for _ in range(IN_FLIGHT)]
            self._connections = [await self._stack.enter_async_context(each) for each in opened]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    def call(self, path: str, place: int) -> Call:
        """A unary rpc on the connection of a place."""
        if self._channel is not None:
            made: Call = self._channel.unary_unary(path)
            return made
        content_type = f"application/{self._codec}"
        return lambda body: self._connections[place].call(path, content_type, body)

    def stream(self, path: str) -> Stream:
        """A server stream."""
        if self._channel is not None:
            made: Stream = self._channel.unary_stream(path)
            return made
        return lambda body: self._stream_alone(path, body)

    async def _stream_alone(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """A connection of its own, which cannot be used again when a stream is left."""
        async with RawHttp(self._addresses[1]) as connection:
            async for message in connection.stream(path, self._codec, body):
                yield message


class HttpBench:
    """The measurements, on one server."""

    def __init__(self, server: BenchServer, size: Size) -> None:
        self._server = server
        self._size = size

    async def measure_calls(self, report: Report, transport: Transport, name: str, request: Request) -> None:
        """Latency on one connection, then rate and CPU with all."""
        body, count = request.encode(transport.name), CALLS[self._size]
        one, seconds = transport.call(request.path, 0), []
        for place in range(IN_FLIGHT):
            await transport.call(request.path, place)(body)
        for _ in range(count):
            began = time.perf_counter()
            await one(body)
            seconds.append(time.perf_counter() - began)

        async def repeat(place: int) -> None:
            call = transport.call(request.path, place)
            for _ in range(count // IN_FLIGHT + 1):
                await call(body)

        before, began = self._server.cpu_used(), time.perf_counter()
        await asyncio.gather(*(repeat(place) for place in range(IN_FLIGHT)))
        took, calls = time.perf_counter() - began, (count // IN_FLIGHT + 1) * IN_FLIGHT
        report.add_round(
            f"{name}, {transport.name}",
            **{
                "p50 ms": percentile(seconds, 0.5) * 1e3,
                "p99 ms": percentile(seconds, 0.99) * 1e3,
                "calls/s": calls / took,
                CPU: self._server.cpu_used().since(before).server / calls * 1e6,
            },
        )

    async def measure_stream(self, report: Report, transport: Transport, request: Request) -> None:
        """Messages of a stream until the last revision, and CPU per message."""
        body, wanted, streams = request.encode(transport.name), HELD[self._size], STREAMS[self._size]
        open_stream = transport.stream(request.path)
        before, began = self._server.cpu_used(), time.perf_counter()
        for _ in range(streams):
            call = open_stream(body)
            messages = aiter(call)
            for _ in range(wanted):
                await anext(messages)
            await end_stream(call)
        took = time.perf_counter() - began
        report.add_round(
            f"{STREAM}, {transport.name}",
            **{
                "messages/s": wanted * streams / took,
                CPU: self._server.cpu_used().since(before).server / wanted / streams * 1e6,
            },
        )


async def end_stream(call: Any) -> None:
    """Ends a stream of either kind."""
    if isinstance(call, grpc.aio.Call):
        call.cancel()
    else:
        await call.aclose()


async def measure_rounds(report: Report, size: Size, rounds: int) -> None:
    """All transports, interleaved."""
    http = free_address()
    with tempfile.TemporaryDirectory() as folder, BenchServer(Path(folder) / "data", http_listen=http) as server:
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("http/probed")
            talk = SentenceSource()
            sentences = [talk.make_sentence() for _ in range(HELD[size])]
            for sentence in sentences:
                await memory.observe_batch([sentence])
            found = await memory.describe()
        bench, calls = HttpBench(server, size), unary_requests(memory, talk.draw_question(sentences[0]))
        cursor = event_pb2.Cursor(memory_uid=found.uid, revision=1)
        watch = stream_service_pb2.WatchRequest(namespace=memory.namespace, memory=memory.name, cursor=cursor)
        stream = Request(f"{_SERVICE}StreamService/Watch", watch)
        for _ in range(rounds):
            for kind in TRANSPORTS:
                async with Transport(kind, server.address, http) as transport:
                    for name, request in calls.items():
                        await bench.measure_calls(report, transport, name, request)
                    await bench.measure_stream(report, transport, stream)


def run_benchmark(size: Size, rounds: int | None = None) -> Report:
    """Measure all rounds."""
    report = Report(COLUMNS)
    asyncio.run(measure_rounds(report, size, rounds or ROUNDS[size]))
    return report


def make_claims(report: Report) -> list[Claim]:
    """Claims about the HTTP port."""
    return [
        make_claim(report, f"{name} over {transport}: {what}", f"{name}, {transport}", column, f"{name}, {GRPC}")
        for transport in (PROTO, JSON)
        for name, measured in (
            ("GetMemory", (("calls with 8 in flight", "calls/s"), ("latency, p50", "p50 ms"))),
            ("RecallOnce", (("calls with 8 in flight", "calls/s"), ("latency, p50", "p50 ms"))),
            (STREAM, (("messages", "messages/s"),)),
        )
        for what, column in measured
    ]


if __name__ == "__main__":
    run_standalone(__doc__, run_benchmark, make_claims)
