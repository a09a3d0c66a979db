"""Milvus Lite fails in many ways: recall answers, and the index converges to the journal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import memstream
from memstream import Memory, Observation
from memstream_server.adapters.milvus.index import open_lite
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import contents, indexed
from tests.support import journals
from tests.support.processes import pause
from tests.support.seeds import THOROUGH
from tests.support.server import ServerProcess
from tests.support.waiting import until

pytestmark = pytest.mark.with_index

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds the child process in /proc")
SEARCHES_MILVUS = {"dense_bytes_max": 0, "drain_grace_s": 60.0}
"""No vectors in RAM: the dense leg is Milvus plus rows that are not flushed yet. A stop has time to flush them."""


def about(number: int) -> str:
    return f"On day {number} the ship passed island number {number * 7}."


async def in_index(data_dir: Path, uid: str) -> list[str]:
    """The index's ids of a memory, read without a server."""
    journal = await journals.open_test_journal(data_dir, lambda: 0, reserve_bytes=0)
    index = await open_lite(data_dir)
    try:
        space = await journal.get_space()
        assert space is not None
        assert not await index.open(space), "the index is empty"
        ids = await index.list_ids(uid)
        assert await index.count(uid) == len(ids)
        return ids
    finally:
        await index.close()
        await journal.close()


async def check_index(server: ServerProcess, memory: Memory) -> None:
    """Stops the server; the index then holds exactly the long-term fragments of the memory."""
    listed = [one.id async for one in memory.list_fragments(memstream.Filter(tiers=[memstream.Tier.LONG_TERM]))]
    uid = (await memory.describe()).uid
    assert await stopped(server) == 0
    assert await in_index(server.data_dir, uid) == sorted(listed)


async def test_stop_flushes_the_index_backlog(make_server: MakeServer) -> None:
    server = await started(make_server(**SEARCHES_MILVUS, index_flush_interval_s=600.0))
    async with memstream.connect(server.address) as client:

        async def ready() -> bool:
            return not (await client.server_info()).degraded

        await until(ready)
        memory = await client.create_memory("sea/log", kind=memstream.MemoryKind.LONG_TERM)
        await memory.observe_batch([about(number) for number in range(50)])
        assert (await memory.stats()).unindexed == 50
        await check_index(server, memory)
    assert journals.query_rows(server.data_dir, "SELECT count(*) FROM outbox") == [(0,)]


@linux
async def test_index_client_works_without_pandas(make_server: MakeServer) -> None:
    """Saves 70 MB in each process, which Milvus' packages would import."""
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/small", kind=memstream.MemoryKind.LONG_TERM)
        await memory.observe_batch([about(number) for number in range(50)])
        await until(lambda: indexed(client, memory))
        answer = await memory.recall_once("island number 210", limit=1, reinforce=False)
        assert (answer[0].fragment.content, answer.degraded) == (about(30), "")
        loaded = {pid: _loaded(pid) for pid in (server.pid, *server.children())}
    assert len(loaded) == 2
    assert all("cygrpc" in maps for maps in loaded.values()), "the maps show loaded libraries"
    assert [pid for pid, maps in loaded.items() if "pandas" in maps] == []
    assert "libarrow" not in loaded[server.pid]


def _loaded(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text("utf-8")


@linux
async def test_kills_of_milvus_lite_while_it_is_written_to(make_server: MakeServer) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/killed", kind=memstream.MemoryKind.LONG_TERM)
        async with memory.observe("joy") as stream:
            for number in range(600):
                await stream.send(about(number))
                if number % 300 == 150:
                    await stream.flush()
                    await until(lambda: _has_child(server))
                    os.kill(server.children()[0], signal.SIGKILL)
                    answer = await memory.recall_once("island number 1050", limit=3, reinforce=False)
                    assert answer[0].fragment.content == about(150)
        await until(lambda: indexed(client, memory))
        answer = await memory.recall_once("island number 4060", limit=1, reinforce=False)
        assert (answer[0].fragment.content, answer.degraded) == (about(580), "")
        assert len(await contents(memory)) == 600
        await check_index(server, memory)


async def _has_child(server: ServerProcess) -> bool:
    return bool(server.children())


@linux
async def test_recall_without_index_is_marked_degraded(make_server: MakeServer) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/gone", kind=memstream.MemoryKind.LONG_TERM)
        await memory.observe_batch([about(number) for number in range(50)])
        await until(lambda: indexed(client, memory))

        async def degraded_after_kill() -> str:  # a later search may find that it has restarted
            _kill_lite(server)
            return await _degraded(memory)

        degraded = await until(degraded_after_kill)
        assert "index" in degraded or "Milvus" in degraded
        await until(lambda: _sound(memory))


def _kill_lite(server: ServerProcess) -> None:
    for pid in server.children():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _degraded(memory: Memory) -> str:
    answer = await memory.recall_once("island number 70", limit=1, reinforce=False)
    assert answer[0].fragment.content == about(10)  # by its words, whatever the dense leg finds
    return answer.degraded


async def _sound(memory: Memory) -> bool:
    return not await _degraded(memory)


@linux
async def test_lost_index_marks_recalls_degraded(make_server: MakeServer) -> None:
    """Its directory is deleted and its process killed: every answer is correct or marked degraded."""
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/lost", kind=memstream.MemoryKind.LONG_TERM)
        async with memory.observe("joy") as stream:
            for number in range(300):
                await stream.send(Observation(about(number), embedding=_direction(number)))
        await until(lambda: indexed(client, memory))
        for pid in server.children():  # else it may write into a directory that is being removed
            pause(pid)
        shutil.rmtree(server.data_dir / "milvus")
        said = recovered = False
        while not (recovered and await indexed(client, memory)):
            if not said:  # a later search may find that it has restarted and is filled again
                _kill_lite(server)
            # By its vector alone: the query shares no word with the memory.
            answer = await memory.recall_once("zzz", embedding=_direction(17), limit=1, reinforce=False)
            assert answer.degraded or answer[0].fragment.content == about(17)
            said = said or bool(answer.degraded)
            recovered = said and not answer.degraded
        await check_index(server, memory)


def _direction(number: int) -> list[float]:
    vector = [0.0] * 384
    vector[number] = 1.0
    return vector


def _removed(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "milvus")


def _garbled(data_dir: Path) -> None:
    files = [file for file in (data_dir / "milvus").rglob("*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(b"\0garbage" * 9)


def _truncated(data_dir: Path) -> None:
    files = [*(data_dir / "milvus").rglob("*.parquet")]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.drawn
@pytest.mark.parametrize("damage", [_removed, _garbled, _truncated] if THOROUGH else [_truncated])
async def test_a_damaged_index_is_filled_again(make_server: MakeServer, damage: Callable[[Path], None]) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/damaged", kind=memstream.MemoryKind.LONG_TERM)
        await memory.observe_batch([about(number) for number in range(300)])
        await until(lambda: indexed(client, memory))
        before = await _answers(memory)
    assert await stopped(server) == 0
    await asyncio.to_thread(damage, server.data_dir)
    await started(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("index/damaged")
        at_once = await memory.recall_once("island number 2093", limit=1, reinforce=False)
        assert at_once[0].fragment.content == about(299)
        await until(lambda: indexed(client, memory))
        assert await _answers(memory) == before


async def _answers(memory: Memory) -> list[list[str]]:
    questions = ["Which island on day 40?", "island number 700", "the ship"]
    answers = [await memory.recall_once(question, limit=5, reinforce=False) for question in questions]
    assert [answer.degraded for answer in answers] == [""] * 3
    return [[one.fragment.content for one in answer] for answer in answers]


async def test_what_leaves_long_term_leaves_the_index(make_server: MakeServer) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        kept = await client.create_memory("index/kept", kind=memstream.MemoryKind.LONG_TERM)
        deleted = await client.create_memory("index/deleted", kind=memstream.MemoryKind.LONG_TERM)
        for memory in (kept, deleted):
            await memory.observe_batch([about(number) for number in range(20)])
        await until(lambda: indexed(client, kept, deleted))
        uid = (await deleted.describe()).uid
        await deleted.delete()
        await kept.observe_batch(["One more thing."])
        await until(lambda: indexed(client, kept))
        await check_index(server, kept)
    assert await in_index(server.data_dir, uid) == []


async def test_the_index_finds_what_ram_finds(make_server: MakeServer) -> None:
    """The same queries answered from vectors in RAM and from Milvus: the same best hit, and nearly the same ten."""
    found: list[list[list[str]]] = []
    for place, dense_bytes in enumerate([1 << 30, 0]):
        server = await started(make_server(f"data{place}", dense_bytes_max=dense_bytes))
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("index/both", kind=memstream.MemoryKind.LONG_TERM)
            await memory.observe_batch([_dated(number) for number in range(600)])
            await until(lambda client=client, memory=memory: indexed(client, memory))  # type: ignore[misc]  # defaults bind the loop's values
            answers = [await memory.recall_once(each, limit=10, reinforce=False) for each in _QUESTIONS]
            found.append([[one.fragment.content for one in answer] for answer in answers])
        await stopped(server)
    for in_ram, in_milvus in zip(*found, strict=True):
        assert in_ram[0] == in_milvus[0]
        assert len(set(in_ram) & set(in_milvus)) >= 9


_QUESTIONS: Sequence[str] = [
    *("island number 77", "Which day did we pass number 350?", "On day 500 the ship", "ships and islands"),
    *("passing 2100", "day 299", "the island of day 13", "number seven"),
]


def _dated(number: int) -> Observation:
    return Observation(about(number), session=f"week-{number // 7}")


@linux
async def test_milvus_lite_starts_with_first_long_term_row(make_server: MakeServer) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("index/first", kind=memstream.MemoryKind.SENSORY)
        await memory.observe_batch([about(1)])
        assert (await memory.recall_once("island number 7", limit=1, reinforce=False)).degraded == ""
        assert server.children() == []
        lasting = await client.create_memory("index/lasting", kind=memstream.MemoryKind.LONG_TERM)
        await lasting.observe_batch([about(number) for number in range(10)])
        await until(lambda: indexed(client, lasting))
        assert len(server.children()) == 1
        await check_index(server, lasting)


@linux
async def test_grown_memory_starts_and_fills_milvus_lite(make_server: MakeServer) -> None:
    """The rows that were dropped before are in the index too, also those of a memory that stays small."""
    server = await started(make_server(index_from_fragments=40))
    async with memstream.connect(server.address) as client:
        small = await client.create_memory("index/small", kind=memstream.MemoryKind.LONG_TERM)
        grown = await client.create_memory("index/grown", kind=memstream.MemoryKind.LONG_TERM)
        for memory in (small, grown):
            await memory.observe_batch([about(number) for number in range(20)])
            await until(lambda memory=memory: indexed(client, memory))  # type: ignore[misc]  # defaults bind the loop's values
        assert server.children() == []
        await grown.observe_batch([about(number) for number in range(20, 60)])
        await until(lambda: _has_child(server))
        await until(lambda: indexed(client, grown))
        answer = await grown.recall_once("island number 70", limit=1, reinforce=False)
        assert (answer[0].fragment.content, answer.degraded) == (about(10), "")
        uid = (await small.describe()).uid
        await check_index(server, grown)
    assert len(await in_index(server.data_dir, uid)) == 20


@linux
async def test_restart_with_small_memories_starts_no_lite(make_server: MakeServer) -> None:
    server = make_server(index_from_fragments=40)
    for number in range(2):
        await started(server)
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("index/small", kind=memstream.MemoryKind.LONG_TERM, exist_ok=True)
            await memory.observe_batch([about(number)])
            await until(lambda client=client, memory=memory: indexed(client, memory))  # type: ignore[misc]  # defaults bind the loop's values
            assert (await client.server_info()).degraded == ""
            assert (server.children(), len(await contents(memory))) == ([], number + 1)
        assert await stopped(server) == 0
    assert not (server.data_dir / "milvus").exists()
