"""The one background event loop of a process, on which every client of the facade lives."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

from memstream.errors import StreamClosed

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread, started when first used."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        atexit.register(self._stop)  # already now: what a program registers later is run before, and may still call

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `work` there. Raises StreamClosed at the program's end, when nothing would be done with it."""
        if self._ended:
            work.close()
            raise StreamClosed("the program is ending, and with it the blocking SDK's event loop")
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` there and waits for it; interrupting the wait cancels it."""
        if threading.current_thread() is self._thread:
            work.close()
            raise StreamClosed("the blocking SDK cannot be called from its own event loop")
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise StreamClosed("the client was closed during the call") from None
        except BaseException:  # of the work, which is over then, or of a signal's handler
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Hands out what `items` yields there."""
        while True:
            found = self.run(_next(items))
            if not found:
                return
            yield found[0]

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="memstream", daemon=True)
                self._thread.start()
            return self._loop

    def _stop(self) -> None:
        # Before the interpreter takes its modules apart, which a running loop would notice noisily.
        self._ended = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)


async def _next(items: AsyncIterator[T]) -> list[T]:
    try:
        return [await anext(items)]
    except StopAsyncIteration:
        return []


LOOP = LoopThread()
