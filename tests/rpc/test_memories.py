"""MemoryService, Watch, GetServerInfo and the transport over the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from grpc_health.v1 import health_pb2, health_pb2_grpc

from memstream.v1 import (
    conversation_service_pb2,
    conversation_service_pb2_grpc,
    event_pb2,
    memory_pb2,
    server_service_pb2,
)
from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as streams
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.server import build_server
from tests.rpc.conftest import GRACE_S
from tests.rpc.wire import Wire, refused
from tests.support.waiting import skip_time

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAMED = {"namespace": "ns", "memory": "m"}


async def tell(wire: Wire, *contents: str, **given: Any) -> None:
    items = [fragments.Observation(content=content) for content in contents]
    await wire.streams.ObserveBatch(streams.ObserveBatchRequest(**NAMED | {"observations": items} | given))


# ---- memories
async def test_a_created_memory_has_a_complete_policy(wire: Wire) -> None:
    policy = memory_pb2.Policy(recall=memory_pb2.RecallPolicy(limit=7))
    made = await wire.memories.CreateMemory(
        pb.CreateMemoryRequest(namespace="ns", memory="joy", policy=policy, labels={"a": "b"})
    )
    assert made.created
    assert made.memory.kind == memory_pb2.MEMORY_KIND_HYBRID
    assert (made.memory.policy.recall.limit, made.memory.policy.recall.candidates) == (7, 50)
    assert made.memory.policy.short_term.echo_window.seconds == 600
    assert made.memory.policy.profile == memory_pb2.PROFILE_DEFAULT
    assert not made.memory.policy.short_term.HasField("similarity_min")
    assert dict(made.memory.labels) == {"a": "b"}
    read = await wire.memories.GetMemory(pb.GetMemoryRequest(namespace="ns", memory="joy"))
    assert read.memory == made.memory


async def test_profile_sets_defaults_and_fifo_capacity(wire: Wire) -> None:
    policy = memory_pb2.Policy(
        profile=memory_pb2.PROFILE_DBGPT, short_term=memory_pb2.ShortTermPolicy(kind=memory_pb2.SHORT_TERM_KIND_FIFO)
    )
    request = pb.CreateMemoryRequest(namespace="ns", memory="joy", policy=policy)
    made = (await wire.memories.CreateMemory(request)).memory.policy
    assert (made.short_term.capacity, made.recall.limit, made.sensory.threshold) == (5, 4, 0.01)
    assert made.recall.ranking == memory_pb2.RANKING_RULE_DBGPT
    assert made.short_term.echo_window.seconds == 0
    assert made.short_term.HasField("echo_window")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"namespace": "a b"}, "namespace"),
        ({"memory": ""}, "memory"),
        ({"memory": ".m"}, "memory"),
        ({"kind": 77}, "kind"),
        ({"policy": memory_pb2.Policy(profile=9)}, "policy.profile"),
        ({"policy": memory_pb2.Policy(language="klingon")}, "policy.language"),
        ({"policy": memory_pb2.Policy(importance_default=float("nan"))}, "policy.importance_default"),
        ({"policy": memory_pb2.Policy(recall={"limit": 0})}, "policy.recall.limit"),
        ({"policy": memory_pb2.Policy(recall={"alpha": -1})}, "policy.recall.alpha"),
        ({"policy": memory_pb2.Policy(short_term={"overflow": 9})}, "policy.short_term.overflow"),
        ({"policy": memory_pb2.Policy(retention={"ttl": {"seconds": -1}})}, "policy.retention.ttl"),
        ({"policy": memory_pb2.Policy(retention={"ttl": {"nanos": 5}})}, "policy.retention.ttl"),
        ({"labels": {"": "x"}}, "labels"),
        ({"request_id": "x" * 200}, "request_id"),
    ],
)
async def test_a_malformed_memory_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    request = pb.CreateMemoryRequest(**{"namespace": "ns", "memory": "new"} | given)
    error = await refused(wire.memories.CreateMemory(request))
    assert (error.code, error.reason, list(error.fields)) == (INVALID, "INVALID_FIELD", [field])


async def test_an_existing_name_is_refused_or_used(wire: Wire) -> None:
    error = await refused(wire.memories.CreateMemory(pb.CreateMemoryRequest(**NAMED)))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "MEMORY_EXISTS")
    assert "ns/m" in error.message
    assert not (await wire.memories.CreateMemory(pb.CreateMemoryRequest(exist_ok=True, **NAMED))).created


@pytest.mark.parametrize(
    ("given", "differs"),
    [
        ({"kind": memory_pb2.MEMORY_KIND_LONG_TERM}, "kind"),
        ({"policy": memory_pb2.Policy(profile=memory_pb2.PROFILE_DEFAULT)}, "policy.profile"),
        ({"policy": memory_pb2.Policy(recall=memory_pb2.RecallPolicy(limit=5, alpha=0.0))}, "policy.recall.alpha"),
        ({"policy": memory_pb2.Policy(retention={"ttl": {"seconds": 5}})}, "policy.retention.ttl"),
        ({"labels": {"team": "b"}}, "labels.team"),
        ({"labels": {"owner": "ann"}}, "labels.owner"),
    ],
)
async def test_exist_ok_names_what_differs(wire: Wire, given: dict[str, Any], differs: str) -> None:
    policy = memory_pb2.Policy(profile=memory_pb2.PROFILE_DBGPT, recall=memory_pb2.RecallPolicy(limit=5, alpha=0.5))
    made = {"kind": memory_pb2.MEMORY_KIND_HYBRID, "policy": policy, "labels": {"team": "a", "site": "ulm"}}
    name: dict[str, Any] = {"namespace": "ns", "memory": "made"}
    await wire.memories.CreateMemory(pb.CreateMemoryRequest(**name | made))
    same = [
        {},
        made,
        {"labels": {"site": "ulm"}},
        {"policy": memory_pb2.Policy(recall=memory_pb2.RecallPolicy(limit=5))},
    ]
    for each in same:
        assert not (await wire.memories.CreateMemory(pb.CreateMemoryRequest(exist_ok=True, **name | each))).created
    error = await refused(wire.memories.CreateMemory(pb.CreateMemoryRequest(exist_ok=True, **name | given)))
    assert (error.reason, error.metadata["differs"]) == ("MEMORY_EXISTS", differs)
    assert differs in error.message


async def test_a_repeated_request_id_gets_the_first_answer(wire: Wire) -> None:
    request = pb.CreateMemoryRequest(namespace="ns", memory="once", request_id="r1")
    first = await wire.memories.CreateMemory(request)
    assert await wire.memories.CreateMemory(request) == first
    other = pb.CreateMemoryRequest(namespace="ns", memory="twice", request_id="r1")
    error = await refused(wire.memories.CreateMemory(other))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_CONFLICT")


async def test_a_repeated_deletion_succeeds(wire: Wire) -> None:
    request = pb.DeleteMemoryRequest(request_id="d", **NAMED)
    await wire.memories.DeleteMemory(request)
    await wire.memories.DeleteMemory(request)
    error = await refused(wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED)))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND")
    assert "ns/m" in error.message


def _update(*paths: str, etag: str = "", labels: dict[str, str] | None = None, **policy: Any) -> pb.UpdateMemoryRequest:
    memory = memory_pb2.Memory(namespace="ns", name="m", etag=etag, labels=labels, policy=memory_pb2.Policy(**policy))
    return pb.UpdateMemoryRequest(memory=memory, update_mask=FieldMask(paths=paths))


async def test_only_masked_fields_are_set(wire: Wire) -> None:
    before = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory
    request = _update("policy.recall.alpha", "labels", recall={"alpha": 2, "beta": 9}, labels={"x": "y"})
    after = (await wire.memories.UpdateMemory(request)).memory
    assert (after.policy.recall.alpha, after.policy.recall.beta) == (2, before.policy.recall.beta)
    assert dict(after.labels) == {"x": "y"}
    assert after.etag != before.etag
    assert after.revision == before.revision + 1
    part = (await wire.memories.UpdateMemory(_update("policy.recall", recall={"limit": 3}))).memory.policy.recall
    assert (part.limit, part.alpha) == (3, 0.005)
    echo = (await wire.memories.UpdateMemory(_update("policy.short_term.echo_window"))).memory.policy.short_term
    assert echo.echo_window.seconds == 600


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (_update(), "update_mask"),
        (_update("name"), "update_mask"),
        (_update("policy.nothing"), "update_mask"),
        (_update("policy.profile", profile=2), "update_mask"),
        (_update("policy.recall.limit", recall={"limit": 0}), "policy.recall.limit"),
        (pb.UpdateMemoryRequest(update_mask=FieldMask(paths=["labels"])), "memory.namespace"),
    ],
)
async def test_a_malformed_update_is_refused(wire: Wire, request_: pb.UpdateMemoryRequest, field: str) -> None:
    assert next(iter((await refused(wire.memories.UpdateMemory(request_))).fields)) == field


async def test_an_old_etag_is_refused(wire: Wire) -> None:
    before = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory
    await wire.memories.UpdateMemory(_update("labels", etag=before.etag, labels={"a": "1"}))
    error = await refused(wire.memories.UpdateMemory(_update("labels", etag=before.etag, labels={"a": "2"})))
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "ETAG_MISMATCH")
    error = await refused(wire.memories.DeleteMemory(pb.DeleteMemoryRequest(etag=before.etag, **NAMED)))
    assert error.reason == "ETAG_MISMATCH"


# ---- pages
async def test_pages_of_memories(wire: Wire) -> None:
    for name in ("a", "b", "c"):
        await wire.memories.CreateMemory(pb.CreateMemoryRequest(namespace="ns", memory=name))
    names, token = [], ""
    while True:
        page = await wire.memories.ListMemories(pb.ListMemoriesRequest(namespace="ns", page_size=2, page_token=token))
        names += [each.name for each in page.memories]
        token = page.next_page_token
        if not token:
            break
    assert names == ["a", "b", "c", "m"]


async def test_memories_by_the_beginning_of_their_name(wire: Wire) -> None:
    for name in ("a.b", "a", "b", "a.c"):
        await wire.memories.CreateMemory(pb.CreateMemoryRequest(namespace="ns", memory=name))
    first = await wire.memories.ListMemories(pb.ListMemoriesRequest(namespace="ns", name_prefix="a.", page_size=1))
    rest = await wire.memories.ListMemories(
        pb.ListMemoriesRequest(namespace="ns", name_prefix="a.", page_token=first.next_page_token)
    )
    assert [each.name for each in (*first.memories, *rest.memories)] == ["a.b", "a.c"]
    assert not rest.next_page_token
    error = await refused(wire.memories.ListMemories(pb.ListMemoriesRequest(namespace="ns", name_prefix="ä")))
    assert error.reason == "INVALID_FIELD"


async def test_memories_by_labels(wire: Wire) -> None:
    for name, labels in {"a": {"team": "core", "x": "1"}, "b": {"team": "web"}, "c": {"team": "core"}}.items():
        await wire.memories.CreateMemory(pb.CreateMemoryRequest(namespace="ns", memory=name, labels=labels))
    request = pb.ListMemoriesRequest(namespace="ns", labels={"team": "core"}, page_size=1)
    first = await wire.memories.ListMemories(request)
    request.page_token = first.next_page_token
    rest = await wire.memories.ListMemories(request)
    assert [each.name for each in (*first.memories, *rest.memories)] == ["a", "c"]
    assert not rest.next_page_token
    request.labels["x"] = "1"
    error = await refused(wire.memories.ListMemories(request))
    assert error.reason == "PAGE_TOKEN_INVALID"
    request.page_token = ""
    assert [each.name for each in (await wire.memories.ListMemories(request)).memories] == ["a"]
    error = await refused(wire.memories.ListMemories(pb.ListMemoriesRequest(namespace="ns", labels={"": "x"})))
    assert (error.reason, list(error.fields)) == ("INVALID_FIELD", ["labels"])


async def test_pages_of_namespaces(wire: Wire) -> None:
    await wire.memories.CreateMemory(pb.CreateMemoryRequest(namespace="other", memory="x"))
    page = await wire.memories.ListNamespaces(pb.ListNamespacesRequest(page_size=1))
    rest = await wire.memories.ListNamespaces(pb.ListNamespacesRequest(page_token=page.next_page_token))
    assert [(each.name, each.memories) for each in (*page.namespaces, *rest.namespaces)] == [("ns", 1), ("other", 1)]
    assert not rest.next_page_token


async def test_large_fragment_pages_end_early(wire: Wire) -> None:
    await tell(wire, *[f"{number} " + "x" * 2_000 for number in range(10)])
    contents, token, pages = [], "", 0
    while True:
        page = await wire.memories.ListFragments(pb.ListFragmentsRequest(page_token=token, **NAMED))
        contents += [each.content.split()[0] for each in page.fragments]
        token, pages = page.next_page_token, pages + 1
        if not token:
            break
    assert contents == [str(number) for number in range(10)]
    assert pages > 1
    assert page.revision > 1
    assert page.memory_uid


async def test_a_page_token_is_good_for_its_call_alone(wire: Wire) -> None:
    await tell(wire, "a", "b")
    token = (await wire.memories.ListFragments(pb.ListFragmentsRequest(page_size=1, **NAMED))).next_page_token
    for wrong in (
        pb.ListFragmentsRequest(page_token=token, forgotten=True, **NAMED),
        pb.ListFragmentsRequest(page_token=token[:-4] + "AAAA", **NAMED),
        pb.ListFragmentsRequest(page_token="§", **NAMED),
        pb.ListFragmentsRequest(page_token="AAAA", **NAMED),
    ):
        error = await refused(wire.memories.ListFragments(wrong))
        assert (error.code, error.reason) == (INVALID, "PAGE_TOKEN_INVALID")
    error = await refused(wire.memories.ListMemories(pb.ListMemoriesRequest(namespace="ns", page_token=token)))
    assert error.reason == "PAGE_TOKEN_INVALID"
    await wire.memories.ListFragments(pb.ListFragmentsRequest(page_token=token, page_size=5, **NAMED))


@pytest.mark.parametrize("rpc", ["ListMemories", "ListNamespaces", "ListFragments"])
async def test_a_page_size_below_zero_is_refused(wire: Wire, rpc: str) -> None:
    named = {"ListMemories": {"namespace": "ns"}, "ListNamespaces": {}, "ListFragments": NAMED}[rpc]
    request = getattr(pb, f"{rpc}Request")(page_size=-1, **named)
    error = await refused(getattr(wire.memories, rpc)(request))
    assert list(error.fields) == ["page_size"]


# ---- fragments
async def test_a_fragment_by_id(wire: Wire) -> None:
    step = fragments.StructuredObservation(question="why", action="look")
    metadata = {
        "s": fragments.MetadataValue(string_value="x"),
        "i": fragments.MetadataValue(int_value=2**60),
        "d": fragments.MetadataValue(double_value=1.0),
        "b": fragments.MetadataValue(bool_value=True),
    }
    item = fragments.Observation(structured=step, speaker="Bob", metadata=metadata, observe_time={"seconds": -5})
    await wire.streams.ObserveBatch(streams.ObserveBatchRequest(observations=[item], **NAMED))
    listed = (await wire.memories.ListFragments(pb.ListFragmentsRequest(**NAMED))).fragments[0]
    got = await wire.memories.GetFragment(pb.GetFragmentRequest(id=listed.id, **NAMED))
    assert got.fragment == listed
    assert got.fragment.structured == step
    assert dict(got.fragment.metadata) == metadata
    assert got.fragment.observe_time.seconds == -5
    stats = (await wire.memories.GetMemoryStats(pb.GetMemoryStatsRequest(**NAMED))).stats
    assert stats.sensory + stats.short_term + stats.long_term == 1


async def test_a_fragment_that_is_not_there(wire: Wire) -> None:
    error = await refused(wire.memories.GetFragment(pb.GetFragmentRequest(id="0" * 26, **NAMED)))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "FRAGMENT_NOT_FOUND")
    for given in ({}, {"id": ""}, {"id": "x"}, {"id": "0" * 25 + "U"}):
        error = await refused(wire.memories.GetFragment(pb.GetFragmentRequest(**NAMED | given)))
        assert list(error.fields) == ["id"]
    error = await refused(wire.memories.GetFragment(pb.GetFragmentRequest(external_id="", **NAMED)))
    assert list(error.fields) == ["external_id"]


# ---- watching
async def watched(call: Any, count: int) -> list[event_pb2.Event]:
    events: list[event_pb2.Event] = []
    while len(events) < count:
        message = await call.read()
        assert message is not grpc.aio.EOF
        events += message.events.events
    return events


async def test_a_watch_resumes_between_any_two_events(wire: Wire) -> None:
    await tell(wire, "a", "b")
    uid = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory.uid
    from_the_start = event_pb2.Cursor(memory_uid=uid)
    call = wire.streams.Watch(streams.WatchRequest(cursor=from_the_start, **NAMED))
    events = await watched(call, 5)
    call.cancel()
    assert events[0].type == event_pb2.EVENT_TYPE_MEMORY_CREATED
    assert event_pb2.EVENT_TYPE_OBSERVED in [each.type for each in events]
    for number, event in enumerate(events[:-1]):
        again = wire.streams.Watch(streams.WatchRequest(cursor=event.cursor, **NAMED))
        assert (await watched(again, 1))[0] == events[number + 1]
        again.cancel()


async def test_watch_without_cursor_starts_now(wire: Wire) -> None:
    await tell(wire, "before")
    call = wire.streams.Watch(streams.WatchRequest(progress_interval={"nanos": 100_000_000}, **NAMED))
    mark = (await call.read()).progress
    assert mark.cursor.memory_uid
    assert mark.cursor.revision >= 2
    await tell(wire, "after")
    events = await watched(call, 1)
    assert events[0].cursor.revision > mark.cursor.revision - 1
    call.cancel()


async def test_a_watch_of_types_with_fragments(wire: Wire) -> None:
    uid = (await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED))).memory.uid
    await tell(wire, "a", "b")
    call = wire.streams.Watch(
        streams.WatchRequest(
            cursor=event_pb2.Cursor(memory_uid=uid),
            types=[event_pb2.EVENT_TYPE_OBSERVED],
            include_fragments=True,
            **NAMED,
        )
    )
    seen: dict[str, str] = {}
    while len(seen) < 2:
        message = (await call.read()).events
        assert {each.type for each in message.events} == {event_pb2.EVENT_TYPE_OBSERVED}
        seen |= {each.id: each.content for each in message.fragments}
    assert list(seen.values()) == ["a", "b"]
    call.cancel()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"cursor": event_pb2.Cursor(revision=1)}, "cursor.memory_uid"),
        ({"cursor": event_pb2.Cursor(memory_uid="x", revision=-1)}, "cursor.revision"),
        ({"types": [99]}, "types"),
        ({"types": [0]}, "types"),
        ({"progress_interval": {"seconds": -1}}, "progress_interval"),
        ({"namespace": ""}, "namespace"),
    ],
)
async def test_a_malformed_watch_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    error = await refused(wire.streams.Watch(streams.WatchRequest(**NAMED | given)).read())
    assert (error.code, list(error.fields)) == (INVALID, [field])


async def test_cursor_ahead_of_memory_is_void(wire: Wire) -> None:
    uid = (await wire.memories.GetMemory(pb.GetMemoryRequest(namespace="ns", memory="m"))).memory.uid
    ahead = event_pb2.Cursor(memory_uid=uid, revision=1_000)
    error = await refused(wire.streams.Watch(streams.WatchRequest(cursor=ahead, **NAMED)).read())
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_VOID")


async def test_a_cursor_of_an_earlier_memory_is_void(wire: Wire) -> None:
    request = streams.WatchRequest(cursor=event_pb2.Cursor(memory_uid="another"), **NAMED)
    error = await refused(wire.streams.Watch(request).read())
    assert (error.code, error.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_VOID")


async def test_draining_ends_a_watch_with_a_word(wire: Wire) -> None:
    call = wire.streams.Watch(streams.WatchRequest(progress_interval={"nanos": 100_000_000}, **NAMED))
    assert (await call.read()).HasField("progress")
    wire.drain.begin()
    while not (message := await call.read()).HasField("going_away"):
        assert message is not grpc.aio.EOF
    assert (await refused(call.read())).reason == "SHUTTING_DOWN"


# ---- the rest of the contract, and the transport
async def test_capabilities_are_what_is_really_there(wire: Wire) -> None:
    info = await wire.info.GetServerInfo(server_service_pb2.GetServerInfoRequest())
    assert set(info.capabilities) >= {server_service_pb2.CAPABILITY_WATCH, server_service_pb2.CAPABILITY_LIFECYCLE}
    assert info.embedding.dimension == wire.dimension
    assert info.limits.batch_max == 16
    assert info.start_time.seconds > 0


async def test_missing_rpc_names_its_capability(wire: Wire) -> None:
    conversations = conversation_service_pb2_grpc.ConversationServiceStub(wire.channel)
    append = conversation_service_pb2.AppendMessageRequest(namespace="ns")
    watch = conversation_service_pb2.WatchMessagesRequest(namespace="ns")
    calls = {
        "AppendMessage": conversations.AppendMessage(append),
        "WatchMessages": conversations.WatchMessages(watch).read(),
    }
    for call in calls.values():
        error = await refused(call)
        assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "CAPABILITY_MISSING")
        assert error.metadata == {"capability": "CONVERSATIONS"}


@pytest.mark.parametrize("header", ["ns/other", "other/m", "m", "", "ns/m/x"])
async def test_a_routing_header_that_disagrees_is_refused(wire: Wire, header: str) -> None:
    metadata = (("memstream-memory", header),)

    async def observe() -> None:
        call = wire.streams.Observe(metadata=metadata)
        await call.write(streams.ObserveRequest(open=streams.ObserveOpen(producer="p", **NAMED)))
        await call.read()

    update = _update("labels")
    for call in (
        wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED), metadata=metadata),
        wire.memories.UpdateMemory(update, metadata=metadata),
        wire.streams.Watch(streams.WatchRequest(**NAMED), metadata=metadata).read(),
        observe(),
    ):
        error = await refused(call)
        assert (error.code, error.reason) == (INVALID, "ROUTING_MISMATCH")


async def test_a_routing_header_that_agrees_passes(wire: Wire) -> None:
    metadata = (("memstream-memory", "ns/m"),)
    assert await wire.memories.GetMemory(pb.GetMemoryRequest(**NAMED), metadata=metadata)
    assert await wire.memories.UpdateMemory(_update("labels"), metadata=metadata)


async def test_health_watch_reports_services_and_ends_with_server(wire: Wire) -> None:
    stub: Any = health_pb2_grpc.HealthStub(wire.channel)
    for service in ("", "memstream.v1.StreamService", "memstream.v1.MemoryService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await refused(stub.Check(health_pb2.HealthCheckRequest(service="x")))).code is grpc.StatusCode.NOT_FOUND
    watching = stub.Watch(health_pb2.HealthCheckRequest(service="memstream.v1.StreamService"))
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.create_task(wire.server.stop(GRACE_S))
    assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watching.cancel()
    await stopping


async def test_a_port_in_use_is_refused(engine: Any) -> None:
    first = build_server(engine, RequestLimits(), Drain())
    second = build_server(engine, RequestLimits(), Drain())
    address = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match="cannot listen"):
        await second.start(address)
    await first.stop(0.1)


async def test_stop_ends_streams_in_band_first(wire: Wire) -> None:
    call = await wire.observe()
    stopping = asyncio.create_task(wire.server.stop(2 * GRACE_S))
    assert (await call.next()).HasField("going_away")
    skip_time(GRACE_S)
    assert (await call.error()).reason == "SHUTTING_DOWN"
    await stopping


async def test_streams_are_bounded(engine: Any) -> None:
    server = build_server(engine, RequestLimits(streams_max=1), Drain(0.1))
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        wire = Wire(channel, server, Drain(), engine.dimension)
        await wire.memories.CreateMemory(pb.CreateMemoryRequest(**NAMED))
        await wire.observe()
        for _ in range(20):  # grpc.aio may lose the status of a call that ends during a write
            error = await refused(wire.observe())
            if error.code is not grpc.StatusCode.INTERNAL:
                break
        assert (error.code, error.reason, error.retry_s) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "QUOTA_EXCEEDED",
            1.0,
        )
    await server.stop(0.1)
