"""Everything is embedded again under another model: recalls and observations continue, nothing of the old model is
left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import grpc.aio
import pytest

import memstream
from memstream import Memory, MemoryKind
from memstream.v1 import operation_pb2, operation_service_pb2
from memstream.v1.operation_service_pb2_grpc import OperationServiceStub
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.server.listing import contents, fragments, indexed
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.journals import query_rows
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.seeds import rounds
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.with_index

NEXT = "fake-16"
NOW = datetime(2026, 5, 8, tzinfo=UTC)
ANIMALS = ("otter", "heron", "badger", "lynx", "raven", "stoat")
FOODS = ("fish", "frogs", "roots", "hares", "eggs", "berries", "beetles", "voles", "honey", "snails")
TEXTS = [f"the {animal} of the {food} valley" for animal in ANIMALS for food in FOODS]
MEMORIES = rounds(6, 3)
DOWN = Fault(status=503)
OUTAGE = [DOWN] * 10_000
ENDED_S = 180.0
"""An operation that waits for a model asks it again after up to 30 s, and each attempt has timeouts of its own."""


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


def next_model(fake: FakeOpenAI, prefix: str = "next_") -> dict[str, str | float]:
    return {
        f"{prefix}embedding": "openai",
        f"{prefix}embedding_base_url": fake.base_url,
        f"{prefix}embedding_model": NEXT,
        "embedding_retries": 0,
        "embedding_timeout_s": 60.0,
        "index_partitions": 2,
        "dense_bytes_max": 40 * VECTOR_BYTES,
    }


class Operations:
    """The operations of a server, read over the wire."""

    def __init__(self, stub: OperationServiceStub) -> None:
        self._stub = stub

    async def start(self, embed: bool = True) -> str:
        return (await self._stub.StartReindex(operation_service_pb2.StartReindexRequest(embed=embed))).operation.id

    async def get(self, id: str) -> operation_pb2.Operation:
        return (await self._stub.GetOperation(operation_service_pb2.GetOperationRequest(id=id))).operation

    async def cancel(self, id: str) -> None:
        await self._stub.CancelOperation(operation_service_pb2.CancelOperationRequest(id=id))

    async def ended(self, id: str) -> operation_pb2.Operation:
        async def look() -> operation_pb2.Operation | None:
            operation = await self.get(id)
            return operation if operation.HasField("end_time") else None

        found = await until(look, ENDED_S)
        assert found is not None
        return found

    async def succeeded(self, id: str) -> None:
        operation = await self.ended(id)
        assert operation.state == operation_pb2.OPERATION_STATE_SUCCEEDED, operation


@asynccontextmanager
async def connected(server: ServerProcess) -> AsyncIterator[tuple[memstream.Client, Operations]]:
    async with (
        memstream.connect(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield client, Operations(OperationServiceStub(channel))


class Load:
    """Continuous recalls and observations, and their results."""

    def __init__(self, client: memstream.Client, path: str) -> None:
        self._memory = client.memory(path)
        self.recalls = 0
        self.said: list[str] = []
        self._stop = False

    async def recalling(self) -> None:
        while not self._stop:
            text = TEXTS[self.recalls % len(TEXTS)]
            answer = await self._memory.recall_once(text, limit=5, reinforce=False)
            assert answer.degraded == ""
            assert text in [one.fragment.content for one in answer]
            self.recalls += 1
            await asyncio.sleep(0.02)

    async def observing(self) -> None:
        async with self._memory.observe("steady") as stream:
            while not self._stop:
                text = f"steady word number {len(self.said)}"
                await (await stream.send(text, observe_time=NOW))
                self.said.append(text)
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.recalling()), asyncio.create_task(self.observing())]
        try:
            yield
        finally:
            self._stop = True
            await asyncio.gather(*tasks)


async def ranked(memory: Memory) -> list[list[tuple[str, float]]]:
    """Recalled fragments of some queries, with scores that do not depend on the current time."""
    answers = [
        await memory.recall_once(text, limit=5, now=NOW, weights=memstream.Weights(alpha=0.0), reinforce=False)
        for text in TEXTS[::7]
    ]
    assert {answer.degraded for answer in answers} == {""}
    return [[(one.fragment.content, round(one.score, 4)) for one in answer] for answer in answers]


def models_of(server: ServerProcess) -> set[str]:
    """The spaces of all vectors in the journal."""
    vectors = query_rows(server.data_dir, "SELECT DISTINCT model FROM vectors")
    compared = query_rows(server.data_dir, "SELECT DISTINCT model FROM anchors WHERE vector IS NOT NULL")
    beside = query_rows(server.data_dir, "SELECT DISTINCT next_model FROM anchors WHERE next_vector IS NOT NULL")
    return {model for (model,) in vectors + compared + beside}


async def only_next(server: ServerProcess) -> bool:
    return models_of(server) == {NEXT}


async def all_next(memory: Memory) -> bool:
    return {one.model for one in await fragments(memory)} == {NEXT}


def dated(texts: Iterable[str]) -> list[memstream.Observation]:
    """Observed at one time: the embedded text contains the day, and the fake's vectors depend on every letter."""
    return [memstream.Observation(text, observe_time=NOW) for text in texts]


async def fill(client: memstream.Client, path: str, kind: MemoryKind = MemoryKind.LONG_TERM) -> Memory:
    memory = await client.create_memory(path, kind=kind)
    await memory.observe_batch(dated(TEXTS))
    return memory


async def test_recalls_continue_during_reembedding(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.latency_s = 0.05
    server = await started(make_server(**next_model(fake), embedding_batch_max=8))
    async with connected(server) as (client, operations):
        before = (await client.server_info()).embedding
        large, small = await fill(client, "zoo/large"), await client.create_memory("zoo/small")
        await small.observe_batch(dated(TEXTS[:30]))
        idle = await fill(client, "zoo/idle", MemoryKind.HYBRID)
        await until(lambda: indexed(client, large, small, idle))
        load = Load(client, "zoo/large")
        async with load.running():
            await until(lambda: said(load, 5))
            await operations.succeeded(await operations.start())
            reached = len(load.said), load.recalls
            await until(lambda: said(load, reached[0] + 5))
            await until(lambda: recalled(load, reached[1] + 1))
        info = await client.server_info()
        assert (before.dimension, info.embedding.name, info.embedding.dimension) == (384, NEXT, 16)
        assert set(await contents(large)) == set(TEXTS) | set(load.said)
        for memory in (large, small, idle):
            await until(lambda memory=memory: all_next(memory))
        await until(lambda: only_next(server))
        found = await ranked(large), await ranked(small)
        held = {one.fragment.content: one.fragment.model for one in await idle.recall_once(TEXTS[-1])}
        assert held[TEXTS[-1]] == NEXT
        assert set(held.values()) == {NEXT}
    fresh = await started(make_server("fresh", **next_model(fake, "")))
    async with memstream.connect(fresh.address) as client:
        again = await client.create_memory("zoo/large", kind=MemoryKind.LONG_TERM)
        await again.observe_batch(dated(TEXTS))
        await again.observe_batch(dated(load.said))
        other = await client.create_memory("zoo/small")
        await other.observe_batch(dated(TEXTS[:30]))
        await until(lambda: indexed(client, again, other))
        assert (await ranked(again), await ranked(other)) == found
    assert await stopped(server) == 0
    for settings in (next_model(fake), next_model(fake, "")):  # before and after it became `embedding`
        server = await started(make_server(**settings))
        async with memstream.connect(server.address) as client:
            assert (await client.server_info()).embedding.name == NEXT
            await until(lambda client=client: indexed(client))
            assert await ranked(client.memory("zoo/large")) == found[0]
        assert await stopped(server) == 0


async def said(load: Load, count: int) -> bool:
    return len(load.said) >= count


async def recalled(load: Load, count: int) -> bool:
    return load.recalls >= count


async def some_vectors(server: ServerProcess) -> bool:
    return NEXT in models_of(server)


@pytest.mark.drawn
async def test_killed_operation_resumes_where_it_stopped(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.latency_s = 0.2
    server = await started(make_server(**next_model(fake), embedding_batch_max=4, embedding_concurrency=1))
    async with connected(server) as (client, operations):
        for number in range(MEMORIES):
            await fill(client, f"zoo/{number}")
        operation = await operations.start()
        await until(lambda: some_vectors(server))
    fake.latency_s = 0.0
    asked = sum(map(len, fake.embedded))
    await restarted(server)
    async with connected(server) as (client, operations):
        memory = client.memory("zoo/0")
        assert (await memory.recall_once(TEXTS[0], limit=1))[0].fragment.content == TEXTS[0]
        await operations.succeeded(operation)
        for number in range(MEMORIES):
            await until(lambda number=number: all_next(client.memory(f"zoo/{number}")))
        await until(lambda: only_next(server))
    assert sum(map(len, fake.embedded)) - asked < MEMORIES * len(TEXTS), "what was embedded is not asked for again"


@pytest.mark.drawn
async def test_cancelled_it_leaves_the_model_in_force(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.latency_s = 0.2
    server = await started(make_server(**next_model(fake), embedding_batch_max=4, embedding_concurrency=1))
    async with connected(server) as (client, operations):
        name = (await client.server_info()).embedding.name
        memory = await fill(client, "zoo/large")
        for number in range(MEMORIES - 1):
            await fill(client, f"zoo/{number}")
        await until(lambda: indexed(client, memory))
        found = await ranked(memory)
        operation = await operations.start()
        await until(lambda: some_vectors(server))
        await operations.cancel(operation)
        assert (await operations.ended(operation)).state == operation_pb2.OPERATION_STATE_CANCELLED
        await until(lambda: only(server, name))
        assert await ranked(memory) == found
        fake.latency_s = 0.0
        await operations.succeeded(await operations.start())
        await until(lambda: only_next(server))
        assert await all_next(memory)


async def only(server: ServerProcess, name: str) -> bool:
    return models_of(server) == {name}


async def test_next_model_outage_is_reported_and_waited_for(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(make_server(**next_model(fake)))
    async with connected(server) as (client, operations):
        memory = await fill(client, "zoo/large")
        await until(lambda: indexed(client, memory))
        fake.fail(*OUTAGE)
        operation = await operations.start()

        async def waits() -> bool:
            found = await operations.get(operation)
            return found.state == operation_pb2.OPERATION_STATE_RUNNING and "does not answer" in found.error.message

        await until(waits)
        finished = asyncio.create_task(client.finished(operation))
        await memory.observe_batch(["said meanwhile"])
        answer = await memory.recall_once("said meanwhile", limit=1)
        assert (answer[0].fragment.content, answer.degraded) == ("said meanwhile", "")
        fake.heal()
        await operations.succeeded(operation)
        assert (await finished).state is memstream.OperationState.SUCCEEDED, "what it waited for was no failure"
        assert not (await operations.get(operation)).error.message
        await until(lambda: all_next(memory))


async def test_without_another_model_it_says_what_to_set(make_server: MakeServer, fake: FakeOpenAI) -> None:
    for settings in ({}, {"next_embedding": "hashing"}):
        server = await started(make_server(**settings))
        async with connected(server) as (_, operations):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await operations.start()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "next_embedding" in (refused.value.details() or "")
        assert await stopped(server) == 0
