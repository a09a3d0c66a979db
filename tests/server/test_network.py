"""A network that cuts connections at any byte, stalls them, and duplicates or reorders messages."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import grpc.aio
import pytest

import memstream
from memstream.status import translate_error
from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.support.relay import Relay
from tests.support.seeds import seed_of
from tests.support.server import ServerProcess
from tests.support.waiting import until

SEED = seed_of("MEMSTREAM_CRASH_SEED")
CUTS = int(os.environ.get("MEMSTREAM_CRASH_ROUNDS", "5")) * 4
BYTES_MEAN = 6_000
"""Between two faults of a connection, in each direction: a few messages with their frames."""


async def test_producers_survive_network_cuts_and_stalls(shared: ServerProcess, path: str) -> None:
    draw = random.Random(SEED)
    async with Relay(shared.address, draw) as relay, memstream.connect(relay.address, retry=PATIENT) as client:
        memory = await client.create_memory(path)
        producers = [Producer(memory, f"p{number}", random.Random(draw.random())) for number in range(3)]
        relay.bytes_mean = BYTES_MEAN
        relay.cut()
        talking = [asyncio.create_task(producer.run()) for producer in producers]
        try:
            await until(lambda: _all(talking, relay.cuts >= CUTS and all(one.ledger.stored for one in producers)))
        finally:
            relay.bytes_mean = 0
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
        relay.cut()
        for producer in producers:
            await producer.finish()
    said = Counter(words(one.name, n) for one in producers for n in range(1, one.ledger.received + 1))
    async with memstream.connect(shared.address) as client:
        memory = client.memory(path)
        listed = await contents(memory)
        kept = Counter(listed)
        lost, doubled = (said - kept).total(), (kept - said).total()
        print(f"{relay.cuts} cuts, {relay.stalls} stalls, {said.total()} observations acknowledged,", end=" ")
        print(f"{lost} lost, {doubled} doubled, seed {SEED}")
        assert (lost, doubled) == (0, 0), f"seed {SEED}"
        for one in producers:
            expected = [words(one.name, number) for number in range(1, one.ledger.received + 1)]
            assert [content for content in listed if content in set(expected)] == expected, f"seed {SEED}"
        assert await observed_once(memory) == said.total()


async def _all(talking: list[asyncio.Task[None]], reached: bool) -> bool:
    for task in talking:
        assert not task.done(), f"a producer gave up, seed {SEED}: {task.exception()!r}"
    return reached


async def test_replaced_producer_fails_and_claims_nothing(shared: ServerProcess, path: str) -> None:
    """Two processes of one name: the older one returns with other texts under numbers that the newer one has used."""
    async with Relay(shared.address) as relay, memstream.connect(relay.address, retry=PATIENT) as cut_off:
        stream = (await cut_off.create_memory(path)).observe("joy")
        await stream.__aenter__()
        await (await stream.send("one"))
        await relay.down()
        unheard = await stream.send("two, of the first")
        async with memstream.connect(shared.address) as other:
            memory = other.memory(path)
            async with memory.observe("joy") as newer:
                assert newer.expected_sequence == 2
                await (await newer.send("two, of the second"))
            await relay.up()
            with pytest.raises(memstream.SequenceConflict):
                await unheard
            with pytest.raises(memstream.SequenceConflict):
                await stream.close()
            assert await contents(memory) == ["one", "two, of the second"]
            assert await observed_once(memory) == 2


def batch(path: str, first: int, count: int) -> pb.ObserveBatchRequest:
    namespace, _, name = path.partition("/")
    said = [fragment_pb2.Observation(content=words("joy", number)) for number in range(first, first + count)]
    return pb.ObserveBatchRequest(
        namespace=namespace, memory=name, producer="joy", first_sequence=first, observations=said
    )


async def test_same_batch_on_two_streams_counts_once(
    client: memstream.Client, shared: ServerProcess, path: str
) -> None:
    memory = await client.create_memory(path)
    request = batch(path, 1, 64)
    observed = pb.ObserveRequest(
        batch=pb.ObservationBatch(first_sequence=1, observations=request.observations),
    )
    opening = pb.ObserveRequest(open=pb.ObserveOpen(namespace=request.namespace, memory=request.memory, producer="joy"))
    async with (
        grpc.aio.insecure_channel(shared.address, [("grpc.use_local_subchannel_pool", 1)]) as one,
        grpc.aio.insecure_channel(shared.address, [("grpc.use_local_subchannel_pool", 1)]) as two,
    ):
        first, second = StreamServiceStub(one).Observe(), StreamServiceStub(two).Observe()
        for call in (first, second):
            await call.write(opening)
            assert (await _read(call)).HasField("opened")
            await call.write(observed)
        assert (await _stored(second, 64)) == 64
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await _stored(first, 65)
        assert "PRODUCER_SUPERSEDED" in str(raised.value.trailing_metadata())
        second.cancel()
    assert await contents(memory) == [words("joy", number) for number in range(1, 65)]
    assert await observed_once(memory) == 64


async def _read(call: Any) -> Any:
    message = await call.read()
    assert message is not grpc.aio.EOF
    return message


async def _stored(call: Any, number: int) -> int:
    while True:
        message = await _read(call)
        if message.HasField("ack") and message.ack.stored >= number:
            return int(message.ack.stored)


async def test_shuffled_duplicate_batches_apply_in_order(
    client: memstream.Client, shared: ServerProcess, path: str
) -> None:
    """All at once over several connections: a batch that comes too early is refused with the expected number, and
    repeated."""
    memory = await client.create_memory(path)
    draw = random.Random(SEED)
    requests = [batch(path, first, 5) for first in range(1, 40, 5)] * 2
    draw.shuffle(requests)
    early: list[int] = []
    channels = [grpc.aio.insecure_channel(shared.address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]

    async def send(request: pb.ObserveBatchRequest) -> None:
        stub = StreamServiceStub(draw.choice(channels))
        while True:
            try:
                answer = await stub.ObserveBatch(request, timeout=60)
            except grpc.aio.AioRpcError as error:
                refusal = translate_error(error)
                # Each call opens the producer again; a call that runs at that moment may be superseded instead.
                if not isinstance(refusal, memstream.ProducerSuperseded):
                    assert isinstance(refusal, memstream.SequenceGap), refusal
                    expected = int(refusal.details["expected_sequence"])
                    assert expected < request.first_sequence
                    assert (expected - 1) % 5 == 0
                    early.append(request.first_sequence)
                await asyncio.sleep(draw.uniform(0.01, 0.1))
            else:
                assert answer.ack.stored >= request.first_sequence + 4
                return

    try:
        await asyncio.gather(*(send(request) for request in requests))
    finally:
        for channel in channels:
            await channel.close()
    assert early
    assert await contents(memory) == [words("joy", number) for number in range(1, 41)], f"seed {SEED}"
    assert await observed_once(memory) == 40
