"""What every call has: its request id, its trace span, its time limits, and how its errors leave memory."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog

REQUEST_ID = "x-request-id"
"""Metadata key. In a request: the caller's id for the call; in a response: the request_id of the call's log lines."""
DEADLINE_MARGIN_S = 0.5
"""A waiting call gives up this long before its deadline (at most a fifth of its time), so that the status arrives in
time."""
AFTER_CLOSE_S = 0.2
"""How long a stream waits, after `close`, for the end of the request stream; it refuses messages that arrive instead.
"""
_REQUEST_ID_FORMAT = re.compile(r"[\x21-\x7e]{1,64}")
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

    async def trace_query(self, name: str, traceparent: str, answer: Callable[[], Awaitable[None]]) -> None:
        """Runs `answer` in the server span of a query on a stream: a child of the span that `traceparent` names, or of
        the stream's if it names none. Raises the errors of `answer`."""
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
