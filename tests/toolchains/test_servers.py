"""Several servers on one PostgreSQL database and one Milvus: every call reaches its memory, also during faults."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

import memstream
from tests.server.conftest import stopped
from tests.server.listing import contents, indexed, observed_once
from tests.server.producing import PATIENT
from tests.support.fake_openai import FakeOpenAI
from tests.support.waiting import until
from tests.toolchains.fleet import Fleet, connect_clients

pytestmark = pytest.mark.toolchain

# ---- starting


async def test_three_servers_can_start_at_once_on_an_empty_database(fleet: Fleet) -> None:
    servers = await fleet.start(3)
    async with connect_clients(*servers) as (one, two, three):
        await one.create_memory("start/joy")
        await two.memory("start/joy").observe_batch(["hello from two"])
        assert await contents(three.memory("start/joy")) == ["hello from two"]
    assert [await stopped(server) for server in servers] == [0, 0, 0]
    assert fleet.cluster.execute(fleet.url, "SELECT count(*) FROM processes") == [(0,)]
    assert fleet.cluster.execute(fleet.url, "SELECT count(*) FROM memories WHERE owner IS NOT NULL") == [(0,)]


# ---- long work


async def test_any_server_accepts_operations_of_the_others(fleet: Fleet) -> None:
    """The owner runs those of a memory, the leader those of the store, each once; every server reports them."""
    servers = await fleet.start(2)
    async with connect_clients(*servers) as (one, two):
        mine, theirs = await one.create_memory("work/one"), await two.create_memory("work/two")
        for memory in (mine, theirs):
            await memory.observe_batch([f"{memory.name} keeps this", f"{memory.name} is to be erased"])
        assert {fleet.owner("one"), fleet.owner("two")} == {server.address for server in servers}
        for client, memory in ((two, mine), (one, theirs)):  # asked of the other server
            at = client.memory(f"work/{memory.name}")
            doomed = [each.id async for each in at.list_fragments() if "erased" in each.content]
            done = await client.finished(await at.erase_fragments(doomed))
            assert done.state is memstream.OperationState.SUCCEEDED
            assert await contents(memory) == [f"{memory.name} keeps this"]
        for memory in (mine, theirs):
            await memory.forget_fragments([each.id async for each in memory.list_fragments()])
            await memory.update(policy={"retention": {"forget_grace": timedelta(0)}})
        for client in (one, two):
            assert (await client.finished(await client.start_reindex())).state is memstream.OperationState.SUCCEEDED
            assert (await client.finished(await client.start_purge("work"))).state is memstream.OperationState.SUCCEEDED
        for memory in (mine, theirs):
            assert [each.id async for each in memory.list_fragments(forgotten=True)] == []


async def test_operations_of_a_killed_server_are_done_by_another(fleet: Fleet) -> None:
    """A live process claims an operation of a dead one."""
    survivor, victim = await fleet.start(2)
    async with connect_clients(survivor) as (client,):
        await client.create_memory("orphan/joy")
        operation = await client.start_purge("orphan", "joy")
        await client.finished(operation)
        await asyncio.to_thread(victim.kill)
        fleet.cluster.execute(
            fleet.url,
            "UPDATE operations SET state = 'running', end_time_us = 0, process = 999 WHERE id = %s RETURNING id",
            operation.id,
        )
        assert (await client.finished(operation)).state is memstream.OperationState.SUCCEEDED


async def test_reembedding_moves_all_servers_to_the_next_model(fleet: Fleet) -> None:
    """Both servers switch to the next model and lose no vector of observations that arrive meanwhile."""
    async with FakeOpenAI(dimension=16) as fake:
        to = {
            "next_embedding": "openai",
            "next_embedding_base_url": fake.base_url,
            "next_embedding_model": "fake-16",
        }
        servers = await fleet.start(2, **to)
        async with connect_clients(*servers) as (one, two):
            memories = [await one.create_memory("embed/one"), await two.create_memory("embed/two")]
            for memory in memories:
                await memory.observe_batch([f"{memory.name} said {number}" for number in range(20)])
            operation = await two.start_reindex(embed=True)
            for number in range(20, 40):
                for memory in memories:
                    await memory.observe_batch([f"{memory.name} said {number}"])
            assert (await one.finished(operation)).state is memstream.OperationState.SUCCEEDED

            async def moved() -> bool:
                infos = [await client.server_info() for client in (one, two)]
                models = {each.model for memory in memories async for each in memory.list_fragments()}
                return {info.embedding.name for info in infos} == models == {"fake-16"}

            await until(moved)
            for memory in memories:
                (hit,) = await until(lambda memory=memory: _recall_whole(memory, f"{memory.name} said 39"))  # type: ignore[misc]  # bound at once
                assert hit.fragment.content == f"{memory.name} said 39"


async def _recall_whole(memory: memstream.Memory, what: str) -> tuple[memstream.Recollection, ...]:
    """The best result with the query's vector: the endpoint, which runs in this process, may be late."""
    answer = await memory.recall_once(what, limit=1)
    return () if answer.degraded else answer.recollections


# ---- passing on


async def test_every_kind_of_call_reaches_the_owner_through_any_server(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with connect_clients(*servers) as (here, there):
        owned = await here.create_memory("pass/joy", kind=memstream.MemoryKind.LONG_TERM)
        await owned.observe_batch(["the first words"])
        assert fleet.owner("joy") == servers[0].address
        memory = there.memory("pass/joy")
        async with memory.watch("beginning") as watch:  # server stream
            async with memory.observe("p") as stream:  # both ways
                for number in range(50):
                    await stream.send(f"word number {number}")
                await stream.flush()
                assert stream.stored == 50
            async with memory.recall() as recalls:
                found = await recalls.query("word number 7", limit=3, reinforce=False)
                assert found.recollections[0].fragment.content == "word number 7"
            seen = 0
            while seen < 51:
                event = await asyncio.wait_for(anext(watch), 60)
                seen += isinstance(event, memstream.Event) and event.type is memstream.EventType.OBSERVED
        put = await memory.put_fragment("by key", external_id="k")  # unary
        assert (await memory.get_fragment(external_id="k")).id == put.fragment.id
        assert (await memory.recall_once("by key", limit=1, reinforce=False)).recollections[
            0
        ].fragment.id == put.fragment.id
        assert (await memory.update(labels={"a": "b"})).labels == {"a": "b"}
        await until(lambda: indexed(there, memory))
        await until(lambda: indexed(here, owned))
        with pytest.raises(memstream.FragmentNotFound):
            await memory.get_fragment("0" * 26)
        assert await observed_once(memory) == 52
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (servers[0].address, 1)
        await memory.delete()
        with pytest.raises(memstream.MemoryNotFound):
            await owned.recall_once("anything")


async def next_entered(standing: memstream.StandingQuery) -> list[str]:
    """Contents that the next change with any adds. Similar fragments strengthen each other, at times in a commit of its
    own, which is a change that adds none; none may leave the answer."""
    while True:
        change = await asyncio.wait_for(anext(standing), 60)
        assert change.retracted == ()
        if change.entered:
            return [hit.fragment.content for hit in change.entered]


async def test_a_standing_query_survives_the_death_of_the_owner(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with connect_clients(*servers) as (here, there):
        owned = await here.create_memory("stand/joy")
        await owned.observe_batch(["Bob likes tea"])
        assert fleet.owner("joy") == servers[0].address
        memory = there.memory("stand/joy")
        async with memory.recall() as recalls, recalls.subscribe("Bob likes", limit=10) as standing:
            assert await next_entered(standing) == ["Bob likes tea"]
            await owned.observe_batch(["Bob likes rain"])
            assert await next_entered(standing) == ["Bob likes rain"]
            await asyncio.to_thread(servers[0].kill)
            await memory.observe_batch(["Bob likes otters"])
            assert await next_entered(standing) == ["Bob likes otters"]
            assert standing.answer is not None
            shown = {hit.fragment.content for hit in standing.answer}
            assert shown == {"Bob likes tea", "Bob likes rain", "Bob likes otters"}
            assert fleet.owner("joy") == servers[1].address


async def test_a_watch_sees_messages_appended_at_another_server(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with connect_clients(*servers) as (here, there):
        await here.conversation("talk/monday").append("joy", "one")
        async with there.conversation("talk/monday").watch() as watch:
            assert (await asyncio.wait_for(anext(watch), 60)).content == "one"
            await here.conversation("talk/monday").append("joy", "two")
            assert (await asyncio.wait_for(anext(watch), 60)).content == "two"


async def test_round_robin_clients_move_no_memory(fleet: Fleet) -> None:
    """Consecutive calls go to different servers; each memory is taken once."""
    servers = await fleet.start(3)
    target = "ipv4:" + ",".join(server.address for server in servers)
    async with memstream.connect(target, retry=PATIENT, options=[("grpc.lb_policy_name", "round_robin")]) as client:
        names = [f"m{number}" for number in range(4)]
        for name in names:
            await client.create_memory(f"robin/{name}", kind=memstream.MemoryKind.LONG_TERM)

        async def live(name: str) -> None:
            memory = client.memory(f"robin/{name}")
            for number in range(12):
                await memory.observe_batch([f"{name} said {number}"])
                found = await memory.recall_once(f"said {number}", limit=20, reinforce=False)
                assert f"{name} said {number}" in [hit.fragment.content for hit in found]
                async with memory.observe(f"p{number}") as stream:
                    await stream.send(f"{name} streamed {number}")
                    await stream.flush()

        await asyncio.gather(*(live(name) for name in names))
        assert [len(await contents(client.memory(f"robin/{name}"))) for name in names] == [24] * 4
        assert [fleet.epoch(name) for name in names] == [1] * 4
