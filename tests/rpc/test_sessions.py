"""ListSessions over the wire: order, pages, filters, what counts, and refusals."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from memstream.v1 import fragment_pb2 as fragments
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from tests.rpc.wire import Wire, refused

NAMED = {"namespace": "ns", "memory": "m"}
HOSTILE = "<b>\u202e世界" + "é" * 50


async def observe(wire: Wire, session: str, at_s: int, speaker: str = "Ann") -> str:
    observation = fragments.Observation(
        content=f"{session} at {at_s}", session=session, speaker=speaker, observe_time=Timestamp(seconds=at_s)
    )
    request = stream_pb.ObserveBatchRequest(**NAMED, observations=[observation], producer="")
    done = await wire.streams.ObserveBatch(request)
    return str(done.ack.outcomes[0].fragment_id)


async def list_sessions(wire: Wire, **given: Any) -> Any:
    return await wire.memories.ListSessions(pb.ListSessionsRequest(**NAMED | given))


async def test_sessions_are_listed_by_their_last_activity(wire: Wire) -> None:
    await observe(wire, "monday", 100)
    await observe(wire, HOSTILE, 200)
    await observe(wire, "monday", 300, "Bob")
    await observe(wire, "monday", 50, "Bob")
    await observe(wire, "", 400)
    found = await list_sessions(wire)
    assert [one.session for one in found.sessions] == ["monday", HOSTILE]
    first = found.sessions[0]
    assert (first.first_observe_time.seconds, first.last_observe_time.seconds) == (50, 300)
    assert (first.fragments, list(first.speakers), first.speaker_count) == (3, ["Bob", "Ann"], 2)
    assert (found.next_page_token, found.revision > 0) == ("", True)


async def test_pages_of_sessions_join_to_the_list(wire: Wire) -> None:
    for number in range(5):
        await observe(wire, f"s{number}", 100 - number // 2)
    found, token = [], ""
    while True:
        page = await list_sessions(wire, page_size=2, page_token=token)
        found += [one.session for one in page.sessions]
        if not (token := page.next_page_token):
            break
    assert found == ["s0", "s1", "s2", "s3", "s4"]


async def test_sessions_are_filtered_by_prefix_and_time(wire: Wire) -> None:
    for name, at_s in (("a1", 100), ("a2", 200), ("b", 300)):
        await observe(wire, name, at_s)
    found = await list_sessions(wire, session_prefix="a")
    assert [one.session for one in found.sessions] == ["a2", "a1"]
    found = await list_sessions(wire, observe_time_min=Timestamp(seconds=200), observe_time_max=Timestamp(seconds=300))
    assert [one.session for one in found.sessions] == ["a2"]


async def test_forgotten_fragments_do_not_count(wire: Wire) -> None:
    gone = await observe(wire, "gone", 200)
    await observe(wire, "kept", 100)
    await wire.memories.ForgetFragments(pb.ForgetFragmentsRequest(**NAMED, ids=[gone]))
    assert [one.session for one in (await list_sessions(wire)).sessions] == ["kept"]
    await wire.memories.RestoreFragments(pb.RestoreFragmentsRequest(**NAMED, ids=[gone]))
    assert [one.session for one in (await list_sessions(wire)).sessions] == ["gone", "kept"]


@pytest.mark.usefixtures("real")
async def test_expired_fragments_do_not_count(wire: Wire) -> None:
    observation = fragments.Observation(content="short", session="brief", ttl={"nanos": 1_000})
    await wire.streams.ObserveBatch(stream_pb.ObserveBatchRequest(**NAMED, observations=[observation]))
    assert not (await list_sessions(wire)).sessions


@pytest.mark.usefixtures("real")
async def test_page_token_of_an_earlier_memory_is_refused(wire: Wire) -> None:
    async def fill() -> str:
        await observe(wire, "a", 1)
        await observe(wire, "b", 2)
        return str((await list_sessions(wire, page_size=1)).next_page_token)

    token = await fill()
    await wire.memories.DeleteMemory(pb.DeleteMemoryRequest(**NAMED))
    await wire.memories.CreateMemory(pb.CreateMemoryRequest(**NAMED))
    await fill()
    error = await refused(list_sessions(wire, page_size=1, page_token=token))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"memory": ""}, "memory"),
        ({"page_size": -1}, "page_size"),
        ({"session_prefix": "a\0b"}, "session_prefix"),
        ({"observe_time_min": Timestamp(nanos=-1)}, "observe_time_min"),
        ({"observe_time_max": Timestamp(seconds=1 << 60)}, "observe_time_max"),
    ],
)
async def test_a_malformed_request_is_refused(wire: Wire, given: dict[str, Any], field: str) -> None:
    error = await refused(list_sessions(wire, **given))
    assert (error.code, list(error.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [field])


async def test_sessions_of_an_unknown_memory_are_not_found(wire: Wire) -> None:
    error = await refused(list_sessions(wire, memory="nobody"))
    assert error.reason == "MEMORY_NOT_FOUND"
