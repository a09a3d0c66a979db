"""The outermost interceptor: request id, metrics and span of every call; time limits of calls that wait.

Rule 1. It observes the final status of a call, whichever layer sets it, and never changes it.
Rule 2. No label and no attribute names a memory, a principal or an id. A request id appears in log lines only.
Rule 3. An AbortError ends here: gRPC raises it again when the handler returns, and then without the frames that would
keep the call in memory. The HTTP port finds its status in the call.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
import structlog

from memstream_server.engine.runtime.turns import find_turns

if TYPE_CHECKING:
    from memstream_server.observability import Metrics

REQUEST_ID = "x-request-id"
"""Metadata key. In a request: the caller's id for the call; in a response: the request_id of the call's log lines."""
DEADLINE_MARGIN_S = 0.5
"""A waiting call gives up this long before its deadline (at most a fifth of its time), so that the status arrives in
time."""
AFTER_CLOSE_S = 0.2
"""How long a stream waits, after `close`, for the end of the request stream; it refuses messages that arrive instead.
"""
_REQUEST_ID_FORMAT = re.compile(r"[\x21-\x7e]{1,64}")
_OUR_PREFIX = "/memstream."
_Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]


class Span(Protocol):
    """The trace span of a call."""

    def record_end(self, code: grpc.StatusCode) -> None:
        """Records the status; called once."""
        ...


class Tracing(Protocol):
    """Creates trace spans of calls if the settings enable it."""

    def trace_call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        """The server span of a call, a child of the client's span and the parent of the spans of its work."""
        ...

    def current_metadata(self) -> Metadata:
        """Metadata that carries the current span to another server."""
        ...


class Untraced:
    """Tracing is off."""

    def trace_call(self, _method: str, _metadata: Metadata) -> AbstractContextManager[Untraced]:
        return nullcontext(self)

    def current_metadata(self) -> Metadata:
        return ()

    def record_end(self, code: grpc.StatusCode) -> None:
        """Does nothing."""


class Calls(grpc.aio.ServerInterceptor):
    """Wraps every handler of the server. Health and reflection only get a request id."""

    def __init__(self, metrics: Metrics | None = None, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._tracing = tracing or Untraced()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        if (turns := find_turns()) is not None:
            turns.note_arrival()
        method, metadata = handler_call_details.method, tuple(handler_call_details.invocation_metadata or ())
        coders = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._wrap_stream(handler.stream_stream, method, metadata), *coders
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._wrap_unary(handler.stream_unary, method, metadata), *coders
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._wrap_stream(handler.unary_stream, method, metadata), *coders
            )
        return grpc.unary_unary_rpc_method_handler(self._wrap_unary(handler.unary_unary, method, metadata), *coders)

    def _wrap_unary(self, handle: Callable[..., Awaitable[Any]], method: str, metadata: Metadata) -> Any:
        async def answer(request: Any, context: _Context) -> Any:
            bind_request_id(context, method, metadata)
            try:
                with self._observe_call(method, metadata, context):
                    return await handle(request, context)
            except grpc.aio.AbortError as error:
                release_frames(error)

        return answer

    def _wrap_stream(self, handle: Callable[..., Any], method: str, metadata: Metadata) -> Any:
        if not inspect.isasyncgenfunction(handle):  # a coroutine that writes: health's Watch
            return self._wrap_unary(handle, method, metadata)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            given = bind_request_id(context, method, metadata)
            await context.send_initial_metadata(((REQUEST_ID, given),))  # the stream may last for hours
            try:
                with self._observe_call(method, metadata, context):
                    async with aclosing(handle(request, context)) as responses:
                        async for response in responses:
                            yield response
            except grpc.aio.AbortError as error:
                release_frames(error)

        return stream

    @contextmanager
    def _observe_call(self, method: str, metadata: Metadata, context: _Context) -> Iterator[None]:
        """Counts, times and traces the body; every handler has a task of its own."""
        if not method.startswith(_OUR_PREFIX):
            yield
            return
        started_s, code = time.perf_counter(), grpc.StatusCode.OK
        with self._tracing.trace_call(method, metadata) as span:
            try:
                yield
            except grpc.aio.AbortError:
                code = _status_code(context)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                span.record_end(code)
                if self._metrics is not None:
                    rpc = method.rpartition("/")[2]
                    self._metrics.calls.labels(rpc, code.name).inc()
                    self._metrics.call_seconds.labels(rpc).observe(time.perf_counter() - started_s)


def bind_request_id(context: _Context, method: str, metadata: Metadata) -> str:
    """Takes the caller's request id or creates one; binds it to log lines and to the trailing metadata."""
    given = f"{random.getrandbits(64):016x}"  # distinguishes calls; nothing is derived from it
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str) and _REQUEST_ID_FORMAT.fullmatch(value):
            given = value
            break
    structlog.contextvars.bind_contextvars(rpc=method, request_id=given)
    context.set_trailing_metadata(((REQUEST_ID, given),))
    return given


def release_frames(error: BaseException) -> None:
    """Release what the frames of an error hold: the request, the call and its context.

    gRPC keeps an AbortError with its call. The error's frames hold that call: without this, every refused call stays in
    memory until the oldest generation of the garbage collector runs. The chain of causes may be a cycle itself.
    """
    released: set[int] = set()
    ahead: list[BaseException | None] = [error]
    while ahead:
        one = ahead.pop()
        if one is not None and id(one) not in released:
            released.add(id(one))
            one.__traceback__ = None
            ahead += [one.__cause__, one.__context__]


def current_request_id() -> str:
    """The request id of the current call; empty outside of calls."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def wait_limit_s(remaining_s: float) -> float:
    """How long a call with this remaining time may wait and still send its status in time."""
    return max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 5))


def is_task_cancelled() -> bool:
    """Whether the current task is being cancelled. A CancelledError may instead come from something that the task
    awaited; a handler that ends with such an error leaves its client without a status."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_abandoned(context: _Context) -> bool:
    """Whether the client is gone, or the server cancelled the call."""
    return bool(context.cancelled()) or is_task_cancelled()


def _status_code(context: _Context) -> grpc.StatusCode:
    code: object = context.code()  # an int, despite its annotation
    if isinstance(code, grpc.StatusCode):
        return code
    return next((each for each in grpc.StatusCode if each.value[0] == code), grpc.StatusCode.UNKNOWN)
