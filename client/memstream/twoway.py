"""What Observe and Recall have in common: a stream both ways that is opened again and again until it has ended.

Rule 1: one task owns the call, reads it and opens the next one; a second one, the writer, lives as long as a connection
and asks `_next_request` for what it sends, so that a dead connection can have eaten nothing.
Rule 2: no read is ever cancelled by a timeout, which would end the call: whoever waits, waits for `_changed`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio

from memstream.backoff import Backoff, persist
from memstream.channel import Link, MemoryPath
from memstream.errors import MemstreamError, StreamClosed
from memstream.status import translate

Request = TypeVar("Request")
Response = TypeVar("Response")


class TwoWayStream(ABC, Generic[Request, Response]):
    """Opened by `async with`: leaving it normally closes the stream, leaving it by an exception abandons it."""

    def __init__(self, link: Link, memory: MemoryPath) -> None:
        self.memory = memory
        self.connections = 0
        self._link = link
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._work = asyncio.Event()
        """Set when the writer may have something to send."""
        self._error: MemstreamError | None = None
        self._closing = self._closed = self._draining = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StreamClosed("a stream is opened once; ask the memory for another one")
        self._link.check_open()
        self._task = asyncio.create_task(self._run(), name=f"memstream {type(self).__name__} {self.memory}")
        try:
            await self._until(lambda: self.connections > 0)
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.close()
        finally:
            await self._abandon()

    @abstractmethod
    async def close(self) -> None:
        """Ends the stream in order."""

    # ---- what a connection is made of

    @abstractmethod
    def _call(self) -> grpc.aio.StreamStreamCall[Request, Response]:
        """A new call."""

    @abstractmethod
    async def _open(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        """Writes the first message, reads the answer, begins anew."""

    @abstractmethod
    async def _read(self, call: grpc.aio.StreamStreamCall[Request, Response], backoff: Backoff) -> None:
        """Takes answers until the stream has ended in order; raises what broke it."""

    @abstractmethod
    def _next_request(self) -> Request | None:
        """What to send next; None when there is nothing until `_work` is set."""

    @abstractmethod
    def _is_last(self, request: Request) -> bool:
        """Whether nothing may follow it."""

    async def _may_send(self) -> None:
        """Waits while the server has asked for a pause."""

    def _disconnected(self) -> None:
        """The connection is gone."""

    def _failed(self, error: MemstreamError) -> None:
        """The stream ends with this error: whoever waits for an answer is told."""

    # ---- how it lives

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if not self.connections:
            raise StreamClosed("the stream is not open: use `async with`")
        self._link.check_loop()

    def _check_usable(self) -> None:
        self._check_open()
        if self._closing:
            raise StreamClosed("the stream is closed")

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StreamClosed("the stream is closed")
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await persist(lambda: self._connection(backoff), backoff)
        except MemstreamError as error:
            self._fail(error)
        except asyncio.CancelledError:
            self._fail(StreamClosed("the event loop of the stream has ended"))
            raise

    def _fail(self, error: MemstreamError) -> None:
        if self._error is None and not self._closed:
            self._error = error
            self._failed(error)
        self._notify()

    async def _abandon(self) -> None:
        self._fail(StreamClosed("the stream was abandoned"))  # before anything that may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _connection(self, backoff: Backoff) -> None:
        if self._error is not None:
            raise self._error
        with self._link.traced(type(self).__name__.removesuffix("Stream")):
            call = self._call()
            writer: asyncio.Task[None] | None = None
            try:
                await self._open(call)
                self.connections += 1
                self._notify()
                backoff.opened()
                writer = asyncio.create_task(self._write(call))
                await self._read(call, backoff)
            finally:
                call.cancel()  # dropping the reference would leave the server's handler open
                self._disconnected()
                self._notify()
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        try:
            while True:
                request = self._next_request()
                if request is None:
                    await self._work.wait()
                    self._work.clear()
                else:
                    await self._may_send()
                    await call.write(request)
                    if self._is_last(request):
                        await call.done_writing()  # else the server waits a moment for what it would refuse
                        return
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader gets the status
        except Exception as defect:
            self._fail(translate(defect))
            call.cancel()
