"""Supersession and truth over the wire: what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as streams
from tests.rpc.wire import Wire, refused, unpacked

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
NAMED = {"namespace": "ns", "memory": "m"}
NOBODY = "0" * 26
PARIS, BERLIN = "Ann lives in Paris", "Ann lives in Berlin"


def said(content: str, **given: Any) -> fragments.Observation:
    return fragments.Observation(content=content, **given)


async def observe(wire: Wire, *items: fragments.Observation) -> list[str]:
    request = streams.ObserveBatchRequest(**NAMED, observations=items)
    return [one.fragment_id for one in (await wire.streams.ObserveBatch(request)).ack.outcomes]


async def listed(wire: Wire, **given: Any) -> list[fragments.Fragment]:
    return list((await wire.memories.ListFragments(pb.ListFragmentsRequest(**NAMED, **given))).fragments)


def at(seconds: int) -> Timestamp:
    return Timestamp(seconds=seconds)


# ---- effects
@pytest.mark.usefixtures("real")
async def test_recall_says_status_chain_and_near_misses(wire: Wire) -> None:
    first, past = await observe(wire, said(PARIS, external_id="paris"), said("Ann lives in Rome", valid_until=at(1)))
    (second,) = await observe(wire, said(BERLIN, supersedes=["paris"], valid_from=at(1)))

    async def recall(**given: Any) -> streams.RecallOnceResponse:
        query = streams.RecallQuery(text="where does Ann live?", reinforce=False, near_misses=5, **given)
        return await wire.streams.RecallOnce(streams.RecallOnceRequest(**NAMED, query=query))  # type: ignore[no-any-return]

    answer = await recall()
    (found,) = answer.recollections.recollections
    assert (found.fragment.content, found.status) == (BERLIN, fragments.TRUTH_STATUS_CURRENT)
    assert (list(found.fragment.supersedes), found.fragment.valid_from) == ([first], at(1))
    assert [(link.fragment_id, link.status) for link in found.chain] == [
        (first, fragments.TRUTH_STATUS_SUPERSEDED),
        (second, fragments.TRUTH_STATUS_CURRENT),
    ]
    missed = {miss.fragment_id: (miss.stage, miss.superseded_by) for miss in answer.done.near_misses}
    assert missed == {first: ("superseded", second), past: ("validity", "")}
    assert list(answer.recollections.working_memory_ids) == [second]
    every = await recall(truth=fragments.TRUTH_ALL)
    statuses = {one.fragment.id: one.status for one in every.recollections.recollections}
    assert statuses == {
        first: fragments.TRUTH_STATUS_SUPERSEDED,
        second: fragments.TRUTH_STATUS_CURRENT,
        past: fragments.TRUTH_STATUS_NO_LONGER_VALID,
    }
    assert [one.id for one in await listed(wire)] == [first, past, second]
    assert [one.id for one in await listed(wire, truth=fragments.TRUTH_CURRENT)] == [second]


async def test_supersede_answers_a_repeat_as_before(wire: Wire) -> None:
    first, second = await observe(wire, said(PARIS, external_id="paris"), said(BERLIN, external_id="berlin"))
    request = pb.SupersedeFragmentsRequest(**NAMED, ids=[first], newer_id=second, request_id="r")
    done = await wire.memories.SupersedeFragments(request)
    assert done.superseded == 1
    assert await wire.memories.SupersedeFragments(request) == done
    other = pb.SupersedeFragmentsRequest(**NAMED, external_ids=["paris"], newer_external_id="berlin", request_id="r")
    assert (await refused(wire.memories.SupersedeFragments(other))).reason == "REQUEST_ID_CONFLICT"
    (old,) = [one for one in await listed(wire) if one.id == first]
    assert (old.superseded_by, old.HasField("supersede_time")) == (second, True)


# ---- refusals
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"valid_from": at(5), "valid_until": at(5)}, "valid_until"),
        ({"valid_from": at(5), "valid_until": at(4)}, "valid_until"),
        ({"valid_from": at(10**12)}, "valid_from"),
        ({"valid_until": at(-(10**12))}, "valid_until"),
        ({"supersedes": [""]}, "supersedes[0]"),
        ({"supersedes": ["a", "\n"]}, "supersedes[1]"),
        ({"supersedes": ["x" * 5_000]}, "supersedes[0]"),
        ({"supersedes": [str(number) for number in range(101)]}, "supersedes"),
    ],
)
async def test_a_malformed_observation_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    request = streams.ObserveBatchRequest(**NAMED, observations=[said(BERLIN, **given)])
    failure = await refused(wire.streams.ObserveBatch(request))
    assert (failure.code, failure.reason, list(failure.fields)) == (
        INVALID,
        "INVALID_FIELD",
        [f"observations[0].{field}"],
    )
    put = pb.PutFragmentRequest(**NAMED, observation=said(BERLIN, external_id="k", **given))
    failure = await refused(wire.memories.PutFragment(put))
    assert list(failure.fields) == [f"observation.{field}"]
    assert await listed(wire) == []


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"newer_id": NOBODY}, "ids"),
        ({"ids": ["x"], "newer_id": NOBODY}, "ids[0]"),
        ({"ids": [NOBODY]}, "newer_id"),
        ({"ids": [NOBODY], "newer_id": "x"}, "newer_id"),
        ({"ids": [NOBODY], "newer_external_id": ""}, "newer_external_id"),
        ({"external_ids": [""], "newer_id": NOBODY}, "external_ids[0]"),
        ({"external_ids": ["a"] * 1_001, "newer_id": NOBODY}, "ids"),
        ({"ids": [NOBODY], "newer_id": NOBODY, "request_id": "\x01"}, "request_id"),
    ],
)
async def test_a_malformed_request_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    failure = await refused(wire.memories.SupersedeFragments(pb.SupersedeFragmentsRequest(**NAMED, **given)))
    assert (failure.code, failure.reason, list(failure.fields)) == (INVALID, "INVALID_FIELD", [field])


async def test_an_unknown_truth_is_refused(wire: Wire) -> None:
    request = pb.ListFragmentsRequest(**NAMED, truth=9)  # type: ignore[arg-type]  # no such value
    assert list((await refused(wire.memories.ListFragments(request))).fields) == ["truth"]
    query = streams.RecallQuery(text="x", truth=9)  # type: ignore[arg-type]  # no such value
    failure = await refused(wire.streams.RecallOnce(streams.RecallOnceRequest(**NAMED, query=query)))
    assert list(failure.fields) == ["query.truth"]


@pytest.mark.usefixtures("real")
async def test_refused_requests_name_the_fragment_and_change_nothing(wire: Wire) -> None:
    first, second = await observe(wire, said(PARIS, external_id="paris"), said(BERLIN, external_id="berlin"))
    await wire.memories.SupersedeFragments(pb.SupersedeFragmentsRequest(**NAMED, ids=[first], newer_id=second))
    before = await listed(wire)
    unknown = pb.SupersedeFragmentsRequest(**NAMED, ids=[first], external_ids=["nobody"], newer_id=second)
    failure = await refused(wire.memories.SupersedeFragments(unknown))
    assert (failure.code, failure.reason, failure.metadata) == (NOT_FOUND, "FRAGMENT_NOT_FOUND", {"id": "nobody"})
    closing = pb.SupersedeFragmentsRequest(**NAMED, external_ids=["berlin"], newer_id=first)
    failure = await refused(wire.memories.SupersedeFragments(closing))
    assert (failure.code, failure.reason, list(failure.fields)) == (INVALID, "INVALID_FIELD", ["newer_id"])
    assert "berlin" in failure.message
    put = pb.PutFragmentRequest(**NAMED, observation=said(PARIS, external_id="paris", supersedes=["berlin"]))
    assert (await refused(wire.memories.PutFragment(put))).reason == "INVALID_FIELD"
    batch = streams.ObserveBatchRequest(**NAMED, observations=[said("x"), said("y", supersedes=[NOBODY])])
    failure = await refused(wire.streams.ObserveBatch(batch))
    assert (failure.code, failure.metadata) == (NOT_FOUND, {"id": NOBODY})
    assert await listed(wire) == before


@pytest.mark.usefixtures("real")
async def test_stream_rejects_a_bad_observation_alone(wire: Wire) -> None:
    call = await wire.observe()
    await call.batch(1, said(PARIS, external_id="a"), said("x", supersedes=[NOBODY]), said(BERLIN, supersedes=["a"]))
    acks = await call.ack(lambda ack: ack.stored == 3)
    (rejected,) = [one for ack in acks for one in ack.rejected]
    failure = unpacked(rejected.status)
    assert (rejected.sequence, failure.code, failure.metadata) == (2, NOT_FOUND, {"id": NOBODY})
    assert [one.content for one in await listed(wire, truth=fragments.TRUTH_CURRENT)] == [BERLIN]
