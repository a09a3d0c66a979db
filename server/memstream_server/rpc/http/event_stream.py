"""Streams of the server as text/event-stream, for EventSource and curl.

Rule 1. A request with `accept: text/event-stream` becomes a Connect stream within the process, so identity, rights,
limits and errors are those of every call. Its messages become events, each one line of JSON.
Rule 2. The status is sent with the first message: a call that fails before it has the HTTP status of its error. A later
error is the event `error`, after which the stream ends.
Rule 3. The id of an event is where the rpc can resume; a client that reconnects sends it as Last-Event-ID. A standing
query has no ids: it begins with the whole answer.
Rule 4. A comment every 15 s keeps proxies from closing a quiet stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse

from memstream.v1 import conversation_service_pb2, stream_service_pb2
from memstream_server.engine.errors import InvalidField
from memstream_server.rpc.validation import invalid_field

if TYPE_CHECKING:
    from memstream_server.rpc.http.call import HttpCall
    from memstream_server.rpc.http.port import Asgi, Receive, Scope, Send

WATCH = "/memstream.v1.StreamService/Watch"
RECALL = "/memstream.v1.StreamService/Recall"
RECALL_ONCE = "/memstream.v1.StreamService/RecallOnce"
WATCH_MESSAGES = "/memstream.v1.ConversationService/WatchMessages"
STANDING = f"{RECALL_ONCE}/events"
"""Within the process: a standing query as a stream of the server. Its request is a RecallOnceRequest."""
EVENT_STREAM = b"text/event-stream"
LAST_ID = "last-event-id"
HEARTBEAT_S = 15.0
_INNER = {WATCH: WATCH, WATCH_MESSAGES: WATCH_MESSAGES, RECALL_ONCE: STANDING}
_END = 2
"""The flag of the last message of a Connect stream, which has the error."""
_HEAD_BYTES = 5
_KEPT = frozenset(
    b"authorization connect-timeout-ms host last-event-id memstream-memory origin traceparent x-request-id".split()
)
_STATUS = {
    "canceled": 499,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "unavailable": 503,
    "unauthenticated": 401,
}
"""As Connect has them for calls with one answer."""


def asks_for_events(scope: Scope) -> bool:
    """Whether a request wants a stream as events."""
    accepted = (value for name, value in scope["headers"] if name == b"accept")
    return scope["path"] in _INNER and any(EVENT_STREAM in each for each in accepted)


class EventStream:
    """An ASGI application around the rpcs."""

    def __init__(self, rpcs: Asgi) -> None:
        self._rpcs = rpcs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"")
        if scope["method"] == "GET":  # all that EventSource can send
            body = parse_qs(scope["query_string"].decode("latin-1")).get("message", ["{}"])[0].encode()
        elif length.isdigit() and len(length) < 12:
            body = None
        else:
            error = {"code": "invalid_argument", "message": "a request for events needs the header content-length"}
            await JSONResponse(error, 411)(scope, receive, send)
            return
        size = int(length) if body is None else len(body)
        inner = {
            **scope,
            "method": "POST",
            "path": _INNER[scope["path"]],
            "raw_path": _INNER[scope["path"]].encode(),
            "query_string": b"",
            "headers": [
                *(pair for pair in scope["headers"] if pair[0] in _KEPT),
                (b"content-type", b"application/connect+json"),
                (b"content-length", str(size + _HEAD_BYTES).encode()),
            ],
        }
        writer = _EventWriter(send)
        async with writer.beat():
            await self._rpcs(inner, _as_message(receive, size, body), writer.take)


def _as_message(receive: Receive, size: int, body: bytes | None) -> Receive:
    """`receive`, whose body is one message of a Connect stream: the bytes given, else those that arrive."""
    ahead = [b"\0" + size.to_bytes(4, "big")]

    async def receive_message() -> MutableMapping[str, Any]:
        if ahead:
            part = ahead.pop() + (body or b"")
            return {"type": "http.request", "body": part, "more_body": body is None and size > 0}
        message = await receive()
        while body is not None and message["type"] == "http.request":  # the request had no body
            message = await receive()
        return message

    return receive_message


@dataclass
class _EventWriter:
    """Writes the messages of a Connect stream as events."""

    send: Send
    started: bool = False
    passes: bool = False
    arrived: bytearray = field(default_factory=bytearray)
    status: int = 200
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(self, message: MutableMapping[str, Any]) -> None:
        """A message of the inner application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            kept = (b"x-", b"access-", b"vary")
            self.headers = [pair for pair in message["headers"] if pair[0].lower().startswith(kept)]
            self.passes = dict(message["headers"]).get(b"content-type") != b"application/connect+json"
        if self.passes:  # a refusal before the call
            await self.send(message)
            return
        if message["type"] == "http.response.start":
            return
        self.arrived += message.get("body", b"")
        while len(self.arrived) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self.arrived[1:_HEAD_BYTES], "big")
            if len(self.arrived) < end:
                break
            flag, text = self.arrived[0], bytes(self.arrived[_HEAD_BYTES:end])
            del self.arrived[:end]
            if flag & _END:
                await self._end(json.loads(text).get("error"))
            else:
                await self._write(_event_of(json.loads(text)))

    async def _end(self, error: dict[str, Any] | None) -> None:
        if error is None:
            await self._write(b"", more=False)
        elif self.started:
            await self._write(b"event: error\n" + _data(error), more=False)
        else:
            body = json.dumps(error).encode()
            headers = [*self.headers, (b"content-type", b"application/json"), *_headers_of(error)]
            self.started = True
            status = _STATUS.get(str(error.get("code")), 500)
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})

    async def _write(self, text: bytes, more: bool = True) -> None:
        async with self._writing:
            if not self.started:
                self.started = True
                headers = [*self.headers, (b"content-type", EVENT_STREAM), (b"cache-control", b"no-store")]
                headers.append((b"x-accel-buffering", b"no"))  # nginx would collect the events
                await self.send({"type": "http.response.start", "status": self.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": text, "more_body": more})

    @contextlib.asynccontextmanager
    async def beat(self) -> AsyncGenerator[None, None]:
        """Writes comments meanwhile, once the stream has begun."""

        async def write_comments() -> None:
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                if self.started:
                    await self._write(b":\n\n")

        beating = asyncio.create_task(write_comments())
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


def _event_of(message: dict[str, Any]) -> bytes:
    """One event: its name is the field that is set, its id where to resume after it."""
    name = next((each for each in message if isinstance(message[each], dict)), "messages")
    id_ = ""
    if name == "events":
        id_ = _cursor_id(message["events"]["events"][-1].get("cursor", {}))
    elif name == "progress":
        id_ = _cursor_id(message["progress"].get("cursor", {}))
    elif message.get("messages"):
        id_ = str(message["messages"][-1].get("number", ""))
    return (f"id: {id_}\n" if id_ else "").encode() + f"event: {name}\n".encode() + _data(message)


def _cursor_id(cursor: dict[str, Any]) -> str:
    return f"{cursor.get('memoryUid', '')}:{cursor.get('revision', 0)}:{cursor.get('ordinal', 0)}"


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _headers_of(error: dict[str, Any]) -> list[tuple[bytes, bytes]]:
    waits = (each.get("debug", {}).get("retryDelay", "") for each in error.get("details", ()))
    found = [(b"retry-after", str(-(-float(each.rstrip("s")) // 1)).split(".")[0].encode()) for each in waits if each]
    return found + ([(b"www-authenticate", b"Bearer")] if error.get("code") == "unauthenticated" else [])


def resume_after(path: str, message: bytes, last_id: str) -> bytes:
    """The request of a stream that continues after an event. Raises InvalidField for what is no id of this stream."""
    if not last_id:
        return message
    if path == WATCH:
        watch = stream_service_pb2.WatchRequest.FromString(message)
        uid, _, rest = last_id.partition(":")
        revision, _, ordinal = rest.partition(":")
        if not (uid and _is_number(revision) and _is_number(ordinal)):
            raise _no_id(last_id)
        watch.cursor.memory_uid, watch.cursor.revision, watch.cursor.ordinal = uid, int(revision), int(ordinal)
        return watch.SerializeToString()
    if path == WATCH_MESSAGES:
        messages = conversation_service_pb2.WatchMessagesRequest.FromString(message)
        if not _is_number(last_id):
            raise _no_id(last_id)
        messages.after_number = int(last_id)
        return messages.SerializeToString()
    return message


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _no_id(last_id: str) -> InvalidField:
    return invalid_field(LAST_ID, f"is {last_id[:40]!a}, no id of an event of this stream")


def standing_messages(message: bytes) -> tuple[bytes, bytes]:
    """The messages of a Recall stream, `open` and the query, that a RecallOnceRequest asks for."""
    asked = stream_service_pb2.RecallOnceRequest.FromString(message)
    if not asked.query.subscribe:
        raise invalid_field("query.subscribe", "is needed for a stream of events; without it ask for JSON")
    asked.query.query_id = asked.query.query_id or "1"
    opening = stream_service_pb2.RecallOpen(
        namespace=asked.namespace, memory=asked.memory, session=asked.session, done_in_recollections=True
    )
    requests = stream_service_pb2.RecallRequest(open=opening), stream_service_pb2.RecallRequest(query=asked.query)
    first, second = (each.SerializeToString() for each in requests)
    return first, second


async def standing_responses(handler: Any, call: HttpCall) -> AsyncGenerator[stream_service_pb2.RecallResponse, None]:
    """The responses of a Recall stream with one query, without `opened`; a query that failed is the last one."""
    written: asyncio.Queue[Any] = asyncio.Queue(1)
    call.writer = written.put  # the handler's tasks write what it does not yield

    async def run_handler() -> None:
        async with contextlib.aclosing(handler.stream_stream(None, call)) as responses:
            async for response in responses:
                await written.put(response)

    running = asyncio.create_task(run_handler())
    try:
        while True:
            taking = asyncio.create_task(written.get())
            await asyncio.wait({taking, running}, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                taking.cancel()
                await running
                return
            made = taking.result()
            is_message = isinstance(made, stream_service_pb2.RecallResponse)
            response = made if is_message else stream_service_pb2.RecallResponse.FromString(made)
            if response.WhichOneof("message") == "opened":
                continue
            yield response
            if response.WhichOneof("message") == "failed":
                return
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
