"""Attacks without a credential, and by a tenant: memory stays bounded, and other tenants' calls succeed.

MEMSTREAM_ATTACK_S sets a longer duration of each attack (`make fuzz`).
"""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import pytest

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.fragment_pb2 import FragmentFilter, Observation
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.access.conftest import Guarded, guarded_files
from tests.server.conftest import QUICK, MakeServer, check_log, started
from tests.support import attack_connections
from tests.support.attacking import Seen, attack_during
from tests.support.processes import paused
from tests.support.raw_http2 import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame, raw, request
from tests.support.seeds import THOROUGH, rounds
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.drawn

PATIENCE_S = 60.0
MB = 1 << 20
ATTACK_S = float(os.environ.get("MEMSTREAM_ATTACK_S", "1.5" if THOROUGH else "0.3"))
GROWTH_MAX_BYTES = 128 * MB
"""Twice the measured growth: the measurement includes the whole process, not just the attack."""
RECALL = "/memstream.v1.StreamService/RecallOnce"
CHECK = "/grpc.health.v1.Health/Check"
HELLO = PREFACE + frame(SETTINGS)
ANYONE = (
    "empty_observations",
    "empty_observations_16_mb",
    "empty_observations_gzip",
    "health_message",
    "rapid_resets",
    "cancelled_calls",
    "bursts",
    "half_bodies",
    "half_bodies_that_flow",
    "half_prefaces",
    "large_headers",
)
TENANT = (
    "empty_observations",
    "empty_observations_gzip",
    "empty_conditions",
    "empty_ids",
    "nested",
    "unknown_groups",
    "single_floats",
    "metadata_entries",
    "rapid_resets",
    "cancelled_calls",
    "cancelled_under_way",
    "half_bodies",
    "watches",
    "queries",
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A server with its default limits."""
    directory = tmp_path_factory.mktemp("attacked")
    keys_file, policy_file, made = guarded_files(directory / "access")
    settings = {**QUICK, "api_keys_file": str(keys_file), "access_policy_file": str(policy_file)}
    with ServerProcess(directory / "data").configure(**settings) as server:
        yield Guarded(server, keys_file, policy_file, made)
    check_log(server)


@pytest.fixture
async def memory(attacked: Guarded) -> AsyncIterator[memstream.Memory]:
    """A memory of an honest tenant."""
    async with memstream.connect(attacked.server.address, token=attacked.keys["bob"]) as client:
        yield await client.create_memory("b/joy", exist_ok=True)


@pytest.mark.parametrize(("name", "by"), [*((name, "") for name in ANYONE), *((name, "alice") for name in TENANT)])
async def test_attack_is_survived(attacked: Guarded, memory: memstream.Memory, name: str, by: str) -> None:
    server = attacked.server
    async with memstream.connect(server.address, token=attacked.keys["alice"]) as client:
        await client.create_memory("a/m", exist_ok=True)
    token = attacked.keys[by] if by else ""
    async with attack_during(server.address, server.pid, name, memory, token, "a") as seen:
        await asyncio.sleep(ATTACK_S)
        await until(lambda: _answered(seen, 10))
    assert seen.failures == []
    assert seen.peak_bytes - seen.before_bytes < GROWTH_MAX_BYTES
    assert seen.came.total() > 0


async def _answered(seen: Seen, count: int) -> bool:
    return seen.answered >= count


async def test_unauthenticated_body_is_never_awaited(attacked: Guarded) -> None:
    for more in ([], [("authorization", "Bearer ms_wrong")]):
        async with raw(attacked.server.address) as connection, asyncio.timeout(PATIENCE_S):
            await connection.send(HELLO, frame(HEADERS, END_HEADERS, 1, request(RECALL, more)))
            async for kind, flags, stream, _ in connection.frames():
                if kind == HEADERS and flags & END_STREAM:
                    assert stream == 1
                    break
            else:
                pytest.fail("the connection was closed without an answer")


async def test_gzip_messages_are_taken(attacked: Guarded, memory: memstream.Memory) -> None:
    asked = pb.RecallOnceRequest(namespace="b", memory="joy", query=pb.RecallQuery(text="code " * 5_000))
    async with grpc.aio.insecure_channel(attacked.server.address) as channel:
        stub, metadata = StreamServiceStub(channel), _headers(attacked, "bob")
        observed = pb.ObserveBatchRequest(
            namespace="b", memory="joy", observations=[Observation(content=f"{n} {'x' * 900}") for n in range(300)]
        )
        await stub.ObserveBatch(observed, metadata=metadata, compression=grpc.Compression.Gzip)
        found = await stub.RecallOnce(asked, metadata=metadata, compression=grpc.Compression.Gzip)
        assert found.recollections.recollections
        open_stream = stub.Recall(metadata=metadata, compression=grpc.Compression.Gzip)
        await open_stream.write(pb.RecallRequest(open=pb.RecallOpen(namespace="b", memory="joy")))
        await open_stream.write(pb.RecallRequest(query=pb.RecallQuery(query_id="q", text="code " * 5_000)))
        await open_stream.read()
        answer: Any = await open_stream.read()
        assert answer.WhichOneof("message") == "recollections"
        open_stream.cancel()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gzip.compress(bytes(rounds(300, 64) * MB)), "more than 4194304 bytes once it is decompressed"),
        (lambda: gzip.compress(b"\x32\0" * 1_000_000), "more than 131072 fields"),
        (lambda: gzip.compress(b"x" * 1_000)[:-9], "are cut"),
        (lambda: gzip.compress(b"") + gzip.compress(b""), "more follows"),
        (lambda: b"\x1f\x8bnot gzip at all", "cannot be decompressed"),
        (lambda: b"\x32\0" * 1_000_000, "more than 131072 fields"),
        (lambda: b"\x08\1" * 140_000, "more than 131072 fields"),
        (lambda: b"\x32\xff\xff\xff\xff\x7f" + b"\0" * 300_000, "not a message"),
    ],
    ids=["bomb", "small but many", "cut", "two members", "no gzip", "many messages", "many numbers", "no message"],
)
async def test_hostile_body_is_refused(attacked: Guarded, make: Callable[[], bytes], said: str) -> None:
    async with attack_connections.open_channel(attacked.server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/memstream.v1.StreamService/ObserveBatch")(
                make(), metadata=_headers(attacked, "alice")
            )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (raised.value.details() or "")


async def test_small_rpc_takes_small_messages_only(attacked: Guarded) -> None:
    async with memstream.connect(attacked.server.address, token=attacked.keys["alice"]) as client:
        await client.create_memory("a/m", exist_ok=True)
    async with grpc.aio.insecure_channel(attacked.server.address) as channel:
        stub, metadata = StreamServiceStub(channel), _headers(attacked, "alice")
        for query, said in (
            (pb.RecallQuery(text="x" * 300_000), "this rpc takes at most 262144"),
            (pb.RecallQuery(filter=FragmentFilter(exclude_ids=[""] * 20_000)), "more than 16384 fields"),
        ):
            asked = pb.RecallOnceRequest(namespace="a", memory="m", query=query)
            open_stream = stub.Recall(metadata=metadata)
            await open_stream.write(pb.RecallRequest(open=pb.RecallOpen(namespace="a", memory="m")))
            await open_stream.read()
            await open_stream.write(pb.RecallRequest(query=query))
            for call in (stub.RecallOnce(asked, metadata=metadata), open_stream.read()):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert said in (raised.value.details() or "")


async def test_deflate_is_refused_by_name(attacked: Guarded) -> None:
    async with grpc.aio.insecure_channel(attacked.server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await StreamServiceStub(channel).RecallOnce(
                pb.RecallOnceRequest(namespace="x" * 2_000),
                metadata=_headers(attacked, "alice"),
                compression=grpc.Compression.Deflate,
            )
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "deflate" in (raised.value.details() or "")


async def test_unfinished_message_ends_its_call(make_server: MakeServer) -> None:
    """Meanwhile the caller's other calls and all health checks succeed."""
    server = await started(make_server(opening_max_s=2.0))
    half = b"\0" + MB.to_bytes(4) + b"x" * 10_000
    async with AsyncExitStack() as stack, memstream.connect(server.address) as client:
        memory = await client.create_memory("others/joy")
        for path in (RECALL, CHECK):
            connection = await stack.enter_async_context(raw(server.address))
            await connection.send(HELLO)
            for stream in range(1, 101, 2):
                await connection.send(frame(HEADERS, END_HEADERS, stream, request(path)), frame(DATA, 0, stream, half))
            await memory.observe_batch(["the code is 4711"])
            assert await _health(server.address) in (b"\x08\1", b"\x08\2")
            ended = set()
            async with asyncio.timeout(PATIENCE_S):
                async for kind, flags, stream, _ in connection.frames():
                    if kind == HEADERS and flags & END_STREAM:
                        ended.add(stream)
                        if len(ended) == 50:
                            break
            assert ended == set(range(1, 101, 2))


async def test_health_watches_of_a_connection_are_bounded(attacked: Guarded) -> None:
    async with (
        attack_connections.open_channel(attacked.server.address) as channel,
        attack_connections.open_channel(attacked.server.address) as another,
    ):
        watches = [channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(40)]
        seen = await asyncio.gather(*(_first(watch) for watch in watches))
        assert sorted(seen) == ["RESOURCE_EXHAUSTED"] * 24 + ["SERVING"] * 16
        assert await _first(another.unary_stream("/grpc.health.v1.Health/Watch")(b"")) == "SERVING"
        for watch in watches:
            watch.cancel()
        await until(lambda: _is_watched(channel))


async def _is_watched(channel: Any) -> bool:
    return await _first(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")) == "SERVING"


async def _first(watch: Any) -> str:
    try:
        return "SERVING" if await watch.read() == b"\x08\x01" else "?"
    except grpc.aio.AioRpcError as error:
        return error.code().name


async def _health(address: str) -> bytes:
    async with attack_connections.open_channel(address) as channel:
        answer: bytes = await channel.unary_unary(CHECK)(b"")
        return answer


async def test_default_limits_are_said(attacked: Guarded, memory: memstream.Memory) -> None:
    async with memstream.connect(attacked.server.address, token=attacked.keys["bob"]) as client:
        limits = (await client.server_info()).limits
    assert (limits.caller_streams_max, limits.caller_calls_max, limits.connection_streams_max) == (192, 256, 256)
    assert limits.message_fields_max == 131_072


def _headers(guarded: Guarded, name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {guarded.keys[name]}")]


async def test_honest_calls_survive_thousands_that_wait(make_server: MakeServer) -> None:
    """By default gRPC core ends some of the calls that wait for Python at random, with CANCELLED."""
    server = await started(make_server())
    whole = b"".join(
        frame(HEADERS, END_HEADERS, stream, request(CHECK))
        + frame(DATA, END_STREAM, stream, attack_connections.grpc_message(b""))
        for stream in range(1, 501, 2)
    )
    async with AsyncExitStack() as stack, attack_connections.open_channel(server.address) as honest:
        await honest.unary_unary(CHECK)(b"")
        connections = [
            await stack.enter_async_context(attack_connections.open_connection(server.address)) for _ in range(16)
        ]
        with paused(server.pid):
            for connection in connections:
                await connection.send(whole)
        calls = []
        for _ in range(40):
            calls += [asyncio.ensure_future(_ended(honest.unary_unary(CHECK)(b""))) for _ in range(5)]
            await asyncio.sleep(0.02)
        assert await asyncio.gather(*calls) == ["OK"] * 200


async def _ended(call: Any) -> str:
    return str((await call.code()).name)
