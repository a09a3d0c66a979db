"""DB-GPT's defects that only a running server can show, each with the correct result (the others: tests/core)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import memstream
from memstream import EventType, Memory, MemoryKind, Observation, Profile
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents, fragments, history, observed_once
from tests.support.fake_openai import FakeOpenAI
from tests.support.waiting import until


async def test_now_is_not_the_time_the_memory_was_made(client: memstream.Client, path: str) -> None:
    """DB-GPT froze `now` in the constructor: every fragment got the same times."""
    memory = await client.create_memory(path)
    made = (await memory.describe()).create_time
    assert made is not None
    for word in ("one", "two"):
        await asyncio.sleep(0.01)
        await memory.observe_batch([word])
    times = [one.observe_time for one in await fragments(memory)]
    assert [time is not None and time > made for time in times] == [True, True]
    assert times[0] != times[1]


async def test_observation_time_and_query_now_can_be_set(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    day = datetime(2020, 5, 8, 12, tzinfo=UTC)
    await memory.observe_batch(
        [Observation("the ferry was late", observe_time=day), Observation("the ferry was late again")]
    )
    listed = await fragments(memory)
    assert listed[0].observe_time == day
    then = await memory.recall_once("ferry", now=day + timedelta(hours=1), explain=True, limit=2)
    recency = {one.fragment.content: _part(one, "recency") for one in then}
    assert 0.98 < recency["the ferry was late"] < 1.0
    today = await memory.recall_once("ferry", explain=True, limit=2)
    assert {one.fragment.content: _part(one, "recency") for one in today}["the ferry was late"] < 0.001


def _part(found: memstream.Recollection, name: str) -> float:
    assert found.explanation is not None
    return next(part.value for part in found.explanation.parts if part.name == name)


async def test_access_times_are_kept_also_over_a_restart(make_server: MakeServer, path: str) -> None:
    """DB-GPT set them on a copy that it discarded."""
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
        await memory.observe_batch(["Bob likes tea", "It rains in Cork"])
        before = {one.content: one.access_time for one in await fragments(memory)}
        for _ in range(2):
            assert (await memory.recall_once("tea", limit=1))[0].fragment.content == "Bob likes tea"
        await until(lambda: _accessed(memory, "Bob likes tea", 2))
    await restarted(server)
    async with memstream.connect(server.address) as client:
        after = {one.content: one for one in await fragments(client.memory(path))}
    assert (after["Bob likes tea"].access_count, after["It rains in Cork"].access_count) == (2, 0)
    accessed, was = after["Bob likes tea"].access_time, before["Bob likes tea"]
    assert accessed is not None
    assert was is not None
    assert accessed > was
    assert after["It rains in Cork"].access_time == before["It rains in Cork"]


async def _accessed(memory: Memory, content: str, times: int) -> bool:
    return {one.content: one.access_count for one in await fragments(memory)}[content] == times


async def test_the_weights_of_a_query_count(client: memstream.Client, path: str) -> None:
    """DB-GPT ignored alpha, beta and gamma."""
    for profile in Profile:
        memory = await client.create_memory(f"{path}-{profile}", kind=MemoryKind.LONG_TERM, profile=profile)
        await memory.observe_batch(
            [
                Observation("tea, tea, nothing but tea", importance=0.1),
                Observation("a fire in the tea house", importance=1.0),
            ]
        )
        by_words = await memory.recall_once("nothing but tea", weights=memstream.Weights(alpha=0, beta=1, gamma=0))
        by_weight = await memory.recall_once("nothing but tea", weights=memstream.Weights(alpha=0, beta=0, gamma=1))
        assert by_words[0].fragment.content == "tea, tea, nothing but tea"
        assert by_weight[0].fragment.content == "a fire in the tea house"


async def test_reading_feeds_no_copies_back(client: memstream.Client, path: str) -> None:
    """In DB-GPT every read wrote its results into the memory again, under both profiles."""
    for profile in Profile:
        memory = await client.create_memory(f"{path}-{profile}", profile=profile)
        await memory.observe_batch([f"Bob said {number} things about tea" for number in range(8)])
        before = sorted(await contents(memory))
        for _ in range(10):
            await memory.recall_once("tea", limit=8)
        await memory.observe_batch(["Ann likes coffee"])  # decided after everything that the reads caused
        after = sorted(await contents(memory))
        assert len(set(after)) == len(after)
        assert len(after) <= len(before) + 1
        assert await observed_once(memory) == 9


async def test_echo_of_recalled_text_is_not_stored(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    await memory.observe_batch([Observation("Bob likes tea", session="monday")])
    assert len(await memory.recall_once("tea", session="monday")) == 1
    result = await memory.observe_batch([Observation("Bob likes tea", speaker="joy", session="monday")])
    assert result.outcomes[0].type is EventType.ECHOED
    assert await contents(memory) == ["Bob likes tea"]


async def test_clear_empties_and_deleting_deletes(client: memstream.Client, path: str) -> None:
    """In DB-GPT `clear` did nothing."""
    memory = await client.create_memory(path)
    await memory.observe_batch([f"word {number}" for number in range(20)])
    if memstream.Capability.LIFECYCLE in (await client.server_info()).capabilities:
        assert await memory.clear() == 20
        assert await contents(memory) == []
        assert len(await memory.recall_once("word 3")) == 0
        assert [one.type for one in await history(memory)].count(EventType.DROPPED) == 20
    await memory.delete()
    anew = await client.create_memory(path)
    assert await contents(anew) == []
    assert len(await anew.recall_once("word 3")) == 0


async def test_metadata_belongs_to_each_fragment(client: memstream.Client, path: str) -> None:
    """In DB-GPT all fragments shared one dict, whose keys became filters of every search."""
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    await memory.observe_batch(
        [
            Observation("tea in Cork", metadata={"city": "Cork"}),
            Observation("tea in Kyoto", metadata={"city": "Kyoto"}),
            Observation("tea at sea"),
        ]
    )
    assert {one.content: dict(one.metadata) for one in await fragments(memory)} == {
        "tea in Cork": {"city": "Cork"},
        "tea in Kyoto": {"city": "Kyoto"},
        "tea at sea": {},
    }
    assert len(await memory.recall_once("tea")) == 3
    kyoto = await memory.recall_once("tea", filter=memstream.Filter(metadata={"city": "Kyoto"}))
    assert [one.fragment.content for one in kyoto] == ["tea in Kyoto"]


async def test_overflow_of_a_fifo_neither_loses_nor_doubles(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, policy={"short_term": {"kind": "fifo", "capacity": 3}})
    said = [f"word {number}" for number in range(10)]
    async with memory.observe("joy") as stream:
        for word in said:
            await stream.send(word)
    assert await contents(memory) == said
    tiers = [one.tier for one in await fragments(memory)]
    assert tiers == [memstream.Tier.LONG_TERM] * 7 + [memstream.Tier.SHORT_TERM] * 3


async def test_model_call_blocks_no_read_and_no_other_memory(make_server: MakeServer) -> None:
    """DB-GPT called the model inside the memory's lock: readers waited for it."""
    vector = [1.0] + [0.0] * 7
    async with FakeOpenAI(dimension=8) as fake:
        server = await started(
            make_server(embedding="openai", embedding_base_url=fake.base_url, embedding_model="fake-8")
        )
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("defects/joy")
            await memory.observe_batch([Observation("Bob likes tea", embedding=vector)])
            fake.hold()
            async with memory.observe("joy") as stream:
                sent = await stream.send("Ann likes coffee")
                await until(lambda: _asked(fake))
                answer = await memory.recall_once("tea", embedding=vector)
                assert [one.fragment.content for one in answer] == ["Bob likes tea"]
                await memory.update(labels={"mood": "calm"})  # an unrelated transition passes as well
                assert await contents(memory) == ["Bob likes tea"]
                assert not sent.done
                fake.release()
                await sent
            assert sorted(await contents(memory)) == ["Ann likes coffee", "Bob likes tea"]


async def _asked(fake: FakeOpenAI) -> bool:
    return fake.in_flight > 0
