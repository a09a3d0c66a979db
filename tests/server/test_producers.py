"""Numbers, repeats, conflicts and names of producers, also across a restart of the server."""

from __future__ import annotations

import asyncio
from functools import partial

import grpc.aio
import pytest

import memstream
import memstream.sync
from memstream.v1 import fragment_pb2, memory_service_pb2, stream_service_pb2
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, restarted
from tests.server.listing import contents, observed_once
from tests.support.server import ServerProcess


async def test_the_same_batch_twice_counts_once(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    for _ in range(2):
        result = await memory.observe_batch(["one", "two"], producer="joy", first_sequence=1)
        assert (result.received, result.stored, result.rejected) == (2, 2, ())
    overlapping = await memory.observe_batch(["two", "three"], producer="joy", first_sequence=2)
    assert overlapping.stored == 3
    assert await contents(memory) == ["one", "two", "three"]
    assert await observed_once(memory) == 3


async def test_other_content_under_used_number_conflicts(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(["one", "two"], producer="joy", first_sequence=1)
    with pytest.raises(memstream.SequenceConflict) as raised:
        await memory.observe_batch(["two, differently"], producer="joy", first_sequence=2)
    assert raised.value.details["sequence"] == "2"
    assert await contents(memory) == ["one", "two"]


async def test_a_gap_is_refused_with_the_number_expected(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    await memory.observe_batch(["one"], producer="joy", first_sequence=1)
    with pytest.raises(memstream.SequenceGap) as raised:
        await memory.observe_batch(["three"], producer="joy", first_sequence=3)
    assert raised.value.details["expected_sequence"] == "2"
    assert await contents(memory) == ["one"]


async def test_rejected_observation_keeps_number_and_status(make_server: MakeServer, path: str) -> None:
    server = make_server(content_max_bytes=100)
    for _ in range(2):
        await restarted(server)
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory(path, exist_ok=True)
            result = await memory.observe_batch(["one", "x" * 101, "three"], producer="joy", first_sequence=1)
            assert (result.received, result.stored) == (3, 3)
            assert [one.sequence for one in result.rejected] == [2]
            assert isinstance(result.rejected[0].error, memstream.InvalidRequest)
            assert await contents(memory) == ["one", "three"]


async def test_newer_process_of_producer_ends_the_older(
    client: memstream.Client, shared: ServerProcess, path: str
) -> None:
    memory = await client.create_memory(path)
    async with memstream.connect(shared.address) as other:
        first = memory.observe("joy")
        await first.__aenter__()
        await (await first.send("one"))
        async with other.memory(path).observe("joy") as second:
            assert second.expected_sequence == 2
            await (await second.send("two"))
            with pytest.raises(memstream.ProducerSuperseded):
                await (await first.send("two, of the first"))
        with pytest.raises(memstream.ProducerSuperseded):
            await first.close()
    assert await contents(memory) == ["one", "two"]
    assert await observed_once(memory) == 2


async def test_producers_have_separate_numbers_and_order(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)

    async def talk(name: str) -> None:
        async with memory.observe(name) as stream:
            for number in range(1, 301):
                sent = await stream.send(f"{name} {number}")
                assert sent.sequence == number

    await asyncio.gather(talk("joy"), talk("ann"))
    said = await contents(memory)
    for name in ("joy", "ann"):
        assert [one for one in said if one.startswith(name)] == [f"{name} {number}" for number in range(1, 301)]
    assert await observed_once(memory) == 600


async def test_request_id_gets_first_response_after_restart(make_server: MakeServer, path: str) -> None:
    namespace, _, name = path.partition("/")
    create = memory_service_pb2.CreateMemoryRequest(namespace=namespace, memory=name, request_id="r-1")
    batch = stream_service_pb2.ObserveBatchRequest(
        namespace=namespace,
        memory=name,
        observations=[fragment_pb2.Observation(content="said once")],
        request_id="r-2",
    )
    server = make_server()
    created, acknowledged = [], []
    for _ in range(2):
        await restarted(server)
        async with grpc.aio.insecure_channel(server.address) as channel:
            for _ in range(2):
                created.append(await MemoryServiceStub(channel).CreateMemory(create))
                acknowledged.append((await StreamServiceStub(channel).ObserveBatch(batch)).ack.stored)
    assert [one.SerializeToString(deterministic=True) for one in created] == [
        created[0].SerializeToString(deterministic=True)
    ] * 4
    assert acknowledged == [1] * 4
    async with memstream.connect(server.address) as client:
        assert await contents(client.memory(path)) == ["said once"]


async def test_result_of_request_id_is_the_same(client: memstream.Client, shared: ServerProcess, path: str) -> None:
    memory = await client.create_memory(path)
    for producer, first_sequence in (("", 0), ("joy", 1)):
        observe = partial(
            memory.observe_batch,
            ["one", "two"],
            producer=producer,
            first_sequence=first_sequence,
            request_id=f"r{producer}",
        )
        first = await observe()
        with memstream.sync.connect(shared.address) as blocking:
            again = partial(
                blocking.memory(path).observe_batch,
                ["one", "two"],
                producer=producer,
                first_sequence=first_sequence,
                request_id=f"r{producer}",
            )
            assert again() == first
            with pytest.raises(memstream.RequestIdConflict):
                again(session="s")
        assert len(first.outcomes) == 2


async def test_a_request_id_of_another_request_is_refused(shared: ServerProcess, path: str) -> None:
    namespace, _, name = path.partition("/")
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub = MemoryServiceStub(channel)
        await stub.CreateMemory(
            memory_service_pb2.CreateMemoryRequest(namespace=namespace, memory=name, request_id="r-3")
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.CreateMemory(
                memory_service_pb2.CreateMemoryRequest(namespace=namespace, memory="other", request_id="r-3")
            )
        assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_producer_continues_after_its_last_process(make_server: MakeServer, path: str) -> None:
    server = make_server()
    for life in range(3):
        await restarted(server)
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory(path, exist_ok=True)
            async with memory.observe("joy") as stream:
                assert stream.expected_sequence == 10 * life + 1
                for number in range(10):
                    await stream.send(f"life {life}, word {number}")
    async with memstream.connect(server.address) as client:
        expected = [f"life {life}, word {number}" for life in range(3) for number in range(10)]
        assert await contents(client.memory(path)) == expected


async def test_namespaces_separate_memories_of_one_name(client: memstream.Client, path: str) -> None:
    first = await client.create_memory(path)
    second = await client.create_memory(path.replace("t-", "u-"))
    await first.observe_batch(["of the first"], producer="joy", first_sequence=1)
    await second.observe_batch(["of the second"], producer="joy", first_sequence=1)
    assert (await contents(first), await contents(second)) == (["of the first"], ["of the second"])
    assert len(await second.recall_once("of the first", filter=memstream.Filter(sessions=["none"]))) == 0
