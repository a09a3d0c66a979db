"""Standing queries over the wire: the whole answer, then changes, until cancelled or closed; and a block's question."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_service_pb2, server_service_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.block_service_pb2 import GetBlockRequest, PutBlockRequest, StandingQuestion
from memstream.v1.block_service_pb2_grpc import BlockServiceStub
from memstream.v1.scope_pb2 import RecallScope
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.recall import standing_query
from tests.engine.engine_parts import PartsEngine
from tests.rpc.wire import RecallCall, Wire, refused, unpacked, until
from tests.support import waiting
from tests.support.waiting import skip_time

pytestmark = pytest.mark.usefixtures("real")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.02)


async def observe(wire: Wire, *texts: str) -> None:
    items = [fragments.Observation(content=text) for text in texts]
    await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=items))


async def change(call: RecallCall) -> list[Any]:
    """The messages of the next change, including its end."""
    told: list[Any] = []
    while True:
        message = await call.next()
        kind = message.WhichOneof("message")
        told.append(getattr(message, kind))
        if kind == "done" or (kind == "recollections" and message.recollections.HasField("done")):
            return told


def contents(told: list[Any]) -> list[tuple[int, str]]:
    parts = [each for each in told if isinstance(each, pb.Recollections)]
    return [(each.rank, each.fragment.content) for part in parts for each in part.recollections]


@pytest.mark.parametrize("inside", [True, False])
async def test_the_answer_and_then_what_changes(wire: Wire, inside: bool) -> None:
    await observe(wire, "fact one", "fact two")
    call = await wire.recall(done_in_recollections=inside)
    await call.query("q", "fact river", subscribe=True, limit=2, explain=True, weights={"alpha": 0.0})
    first = await change(call)
    assert sorted(content for _, content in contents(first)) == ["fact one", "fact two"]
    assert all(part.recollections[0].explanation.parts for part in first if isinstance(part, pb.Recollections))
    assert not any(part.working_memory_ids for part in first if isinstance(part, pb.Recollections))
    await observe(wire, "nothing of it")
    await observe(wire, "a fact of the river")
    second = await change(call)
    end = second[-1].done if inside else second[-1]
    assert isinstance(second[0], pb.Retracted)
    assert contents(second) == [(1, "a fact of the river")]
    was = {each.fragment.id for part in first if isinstance(part, pb.Recollections) for each in part.recollections}
    (gone,) = second[0].fragment_ids
    assert gone in was
    assert set(end.ranking_ids) - was == {second[1].recollections[0].fragment.id}
    assert {each.query_id for each in [*first, *second]} == {"q"}
    assert end.revision > 2


async def test_standing_query_blocks_no_query_and_frees_its_id(wire: Wire, real: Any) -> None:
    await observe(wire, "fact one")
    call = await wire.recall(done_in_recollections=True)
    await call.query("q", "fact", subscribe=True)
    await change(call)
    await call.query("other", "fact")
    assert (await change(call))[0].query_id == "other"
    await call.send(cancel=pb.RecallCancel(query_id="q"))
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("q", "QUERY_CANCELLED")
    await until(lambda: real.memory_stats().watchers == 0)
    await observe(wire, "fact two")
    await call.query("q", "fact", limit=1)
    (last,) = await change(call)
    assert (last.query_id, len(last.recollections), list(last.done.ranking_ids)) == ("q", 1, [])


async def test_standing_query_holds_its_id_and_a_slot(wire: Wire) -> None:
    call = await wire.recall(done_in_recollections=True)
    for number in range(4):
        await call.query(f"q{number}", "fact", subscribe=True)
        await change(call)
    await call.query("more", "fact")
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("more", "WINDOW_EXCEEDED")
    await call.query("q0", "fact")
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("q0", "QUERY_ID_IN_USE")


async def test_timeout_of_standing_query_is_for_first_answer(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    await observe(wire, "fact one")
    call = await wire.recall(done_in_recollections=True)
    with monkeypatch.context() as patched:
        patched.setattr("memstream_server.rpc.recall.wait_limit_s", lambda _: 0.0)
        await call.query("late", "fact", subscribe=True, min_revision=1_000, timeout={"seconds": 60})
        failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("late", "REVISION_NOT_REACHED")
    await call.query("q", "fact", subscribe=True, timeout={"seconds": 60})
    await change(call)
    skip_time(61)
    await observe(wire, "fact two")
    assert (await change(call))[0].query_id == "q"


async def test_closing_ends_it(wire: Wire, real: Any) -> None:
    call = await wire.recall()
    await call.query("q", "fact", subscribe=True)
    await change(call)
    await call.send(close=pb.RecallClose())
    assert await call.next() is None
    assert await call.call.code() is grpc.StatusCode.OK
    assert real.memory_stats().watchers == 0


async def test_a_deleted_memory_fails_it_alone(wire: Wire, real: Any) -> None:
    call = await wire.recall()
    await call.query("q", "fact", subscribe=True)
    await change(call)
    await wire.memories.DeleteMemory(memory_service_pb2.DeleteMemoryRequest(namespace="ns", memory="m"))
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("q", "MEMORY_NOT_FOUND")
    await call.send(close=pb.RecallClose())
    assert await call.next() is None


async def test_a_malformed_one_is_refused_like_any_query(wire: Wire) -> None:
    call = await wire.recall()
    await call.query("q", "fact", subscribe=True, limit=0)
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("q", "INVALID_FIELD")


async def test_a_large_change_comes_in_parts(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.rpc.wire.queries.PART_BYTES", 200)
    call = await wire.recall(done_in_recollections=True)
    await call.query("q", "fact", subscribe=True)
    await change(call)
    await observe(wire, "fact one", "fact two", "fact three")
    parts = await change(call)
    assert len(parts) == 3
    assert [rank for rank, _ in contents(parts)] == [1, 2, 3]
    assert len(parts[-1].done.ranking_ids) == 3


async def test_recall_once_refuses_standing_queries(wire: Wire) -> None:
    query = pb.RecallQuery(text="fact", subscribe=True)
    error = await refused(wire.streams.RecallOnce(pb.RecallOnceRequest(namespace="ns", memory="m", query=query)))
    assert (error.reason, list(error.fields)) == ("INVALID_FIELD", ["query.subscribe"])


async def test_it_is_a_capability(wire: Wire) -> None:
    info = await wire.info.GetServerInfo(server_service_pb2.GetServerInfoRequest())
    assert server_service_pb2.CAPABILITY_SUBSCRIBE in info.capabilities


async def test_a_server_that_goes_away_says_so_and_ends(wire: Wire) -> None:
    call = await wire.recall()
    await call.query("q", "fact", subscribe=True)
    await change(call)
    wire.drain.begin()
    assert (await call.next()).HasField("going_away")
    wire.end_grace()
    assert (await call.error()).reason == "SHUTTING_DOWN"


async def list_open(wire: Wire, **given: Any) -> Any:
    request = memory_service_pb2.ListStandingQueriesRequest(namespace="ns", memory="m", **given)
    return await wire.memories.ListStandingQueries(request)


async def test_open_standing_queries_are_listed(wire: Wire) -> None:
    await observe(wire, "fact one")
    call = await wire.recall(done_in_recollections=True, session="monday")
    only = fragments.FragmentFilter(speakers=["<b>\u202e"])
    await call.query("q", "fact " + "é" * 500, subscribe=True, filter=only, embedding=[1.0] * wire.dimension)
    first = await change(call)
    await until_sent(wire, len(first))
    (one,) = (await list_open(wire)).queries
    assert (one.query.query_id, one.query.text, one.session) == ("q", "fact " + "é" * 500, "monday")
    assert (one.query.filter, one.query.subscribe, len(one.query.embedding)) == (only, True, 0)
    assert one.recollections == 0, "the filter leaves nothing"
    assert one.principal == ""
    assert one.open_time.ToMicroseconds() <= one.change_time.ToMicroseconds()


async def test_list_of_standing_queries_counts_changes(wire: Wire) -> None:
    call = await wire.recall(done_in_recollections=True)
    await call.query("q", "fact", subscribe=True)
    sent = await change(call)
    await observe(wire, "a fact")
    sent += await change(call)
    await until_sent(wire, len(sent))
    (one,) = (await list_open(wire)).queries
    assert one.recollections == 1
    assert one.change_time.ToMicroseconds() > one.open_time.ToMicroseconds()


async def until_sent(wire: Wire, count: int) -> None:
    """Waits until the list counts these messages: the client may read one before the server counts it."""

    async def counted() -> bool:
        return (await list_open(wire)).queries[0].messages_sent == count

    await waiting.until(counted)


async def test_ended_standing_queries_leave_the_list(wire: Wire) -> None:
    call = await wire.recall()
    for name in ("q1", "q2"):
        await call.query(name, "fact", subscribe=True)
        await change(call)
    first = await list_open(wire, page_size=1)
    rest = await list_open(wire, page_size=1, page_token=first.next_page_token)
    assert [one.query.query_id for one in (*first.queries, *rest.queries)] == ["q1", "q2"]
    assert rest.next_page_token == ""
    await call.send(cancel=pb.RecallCancel(query_id="q1"))
    assert (await call.next()).HasField("failed")
    assert [one.query.query_id for one in (await list_open(wire)).queries] == ["q2"]
    await call.send(close=pb.RecallClose())
    assert await call.next() is None
    assert not (await list_open(wire)).queries


async def test_other_memories_queries_are_not_listed(wire: Wire) -> None:
    await wire.memories.CreateMemory(memory_service_pb2.CreateMemoryRequest(namespace="ns", memory="other"))
    call = await wire.recall(memory="other")
    await call.query("q", "fact", subscribe=True)
    await change(call)
    assert not (await list_open(wire)).queries
    request = memory_service_pb2.ListStandingQueriesRequest(namespace="ns", memory="nobody")
    assert (await refused(wire.memories.ListStandingQueries(request))).reason == "MEMORY_NOT_FOUND"


async def test_block_waits_for_the_revision_that_it_saw(
    wire: Wire, real: PartsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has a commit before the memory in RAM: a text without it would count as that of its revision."""
    blocks = BlockServiceStub(wire.channel)
    question = StandingQuestion(
        text="What does Bob drink?", scopes=[RecallScope(memory="ns/m")], min_interval=Duration(seconds=1)
    )
    await wire.memories.CreateMemory(memory_service_pb2.CreateMemoryRequest(namespace="ns", memory="agent"))
    await blocks.PutBlock(PutBlockRequest(namespace="ns", memory="agent", block="drinks", standing=question))
    commit, wait_for_revision, waits = real.journal.commit, Actor.wait_for_revision, asyncio.Event()

    async def commit_and_wait(given: Any) -> None:
        await commit(given)
        real.standing_blocks.notify()
        await waits.wait()

    async def begin_to_wait(actor: Actor, revision: int) -> None:
        waits.set()
        await wait_for_revision(actor, revision)

    monkeypatch.setattr(Actor, "wait_for_revision", begin_to_wait)
    monkeypatch.setattr(real.journal, "commit", commit_and_wait)
    await observe(wire, "Bob drinks tea")

    async def is_written() -> bool:
        read = GetBlockRequest(namespace="ns", memory="agent", block="drinks")
        return "tea" in (await blocks.GetBlock(read)).block.text

    await waiting.until(is_written)
