"""Standing queries of the SDK: the changes returned for a server's messages, across errors and breaks."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo

import memstream
from memstream.v1 import fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from tests.support.scripted_server import ScriptedServer
from tests.support.scripts import Plan, duration, status, until


def change(*ranking: str, new: str = "", revision: int = 1) -> pb.RecallResponse:
    """A server message; `new` are the fragments sent with it, with the revision as etag."""
    hits = [
        pb.Recollection(fragment=fragment_pb2.Fragment(id=id_, content=f"{id_} at {revision}", etag=str(revision)))
        for id_ in new
    ]
    done = pb.RecallDone(revision=revision, ranking_ids=ranking)
    return pb.RecallResponse(recollections=pb.Recollections(recollections=hits, done=done))


def failed(code: grpc.StatusCode, reason: str) -> pb.RecallResponse:
    return pb.RecallResponse(failed=pb.RecallFailed(status=status(code, reason)))


def ids(hits: tuple[memstream.Recollection, ...]) -> str:
    return "".join(hit.fragment.id for hit in hits)


def seen(change: memstream.AnswerChange) -> tuple[str, str, str, str]:
    """The answer, and what entered it, changed in it and left it."""
    return ids(change.answer.recollections), ids(change.entered), ids(change.changed), "".join(change.retracted)


async def test_change_is_difference_of_answers(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", "b", new="ab"), change("c", "b", new="cb", revision=2)]]
    async with memory.recall() as recalls, recalls.subscribe("what?", limit=2) as standing:
        await until(lambda: standing.answer is not None and standing.answer.revision == 2)
        assert seen(await anext(standing)) == ("cb", "cb", "", ""), "a slow reader gets combined changes"
    (query,) = server.queries
    assert (query.text, query.limit, query.subscribe) == ("what?", 2, True)
    await until(lambda: server.cancelled == [query.query_id])


async def test_change_has_entered_changed_and_retracted(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", "b", new="ab")]]
    async with memory.recall() as recalls, recalls.subscribe("what?") as standing:
        assert seen(await anext(standing)) == ("ab", "ab", "", "")
        standing.add_part(change("b", "c", new="bc", revision=2).recollections)
        standing.complete_answer(change("b", "c", revision=2).recollections.done)
        told = await anext(standing)
        assert seen(told) == ("bc", "c", "b", "a")
        assert [hit.rank for hit in told.answer] == [1, 2]
        assert told.answer[0].fragment.content == "b at 2"


async def test_reconnect_returns_difference_to_last_answer(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", "b", new="ab")], [change("a", "b", new="ab")], [change("b", "d", new="bd")]]
    server.recall_plans = [Plan(drop_after=2), Plan(drop_after=3), Plan()]
    async with memory.recall() as recalls, recalls.subscribe("what?") as standing:
        assert seen(await anext(standing)) == ("ab", "ab", "", "")
        for number in range(2):
            await recalls.query("this breaks the connection")
            assert recalls.connections == 2 + number
        assert seen(await anext(standing)) == ("bd", "d", "", "a"), "what is as it was is not handed out"
    assert [query.text for query in server.queries].count("what?") == 3


async def test_transient_failure_resends_the_query(memory: memstream.Memory, server: ScriptedServer) -> None:
    waiting = failed(grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")
    waiting.failed.status.details.add().Pack(RetryInfo(retry_delay=duration(0.01)))
    server.told = [[change("a", new="a"), waiting], [change("b", new="b", revision=2)]]
    async with memory.recall() as recalls, recalls.subscribe("what?") as standing:
        assert seen(await anext(standing)) == ("a", "a", "", "")
        assert seen(await anext(standing)) == ("b", "b", "", "a")
    assert len(server.queries) == 2
    assert recalls.connections == 1


async def test_permanent_failure_ends_only_its_query(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", new="a"), failed(grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND")]]
    async with memory.recall() as recalls:
        async with recalls.subscribe("what?") as standing:
            assert seen(await anext(standing)) == ("a", "a", "", "")
            with pytest.raises(memstream.MemoryNotFound):
                await anext(standing)
        assert (await recalls.query("Bob?"))[0].fragment.content == "Bob?"
    assert server.cancelled == []


async def test_error_of_the_first_answer_is_raised(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[failed(grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")]] * 2
    async with memory.recall() as recalls:
        with pytest.raises(memstream.CapabilityMissing):
            async with recalls.subscribe("what?"):
                pytest.fail("it is not answered")
        with pytest.raises(memstream.CapabilityMissing):
            await anext(recalls.subscribe("what?"))


async def test_timeout_of_first_answer_cancels_subscription(memory: memstream.Memory, server: ScriptedServer) -> None:
    async with memory.recall() as recalls:
        with pytest.raises(memstream.DeadlineExceeded):
            async with recalls.subscribe("what?", timeout_s=0.05):
                pytest.fail("it is not answered")
        await until(lambda: server.cancelled == ["1"])


async def test_waiting_may_be_cancelled_and_resumed(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", new="a")]]
    async with memory.recall() as recalls, recalls.subscribe("what?") as standing:
        await anext(standing)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(standing), 0.05)
        standing.add_part(change("b", new="b", revision=2).recollections)
        standing.complete_answer(change("b", revision=2).recollections.done)
        assert seen(await anext(standing)) == ("b", "b", "", "a")


async def test_closed_query_raises_stream_closed(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", new="a")]] * 3
    async with memory.recall() as recalls:
        async with recalls.subscribe("what?") as standing:
            pass
        with pytest.raises(memstream.StreamClosed):
            await anext(standing)
        left, alone = recalls.subscribe("what?"), recalls.subscribe("what?")
        await anext(left)
        await anext(alone)
        waiting = asyncio.create_task(anext(left))  # type: ignore[arg-type]  # a coroutine all the same
    with pytest.raises(memstream.StreamClosed):
        await waiting
    with pytest.raises(memstream.StreamClosed):
        await anext(alone)
    with pytest.raises(memstream.StreamClosed):
        await anext(recalls.subscribe("what?"))


async def test_standing_query_counts_as_in_flight(memory: memstream.Memory, server: ScriptedServer) -> None:
    server.told = [[change("a", new="a")]] * 5
    async with memory.recall() as recalls:
        held = [recalls.subscribe(f"what {number}?") for number in range(4)]
        for standing in held:
            await anext(standing)
        with pytest.raises(memstream.DeadlineExceeded):
            await recalls.query("Bob?", timeout_s=0.05)
        await held[2].aclose()
        assert (await recalls.query("Bob?"))[0].fragment.content == "Bob?"


async def test_ranking_unknown_fragment_is_a_protocol_violation(
    memory: memstream.Memory, server: ScriptedServer
) -> None:
    server.told = [[change("a", "z", new="a")]]
    with pytest.raises(memstream.ProtocolViolation):
        async with memory.recall() as recalls, recalls.subscribe("what?") as standing:
            await anext(standing)
