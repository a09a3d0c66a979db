"""The event loop drains grpc.aio's wake-up socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from memstream_server.app import process
from memstream_server.app.process import EventLoop


class PollerCompletionQueue:
    """Events and their wake-up socket, like grpc.aio's class of that name: the reader takes all events and one byte."""

    def __init__(self) -> None:
        self.bell, self._ringer = socket.socketpair()
        self.bell.setblocking(False)
        self._events: list[int] = []
        self.taken: list[int] = []

    def happen(self, events: range) -> None:
        for event in events:
            self._events.append(event)
            self._ringer.send(b"1")

    def handle_events(self, _: asyncio.AbstractEventLoop) -> None:
        assert self.bell.recv(1) == b"1"
        self.taken += self._events
        self._events.clear()

    def silent(self) -> bool:
        try:
            self.bell.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self.bell.close()
        self._ringer.close()


async def _hears(queue: PollerCompletionQueue) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(queue.bell, queue.handle_events, loop)
    try:
        for events in (range(200), range(200, 201), range(201, 203)):
            queue.happen(events)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # read in this iteration
            assert queue.taken == list(range(events.stop))
            assert queue.silent()
    finally:
        loop.remove_reader(queue.bell)
        queue.close()


def test_one_turn_takes_all_events_and_all_bytes() -> None:
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_hears(PollerCompletionQueue()))


def test_asyncio_alone_leaves_bytes_behind() -> None:
    """Without this the other test would prove nothing."""
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner, pytest.raises(AssertionError):
        runner.run(_hears(PollerCompletionQueue()))


def test_the_poller_of_grpc_is_known_by_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    def is_poller(callback: Callable[..., Any]) -> bool:
        heard.append(known(callback))
        return heard[-1]

    async def serve() -> None:
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await server.stop(0)

    known = process._is_poller
    monkeypatch.setattr(process, "_is_poller", is_poller)
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve())
    assert heard.count(True) == 1, "grpc.aio signals its events differently now: see app/process.py"
