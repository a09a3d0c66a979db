"""Several servers on one PostgreSQL database and one Milvus: every call reaches its memory, whoever dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import restarted, started, stopped
from tests.server.listing import contents, indexed, observed_once
from tests.server.producing import PATIENT, Producer, words
from tests.support.fake_openai import FakeOpenAI
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.toolchains.cable import Cable
from tests.toolchains.fleet import SHORT, Fleet, clients

pytestmark = pytest.mark.toolchain

ROUNDS = int(os.environ.get("MEMSTREAM_CRASH_ROUNDS", "4"))
SEED = int(os.environ.get("MEMSTREAM_CRASH_SEED", random.randrange(10**6)))


# ---- starting


async def test_three_servers_can_start_at_once_on_an_empty_database(fleet: Fleet) -> None:
    servers = await fleet.start(3)
    async with clients(*servers) as (one, two, three):
        await one.create_memory("start/joy")
        await two.memory("start/joy").observe_batch(["hello from two"])
        assert await contents(three.memory("start/joy")) == ["hello from two"]
    assert [await stopped(server) for server in servers] == [0, 0, 0]
    assert fleet.cluster.execute(fleet.url, "SELECT count(*) FROM processes") == [(0,)]
    assert fleet.cluster.execute(fleet.url, "SELECT count(*) FROM memories WHERE owner IS NOT NULL") == [(0,)]


async def test_a_server_with_its_own_index_does_not_share(fleet: Fleet) -> None:
    first = await started(fleet.make())
    alone = fleet.make(milvus_uri="")
    with pytest.raises(AssertionError, match="did not start"):
        await started(alone)
    assert "set milvus_uri" in alone.log()
    assert first.is_running()


# ---- long work


async def test_any_server_accepts_operations_of_the_others(fleet: Fleet) -> None:
    """A memory's at its owner, the store's at the server that leads; each exactly once, and told by any of them."""
    servers = await fleet.start(2)
    async with clients(*servers) as (one, two):
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
    """An operation of a process that is no more is claimed by one that is there."""
    survivor, victim = await fleet.start(2)
    async with clients(survivor) as (client,):
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
    """Both servers go over to the next model, whoever does the work, and lose no vector of what comes meanwhile."""
    async with FakeOpenAI(dimension=16) as fake:
        to = {
            "next_embedding": "openai",
            "next_embedding_base_url": fake.base_url,
            "next_embedding_model": "fake-16",
        }
        servers = await fleet.start(2, **to)
        async with clients(*servers) as (one, two):
            memories = [await one.create_memory("anew/one"), await two.create_memory("anew/two")]
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
                found = await memory.recall_once(f"{memory.name} said 39", limit=1)
                assert found.degraded == ""
                assert found.recollections[0].fragment.content == f"{memory.name} said 39"


# ---- passing on


async def test_every_kind_of_call_reaches_the_owner_through_any_server(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with clients(*servers) as (here, there):
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


async def test_a_standing_query_survives_the_death_of_the_owner(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with clients(*servers) as (here, there):
        owned = await here.create_memory("stand/joy")
        await owned.observe_batch(["Bob likes tea"])
        assert fleet.owner("joy") == servers[0].address
        memory = there.memory("stand/joy")
        async with memory.recall() as recalls, recalls.subscribe("Bob likes", limit=10) as standing:
            assert [hit.fragment.content for hit in (await anext(standing)).entered] == ["Bob likes tea"]
            await owned.observe_batch(["Bob likes rain"])
            told = await asyncio.wait_for(anext(standing), 60)
            assert [hit.fragment.content for hit in told.entered] == ["Bob likes rain"]
            await asyncio.to_thread(servers[0].kill)
            await memory.observe_batch(["Bob likes otters"])
            told = await asyncio.wait_for(anext(standing), 60)
            assert ([hit.fragment.content for hit in told.entered], told.retracted) == (["Bob likes otters"], ())
            assert fleet.owner("joy") == servers[1].address


async def test_a_watch_sees_messages_appended_at_another_server(fleet: Fleet) -> None:
    servers = await fleet.start(2)
    async with clients(*servers) as (here, there):
        await here.conversation("talk/monday").append("joy", "one")
        async with there.conversation("talk/monday").watch() as watch:
            assert (await asyncio.wait_for(anext(watch), 60)).content == "one"
            await here.conversation("talk/monday").append("joy", "two")
            assert (await asyncio.wait_for(anext(watch), 60)).content == "two"


async def test_round_robin_clients_move_no_memory(fleet: Fleet) -> None:
    """Every call of every client goes to another server than the one before; each memory is taken once."""
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


# ---- servers that end


async def test_streams_move_when_the_forwarding_server_stops(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with clients(first) as (here,), grpc.aio.insecure_channel(second.address) as raw:
        await here.create_memory("between/joy")
        await here.memory("between/joy").observe_batch(["mine"])
        told = await _raw_streams(raw, "between", "joy")
        stopping = asyncio.create_task(stopped(second))
        assert [await _ends_going_away(call) for call in told] == [True] * 3
        assert await stopping == 0
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (first.address, 1)


async def test_an_orderly_stop_releases_memories(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with clients(first, second) as (here, there):
        await here.create_memory("order/joy")
        await here.memory("order/joy").observe_batch(["before"])
        assert await stopped(first) == 0
        assert fleet.owner("joy") == ""
        await there.memory("order/joy").observe_batch(["after"])
        assert await contents(there.memory("order/joy")) == ["before", "after"]
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (second.address, 2)


async def test_another_server_takes_over_at_once_from_a_killed_owner(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with clients(first, second) as (here, there):
        await here.create_memory("kill/joy", kind=memstream.MemoryKind.LONG_TERM)
        await here.memory("kill/joy").observe_batch(["before"])
        memory = there.memory("kill/joy")
        async with memory.observe("p") as stream, memory.recall() as recalls:
            await stream.send("by way of the owner")
            await stream.flush()
            assert fleet.owner("joy") == first.address
            await asyncio.to_thread(first.kill)
            await stream.send("after the owner")
            await stream.flush()
            found = await recalls.query("owner", reinforce=False)
            assert min(stream.connections, recalls.connections) > 1
        assert {hit.fragment.content for hit in found} >= {"by way of the owner", "after the owner"}
        assert await contents(memory) == ["before", "by way of the owner", "after the owner"]
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (second.address, 2)
        await until(lambda: indexed(there, memory))  # the other one writes the index now


async def test_another_server_stores_what_a_killed_one_received(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with clients(first, second) as (here, there):
        memory = await here.create_memory("sweep/joy")
        with contextlib.suppress(asyncio.CancelledError):
            async with memory.observe("joy", ack_level=memstream.AckLevel.RECEIVED) as stream:
                for _ in range(500):
                    await stream.send(words("joy", stream.expected_sequence))
                await stream.flush()
                first.kill()
                raise asyncio.CancelledError
        look = there.memory("sweep/joy")
        await until(lambda: _listed(look, 500))  # a list is read from the journal and takes no memory
        assert sorted(await contents(look)) == sorted(words("joy", n) for n in range(1, 501))


async def _listed(memory: memstream.Memory, count: int) -> bool:
    return len(await contents(memory)) == count


async def test_a_server_stopped_past_its_lease_serves_nothing_stale(
    fleet: Fleet,
) -> None:
    first, second = await fleet.start(2, **SHORT)
    async with clients(first, second) as (here, there), grpc.aio.insecure_channel(first.address) as raw:
        await here.create_memory("pause/joy", kind=memstream.MemoryKind.LONG_TERM)
        memory, other = here.memory("pause/joy"), there.memory("pause/joy")
        await memory.observe_batch(["old words"])
        async with memory.observe("p") as stream, memory.recall() as recalls, memory.watch("now") as watch:
            await stream.send("old words of p")
            await stream.flush()
            await recalls.query("old", reinforce=False)
            before, told = fleet.epoch("joy"), await _raw_streams(raw, "pause", "joy")
            os.kill(first.pid, signal.SIGSTOP)
            try:
                await stream.send("said while it was stopped")
                await until(lambda: _observed(other, "new words"))
                assert fleet.epoch("joy") > before
            finally:
                os.kill(first.pid, signal.SIGCONT)
            for call in told:
                assert await _ends_going_away(call)
            asked = [memory.recall_once("words", limit=20, reinforce=False) for _ in range(20)]
            asked += [recalls.query("words", limit=20, reinforce=False) for _ in range(20)]
            for answer in await asyncio.gather(*asked):
                assert "new words" in [hit.fragment.content for hit in answer]
            await stream.flush()
            assert stream.stored == stream.received == 2
            while True:
                event = await asyncio.wait_for(anext(watch), 60)
                if isinstance(event, memstream.Event) and event.cursor.revision >= stream.revision:
                    break
        assert sorted(await contents(memory)) == [
            "new words",
            "old words",
            "old words of p",
            "said while it was stopped",
        ]
        assert "lease_lost" in first.log()
        await here.create_memory("pause/next")  # it goes on as a server with empty hands
        await here.memory("pause/next").observe_batch(["hello"])
        await until(lambda: _owned_by(fleet, "next", first))


async def _raw_streams(channel: grpc.aio.Channel, namespace: str, memory: str) -> list[Any]:
    """An open stream of each kind, without an SDK that hides how it ends."""
    stub, where = StreamServiceStub(channel), {"namespace": namespace, "memory": memory}
    observe, recall = stub.Observe(), stub.Recall()
    await observe.write(pb.ObserveRequest(open=pb.ObserveOpen(producer="raw", **where)))
    await recall.write(pb.RecallRequest(open=pb.RecallOpen(**where)))
    watch = stub.Watch(pb.WatchRequest(progress_interval=Duration(nanos=200_000_000), **where))
    for call in (observe, recall, watch):
        await call.read()
    return [observe, recall, watch]


async def _ends_going_away(call: Any) -> bool:
    """Whether `going_away` comes before the end, which is UNAVAILABLE."""
    told = False
    try:
        while (message := await asyncio.wait_for(call.read(), 60)) is not grpc.aio.EOF:
            told = told or message.HasField("going_away")
    except grpc.aio.AioRpcError as error:
        return told and error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def _observed(memory: memstream.Memory, content: str) -> bool:
    try:
        await memory.observe_batch([content], timeout_s=2.0)
    except memstream.MemstreamError:
        return False
    return True


async def _owned_by(fleet: Fleet, name: str, server: ServerProcess) -> bool:
    return fleet.owner(name) == server.address


@pytest.mark.parametrize("how", ["silent", "closed"])
async def test_a_server_without_its_database_serves_nothing_stale(fleet: Fleet, tmp_path: Path, how: str) -> None:
    """Packets that are swallowed, and connections that are closed and cannot be made again."""
    with Cable(fleet.cluster.folder / ".s.PGSQL.5432") as cable:
        cut_off = await started(
            fleet.make(**SHORT, journal_url=fleet.url.replace(str(fleet.cluster.folder), str(cable.folder)))
        )
        second = await started(fleet.make(**SHORT))
        async with clients(cut_off, second) as (here, there):
            await here.create_memory("cut/joy", kind=memstream.MemoryKind.LONG_TERM)
            memory, other = here.memory("cut/joy"), there.memory("cut/joy")
            await memory.observe_batch(["old words"])
            assert fleet.owner("joy") == cut_off.address
            cable.cut(silent=how == "silent")
            await until(lambda: _observed(other, "new words"))
            for _ in range(20):
                try:
                    answer = await memory.recall_once("words", reinforce=False, timeout_s=0.5)
                except (memstream.Unavailable, memstream.DeadlineExceeded):
                    continue
                assert "new words" in [hit.fragment.content for hit in answer]
            cable.mend()
            await until(lambda: _observed(memory, "after it was mended"))
            assert set(await contents(other)) == {"old words", "new words", "after it was mended"}


# ---- everything at once


@pytest.mark.parametrize("count", [2, 3])
async def test_kills_and_stops_lose_and_duplicate_nothing_acknowledged(fleet: Fleet, count: int) -> None:
    draw = random.Random(SEED)
    servers = await fleet.start(count, **SHORT)
    target = "ipv4:" + ",".join(server.address for server in servers)
    options = [("grpc.lb_policy_name", "round_robin")]
    async with memstream.connect(target, retry=PATIENT, options=options, timeout_s=60) as client:
        memories = [await client.create_memory(f"ledger/m{number}") for number in range(3)]
        producers = [
            Producer(memory, f"{memory.name}-{number}", random.Random(draw.random()))
            for memory in memories
            for number in range(2)
        ]
        talking = [asyncio.create_task(producer.run()) for producer in producers]
        for round_number in range(ROUNDS):
            await asyncio.sleep(draw.uniform(0.3, 1.5))
            victim = draw.choice(servers)
            if round_number % 2:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(draw.uniform(0.1, 2 * float(SHORT["lease_s"])))
                os.kill(victim.pid, signal.SIGCONT)
            else:
                await restarted(victim)
            before = [one.ledger.stored for one in producers]
            await until(lambda before=before: _all_beyond(producers, before))  # type: ignore[misc]  # bound at once
        for task in talking:
            assert not task.done(), f"a producer gave up, seed {SEED}: {task.exception()!r}"
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        for producer in producers:
            await producer.finish()
        total = lost = doubled = 0
        for memory in memories:
            mine = [one for one in producers if one.memory is memory]
            said = Counter(words(one.name, n) for one in mine for n in range(1, one.ledger.received + 1))
            kept = Counter(await contents(memory))
            total, lost, doubled = total + said.total(), lost + (said - kept).total(), doubled + (kept - said).total()
            assert await observed_once(memory) == said.total()
        leases = sum(server.log().count("lease_lost") for server in servers)
        taken = sum(fleet.epoch(memory.name) for memory in memories)
        print(
            f"{count} servers, {ROUNDS} kills and stops, {total} observations acknowledged, {lost} lost, "
            f"{doubled} doubled, {len(memories)} memories taken {taken} times, "
            f"{leases} leases lost, seed {SEED}"
        )
        assert (lost, doubled) == (0, 0), f"seed {SEED}"


async def _all_beyond(producers: list[Producer], stored: list[int]) -> bool:
    return all(one.ledger.stored > before for one, before in zip(producers, stored, strict=True))
