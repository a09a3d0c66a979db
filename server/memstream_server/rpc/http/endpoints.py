"""The rpcs as endpoints of ConnectRPC.

Rule 1. The caller is identified from the headers before the body is read, and the bytes of the body are on the
caller's account (request_reader.py) from then on.
Rule 2. A call then runs through the same pipeline as on the gRPC port, which identifies the caller again, checks
rights, counts and limits.
Rule 3. Streams from the client (Observe, Recall, ImportMemories) need gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from connectrpc.method import IdempotencyLevel, MethodInfo, StreamType
from connectrpc.request import RequestContext
from connectrpc.server import ConnectASGIApplication, Endpoint
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from memstream.v1 import stream_service_pb2
from memstream_server.engine.errors import CapabilityMissing, EngineError, InvalidField
from memstream_server.engine.runtime.call_context import ACCOUNT, REQUEST, Request
from memstream_server.engine.runtime.turns import take_turn
from memstream_server.rpc.calls import REQUEST_ID
from memstream_server.rpc.http.application import current_refusal, peer_uris
from memstream_server.rpc.http.call import HttpCall, metadata_of, peer_of
from memstream_server.rpc.http.codecs import (
    JSON_BYTES_FACTOR,
    BinaryCodec,
    Gzip,
    JsonCodec,
    JsonReader,
    JsonText,
    Reply,
    connect_error,
    connect_error_of,
    set_error_headers,
    write_body,
)
from memstream_server.rpc.http.event_stream import (
    LAST_ID,
    RECALL,
    STANDING,
    resume_after,
    standing_messages,
    standing_responses,
)
from memstream_server.rpc.request_reader import RequestReader
from memstream_server.rpc.rpc_table import path_of

Identify = Callable[[str, HttpCall], Awaitable[str]]
"""Path and call to the holder of the bytes of its body. Raises Unauthenticated."""
FindHandler = Callable[[str], Any]
"""The handler of an rpc, by path, for a call that has arrived."""
_Context = RequestContext[Any, Any]
_OWN_REFUSALS: dict[Code, Callable[[str], EngineError]] = {
    Code.RESOURCE_EXHAUSTED: InvalidField,  # a body over its size: 429 would make clients try again
    Code.INVALID_ARGUMENT: InvalidField,
    Code.UNIMPLEMENTED: lambda message: CapabilityMissing(message, capability=""),
}
"""Errors for calls that ConnectRPC refuses, once the caller is identified."""
_ACCEPTED = ("accept-encoding", "connect-accept-encoding", "grpc-accept-encoding")
_ENCODINGS = ("content-encoding", "connect-content-encoding", "grpc-encoding")


@dataclass(slots=True)
class _Admitted:
    """A call whose body may be read."""

    call: HttpCall
    holder: str
    held: int


class _Admission:
    """A metadata interceptor of ConnectRPC: it runs before the body is read."""

    def __init__(self, identify: Identify, reader: RequestReader, calls: dict[int, _Admitted]) -> None:
        self._identify = identify
        self._reader = reader
        self._calls = calls

    async def on_start(self, context: _Context) -> _Admitted:
        """Identifies the caller, and waits for room on the account. Raises ConnectError."""
        method = context.method
        try:
            if (refused := current_refusal()) is not None:
                raise refused
            headers = metadata_of(context.request_headers.allitems())
            remaining_ms = context.timeout_ms
            remaining_s = None if remaining_ms is None else remaining_ms / 1e3
            call = HttpCall(headers, _peer_of_text(context.client_address), remaining_s, peer_uris())
            holder = await self._identify(f"/{method.service_name}/{method.name}", call)
            ACCOUNT.set((holder, ""))
            REQUEST.set(Request())
            await take_turn()  # a call whose body has arrived may need no other step
            size = self._body_bytes(context)
            await self._reader.budget.take_bytes(holder, size)
        except Exception as error:
            refusal = connect_error(error)
            set_error_headers(refusal, context.response_headers)
            raise refusal from None
        admitted = self._calls[id(context)] = _Admitted(call, holder, size)
        return admitted

    async def on_end(self, admitted: _Admitted, context: _Context, error: Exception | None) -> None:
        """Gives the bytes back, and sets the headers of an error. Raises it with a reason if ConnectRPC made it."""
        del self._calls[id(context)]
        self._reader.budget.give_back(admitted.holder, admitted.held)
        if not isinstance(error, ConnectError):
            return
        if error.details or error.code not in _OWN_REFUSALS:
            set_error_headers(error, context.response_headers)
            return
        raise connect_error(_OWN_REFUSALS[error.code](error.message)) from None

    def _body_bytes(self, context: _Context) -> int:
        """Of the body as it arrives; of the largest one if its size is unknown, because it is compressed or chunked."""
        headers = context.request_headers
        given = headers.get("content-length", "")
        bound = JSON_BYTES_FACTOR * self._reader.message_bytes_max
        if any(headers.get(name, "identity") != "identity" for name in _ENCODINGS):
            return bound
        size = int(given) if given.isascii() and given.isdigit() and len(given) < 12 else bound
        return max(1, min(size, bound))


def _peer_of_text(address: str | None) -> str:
    host, _, port = (address or "").rpartition(":")
    return peer_of((host, int(port)) if port.isdigit() else None)


class Endpoints:
    """The application of ConnectRPC for all services."""

    def __init__(
        self,
        services: Iterable[ServiceDescriptor],
        find_handler: FindHandler,
        identify: Identify,
        reader: RequestReader,
    ) -> None:
        self._find_handler = find_handler
        self._reader = reader
        self._calls: dict[int, _Admitted] = {}
        methods = [method for service in services for method in service.methods]
        made = {path_of(each): self._make_endpoint(each) for each in methods}
        recall = next((each for each in methods if path_of(each) == RECALL), None)
        if recall is not None:
            made[STANDING] = self._make_standing(recall)
        self._json = JsonReader(reader)
        codecs: list[Any] = [BinaryCodec(), JsonCodec()]
        self.application = _Application(
            service=None,
            endpoints=lambda _service: made,
            interceptors=[_Admission(identify, reader, self._calls)],
            read_max_bytes=JSON_BYTES_FACTOR * reader.message_bytes_max,
            codecs=codecs,
            compressions=[Gzip()],
        )

    def _make_endpoint(self, method: MethodDescriptor) -> Any:
        kinds = {
            (False, False): StreamType.UNARY,
            (False, True): StreamType.SERVER_STREAM,
            (True, False): StreamType.CLIENT_STREAM,
            (True, True): StreamType.BIDI_STREAM,
        }
        info: MethodInfo[Any, Any] = MethodInfo(
            name=method.name,
            service_name=method.containing_service.full_name,
            input=GetMessageClass(method.input_type),
            output=Reply,
            idempotency_level=IdempotencyLevel.UNKNOWN,
            stream_type=kinds[method.client_streaming, method.server_streaming],
        )
        path, types = path_of(method), (GetMessageClass(method.input_type), GetMessageClass(method.output_type))

        async def answer(message: bytes, context: _Context) -> Reply:
            return await self._answer(path, types, message, context)

        def stream(message: bytes, context: _Context) -> AsyncIterator[Reply]:
            return self._stream(path, types, message, context)

        if method.client_streaming:
            return Endpoint.bidi_stream(info, _refuse_stream(method))
        if method.server_streaming:
            return Endpoint.server_stream(info, stream)
        return Endpoint.unary(info, answer)

    async def _receive(self, path: str, kind: Any, message: bytes, context: _Context) -> HttpCall:
        """The call of a request that has arrived; its account keeps the bytes of the message alone.

        A body of unknown size was charged as the largest one, and a watch lasts for hours.
        """
        admitted = self._calls[id(context)]
        surplus = admitted.held - max(1, len(message))  # an account without bytes does not exist
        if surplus > 0:
            admitted.held -= surplus
            self._reader.budget.give_back(admitted.holder, surplus)
        if isinstance(message, JsonText):
            message = await self._json.read_json(message, kind, path, admitted.holder)
        try:
            admitted.call.receive(resume_after(path, message, context.request_headers.get(LAST_ID, "")))
            if path == RECALL:
                admitted.call.receive(*standing_messages(message), is_open=True)
        except InvalidField as error:
            raise connect_error(error) from None
        return admitted.call

    async def _answer(self, path: str, types: tuple[Any, Any], message: bytes, context: _Context) -> Reply:
        call = await self._receive(path, types[0], message, context)
        with _errors_as_connect(call, context):
            handler = self._find_handler(path)
            made = Reply(types[1], await handler.stream_unary(None, call))
            return made if call.status is not None else await write_body(made, *_form_of(context))

    async def _stream(
        self, path: str, types: tuple[Any, Any], message: bytes, context: _Context
    ) -> AsyncIterator[Reply]:
        call = await self._receive(path, types[0], message, context)
        with _errors_as_connect(call, context):
            handler = self._find_handler(path)
            async with contextlib.aclosing(handler.stream_stream(None, call)) as responses:
                async for response in responses:
                    for key, value in call.initial:
                        context.response_headers[key] = str(value)
                    yield await write_body(Reply(types[1], response), *_form_of(context))

    def _make_standing(self, method: MethodDescriptor) -> Any:
        """A standing query as a stream of the server, for event_stream.py."""
        kind = stream_service_pb2.RecallOnceRequest
        info: MethodInfo[Any, Any] = MethodInfo(
            name=method.name,
            service_name=method.containing_service.full_name,
            input=kind,
            output=Reply,
            idempotency_level=IdempotencyLevel.UNKNOWN,
            stream_type=StreamType.SERVER_STREAM,
        )

        async def stream(message: bytes, context: _Context) -> AsyncIterator[Reply]:
            call = await self._receive(RECALL, kind, message, context)
            with _errors_as_connect(call, context):
                handler = self._find_handler(RECALL)
                async with contextlib.aclosing(standing_responses(handler, call)) as responses:
                    async for response in responses:
                        if response.HasField("failed"):
                            raise connect_error_of(response.failed.status)
                        yield await write_body(Reply(type(response), response), *_form_of(context))

        return Endpoint.server_stream(info, stream)


def _form_of(context: _Context) -> tuple[bool, bool]:
    """(whether the body of the response is JSON, whether it may be compressed)."""
    headers = context.request_headers
    accepted = (headers.get(name, "") for name in _ACCEPTED)
    return "json" in headers.get("content-type", ""), any("gzip" in each for each in accepted)


@contextlib.contextmanager
def _errors_as_connect(call: HttpCall, context: _Context) -> Any:
    """Raises the status of a call as ConnectError, and sets the metadata of the response."""
    try:
        yield
    except asyncio.CancelledError:
        if call.status is None:
            raise
        # slow_consumer.py has ended the call with a status and cancelled its task.
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        raise connect_error_of(call.status) from None
    _set_trailers(call, context)
    if call.status is not None:  # rpc/calls.py takes the AbortError: gRPC, too, finds the status in the context
        raise connect_error_of(call.status)


def _set_trailers(call: HttpCall, context: _Context) -> None:
    for key, value in call.trailing_metadata():
        if isinstance(value, str):
            (context.response_headers if key == REQUEST_ID else context.response_trailers)[key] = value


def _refuse_stream(method: MethodDescriptor) -> Any:
    async def refuse(_messages: object, _context: _Context) -> AsyncIterator[Reply | None]:
        text = f"{method.name} takes a stream of requests, which needs the gRPC port"
        error: Exception | None = connect_error(CapabilityMissing(text, capability=""))
        if error is not None:  # always true; the `yield` makes this a generator
            raise error
        yield None

    return refuse


class _Application(ConnectASGIApplication[None]):
    """All services in one application."""

    @property
    def path(self) -> str:
        """The application is at the root."""
        return "/"
