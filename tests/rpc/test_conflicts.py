"""Conflict rpcs over the wire: pages, decisions, refusals, and answers to repeats."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_pb2 as memory_pb
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from tests.rpc.wire import Wire, refused

NAMED = {"namespace": "ns", "memory": "m"}
NOBODY = "0" * 26
NEWER = fragments.CONFLICT_DECISION_NEWER
pytestmark = pytest.mark.usefixtures("real")


async def tell(wire: Wire, content: str, key: str) -> str:
    said = fragments.Observation(content=content, external_id=key, speaker="Ada", session="s")
    return (await wire.memories.PutFragment(pb.PutFragmentRequest(**NAMED, observation=said))).fragment.id


async def suspected(wire: Wire) -> list[tuple[str, str]]:
    """Two suspicions as (newer, older)."""
    policy = memory_pb.Policy(conflicts=memory_pb.ConflictPolicy(ask_llm=True))
    change = memory_pb.Memory(namespace="ns", name="m", policy=policy)
    mask = FieldMask(paths=["policy.conflicts.ask_llm"])
    await wire.memories.UpdateMemory(pb.UpdateMemoryRequest(memory=change, update_mask=mask))
    pairs = []
    for older, newer in (
        ("I live in Munich now.", "I live in Berlin now."),
        ("My rent is 900 euros.", "My rent is 950 euros."),
    ):
        first = await tell(wire, older, older)
        pairs.append((await tell(wire, newer, newer), first))
    return pairs


def resolve_request(newer: str = NOBODY, older: str = NOBODY, **given: Any) -> pb.ResolveConflictRequest:
    return pb.ResolveConflictRequest(**NAMED | {"newer_id": newer, "older_id": older, "decision": NEWER} | given)


async def test_suspicions_are_listed_by_pages(wire: Wire) -> None:
    pairs = await suspected(wire)
    first = await wire.memories.ListConflicts(pb.ListConflictsRequest(**NAMED, page_size=1))
    rest = await wire.memories.ListConflicts(pb.ListConflictsRequest(**NAMED, page_token=first.next_page_token))
    found = [*first.conflicts, *rest.conflicts]
    assert [(one.suspicion.newer_id, one.suspicion.older_id) for one in found] == pairs
    assert [one.suspicion.reason for one in found] == ["twins", "twins"]
    assert rest.next_page_token == ""


async def test_recollections_carry_their_suspicions(wire: Wire) -> None:
    newer, older = (await suspected(wire))[0]
    query = stream_pb.RecallQuery(text="Where does Ada live?")
    answer = await wire.streams.RecallOnce(stream_pb.RecallOnceRequest(**NAMED, query=query))
    found = {one.fragment.id: one for one in answer.recollections.recollections}
    (suspicion,) = found[newer].suspicions
    assert (suspicion.newer_id, suspicion.older_id) == (newer, older)
    assert (found[newer].later_id, found[older].later_id) == ("", newer)
    assert (newer, older) == tuple(one.fragment.id for one in answer.recollections.recollections)[:2]


async def test_a_decision_is_made_once(wire: Wire) -> None:
    (newer, older), other = await suspected(wire)
    request = resolve_request(newer, older, note="Ada said so", request_id="r1")
    done = await wire.memories.ResolveConflict(request)
    assert (done.conflict.decision, done.conflict.note) == (NEWER, "Ada said so")
    assert await wire.memories.ResolveConflict(request) == done
    decided = await wire.memories.ListConflicts(pb.ListConflictsRequest(**NAMED, decided=True))
    assert list(decided.conflicts) == [done.conflict]
    left = await wire.memories.ListConflicts(pb.ListConflictsRequest(**NAMED))
    assert [(one.suspicion.newer_id, one.suspicion.older_id) for one in left.conflicts] == [other]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"newer_id": "x"}, "newer_id"),
        ({"older_id": ""}, "older_id"),
        ({"decision": 0}, "decision"),
        ({"decision": 99}, "decision"),
        ({"note": "n" * 1_001}, "note"),
        ({"note": "a\0b"}, "note"),
        ({"memory": ""}, "memory"),
    ],
)
async def test_a_wrong_decision_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    error = await refused(wire.memories.ResolveConflict(resolve_request(**given)))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert field in error.message


async def test_an_unknown_suspicion_is_not_found(wire: Wire) -> None:
    error = await refused(wire.memories.ResolveConflict(resolve_request()))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "FRAGMENT_NOT_FOUND")


async def test_a_foreign_page_token_is_refused(wire: Wire) -> None:
    error = await refused(wire.memories.ListConflicts(pb.ListConflictsRequest(**NAMED, page_token="MDEyMzQ1Njc4")))
    assert error.reason == "PAGE_TOKEN_INVALID"


# ---- fields of policies and requests
@pytest.mark.parametrize(("given", "field"), [({"margin": 0.3}, "margin"), ({"fold": False}, "fold")])
async def test_policy_fields_without_meaning_are_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    policy = memory_pb.Policy(conflicts=memory_pb.ConflictPolicy(**given))
    made = await refused(wire.memories.CreateMemory(pb.CreateMemoryRequest(namespace="ns", memory="x", policy=policy)))
    paths = [f"policy.conflicts.{field}"]
    change = pb.UpdateMemoryRequest(
        memory=memory_pb.Memory(namespace="ns", name="m", policy=policy), update_mask=FieldMask(paths=paths)
    )
    changed = await refused(wire.memories.UpdateMemory(change))
    change.memory.ClearField("policy")  # back to the default
    cleared = await refused(wire.memories.UpdateMemory(change))
    for error in (made, changed, cleared):
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert f"policy.conflicts.{field}: is no longer used" in error.message
    read = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory.policy.conflicts
    assert not read.HasField(field)


async def test_an_outcome_names_related_statements(wire: Wire) -> None:
    first = await tell(wire, "I live in Munich near the river.", "a")
    said = fragments.Observation(content="I live in Berlin near the river.", speaker="Ada", session="s")
    request = stream_pb.ObserveBatchRequest(**NAMED, observations=[said], related=2, request_id="once")
    answers = [await wire.streams.ObserveBatch(request) for _ in range(2)]  # the second by its request_id
    for answer in answers:
        ((near,),) = [outcome.related for outcome in answer.ack.outcomes]
        assert (near.fragment_id, near.share) == (first, 0.75)


@pytest.mark.parametrize("count", [-1, 11])
async def test_the_number_of_related_statements_is_bounded(wire: Wire, count: int) -> None:
    said = [fragments.Observation(content="I live in Berlin.")]
    request = stream_pb.ObserveBatchRequest(**NAMED, observations=said, related=count)
    error = await refused(wire.streams.ObserveBatch(request))
    assert (error.reason, "related" in error.message) == ("INVALID_FIELD", True)
