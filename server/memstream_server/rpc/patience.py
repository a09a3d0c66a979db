"""Ending a stream whose client leaves unread what was sent to it.

grpc takes a response when the connection has room for it, and until then a generator stands at its `yield` and cannot
be told anything. So the status is sent beside it: it stands behind what is on its way, so that the client reads
everything, then why the stream ended. Whatever the handler held is let go at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio
import structlog

from memstream_server.engine.errors import EngineError
from memstream_server.rpc.errors import abort, status_of

R = TypeVar("R")
_Context = grpc.aio.ServicerContext[Any, Any]
_ending: set[asyncio.Task[None]] = set()
"""Statuses on their way: a loop keeps only weak references."""


async def end_if_stalled(
    responses: AsyncGenerator[R, None],
    context: _Context,
    stalled_max_s: float,
    error: Callable[[R, float], EngineError],
) -> AsyncGenerator[R, None]:
    """`responses`, until one is not taken for `stalled_max_s`: then the call ends with `error` of that one.

    `error` is given the response and `stalled_max_s`.

    To be iterated over in the call's own task, which is cancelled then.
    """
    loop, handler = asyncio.get_running_loop(), asyncio.current_task()
    assert handler is not None
    async with aclosing(responses):
        async for response in responses:
            timer = loop.call_later(stalled_max_s, _start_ending, handler, context, error(response, stalled_max_s))
            try:
                yield response
            finally:
                timer.cancel()


def _start_ending(handler: asyncio.Task[Any], context: _Context, error: EngineError) -> None:
    task = asyncio.create_task(_end_call(handler, context, error))
    _ending.add(task)
    task.add_done_callback(_ending.discard)


async def _end_call(handler: asyncio.Task[Any], context: _Context, error: EngineError) -> None:
    """Lasts until the client has read the status, or is gone."""
    structlog.get_logger(__name__).info("stalled_stream_ends", reason=error)
    sending = asyncio.create_task(abort(context, status_of(error)))
    await asyncio.sleep(0)  # it has been handed to grpc
    handler.cancel()
    await asyncio.wait({sending})
    sending.exception()  # AbortError, or what came of a client that is gone
