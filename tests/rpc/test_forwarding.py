"""Forwarding while servers and connections come and go: every caller gets a response."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2 import CreateMemoryRequest
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.ports.processes import Owner
from memstream_server.rpc.access.peers import Peers
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.forwarding import Forwarding
from memstream_server.rpc.server import RpcServer, build_server
from tests.engine.conftest import open_engine
from tests.rpc.conftest import GRACE_S, LIMITS
from tests.rpc.wire import RecallCall, Wire, refused, until
from tests.support.fake_engine import FakeEngine

WAITING = pb.RecallOnceRequest(namespace="ns", memory="m", query=pb.RecallQuery(text="wait for it"))
ASKING = pb.RecallOnceRequest(namespace="ns", memory="m", query=pb.RecallQuery(text="anything"))


@dataclass
class Whereabouts:
    """Replaces the database that records the owners of memories."""

    at: Owner | None
    shared: bool = True
    alive: set[int] = field(default_factory=lambda: {1})

    async def find_owner(self, _namespace: str, _name: str) -> Owner | None:
        return self.at

    async def list_living(self) -> frozenset[int]:
        return frozenset(self.alive)


@dataclass
class Pair:
    """A server that clients call, and the server that owns the memory."""

    front: Wire
    owner: RpcServer
    engine: Any
    address: str
    """The owner's address."""
    whereabouts: Whereabouts
    front_address: str


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    engine = cast("Any", FakeEngine())
    owner = build_server(engine, LIMITS, Drain(GRACE_S))
    address = await owner.start("127.0.0.1:0")
    whereabouts = Whereabouts(Owner(1, address))
    async with grpc.aio.insecure_channel(address) as channel:
        wire = Wire(channel, owner, Drain(), engine.dimension)
        await wire.memories.CreateMemory(CreateMemoryRequest(namespace="ns", memory="m"))
    drain = Drain(GRACE_S)
    forwarding = Forwarding(cast("Ownership", whereabouts), drain, 0.05, Peers())
    own = cast("Any", FakeEngine())
    server = build_server(own, LIMITS, drain, forwarding=forwarding)
    front = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(front) as channel:
        yield Pair(Wire(channel, server, drain, own.dimension), owner, engine, address, whereabouts, front)
    await server.stop(0.1)
    engine.script.recalling.set()
    await owner.stop(0.1)


async def waits(pair: Pair) -> asyncio.Task[Any]:
    """Starts a call that waits at the owner."""
    pair.engine.script.recalling.clear()
    asked = len(pair.engine.script.queries)
    call = asyncio.ensure_future(pair.front.streams.RecallOnce(WAITING, timeout=60))
    await until(lambda: len(pair.engine.script.queries) > asked)
    return call


async def drains(pair: Pair) -> asyncio.Task[None]:
    """The owner accepts no further connection and completes its open calls."""
    ending = asyncio.create_task(pair.owner.stop(GRACE_S))
    channel = grpc.aio.insecure_channel(pair.address, [("grpc.use_local_subchannel_pool", 1)])
    async with channel, asyncio.timeout(60):
        while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await channel.wait_for_state_change(state)
    return ending


async def test_draining_owner_completes_its_open_calls(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    call = await waits(pair)
    ending = await drains(pair)
    # The retries end long before the deadline: a stalled client does not see its deadline pass instead.
    monkeypatch.setattr("memstream_server.rpc.forwarding.wait_limit_s", lambda _: 0.5)
    error = await refused(pair.front.streams.RecallOnce(ASKING, timeout=60))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.reason == "OWNER_UNAVAILABLE"
    assert not call.done()
    pair.engine.script.recalling.set()
    assert (await call).HasField("done")
    await ending


async def test_call_follows_memory_to_its_next_owner(pair: Pair) -> None:
    call = await waits(pair)
    ending = await drains(pair)
    moved = asyncio.ensure_future(pair.front.streams.RecallOnce(ASKING, timeout=60))
    await asyncio.sleep(0.3)
    assert not moved.done()
    pair.whereabouts.at = None
    error = await refused(moved)  # handled by this server, which lacks the memory
    assert error.reason == "MEMORY_NOT_FOUND"
    pair.engine.script.recalling.set()
    await call
    await ending


async def test_a_call_whose_owner_is_dead_is_answered(pair: Pair) -> None:
    """Also on a stream, whose end a task of its own reads."""
    call = await waits(pair)
    stream = RecallCall(pair.front.streams.Recall())
    await stream.send(open=pb.RecallOpen(namespace="ns", memory="m"))
    assert (await stream.next()).HasField("opened")
    pair.whereabouts.alive.clear()
    error = await refused(call)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "OWNER_UNAVAILABLE")
    assert error.metadata["begun"] == "yes"
    ended = await stream.error()
    assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "OWNER_UNAVAILABLE")


async def test_cancelled_dependency_does_not_cancel_the_call(pair: Pair) -> None:
    pair.engine.script.fail_recalls.append(asyncio.CancelledError())
    error = await refused(pair.front.streams.RecallOnce(ASKING, timeout=60))
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert error.metadata["incident"] in error.message


async def test_request_id_is_answered_through_another_server(tmp_path: Path) -> None:
    """The owner returns the first response through either server."""
    async with open_engine(tmp_path / "data") as engine:
        owner = build_server(engine, LIMITS, Drain(GRACE_S))
        address = await owner.start("127.0.0.1:0")
        forwarding = Forwarding(cast("Ownership", Whereabouts(Owner(1, address))), Drain(), 0.05, Peers())
        front = build_server(cast("Any", FakeEngine()), LIMITS, Drain(), forwarding=forwarding)
        async with (
            grpc.aio.insecure_channel(address) as direct,
            grpc.aio.insecure_channel(await front.start("127.0.0.1:0")) as passed_on,
        ):
            here, there = (Wire(channel, owner, Drain(), engine.dimension) for channel in (direct, passed_on))
            await here.memories.CreateMemory(CreateMemoryRequest(namespace="ns", memory="m"))
            said = [fragment_pb2.Observation(content=text) for text in ("one", "two")]
            request = pb.ObserveBatchRequest(namespace="ns", memory="m", observations=said, request_id="r")
            calls = [wire.streams.ObserveBatch(request) for wire in (here, there, here, there)]
            answers = [await call for call in calls]
            assert [answer == answers[0] for answer in answers] == [True] * 4
            assert len(answers[0].ack.outcomes) == 2
            request.session = "s"
            assert (await refused(there.streams.ObserveBatch(request))).reason == "REQUEST_ID_CONFLICT"
            stream = await there.observe(outcomes=True, known_sequence=0)
            await stream.batch(1, "three")
            await stream.send(close=pb.ObserveClose())
            await stream.send(flush=pb.ObserveFlush(flush_id=1))
            assert (await stream.error()).reason == "PROTOCOL_VIOLATION"
            again = await there.observe(outcomes=True, known_sequence=0)
            assert [each.sequence for each in again.opened.outcomes] == [1]
        await front.stop(0.1)
        await owner.stop(0.1)


async def test_forwarding_opens_further_connections(pair: Pair) -> None:
    streams = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(pair.front_address, [("grpc.use_local_subchannel_pool", 1)])
            )
            stub = StreamServiceStub(channel)
            streams += [RecallCall(stub.Recall()) for _ in range(LIMITS.connection_streams_max // 3 + 20)]
        assert len(streams) > LIMITS.connection_streams_max
        async with asyncio.timeout(60):
            for stream in streams:
                await stream.send(open=pb.RecallOpen(namespace="ns", memory="m"))
                assert (await stream.next()).HasField("opened")
