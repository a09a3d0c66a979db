"""The Observe stream against a server that breaks at chosen points: everything arrives once, in order."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import memstream
from tests.client.conftest import RETRY
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import Plan, status, until


async def test_items_are_numbered_stored_and_closed(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p", session="monday", outcomes=True) as stream:
        first = await stream.send("user: My name is Bob", speaker="Bob", importance=0.9)
        second = await stream.send(memstream.Structured(thought="a name", action="note"))
        await stream.flush()
        assert (stream.received, stream.stored, stream.expected_sequence) == (2, 2, 3)
        stored = await second
    assert (first.sequence, second.sequence) == (1, 2)
    assert stored.outcome is not None
    assert stored.outcome.fragment_id == "f2"
    assert (server.closed, server.abandoned) == (1, 0)
    items = server.producers["ns/m", "p"].items
    assert (items[0].speaker, items[0].importance, items[1].structured.thought) == ("Bob", 0.9, "a name")
    assert server.metadata[0]["memstream-memory"] == "ns/m"
    assert server.metadata[0]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "broken",
    [
        Plan(drop_after=3),
        Plan(drop_after=3, drop_status=grpc.StatusCode.INTERNAL),
        Plan(drop_after=3, drop_status=grpc.StatusCode.CANCELLED),
        Plan(end_after=3),
        Plan(going_away_after=3),
        Plan(double_acks=True, drop_after=100),
        Plan(drop_at_close=True),
        Plan(refuse=status(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")),
        Plan(refuse=status(grpc.StatusCode.RESOURCE_EXHAUSTED, "BACKLOG_FULL", retry_s=0.05)),
    ],
    ids=["unavailable", "rst", "cancelled", "eof", "going_away", "double_acks", "at_close", "shutting_down", "backlog"],
)
async def test_break_loses_and_duplicates_nothing(
    memory: memstream.Memory, server: ScriptedServer, broken: Plan
) -> None:
    server.window_observations = 16
    server.plans = [broken, Plan(drop_after=2), Plan(drop_after=40)]
    said = [f"line {n}" for n in range(200)]
    async with memory.observe("p") as stream:
        sent = [await stream.send(line) for line in said]
        await stream.flush()
        assert [(await each).sequence for each in sent] == list(range(1, 201))
    assert stream.connections > 1
    assert server.contents() == said
    assert server.closed == 1


async def test_stream_survives_a_break_at_every_point(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.batch_max = 2
    for point in range(1, 8):
        server.plans = [Plan(drop_after=point)]
        async with memory.observe(f"p{point}") as stream:
            for n in range(7):
                await stream.send(f"line {n}")
        assert server.contents(f"p{point}") == [f"line {n}" for n in range(7)]


async def test_stream_survives_a_server_restart(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        await stream.send("before")
        await stream.flush()
        await server.stop()
        during = await stream.send("during")
        await asyncio.sleep(0.05)
        assert not during.done
        await server.start(server.target)
        assert (await during).sequence == 2
    assert server.contents() == ["before", "during"]


async def test_new_process_continues_the_numbers(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        await stream.send("one")
    async with memory.observe("p") as stream:
        assert stream.expected_sequence == 2
        assert (await stream.send("two")).sequence == 2
    assert server.contents() == ["one", "two"]


async def test_window_limits_observations_in_flight(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.window_observations = 8
    server.acking.clear()
    async with memory.observe("p") as stream:
        for n in range(8):
            await stream.send(f"line {n}")
        ninth = asyncio.create_task(stream.send("line 8"))
        tenth = asyncio.create_task(stream.send("line 9"))
        await until(lambda: server.in_flight_max == 8)
        await asyncio.sleep(0.05)  # time for a ninth, which must not come
        assert not ninth.done()
        assert server.in_flight_max == 8
        server.acking.set()
        assert [(await ninth).sequence, (await tenth).sequence] == [9, 10]
        await stream.flush()
    assert server.in_flight_max <= 8
    assert server.contents() == [f"line {n}" for n in range(10)]


async def test_window_limits_bytes(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.window_bytes = 1000
    server.acking.clear()
    async with memory.observe("p") as stream:
        await stream.send("x" * 600)
        blocked = asyncio.create_task(stream.send("y" * 600))
        await asyncio.sleep(0.05)
        assert not blocked.done()
        server.acking.set()
        await blocked
        with pytest.raises(memstream.InvalidRequest):
            await stream.send("z" * 5000)  # larger than any window
    assert [len(each) for each in server.contents()] == [600, 600]


async def test_repeats_respect_a_smaller_window(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.acking.clear()
    async with memory.observe("p") as stream:
        said = [*(f"line {n}" for n in range(19)), "reject me"]
        sent = [await stream.send(line) for line in said]
        await until(lambda: server.contents() == said)
        await server.stop()
        server.window_observations, server.in_flight_max = 8, 0
        server.acking.set()
        await server.start(server.target)
        await asyncio.wait_for(asyncio.gather(*sent[:-1]), 60)
        with pytest.raises(memstream.InvalidRequest):
            await sent[-1]
        assert (stream.received, server.in_flight_max) == (20, 8)
    assert server.contents() == said


async def test_observation_over_a_smaller_window_is_rejected(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.window_bytes = 1000
    server.acking.clear()
    async with memory.observe("p") as stream:
        await stream.send("x" * 400)
        blocked = asyncio.create_task(stream.send("y" * 800))
        await until(lambda: len(server.contents()) == 1)
        await server.stop()
        server.window_bytes = 500
        server.acking.set()
        await server.start(server.target)
        with pytest.raises(memstream.InvalidRequest):
            await asyncio.wait_for(blocked, 60)
        assert (await stream.send("z")).sequence == 2
    assert [len(each) for each in server.contents()] == [400, 1]


async def test_single_item_is_sent_at_once_many_in_batches(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        await (await stream.send("alone"))  # without a flush
        for n in range(500):
            await stream.send(f"line {n}")
    assert server.batch_sizes[0] == 1
    assert max(server.batch_sizes) == server.batch_max
    assert len(server.batch_sizes) < 50


async def test_flush_waits_until_stored(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    async with memory.observe("p") as stream:
        await stream.send("one")
        flush = asyncio.create_task(stream.flush())
        await until(lambda: stream.received == 1)
        assert not flush.done()
        server.storing.set()
        await flush
        assert stream.stored == 1


async def test_flush_at_level_received(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    async with memory.observe("p", ack_level=memstream.AckLevel.RECEIVED) as stream:
        await stream.send("one")
        await stream.flush()
        assert (stream.received, stream.stored) == (1, 0)
        server.storing.set()


async def test_flush_survives_a_break(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    async with memory.observe("p") as stream:
        await stream.send("one")
        flush = asyncio.create_task(stream.flush())
        await until(lambda: stream.received == 1)
        await server.stop()
        await server.start(server.target)
        server.storing.set()
        await flush
    assert server.contents() == ["one"]


async def test_stored_level_arrives_after_a_break(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    server.indexing.clear()  # else the server would acknowledge it as indexed
    async with memory.observe("p") as stream:
        sent = await stream.send("one")
        await until(lambda: stream.received == 1)
        await server.stop()
        server.storing.set()
        await server.start(server.target)
        await asyncio.wait_for(sent, 60)  # the new connection sends nothing
        assert (stream.stored, stream.revision) == (1, 1)


async def test_indexed_level_arrives_after_a_break(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.indexing.clear()
    async with memory.observe("p", ack_level=memstream.AckLevel.INDEXED) as stream:
        await stream.send("one")
        flush = asyncio.create_task(stream.flush())
        await until(lambda: stream.stored == 1)
        await server.stop()
        server.indexing.set()
        await server.start(server.target)
        await asyncio.wait_for(flush, 60)
    async with memory.observe("p", ack_level=memstream.AckLevel.INDEXED) as stream:
        await asyncio.wait_for(stream.flush(), 60)  # of an earlier process


async def test_repeats_are_stored_before_they_are_indexed(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.acking.clear()
    server.indexing.clear()
    async with memory.observe("p", ack_level=memstream.AckLevel.INDEXED) as stream:
        sent = await stream.send("one")
        await until(lambda: server.contents() == ["one"])
        await server.stop()
        server.acking.set()
        await server.start(server.target)
        await asyncio.wait_for(sent, 60)  # must not wait for the index, which may be unavailable
        assert (stream.received, stream.stored) == (1, 1)


async def test_flush_waiting_for_index_ends_with_stream(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.indexing.clear()
    async with memory.observe("p", ack_level=memstream.AckLevel.INDEXED) as stream:
        await stream.send("one")
        flush = asyncio.create_task(stream.flush())
        await until(lambda: stream.stored == 1)
        await stream.close()  # waits for the last acknowledgement
        with pytest.raises(memstream.StreamClosed):
            await asyncio.wait_for(flush, 60)


async def test_rejected_items_are_distinguished(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.observe("p") as stream:
        good = await stream.send("fine")
        bad = await stream.send("reject me")
        await stream.send("fine too")
        await stream.flush()
        assert (await good).sequence == 1
        with pytest.raises(memstream.InvalidRequest) as caught:
            await bad
        assert caught.value.reason == "INVALID_FIELD"
        assert caught.value.violations == (memstream.Violation("content", "scripted"),)
        assert [each.sequence for each in stream.rejected] == [2]
        assert stream.stored == 3


async def test_rejection_is_the_same_after_a_break(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.plans = [Plan(drop_after=2)]
    async with memory.observe("p") as stream:
        await stream.send("fine")
        bad = await stream.send("reject me")
        await stream.flush()
        with pytest.raises(memstream.InvalidRequest):
            await bad
        assert stream.rejected_count == 1


@pytest.mark.parametrize("page", [1, 3, 1_000])
async def test_missed_results_arrive_after_reconnect(
    memory: memstream.Memory, server: ScriptedServer, page: int
) -> None:
    """Observations are stored and rejected without acknowledgement; the new connection reports the results."""
    server.resume_page = page
    async with memory.observe("p", outcomes=True) as stream:
        first = await stream.send("one")
        await first
        server.acking.clear()
        sent = [await stream.send(text) for text in ("two", "reject me", "four", "five")]
        await until(lambda: len(server.contents()) == 5)
        await server.stop()
        server.acking.set()
        await server.start(server.target)
        ends = await asyncio.gather(*sent, return_exceptions=True)
    assert server.known == [None, 1]
    assert isinstance(ends[1], memstream.InvalidRequest)
    outcomes = [end.outcome for end in ends if isinstance(end, memstream.Stored)]
    assert [one and one.fragment_id for one in outcomes] == ["f2", "f4", "f5"]
    assert (stream.rejected_count, stream.resumption) == (1, None)


async def test_known_sequence_of_earlier_process(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.resume_page = 2
    async with memory.observe("p", outcomes=True) as stream:
        for text in ("one", "reject me", "three", "reject me too", "five"):
            await stream.send(text)
    async with memory.observe("p", outcomes=True, known_sequence=1) as stream:
        found = stream.resumption
        assert (stream.expected_sequence, stream.rejected_count) == (6, 0)
    assert found is not None
    assert [one.sequence for one in found.rejected] == [2, 4]
    assert [one.fragment_id for one in found.outcomes] == ["f3", "f5"]
    assert (found.rejected_since, found.outcomes_since) == (2, 2)
    assert server.known == [None, 1]


async def test_second_process_supersedes_the_producer(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    old = await memory.observe("p").__aenter__()
    pending = await old.send("one")
    await until(lambda: old.received == 1)
    async with memory.observe("p") as new:
        await new.send("two")
        for refused in (pending, old.flush(), old.send("three"), old.close()):
            with pytest.raises(memstream.ProducerSuperseded):
                await refused
        server.storing.set()
    assert server.contents() == ["one", "two"]


async def test_reused_number_with_other_content_conflicts(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.acking.clear()
    stream = await memory.observe("p").__aenter__()
    await stream.send("mine")
    await until(lambda: server.contents() == ["mine"])
    server.producers["ns/m", "p"].items[0].content = "another's"
    await server.stop()
    await server.start(server.target)
    with pytest.raises(memstream.SequenceConflict):
        await stream.flush()


async def test_lost_acknowledged_numbers_raise_server_behind(memory: memstream.Memory, server: ScriptedServer) -> None:
    stream = await memory.observe("p").__aenter__()
    for n in range(3):
        await stream.send(f"line {n}")
    await stream.flush()
    await server.stop()
    del server.producers["ns/m", "p"].items[1:]
    await server.start(server.target)
    lost = await stream.send("line 3")
    with pytest.raises(memstream.ServerBehind) as caught:
        await lost
    assert (caught.value.expected_sequence, caught.value.acknowledged) == (2, 3)


async def test_lost_unstored_numbers_are_resent(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.storing.clear()
    async with memory.observe("p") as stream:
        sent = [await stream.send(f"line {n}") for n in range(3)]
        await until(lambda: stream.received == 3)
        await server.stop()
        del server.producers["ns/m", "p"].items[1:]
        server.storing.set()
        await server.start(server.target)
        assert [(await each).sequence for each in sent] == [1, 2, 3]
    assert server.contents() == ["line 0", "line 1", "line 2"]


async def test_revision_of_restored_server_is_used(memory: memstream.Memory, server: ScriptedServer) -> None:
    """A recall with a revision from before the restore would wait forever."""
    server.storing.clear()
    async with memory.observe("p") as stream:
        sent = [await stream.send(f"line {n}") for n in range(3)]
        await until(lambda: stream.received == 3)
        await server.stop()
        await server.start(server.target)
        await until(lambda: stream.revision == 3)
        await server.stop()
        del server.producers["ns/m", "p"].items[1:]
        server.acking.clear()
        server.storing.set()
        await server.start(server.target)
        assert (await sent[0]).revision == stream.revision == 1
        server.acking.set()
    assert stream.revision == 3


async def test_window_overrun_reconnects(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.plans = [Plan(refuse=status(grpc.StatusCode.RESOURCE_EXHAUSTED, "WINDOW_EXCEEDED"))]
    async with memory.observe("p") as stream:
        await stream.send("one")
    assert server.contents() == ["one"]


async def test_throttled_stream_waits(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.plans, now_s = [Plan(throttle_s=0.6)], asyncio.get_running_loop().time
    begun_s = now_s()
    async with memory.observe("p") as stream:
        await until(lambda: stream.waiting == "scripted")
        await stream.send("one")
        await stream.flush()
        assert now_s() - begun_s >= 0.6
    assert server.contents() == ["one"]


async def test_exception_abandons_the_stream(memory: memstream.Memory, server: ScriptedServer) -> None:
    stream = memory.observe("p")

    async def leave() -> None:
        async with stream:
            server.acking.clear()
            sent.append(await stream.send("one"))
            raise KeyError

    sent: list[memstream.Sent] = []
    with pytest.raises(KeyError):
        await leave()
    assert server.closed == 0
    with pytest.raises(memstream.StreamClosed):
        await sent[0]
    with pytest.raises(memstream.StreamClosed):
        await stream.send("three")


async def test_permanent_error_is_raised_on_opening(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.plans = [Plan(refuse=status(grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND", memory="m"))]
    with pytest.raises(memstream.MemoryNotFound) as caught:
        async with memory.observe("p"):
            pytest.fail("opened")
    assert caught.value.details == {"memory": "m"}


async def test_refused_connection_is_unavailable() -> None:
    retry = memstream.Retry(first_s=0.2, delay_min_s=0.01, delay_max_s=0.05)
    async with memstream.connect("127.0.0.1:1", retry=retry) as client:
        with pytest.raises(memstream.Unavailable):
            async with client.memory("ns/m").observe("p"):
                pytest.fail("opened")


async def test_client_close_ends_its_streams(server: ScriptedServer) -> None:
    client = memstream.connect(server.target, retry=RETRY)
    stream = await client.memory("ns/m").observe("p").__aenter__()
    await client.close()
    with pytest.raises(memstream.StreamClosed):
        await stream.close()


async def test_cancelled_send_queues_nothing(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.window_observations = 1
    server.acking.clear()
    async with memory.observe("p") as stream:
        await stream.send("one")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await stream.send("two")
        server.acking.set()
        assert (await stream.send("three")).sequence == 2
    assert server.contents() == ["one", "three"]
