"""The watch of a conversation: its messages as they arrive, across reconnections."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeAlias

import grpc.aio

from memstream.backoff import Backoff, repeat_until_done
from memstream.channel import Link, MemoryPath, read_message
from memstream.conversation_values import Message, message_from_wire
from memstream.errors import MemstreamError, StreamClosed
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import duration_to_wire

_Call: TypeAlias = grpc.aio.UnaryStreamCall[pb.WatchMessagesRequest, pb.WatchMessagesResponse]
_AHEAD_MAX = 1000


class ConversationWatch(AsyncIterator[Message]):
    """New messages, once each, across reconnections; iteration ends when the conversation is completed.

    `number` is the number of the last message returned: pass it to a later watch to resume. Waiting for the next
    message may be cancelled and resumed.
    """

    def __init__(
        self, link: Link, conversation: MemoryPath, after_number: int, progress_interval: timedelta | None
    ) -> None:
        self.number = after_number
        self.connections = 0
        self._link = link
        self._request = pb.WatchMessagesRequest(
            namespace=conversation.namespace,
            conversation=conversation.name,
            after_number=after_number,
            progress_interval=None if progress_interval is None else duration_to_wire(progress_interval),
        )
        self._ahead: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._error: MemstreamError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._start_watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Message:
        self._start_watch()
        self._link.check_loop()
        while not self._ahead:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._ahead.popleft()
        self._room.set()
        self.number = message.number
        return message

    async def aclose(self) -> None:
        """Ends the watch; further iteration raises StreamClosed."""
        self._ahead.clear()
        self._end_watch(StreamClosed("the watch is closed"))  # first: the awaits below may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start_watch(self) -> None:
        if self._task is None and self._error is None:
            self._link.check_open()
            self._task = asyncio.create_task(self._run_connections(), name="memstream watch of messages")

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
        """Runs one connection; returns when the conversation is completed."""
        call: _Call = self._link.conversations.WatchMessages(self._request, metadata=self._link.metadata())
        self.connections += 1
        try:
            while not self._ended:
                answer = await read_message(call)
                backoff.mark_opened()
                backoff.mark_progress()
                self._ahead.extend(message_from_wire(wire) for wire in answer.messages)
                if answer.messages:
                    self._request.after_number = answer.messages[-1].number
                self._ended = answer.completed
                self._changed.set()
                while len(self._ahead) > _AHEAD_MAX:
                    self._room.clear()
                    await self._room.wait()
        finally:
            call.cancel()
