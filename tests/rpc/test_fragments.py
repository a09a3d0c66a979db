"""Lifecycle rpcs over the wire: changes, refusals, and responses to repeats."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.timestamp_pb2 import Timestamp

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_service_pb2 as pb
from memstream_server.engine.errors import AlreadyAnswered, EtagMismatch
from memstream_server.rpc.idempotency import idempotent_call, respond_once
from tests.rpc.wire import Wire, refused
from tests.support.fake_engine import FakeEngine

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAMED = {"namespace": "ns", "memory": "m"}
NOBODY = "0" * 26
MONDAY = fragments.FragmentFilter(sessions=["monday"])


def put_request(content: str = "tea at four", key: str = "tea", **given: Any) -> pb.PutFragmentRequest:
    said = fragments.Observation(content=content, external_id=key, session="monday")
    return pb.PutFragmentRequest(**NAMED | {"observation": said} | given)


def update_request(*paths: str, id: str = NOBODY, **given: Any) -> pb.UpdateFragmentRequest:
    request_id = given.pop("request_id", "")
    fragment = fragments.Fragment(id=id, **given)
    return pb.UpdateFragmentRequest(
        **NAMED, fragment=fragment, update_mask=FieldMask(paths=paths), request_id=request_id
    )


async def put(wire: Wire, content: str = "tea at four", key: str = "tea") -> fragments.Fragment:
    return (await wire.memories.PutFragment(put_request(content, key))).fragment


async def listed(wire: Wire, forgotten: bool = False) -> list[str]:
    answer = await wire.memories.ListFragments(pb.ListFragmentsRequest(**NAMED, forgotten=forgotten))
    return [each.content for each in answer.fragments]


# ---- effects
async def test_put_says_whether_it_is_new(wire: Wire) -> None:
    first = await wire.memories.PutFragment(put_request())
    again = await wire.memories.PutFragment(put_request("tea at five", etag=first.fragment.etag))
    assert (first.created, again.created) == (True, False)
    assert (again.fragment.id, again.fragment.content) == (first.fragment.id, "tea at five")
    assert again.fragment.etag != first.fragment.etag
    assert again.revision == first.revision + 1
    assert await listed(wire) == ["tea at five"]
    stale = await refused(wire.memories.PutFragment(put_request("tea at six", etag=first.fragment.etag)))
    assert (stale.code, stale.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")


async def test_update_sets_and_removes_a_validity(wire: Wire) -> None:
    known = await put(wire)
    begin, end = Timestamp(seconds=1), Timestamp(seconds=2)

    async def update(*paths: str, **given: Timestamp) -> fragments.Fragment:
        return (await wire.memories.UpdateFragment(update_request(*paths, id=known.id, **given))).fragment

    changed = await update("valid_from", "valid_until", valid_from=begin, valid_until=end)
    assert (changed.valid_from, changed.valid_until) == (begin, end)
    left = await update("valid_until", valid_from=end)
    assert (left.valid_from, left.HasField("valid_until")) == (begin, False)
    error = await refused(update("valid_until", valid_until=begin))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_update_sets_the_masked_fields_alone(wire: Wire) -> None:
    known = await put(wire)
    request = update_request("content", id=known.id, content="tea at six", etag=known.etag, importance=0.9)
    changed = await wire.memories.UpdateFragment(request)
    assert (changed.fragment.content, changed.fragment.importance) == ("tea at six", known.importance)
    assert (await refused(wire.memories.UpdateFragment(request))).reason == "ETAG_MISMATCH"
    gone = await refused(wire.memories.UpdateFragment(update_request("pinned", pinned=True)))
    assert (gone.code, gone.reason) == (grpc.StatusCode.NOT_FOUND, "FRAGMENT_NOT_FOUND")


async def test_forget_and_restore_by_ids_and_by_filter(wire: Wire) -> None:
    known = await put(wire)
    gone = await wire.memories.ForgetFragments(pb.ForgetFragmentsRequest(**NAMED, ids=[known.id, NOBODY]))
    assert gone.forgotten == 1
    back = await wire.memories.RestoreFragments(pb.RestoreFragmentsRequest(**NAMED, filter=MONDAY))
    assert (back.restored, back.revision) == (1, gone.revision + 1)
    assert (await wire.memories.ForgetFragments(pb.ForgetFragmentsRequest(**NAMED, filter=MONDAY))).forgotten == 1


async def test_clear_empties_and_clone_copies_the_structure(wire: Wire) -> None:
    await put(wire)
    cloned = await wire.memories.CloneMemory(pb.CloneMemoryRequest(**NAMED, new_memory="copy", new_namespace="other"))
    source = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory
    assert (cloned.memory.namespace, cloned.memory.name) == ("other", "copy")
    assert (cloned.memory.kind, cloned.memory.policy) == (source.kind, source.policy)
    assert (await wire.memories.ClearMemory(pb.ClearMemoryRequest(**NAMED))).cleared == 1
    assert await listed(wire) == []
    taken = await refused(wire.memories.CloneMemory(pb.CloneMemoryRequest(**NAMED, new_memory="m")))
    assert (taken.code, taken.reason) == (grpc.StatusCode.ALREADY_EXISTS, "MEMORY_EXISTS")


# ---- repeats
async def test_a_repeat_gets_the_first_answer(wire: Wire) -> None:
    made = put_request(request_id="r")
    first = await wire.memories.PutFragment(made)
    assert await wire.memories.PutFragment(made) == first
    requests = {
        "UpdateFragment": update_request("content", id=first.fragment.id, content="new words", request_id="r"),
        "ForgetFragments": pb.ForgetFragmentsRequest(**NAMED, filter=MONDAY, request_id="r"),
        "RestoreFragments": pb.RestoreFragmentsRequest(**NAMED, filter=MONDAY, request_id="r"),
        "ClearMemory": pb.ClearMemoryRequest(**NAMED, request_id="r"),
        "CloneMemory": pb.CloneMemoryRequest(**NAMED, new_memory="copy", request_id="r"),
    }
    answers = {}
    for name, request in requests.items():
        answers[name] = await getattr(wire.memories, name)(request)
    assert answers["ForgetFragments"].forgotten == answers["RestoreFragments"].restored == 1
    assert answers["ClearMemory"].cleared == 1
    for name, request in requests.items():
        assert await getattr(wire.memories, name)(request) == answers[name], name
    conflict = await refused(wire.memories.PutFragment(put_request("other words", request_id="r")))
    assert (conflict.code, conflict.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_CONFLICT")
    assert await listed(wire) == []


async def test_overtaking_repeat_gets_first_response() -> None:
    """The first try lost its connection and continued: the repeat finds no response yet, and the engine then refuses
    it."""
    engine: Any = FakeEngine()
    call = idempotent_call(pb.ClearMemoryRequest(**NAMED), "ns", "r", pb.ClearMemoryResponse)
    assert call is not None
    first = pb.ClearMemoryResponse(cleared=3, revision=7)

    async def overtaken() -> pb.ClearMemoryResponse:
        engine.keep(call.make_answer(first))
        raise AlreadyAnswered("meanwhile")

    assert await respond_once(call, engine, overtaken) == first

    async def refused_for_itself() -> pb.ClearMemoryResponse:
        raise EtagMismatch("stale")

    with pytest.raises(EtagMismatch):
        await respond_once(None, engine, refused_for_itself)


# ---- bad input
@pytest.mark.parametrize(
    ("rpc", "request_", "field"),
    [
        ("PutFragment", put_request(key=""), "observation.external_id"),
        ("PutFragment", put_request("  "), "observation.content"),
        ("PutFragment", put_request("x" * 5_000), "observation.content"),
        ("PutFragment", put_request(observation=fragments.Observation(external_id="k", embedding=[1.0])), ""),
        ("PutFragment", put_request(memory="a b"), "memory"),
        ("PutFragment", put_request(etag="1", absent=True), "absent"),
        ("PutFragment", put_request(request_id="r\n"), "request_id"),
        ("UpdateFragment", update_request(), "update_mask"),
        ("UpdateFragment", update_request("tier"), "update_mask"),
        ("UpdateFragment", update_request("content", "structured", content="x"), "update_mask"),
        ("UpdateFragment", update_request("content"), "fragment.content"),
        ("UpdateFragment", update_request("structured", content="x"), "fragment.structured"),
        ("UpdateFragment", update_request("pinned", id="short"), "fragment.id"),
        ("UpdateFragment", update_request("importance", importance=1.5), "fragment.importance"),
        ("UpdateFragment", update_request("importance", importance=float("nan")), "fragment.importance"),
        ("UpdateFragment", update_request("speaker", speaker="a\x00b"), "fragment.speaker"),
        ("UpdateFragment", update_request("expire_time", expire_time=Timestamp(nanos=-1)), "fragment.expire_time"),
        ("UpdateFragment", update_request("metadata", metadata={"k": {}}), "fragment.metadata['k']"),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED), "ids"),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED, filter=fragments.FragmentFilter()), "filter"),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED, filter={"tiers": [0]}), "filter"),
        (
            "ForgetFragments",
            pb.ForgetFragmentsRequest(**NAMED, filter={"importance_min": 2.0}),
            "filter.importance_min",
        ),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED, ids=[NOBODY], filter=MONDAY), "filter"),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED, ids=["x"]), "ids[0]"),
        ("ForgetFragments", pb.ForgetFragmentsRequest(**NAMED, ids=[NOBODY] * 1_001), "ids"),
        ("RestoreFragments", pb.RestoreFragmentsRequest(**NAMED), "ids"),
        ("RestoreFragments", pb.RestoreFragmentsRequest(**NAMED, ids=[NOBODY], request_id="\x01"), "request_id"),
        ("ClearMemory", pb.ClearMemoryRequest(**NAMED, tiers=[9]), "tiers"),
        ("ClearMemory", pb.ClearMemoryRequest(**NAMED, tiers=[0]), "tiers"),
        ("CloneMemory", pb.CloneMemoryRequest(**NAMED), "new_memory"),
        ("CloneMemory", pb.CloneMemoryRequest(**NAMED, new_memory="ok", new_namespace="a/b"), "new_namespace"),
    ],
)
async def test_malformed_requests_say_the_field(wire: Wire, rpc: str, request_: Any, field: str) -> None:
    known = await put(wire, "it stays", "kept")
    error = await refused(getattr(wire.memories, rpc)(request_))
    assert (error.code, error.reason) == (INVALID, "INVALID_FIELD")
    assert field in error.fields or not field
    assert await listed(wire) == ["it stays"]
    read = await wire.memories.GetFragment(pb.GetFragmentRequest(**NAMED, id=known.id))
    assert read.fragment == known


@pytest.mark.parametrize(
    ("rpc", "request_"),
    [
        ("PutFragment", put_request(memory="none")),
        ("ForgetFragments", pb.ForgetFragmentsRequest(namespace="ns", memory="none", ids=[NOBODY])),
        ("RestoreFragments", pb.RestoreFragmentsRequest(namespace="ns", memory="none", filter=MONDAY)),
        ("ClearMemory", pb.ClearMemoryRequest(namespace="ns", memory="none")),
        ("CloneMemory", pb.CloneMemoryRequest(namespace="ns", memory="none", new_memory="copy")),
    ],
)
async def test_a_memory_that_is_not_there_is_named(wire: Wire, rpc: str, request_: Any) -> None:
    error = await refused(getattr(wire.memories, rpc)(request_))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND")
    assert error.metadata["memory"] == "none"
