"""Clients that open many streams, or open them and send little: others are served, and nothing remains afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, serve_tests, started
from tests.support.metrics import scrape_metrics
from tests.support.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    frame,
    raw,
    request,
)
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

HASTE = {"opening_max_s": 1.0, "connection_idle_max_s": 1.0}
PATIENCE_S = 60.0
OBSERVE = "/memstream.v1.StreamService/Observe"
HELLO = PREFACE + frame(SETTINGS)


@pytest.fixture(scope="module")
def metrics() -> str:
    """Address of the metrics of the server `hasty`."""
    return free_address()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, metrics: str) -> Iterator[ServerProcess]:
    with serve_tests(tmp_path_factory, **HASTE, metrics_listen=metrics) as server:
        yield server


async def served(client: memstream.Client, path: str) -> None:
    """Whether another client is served: a memory, an observation, a recall."""
    memory = await client.create_memory(path, exist_ok=True)
    await memory.observe_batch(["the code is 4711"])
    assert (await memory.recall_once("code"))[0].fragment.content == "the code is 4711"


async def streams_open(metrics: str) -> float:
    seen = await asyncio.to_thread(scrape_metrics, metrics)
    return sum(value for name, value in seen.items() if name.startswith("memstream_streams{"))


@pytest.mark.parametrize(
    "sent",
    [b"", PREFACE[:9], PREFACE, HELLO[:-3]],
    ids=["nothing", "half a preface", "no settings", "half of the settings"],
)
async def test_connections_without_handshake_are_closed(hasty: ServerProcess, path: str, sent: bytes) -> None:
    async with AsyncExitStack() as stack, memstream.connect(hasty.address) as client:
        slow = [await stack.enter_async_context(raw(hasty.address)) for _ in range(50)]
        for connection in slow:
            await connection.send(sent)
        await served(client, path)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(connection.wait_for_end() for connection in slow))
        await served(client, path)


@pytest.mark.parametrize(
    "sent",
    [b"", frame(HEADERS, END_HEADERS, 1, request(OBSERVE))[:40], frame(HEADERS, 0, 1, request(OBSERVE)[:40])],
    ids=["nothing more", "half a frame of headers", "half the headers"],
)
async def test_idle_connections_are_closed(hasty: ServerProcess, path: str, sent: bytes) -> None:
    async with AsyncExitStack() as stack, memstream.connect(hasty.address) as client:
        slow = [await stack.enter_async_context(raw(hasty.address)) for _ in range(50)]
        for connection in slow:
            await connection.send(HELLO, sent)
        await served(client, path)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(connection.wait_for_end() for connection in slow))


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x03\xe8" + b"x" * 10], ids=["no message", "half a message"])
async def test_stream_without_first_message_is_ended(
    hasty: ServerProcess, path: str, metrics: str, sent: bytes
) -> None:
    async with raw(hasty.address) as connection, memstream.connect(hasty.address) as client:
        await connection.send(HELLO)
        for stream in range(1, 101, 2):
            await connection.send(frame(HEADERS, END_HEADERS, stream, request(OBSERVE)))
            if sent:
                await connection.send(frame(DATA, 0, stream, sent))
        await served(client, path)
        ended = set()
        async with asyncio.timeout(PATIENCE_S):
            async for kind, flags, stream, _ in connection.frames():
                if kind == HEADERS and flags & END_STREAM:
                    ended.add(stream)
                    if len(ended) == 50:
                        break
        assert ended == set(range(1, 101, 2))
        await until(lambda: _none_open(metrics))


async def test_stream_without_opening_gets_a_reason(hasty: ServerProcess) -> None:
    async with grpc.aio.insecure_channel(hasty.address) as channel:
        stub = StreamServiceStub(channel)
        for call in (stub.Observe(), stub.Recall()):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "first message" in (raised.value.details() or "")


async def test_opened_stream_outlives_the_opening_limit(hasty: ServerProcess, path: str) -> None:
    async with memstream.connect(hasty.address) as client:
        memory = await client.create_memory(path)
        async with memory.observe("p") as stream, memory.recall() as recall:
            await stream.send("the code is 4711")
            await stream.flush()
            await asyncio.sleep(3 * HASTE["opening_max_s"])
            assert (await recall.query("code"))[0].fragment.content == "the code is 4711"
            await stream.send("and 4712")
            await stream.flush()
            assert (stream.received, stream.stored) == (2, 2)


async def test_stream_flood_leaves_calls_and_recovers(make_server: MakeServer) -> None:
    metrics = free_address()
    server = await started(make_server(streams_max=50, metrics_listen=metrics))
    async with memstream.connect(server.address) as client:
        await served(client, "others/joy")
        async with grpc.aio.insecure_channel(server.address) as channel:
            results = await asyncio.gather(*(_opened(channel) for _ in range(2_000)))
            assert results.count("OPEN") == 50
            # The others were refused: by the server; by HTTP/2 before the client knew the connection's limit; or, if
            # the client wrote its message after the refusal, with what it sees as a defect or its own error.
            assert set(results) <= {"OPEN", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "CANCELLED"}
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await StreamServiceStub(channel).Recall().read()  # waits for the response, writes nothing
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "50 streams are open" in (raised.value.details() or "")
            await served(client, "others/joy")
            assert await streams_open(metrics) == 50
        await until(lambda: _none_open(metrics))
        memory = client.memory("others/joy")
        async with memory.recall() as recall:
            assert len(await recall.query("code")) > 0


async def test_connection_that_floods_pings_is_closed(shared: ServerProcess, path: str) -> None:
    async with raw(shared.address) as connection, memstream.connect(shared.address) as client:
        await connection.send(HELLO)
        await connection.send(*(frame(PING, payload=number.to_bytes(8)) for number in range(100)))
        async with asyncio.timeout(PATIENCE_S):
            kinds = [kind async for kind, _, _, _ in connection.frames()]
        assert GOAWAY in kinds
        await served(client, path)


async def test_oversized_headers_and_messages_fail_alone(make_server: MakeServer) -> None:
    server = await started(make_server(message_max_bytes=131_072))
    async with memstream.connect(server.address) as client, grpc.aio.insecure_channel(server.address) as channel:
        await served(client, "others/joy")
        stub = StreamServiceStub(channel)
        asked = pb.RecallOnceRequest(namespace="others", memory="joy", query=pb.RecallQuery(text="code"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.RecallOnce(asked, metadata=(("x-padding", "x" * 100_000),))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for size, code in ((200_000, grpc.StatusCode.INVALID_ARGUMENT), (2 << 20, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            large = pb.RecallOnceRequest(namespace="others", memory="joy", query=pb.RecallQuery(text="x" * size))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.RecallOnce(large)
            assert raised.value.code() is code
            told = "INVALID_FIELD" in str(raised.value.trailing_metadata())
            assert told == (code is grpc.StatusCode.INVALID_ARGUMENT)
        assert len((await stub.RecallOnce(asked)).recollections.recollections) > 0


@pytest.mark.parametrize("levels", [150, 60_000])
async def test_messages_nested_too_deep_are_no_messages(shared: ServerProcess, path: str, levels: int) -> None:
    """Groups within groups, as bytes: no message of the contract contains itself, but a parser follows these."""
    async with memstream.connect(shared.address) as client, grpc.aio.insecure_channel(shared.address) as channel:
        await served(client, path)
        call = channel.unary_unary("/memstream.v1.StreamService/ObserveBatch")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"\x7b" * levels + b"\x7c" * levels)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "not a message" in (raised.value.details() or "")
        await served(client, path)


async def _opened(channel: grpc.aio.Channel) -> str:
    """OPEN, or the final status of the stream."""

    async def requests() -> AsyncIterator[pb.RecallRequest]:
        yield pb.RecallRequest(open=pb.RecallOpen(namespace="others", memory="joy"))
        await asyncio.Event().wait()

    call = StreamServiceStub(channel).Recall(requests())
    try:
        first = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OPEN" if first else (await call.code()).name


async def _none_open(metrics: str) -> bool:
    return await streams_open(metrics) == 0
