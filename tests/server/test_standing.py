"""Standing queries of a real server that is killed, restarted and drained."""

from __future__ import annotations

import asyncio

import pytest

import memstream
from tests.server.conftest import MakeServer, restarted, started, stopped
from tests.support.server import ServerProcess, free_address


def contents(hits: tuple[memstream.Recollection, ...]) -> list[str]:
    return sorted(hit.fragment.content for hit in hits)


async def test_an_agent_is_told_what_others_say(client: memstream.Client, path: str) -> None:
    joy = await client.create_memory(path)
    async with joy.recall(session="watcher") as recalls, recalls.subscribe("where is the key?", limit=3) as standing:
        assert contents((await anext(standing)).entered) == []
        async with joy.observe(producer="other") as stream:
            await stream.send("The key is under the mat", speaker="Ann")
            await stream.flush()
        told = await anext(standing)
        assert contents(told.entered) == ["The key is under the mat"]
        assert contents((await recalls.query("where is the key?")).recollections) == contents(told.entered)


@pytest.mark.parametrize("end", [restarted, stopped])
async def test_standing_query_reports_changes_after_downtime(make_server: MakeServer, end: object) -> None:
    address = free_address()
    server = await started(make_server(listen=address))
    async with memstream.connect(address) as client:
        joy = await client.create_memory("standing/joy")
        first = (await joy.observe_batch(["Bob likes tea", "Bob likes rain"])).outcomes[0].fragment_id
        async with joy.recall() as recalls, recalls.subscribe("Bob likes", limit=10) as standing:
            assert contents((await anext(standing)).entered) == ["Bob likes rain", "Bob likes tea"]
            if end is restarted:
                await restarted(server)
            else:
                assert await stopped(server) == 0
                await started(server)
            async with memstream.connect(address) as other:
                again = other.memory("standing/joy")
                await again.forget_fragments([first])
                await again.observe_batch(["Bob likes otters"])
            entered, retracted = list[str](), list[str]()
            while "Bob likes otters" not in entered or not retracted:
                told = await asyncio.wait_for(anext(standing), 60)
                entered += contents(told.entered)
                retracted += told.retracted
            assert (entered, retracted) == (["Bob likes otters"], [first])
            assert contents(told.answer.recollections) == ["Bob likes otters", "Bob likes rain"]
            assert recalls.connections > 1


async def test_the_end_of_a_memory_is_told(client: memstream.Client, path: str) -> None:
    joy = await client.create_memory(path)
    async with joy.recall() as recalls, recalls.subscribe("anything") as standing:
        await anext(standing)
        await client.delete_memory(path)
        with pytest.raises(memstream.MemoryNotFound):
            await anext(standing)


def test_scripts_iterate_over_changes(shared: ServerProcess, path: str) -> None:
    with memstream.sync.connect(shared.address) as client:
        joy = client.create_memory(path)
        joy.observe_batch(["Bob likes tea"])
        with joy.recall() as recalls, recalls.subscribe("Bob") as standing:
            assert standing.answer is not None
            changes = iter(standing)
            assert contents(next(changes).entered) == ["Bob likes tea"]
            joy.observe_batch(["Bob likes otters"])
            assert contents(next(changes).entered) == ["Bob likes otters"]
        with pytest.raises(memstream.StreamClosed):
            next(changes)
