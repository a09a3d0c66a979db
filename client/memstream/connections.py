"""The connections of a client: one channel for its stubs, over as many HTTP/2 connections as its calls need.

A server takes a limited number of calls and streams on a connection, and gRPC holds back what exceeds it, without an
error, until the deadline. So a call goes to the first connection that has room, and to another one before that limit is
reached. A connection without calls is closed if the others have room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio

CALLS_MAX = 96
"""Calls on a connection unless the server allows fewer: HTTP/2 recommends that every hop allows at least 100."""


class _Connection:
    """A channel with a connection of its own."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self.methods: dict[str, Any] = {}
        """The channel's callables by path."""


class Connections:
    """What the generated stubs use of grpc.aio.Channel. Use from one event loop."""

    def __init__(self, make: Callable[[], grpc.aio.Channel]) -> None:
        """`make` returns a channel that shares its connection with no other."""
        self._make = make
        self._room = CALLS_MAX
        self._open = [_Connection(make())]
        self._closing: set[asyncio.Task[None]] = set()

    def allow_calls(self, limit: int) -> None:
        """The server allows this many calls on a connection; 0: it does not say."""
        if limit:
            self._room = max(1, min(CALLS_MAX, limit - limit // 8))  # the server may count a call a little longer

    async def close(self) -> None:
        """Ends every call."""
        await asyncio.gather(*(each.channel.close() for each in self._open), *self._closing)

    def unary_unary(self, path: str, *given: Any, **named: Any) -> Any:
        """See grpc.aio.Channel, as below."""
        return self._spread("unary_unary", path, given, named)

    def unary_stream(self, path: str, *given: Any, **named: Any) -> Any:
        return self._spread("unary_stream", path, given, named)

    def stream_unary(self, path: str, *given: Any, **named: Any) -> Any:
        return self._spread("stream_unary", path, given, named)

    def stream_stream(self, path: str, *given: Any, **named: Any) -> Any:
        return self._spread("stream_stream", path, given, named)

    def _spread(self, kind: str, path: str, given: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        def start_call(*arguments: Any, **options: Any) -> Any:
            connection = self._choose()
            method = connection.methods.get(path)
            if method is None:
                method = connection.methods[path] = getattr(connection.channel, kind)(path, *given, **named)
            call = method(*arguments, **options)
            connection.calls += 1
            call.add_done_callback(lambda _call: self._release(connection))
            return call

        return start_call

    def _choose(self) -> _Connection:
        for connection in self._open:
            if connection.calls < self._room:
                return connection
        self._open.append(_Connection(self._make()))
        return self._open[-1]

    def _release(self, connection: _Connection) -> None:
        connection.calls -= 1
        if connection.calls or connection not in self._open:
            return
        if any(2 * other.calls <= self._room for other in self._open if other is not connection):
            self._open.remove(connection)
            closing = asyncio.ensure_future(connection.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
