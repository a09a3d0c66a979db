"""The Recall stream: many queries in flight, one cancelled, all resent after a break."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Coroutine
from typing import Any

import grpc
import numpy as np
import pytest

import memstream
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import Plan, status, until


@pytest.fixture(autouse=True, params=[True, False], ids=["done in the last part", "done by itself"])
def knows_done_in_recollections(request: pytest.FixtureRequest, server: ScriptedServer) -> None:
    """Runs every test with a current and with an older server."""
    server.knows_done_in_recollections = request.param


async def test_answer_is_decoded(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.recall(session="monday") as recall:
        answer = await recall.query("Bob?", explain=True, limit=2)
    assert [hit.fragment.content for hit in answer] == ["Bob?", "second"]
    assert [fragment.content for fragment in answer.working_memory] == ["third", "second"]
    assert (len(answer), answer[0].rank, answer.revision, answer.considered) == (2, 1, 7, 2)
    explanation = answer[0].explanation
    assert explanation is not None
    assert sum(part.contribution for part in explanation.parts) == answer[0].score
    assert explanation.parts[0].details == {"bm25": 3.0}
    assert answer[1].explanation is None
    assert server.metadata[0]["memstream-memory"] == "ns/m"
    (opening,) = server.openings
    assert (opening.session, opening.done_in_recollections) == ("monday", True)


async def test_many_queries_one_cancelled(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.answering.clear()
    async with memory.recall() as recall:
        slow = [asyncio.create_task(recall.query(f"slow {n}")) for n in range(3)]
        await until(lambda: len(server.queries) == 3)
        assert (await recall.query("quick"))[0].fragment.content == "quick"  # overtakes the waiting queries
        slow[1].cancel()
        await until(lambda: server.cancelled == [server.queries[1].query_id])
        server.answering.set()
        assert (await slow[0])[0].fragment.content == "slow 0"
        assert (await slow[2])[0].fragment.content == "slow 2"
        with pytest.raises(asyncio.CancelledError):
            await slow[1]


async def test_queries_over_the_limit_wait(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.answering.clear()
    async with memory.recall() as recall:
        asked = [asyncio.create_task(recall.query(f"slow {n}")) for n in range(10)]
        await until(lambda: len(server.queries) == 4)
        await asyncio.sleep(0.05)
        assert len(server.queries) == 4
        server.answering.set()
        answers = await asyncio.gather(*asked)
    assert [answer[0].fragment.content for answer in answers] == [f"slow {n}" for n in range(10)]


async def test_queries_in_flight_are_resent_after_a_break(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.recall_plans = [Plan(drop_after=3), Plan(drop_after=1, drop_status=grpc.StatusCode.INTERNAL)]
    async with memory.recall() as recall:
        answers = await asyncio.gather(*(recall.query(f"line {n}") for n in range(3)))
        assert [[hit.fragment.content for hit in each] for each in answers] == [
            [f"line {n}", "second"] for n in range(3)
        ]
        assert recall.connections == 3


async def test_queries_are_resent_to_older_and_newer_servers(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.recall_plans = [Plan(drop_after=2)]
    async with memory.recall() as recall:
        assert (await recall.query("first"))[0].fragment.content == "first"
        server.knows_done_in_recollections = not server.knows_done_in_recollections
        assert (await recall.query("second"))[0].fragment.content == "second"
        assert recall.connections == 2


async def test_queries_over_the_next_servers_limit_wait(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.answering.clear()
    async with memory.recall() as recall:
        asked = [asyncio.create_task(recall.query(f"slow {n}")) for n in range(4)]
        await until(lambda: len(server.queries) == 4)
        await server.stop()
        server.queries_in_flight_max = 2
        await server.start(server.target)
        await until(lambda: len(server.queries) >= 6)
        asked[2].cancel()
        await asyncio.sleep(0.05)
        assert len(server.queries) == 6  # the server would reject more
        server.answering.set()
        answers = await asyncio.gather(*asked[:2], asked[3])
    assert [answer[0].fragment.content for answer in answers] == ["slow 0", "slow 1", "slow 3"]
    assert [query.text for query in server.queries[4:]] == ["slow 0", "slow 1", "slow 3"]
    assert server.cancelled == []  # the query was never sent on that connection


async def test_one_query_fails_alone(memory: memstream.Memory) -> None:
    async with memory.recall() as recall:
        failing, fine = await asyncio.gather(
            recall.query("fail", min_revision=9), recall.query("fine"), return_exceptions=True
        )
    assert isinstance(failing, memstream.RevisionNotReached)
    assert isinstance(failing, TimeoutError)
    assert failing.details == {"revision": "3"}
    assert isinstance(fine, memstream.Answer)


async def test_query_timeout_cancels_the_query(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.answering.clear()
    async with memory.recall() as recall:
        with pytest.raises(memstream.DeadlineExceeded):
            await recall.query("slow", timeout_s=0.05)
        await until(lambda: server.cancelled == ["1"])
        server.answering.set()


async def test_timeout_is_sent_with_query(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.recall() as recall:
        await recall.query("one", timeout_s=2.5)
        await recall.query("two")
        await recall.query("three", timeout_s=1e9)
        assert recall.subscribe("four", timeout_s=0.25).query.timeout.ToMilliseconds() == 250
    sent = [query.timeout.ToMilliseconds() for query in server.queries]
    assert sent[:3] == [2_500, round(memory._link.settings.timeout_s * 1_000), 10**12]


async def test_opening_a_missing_memory_raises(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.recall_plans = [Plan(refuse=status(grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND"))]
    with pytest.raises(memstream.MemoryNotFound):
        async with memory.recall():
            pytest.fail("opened")


async def test_close_needs_no_server(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.recall() as recall:
        await recall.query("quick")
        await server.stop()
    with pytest.raises(memstream.StreamClosed):
        await recall.query("late")


async def test_closed_stream_raises_stream_closed(memory: memstream.Memory) -> None:
    async with memory.recall() as recall:
        pass
    with pytest.raises(memstream.StreamClosed):
        await recall.query("late")


async def test_recall_once_carries_every_option(memory: memstream.Memory, server: ScriptedServer) -> None:
    answer = await memory.recall_once(
        memstream.Structured(question="who?"),
        session="monday",
        embedding=np.array([0.5, 0.25], dtype=np.float64),
        weights=memstream.Weights(beta=2.0),
        filter=memstream.Filter(
            speakers=["Bob"],
            tiers=[memstream.Tier.LONG_TERM],
            kinds=[memstream.FragmentKind.INSIGHT],
            metadata={"room": "a", "floor": [1, 2]},
        ),
        min_revision=4,
        token_budget=100,
        reinforce=False,
        limit=1,
    )
    assert answer.revision == 7
    query = server.queries[0]
    assert query.structured.question == "who?"
    assert list(query.embedding) == [0.5, 0.25]
    assert (query.weights.beta, query.weights.HasField("alpha")) == (2.0, False)
    assert (query.min_revision, query.token_budget, query.reinforce, query.HasField("reinforce")) == (
        4,
        100,
        False,
        True,
    )
    room, floor = query.filter.metadata
    assert (room.key, room.values[0].string_value) == ("room", "a")
    assert (floor.key, [each.int_value for each in floor.values]) == ("floor", [1, 2])


async def test_watch_continues_after_breaks(
    client: memstream.Client, memory: memstream.Memory, server: ScriptedServer
) -> None:
    await client.create_memory("ns/m")
    for revision, ordinal in itertools.product(range(1, 5), (1, 2)):
        server.add_event(revision, ordinal)
    server.watch_plans = [Plan(drop_after=3), Plan(drop_after=1), Plan(refuse=status(grpc.StatusCode.UNAVAILABLE, "X"))]
    async with memory.watch("beginning", include_fragments=True) as watch:
        seen = [await anext(watch) for _ in range(8)]
        assert [(e.cursor.revision, e.cursor.ordinal) for e in seen] == list(itertools.product(range(1, 5), (1, 2)))
        assert watch.cursor == memstream.Cursor("01HUID", 4, 2)
        assert seen[0].fragment is not None
        assert (seen[0].cosine, seen[0].draw, seen[0].type) == (0.0, None, memstream.EventType.OBSERVED)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(watch), 0.05)
        server.add_event(5, 1)
        assert (await anext(watch)).cursor.revision == 5  # the timeout did not end the watch
    assert server.watched[1].revision == 2
    with pytest.raises(memstream.StreamClosed):
        await anext(watch)


async def test_two_tasks_share_the_events_of_a_watch(
    client: memstream.Client, memory: memstream.Memory, server: ScriptedServer
) -> None:
    await client.create_memory("ns/m")
    for revision in range(1, 6):
        server.add_event(revision)
    async with contextlib.aclosing(memory.watch("beginning")) as watch:
        first = await asyncio.gather(anext(watch), anext(watch))
        rest = [await anext(watch) for _ in range(3)]
    # Either task may get the first event.
    assert sorted(event.cursor.revision for event in first) == [1, 2]
    assert [event.cursor.revision for event in rest] == [3, 4, 5]
    assert len(server.watched) == 1


async def test_watch_closed_while_starting_makes_no_call(
    client: memstream.Client, memory: memstream.Memory, server: ScriptedServer
) -> None:
    await client.create_memory("ns/m")
    watch = memory.watch("beginning")
    waiting = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    await watch.aclose()
    with pytest.raises(memstream.StreamClosed):
        await waiting
    await asyncio.sleep(0.1)
    assert (watch.connections, server.watched) == (0, [])


async def test_closed_watch_drops_events_read_ahead(
    client: memstream.Client, memory: memstream.Memory, server: ScriptedServer
) -> None:
    await client.create_memory("ns/m")
    for revision in range(1, 6):
        server.add_event(revision)
    async with memory.watch("beginning") as watch:
        first = await anext(watch)
        await asyncio.sleep(0.1)  # the others are here as well
    with pytest.raises(memstream.StreamClosed):
        await anext(watch)
    assert watch.cursor == first.cursor


async def test_cancelled_close_still_closes_the_watch(
    client: memstream.Client, memory: memstream.Memory, server: ScriptedServer
) -> None:
    await client.create_memory("ns/m")
    watch = memory.watch("beginning")
    waiting = asyncio.create_task(anext(watch))
    await until(lambda: len(server.watched) == 1)
    await cancelled_at_its_first_wait(watch.aclose())
    with pytest.raises(memstream.StreamClosed):
        await asyncio.wait_for(waiting, 60)


async def test_cancelled_abandon_still_ends_the_stream(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.answering.clear()
    recall = await memory.recall().__aenter__()
    asked = asyncio.create_task(recall.query("slow"))
    await until(lambda: len(server.queries) == 1)
    await cancelled_at_its_first_wait(recall.__aexit__(KeyError, KeyError(), None))
    with pytest.raises(memstream.StreamClosed):
        await asyncio.wait_for(asked, 60)


async def cancelled_at_its_first_wait(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_watch_from_compacted_cursor_raises(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.watch_plans = [Plan(refuse=status(grpc.StatusCode.OUT_OF_RANGE, "CURSOR_COMPACTED", oldest_revision="4"))]
    with pytest.raises(memstream.CursorCompacted) as caught:
        await anext(memory.watch(memstream.Cursor("01HUID", 1)))
    assert caught.value.details == {"oldest_revision": "4"}
