"""Recall over the wire: concurrent queries that are answered, fail or are cancelled independently."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

import grpc
import pytest

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.rpc.calls import wait_limit_s
from tests.rpc.wire import RecallCall, Wire, refused, unpacked, until
from tests.support.waiting import skip_time

INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def told(wire: Wire) -> Wire:
    items = [fragments.Observation(content=f"fact {n}", session="s", metadata=_kind(n)) for n in range(3)]
    await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=items))
    return wire


def _kind(number: int) -> dict[str, fragments.MetadataValue]:
    return {"number": fragments.MetadataValue(int_value=number), "kind": fragments.MetadataValue(string_value="f")}


async def answer(call: RecallCall, query_id: str) -> tuple[list[pb.Recollections], Any]:
    """The parts and the end (done or failed, in a separate message) of one query, without other queries' messages."""
    parts = []
    while True:
        message = await call.next()
        assert message is not None
        kind = message.WhichOneof("message")
        if getattr(message, kind).query_id != query_id:
            continue
        if kind != "recollections":
            return parts, getattr(message, kind)
        assert not message.recollections.HasField("done")
        parts.append(message.recollections)


async def answer_with_done(call: RecallCall) -> list[pb.Recollections]:
    """The parts of an answer up to the one with `done`, with no other message in between."""
    parts = []
    while not parts or not parts[-1].HasField("done"):
        message = await call.next()
        assert message.WhichOneof("message") == "recollections"
        parts.append(message.recollections)
    return parts


async def test_a_query_gets_recollections_then_done(told: Wire) -> None:
    call = await told.recall()
    assert call.opened.memory_uid
    await call.query("q1", "fact", explain=True)
    parts, done = await answer(call, "q1")
    assert len(parts) == 1
    assert [each.rank for each in parts[0].recollections] == [1, 2, 3]
    first = parts[0].recollections[0]
    assert first.fragment.content.startswith("fact")
    assert sum(part.contribution for part in first.explanation.parts) == pytest.approx(first.score)
    assert first.explanation.formula
    assert done.revision >= 2
    assert done.considered == 3


async def test_done_in_last_part_makes_one_message(told: Wire) -> None:
    call = await told.recall(done_in_recollections=True)
    for _ in range(2):  # a separate `done` would precede the second answer; the id is free again
        await call.query("q", "fact")
        (part,) = await answer_with_done(call)
        assert part.query_id == part.done.query_id == "q"
        assert [each.rank for each in part.recollections] == [1, 2, 3]
        assert part.done.revision >= 2
        assert part.done.considered == 3
        assert part.done.timings
    await call.send(close=pb.RecallClose())
    assert await call.next() is None


async def test_the_end_is_the_same_in_either_place(told: Wire) -> None:
    asked: dict[str, Any] = {"text": "fact", "limit": 2, "near_misses": 5, "token_budget": 100, "reinforce": False}
    asked["now"] = {"seconds": 2_000_000_000}  # otherwise recency differs
    apart, inside = await told.recall(), await told.recall(done_in_recollections=True)
    await apart.query("q", **asked)
    parts, end = await answer(apart, "q")
    await inside.query("q", **asked)
    (part,) = await answer_with_done(inside)
    assert end.tokens
    end.ClearField("timings")
    part.done.ClearField("timings")
    assert part.done == end
    part.ClearField("done")
    assert [part] == parts


async def test_failed_query_sends_failed_in_both_modes(told: Wire) -> None:
    call = await told.recall(done_in_recollections=True)
    await call.query("q", "fact", limit=0)
    failed = (await call.next()).failed
    assert (failed.query_id, unpacked(failed.status).reason) == ("q", "INVALID_FIELD")


async def test_an_answer_is_not_explained_unless_asked(told: Wire) -> None:
    call = await told.recall()
    await call.query("q", "fact")
    parts, _ = await answer(call, "q")
    assert not parts[0].recollections[0].HasField("explanation")


async def test_an_empty_memory_answers(wire: Wire) -> None:
    call = await wire.recall()
    await call.query("q", "fact")
    parts, done = await answer(call, "q")
    assert len(parts) == 1
    assert not parts[0].recollections
    assert done.best_relevance == 0


async def test_a_slow_query_holds_up_no_other(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("slow", "wait for it")
    await call.query("fast", "fact")
    await answer(call, "fast")
    script.recalling.set()
    await answer(call, "slow")


async def test_cancelled_query_frees_its_id(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("q", "wait for it")
    await call.query("other", "wait too")
    await call.send(cancel=pb.RecallCancel(query_id="q"))
    await call.query("q", "fact")
    _, failed = await answer(call, "q")
    assert unpacked(failed.status).reason == "QUERY_CANCELLED"
    parts, _ = await answer(call, "q")
    assert parts[0].recollections
    assert script.cancelled_recalls == 1
    script.recalling.set()
    await answer(call, "other")


async def test_cancelling_an_unknown_query_does_nothing(told: Wire) -> None:
    call = await told.recall()
    await call.send(cancel=pb.RecallCancel(query_id="nobody"))
    await call.query("q", "fact")
    await answer(call, "q")


async def test_the_end_of_the_call_cancels_its_queries(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("q", "wait for it")
    await until(lambda: script.queries)
    call.call.cancel()
    await until(lambda: script.cancelled_recalls == 1)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"text": ""}, "query.text"),
        ({"text": "x" * 3_000}, "query.text"),
        ({"limit": 0}, "query.limit"),
        ({"limit": 1_001}, "query.limit"),
        ({"embedding": [1.0]}, "query.embedding"),
        ({"min_relevance": float("nan")}, "query.min_relevance"),
        ({"min_revision": -1}, "query.min_revision"),
        ({"near_misses": -1}, "query.near_misses"),
        ({"token_budget": -1}, "query.token_budget"),
        ({"weights": pb.RecallWeights(alpha=-1)}, "query.weights.alpha"),
        ({"weights": pb.RecallWeights(gamma=float("inf"))}, "query.weights.gamma"),
        ({"now": {"seconds": 10**15}}, "query.now"),
        ({"filter": fragments.FragmentFilter(kinds=[9])}, "query.filter.kinds"),
        ({"filter": fragments.FragmentFilter(tiers=[9])}, "query.filter.tiers"),
        ({"filter": fragments.FragmentFilter(exclude_ids=["x"])}, "query.filter.exclude_ids[0]"),
        ({"filter": fragments.FragmentFilter(importance_min=2)}, "query.filter.importance_min"),
        ({"filter": fragments.FragmentFilter(importance_min=0.9, importance_max=0.1)}, "query.filter.importance_max"),
        (
            {"filter": fragments.FragmentFilter(metadata=[fragments.MetadataCondition(key="k")])},
            "query.filter.metadata[0].values",
        ),
        (
            {"filter": fragments.FragmentFilter(observe_time_min={"seconds": 9}, observe_time_max={"seconds": 8})},
            "query.filter.observe_time_max",
        ),
    ],
)
async def test_a_malformed_query_fails_alone(told: Wire, given: dict[str, Any], field: str) -> None:
    call = await told.recall()
    await call.send(query=pb.RecallQuery(**{"query_id": "bad", "text": "fact"} | given))
    await call.query("good", "fact")
    ends = {}
    while len(ends) < 2:
        message = await call.next()
        kind = message.WhichOneof("message")
        if kind != "recollections":
            ends[getattr(message, kind).query_id] = message
    failure = unpacked(ends["bad"].failed.status)
    assert (failure.code, failure.reason, list(failure.fields)) == (INVALID, "INVALID_FIELD", [field])
    assert ends["good"].HasField("done")


@pytest.mark.parametrize("defect", [RuntimeError, asyncio.CancelledError])
async def test_query_defect_reveals_only_incident_id(told: Wire, script: Any, defect: type[BaseException]) -> None:
    """A dependency of a query is cancelled: the query itself was not."""
    script.fail_recalls.append(defect("secret path"))
    call = await told.recall()
    await call.query("q", "fact")
    _, failed = await answer(call, "q")
    failure = unpacked(failed.status)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in failure.message
    assert failure.metadata["incident"] in failure.message
    await call.query("q", "fact")
    parts, _ = await answer(call, "q")
    assert parts


async def test_excess_queries_in_flight_fail_one_by_one(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    for number in range(5):
        await call.query(f"q{number}", "wait for it")
    _, failed = await answer(call, "q4")
    assert unpacked(failed.status).reason == "WINDOW_EXCEEDED"
    script.recalling.set()
    await answer(call, "q0")


async def test_id_in_flight_fails_newer_query_alone(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("q", "wait for it")
    await call.query("q", "fact")
    _, failed = await answer(call, "q")
    refusal = unpacked(failed.status)
    assert (refusal.code, refusal.reason, refusal.metadata) == (INVALID, "QUERY_ID_IN_USE", {"query_id": "q"})
    script.recalling.set()
    parts, done = await answer(call, "q")
    assert (len(parts), done.considered) == (1, 3)
    assert await ends(call) == []


@pytest.mark.parametrize("query_id", ["", "a\nb", "x" * 129])
async def test_unusable_query_id_fails_that_query(told: Wire, query_id: str) -> None:
    call = await told.recall()
    await call.query(query_id, "fact")
    failed = (await call.next()).failed
    assert failed.query_id == query_id[:128]
    assert (unpacked(failed.status).code, list(unpacked(failed.status).fields)) == (INVALID, ["query.query_id"])
    await call.query("good", "fact")
    await answer(call, "good")


async def ends(call: RecallCall) -> list[tuple[str, str]]:
    """Closes the stream: (query_id, reason) of the queries that still end, an empty reason for an answer."""
    await call.send(close=pb.RecallClose())
    found = []
    while (message := await call.next()) is not None:
        if message.HasField("failed"):
            found.append((message.failed.query_id, unpacked(message.failed.status).reason))
        elif message.HasField("done"):
            found.append((message.done.query_id, ""))
    return found


async def test_cancelled_query_ends_with_one_message(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    for query_id in ("a", "b", "c"):
        await call.query(query_id, "wait for it")
    for query_id in ("a", "b", "b", "nobody"):
        await call.send(cancel=pb.RecallCancel(query_id=query_id))
    first = (await call.next()).failed
    assert (unpacked(first.status).code, first.query_id) == (grpc.StatusCode.CANCELLED, "a")
    script.recalling.set()
    assert sorted(await ends(call)) == [("b", "QUERY_CANCELLED"), ("c", "")]


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_cancel_at_any_moment_leaves_one_end(told: Wire, steps: int) -> None:
    call = await told.recall()
    for number in range(4):
        await call.query(f"q{number}", "fact")
        for _ in range(steps):
            await asyncio.sleep(0)
        await call.send(cancel=pb.RecallCancel(query_id=f"q{number}"))
    found = await ends(call)
    assert sorted(query_id for query_id, _ in found) == ["q0", "q1", "q2", "q3"]
    assert {reason for _, reason in found} <= {"", "QUERY_CANCELLED"}


async def test_cancel_between_parts_ends_with_failed(told: Wire, script: Any, monkeypatch: Any) -> None:
    """Nothing of a query follows its end, even if parts of the answer were sent before."""
    monkeypatch.setattr("memstream_server.rpc.wire.queries.PART_BYTES", 200)
    calls = await asyncio.gather(*(told.recall(done_in_recollections=True) for _ in range(8)))
    for number, call in enumerate(calls):
        await call.query("q", "fact")
        for _ in range(number * 2):
            await asyncio.sleep(0)
        await call.send(cancel=pb.RecallCancel(query_id="q"))
        await call.send(close=pb.RecallClose())
        messages = []
        while (message := await call.next()) is not None:
            messages.append(message)
        last = [each.HasField("failed") or each.recollections.HasField("done") for each in messages]
        assert last == [False] * (len(messages) - 1) + [True]


async def test_timeout_of_query_leaves_stream_open(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("slow", "wait for it", timeout={"nanos": 30_000_000})
    await call.query("patient", "wait for it", timeout={"seconds": 3_000})
    _, failed = await answer(call, "slow")
    failure = unpacked(failed.status)
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUERY_TIMEOUT")
    script.recalling.set()
    assert (await answer(call, "patient"))[0]
    await call.query("slow", "fact", timeout={"seconds": 5})
    assert (await answer(call, "slow"))[0]


@pytest.mark.parametrize("given", [{}, {"seconds": -1}, {"seconds": 1, "nanos": 2_000_000_000}, {"seconds": 10**12}])
async def test_bad_timeout_fails_query(told: Wire, given: dict[str, int]) -> None:
    call = await told.recall()
    await call.query("q", "fact", timeout=given)
    _, failed = await answer(call, "q")
    assert list(unpacked(failed.status).fields) == ["query.timeout"]
    query = pb.RecallQuery(text="fact", timeout=given)
    request = pb.RecallOnceRequest(namespace="ns", memory="m", query=query)
    assert list((await refused(told.streams.RecallOnce(request))).fields) == ["query.timeout"]


async def test_timeout_of_single_query(told: Wire, script: Any) -> None:
    script.recalling.clear()
    query = pb.RecallQuery(text="wait for it", timeout={"nanos": 20_000_000})
    request = pb.RecallOnceRequest(namespace="ns", memory="m", query=query)
    error = await refused(told.streams.RecallOnce(request, timeout=60))
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUERY_TIMEOUT")


@pytest.mark.parametrize("late", ["query", "cancel", "close", "open"])
async def test_message_after_close_is_refused(told: Wire, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.rpc.recall.AFTER_CLOSE_S", 60.0)
    messages: dict[str, Any] = {
        "query": pb.RecallQuery(query_id="q", text="fact"),
        "cancel": pb.RecallCancel(query_id="q"),
        "close": pb.RecallClose(),
        "open": pb.RecallOpen(namespace="ns", memory="m"),
    }
    call = await told.recall()
    await call.send(close=pb.RecallClose())
    await call.send(**{late: messages[late]})
    error = await call.error()
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VIOLATION")


async def test_close_answers_queries_in_flight(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("q", "wait for it")
    await call.send(close=pb.RecallClose())
    script.recalling.set()
    await answer(call, "q")
    assert await call.next() is None
    assert await call.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("second", [{"open": pb.RecallOpen(namespace="ns", memory="m")}, {}])
async def test_messages_out_of_order_are_refused(wire: Wire, second: dict[str, Any]) -> None:
    call = await wire.recall()
    await call.send(**second)
    assert (await call.error()).reason == "PROTOCOL_VIOLATION"
    before_open = RecallCall(wire.streams.Recall())
    await before_open.query("q")
    assert (await before_open.error()).reason == "PROTOCOL_VIOLATION"


async def test_an_unknown_memory_is_named(wire: Wire) -> None:
    error = await refused(wire.recall(memory="nobody"))
    assert error.reason == "MEMORY_NOT_FOUND"
    assert "nobody" in error.message


async def test_a_large_answer_comes_in_parts_each_once(told: Wire, script: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("memstream_server.rpc.wire.queries.PART_BYTES", 200)
    call = await told.recall()
    await call.query("q", "fact")
    parts, _ = await answer(call, "q")
    assert len(parts) == 3
    assert [each.rank for part in parts for each in part.recollections] == [1, 2, 3]
    assert all(part.query_id == "q" for part in parts)


async def test_only_last_part_of_large_answer_has_done(told: Wire, script: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("memstream_server.rpc.wire.queries.PART_BYTES", 200)
    call = await told.recall(done_in_recollections=True)
    await call.query("q", "fact")
    parts = await answer_with_done(call)
    assert [[each.rank for each in part.recollections] for part in parts] == [[1], [2], [3]]
    assert [part.HasField("done") for part in parts] == [False, False, True]
    await call.send(close=pb.RecallClose())
    assert await call.next() is None


async def unread(wire: Wire, script: Any, count: int) -> RecallCall:
    """A stream with so many waiting answers, each larger than the transport accepts before the client reads."""
    for start in range(0, 60, 4):
        items = [fragments.Observation(content=f"fact {n} {'x' * 2_000}") for n in range(start, start + 4)]
        await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=items))
    call = await wire.recall()
    for number in range(count):
        await call.query(f"q{number}", "fact", limit=60)
    await until(lambda: len(script.queries) == count)
    return call


async def test_cancelled_waiting_answers_keep_stream_intact(wire: Wire, script: Any) -> None:
    call = await unread(wire, script, 4)
    for number in range(4):
        await call.send(cancel=pb.RecallCancel(query_id=f"q{number}"))
    await call.query("last", "fact", limit=60)
    parts, done = await answer(call, "last")
    assert (len(parts[0].recollections), done.query_id) == (60, "last")
    await call.send(close=pb.RecallClose())
    assert await call.next() is None


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_stream_end_with_waiting_answers_leaks_nothing(
    wire: Wire, script: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    gc.collect()
    caplog.clear()  # of what other tests left
    call = await unread(wire, script, 4)
    if how == "cancelled":
        call.call.cancel()
    else:
        await call.send()
        assert (await call.error()).reason == "PROTOCOL_VIOLATION"
    await until(lambda: wire.drain.memories.open_streams == 0)
    gc.collect()  # a task whose error nobody retrieved reports it when collected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_draining_notifies_and_answers_queries_in_flight(told: Wire, script: Any) -> None:
    script.recalling.clear()
    call = await told.recall()
    await call.query("q", "wait for it")
    await until(lambda: script.queries)
    told.drain.begin()
    assert (await call.next()).HasField("going_away")
    script.recalling.set()
    await answer(call, "q")
    told.end_grace()
    assert (await call.error()).reason == "SHUTTING_DOWN"


async def test_one_query_by_itself(told: Wire) -> None:
    def once(**given: Any) -> pb.RecallOnceRequest:
        return pb.RecallOnceRequest(namespace="ns", memory="m", query=pb.RecallQuery(**{"text": "fact"} | given))

    answered = await told.streams.RecallOnce(once(limit=2))
    assert len(answered.recollections.recollections) == 2
    assert answered.done.revision >= 2
    assert not answered.recollections.HasField("done")
    equal = fragments.MetadataCondition(key="number", values=[fragments.MetadataValue(int_value=1)])
    filtered = await told.streams.RecallOnce(once(filter=fragments.FragmentFilter(metadata=[equal])))
    assert [each.fragment.content for each in filtered.recollections.recollections] == ["fact 1"]
    assert list((await refused(told.streams.RecallOnce(once(limit=-1)))).fields) == ["query.limit"]


@pytest.mark.parametrize("count", [0, 1, 40])
async def test_singular_fields_of_an_answer_occur_once(wire: Wire, count: int) -> None:
    """Protobuf merges a second one; Envoy's transcoder answers 502."""
    items = [fragments.Observation(content=f"fact {n}", session="s") for n in range(count)]
    for at in range(0, count, 16):
        some = items[at : at + 16]
        await wire.streams.ObserveBatch(pb.ObserveBatchRequest(namespace="ns", memory="m", observations=some))
    ask = wire.channel.unary_unary(
        "/memstream.v1.StreamService/RecallOnce", request_serializer=pb.RecallOnceRequest.SerializeToString
    )
    query = pb.RecallQuery(text="fact", limit=40, explain=True)
    data = await ask(pb.RecallOnceRequest(namespace="ns", memory="m", query=query))
    answered = pb.RecallOnceResponse.FromString(data)
    assert len(answered.recollections.recollections) + len(answered.recollections.working_memory) >= count
    assert answered.ByteSize() == len(data)


async def test_unreached_revision_names_current_revision(told: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    def noted(time_remaining_s: float) -> float:
        waiting.set()
        return wait_limit_s(time_remaining_s)

    monkeypatch.setattr("memstream_server.rpc.recall.wait_limit_s", noted)
    request = pb.RecallOnceRequest(
        namespace="ns", memory="m", query=pb.RecallQuery(text="fact", min_revision=1_000_000)
    )
    asked = asyncio.ensure_future(refused(told.streams.RecallOnce(request, timeout=60)))
    await waiting.wait()
    skip_time(60)  # for the server; the client's time limit is measured by gRPC, and must come later than the answer
    error = await asked
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "REVISION_NOT_REACHED")
    assert 0 < int(error.metadata["revision"]) < 1_000_000
