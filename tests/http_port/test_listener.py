"""The listener in this process: how long a connection may wait, and how its answers leave."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from memstream_server.rpc.connections import ConnectionBounds
from memstream_server.rpc.http.listener import HttpListener, LateApplication
from memstream_server.rpc.http.port import Asgi, Receive, Scope, Send

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
REQUEST = HEAD + b"content-length: 0\r\n\r\n"
ANSWER_END = b"\r\n\r\nok"
OPENING_MAX_S = 0.3


async def answer_at_once(_scope: Scope, _receive: Receive, send: Send) -> None:
    """An application that does not read the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def connected(
    application: Asgi = answer_at_once, opening_max_s: float = OPENING_MAX_S
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client of a new listener."""
    listener = HttpListener(application, opening_max_s=opening_max_s, connections=ConnectionBounds(10, 10))
    host, _, port = (await listener.start("127.0.0.1", 0)).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await listener.stop(0)


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
    """Sends a byte now and then until the server closes; returns what it said."""
    read = asyncio.create_task(reader.read())
    for place in range(len(data)):
        if (await asyncio.wait({read}, timeout=OPENING_MAX_S / 4))[0]:
            break
        writer.write(data[place : place + 1])
    try:
        return await read
    except ConnectionResetError:  # it closed with bytes unread
        return b""


async def test_slow_second_head_is_bounded() -> None:
    async with asyncio.timeout(30), connected() as (reader, writer):
        writer.write(REQUEST)
        await reader.readuntil(ANSWER_END)
        assert await drip(reader, writer, HEAD + b"x: y\r\n" * 100) == b""


async def test_slow_body_of_an_answered_call_is_bounded() -> None:
    async with asyncio.timeout(30), connected() as (reader, writer):
        writer.write(HEAD + b"content-length: 1000\r\n\r\n")
        await reader.readuntil(ANSWER_END)
        assert await drip(reader, writer, b"x" * 999) == b""


async def test_quiet_connection_outlives_the_bound_of_a_head() -> None:
    async with asyncio.timeout(30), connected() as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            await reader.readuntil(ANSWER_END)
            await asyncio.sleep(2 * OPENING_MAX_S)
        assert not reader.at_eof()


async def answer_body(_scope: Scope, receive: Receive, send: Send) -> None:
    """An application that reads the body, and answers even if it breaks off."""
    while (await receive()).get("more_body", False):
        pass
    await answer_at_once(_scope, receive, send)


@pytest.mark.parametrize("application", [answer_body, answer_at_once], ids=["before the answer", "after the answer"])
async def test_broken_chunk_ends_the_connection(application: Asgi, caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(30), connected(application, opening_max_s=30) as (reader, writer):
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n")
        if application is answer_at_once:
            await reader.readuntil(ANSWER_END)
        else:
            await asyncio.sleep(0.05)
        writer.write(b"zz\r\n")
        left = await reader.read()
    assert left.count(b"HTTP/1.1") == (application is answer_body)
    assert left.startswith(b"HTTP/1.1 400 ") == (application is answer_body)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with asyncio.timeout(30), connected(opening_max_s=30) as (reader, writer):
        writer.write(REQUEST * 20 + HEAD)
        for _ in range(20):
            await reader.readuntil(ANSWER_END)
        writer.write(b"content-length: 0\r\n\r\n")
        await reader.readuntil(ANSWER_END)


async def test_answers_do_not_wait_for_an_acknowledgement() -> None:
    """asyncio sets TCP_NODELAY on the sockets of some listeners only."""
    seen: list[int] = []

    async def read_option(_scope: Scope, _receive: Receive, send: Send) -> None:
        for connection in server.server_state.connections:
            used: socket.socket = connection.transport.get_extra_info("socket")
            seen.append(used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await answer_at_once(_scope, _receive, send)

    listener = HttpListener(read_option, opening_max_s=30, connections=ConnectionBounds(10, 10))
    host, _, port = (await listener.start("127.0.0.1", 0)).rpartition(":")
    server = listener._server
    assert server is not None
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(REQUEST)
    await reader.readuntil(ANSWER_END)
    writer.close()
    await listener.stop(0)
    assert seen == [1]


async def test_first_requests_build_the_application_once() -> None:
    built: list[str] = []
    may_build = threading.Event()

    def build() -> Asgi:
        assert may_build.wait(30)
        built.append(threading.current_thread().name)
        return answer_at_once

    async def call(sent: list[MutableMapping[str, Any]]) -> None:
        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await application({"type": "http"}, receive, send)

    application = LateApplication(build)
    answers: list[list[MutableMapping[str, Any]]] = [[], [], []]
    async with asyncio.timeout(30):
        first, second, third = [asyncio.create_task(call(sent)) for sent in answers]
        await asyncio.sleep(0)
        first.cancel()  # its client left; the others still wait for the application
        await asyncio.wait({first})
        may_build.set()
        await asyncio.gather(second, third)
    assert [len(sent) for sent in answers] == [0, 2, 2]
    assert len(built) == 1
    assert built[0] != threading.current_thread().name


async def test_application_that_failed_to_build_is_built_again() -> None:
    """A full disk or file table at the first request does not close the port for good."""
    tried: list[int] = []

    def build() -> Asgi:
        tried.append(1)
        if len(tried) == 1:
            raise OSError("too many open files")
        return answer_at_once

    application = LateApplication(build)
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    with pytest.raises(OSError, match="too many open files"):
        await application({"type": "http"}, receive, send)
    assert sent == []
    await application({"type": "http"}, receive, send)
    assert len(sent) == len(tried) == 2
