"""Several servers on PostgreSQL alone, and what a memory lacks that does not fit in RAM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import memstream
from memstream import MemoryKind, Observation
from tests.cli.commands import run
from tests.server.conftest import started, stopped
from tests.server.listing import contents
from tests.support.waiting import until
from tests.toolchains.fleet import Fleet, Load, connect_clients
from tests.toolchains.milvus import MilvusServer

pytestmark = pytest.mark.toolchain
SMALL: dict[str, str | float] = {"dense_bytes_max": 153_600, "index_overlay_s": 0.0}


async def test_every_server_serves_every_memory(plain_fleet: Fleet) -> None:
    servers = await plain_fleet.start(3)
    async with connect_clients(*servers) as clients:
        for number, client in enumerate(clients):
            await client.create_memory(f"plain/m{number}")
        for number in range(3):
            for speaker in (number, (number + 1) % 3, (number + 2) % 3):  # the first one becomes the owner
                text = f"server {speaker} speaks to m{number}"
                memory = clients[speaker].memory(f"plain/m{number}")
                await memory.observe_batch([text])
                answer = await memory.recall_once(text, limit=1)
                assert (answer[0].fragment.content, answer.degraded) == (text, "")
        assert {plain_fleet.owner(f"m{number}") for number in range(3)} == {server.address for server in servers}
        info = await clients[0].server_info()
        assert (info.index, info.degraded) == ("none: milvus_uri is empty", "")
    assert [await stopped(server) for server in servers] == [0, 0, 0]


async def test_a_killed_servers_memories_are_taken_over(plain_fleet: Fleet) -> None:
    """Nothing acknowledged is lost or doubled, and the server that took over recalls at once."""
    survivor, victim, other = await plain_fleet.start(3)
    async with connect_clients(survivor, victim, other) as (one, two, three):
        memory = await two.create_memory("plain/joy")
        await memory.observe_batch(["the key is under the mat"])
        assert plain_fleet.owner("joy") == victim.address
        load = Load(three, seed=7)
        await load.start(memories=2, producers=1)
        await asyncio.to_thread(victim.kill)
        answer = await one.memory("plain/joy").recall_once("where is the key?", limit=1)
        assert answer[0].fragment.content == "the key is under the mat"
        assert plain_fleet.owner("joy") == survivor.address
        await load.wait_for_progress()
        await load.finish()
        await one.memory("plain/joy").observe_batch(["the key moved to the shed"])
        assert await contents(three.memory("plain/joy")) == ["the key is under the mat", "the key moved to the shed"]


def vector(number: int) -> list[float]:
    """The unit vector of one direction, of the dimension of `hashing`."""
    return [float(place == number) for place in range(384)]


async def fill(memory: memstream.Memory, first: int, last: int) -> None:
    for start in range(first, last, 100):
        numbers = range(start, min(start + 100, last))
        await memory.observe_batch(
            [Observation(f"entry {number} is an entry", embedding=vector(number)) for number in numbers]
        )


async def test_a_memory_beyond_ram_says_what_it_lacks(plain_fleet: Fleet, tmp_path: Path) -> None:
    server = await started(plain_fleet.make(**SMALL))
    async with connect_clients(server) as (client,):
        memory = await client.create_memory("plain/large", kind=MemoryKind.LONG_TERM)
        await fill(memory, 0, 100)
        assert (await memory.recall_once("nothing", embedding=vector(5), limit=1)).degraded == ""
        await fill(memory, 100, 300)
        await until(lambda: _is_degraded(memory))
    assert await stopped(server) == 0
    await started(server)
    async with connect_clients(server) as (client,):
        memory = client.memory("plain/large")
        answer = await memory.recall_once("nothing", embedding=vector(5), limit=1)
        assert "no Milvus (milvus_uri)" in answer.degraded
        assert answer[0].fragment.content.startswith("entry 5 ")  # by a vector that it holds
        by_words = await memory.recall_once("entry 150", limit=1)
        assert by_words[0].fragment.content.startswith("entry 150 ")
        info = await client.server_info()
        assert info.degraded == "no Milvus (milvus_uri) for 1 memories that do not fit in RAM"
    file = tmp_path / "settings.toml"
    file.write_text(f"journal_url = {json.dumps(plain_fleet.url)}\ndense_bytes_max = 153600\n")
    examined = await asyncio.to_thread(run, "doctor", "--config", str(file), "--json")
    found = json.loads(examined.stdout)["findings"]
    (sizes,) = (one for one in found if one["subject"] == "memory sizes")
    assert sizes["level"] == "problem"
    assert "plain/large (300 vectors)" in sizes["text"]
    assert "set milvus_uri" in sizes["advice"]


async def _is_degraded(memory: memstream.Memory) -> bool:
    answer = await memory.recall_once("nothing", embedding=vector(5), limit=1, reinforce=False)
    return "no Milvus" in answer.degraded


async def test_servers_gain_a_milvus_one_by_one(plain_fleet: Fleet, milvus: MilvusServer) -> None:
    """The leader without an index drops rows; the first leader with one finds all of them."""
    plain = await started(plain_fleet.make(**SMALL))
    async with connect_clients(plain) as (client,):
        memory = await client.create_memory("grown/large", kind=MemoryKind.LONG_TERM)
        await fill(memory, 0, 300)
        await until(lambda: _is_degraded(memory))
        indexed = await started(plain_fleet.make(**SMALL, milvus_uri=milvus.uri))
        await fill(memory, 300, 320)
    assert await stopped(plain) == 0
    async with connect_clients(indexed) as (client,):
        memory = client.memory("grown/large")

        async def finds_all() -> bool:
            answers = [
                await memory.recall_once("nothing", embedding=vector(number), limit=1, reinforce=False)
                for number in (25, 250)
            ]
            # Milvus shows rows a moment after it has taken them.
            found = [hit.fragment.content for answer in answers if not answer.degraded for hit in answer]
            return found == ["entry 25 is an entry", "entry 250 is an entry"]

        await until(finds_all)
