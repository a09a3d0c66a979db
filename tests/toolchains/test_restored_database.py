"""pg_dump and pg_restore of a journal, as docs/operations.md has it, beside an index that is ahead of the dump."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import memstream
from memstream import Memory, MemoryKind, Observation
from memstream_server.adapters.journal.store import open_journal
from memstream_server.adapters.milvus.index import connect_milvus, open_lite
from tests.server.conftest import WITH_INDEX, check_log, started, stopped
from tests.server.listing import contents, fragments, indexed, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until
from tests.toolchains.milvus import MilvusServer
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

DIMENSION = 384


def direction(number: int) -> list[float]:
    vector = [0.0] * DIMENSION
    vector[number] = 1.0
    return vector


def content(number: int) -> str:
    return f"On day {number} it rained."


def said(number: int) -> Observation:
    return Observation(content(number), embedding=direction(number))


async def found(memory: Memory, number: int) -> bool:
    """By its vector alone: no word of the query is in the memory. Milvus shows a row a moment after it has taken it."""
    answer = await memory.recall_once("zzz", embedding=direction(number), limit=1, reinforce=False)
    return [hit.fragment.content for hit in answer] == [content(number)]


async def in_index(server: ServerProcess, url: str, milvus: str, uid: str) -> set[str]:
    """What the index has of a memory, read by nobody's server."""
    journal = await open_journal(server.data_dir, url=url, clock_us=lambda: 0)
    index = connect_milvus(milvus, consistency="Strong") if milvus else await open_lite(server.data_dir)
    try:
        space = await journal.get_space()
        assert space is not None
        assert not await index.open(space)
        return set(await index.list_ids(uid))
    finally:
        await index.close()
        await journal.close()


@pytest.mark.parametrize("kind", ["server"])  # on a database no Milvus Lite starts
async def test_an_index_ahead_of_a_restored_dump_is_repaired(
    postgres: Cluster, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    milvus: MilvusServer | None = request.getfixturevalue("milvus") if kind == "server" else None
    url, dump, uri = postgres.database(), tmp_path / "monday.dump", milvus.uri if milvus else ""
    settings = WITH_INDEX | {"dense_bytes_max": 0, "index_overlay_s": 30.0, "journal_url": url, "milvus_uri": uri}
    with ServerProcess(tmp_path / "data").configure(**settings) as server:
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("restored/joy", kind=MemoryKind.LONG_TERM)
            await memory.observe_batch([said(number) for number in range(100)], producer="joy", first_sequence=1)
            await until(lambda: indexed(client, memory))
            await asyncio.to_thread(postgres.dump, url, dump)
            await memory.forget_fragments([one.id for one in (await fragments(memory))[:10]])
            await memory.observe_batch([said(number) for number in range(100, 150)])
            uid = (await memory.describe()).uid
            await until(lambda: indexed(client, memory))
        assert await stopped(server) == 0
        assert len(await in_index(server, url, uri, uid)) == 140
        await asyncio.to_thread(postgres.restore, url, dump)
        await started(server)
        await until(lambda: _reconciled(server))
        async with memstream.connect(server.address) as client:
            memory = client.memory("restored/joy")
            await until(lambda: indexed(client, memory))
            assert await contents(memory) == [content(number) for number in range(100)]
            for number in (3, 50):
                await until(lambda number=number: found(memory, number))  # type: ignore[misc]  # bound at once
            listed = {one.id for one in await fragments(memory)}
            await memory.observe_batch([said(100)], producer="joy", first_sequence=101)
            await until(lambda: found(memory, 100))
            await until(lambda: indexed(client, memory))
            listed = {one.id for one in await fragments(memory)}
        assert await stopped(server) == 0
        assert await in_index(server, url, uri, uid) == listed
    check_log(server)


async def _reconciled(server: ServerProcess) -> bool:
    return "index_reconciled" in server.log()


async def test_a_dump_during_writes_is_a_consistent_snapshot(postgres: Cluster, tmp_path: Path) -> None:
    """It has everything acknowledged before it; a client that is ahead resends the rest, or gets an error."""
    url, dump = postgres.database(), tmp_path / "monday.dump"
    with ServerProcess(tmp_path / "data", free_address(), **WITH_INDEX, journal_url=url) as server:
        async with memstream.connect(server.address, retry=PATIENT) as client:
            memory = await client.create_memory("dumped/joy")
            producers = [Producer(memory, f"p{number}", random.Random(number)) for number in range(3)]
            talking = [asyncio.create_task(one.run()) for one in producers]
            await until(lambda: _all_received(producers, 100))
            before = [one.ledger.received for one in producers]
            await asyncio.to_thread(postgres.dump, url, dump)
            beyond = max(one.ledger.received for one in producers) + 1
            await until(lambda: _all_received(producers, beyond))
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
        assert await stopped(server) == 0
        await asyncio.to_thread(postgres.restore, url, dump)
        await started(server)
        async with memstream.connect(server.address) as client:
            memory = client.memory("dumped/joy")
            total = 0
            for one, least in zip(producers, before, strict=True):
                async with memory.observe(one.name, session=one.name) as stream:
                    assert stream.received >= least
                    for _ in range(20):
                        await stream.send(words(one.name, stream.expected_sequence))
                total += stream.stored
            kept = await contents(memory)
            for one in producers:
                mine = [content for content in kept if content.startswith(f"{one.name} ")]
                assert mine == [words(one.name, number) for number in range(1, len(mine) + 1)]
            assert len(kept) == total == await observed_once(memory)
    check_log(server)


async def _all_received(producers: list[Producer], number: int) -> bool:
    return all(one.ledger.received >= number for one in producers)
