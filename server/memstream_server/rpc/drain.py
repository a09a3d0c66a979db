"""Draining: notifies open streams that the server shuts down, and waits until they have ended.

Streams of memories use `Drain.memories`, which is replaced whenever the server loses its lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memstream.v1 import stream_service_pb2 as pb
from memstream_server.engine.errors import ShuttingDown
from memstream_server.rpc.wire.scalars import duration_message


class Drain:
    """One per server. `begin` is called once; it runs the callbacks of open streams."""

    def __init__(self, grace_s: float = 10.0, description: str = "the server is shutting down") -> None:
        self.grace_s = grace_s
        self.description = description
        self.begun = False
        self.open_streams = 0
        self._callbacks: set[Callable[[], None]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._memories: Drain | None = None

    @property
    def memories(self) -> Drain:
        """The Drain of streams of memories that open now: it begins when the server shuts down or loses its lease."""
        if self._memories is None:
            self._memories = Drain(self.grace_s, self.description)
            self._memories.begun = self.begun
        return self._memories

    def end_memory_streams(self, description: str) -> None:
        """Ends the streams of memories at once, because this server no longer owns them; new streams may open."""
        left, self._memories = self._memories, None
        if left is not None:
            left.grace_s, left.description = 0.0, description
            left.begin()

    def begin(self) -> None:
        """Notifies every open stream. Streams that open later are refused."""
        if self.begun:
            return
        self.begun = True
        for callback in tuple(self._callbacks):
            callback()
        if self._memories is not None:
            self._memories.begin()

    @contextmanager
    def count_stream(self) -> Iterator[None]:
        """Counts a stream as open."""
        if self.begun:
            raise self.shutdown_error()
        self.open_streams += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self.open_streams -= 1
            if self.open_streams == 0:
                self._none_open.set()

    @contextmanager
    def notify_on_drain(self, callback: Callable[[], None]) -> Iterator[None]:
        """Runs `callback` when draining begins; at once if it has."""
        self._callbacks.add(callback)
        try:
            if self.begun:
                callback()
            yield
        finally:
            self._callbacks.discard(callback)

    async def wait_finished(self, timeout_s: float) -> bool:
        """Waits until no stream is open; False if some are after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_open.wait()
        except TimeoutError:
            return False
        return True

    def going_away_message(self) -> pb.GoingAway:
        """The message to open streams."""
        return pb.GoingAway(grace=duration_message(self.grace_s), description=self.description)

    def shutdown_error(self) -> ShuttingDown:
        """The error of a stream that has not ended within the grace period."""
        return ShuttingDown(f"{self.description}: reconnect")
