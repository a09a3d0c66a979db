"""The guard of every call: its errors become statuses, its routing header is checked, and it is counted.

Rule 1. Nothing but a status of errors.py leaves: a defect's text stays in the log, under an incident id.
Rule 2. AbortError (a status was set already) and a CancelledError of the call itself (the client is gone) pass. One of
something that the call waited for is a defect as others are: grpc would leave the client without any answer.
Rule 3. A refusal that is to wait is told once it has, within the call's deadline; it counts as no call meanwhile.
Rule 4. Bytes that are no message are the client's mistake: INVALID_ARGUMENT, not grpc's UNKNOWN with a text.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from memstream_server.core.printable import number_text
from memstream_server.engine.errors import InvalidField, ProtocolViolation, QuotaExceeded
from memstream_server.rpc.calls import gave_up, heard_in_s
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import RoutingMismatch, abort, status_of_any
from memstream_server.rpc.limits import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memstream_server.observability import Metrics

ROUTING_KEY = "memstream-memory"
HELD_MAX = 1_024
"""Refusals that wait; beyond them all are told at once."""
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for bytes that are not a message of the rpc's type."""

    description: str


class Guard(grpc.aio.ServerInterceptor):
    """Wraps every handler of the server, health and reflection included."""

    def __init__(self, drain: Drain, limits: Limits, metrics: Metrics | None = None) -> None:
        self.opening_max_s = limits.opening_max_s
        self._drain = drain
        self._streams_max = limits.streams_max
        self._calls_max = limits.calls_in_flight_max
        self._calls = 0
        self._held = 0
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self, handler_call_details)
        decoded = _forgiving(handler.request_deserializer)
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                call.streaming(handler.stream_stream), decoded, handler.response_serializer
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                call.answering(handler.stream_unary), decoded, handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                call.streaming(handler.unary_stream), decoded, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            call.answering(handler.unary_unary), decoded, handler.response_serializer
        )

    @contextmanager
    def stream_open(self, rpc: str) -> Iterator[None]:
        """Counts a stream. Raises QuotaExceeded, ShuttingDown."""
        if self._drain.open_streams >= self._streams_max:
            raise QuotaExceeded(
                f"{self._streams_max} streams are open, more are not allowed",
                quota="streams_max",
                limit=self._streams_max,
            )
        with ExitStack() as stack:
            stack.enter_context(self._drain.stream())
            if self._metrics is not None:
                gauge = self._metrics.streams.labels(rpc)
                gauge.inc()
                stack.callback(gauge.dec)
            yield

    @contextmanager
    def call_open(self) -> Iterator[None]:
        """Counts a call of one answer. Raises QuotaExceeded."""
        if self._calls >= self._calls_max:
            raise QuotaExceeded(
                f"{self._calls_max} calls are under way, more at once are not allowed: try again soon",
                quota="calls_in_flight_max",
                limit=self._calls_max,
            )
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def due(self, error: BaseException, context: _Context) -> None:
        """Waits until the caller may be told."""
        if not isinstance(error, QuotaExceeded) or not error.told_in_s or self._held >= HELD_MAX:
            return
        remaining_s: float | None = context.time_remaining()
        at_most_s = error.told_in_s if remaining_s is None else heard_in_s(remaining_s)
        self._held += 1
        try:
            await asyncio.sleep(min(error.told_in_s, at_most_s))
        finally:
            self._held -= 1


class _Call:
    """One call: what its headers say, and the wrapping of its handler."""

    def __init__(self, guard: Guard, details: grpc.HandlerCallDetails) -> None:
        self._guard = guard
        self._method: str = details.method
        self._routing: list[str] = []
        for key, value in details.invocation_metadata or ():
            if key == ROUTING_KEY:
                self._routing.append(value if isinstance(value, str) else value.decode(errors="replace"))

    def answering(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[[Any, _Context], Awaitable[Any]]:
        """Wraps a handler of one answer."""

        async def answer(request: Any, context: _Context) -> Any:
            try:
                with self._counted(self._guard.call_open):
                    return await behaviour(self._checked(request), context)
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and gave_up(context):
                    raise
                await self._guard.due(error, context)
                await abort(context, status_of_any(error))

        return answer

    def streaming(self, behaviour: Callable[..., Any]) -> Callable[[Any, _Context], Any]:
        """Wraps a handler of a streamed answer: an async generator, or a coroutine that writes (health's Watch)."""
        if not inspect.isasyncgenfunction(behaviour):
            return self.answering(behaviour)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                with self._counted(self._stream_open):
                    async with aclosing(behaviour(self._checked(request), context)) as responses:
                        async for response in responses:
                            yield response
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and gave_up(context):
                    raise
                await self._guard.due(error, context)
                await abort(context, status_of_any(error))

        return stream

    def _counted(self, opened: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
        """Health and reflection are always answered, and end with the server."""
        return opened() if self._method.startswith("/memstream.") else nullcontext()

    def _stream_open(self) -> AbstractContextManager[None]:
        return self._guard.stream_open(self._method.rpartition("/")[2])

    def _checked(self, request: Any) -> Any:
        """The request, or the requests, with their bytes and the routing header checked."""
        if not hasattr(request, "__anext__") and not hasattr(request, "__aiter__"):
            self.check(request)
            return request
        return _Checked(self, request, self._guard.opening_max_s)

    def check(self, request: Any, first: bool = True) -> None:
        """Raises InvalidField, RoutingMismatch."""
        if isinstance(request, _Undecodable):
            raise InvalidField(request.description)
        if not first or not self._routing or not isinstance(request, Message):
            return
        named = _named_memory(request)
        for given in self._routing:
            if named is not None and given != named:
                raise RoutingMismatch(f"the metadata {ROUTING_KEY} is {given[:300]!a}, the request names {named!r}")


class _Checked:
    """A request stream whose messages are checked as they come."""

    def __init__(self, call: _Call, requests: Any, opening_max_s: float) -> None:
        self._call = call
        self._opening_max_s = opening_max_s
        self._requests = requests
        self._first = True

    def __aiter__(self) -> _Checked:
        return self

    async def __anext__(self) -> Any:
        request = await (self._opening() if self._first else anext(self._requests))
        self._call.check(request, self._first)
        self._first = False
        return request

    async def _opening(self) -> Any:
        """The first message, for which a stream is not kept for ever. Raises ProtocolViolation."""
        reading = asyncio.ensure_future(anext(self._requests))
        try:
            await asyncio.wait({reading}, timeout=self._opening_max_s)
            if reading.done():
                return reading.result()
        finally:
            reading.cancel()
        raise ProtocolViolation(f"the stream's first message did not come within {number_text(self._opening_max_s)} s")


def _forgiving(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Decodes to _Undecodable instead of raising inside grpc."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable("the bytes sent are not a message of this rpc's type")

    return decode


def _named_memory(request: Any) -> str | None:
    """ "namespace/memory" as the request names it; None where it names none. A stream names it in `open`."""
    fields = request.DESCRIPTOR.fields_by_name
    if "open" in fields:
        return _named_memory(request.open) if request.HasField("open") else None
    if "memory" not in fields:
        return None
    if fields["memory"].message_type is not None:
        return f"{request.memory.namespace}/{request.memory.name}"
    return f"{request.namespace}/{request.memory}"
