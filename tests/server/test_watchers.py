"""Watchers that do not read: they cost the server little, and get every event once when they read again."""

from __future__ import annotations

import re
from pathlib import Path

import grpc.aio
import pytest

import memstream
from memstream.status import translate_error
from memstream.v1 import conversation_service_pb2 as conversations
from memstream.v1 import event_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.conversation_service_pb2_grpc import ConversationServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import history
from tests.support.seeds import rounds
from tests.support.server import ServerProcess
from tests.support.waiting import until

WATCHERS, OBSERVATIONS, CONTENT = 30, 2_500, "x" * 6_000
WATCHED = rounds(2_500, 1_500)
MESSAGES = 300
_SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))
"""A channel that takes little before its program reads. Otherwise the window grows with the bandwidth that gRPC
measures, and may take all that a test sends.
"""
RAM_MAX = 150 << 20
"""What all watchers together may add to the cost of observing; their unread data are 30 times 9 or 15 MB."""


def ram(server: ServerProcess) -> int:
    """Bytes of the server's process."""
    pages = Path(f"/proc/{server.pid}/statm").read_text("utf-8").split()[1]
    return int(pages) * 4_096


Key = tuple[int, int]


def keys(response: pb.WatchResponse) -> list[Key]:
    return [(event.cursor.revision, event.cursor.ordinal) for event in response.events.events]


def numbers(response: conversations.WatchMessagesResponse) -> list[int]:
    return [message.number for message in response.messages]


@pytest.mark.drawn
async def test_stalled_watchers_cost_little_and_lose_nothing(make_server: MakeServer) -> None:
    server = await started(make_server())
    async with (
        memstream.connect(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        memory = await client.create_memory("slow/joy", kind=memstream.MemoryKind.LONG_TERM)
        alone = await client.create_memory("slow/alone", kind=memstream.MemoryKind.LONG_TERM)
        start = ram(server)
        await _observe(alone, "joy", WATCHED)
        unwatched = ram(server) - start
        await _observe(memory, "warm", 100)
        request = pb.WatchRequest(
            namespace="slow",
            memory="joy",
            cursor=event_pb2.Cursor(memory_uid=(await memory.describe()).uid),
            include_fragments=True,
        )
        watch = StreamServiceStub(channel).Watch
        calls = [watch(request) for _ in range(WATCHERS)]
        seen: list[Key] = []
        while len(seen) < 20:
            seen += keys(await calls[0].read())
        before = ram(server)
        await _observe(memory, "joy", WATCHED)
        firsts = [keys(await call.read()) for call in calls[1:]]  # each is alive, and far behind
        assert ram(server) - before < unwatched + RAM_MAX

        expected = [(one.cursor.revision, one.cursor.ordinal) for one in await history(memory)]
        calls[0].cancel()
        request.cursor.revision, request.cursor.ordinal = seen[-1]
        resumed = watch(request)
        while len(seen) < len(expected):
            seen += keys(await resumed.read())
        assert seen == expected
        late = firsts[0]
        while len(late) < len(expected):  # one that resumes where it stopped
            late += keys(await calls[1].read())
        assert late == expected
    assert await stopped(server) == 0


async def _observe(memory: memstream.Memory, producer: str, count: int) -> None:
    async with memory.observe(producer) as stream:
        for number in range(count):
            await stream.send(f"{number} {CONTENT}")


async def test_stalled_watch_ends_and_resumes_at_its_cursor(make_server: MakeServer) -> None:
    """Its slot is free before it reads on; it reads the queued responses, then the reason, and misses nothing."""
    server = await started(make_server(watch_stalled_max_s=0.5))
    async with (
        memstream.connect(server.address) as client,
        grpc.aio.insecure_channel(server.address, options=_SMALL_WINDOW) as channel,
    ):
        memory = await client.create_memory("stalled/joy", kind=memstream.MemoryKind.LONG_TERM)
        cursor = event_pb2.Cursor(memory_uid=(await memory.describe()).uid)
        request = pb.WatchRequest(namespace="stalled", memory="joy", cursor=cursor, include_fragments=True)
        watch = StreamServiceStub(channel).Watch
        async with memory.watch("beginning", include_fragments=True) as resuming:
            await _observe(memory, "joy", OBSERVATIONS)
            call, silent = watch(request, metadata=_named("call")), watch(request, metadata=_named("silent"))
            seen = keys(await call.read())
            await until(lambda: _ended(server, call))
            details: dict[str, str] = {}
            try:
                while True:
                    seen += keys(await call.read())
            except grpc.aio.AioRpcError as error:
                told = translate_error(error)
                assert isinstance(told, memstream.QuotaExceeded)
                assert told.retry_after == 1.0
                details = dict(told.details)
            expected = [(one.cursor.revision, one.cursor.ordinal) for one in await history(memory)]
            assert seen == expected[: len(seen)]
            assert (int(details["revision"]), int(details["ordinal"])) == seen[-1]
            while len(seen) < len(expected):
                seen += await _read_on(channel, request, seen[-1], len(expected) - len(seen))
            assert seen == expected
            # The SDK reads ahead for a program that does not iterate, within a bound; then its watch is ended, too.
            handed = [(await anext(resuming)).cursor for _ in expected]
            assert [(one.revision, one.ordinal) for one in handed] == expected
            assert resuming.connections > 1
            assert not silent.done()
        assert await stopped(server) == 0  # before any client has read why `silent` ended


def _named(request_id: str) -> tuple[tuple[str, str], ...]:
    """Metadata by which the server's log names a call."""
    return (("x-request-id", request_id),)


async def _ended(server: ServerProcess, call: grpc.aio.UnaryStreamCall[pb.WatchRequest, pb.WatchResponse]) -> bool:
    """The server has ended all watches that do not read, the SDK's among them; no client knows yet."""
    ended = re.findall(r"stalled_stream_ended.* request_id=(\S+)", server.log())
    return {"call", "silent"} < set(ended) and not call.done()


async def _read_on(channel: grpc.aio.Channel, request: pb.WatchRequest, after: Key, count: int) -> list[Key]:
    """The events after a cursor, `count` of them, or fewer if this client stalls so long that its watch is ended."""
    request.cursor.revision, request.cursor.ordinal = after
    call = StreamServiceStub(channel).Watch(request)
    found: list[Key] = []
    try:
        while len(found) < count:
            found += keys(await call.read())
    except grpc.aio.AioRpcError as error:
        if not isinstance(translate_error(error), memstream.QuotaExceeded):
            raise
    call.cancel()
    return found


async def test_stalled_message_watch_ends_and_resumes(make_server: MakeServer) -> None:
    server = await started(make_server(watch_stalled_max_s=0.5))
    async with (
        memstream.connect(server.address) as client,
        grpc.aio.insecure_channel(server.address, options=_SMALL_WINDOW) as channel,
    ):
        talk = client.conversation("stalled/talk")
        for number in range(MESSAGES):
            await talk.append("ann", f"{number} {'x' * 60_000}")
        request = conversations.WatchMessagesRequest(namespace="stalled", conversation="talk")
        call = ConversationServiceStub(channel).WatchMessages(request)
        seen = numbers(await call.read())
        await until(lambda: _says_so(server))
        told = None
        while told is None:
            try:
                seen += numbers(await call.read())
            except grpc.aio.AioRpcError as error:
                told = translate_error(error)
        assert isinstance(told, memstream.QuotaExceeded)
        assert told.details["number"] == str(seen[-1])
        await talk.complete()
        seen += [message.number async for message in talk.watch(after_number=seen[-1])]
        assert seen == list(range(1, MESSAGES + 1))
    assert await stopped(server) == 0


async def _says_so(server: ServerProcess) -> bool:
    return "stalled_stream_ended" in server.log()


async def test_watcher_behind_retention_gets_oldest_cursor(make_server: MakeServer) -> None:
    """The server keeps no events for a watcher that does not read."""
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("slow/old", kind=memstream.MemoryKind.LONG_TERM)
        start = memstream.Cursor((await memory.describe()).uid, 1)
        await memory.observe_batch(["before"])
        await memory.update(policy={"retention": {"event_retention": 1}})
        await until(lambda: _refused(memory, start))
        latest = (await memory.update(policy={"retention": {"event_retention": 0}})).revision  # kept from now on
        refused = await until(lambda: _refused(memory, start))
        oldest = memstream.Cursor(start.memory_uid, int(refused.details["oldest_revision"]))
        assert 2 <= oldest.revision < latest
        async with memory.watch(oldest) as watch:
            seen = [(await anext(watch)).cursor.revision for _ in range(oldest.revision, latest)]
        assert seen == list(range(oldest.revision + 1, latest + 1))


async def _refused(memory: memstream.Memory, start: memstream.Cursor) -> memstream.CursorCompacted | None:
    try:
        async with memory.watch(start) as watch:
            await anext(watch)
    except memstream.CursorCompacted as error:
        return error
    return None
