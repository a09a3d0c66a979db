"""A recall over memories of two servers: both are asked; one that does not answer is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2 import CreateMemoryRequest, ListFragmentsRequest
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.ports.processes import Owner
from memstream_server.rpc.access.peers import Peers
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.forwarding import Forwarding
from memstream_server.rpc.server import RpcServer, build_server
from tests.engine.conftest import open_engine
from tests.rpc.conftest import GRACE_S, LIMITS
from tests.rpc.wire import Wire
from tests.support.waiting import until

NOW = Timestamp(seconds=2_000_000_000)
TEXTS = {"here": ["the tea is green", "a red bicycle"], "there": ["tea with milk", "the kettle is hot", "tea again"]}


@dataclass
class Places:
    """Replaces the database that records the owners of memories: the other server owns `there`."""

    other: Owner
    shared: bool = True

    async def find_owner(self, _namespace: str, name: str) -> Owner | None:
        return self.other if name == "there" else None

    async def list_living(self) -> frozenset[int]:
        return frozenset({1})


@dataclass
class Two:
    """The server that is asked, alone with both memories too, and the other server."""

    front: Wire
    other: RpcServer
    whole: Wire
    places: Places
    there: Wire


async def write(wire: Wire, names: tuple[str, ...]) -> None:
    for name in TEXTS:
        await wire.memories.CreateMemory(CreateMemoryRequest(namespace="ns", memory=name))
    for name in names:
        said = [fragment_pb2.Observation(content=text, observe_time=NOW) for text in TEXTS[name]]
        await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory=name, observations=said))


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:

        async def serve(name: str, forwarding: Forwarding | None = None) -> tuple[RpcServer, str, Wire]:
            engine = await stack.enter_async_context(open_engine(tmp_path / name, access_flush_interval_s=0.1))
            drain = Drain(GRACE_S)
            server = build_server(engine, LIMITS, drain, forwarding=forwarding)
            address = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.stop, 0.1)
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
            return server, address, Wire(channel, server, drain, engine.dimension)

        other, address, other_wire = await serve("other")
        places = Places(Owner(1, address))
        _, _, front = await serve("front", Forwarding(cast("Ownership", places), Drain(), 0.05, Peers()))
        _, _, whole = await serve("whole")
        # Both servers know both memories, as with one database; each holds what it owns.
        await write(front, ("here",))
        await write(other_wire, ("there",))
        await write(whole, ("here", "there"))
        yield Two(front, other, whole, places, other_wire)


async def ask(wire: Wire, **fields: Any) -> pb.RecallOnceResponse:
    scopes = [RecallScope(memory="ns/here"), RecallScope(memory="ns/there", weight=2)]
    query = pb.RecallQuery(text="hot tea", now=NOW, reinforce=False, scopes=scopes, explain=True, **fields)
    answer: pb.RecallOnceResponse = await wire.streams.RecallOnce(pb.RecallOnceRequest(query=query), timeout=30)
    return answer


async def test_the_place_of_a_memory_changes_no_score(two: Two) -> None:
    divided, whole = await ask(two.front, near_misses=3), await ask(two.whole, near_misses=3)
    assert [
        (one.memory, one.fragment.content, one.score, one.relevance, [part.name for part in one.explanation.parts])
        for one in divided.recollections.recollections
    ] == [
        (one.memory, one.fragment.content, one.score, one.relevance, [part.name for part in one.explanation.parts])
        for one in whole.recollections.recollections
    ]
    for theirs, ours in zip(divided.done.memories, whole.done.memories, strict=True):
        assert (theirs.memory, theirs.eligible, theirs.considered) == (ours.memory, ours.eligible, ours.considered)
    assert not divided.done.degraded


class Scripted(grpc.GenericRpcHandler):
    """An owner of another version: answers RecallOnce with what `answer` returns."""

    def __init__(self, answer: Callable[[pb.RecallQuery], Awaitable[bytes]]) -> None:
        self._answer = answer

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def recall(request: bytes, _context: Any) -> AsyncIterator[bytes]:
            yield await self._answer(pb.RecallOnceRequest.FromString(request).query)

        return grpc.unary_stream_rpc_method_handler(recall)


@asynccontextmanager
async def owned_by(two: Two, answer: Callable[[pb.RecallQuery], Awaitable[bytes]]) -> AsyncIterator[None]:
    """`there` belongs to a scripted server."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Scripted(answer),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    two.places.other = Owner(1, f"127.0.0.1:{port}")
    try:
        yield
    finally:
        await server.stop(None)


async def test_words_of_a_newer_owner_are_generic(two: Two) -> None:
    async def answer(query: pb.RecallQuery) -> bytes:
        made = pb.RecallOnceResponse()
        if not query.count_words:
            one = made.recollections.recollections.add(score=9, relevance=0.9, status=cast("Any", 77))
            one.fragment.MergeFrom(fragment_pb2.Fragment(id="0" * 26, content="tea of tomorrow", etag="tomorrow's"))
            one.fragment.kind, one.fragment.tier = cast("Any", 78), cast("Any", 79)
            one.fragment.metadata["future"].MergeFromString(b"\x9a\x06\x01x")
            one.suspicions.add(newer_id="0" * 26, older_id="1" * 26, reason="of tomorrow")
            made.done.near_misses.add(fragment_id="2" * 26, stage="of tomorrow", score=1)
        return made.SerializeToString()

    async with owned_by(two, answer):
        found = await ask(two.front, near_misses=9)
    best = found.recollections.recollections[0]
    assert (best.memory, best.fragment.content) == ("ns/there", "tea of tomorrow")
    assert [each.reason for each in best.suspicions] == ["other"]
    assert "other" in [miss.stage for miss in found.done.near_misses if miss.fragment_id == "2" * 26]
    assert not best.fragment.metadata


async def test_a_paused_owner_is_named_within_the_deadline(two: Two) -> None:
    async def answer(_query: pb.RecallQuery) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("nothing ends the pause")

    scopes = [RecallScope(memory="ns/here"), RecallScope(memory="ns/there")]
    query = pb.RecallQuery(text="hot tea", now=NOW, reinforce=False, scopes=scopes)
    async with owned_by(two, answer):
        found = await two.front.streams.RecallOnce(pb.RecallOnceRequest(query=query), timeout=2)
    assert {one.memory for one in found.recollections.recollections} == {"ns/here"}
    assert "gave no answer in time" in found.done.memories[1].degraded


async def test_another_owner_counts_what_is_kept(two: Two) -> None:
    query = pb.RecallQuery(
        text="hot tea",
        now=NOW,
        reinforce=True,
        limit=2,
        scopes=[RecallScope(memory="ns/here"), RecallScope(memory="ns/there")],
    )
    answer = await two.front.streams.RecallOnce(pb.RecallOnceRequest(query=query), timeout=30)
    kept = {one.fragment.content for one in answer.recollections.recollections if one.memory == "ns/there"}
    assert 0 < len(kept) < len(TEXTS["there"])

    async def counted() -> bool:
        listed = await two.there.memories.ListFragments(ListFragmentsRequest(namespace="ns", memory="there"))
        return {one.content for one in listed.fragments if one.access_count} == kept

    await until(counted)


async def test_no_answer_waits_for_another_owners_accesses(two: Two) -> None:
    asked: list[pb.RecallQuery] = []
    counting, counted = asyncio.Event(), asyncio.Event()

    async def answer(query: pb.RecallQuery) -> bytes:
        made = pb.RecallOnceResponse()
        if query.reinforce:
            counting.set()
            await counted.wait()  # after the answer
        elif not query.count_words:
            one = made.recollections.recollections.add(score=9, relevance=0.9)
            one.fragment.MergeFrom(fragment_pb2.Fragment(id="0" * 26, content="tea"))
        asked.append(query)
        return made.SerializeToString()

    scopes = [RecallScope(memory="ns/here"), RecallScope(memory="ns/there")]
    query = pb.RecallQuery(text="hot tea", now=NOW, reinforce=True, limit=2, scopes=scopes)
    async with owned_by(two, answer):
        found = await two.front.streams.RecallOnce(pb.RecallOnceRequest(query=query), timeout=30)
        await counting.wait()
        assert asked
        assert not any(one.reinforce for one in asked)
        counted.set()
        await until(lambda: _has_reinforced(asked))
    assert found.recollections.recollections[0].memory == "ns/there"


async def _has_reinforced(asked: list[pb.RecallQuery]) -> bool:
    return asked[-1].reinforce


async def test_an_owner_that_is_gone_is_named(two: Two) -> None:
    await two.other.stop(0.1)
    answer = await ask(two.front)
    assert {one.memory for one in answer.recollections.recollections} == {"ns/here"}
    assert answer.done.degraded.startswith("ns/there: ")
    assert [bool(part.degraded) for part in answer.done.memories] == [False, True]
