"""The background event loop of a process, which all blocking clients share."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from memstream.errors import StreamClosed

T = TypeVar("T")


class LoopThread:
    """An event loop on a daemon thread, started on first use."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._pid = os.getpid()
        # Registered early: handlers that the program registers later run first, and may still use the SDK.
        atexit.register(self._stop_loop)

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts `work` on the loop. Raises StreamClosed while the program exits, when it would never run."""
        if self._ended:
            work.close()
            raise StreamClosed("the program is ending, and with it the blocking SDK's event loop")
        if self._loop is not None and self._pid != os.getpid():  # its thread is in the parent: nothing would run
            work.close()
            raise StreamClosed("this process was forked from one that uses memstream.sync: use it in one of them alone")
        return asyncio.run_coroutine_threadsafe(work, self._running_loop())

    def is_current(self) -> bool:
        """Whether the caller runs on the loop."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the loop and waits for it; interrupting the wait cancels it."""
        if self.is_current():
            work.close()
            raise StreamClosed("the blocking SDK cannot be called from its own event loop")
        future = self.submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise StreamClosed("the client was closed during the call") from None
        except BaseException:  # raised by the work, which has then ended, or by a signal handler
            future.cancel()
            raise

    def make(self, make: Callable[[], T]) -> T:
        """Returns what `make` returns on the loop, to which the object belongs."""

        async def call() -> T:
            return make()

        return self.run(call())

    def iterate_from(self, make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
        """Yields the items of the asynchronous iterator that `make` returns on the loop."""
        return self.iterate(self.make(make))

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Yields the items of an asynchronous iterator that runs on the loop."""
        while True:
            found = self.run(_next_items(items))
            if not found:
                return
            yield found[0]

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="memstream", daemon=True)
                self._thread.start()
            return self._loop

    def _stop_loop(self) -> None:
        # Stop before the interpreter unloads modules, which makes a running loop print errors.
        self._ended = True
        if self._pid == os.getpid() and self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)


async def _next_items(items: AsyncIterator[T]) -> list[T]:
    try:
        return [await anext(items)]
    except StopAsyncIteration:
        return []


LOOP = LoopThread()
