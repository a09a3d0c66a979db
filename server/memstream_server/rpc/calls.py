"""What is the same for every call of the contract: its request id, its count and duration, its span.

Rule 1. Outermost: it sees the status that a call ends with, whoever gave it, and takes no part in giving it.
Rule 2. No label and no attribute names a memory, a principal or an id. A request id is in log lines alone.
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

if TYPE_CHECKING:
    from memstream_server.observability import Metrics

REQUEST_ID = "x-request-id"
"""Metadata: of a request, who calls; of an answer, under which request_id the log has the call."""
DEADLINE_MARGIN_S = 0.5
"""How long before its deadline a call that waits is given up, a fifth of its time at most: to be heard in time."""
AFTER_CLOSE_S = 0.02
"""How long a stream waits, after `close`, for the end of its client's side: it refuses what comes instead."""
_REQUEST_ID_FORMAT = re.compile(r"[\x21-\x7e]{1,64}")
_OUR_PREFIX = "/memstream."
_Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]


class Span(Protocol):
    """A call as a trace shows it."""

    def ended(self, code: grpc.StatusCode) -> None:
        """With which status; once."""
        ...


class Tracing(Protocol):
    """Makes calls spans of traces, where the settings ask for it."""

    def call(self, method: str, metadata: Metadata) -> AbstractContextManager[Span]:
        """The span of a call that this server answers, below its client's; what the call does is below it."""
        ...

    def passed_on(self) -> Metadata:
        """What takes the present span on to another server."""
        ...


class Untraced:
    """Tracing is off."""

    def call(self, _method: str, _metadata: Metadata) -> AbstractContextManager[Untraced]:
        return nullcontext(self)

    def passed_on(self) -> Metadata:
        return ()

    def ended(self, code: grpc.StatusCode) -> None:
        """Nobody looks."""


class Calls(grpc.aio.ServerInterceptor):
    """Wraps every handler of the server. Health and reflection get a request id alone."""

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
            with self._observe_call(method, metadata, context):
                return await handle(request, context)

        return answer

    def _wrap_stream(self, handle: Callable[..., Any], method: str, metadata: Metadata) -> Any:
        if not inspect.isasyncgenfunction(handle):  # a coroutine that writes: health's Watch
            return self._wrap_unary(handle, method, metadata)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            given = bind_request_id(context, method, metadata)
            await context.send_initial_metadata(((REQUEST_ID, given),))  # the end may be hours away
            with self._observe_call(method, metadata, context):
                async with aclosing(handle(request, context)) as responses:
                    async for response in responses:
                        yield response

        return stream

    @contextmanager
    def _observe_call(self, method: str, metadata: Metadata, context: _Context) -> Iterator[None]:
        """Counts, times and traces what runs inside; handlers have a task of their own each."""
        if not method.startswith(_OUR_PREFIX):
            yield
            return
        started_s, code = time.perf_counter(), grpc.StatusCode.OK
        with self._tracing.call(method, metadata) as span:
            try:
                yield
            except grpc.aio.AbortError:
                code = _status_code(context)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                span.ended(code)
                if self._metrics is not None:
                    rpc = method.rpartition("/")[2]
                    self._metrics.calls.labels(rpc, code.name).inc()
                    self._metrics.call_seconds.labels(rpc).observe(time.perf_counter() - started_s)


def bind_request_id(context: _Context, method: str, metadata: Metadata) -> str:
    """The call's request id, as given or made: on its log lines from here on, and in what its caller gets back."""
    given = f"{random.getrandbits(64):016x}"  # distinguishes calls; nothing is derived from it
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str) and _REQUEST_ID_FORMAT.fullmatch(value):
            given = value
            break
    structlog.contextvars.bind_contextvars(rpc=method, request_id=given)
    context.set_trailing_metadata(((REQUEST_ID, given),))
    return given


def current_request_id() -> str:
    """Of the call that this is done for; empty where it is done for none."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def wait_limit_s(remaining_s: float) -> float:
    """How long a call of that much time may wait, and still say in time that it waited for nothing."""
    return max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 5))


def is_task_cancelled() -> bool:
    """Whether the present task is to end. Asked of a CancelledError, which may be that of something the task waited
    for: whoever ends with one of those leaves a client without any answer."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_abandoned(context: _Context) -> bool:
    """Whether who called has gone, or the call was ended here."""
    return bool(context.cancelled()) or is_task_cancelled()


def _status_code(context: _Context) -> grpc.StatusCode:
    code: object = context.code()  # a number, whatever its type says
    if isinstance(code, grpc.StatusCode):
        return code
    return next((each for each in grpc.StatusCode if each.value[0] == code), grpc.StatusCode.UNKNOWN)
