"""Watch, WatchMessages and standing queries as text/event-stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import memstream
from memstream import sync
from memstream_server.rpc.http import event_stream
from tests.http_port.conftest import http_server
from tests.support.collector import Collector
from tests.support.local_http import NO_TLS
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

__all__ = ["http_server"]  # fixture
WATCH = "/memstream.v1.StreamService/Watch"
RECALL = "/memstream.v1.StreamService/RecallOnce"
MESSAGES = "/memstream.v1.ConversationService/WatchMessages"
Server = tuple[ServerProcess, str]
EVENTS = {"accept": "text/event-stream", "content-type": "application/json"}


class Opened:
    """An open stream of events."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._lines = response.iter_lines()

    def next_event(self) -> tuple[str, str, Any]:
        """(name, id, data) of the next event."""
        found = {"event": "", "id": "", "data": ""}
        for line in self._lines:
            if line:
                name, _, value = line.partition(": ")
                found[name] = value
            elif found["data"]:
                return found["event"], found["id"], json.loads(found["data"])
        raise EOFError

    def wait_for(self, name: str) -> tuple[str, Any]:
        """(id, data) of the next event of a name."""
        while True:
            event, id_, data = self.next_event()
            if event == name:
                return id_, data


@contextlib.contextmanager
def opened(address: str, path: str, body: object, **headers: str) -> Iterator[Opened]:
    given = EVENTS | {name.replace("_", "-"): value for name, value in headers.items()}
    with httpx2.stream(
        "POST", f"http://{address}{path}", json=body, headers=given, timeout=30, verify=NO_TLS
    ) as response:
        yield Opened(response)


@pytest.fixture
def memory(http_server: Server) -> Iterator[sync.Memory]:
    with sync.connect(http_server[0].address) as client:
        yield client.create_memory(f"events/m{uuid.uuid4().hex[:8]}")


def named(memory: sync.Memory, **more: object) -> dict[str, object]:
    return {"namespace": memory.namespace, "memory": memory.name, **more}


def contents(memory: sync.Memory) -> dict[str, str]:
    return {one.id: str(one.content) for one in memory.list_fragments()}


def test_watch_sends_events_with_ids_to_resume_from(memory: sync.Memory, http_server: Server) -> None:
    address = http_server[1]
    with opened(address, WATCH, named(memory)) as stream:
        assert stream.response.status_code == 200
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        assert stream.next_event()[0] == "progress"
        memory.observe_batch(["one"])
        id_, data = stream.wait_for("events")
        assert {one["type"] for one in data["events"]["events"]} >= {"EVENT_TYPE_OBSERVED"}
    memory.observe_batch(["two"])
    with opened(address, WATCH, named(memory), last_event_id=id_) as stream:
        _, data = stream.wait_for("events")
        ids = {one.get("fragmentId") for one in data["events"]["events"]}
        assert [text for key, text in contents(memory).items() if key in ids] == ["two"]


def test_eventsource_may_ask_with_get(memory: sync.Memory, http_server: Server) -> None:
    url = f"http://{http_server[1]}{WATCH}"
    message = json.dumps(named(memory))
    with httpx2.stream("GET", url, params={"message": message}, headers=EVENTS, timeout=30, verify=NO_TLS) as response:
        stream = Opened(response)
        assert stream.next_event()[0] == "progress"
        memory.observe_batch(["one"])
        assert stream.wait_for("events")[0]


def test_a_standing_query_sends_its_changes(memory: sync.Memory, http_server: Server) -> None:
    query = {"text": "tea", "subscribe": True}
    with opened(http_server[1], RECALL, named(memory, query=query)) as stream:
        _, first = stream.wait_for("recollections")
        assert first["recollections"].get("recollections", []) == []
        assert first["recollections"]["done"]["queryId"] == "1"
        memory.observe_batch(["green tea"])
        while not (found := stream.wait_for("recollections")[1]["recollections"].get("recollections")):
            pass
        assert found[0]["fragment"]["content"] == "green tea"
        assert len(list(memory.list_standing_queries())) == 1
        memory.forget_fragments(list(contents(memory)))
        assert stream.wait_for("retracted")[1]["retracted"]["fragmentIds"]


async def test_a_reader_that_leaves_ends_its_standing_query(http_server: Server) -> None:
    async with memstream.connect(http_server[0].address) as client:
        memory = await client.create_memory(f"events/m{uuid.uuid4().hex[:8]}")
        body = {"namespace": "events", "memory": memory.name, "query": {"text": "tea", "subscribe": True}}
        url = f"http://{http_server[1]}{RECALL}"
        async with (
            httpx2.AsyncClient(timeout=30, verify=NO_TLS) as http,
            http.stream("POST", url, json=body, headers=EVENTS) as answer,
        ):
            lines = answer.aiter_lines()
            assert await anext(lines)
            assert len([one async for one in memory.list_standing_queries()]) == 1

        async def is_closed() -> bool:
            return not [one async for one in memory.list_standing_queries()]

        await until(is_closed)


async def test_comments_keep_a_quiet_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.01)
    heard = asyncio.Event()
    sent: list[bytes] = []

    async def quiet(_scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        assert body == b"\0\0\0\0\x02{}"
        headers = [(b"content-type", b"application/connect+json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b'\0\0\0\0\x0f{"progress":{}}', "more_body": True})
        await heard.wait()
        await send({"type": "http.response.body", "body": b"\x02\0\0\0\x02{}", "more_body": False})

    async def note(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b":\n\n" in sent:
            heard.set()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": WATCH, "query_string": b"", "headers": []}
    await event_stream.EventStream(quiet)(scope, receive, note)
    assert sent[1].startswith(b"id: :0:0\nevent: progress\ndata: {")
    assert sent[-1] == b""


def test_messages_resume_after_a_number(http_server: Server) -> None:
    name = f"c{uuid.uuid4().hex[:8]}"
    with sync.connect(http_server[0].address) as client:
        conversation = client.conversation(f"events/{name}")
        for text in ("one", "two", "three"):
            conversation.append("Ann", text)
        body = {"namespace": "events", "conversation": name}
        with opened(http_server[1], MESSAGES, body) as stream:
            id_, data = stream.wait_for("messages")
            assert len(data["messages"]) == 3
        conversation.append("Ann", "four")
        with opened(http_server[1], MESSAGES, body, last_event_id=id_) as stream:
            while not (data := stream.wait_for("messages")[1]).get("messages"):
                pass
            assert [one["content"] for one in data["messages"]] == ["four"]
        conversation.complete()
        with opened(http_server[1], MESSAGES, body, last_event_id="4") as stream:
            assert stream.next_event()[2]["completed"]
            with pytest.raises(EOFError):
                stream.next_event()


REFUSED: list[tuple[str, dict[str, Any], dict[str, str], int, str]] = [
    (WATCH, {"namespace": "events", "memory": "nobody"}, {}, 404, "MEMORY_NOT_FOUND"),
    (WATCH, {"namespace": "events", "memry": "x"}, {}, 400, "did you mean memory?"),
    (WATCH, {"namespace": "events", "memory": "x"}, {"last_event_id": "x"}, 400, "last-event-id"),
    (MESSAGES, {"namespace": "events", "conversation": "x"}, {"last_event_id": "-1"}, 400, "last-event-id"),
    (RECALL, {"namespace": "events", "memory": "x", "query": {"text": "x"}}, {}, 400, "query.subscribe"),
    (RECALL, {"namespace": "e", "memory": "x", "query": {"text": "x", "subscribe": True}}, {}, 404, "MEMORY_NOT_FOUND"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "said"), REFUSED)
def test_a_call_that_fails_has_its_status(
    path: str, body: dict[str, Any], headers: dict[str, str], status: int, said: str, http_server: Server
) -> None:
    with opened(http_server[1], path, body, **headers) as stream:
        stream.response.read()
        assert (stream.response.status_code, said in stream.response.text) == (status, True), stream.response.text
        assert stream.response.headers["content-type"] == "application/json"


def test_an_invalid_standing_query_has_its_status(memory: sync.Memory, http_server: Server) -> None:
    with opened(http_server[1], RECALL, named(memory, query={"subscribe": True, "limit": -1})) as stream:
        stream.response.read()
        assert (stream.response.status_code, "query.limit" in stream.response.text) == (400, True)


def test_a_deleted_memory_ends_its_stream_with_an_error(memory: sync.Memory, http_server: Server) -> None:
    with opened(http_server[1], WATCH, named(memory)) as stream:
        assert stream.next_event()[0] == "progress"
        memory.delete()
        code = stream.wait_for("error")[1]["code"]
        assert code in ("not_found", "failed_precondition", "aborted")
        with pytest.raises(EOFError):
            stream.next_event()


def test_json_stays_the_answer_without_the_header(memory: sync.Memory, http_server: Server) -> None:
    body = named(memory, query={"text": "tea"})
    answer = httpx2.post(f"http://{http_server[1]}{RECALL}", json=body, timeout=30, verify=NO_TLS)
    assert answer.headers["content-type"] == "application/json"


async def test_streams_of_events_are_part_of_the_callers_trace(tmp_path: Path) -> None:
    async with Collector() as collector:
        address = free_address()
        server = ServerProcess(tmp_path / "data", http_listen=address, otlp_endpoint=f"http://{collector.address}")
        await asyncio.to_thread(server.start)
        try:
            await asyncio.to_thread(ask_from_spans, server.address, address)
            assert await asyncio.to_thread(server.stop) == 0  # it sends its spans before it ends
        finally:
            server.kill()
    for number, name in enumerate(("Watch", "Recall", "WatchMessages"), 1):
        (served,) = (one for one in collector.spans if one.attributes.get("rpc.method") == name)
        assert (served.trace.hex(), served.parent.hex()) == ("5" * 32, f"{number:016x}"), name
    (stream,) = collector.find_spans("memstream.v1.StreamService/Recall")
    (query,) = collector.find_spans("memstream.v1.StreamService/RecallQuery")
    assert (query.trace, query.parent) == (stream.trace, stream.id)


def ask_from_spans(grpc_address: str, http_address: str) -> None:
    """Opens a stream of each kind, each from another span of the trace 55...5."""
    with sync.connect(grpc_address) as client:
        memory = client.create_memory("events/traced")
        client.conversation("events/traced").append("Ann", "one")
        bodies = {
            WATCH: named(memory),
            RECALL: named(memory, query={"text": "tea", "subscribe": True}),
            MESSAGES: {"namespace": "events", "conversation": "traced"},
        }
        for number, (path, body) in enumerate(bodies.items(), 1):
            with opened(http_address, path, body, traceparent=f"00-{'5' * 32}-{number:016x}-01") as stream:
                assert stream.next_event()[0] != "error"
