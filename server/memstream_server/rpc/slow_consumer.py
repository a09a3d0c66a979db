"""Ends a stream whose client does not read the responses.

grpc takes a response once the connection has room for it; until then the generator is suspended at its `yield` and
cannot raise. A separate task therefore sends the status. It follows the responses that are already queued, so that the
client reads all of them and then the reason. The handler's resources are released at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio
import structlog

from memstream_server.engine.errors import EngineError
from memstream_server.rpc.calls import release_frames
from memstream_server.rpc.errors import abort_call, status_of

R = TypeVar("R")
_Context = grpc.aio.ServicerContext[Any, Any]
_ending: set[asyncio.Task[None]] = set()
"""Tasks that send a status: the event loop keeps only weak references."""


async def end_if_stalled(
    responses: AsyncGenerator[R, None],
    context: _Context,
    stalled_max_s: float,
    error: Callable[[R, float], EngineError],
) -> AsyncGenerator[R, None]:
    """Yields `responses`. If one is not taken for `stalled_max_s`, ends the call with `error(response, stalled_max_s)`.

    Iterate over it in the call's own task, which is then cancelled.
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
    structlog.get_logger(__name__).info("stalled_stream_ended", reason=error)
    sending = asyncio.create_task(abort_call(context, status_of(error)))
    await asyncio.sleep(0)  # grpc now has the status
    handler.cancel()
    await asyncio.wait({sending})
    ended = sending.exception()  # AbortError, or the error of a client that is gone
    if ended is not None:
        release_frames(ended)
