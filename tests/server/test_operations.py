"""Operations over the wire, on a real server: reindex, purge, listing, repeats, and what is refused."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import grpc
import grpc.aio
import pytest

import memstream
from memstream import Memory, MemoryKind, OperationState, Policy, RetentionPolicy
from memstream.v1 import operation_service_pb2 as pb
from memstream.v1.operation_service_pb2_grpc import OperationServiceStub
from tests.server.conftest import MakeServer
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.with_index


async def indexed(memory: Memory) -> None:
    async def look() -> bool:
        return (await memory.stats()).unindexed == 0

    await until(look)


async def filled(memory: Memory, count: int) -> None:
    for start in range(0, count, 100):
        await memory.observe_batch([f"note {start + number} of the journey" for number in range(100)])
    await indexed(memory)


async def test_reindex_refills_index_during_recalls(make_server: MakeServer) -> None:
    with make_server(dense_bytes_max=10 * VECTOR_BYTES, index_partitions=2) as server:
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("ns/joy", kind=MemoryKind.LONG_TERM)
            await filled(memory, 300)
            operation = await client.start_reindex()
            assert (operation.type, operation.unit) == ("reindex", "fragments")
            looks: list[memstream.Operation] = []
            waiting = asyncio.create_task(client.finished(operation, looks.append))
            while not waiting.done():
                assert await memory.recall_once("note 7 of the journey")
            ended = await waiting
            assert (ended.state, ended.done, ended.total) == (OperationState.SUCCEEDED, 300, 300)
            assert looks[-1] == ended
            info = await client.server_info()
            assert not info.degraded
            assert memstream.Capability.OPERATIONS in info.capabilities
            assert "note 7 of the journey" in [
                hit.fragment.content for hit in await memory.recall_once("note 7 of the journey")
            ]
        assert "index_reconciled" not in server.log()


async def test_killed_reindex_resumes_at_next_start(make_server: MakeServer) -> None:
    server = make_server(index_partitions=2).start()
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("ns/joy", kind=MemoryKind.LONG_TERM)
        await filled(memory, 200)
        operation = await client.start_reindex()
        server.kill()
    with make_server(index_partitions=2) as again:
        async with memstream.connect(again.address) as client:
            ended = await client.finished(operation)
            assert ended.state is OperationState.SUCCEEDED
            assert [each.id async for each in client.operations()] == [operation.id]
            await indexed(client.memory("ns/joy"))


async def test_a_purge_erases_what_is_past_its_grace(client: memstream.Client, path: str) -> None:
    namespace, _, name = path.partition("/")
    grace = Policy(retention=RetentionPolicy(forget_grace=timedelta(0)))
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM, policy=grace)
    kept = await client.create_memory(f"{namespace}/sam", kind=MemoryKind.LONG_TERM)
    for each in (memory, kept):
        told = await each.observe_batch(["the ferry leaves at noon", "the train leaves at dusk"])
        await each.forget_fragments([told.outcomes[0].fragment_id])
    ended = await client.finished(await client.start_purge(namespace, name))
    assert ended.state is OperationState.SUCCEEDED
    assert (await memory.stats()).forgotten == 0
    await client.finished(await client.start_purge(namespace))
    assert ((await kept.stats()).forgotten, (await kept.stats()).long_term) == (1, 1)
    assert [each.memory async for each in client.operations(namespace)] == ["", name]
    assert [each.memory async for each in client.operations(namespace, name, page_size=1)] == [name]


async def test_a_repeat_gets_the_first_operation(shared: ServerProcess, path: str) -> None:
    async with grpc.aio.insecure_channel(shared.address) as channel:
        stub = OperationServiceStub(channel)
        request = pb.StartPurgeRequest(request_id=path, namespace=path.partition("/")[0])
        first, second = await asyncio.gather(stub.StartPurge(request), stub.StartPurge(request))
        assert first.operation.id == second.operation.id
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.StartPurge(pb.StartPurgeRequest(request_id=path, namespace=request.namespace, memory="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND or "request_id" in str(caught.value.details())


async def test_pages_go_from_the_newest_to_the_oldest(client: memstream.Client, path: str) -> None:
    namespace = path.partition("/")[0]
    started = [(await client.start_purge(namespace)).id for _ in range(5)]
    assert [each.id async for each in client.operations(namespace, page_size=2)] == started[::-1]


async def test_what_is_refused(client: memstream.Client, path: str) -> None:
    with pytest.raises(memstream.ModelMismatch, match="next_embedding"):
        await client.start_reindex(embed=True)
    with pytest.raises(memstream.MemoryNotFound):
        await client.start_purge(*path.split("/"))
    with pytest.raises(memstream.InvalidRequest, match="namespace"):
        await client.start_purge("", "joy")
    with pytest.raises(memstream.InvalidRequest, match="namespace"):
        await client.start_purge("a b")
    for ask in (client.operation, client.cancel_operation, client.finished):
        with pytest.raises(memstream.OperationNotFound):
            await ask("01J00000000000000000000000")
        with pytest.raises(memstream.InvalidRequest):
            await ask("")
    with pytest.raises(memstream.InvalidRequest):
        [each async for each in client.operations("", "joy")]


async def test_cancelling_an_ended_query_does_nothing(client: memstream.Client, path: str) -> None:
    ended = await client.finished(await client.start_purge(path.partition("/")[0]))
    assert await client.cancel_operation(ended.id) == ended


def test_the_blocking_client_has_it_all(shared: ServerProcess, path: str) -> None:
    namespace = path.partition("/")[0]
    with memstream.sync.connect(shared.address) as client:
        looks: list[memstream.Operation] = []
        ended = client.finished(client.start_purge(namespace), looks.append)
        assert ended == looks[-1] == client.operation(ended.id) == client.cancel_operation(ended.id)
        assert list(client.operations(namespace)) == [ended]
        with pytest.raises(memstream.ModelMismatch):
            client.start_reindex(embed=True)
