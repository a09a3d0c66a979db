"""A stream of a server's answers as an iterator, across reconnections."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc.aio
from google.protobuf.message import Message as WireMessage

from memstream.backoff import Backoff, repeat_until_done
from memstream.channel import Link, read_message
from memstream.errors import MemstreamError, StreamClosed

R = TypeVar("R")
A = TypeVar("A", bound=WireMessage)
_AHEAD_MAX = 1000


class Following(AsyncIterator[R], Generic[R, A]):
    """What answers bring, once each, across reconnections. Waiting for the next one may be cancelled and resumed.

    A subclass opens the call, and notes what it has seen so that the next connection continues there.
    """

    def __init__(self, link: Link) -> None:
        self.connections = 0
        self._link = link
        self._ahead: deque[R] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._error: MemstreamError | None = None
        self._task: asyncio.Task[None] | None = None

    @abstractmethod
    def _open_call(self) -> grpc.aio.UnaryStreamCall[Any, A]:
        """A call that continues after what was taken."""

    @abstractmethod
    def _take_answer(self, answer: A) -> Iterable[R]:
        """What the answer brings. Sets `_ended` with the last one."""

    @abstractmethod
    def _note_returned(self, item: R) -> None:
        """The iterator returns this item."""

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> R:
        self._start()
        self._link.check_loop()
        while not self._ahead:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        item = self._ahead.popleft()
        self._room.set()
        self._note_returned(item)
        return item

    async def aclose(self) -> None:
        """Ends the watch; further iteration raises StreamClosed."""
        self._ahead.clear()
        self._end(StreamClosed("the watch is closed"))  # first: the awaits below may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        if self._task is None and self._error is None:
            self._link.check_open()
            self._task = asyncio.create_task(self._run_connections(), name=f"memstream {type(self).__name__}")

    async def _run_connections(self) -> None:
        backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await repeat_until_done(lambda: self._run_connection(backoff), backoff, self._link.revive)
        except MemstreamError as error:
            self._end(error)
        except asyncio.CancelledError:
            self._end(StreamClosed("the event loop of the watch has ended"))
            raise

    def _end(self, error: MemstreamError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    async def _run_connection(self, backoff: Backoff) -> None:
        """Runs one connection; returns with the last answer."""
        call = self._open_call()
        self.connections += 1
        try:
            while not self._ended:
                answer = await read_message(call)
                backoff.mark_opened()
                backoff.mark_progress()
                self._ahead.extend(self._take_answer(answer))
                self._changed.set()
                while len(self._ahead) > _AHEAD_MAX:
                    self._room.clear()
                    await self._room.wait()
        finally:
            call.cancel()
