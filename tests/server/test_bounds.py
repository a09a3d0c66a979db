"""Bounds of RAM, time and waiting: memories that come and go, expiry, backlog, windows."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import memstream
from memstream import Memory, MemoryKind, Observation
from tests.server.conftest import MakeServer, started
from tests.server.listing import contents, fragments, observed_once
from tests.support.scripted_models import VECTOR_BYTES
from tests.support.waiting import until

MEMORIES = 6


async def test_more_memories_than_fit_into_ram(make_server: MakeServer) -> None:
    """Six memories in turn where two fit: each answers correctly, before and after its eviction."""
    server = await started(make_server(active_memories_max=2))
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bounds/m{number}") for number in range(MEMORIES)]
        for turn in range(5):
            for number, memory in enumerate(memories):
                await memory.observe_batch([f"In turn {turn} memory {number} had the code {turn * 100 + number}."])
                answer = await memory.recall_once(f"code {turn * 100 + number}", limit=1)
                assert answer[0].fragment.content == _said(turn, number)
        for number, memory in enumerate(memories):
            assert sorted(await contents(memory)) == sorted(_said(turn, number) for turn in range(5))
        active = [(await memory.stats()).active for memory in memories]
        assert sum(active) <= 2


def _said(turn: int, number: int) -> str:
    return f"In turn {turn} memory {number} had the code {turn * 100 + number}."


async def test_memories_used_at_once_where_two_fit(make_server: MakeServer) -> None:
    """No call is refused because another memory needs the space: memories in use stay, and are evicted later."""
    server = await started(make_server(active_memories_max=2))
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bounds/m{number}") for number in range(MEMORIES)]

        async def use(number: int, memory: Memory) -> None:
            for turn in range(25):
                await memory.observe_batch([_said(turn, number)])
                answer = await memory.recall_once(f"code {turn * 100 + number}", limit=1)
                assert answer[0].fragment.content == _said(turn, number)

        await asyncio.gather(*(use(number, memory) for number, memory in enumerate(memories) for _ in range(1)))
        for number, memory in enumerate(memories):
            assert sorted(await contents(memory)) == sorted(_said(turn, number) for turn in range(25))
            assert await observed_once(memory) == 25


async def test_streams_keep_their_memories(make_server: MakeServer) -> None:
    server = await started(make_server(active_memories_max=1))
    async with memstream.connect(server.address) as client:
        memories = [await client.create_memory(f"bounds/m{number}") for number in range(3)]

        async def talk(memory: Memory) -> None:
            async with memory.observe("joy") as stream, memory.recall() as recall:
                for number in range(100):
                    await stream.send(f"{memory.name} said {number}")
                    if number % 20 == 0:
                        await stream.flush()
                        assert len(await recall.query(f"said {number}", limit=1)) == 1

        await asyncio.gather(*(talk(memory) for memory in memories))
        for memory in memories:
            assert await contents(memory) == [f"{memory.name} said {number}" for number in range(100)]


async def test_memory_larger_than_ram_keeps_answering(make_server: MakeServer) -> None:
    """Beyond twice the bound vectors move from RAM to Milvus; nothing is missing meanwhile."""
    server = await started(make_server(dense_bytes_max=40 * VECTOR_BYTES))
    vectors = {number: _vector(number) for number in range(120)}
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("bounds/growing", kind=MemoryKind.LONG_TERM)
        for number in range(120):
            await memory.observe_batch([Observation(f"entry {number}", embedding=vectors[number])])
            # By the vector alone: the query shares no word with any entry.
            for asked in {number, number // 2, 0}:
                answer = await memory.recall_once("zzz", embedding=vectors[asked], limit=1, reinforce=False)
                assert answer[0].fragment.content == f"entry {asked}", (number, answer.degraded)


def _vector(number: int) -> list[float]:
    """A distinct unit vector."""
    vector = [0.0] * 384
    vector[number] = 1.0
    return vector


async def test_what_has_expired_is_not_recalled(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    await memory.observe_batch(
        [
            Observation("the password is swordfish", ttl=timedelta(milliseconds=400)),
            Observation("the password was herring"),
        ]
    )
    await until(lambda: _recalled_alone(memory, "the password was herring"))
    pinned = await memory.recall_once("swordfish", limit=5)
    assert "the password is swordfish" not in [one.fragment.content for one in pinned]


async def _recalled_alone(memory: Memory, content: str) -> bool:
    answer = await memory.recall_once("password", reinforce=False)
    return [one.fragment.content for one in answer] == [content]


async def test_a_small_backlog_throttles_and_loses_nothing(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, policy={"backlog_max": 20})
    async with memory.observe("joy") as stream:
        for number in range(1_000):
            await stream.send(f"word {number}")
    assert await contents(memory) == [f"word {number}" for number in range(1_000)]


async def test_a_small_window_bounds_and_loses_nothing(make_server: MakeServer) -> None:
    server = await started(make_server(window_observations=3, window_bytes=65_536))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("bounds/window", kind=MemoryKind.LONG_TERM)
        said = [f"{number} {'x' * (number * 97 % 30_000)}" for number in range(200)]
        async with memory.observe("joy") as stream:
            for words in said:
                await stream.send(words)
        assert [one.content for one in await fragments(memory)] == said


async def test_settings_bound_what_a_request_holds(make_server: MakeServer) -> None:
    server = await started(
        make_server(
            content_max_bytes=100, metadata_entries_max=2, metadata_max_bytes=50, id_max_chars=40, recall_limit_max=3
        )
    )
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("bounds/small")
        await memory.observe_batch([Observation("x" * 100, metadata={"a": 1, "b": "v" * 40}, external_id="e" * 40)])
        for wrong in (
            Observation("x" * 101),
            Observation("x", metadata={"a": 1, "b": 2, "c": 3}),
            Observation("x", metadata={"a": "v" * 60}),
            Observation("x", external_id="e" * 41),
        ):
            with pytest.raises(memstream.InvalidRequest):
                await memory.observe_batch([wrong])
        assert len(await memory.recall_once("x", limit=3)) == 1
        with pytest.raises(memstream.InvalidRequest, match=r"query\.limit"):
            await memory.recall_once("x", limit=4)
        assert len(await contents(memory)) == 1


async def test_excess_calls_are_refused_and_streams_continue(make_server: MakeServer) -> None:
    """Two calls wait for a revision that a stream will write: a third is refused with a retry delay, then there is
    room."""
    server = await started(make_server(calls_in_flight_max=2))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("bounds/calls")
        async with memory.observe("joy") as stream:
            await stream.send("before")
            await stream.flush()
            awaited = (await memory.describe()).revision + 1
            waiting = [asyncio.create_task(_recall_at(memory, awaited)) for _ in range(2)]
            refused = await until(lambda: _refused(memory))
            assert refused.retry_after == 1.0
            assert "2 calls" in refused.message
            assert not any(task.done() for task in waiting)
            await stream.send("said at last")
            await stream.flush()
            answers = await asyncio.gather(*waiting)
        assert ["said at last" in {hit.fragment.content for hit in answer} for answer in answers] == [True, True]
        assert len(await contents(memory)) == 2


async def _recall_at(memory: memstream.Memory, revision: int) -> memstream.Answer:
    """Repeats a refused recall: the call that looks for the refusal may take its place for a moment."""
    while True:
        try:
            return await memory.recall_once("said", min_revision=revision)
        except memstream.QuotaExceeded:
            await asyncio.sleep(0.01)


async def _refused(memory: memstream.Memory) -> memstream.QuotaExceeded | None:
    try:
        await memory.describe()
    except memstream.QuotaExceeded as error:
        return error
    return None
