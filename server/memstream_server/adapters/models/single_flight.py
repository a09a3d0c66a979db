"""Work that several callers need at the same time and that is done once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from memstream_server.ports.models import ModelUnavailable

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """One run at a time: whoever asks during a run gets its outcome, an error too. Use from one event loop."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._run: asyncio.Task[T] | None = None

    async def outcome(self) -> T:
        """Of the run under way, or of a new one. A caller that is cancelled takes nothing from the others."""
        if self._run is None:
            self._run = asyncio.create_task(self._do())
            self._run.add_done_callback(self._end)
        run = self._run
        await asyncio.wait({run})
        if run.cancelled():
            raise ModelUnavailable("the server is stopping")
        return run.result()

    async def close(self) -> None:
        """Cancel the run under way."""
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _do(self) -> T:
        return await self._work()

    def _end(self, run: asyncio.Task[T]) -> None:
        self._run = None
        if not run.cancelled():
            run.exception()  # seen, though all who asked may have been cancelled
