"""Codec, errors, ledger and backoff, without a server."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from hypothesis import given, settings
from hypothesis import strategies as st

import memstream
from memstream import errors, public
from memstream.answer_codec import answer_from_wire
from memstream.backoff import Backoff
from memstream.codec import event_types_to_wire, fragment_from_wire, observation_to_wire, query_to_wire
from memstream.ledger import Ledger
from memstream.policy_codec import policy_from_wire, policy_paths, policy_to_wire
from memstream.status import error_from_status, is_cut, translate_error
from memstream.v1 import (
    conversation_service_pb2,
    error_pb2,
    event_pb2,
    fragment_pb2,
    memory_pb2,
    memory_service_pb2,
    operation_pb2,
    server_service_pb2,
)
from memstream.v1 import stream_service_pb2 as pb
from memstream.wiretypes import duration_from_wire, duration_to_wire, timestamp_from_wire, timestamp_to_wire
from tests.support.scripts import status
from tests.support.seeds import rounds

aware = st.datetimes(datetime(1950, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


@given(aware)
def test_times_survive(value: datetime) -> None:
    assert timestamp_from_wire(timestamp_to_wire("t", value)) == value


@given(st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000)))
def test_durations_survive(value: timedelta) -> None:
    assert duration_from_wire(duration_to_wire(value)) == value


def test_times_are_converted_to_utc() -> None:
    here = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=5)))
    assert timestamp_from_wire(timestamp_to_wire("t", here)) == datetime(2026, 1, 1, 7, tzinfo=UTC)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300))
def test_vectors_survive(numbers: list[float]) -> None:
    wire = observation_to_wire("x", embedding=np.array(numbers, dtype=np.float64), speaker="Bob")
    assert list(wire.embedding) == numbers
    again = fragment_pb2.Observation.FromString(wire.SerializeToString())
    assert (again.content, again.speaker, list(again.embedding)) == ("x", "Bob", numbers)


def test_observation_with_all_fields_is_encoded() -> None:
    when = datetime(2026, 5, 8, 12, tzinfo=UTC)
    said = memstream.Observation(
        "words",
        speaker="Bob",
        session="s",
        observe_time=when,
        importance=0.0,
        metadata={"t": "text", "n": 1, "f": 1.5, "b": True},
        ttl=timedelta(seconds=1.5),
        external_id="e",
        token_count=3,
        supersedes=["a", "b"],
        valid_from=when,
        valid_until=when + timedelta(days=1),
    )
    wire = observation_to_wire(said, session="override")
    assert (wire.content, wire.session, wire.importance, wire.HasField("importance")) == (
        "words",
        "override",
        0.0,
        True,
    )
    kinds = {key: value.WhichOneof("kind") for key, value in wire.metadata.items()}
    assert kinds == {"t": "string_value", "n": "int_value", "f": "double_value", "b": "bool_value"}
    assert (wire.ttl.seconds, wire.ttl.nanos, wire.WhichOneof("expiry")) == (1, 500_000_000, "ttl")
    assert timestamp_from_wire(wire.observe_time) == when
    assert list(wire.supersedes) == ["a", "b"]
    assert timestamp_from_wire(wire.valid_from) == when
    assert timestamp_from_wire(wire.valid_until) == when + timedelta(days=1)


@pytest.mark.parametrize(
    "said",
    [
        {"observe_time": datetime(2026, 1, 1)},
        {"embedding": [1.0, float("nan")]},
        {"embedding": np.zeros((2, 2))},
        {"embedding": []},
        {"metadata": {"k": 1 << 64}},
        {"metadata": {"k": {1}}},
        {"ttl": timedelta(1), "expire_time": datetime(2026, 1, 1, tzinfo=UTC)},
        {"token_count": 1 << 40},
        {"speaker": 7},
    ],
)
def test_invalid_observation_is_rejected_before_sending(said: dict[str, Any]) -> None:
    with pytest.raises(memstream.InvalidRequest):
        observation_to_wire("x", **said)


@pytest.mark.parametrize("what", [7, None, "\ud800", b"bytes"])
def test_invalid_text_is_rejected_before_sending(what: Any) -> None:
    with pytest.raises(memstream.InvalidRequest):
        observation_to_wire(what)


def test_unset_fields_of_a_fragment_are_none() -> None:
    fragment = fragment_from_wire(fragment_pb2.Fragment(id="a", content="x", tier=fragment_pb2.TIER_SENSORY))
    assert (fragment.tier, fragment.observe_time, fragment.structured) == (memstream.Tier.SENSORY, None, None)


def test_enums_match_the_contract() -> None:
    assert event_types_to_wire([memstream.EventType.OBSERVED]) == [1]
    with pytest.raises(ValueError, match="UNKNOWN"):
        event_types_to_wire([memstream.EventType.UNKNOWN])


def test_policy_can_be_dataclass_or_dict() -> None:
    typed = memstream.Policy(
        profile=memstream.Profile.DBGPT,
        short_term=memstream.ShortTermPolicy(
            kind=memstream.ShortTermKind.FIFO, capacity=0, echo_window=timedelta(seconds=30)
        ),
        recall=memstream.RecallPolicy(alpha=0.0),
    )
    plain = {
        "profile": "dbgpt",
        "short_term": {"kind": "fifo", "capacity": 0, "echo_window": 30},
        "recall": {"alpha": 0.0},
    }
    assert policy_to_wire(typed) == policy_to_wire(plain)
    paths = ["profile", "short_term.kind", "short_term.capacity", "short_term.echo_window", "recall.alpha"]
    assert policy_paths(typed) == policy_paths(plain) == [f"policy.{path}" for path in paths]
    assert policy_from_wire(policy_to_wire(typed)) == typed


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        ({"recal": {}}, "policy.recal"),
        ({"recall": {"limit": True}}, "policy.recall.limit"),
        ({"recall": {"reinforce": 1}}, "policy.recall.reinforce"),
        ({"recall": {"alpha": float("nan")}}, "policy.recall.alpha"),
        ({"recall": 7}, "policy.recall"),
        ({7: 7}, "policy.7"),
        ({"language": "\ud800"}, "policy.language"),
        ({"retention": {"ttl": 1e300}}, "policy.retention.ttl"),
        ({"recall": {"limitt": 1}}, "policy.recall.limitt"),
        ({"profile": "other"}, "policy.profile"),
        ({"recall": {"limit": "many"}}, "policy.recall.limit"),
        ({"retention": {"ttl": "1d"}}, "policy.retention.ttl"),
    ],
)
def test_invalid_policy_names_the_field(policy: dict[Any, Any], field: str) -> None:
    with pytest.raises(memstream.InvalidArgument) as caught:
        policy_to_wire(policy)
    assert caught.value.argument == field


def test_every_reason_has_its_exception() -> None:
    for name in error_pb2.ErrorReason.keys()[1:]:
        reason = name.removeprefix("ERROR_REASON_")
        error = error_from_status(status(grpc.StatusCode.INVALID_ARGUMENT, reason))
        assert error.reason == reason
        assert type(error).__name__ not in ("MemstreamError", "Refused", "Transient"), reason


def test_docstring_shows_the_exception_tree() -> None:
    drawn = [line.split("──")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "──" in line]
    made = [
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, errors.MemstreamError) and each is not errors.MemstreamError
    ]
    assert sorted(drawn) == sorted(made)
    assert set(made) <= set(public.__all__)


def test_retry_after_and_foreign_statuses() -> None:
    full = error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, "BACKLOG_FULL", retry_s=1.5))
    assert isinstance(full, memstream.BacklogFull)
    assert full.retry_after == 1.5
    foreign = Status(code=14, message="proxy")
    foreign.details.add().Pack(ErrorInfo(reason="INTERNAL", domain="elsewhere.example"))
    assert type(error_from_status(foreign)) is memstream.Unavailable


@pytest.mark.parametrize(
    ("error", "cut"),
    [
        (error_from_status(Status(code=14)), True),
        (error_from_status(Status(code=13, message="RST_STREAM")), True),
        (error_from_status(status(grpc.StatusCode.INTERNAL, "INTERNAL")), False),
        (error_from_status(status(grpc.StatusCode.ABORTED, "PRODUCER_SUPERSEDED")), False),
        (error_from_status(status(grpc.StatusCode.UNAVAILABLE, "JOURNAL_UNAVAILABLE")), True),
        (error_from_status(status(grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_GAP")), True),
        (error_from_status(Status(code=12)), False),
        (translate_error(asyncio.InvalidStateError()), True),
        (translate_error(asyncio.CancelledError()), True),
        (error_from_status(status(grpc.StatusCode.RESOURCE_EXHAUSTED, "WINDOW_EXCEEDED")), True),
        (memstream.StreamClosed("x"), False),
    ],
)
def test_is_cut_accepts_transient_errors(error: memstream.MemstreamError, cut: bool) -> None:
    assert is_cut(error) is cut


def test_backoff_gives_up_and_resets() -> None:
    now = [0.0]
    retry = memstream.Retry(first_s=1.0, later_s=10.0, delay_min_s=0.1, delay_max_s=0.4)
    backoff = Backoff(retry, lambda: now[0], draw=lambda: 1.0)
    gone = memstream.Unavailable("x", code=grpc.StatusCode.UNAVAILABLE)
    assert [backoff.delay_s(gone) for _ in range(4)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    now[0] = 2.0
    assert backoff.delay_s(gone) is None
    backoff.mark_opened()
    now[0] = 3.0  # open for longer than the longest delay: a later break is a new outage
    assert backoff.delay_s(gone) == pytest.approx(0.1)
    now[0] = 12.0
    assert backoff.delay_s(gone) is not None
    now[0] = 13.5
    assert backoff.delay_s(gone) is None
    assert backoff.delay_s(memstream.ProducerSuperseded("x")) is None


def opened(expected: int, window: int = 1000, window_bytes: int = 1 << 20, epoch: int = 0) -> pb.ObserveOpened:
    return pb.ObserveOpened(
        producer_epoch=epoch,
        received=expected - 1,
        stored=expected - 1,
        expected_sequence=expected,
        window_observations=window,
        window_bytes=window_bytes,
    )


def add(ledger: Ledger, count: int) -> None:
    for _ in range(count):
        observation = fragment_pb2.Observation(content=f"line {ledger.last + 1}")
        ledger.add_observation(observation, observation.ByteSize())


def test_numbers_used_by_another_process_raise() -> None:
    ledger = Ledger(10)
    ledger.apply_opened(opened(1))
    add(ledger, 2)
    with pytest.raises(memstream.ProducerSuperseded):
        ledger.apply_opened(opened(4))


def test_stale_acknowledgements_change_nothing() -> None:
    ledger = Ledger(10)
    ledger.apply_opened(opened(1))
    add(ledger, 4)
    ledger.next_batch()
    assert ledger.apply_ack(pb.Ack(received=3, stored=2, revision=5))
    assert not ledger.apply_ack(pb.Ack(received=1, stored=1, revision=4))
    assert (ledger.received, ledger.stored, ledger.revision) == (3, 2, 5)


def test_over_the_buffer_only_numbers_are_kept() -> None:
    ledger = Ledger(10)
    ledger.apply_opened(opened(1, window_bytes=20))
    add(ledger, 1)
    ledger.next_batch()
    ledger.apply_ack(pb.Ack(received=1))
    add(ledger, 2)
    ledger.next_batch()
    ledger.apply_ack(pb.Ack(received=3))
    ledger.apply_opened(opened(3, window_bytes=20))  # the last is still buffered ...
    batch = ledger.next_batch()
    assert batch is not None
    assert (batch.first_sequence, ledger.received) == (3, 2)
    with pytest.raises(memstream.ServerBehind):
        ledger.apply_opened(opened(1, window_bytes=20))  # ... the first is not


class ModelServer:
    """A model of the server: stores by number, rejects every third, answers repeats like the first time."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.stored = 0
        self.refusals: list[int] = []
        self.wire: list[pb.ObservationBatch | None] = []  # None: the flush after repeats

    def read(self) -> bool:
        """Handles the next message and returns whether it was the flush."""
        batch = self.wire.pop(0)
        if batch is None:
            return True
        assert batch.first_sequence <= len(self.items) + 1
        for number, each in enumerate(batch.observations, batch.first_sequence):
            if number > len(self.items):
                self.items.append(each.content)
            assert self.items[number - 1] == each.content
            if number % 3 == 0:
                self.refusals.append(number)
        return False

    def ack(self) -> pb.Ack:
        refused = status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        rejected = [pb.RejectedObservation(sequence=number, status=refused) for number in self.refusals]
        self.refusals.clear()
        return pb.Ack(received=len(self.items), stored=self.stored, rejected=rejected)


@settings(max_examples=rounds(300, 100))
@given(st.lists(st.tuples(st.sampled_from("asrokx"), st.integers(0, 9)), max_size=80), st.integers(1, 6))
def test_numbers_arrive_in_order_for_any_schedule(steps: list[tuple[str, int]], window: int) -> None:
    """a: add, s: send, r: the server reads and acknowledges, x: reads only, k: stores and acknowledges, o: break."""
    ledger, server = Ledger(3), ModelServer()
    sent: list[memstream.Sent] = []
    flushing = False
    ledger.apply_opened(opened(1, window))
    for step, n in [*steps, *[("o", 0), *[("s", 0), ("r", 0), ("k", 9)] * 60]]:
        if step == "a" and ledger.has_room(10):
            observation = fragment_pb2.Observation(content=f"line {ledger.last + 1}")
            sent.append(ledger.add_observation(observation, observation.ByteSize()))
        elif step == "s":
            if ledger.repeats_sent and not flushing:
                flushing = True
                server.wire.append(None)
            elif (batch := ledger.next_batch()) is not None:
                server.wire.append(batch)
        elif step in "rx" and server.wire:
            if server.read():
                ledger.settle_repeats()
            if step == "r":
                ledger.apply_ack(server.ack())
        elif step == "k":
            server.stored = min(len(server.items), server.stored + n)
            ledger.apply_ack(server.ack())
        elif step == "o":
            server.wire.clear()
            server.refusals.clear()
            flushing = False
            ledger.apply_opened(opened(len(server.items) + 1, window))
        assert ledger.received <= len(server.items)
        assert ledger.stored <= ledger.received <= ledger.last
        assert sum(len(batch.observations) for batch in server.wire if batch is not None) <= window
    assert server.items == [f"line {n}" for n in range(1, len(sent) + 1)]
    assert [each.error is not None for each in sent] == [each.sequence % 3 == 0 for each in sent]
    assert [each.stored is not None for each in sent] == [each.sequence % 3 != 0 for each in sent]
    assert [each.sequence for each in ledger.rejected] == [each.sequence for each in sent if each.sequence % 3 == 0]


def test_sdk_imports_nothing_of_the_server() -> None:
    for file in Path(memstream.__file__).parent.rglob("*.py"):
        assert not re.search(r"\b(import|from)\s+memstream_server\b", file.read_text()), file


def test_time_zone_and_interpretation_are_encoded() -> None:
    unset = query_to_wire("q", "tea")
    assert (unset.time_zone, unset.HasField("interpret_time")) == ("", False)
    wire = query_to_wire("q", "tea", time_zone="Europe/Berlin", interpret_time=False)
    assert (wire.time_zone, wire.HasField("interpret_time"), wire.interpret_time) == ("Europe/Berlin", True, False)


def test_interpreted_times_are_decoded() -> None:
    done = pb.RecallDone()
    found = done.interpreted.add(phrase="before Christmas")
    found.to.FromJsonString("2022-12-24T00:00:00Z")
    begin = done.interpreted.add(phrase="since May")
    getattr(begin, "from").FromJsonString("2023-05-01T00:00:00Z")
    assert answer_from_wire([], done).interpreted == (
        memstream.InterpretedTime("before Christmas", None, datetime(2022, 12, 24, tzinfo=UTC)),
        memstream.InterpretedTime("since May", datetime(2023, 5, 1, tzinfo=UTC), None),
    )
    assert answer_from_wire([], pb.RecallDone()).interpreted == ()


FILES = (
    conversation_service_pb2,
    error_pb2,
    event_pb2,
    fragment_pb2,
    memory_pb2,
    memory_service_pb2,
    operation_pb2,
    server_service_pb2,
    pb,
)
ENUMS = {enum.name: enum for file in FILES for enum in file.DESCRIPTOR.enum_types_by_name.values()}
OTHER_NAMES = {"ReplayDifferenceType": "DifferenceType"}
"""Enums that the SDK names otherwise."""


@pytest.mark.parametrize("name", sorted(ENUMS.keys() - {"ErrorReason"}))  # errors have it as a string
def test_enum_has_the_members_of_the_contract(name: str) -> None:
    prefix = ENUMS[name].values_by_number[0].name.removesuffix("UNSPECIFIED")
    agreed = {value.name.removeprefix(prefix) for value in ENUMS[name].values} - {"UNSPECIFIED", "UNKNOWN"}
    members = {member.name for member in getattr(public, OTHER_NAMES.get(name, name))}
    assert members - {"UNKNOWN"} == agreed
