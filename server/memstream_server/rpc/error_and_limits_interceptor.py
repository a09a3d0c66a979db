"""Turns errors of calls into statuses, checks the routing header, and bounds the number of calls and streams.

Rule 1. Only statuses of errors.py reach clients: the text of a defect stays in the log, under an incident id.
Rule 2. Three exceptions pass unchanged: AbortError (a status is already set), a CancelledError of the call itself (the
client is gone), and gRPC's InternalError, which a read or write raises in that case. A CancelledError from something
that the call awaited is a defect like any other: grpc would leave the client without a status.
Rule 3. A delayed refusal is sent after its delay, within the call's deadline; meanwhile it does not count as a call.
Rule 4. A handler gets `Requests`, not a message: the innermost interceptor reads the message after it has authenticated
the caller.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from memstream_server.engine.errors import QuotaExceeded
from memstream_server.engine.runtime.call_context import ACCOUNT
from memstream_server.rpc.calls import is_abandoned, release_frames, wait_limit_s
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import RoutingMismatch, abort_call, status_of_any
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.request_reader import Decode, RequestReader, Requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memstream_server.observability import Metrics

ROUTING_KEY = "memstream-memory"
DELAYED_REFUSALS_MAX = 1_024
"""Maximum number of delayed refusals that wait; beyond it refusals are sent at once."""
_NAMESPACE_CHARACTERS = 128
"""Of a namespace that a call is charged to: the account outlives the request, which is not validated yet."""
_Context = grpc.aio.ServicerContext[Any, Any]


class ErrorAndLimitsInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of the server, health and reflection included."""

    def __init__(self, drain: Drain, limits: Limits, metrics: Metrics | None = None) -> None:
        self.reader = RequestReader(limits)
        self._drain = drain
        self._streams_max = limits.streams_max
        self._calls_max = limits.calls_in_flight_max
        self._calls = 0
        self._delayed_refusals = 0
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        call = _Call(self, handler_call_details, handler.request_deserializer)
        # Every handler becomes one of a stream of bytes, even if the rpc has one request: otherwise gRPC would read and
        # parse that request before the handler runs.
        if handler.response_streaming:
            handle = handler.stream_stream if handler.request_streaming else handler.unary_stream
            return grpc.stream_stream_rpc_method_handler(call.wrap_stream(handle), None, handler.response_serializer)
        handle = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return grpc.stream_unary_rpc_method_handler(call.wrap_unary(handle), None, handler.response_serializer)

    @contextmanager
    def count_stream(self, rpc: str) -> Iterator[None]:
        """Counts a stream. Raises QuotaExceeded, ShuttingDown."""
        if self._drain.open_streams >= self._streams_max:
            raise QuotaExceeded(
                f"{self._streams_max} streams are open, more are not allowed",
                quota="streams_max",
                limit=self._streams_max,
            )
        with ExitStack() as stack:
            stack.enter_context(self._drain.count_stream())
            if self._metrics is not None:
                gauge = self._metrics.streams.labels(rpc)
                gauge.inc()
                stack.callback(gauge.dec)
            yield

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Counts a call with one response. Raises QuotaExceeded."""
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

    async def end_call(self, error: BaseException, context: _Context) -> None:
        """Ends a call with the status of its handler's error. Raises AbortError, CancelledError."""
        if isinstance(error, asyncio.CancelledError) and is_abandoned(context):
            raise error
        if isinstance(error, grpc.aio.InternalError):  # a read or write failed: the client is gone
            raise asyncio.CancelledError from None
        status = status_of_any(error)
        release_frames(error)
        await self.wait_refusal_delay(error, context)
        await abort_call(context, status)

    async def wait_refusal_delay(self, error: BaseException, context: _Context) -> None:
        """Waits for the delay of a refusal, at most until shortly before the deadline."""
        if (
            not isinstance(error, QuotaExceeded)
            or not error.refusal_delay_s
            or self._delayed_refusals >= DELAYED_REFUSALS_MAX
        ):
            return
        remaining_s: float | None = context.time_remaining()
        at_most_s = error.refusal_delay_s if remaining_s is None else wait_limit_s(remaining_s)
        self._delayed_refusals += 1
        try:
            await asyncio.sleep(min(error.refusal_delay_s, at_most_s))
        finally:
            self._delayed_refusals -= 1


class _Call:
    """One call: its routing header and its wrapped handler."""

    def __init__(
        self, interceptor: ErrorAndLimitsInterceptor, details: grpc.HandlerCallDetails, decode: Decode
    ) -> None:
        self._interceptor = interceptor
        self._method: str = details.method
        self._requests = Requests(interceptor.reader, self._method, decode, self._check_first)
        self._routing: list[str] = []
        for key, value in details.invocation_metadata or ():
            if key == ROUTING_KEY:
                self._routing.append(value if isinstance(value, str) else value.decode(errors="replace"))

    def wrap_unary(self, handle: Callable[..., Awaitable[Any]]) -> Callable[[Any, _Context], Awaitable[Any]]:
        """Wraps a handler of one response."""

        async def answer(_raw: Any, context: _Context) -> Any:
            try:
                with (
                    self._count_if_ours(self._interceptor.count_call),
                    closing(self._requests.read_from(context)) as requests,
                ):
                    return await handle(requests, context)
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                await self._interceptor.end_call(error, context)

        return answer

    def wrap_stream(self, handle: Callable[..., Any]) -> Callable[[Any, _Context], Any]:
        """Wraps a handler of a streamed response: an async generator, or a coroutine that writes (health's Watch)."""
        if not inspect.isasyncgenfunction(handle):
            return self.wrap_unary(handle)

        async def stream(_raw: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                with self._count_if_ours(self._count_stream), closing(self._requests.read_from(context)) as requests:
                    async with aclosing(handle(requests, context)) as responses:
                        async for response in responses:
                            yield response
            except grpc.aio.AbortError:
                raise
            except (Exception, asyncio.CancelledError) as error:
                await self._interceptor.end_call(error, context)

        return stream

    def _count_if_ours(self, opened: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
        """Health and reflection are not limited, and do not delay the end of the server."""
        return opened() if self._method.startswith("/memstream.") else nullcontext()

    def _count_stream(self) -> AbstractContextManager[None]:
        return self._interceptor.count_stream(self._method.rpartition("/")[2])

    def _check_first(self, request: Message) -> None:
        """Charges the call to the namespace that its first message names, and checks its routing. Raises
        RoutingMismatch."""
        account = ACCOUNT.get()
        if account is not None:
            ACCOUNT.set((account[0], _namespace_of(request)))
        if not self._routing:
            return
        named = _memory_of(request)
        for given in self._routing:
            if named is not None and given != named:
                raise RoutingMismatch(f"the metadata {ROUTING_KEY} is {given[:300]!a}, the request names {named!r}")


def _namespace_of(request: Any) -> str:
    """The namespace that a request names, as it was sent; empty if it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "open" in fields:
        request, fields = request.open, fields["open"].message_type.fields_by_name
    if "memory" in fields and fields["memory"].message_type is not None:
        request, fields = request.memory, fields["memory"].message_type.fields_by_name
    return str(request.namespace)[:_NAMESPACE_CHARACTERS] if "namespace" in fields else ""


def _memory_of(request: Any) -> str | None:
    """Returns "namespace/memory" of the request, or None. A stream names it in `open`."""
    fields = request.DESCRIPTOR.fields_by_name
    if "open" in fields:
        return _memory_of(request.open) if request.HasField("open") else None
    if "memory" not in fields:
        return None
    if fields["memory"].message_type is not None:
        return f"{request.memory.namespace}/{request.memory.name}"
    return f"{request.namespace}/{request.memory}"
