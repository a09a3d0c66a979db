"""Observe over the wire: order of acknowledgements, windows, rejections, ends of streams."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2 import ListFragmentsRequest
from memstream_server.engine.errors import BacklogFull, StorageIsFull
from memstream_server.rpc.observe import ObserveStream
from tests.rpc.wire import ObserveCall, Wire, refused, unpacked, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


async def test_opened_has_producer_progress_and_window(wire: Wire) -> None:
    call = await wire.observe()
    assert (call.opened.received, call.opened.expected_sequence, call.opened.producer_epoch) == (0, 1, 1)
    assert (call.opened.window_observations, call.opened.window_bytes) == (32, 65_536)
    assert call.opened.limits.batch_max == 16
    assert call.opened.memory_uid


async def test_lone_observation_gets_received_and_stored(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, "hello")
    acks = await call.ack(lambda ack: ack.stored == 1)
    assert all(ack.received >= ack.stored for ack in acks)
    assert acks[-1].received == 1
    assert acks[-1].revision >= 2


async def test_levels_are_cumulative_and_never_go_back(wire: Wire) -> None:
    call = await wire.observe()
    for first in range(1, 31, 3):
        await call.batch(first, f"a{first}", f"b{first}", f"c{first}")
    acks = await call.ack(lambda ack: ack.stored == 30)
    assert [ack.received for ack in acks] == sorted(ack.received for ack in acks)
    assert [ack.stored for ack in acks] == sorted(ack.stored for ack in acks)


async def test_received_is_acknowledged_while_stored_waits(wire: Wire, script: Any) -> None:
    script.storing.clear()
    call = await wire.observe()
    await call.batch(1, "a", "b")
    ack = (await call.ack(lambda ack: ack.received == 2))[-1]
    assert ack.stored == 0
    script.storing.set()
    await call.ack(lambda ack: ack.stored == 2)


async def test_flush_waits_for_the_level(wire: Wire, script: Any) -> None:
    script.storing.clear()
    call = await wire.observe()
    await call.batch(1, "a")
    await call.send(flush=pb.ObserveFlush(flush_id=7))
    assert (await call.ack(lambda ack: ack.received == 1))[-1].flushed == 0
    script.storing.set()
    assert (await call.ack(lambda ack: ack.flushed == 7))[-1].stored == 1


async def test_flush_of_level_received_does_not_wait_for_stored(wire: Wire, script: Any) -> None:
    script.storing.clear()
    call = await wire.observe(ack_level=pb.ACK_LEVEL_RECEIVED)
    await call.batch(1, "a")
    await call.send(flush=pb.ObserveFlush(flush_id=1))
    assert (await call.ack(lambda ack: ack.flushed == 1))[-1].stored == 0


async def test_flush_of_nothing_is_answered(wire: Wire) -> None:
    call = await wire.observe()
    await call.send(flush=pb.ObserveFlush(flush_id=3))
    await call.ack(lambda ack: ack.flushed == 3)


async def test_returning_producer_gets_indexed_progress(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, "a")
    await call.ack(lambda ack: ack.indexed == 1)
    again = await wire.observe()  # the server still has the older stream and its indexed progress
    assert (again.opened.received, again.opened.stored) == (1, 1)
    await again.ack(lambda ack: ack.indexed == 1)  # nothing is requested, and `opened` lacks it


async def test_stored_during_open_is_acknowledged(wire: Wire, engine: Any, script: Any) -> None:
    script.storing.clear()
    script.indexing.clear()  # which would cause an acknowledgement as well
    await (await wire.observe()).batch(1, "a")
    await until(lambda: script.items)
    opening = engine.open_observe

    async def open_observe(*named: str) -> Any:
        session = await opening(*named)
        script.storing.set()
        await until(lambda: session.take_progress().stored == 1)
        return session

    engine.open_observe = open_observe
    again = await wire.observe()
    assert (again.opened.received, again.opened.stored) == (1, 0)
    await again.ack(lambda ack: ack.stored == 1)  # nothing else happens


async def test_flushes_that_wait_are_bounded(wire: Wire, script: Any) -> None:
    """Flushes of the same number count as one; a client that keeps flushing unstored observations is refused."""
    script.storing.clear()
    call = await wire.observe()
    await call.batch(1, "x")
    for flush_id in range(1, 101):
        await call.send(flush=pb.ObserveFlush(flush_id=flush_id))
    for number in range(2, 33):
        await call.batch(number, "x")
        await call.ack(lambda ack, last=number: ack.received == last)
        await call.send(flush=pb.ObserveFlush(flush_id=100 + number))
    await call.batch(33, "x")
    await call.send(flush=pb.ObserveFlush(flush_id=200))
    error = await call.error()
    assert (error.reason, "flushes" in error.message) == ("WINDOW_EXCEEDED", True)


async def test_close_answers_closed_once_all_is_stored(wire: Wire) -> None:
    call = await wire.observe(outcomes=True)
    await call.batch(1, "a", "b")
    await call.send(close=pb.ObserveClose())
    messages = []
    while (message := await call.next()) is not None:
        messages.append(message)
    assert messages[-1].WhichOneof("message") == "closed"
    assert (messages[-1].closed.received, messages[-1].closed.stored) == (2, 2)
    outcomes = [each for message in messages for each in (*message.ack.outcomes, *message.closed.outcomes)]
    assert [each.sequence for each in outcomes] == [1, 2]
    assert all(each.fragment_id for each in outcomes)
    assert await call.call.code() is grpc.StatusCode.OK


async def test_stream_end_without_close_abandons_producer(wire: Wire, script: Any) -> None:
    script.storing.clear()
    call = await wire.observe()
    await call.batch(1, "a")
    await call.ack(lambda ack: ack.received == 1)
    await call.call.done_writing()
    assert await call.next() is None
    await until(lambda: script.sessions_closed == 1)


async def test_a_cancelled_stream_closes_its_session(wire: Wire, script: Any) -> None:
    call = await wire.observe()
    await call.batch(1, "a")
    call.call.cancel()
    await until(lambda: script.sessions_closed == 1)


async def test_unknown_role_is_rejected_with_the_known_ones(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, fragments.Observation(content="hello", role=9))  # type: ignore[arg-type] # no such role
    (rejected,) = (await call.ack(lambda ack: bool(ack.rejected)))[-1].rejected
    assert unpacked(rejected.status).fields == {"role": "has no value 9 (of 1 USER, 2 ASSISTANT, 3 TOOL, 4 SYSTEM)"}


async def test_malformed_item_is_rejected_alone(wire: Wire) -> None:
    call = await wire.observe()
    observation = fragments.Observation(content="x", importance=2.0, embedding=[1.0])
    await call.batch(1, "good", "", observation, "good too")
    acks = await call.ack(lambda ack: ack.stored == 4)
    rejected = {each.sequence: unpacked(each.status) for ack in acks for each in ack.rejected}
    assert sorted(rejected) == [2, 3]
    assert rejected[2].code is INVALID
    assert rejected[2].reason == "INVALID_FIELD"
    assert rejected[2].fields == {"content": "is empty"}
    assert set(rejected[3].fields) == {"importance", "embedding"}

    again = await wire.observe()
    assert again.opened.received == 4
    await again.batch(1, "good", "", observation, "good too")
    acks = await again.ack(lambda ack: bool(ack.rejected))
    assert [each.sequence for each in acks[-1].rejected] == [2, 3]


@pytest.mark.parametrize(
    ("observation", "field"),
    [
        (fragments.Observation(), "content"),
        (fragments.Observation(content=" \n"), "content"),
        (fragments.Observation(content="x" * 2_049), "content"),
        (fragments.Observation(content="é" * 1_025), "content"),
        (fragments.Observation(structured=fragments.StructuredObservation()), "structured"),
        (fragments.Observation(content="x", importance=float("nan")), "importance"),
        (fragments.Observation(content="x", importance=-0.1), "importance"),
        (fragments.Observation(content="x", session="a\x00b"), "session"),
        (fragments.Observation(content="x", speaker="s" * 129), "speaker"),
        (fragments.Observation(content="x", token_count=-1), "token_count"),
        (fragments.Observation(content="x", metadata={"k": fragments.MetadataValue()}), "metadata['k']"),
        (
            fragments.Observation(content="x", metadata={"k": fragments.MetadataValue(double_value=float("inf"))}),
            "metadata['k']",
        ),
        (fragments.Observation(content="x", metadata={"": fragments.MetadataValue(int_value=1)}), "metadata"),
        (
            fragments.Observation(content="x", metadata={"k": fragments.MetadataValue(string_value="v" * 20_000)}),
            "metadata",
        ),
        (fragments.Observation(content="x", observe_time={"seconds": 10**15}), "observe_time"),
        (fragments.Observation(content="x", ttl={"seconds": 0}), "ttl"),
        (fragments.Observation(content="x", ttl={"seconds": -5}), "ttl"),
    ],
)
async def test_every_malformed_field_is_named(wire: Wire, observation: Any, field: str) -> None:
    call = await wire.observe()
    await call.batch(1, observation)
    ack = (await call.ack(lambda ack: bool(ack.rejected)))[-1]
    assert list(unpacked(ack.rejected[0].status).fields) == [field]


@pytest.mark.parametrize("wrong", ["short", "long", "nan", "infinite", "zero"])
async def test_a_wrong_vector_is_refused(wire: Wire, wrong: str) -> None:
    values = [1.0] * wire.dimension
    values = {
        "short": values[1:],
        "long": [*values, 1.0],
        "nan": [float("nan"), *values[1:]],
        "infinite": [float("inf"), *values[1:]],
        "zero": [0.0] * wire.dimension,
    }[wrong]
    call = await wire.observe()
    await call.batch(1, fragments.Observation(content="x", embedding=values))
    ack = (await call.ack(lambda ack: bool(ack.rejected)))[-1]
    assert list(unpacked(ack.rejected[0].status).fields) == ["embedding"]


async def test_vector_normalises_despite_overflowing_squares(wire: Wire, script: Any) -> None:
    call = await wire.observe()
    await call.batch(1, fragments.Observation(content="x", embedding=[3e38, 3e38, 0, 0]))
    await call.ack(lambda ack: ack.stored == 1)
    assert script.items[0].vector.tolist() == pytest.approx([0.5**0.5, 0.5**0.5, 0, 0])


async def test_stream_session_is_the_default_of_items(wire: Wire, script: Any) -> None:
    call = await wire.observe(session="monday")
    await call.batch(1, "a", fragments.Observation(content="b", session="tuesday"))
    await call.ack(lambda ack: ack.stored == 2)
    assert [item.session for item in script.items] == ["monday", "tuesday"]


async def test_gap_names_expected_number_after_earlier_acks(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, "a", "b")
    await call.batch(4, "d")
    assert (await call.ack(lambda ack: ack.received == 2))[-1].received == 2
    error = await call.error()
    assert (error.code, error.reason, error.metadata) == (PRECONDITION, "SEQUENCE_GAP", {"expected_sequence": "3"})


async def test_repeat_is_acknowledged_and_not_applied(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, "a", "b")
    await call.ack(lambda ack: ack.stored == 2)
    again = await wire.observe()
    assert (again.opened.received, again.opened.expected_sequence, again.opened.producer_epoch) == (2, 3, 2)
    await again.batch(1, "a", "b")
    await again.batch(3, "c")
    await again.ack(lambda ack: ack.stored == 3)
    listed = await wire.memories.ListFragments(ListFragmentsRequest(namespace="ns", memory="m"))
    assert [each.content for each in listed.fragments] == ["a", "b", "c"]


async def test_resumed_stream_is_sent_what_it_missed(wire: Wire, real: Any) -> None:
    call = await wire.observe(outcomes=True)
    assert (call.opened.resume_to, call.opened.rejected_since, call.opened.outcomes_since) == (0, 0, 0)
    await call.batch(1, "a", "", "c")
    told = await call.ack(lambda ack: ack.stored == 3)
    again = await wire.observe(outcomes=True, known_sequence=1)
    opened = again.opened
    assert (opened.resumed, opened.resume_to, opened.rejected_since, opened.outcomes_since) == (3, 3, 2, 2)
    assert list(opened.rejected) == [each for ack in told for each in ack.rejected]
    assert list(opened.outcomes) == [each for ack in told for each in ack.outcomes if each.sequence > 1]
    await again.batch(4, "d")
    acks = await again.ack(lambda ack: ack.stored == 4)
    assert [each.sequence for ack in acks for each in ack.outcomes] == [4]
    assert {ack.resumed for ack in acks} == {3}
    ahead = await wire.observe(outcomes=True, known_sequence=9)
    assert (ahead.opened.resumed, ahead.opened.resume_to, list(ahead.opened.outcomes)) == (9, 9, [])


async def test_what_is_resumed_comes_in_pages(wire: Wire, real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstream_server.engine.memory.producers.PAGE_ITEMS", 4)
    call = await wire.observe(outcomes=True)
    for first in range(1, 21, 2):
        await call.batch(first, f"a{first}", "" if first % 3 == 0 else f"b{first}")
        await call.ack(lambda ack, last=first + 1: ack.stored == last)
    again = await wire.observe(outcomes=True, known_sequence=0)
    opened, pages = again.opened, [again.opened]
    while pages[-1].resumed < opened.resume_to:
        pages.append((await again.next()).ack)
        assert (pages[-1].received, pages[-1].stored) == (20, 20)
    told = [each.sequence for page in pages for each in (*page.rejected, *page.outcomes)]
    assert (sorted(told), opened.resume_to) == (list(range(1, 21)), 20)
    assert len(pages) > 4
    assert [page.resumed for page in pages] == sorted({page.resumed for page in pages})


async def test_largest_known_sequence_opens_a_stream(wire: Wire) -> None:
    assert (await wire.observe(outcomes=True, known_sequence=2**63 - 2)).opened.received == 0


@pytest.mark.parametrize("known", [-1, 2**63 - 1])
async def test_bad_known_sequence_is_refused(wire: Wire, known: int) -> None:
    error = await refused(wire.observe(known_sequence=known))
    assert (error.code, list(error.fields)) == (INVALID, ["open.known_sequence"])


async def test_same_number_with_other_content_conflicts(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, "a")
    await call.ack(lambda ack: ack.stored == 1)
    await call.batch(1, "other")
    error = await call.error()
    assert (error.code, error.reason, error.metadata) == (PRECONDITION, "SEQUENCE_CONFLICT", {"sequence": "1"})


async def test_newer_stream_of_producer_ends_the_older(wire: Wire) -> None:
    older = await wire.observe()
    newer = await wire.observe()
    assert newer.opened.producer_epoch == 2
    error = await older.error()
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "PRODUCER_SUPERSEDED")
    await newer.batch(1, "a")
    await newer.ack(lambda ack: ack.stored == 1)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of observations in the batches that streams have compared with their window so far."""
    seen: list[int] = []
    check = ObserveStream._check_window

    def noted(stream: ObserveStream, count: int, size: int) -> None:
        seen.append(count)
        check(stream, count, size)

    monkeypatch.setattr(ObserveStream, "_check_window", noted)
    return seen


async def test_more_than_the_window_is_refused(wire: Wire, script: Any, checked: list[int]) -> None:
    script.receiving.clear()
    call = await wire.observe()
    await call.batch(1, *["x"] * 16)
    await call.batch(17, *["x"] * 16)
    await call.batch(33, "x")
    await until(lambda: checked == [16, 16, 1])  # the server reads it before it receives the others
    script.receiving.set()
    error = await call.error()
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "WINDOW_EXCEEDED")


async def test_the_window_counts_bytes_too(wire: Wire, script: Any, checked: list[int]) -> None:
    script.receiving.clear()
    call = await wire.observe()
    await call.batch(1, *["x" * 2_048] * 16)
    await call.batch(17, *["x" * 2_048] * 16)
    await until(lambda: checked == [16, 16])
    script.receiving.set()
    error = await call.error()
    assert (error.reason, "bytes" in error.message) == ("WINDOW_EXCEEDED", True)


async def test_credits_come_back_at_received(wire: Wire, script: Any) -> None:
    script.storing.clear()
    call = await wire.observe()
    for first in range(1, 161, 16):
        await call.batch(first, *["x"] * 16)
        await call.ack(lambda ack, last=first + 15: ack.received == last)
    script.storing.set()
    await call.ack(lambda ack: ack.stored == 160)


@pytest.mark.parametrize(
    ("first", "count", "field"),
    [(1, 0, "batch.observations"), (1, 17, "batch.observations"), (0, 1, "batch.first_sequence"),
     (-3, 1, "batch.first_sequence"), (2**63 - 1, 2, "batch.first_sequence")],
)  # fmt: skip
async def test_a_malformed_batch_ends_the_stream(wire: Wire, first: int, count: int, field: str) -> None:
    call = await wire.observe()
    await call.batch(first, *["x"] * count)
    error = await call.error()
    assert (error.code, list(error.fields)) == (INVALID, [field])


@pytest.mark.parametrize(
    "messages",
    [
        [{"batch": pb.ObservationBatch(first_sequence=1)}],
        [{}],
        [{"close": pb.ObserveClose()}],
        [{"open": pb.ObserveOpen(namespace="ns", memory="m", producer="p")}] * 2,
        [{"open": pb.ObserveOpen(namespace="ns", memory="m", producer="p")}, {}],
        [{"open": pb.ObserveOpen(namespace="ns", memory="m", producer="p")}, *[{"close": pb.ObserveClose()}] * 2],
        [
            {"open": pb.ObserveOpen(namespace="ns", memory="m", producer="p")},
            {"close": pb.ObserveClose()},
            {"flush": pb.ObserveFlush(flush_id=1)},
        ],
    ],
)
async def test_messages_out_of_order_are_refused(
    wire: Wire, messages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memstream_server.rpc.observe.AFTER_CLOSE_S", 60.0)
    call = wire.streams.Observe()
    for message in messages:
        await call.write(pb.ObserveRequest(**message))

    async def read_all() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    error = await refused(read_all())
    assert (error.code, error.reason) == (PRECONDITION, "PROTOCOL_VIOLATION")


async def test_a_stream_without_any_message_is_refused(wire: Wire) -> None:
    call = wire.streams.Observe()
    await call.done_writing()
    assert (await refused(call.read())).reason == "PROTOCOL_VIOLATION"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"namespace": ""}, "open.namespace"),
        ({"namespace": "a/b"}, "open.namespace"),
        ({"memory": "-m"}, "open.memory"),
        ({"memory": "m" * 129}, "open.memory"),
        ({"memory": "näme"}, "open.memory"),
        ({"producer": ""}, "open.producer"),
        ({"producer": "a\nb"}, "open.producer"),
        ({"ack_level": 9}, "open.ack_level"),
    ],
)
async def test_a_malformed_open_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    error = await refused(wire.observe(**given))
    assert (error.code, list(error.fields)) == (INVALID, [field])


async def test_an_unknown_memory_is_named(wire: Wire) -> None:
    error = await refused(wire.observe(memory="nobody"))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND")
    assert "nobody" in error.message


async def test_a_full_backlog_throttles_before_it_refuses(wire: Wire, script: Any) -> None:
    script.refuse_submits.append(BacklogFull("full", retry_after_s=0.05))
    call = await wire.observe()
    await call.batch(1, "a")
    throttle = (await call.next()).throttle
    assert throttle.retry_delay.nanos == 50_000_000
    await call.ack(lambda ack: ack.stored == 1)


async def test_full_backlog_refuses_with_retry_delay(wire: Wire, script: Any) -> None:
    script.refuse_submits.extend(BacklogFull("full", retry_after_s=0.05) for _ in range(100))
    call = await wire.observe()
    await call.batch(1, "a")
    error = await call.error()
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "BACKLOG_FULL")
    assert error.retry_s == pytest.approx(0.05)


async def test_a_full_disk_refuses_with_a_time_to_wait(wire: Wire, script: Any) -> None:
    script.refuse_submits.append(StorageIsFull("no room"))
    call = await wire.observe()
    await call.batch(1, "a")
    error = await call.error()
    assert (error.code, error.reason, error.retry_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "STORAGE_FULL", 30.0)


async def test_draining_notifies_stream_and_still_stores(wire: Wire) -> None:
    call = await wire.observe()
    wire.drain.begin()
    assert (await call.next()).WhichOneof("message") == "going_away"
    await call.batch(1, "late")
    await call.send(close=pb.ObserveClose())
    while (message := await call.next()) is not None:
        last = message
    assert last.closed.stored == 1


async def test_stream_is_ended_after_the_grace_period(wire: Wire) -> None:
    call = await wire.observe()
    wire.drain.begin()
    assert (await call.next()).WhichOneof("message") == "going_away"
    wire.end_grace()
    error = await call.error()
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    # Writes nothing: grpc.aio's client reports INTERNAL for a write into a call that has just ended.
    assert (await ObserveCall(wire.streams.Observe()).error()).reason == "SHUTTING_DOWN"


async def test_a_batch_by_itself(wire: Wire) -> None:
    def batch(*contents: str, **given: Any) -> pb.ObserveBatchRequest:
        items = [fragments.Observation(content=content) for content in contents]
        return pb.ObserveBatchRequest(**{"namespace": "ns", "memory": "m", "observations": items} | given)

    assert (await wire.streams.ObserveBatch(batch("a", "b"))).ack.stored == 2
    error = await refused(wire.streams.ObserveBatch(batch("a", "")))
    assert (error.code, error.fields) == (INVALID, {"observations[1].content": "is empty"})
    numbered = (await wire.streams.ObserveBatch(batch("a", "", producer="q", first_sequence=1))).ack
    assert (numbered.stored, [each.sequence for each in numbered.rejected]) == (2, [2])
    assert list((await refused(wire.streams.ObserveBatch(batch("a", producer="q")))).fields) == ["first_sequence"]
    assert list((await refused(wire.streams.ObserveBatch(batch()))).fields) == ["observations"]
    gap = await refused(wire.streams.ObserveBatch(batch("z", producer="q", first_sequence=9)))
    assert gap.reason == "SEQUENCE_GAP"
