"""A connection or the server ends: every missed rejection, outcome and response arrives once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import grpc
import grpc.aio
import pytest

import memstream
import memstream.sync
from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT
from tests.support.relay import Relay
from tests.support.server import ServerProcess, free_address

TOO_LONG = "x" * 300
ROUNDS = 4


def said(number: int) -> str:
    """Every seventh is larger than allowed, every fifth repeats the one before."""
    if number % 7 == 0:
        return f"{number} {TOO_LONG}"
    return f"remark {number - 1 if number % 5 == 0 else number} about the weather"


async def check_ends(memory: memstream.Memory, sent: Sequence[memstream.Sent], stream: memstream.ObserveStream) -> None:
    """Each observation ended once: rejected with its reason, or stored with its outcome."""
    refused = [one for one in sent if one.sequence % 7 == 0]
    assert [one.sequence for one in sent if isinstance(one.error, memstream.InvalidRequest)] == [
        one.sequence for one in refused
    ]
    assert (stream.rejected_count, [one.sequence for one in stream.rejected]) == (
        len(refused),
        [one.sequence for one in refused],
    )
    stored = [one.stored for one in sent if one.stored is not None]
    assert len(stored) == len(sent) - len(refused)
    without = [one.sequence for one in stored if one.outcome is None]
    assert without == []
    ids = [
        one.outcome.fragment_id for one in stored if one.outcome and one.outcome.type is memstream.EventType.OBSERVED
    ]
    assert ids == [fragment.id async for fragment in memory.list_fragments()]


async def test_every_outcome_arrives_over_kills(make_server: MakeServer, path: str) -> None:
    server = await started(make_server(listen=free_address(), content_max_bytes=200))
    draw = random.Random(7)
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
        sent: list[memstream.Sent] = []
        async with memory.observe("joy", outcomes=True) as stream:
            for _ in range(3):
                sent.append(await stream.send(said(len(sent) + 1)))
                await asyncio.gather(sent[-1], return_exceptions=True)
                for _ in range(60):
                    sent.append(await stream.send(said(len(sent) + 1)))
                    if draw.random() < 0.3:
                        await asyncio.sleep(draw.random() * 0.01)
                await restarted(server)
            await stream.flush()
            await check_ends(memory, sent, stream)
        assert stream.connections > 3


@pytest.mark.parametrize("size", [1, 40])
async def test_outcomes_of_lost_acknowledgements_arrive(make_server: MakeServer, path: str, size: int) -> None:
    """The server has committed, and its acknowledgement is lost: a lone observation and a batch of many."""
    server = await started(make_server(content_max_bytes=200))
    async with Relay(server.address) as relay, memstream.connect(relay.address, retry=PATIENT) as client:
        memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
        sent: list[memstream.Sent] = []
        async with memory.observe("joy", outcomes=True) as stream:
            for _ in range(6):
                await stream.flush()
                relay.trap, relay.trap_done = (b"remark",), True
                for _ in range(size):
                    sent.append(await stream.send(said(len(sent) + 1)))
                await asyncio.gather(*sent, return_exceptions=True)
            assert relay.sprung >= 4
            await check_ends(memory, sent, stream)


async def test_new_process_learns_what_an_earlier_one_missed(make_server: MakeServer, path: str) -> None:
    server = await started(make_server(listen=free_address(), content_max_bytes=200))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
        async with memory.observe("joy", outcomes=True) as stream:
            for number in range(1, 31):
                await stream.send(said(number))
        await restarted(server)
        async with memory.observe("joy", outcomes=True, known_sequence=10) as stream:
            resumption = stream.resumption
            assert stream.expected_sequence == 31
    assert resumption is not None
    assert [one.sequence for one in resumption.rejected] == [14, 21, 28]
    assert [one.sequence for one in resumption.outcomes] == [n for n in range(11, 31) if n % 7]
    assert (resumption.rejected_since, resumption.outcomes_since) == (11, 11)
    with (
        memstream.sync.connect(server.address) as blocking,
        blocking.memory(path).observe("joy", known_sequence=0) as twin,
    ):
        again = twin.resumption
    assert again is not None
    assert ([one.sequence for one in again.rejected], again.outcomes) == ([7, 14, 21, 28], ())


def batch(path: str, texts: Sequence[str], **given: object) -> pb.ObserveBatchRequest:
    namespace, _, name = path.partition("/")
    observations = [fragment_pb2.Observation(content=text) for text in texts]
    return pb.ObserveBatchRequest(namespace=namespace, memory=name, observations=observations, **given)  # type: ignore[arg-type]  # tests name real fields


@pytest.mark.parametrize("producer", ["", "joy"])
@pytest.mark.parametrize("count", [2, 60])
async def test_repeat_gets_response_lost_in_a_kill(
    make_server: MakeServer, path: str, count: int, producer: str
) -> None:
    """The batch is committed, its response is lost and the server killed; a small batch is stored at once."""
    server = await started(make_server(listen=free_address()))
    numbered = {"producer": producer, "first_sequence": 1} if producer else {}
    texts = [f"remark {number} about the weather" for number in range(count)]
    async with memstream.connect(server.address) as client:
        await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    request = batch(path, texts, request_id="r", **numbered)
    async with Relay(server.address) as relay, grpc.aio.insecure_channel(relay.address) as channel:
        relay.trap, relay.trap_done = (texts[-1].encode(),), True
        with pytest.raises(grpc.aio.AioRpcError):
            await StreamServiceStub(channel).ObserveBatch(request)
    await restarted(server)
    async with grpc.aio.insecure_channel(server.address) as channel:
        streams = StreamServiceStub(channel)
        calls = [streams.ObserveBatch(request, wait_for_ready=True) for _ in range(3)]
        answers = [await call for call in calls]
        assert len({answer.SerializeToString(deterministic=True) for answer in answers}) == 1
        ack = answers[0].ack
        assert (ack.received, ack.stored, len(ack.outcomes)) == (count, count, count)
        for other in (batch(path, texts[:-1], request_id="r", **numbered), batch(path, texts, request_id="r")):
            if other != request:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await streams.ObserveBatch(other)
                assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
    async with memstream.connect(server.address) as client:
        memory = client.memory(path)
        assert await contents(memory) == texts
        assert await observed_once(memory) == count
        listed = [fragment.id async for fragment in memory.list_fragments()]
        assert listed == [outcome.fragment_id for outcome in ack.outcomes]


async def test_kills_at_any_moment_leave_one_answer(make_server: MakeServer, path: str) -> None:
    server: ServerProcess = await started(make_server(listen=free_address()))
    draw, texts = random.Random(3), [f"remark {number} about the weather" for number in range(30)]
    async with memstream.connect(server.address) as client:
        await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    for turn in range(ROUNDS):
        request = batch(path, [f"{turn}: {text}" for text in texts], request_id=f"r{turn}")
        async with grpc.aio.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = StreamServiceStub(channel).ObserveBatch(request)
            calling = asyncio.ensure_future(_answer(call))
            await asyncio.sleep(draw.random() * 0.02)
            await restarted(server)
            first = await calling
            again = await StreamServiceStub(channel).ObserveBatch(request, wait_for_ready=True)
        assert first in (None, again)
        assert (again.ack.stored, len(again.ack.outcomes)) == (30, 30)
    async with memstream.connect(server.address) as client:
        assert await contents(client.memory(path)) == [f"{turn}: {text}" for turn in range(ROUNDS) for text in texts]


async def _answer(call: grpc.aio.UnaryUnaryCall[pb.ObserveBatchRequest, pb.ObserveBatchResponse]) -> object:
    try:
        return await call
    except grpc.aio.AioRpcError:
        return None
