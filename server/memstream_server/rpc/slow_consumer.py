"""Streams of changes: progress marks, the end of the server, and clients that do not read the responses.

grpc takes a response once the connection has room for it; until then the generator is suspended at its `yield` and
cannot raise. A separate task therefore sends the status. It follows the responses that are already queued, so that the
client reads all of them and then the reason. The handler's resources are released at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio
import structlog

from memstream_server.engine.errors import EngineError
from memstream_server.rpc.calls import release_frames
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import abort_call, status_of
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire.scalars import duration_us

C = TypeVar("C")
R = TypeVar("R")
_Context = grpc.aio.ServicerContext[Any, Any]
PROGRESS_DEFAULT_S = 10.0
PROGRESS_MIN_S = 0.1
_ending: set[asyncio.Task[None]] = set()
"""Tasks that send a status: the event loop keeps only weak references."""


def read_progress_s(found: Violations, request: Any) -> float:
    """How often a stream without changes sends a mark, from the request's `progress_interval`."""
    if not request.HasField("progress_interval"):
        return PROGRESS_DEFAULT_S
    return max(duration_us(found, "progress_interval", request.progress_interval) / 1e6, PROGRESS_MIN_S)


async def follow_changes(
    changes: AsyncGenerator[C, None],
    progress_s: float,
    drain: Drain,
    encode: Callable[[C], AsyncIterator[R]],
    mark: Callable[[], R],
) -> AsyncGenerator[R, None]:
    """The responses for all changes, with a mark after so long without one. The next change is asked for once the
    client has taken the last one. Raises ShuttingDown when the server ends.
    """
    drained = asyncio.Event()
    draining = asyncio.create_task(drained.wait())
    step = asyncio.create_task(_next_or_none(changes))
    try:
        with drain.notify_on_drain(drained.set):
            while not draining.done():
                await asyncio.wait({step, draining}, timeout=progress_s, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    if not draining.done():
                        yield mark()
                    continue
                if (change := step.result()) is None:
                    return
                async for response in encode(change):
                    yield response
                step = asyncio.create_task(_next_or_none(changes))
        raise drain.shutdown_error()
    finally:
        step.cancel()
        draining.cancel()
        await asyncio.gather(step, draining, return_exceptions=True)
        await changes.aclose()


async def _next_or_none(changes: AsyncGenerator[C, None]) -> C | None:
    return await anext(changes, None)


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
