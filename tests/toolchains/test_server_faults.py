"""Several servers on one PostgreSQL database and one Milvus while servers stop, are killed or lose the database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
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
from tests.support.processes import paused
from tests.support.seeds import seed_of
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.toolchains.cable import Cable
from tests.toolchains.fleet import SHORT, Fleet, connect_clients

pytestmark = pytest.mark.toolchain

ROUNDS = int(os.environ.get("MEMSTREAM_CRASH_ROUNDS", "4"))
SEED = seed_of("MEMSTREAM_CRASH_SEED")


# ---- servers that end


async def test_streams_move_when_the_forwarding_server_stops(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with connect_clients(first) as (here,), grpc.aio.insecure_channel(second.address) as raw:
        await here.create_memory("between/joy")
        await here.memory("between/joy").observe_batch(["mine"])
        told = await _open_raw_streams(raw, "between", "joy")
        stopping = asyncio.create_task(stopped(second))
        assert [await _ends_going_away(call) for call in told] == [True] * 3
        assert await stopping == 0
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (first.address, 1)


async def test_an_orderly_stop_releases_memories(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with connect_clients(first, second) as (here, there):
        await here.create_memory("order/joy")
        await here.memory("order/joy").observe_batch(["before"])
        assert await stopped(first) == 0
        assert fleet.owner("joy") == ""
        await there.memory("order/joy").observe_batch(["after"])
        assert await contents(there.memory("order/joy")) == ["before", "after"]
        assert (fleet.owner("joy"), fleet.epoch("joy")) == (second.address, 2)


async def test_another_server_takes_over_at_once_from_a_killed_owner(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with connect_clients(first, second) as (here, there):
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
        await until(lambda: indexed(there, memory))  # the second server writes the index now


async def test_another_server_stores_what_a_killed_one_received(fleet: Fleet) -> None:
    first, second = await fleet.start(2)
    async with connect_clients(first, second) as (here, there):
        memory = await here.create_memory("sweep/joy")
        with contextlib.suppress(asyncio.CancelledError):
            async with memory.observe("joy", ack_level=memstream.AckLevel.RECEIVED) as stream:
                for _ in range(500):
                    await stream.send(words("joy", stream.expected_sequence))
                await stream.flush()
                first.kill()
                raise asyncio.CancelledError
        look = there.memory("sweep/joy")
        await until(lambda: _has_listed(look, 500))  # a list reads the journal and does not take the memory
        assert sorted(await contents(look)) == sorted(words("joy", n) for n in range(1, 501))


async def _has_listed(memory: memstream.Memory, count: int) -> bool:
    return len(await contents(memory)) == count


async def test_a_server_stopped_past_its_lease_serves_nothing_stale(
    fleet: Fleet,
) -> None:
    first, second = await fleet.start(2, **SHORT)
    async with connect_clients(first, second) as (here, there), grpc.aio.insecure_channel(first.address) as raw:
        await here.create_memory("pause/joy", kind=memstream.MemoryKind.LONG_TERM)
        memory, other = here.memory("pause/joy"), there.memory("pause/joy")
        await memory.observe_batch(["old words"])
        async with memory.observe("p") as stream, memory.recall() as recalls, memory.watch("now") as watch:
            await stream.send("old words of p")
            await stream.flush()
            await recalls.query("old", reinforce=False)
            before, told = fleet.epoch("joy"), await _open_raw_streams(raw, "pause", "joy")
            with paused(first.pid):
                await stream.send("said while it was stopped")
                await until(lambda: _can_observe(other, "new words"))
                assert fleet.epoch("joy") > before
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
        await here.create_memory("pause/next")  # the server continues without memories
        await here.memory("pause/next").observe_batch(["hello"])
        await until(lambda: _is_owned_by(fleet, "next", first))


async def _open_raw_streams(channel: grpc.aio.Channel, namespace: str, memory: str) -> list[Any]:
    """Opens a stream of each kind without the SDK, which would hide how it ends."""
    stub, where = StreamServiceStub(channel), {"namespace": namespace, "memory": memory}
    observe, recall = stub.Observe(), stub.Recall()
    await observe.write(pb.ObserveRequest(open=pb.ObserveOpen(producer="raw", **where)))
    await recall.write(pb.RecallRequest(open=pb.RecallOpen(**where)))
    watch = stub.Watch(pb.WatchRequest(progress_interval=Duration(nanos=200_000_000), **where))
    for call in (observe, recall, watch):
        await call.read()
    return [observe, recall, watch]


async def _ends_going_away(call: Any) -> bool:
    """Whether the stream sends `going_away` and then ends with UNAVAILABLE."""
    going_away = False
    try:
        while (message := await asyncio.wait_for(call.read(), 60)) is not grpc.aio.EOF:
            going_away = going_away or message.HasField("going_away")
    except grpc.aio.AioRpcError as error:
        return going_away and error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def _can_observe(memory: memstream.Memory, content: str) -> bool:
    try:
        await memory.observe_batch([content], timeout_s=2.0)
    except memstream.MemstreamError:
        return False
    return True


async def _is_owned_by(fleet: Fleet, name: str, server: ServerProcess) -> bool:
    return fleet.owner(name) == server.address


@pytest.mark.parametrize("how", ["silent", "closed"])
async def test_a_server_without_its_database_serves_nothing_stale(fleet: Fleet, tmp_path: Path, how: str) -> None:
    """Silent: packets are lost. Closed: connections are closed and new ones rejected."""
    with Cable(fleet.cluster.folder / ".s.PGSQL.5432") as cable:
        cut_off = await started(
            fleet.make(**SHORT, journal_url=fleet.url.replace(str(fleet.cluster.folder), str(cable.folder)))
        )
        second = await started(fleet.make(**SHORT))
        async with connect_clients(cut_off, second) as (here, there):
            await here.create_memory("cut/joy", kind=memstream.MemoryKind.LONG_TERM)
            memory, other = here.memory("cut/joy"), there.memory("cut/joy")
            await memory.observe_batch(["old words"])
            assert fleet.owner("joy") == cut_off.address
            cable.cut(silent=how == "silent")
            await until(lambda: _can_observe(other, "new words"))
            for _ in range(20):
                try:
                    answer = await memory.recall_once("words", reinforce=False, timeout_s=0.5)
                except (memstream.Unavailable, memstream.DeadlineExceeded):
                    continue
                assert "new words" in [hit.fragment.content for hit in answer]
            cable.restore()
            await until(lambda: _can_observe(memory, "after it was restored"))
            assert set(await contents(other)) == {"old words", "new words", "after it was restored"}


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
                with paused(victim.pid):
                    await asyncio.sleep(draw.uniform(0.1, 2 * float(SHORT["lease_s"])))
            else:
                await restarted(victim)
            before = [one.ledger.stored for one in producers]
            await until(lambda before=before: _all_advanced(producers, before))  # type: ignore[misc]  # bound at once
        for task in talking:
            assert not task.done(), f"a producer failed, seed {SEED}: {task.exception()!r}"
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


async def _all_advanced(producers: list[Producer], stored: list[int]) -> bool:
    return all(one.ledger.stored > before for one, before in zip(producers, stored, strict=True))
