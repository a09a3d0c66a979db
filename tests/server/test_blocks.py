"""Blocks of a memory through a server: writes with etags, edits, bounds, watches, and a kill."""

from __future__ import annotations

import asyncio

import pytest

import memstream
from memstream import BlockNotFound, EtagMismatch, InvalidRequest, MemoryDeleted, MemoryNotFound, QuotaExceeded, sync
from tests.server.conftest import MakeServer, restarted, started
from tests.support.server import ServerProcess
from tests.support.waiting import until


@pytest.fixture
async def joy(client: memstream.Client, path: str) -> memstream.Memory:
    return await client.create_memory(path)


async def texts(memory: memstream.Memory) -> dict[str, str]:
    return {one.name: one.text async for one in memory.blocks.list(page_size=2)}


async def test_block_is_written_read_and_listed(joy: memstream.Memory) -> None:
    put = await joy.blocks.put("persona", "I am Joy", max_tokens=10, metadata={"by": "ann", "n": 1})
    await joy.blocks.put("task", "Write\u200b a joke")
    await joy.blocks.put("profile", "")
    found = await joy.blocks.get("persona")
    assert (found.text, found.etag, found.version) == ("I am Joy", put.etag, put.version)
    assert (found.tokens, found.max_tokens, found.metadata) == (2, 10, {"by": "ann", "n": 1})
    assert found.create_time == found.update_time == put.update_time
    assert (await joy.blocks.get("task")).hidden_characters == ("U+200B",)
    assert await texts(joy) == {"persona": "I am Joy", "profile": "", "task": "Write\u200b a joke"}


async def test_put_keeps_what_it_does_not_set(joy: memstream.Memory) -> None:
    first = await joy.blocks.put("persona", "a", max_tokens=5, metadata={"n": 1})
    assert await joy.blocks.put("persona", "a") == first
    second = await joy.blocks.put("persona", "b")
    assert (second.max_tokens, second.metadata) == (5, {"n": 1})
    third = await joy.blocks.put("persona", "b", max_tokens=0, metadata={})
    assert (third.max_tokens, third.metadata) == (0, {})
    versions = [one async for one in joy.blocks.versions("persona", page_size=1)]
    assert [one.version for one in versions] == [third.version, second.version, first.version]
    assert (await joy.blocks.get("persona", version=first.version)).text == "a"


async def test_of_two_writers_with_an_etag_one_wins(joy: memstream.Memory) -> None:
    read = await joy.blocks.put("task", "one", absent=True)
    both = [joy.blocks.put("task", f"by {name}", etag=read.etag) for name in ("ann", "bob")]
    ends = await asyncio.gather(*both, return_exceptions=True)
    (won,) = [one for one in ends if isinstance(one, memstream.BlockInfo)]
    (lost,) = [one for one in ends if isinstance(one, EtagMismatch)]
    assert lost.details == {"etag": won.etag}
    for late in (
        joy.blocks.append("task", "x", etag=read.etag),
        joy.blocks.delete("task", etag=read.etag),
        joy.blocks.put("task", "x", absent=True),
    ):
        with pytest.raises(EtagMismatch):
            await late
    with pytest.raises(EtagMismatch) as none:
        await joy.blocks.put("none", "x", etag=won.etag)
    assert none.value.details == {"etag": "0"}


async def test_agents_edit_a_block_together(joy: memstream.Memory) -> None:
    await joy.blocks.put("profile", "Bob likes tea")
    await asyncio.gather(*(joy.blocks.append("profile", f"fact {number}") for number in range(8)))
    await joy.blocks.replace("profile", "tea", "coffee")
    await joy.blocks.insert("profile", 0, "# Bob")
    lines = (await joy.blocks.get("profile")).text.split("\n")
    assert lines[:2] == ["# Bob", "Bob likes coffee"]
    assert sorted(lines[2:]) == [f"fact {number}" for number in range(8)]


async def test_what_does_not_fit_changes_nothing(joy: memstream.Memory) -> None:
    await joy.blocks.put("profile", "tea tea", max_tokens=4)
    for refused, field in (
        (joy.blocks.replace("profile", "tea", "x"), "replace.old"),
        (joy.blocks.replace("profile", "", "x"), "replace.old"),
        (joy.blocks.insert("profile", 2, "x"), "insert.line"),
        (joy.blocks.append("profile", ""), "append.text"),
        (joy.blocks.append("profile", "x" * 9), "text"),
        (joy.blocks.put("profile", "x" * 17), "text"),
        (joy.blocks.put("profile", "x" * 65_537, max_tokens=0), "text"),
        (joy.blocks.put("profile", "x", etag="y"), "etag"),
        (joy.blocks.put("a b", "x"), "block"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await refused
        assert [violation.field for violation in caught.value.violations] == [field]
    assert await texts(joy) == {"profile": "tea tea"}


async def test_missing_block_or_memory_is_named(client: memstream.Client, joy: memstream.Memory) -> None:
    for missing in (joy.blocks.get("none"), joy.blocks.append("none", "x"), anext(joy.blocks.versions("none"))):
        with pytest.raises(BlockNotFound) as caught:
            await missing
        assert caught.value.details == {"block": "none"}
    await joy.blocks.put("task", "x")
    with pytest.raises(BlockNotFound, match=r"version 77 .* is not kept"):
        await joy.blocks.get("task", version=77)
    assert (await joy.blocks.delete("task"), await joy.blocks.delete("task")) == (True, False)
    other = client.memory(f"{joy.namespace}/none")
    for missing in (other.blocks.put("task", "x"), other.blocks.get("task"), anext(other.blocks.list())):
        with pytest.raises(MemoryNotFound):
            await missing


async def test_memory_has_a_bounded_number_of_blocks(joy: memstream.Memory) -> None:
    await asyncio.gather(*(joy.blocks.put(f"b{number}", "x") for number in range(64)))
    with pytest.raises(QuotaExceeded) as caught:
        await joy.blocks.put("one-more", "x")
    assert caught.value.details == {"quota": "memory_blocks_max", "limit": "64"}
    await joy.blocks.put("b0", "y")


async def test_clear_keeps_blocks_and_a_clone_has_none(joy: memstream.Memory) -> None:
    await joy.blocks.put("persona", "I am Joy")
    await joy.clear()
    assert await texts(joy) == {"persona": "I am Joy"}
    assert await texts(await joy.clone(f"{joy.namespace}/twin")) == {}


async def test_watch_shows_blocks_then_each_change(joy: memstream.Memory) -> None:
    await joy.blocks.put("persona", "I am Joy")
    async with joy.blocks.watch() as watch:
        first = await anext(watch)
        assert first.block is not None
        assert (first.name, first.block.text) == ("persona", "I am Joy")
        task = await joy.blocks.put("task", "joke")
        assert (await anext(watch)).name == "task"
        await joy.blocks.delete("persona")
        assert await anext(watch) == memstream.BlockChange("persona", None)
        assert watch.known == {"task": task.version}
    await joy.blocks.append("task", "now")
    async with joy.blocks.watch(known=watch.known, memory_uid=watch.memory_uid) as resumed:
        change = await anext(resumed)
        assert change.block is not None
        assert change.block.text == "joke\nnow"
        await joy.delete()
        with pytest.raises(MemoryDeleted):
            await anext(resumed)


async def test_watch_of_an_earlier_memory_is_void(client: memstream.Client, joy: memstream.Memory) -> None:
    async with joy.blocks.watch() as watch:
        await joy.blocks.put("persona", "I am Joy")
        await anext(watch)
    await joy.delete()
    again = await client.create_memory(joy.path)
    async with again.blocks.watch(known=watch.known, memory_uid=watch.memory_uid) as void:
        with pytest.raises(memstream.CursorVoid):
            await anext(void)


async def test_blocking_client_edits_and_watches(shared: ServerProcess, joy: memstream.Memory) -> None:
    await joy.blocks.put("persona", "I am Joy")

    def use_blocking() -> list[str]:
        with sync.connect(shared.address) as client:
            blocks = client.memory(joy.path).blocks
            blocks.insert("persona", 1, "and I joke")
            with blocks.watch() as watch:
                assert next(iter(watch)).name == "persona"
            return [one.text for one in blocks.list()]

    assert await asyncio.to_thread(use_blocking) == ["I am Joy\nand I joke"]


async def test_acknowledged_edits_survive_a_kill_once(make_server: MakeServer) -> None:
    server = await started(make_server(listen="127.0.0.1:0"))
    acknowledged: list[str] = []

    async def edit(memory: memstream.Memory, name: str) -> None:
        for number in range(10_000):
            try:
                await memory.blocks.append("log", f"{name} {number}")
            except memstream.MemstreamError:
                if not server.is_running():
                    return
            else:
                acknowledged.append(f"{name} {number}")

    async with memstream.connect(server.address) as client:
        await (await client.create_memory("comedy/joy")).blocks.put("log", "")
    async with memstream.connect(server.address, timeout_s=0.5) as hasty:
        editors = [asyncio.create_task(edit(hasty.memory("comedy/joy"), name)) for name in ("ann", "bob")]
        await until(lambda: _reached(acknowledged, 40))
        server.kill()
        await asyncio.gather(*editors)
    await restarted(server)
    async with memstream.connect(server.address) as client:
        lines = (await client.memory("comedy/joy").blocks.get("log")).text.split("\n")
    assert len(set(lines)) == len(lines)
    assert set(acknowledged) <= set(lines)


async def _reached(found: list[str], count: int) -> bool:
    return len(found) >= count
