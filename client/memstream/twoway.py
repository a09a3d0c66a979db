"""The base of Observe and Recall: a bidirectional stream that reconnects until it has ended.

Rule 1: one task owns the call, reads it and opens the next one. A second task, the writer, lives as long as a
connection and takes requests from `_next_request` one by one, so that a broken connection loses none.
Rule 2: no timeout cancels a read, because that would end the call: callers wait for `_changed` instead.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio

from memstream.backoff import Backoff, repeat_until_done
from memstream.channel import Link, MemoryPath
from memstream.errors import MemstreamError, StreamClosed
from memstream.status import translate_error

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
        """Wakes the writer."""
        self._error: MemstreamError | None = None
        self._backoff: Backoff | None = None
        self._closing = self._closed = self._draining = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StreamClosed("a stream can be opened only once; create another one from the memory")
        self._link.check_open()
        self._task = asyncio.create_task(self._run_connections(), name=f"memstream {type(self).__name__} {self.memory}")
        try:
            await self._wait_until(lambda: self.connections > 0)
        except BaseException:
            await self._abandon_stream()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.close()
        finally:
            await self._abandon_stream()

    @abstractmethod
    async def close(self) -> None:
        """Ends the stream gracefully."""

    @property
    def waiting(self) -> str:
        """Why nothing moves now: the server's reason for a pause, or the error after which the stream reconnects.

        Empty while it moves."""
        error = None if self._backoff is None else self._backoff.error
        return "" if error is None else str(error)

    # ---- the steps of a connection

    @abstractmethod
    def _start_call(self) -> grpc.aio.StreamStreamCall[Request, Response]:
        """A new call."""

    @abstractmethod
    async def _open_connection(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        """Writes the first message, reads the answer and resets the state of the connection."""

    @abstractmethod
    async def _read_responses(self, call: grpc.aio.StreamStreamCall[Request, Response], backoff: Backoff) -> None:
        """Reads responses until the stream ends gracefully; raises the error that broke it."""

    @abstractmethod
    def _next_request(self) -> Request | None:
        """The next message to send; None when there is nothing until `_work` is set."""

    @abstractmethod
    def _is_last(self, request: Request) -> bool:
        """Whether it is the last message of the stream."""

    async def _may_send(self) -> None:
        """Waits while the server has paused the stream."""

    def _on_disconnected(self) -> None:
        """Called when the connection has ended."""

    def _on_failed(self, error: MemstreamError) -> None:
        """Called when the stream ends: every pending request fails with `error`."""

    # ---- lifecycle

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

    async def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StreamClosed("the stream is closed")
            await self._changed.wait()

    def _notify_waiters(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run_connections(self) -> None:
        backoff = self._backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await repeat_until_done(lambda: self._run_connection(backoff), backoff, self._link.revive)
        except MemstreamError as error:
            self._fail_stream(error)
        except asyncio.CancelledError:
            self._fail_stream(StreamClosed("the event loop of the stream has ended"))
            raise

    def _fail_stream(self, error: MemstreamError) -> None:
        if self._error is None and not self._closed:
            self._error = error
            self._on_failed(error)
        self._notify_waiters()

    async def _abandon_stream(self) -> None:
        self._fail_stream(StreamClosed("the stream was abandoned"))  # first: the awaits below may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run_connection(self, backoff: Backoff) -> None:
        if self._error is not None:
            raise self._error
        with self._link.traced(type(self).__name__.removesuffix("Stream")):
            call = self._start_call()
            writer: asyncio.Task[None] | None = None
            try:
                await self._open_connection(call)
                self.connections += 1
                self._notify_waiters()
                backoff.mark_opened()
                writer = asyncio.create_task(self._write_requests(call))
                await self._read_responses(call, backoff)
            finally:
                call.cancel()  # dropping the reference would leave the server's handler running
                self._on_disconnected()
                self._notify_waiters()
                if writer is not None:
                    writer.cancel()
                    await asyncio.gather(writer, return_exceptions=True)

    async def _write_requests(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
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
                        await call.done_writing()  # else the server waits briefly for messages that it would reject
                        return
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader reports the status
        except Exception as defect:
            self._fail_stream(translate_error(defect))
            call.cancel()
