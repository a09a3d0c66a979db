"""The Watch stream: every event of a memory after a cursor, over any number of connections, once each."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import timedelta
from types import TracebackType
from typing import Literal, Self, TypeAlias

import grpc.aio

from memstream.argument_types import Several
from memstream.backoff import Backoff, repeat_until_done
from memstream.channel import Link, MemoryPath, read_message
from memstream.codec import cursor_from_wire, cursor_to_wire, event_from_wire, event_types_to_wire, fragment_from_wire
from memstream.errors import MemstreamError, ShuttingDown, StreamClosed
from memstream.resources import Cursor, Event
from memstream.v1 import memory_service_pb2, stream_service_pb2
from memstream.values import EventType
from memstream.wiretypes import duration_to_wire

_Call: TypeAlias = grpc.aio.UnaryStreamCall[stream_service_pb2.WatchRequest, stream_service_pb2.WatchResponse]
Start: TypeAlias = Cursor | Literal["now", "beginning"]
"""The start of a watch."""
_AHEAD_MAX = 1000


class Watch:
    """A memory's events, created by `Memory.watch`. Iterate over it; leaving `async with`, or `aclose`, ends it.

    `cursor` is the position for a later watch: after the last event returned or the last progress mark. Waiting for the
    next event may be cancelled (or time out) and resumed without loss.
    """

    def __init__(
        self,
        link: Link,
        memory: MemoryPath,
        start: Start,
        types: Several[EventType],
        include_fragments: bool,
        progress_interval: timedelta | None,
    ) -> None:
        self.memory = memory
        self.cursor: Cursor | None = start if isinstance(start, Cursor) else None
        self.connections = 0
        self._link = link
        self._start = start
        self._request = stream_service_pb2.WatchRequest(
            namespace=memory.namespace,
            memory=memory.name,
            types=event_types_to_wire(types),
            progress_interval=None if progress_interval is None else duration_to_wire(progress_interval),
            include_fragments=include_fragments,
        )
        # Events and (as a Cursor) progress marks, read ahead of the caller up to _AHEAD_MAX.
        self._ahead: deque[Event | Cursor] = deque()
        self._seen: Cursor | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._error: MemstreamError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._start_watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event. Raises CursorCompacted, CursorVoid or MemoryNotFound if the watch cannot continue."""
        await self._start_watch()
        self._link.check_loop()
        while True:
            while self._ahead:
                item = self._ahead.popleft()
                self._room.set()
                if isinstance(item, Event):
                    self.cursor = item.cursor
                    return item
                self.cursor = item
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    async def aclose(self) -> None:
        """Ends the watch; further iteration raises StreamClosed."""
        self._ahead.clear()
        self._end_watch(StreamClosed("the watch is closed"))  # first: the awaits below may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _start_watch(self) -> None:
        if self._is_fresh():
            # Resolve "now" once: the server's "now" would move with each reconnect.
            first = self.cursor or await self._first_cursor()
            if self._is_fresh():  # no other task has started or ended it during the await
                self.cursor = self._seen = first
                self._task = asyncio.create_task(self._run_connections(), name=f"memstream watch {self.memory}")

    def _is_fresh(self) -> bool:
        return self._task is None and self._error is None

    async def _first_cursor(self) -> Cursor:
        answer = await self._link.call(
            self._link.memories.GetMemory,
            memory_service_pb2.GetMemoryRequest(namespace=self.memory.namespace, memory=self.memory.name),
            self.memory,
        )
        return Cursor(answer.memory.uid, 0 if self._start == "beginning" else answer.memory.revision)

    async def _run_connections(self) -> None:
        backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await repeat_until_done(lambda: self._run_connection(backoff), backoff, self._link.revive)
        except MemstreamError as error:
            self._end_watch(error)
        except asyncio.CancelledError:
            self._end_watch(StreamClosed("the event loop of the watch has ended"))
            raise

    def _end_watch(self, error: MemstreamError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    async def _run_connection(self, backoff: Backoff) -> None:
        request = stream_service_pb2.WatchRequest()
        request.CopyFrom(self._request)
        if self._seen is not None:
            request.cursor.CopyFrom(cursor_to_wire(self._seen))
        with self._link.traced("Watch"):
            call: _Call = self._link.streams.Watch(request, metadata=self._link.metadata(self.memory))
            self.connections += 1
            try:
                while True:
                    self._handle_response(await read_message(call))
                    backoff.mark_opened()
                    backoff.mark_progress()
                    while len(self._ahead) > _AHEAD_MAX:
                        self._room.clear()
                        await self._room.wait()
            finally:
                call.cancel()

    def _handle_response(self, response: stream_service_pb2.WatchResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "going_away":
            raise ShuttingDown(response.going_away.description or "the server is going away", reason="SHUTTING_DOWN")
        if kind == "progress":
            self._append_item(cursor_from_wire(response.progress.cursor))
        elif kind == "events":
            fragments = {wire.id: fragment_from_wire(wire) for wire in response.events.fragments}
            for wire in response.events.events:
                self._append_item(event_from_wire(wire, fragments.get(wire.fragment_id)))
        self._changed.set()

    def _append_item(self, item: Event | Cursor) -> None:
        self._ahead.append(item)
        self._seen = item.cursor if isinstance(item, Event) else item
