"""Single flight: concurrent callers share one run of a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from memstream_server.ports.models import ModelUnavailable

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """One run at a time: callers during a run share its result or error. Use from one event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._run: asyncio.Task[T] | None = None

    async def join_run(self) -> T:
        """The result of the current run, or of a new one. The cancellation of one caller does not affect the others."""
        if self._run is None:
            self._run = asyncio.create_task(self._run_work())
            self._run.add_done_callback(self._end_run)
        run = self._run
        await asyncio.wait({run})
        if run.cancelled():
            raise ModelUnavailable("the server is stopping")
        return run.result()

    async def close(self) -> None:
        """Cancel the current run."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _run_work(self) -> T:
        return await self._work()

    def _end_run(self, run: asyncio.Task[T]) -> None:
        self._run = None
        if not run.cancelled():
            run.exception()  # mark as retrieved: all callers may have been cancelled
