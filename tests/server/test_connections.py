"""Connections without a credential leave room for other clients, for health checks and for the journal's files."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import memstream
from memstream_server.rpc.connections import _LOOK_S, source_of
from tests.server.conftest import MakeServer, started
from tests.support.journals import environment
from tests.support.metrics import scrape_metrics
from tests.support.server import free_address
from tests.support.waiting import until

BOUNDS = {"port_connections_max": 40, "address_connections_max": 8}
HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def connected(address: str, count: int, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Sockets that send nothing."""
    host, _, port = address.rpartition(":")
    opened = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection((host, int(port)), 20, (source, 0)))
            opened[-1].setblocking(False)
        yield opened
    finally:
        for each in opened:
            each.close()


def count_open(opened: list[socket.socket]) -> int:
    """Those that the server has not closed."""
    return sum(map(is_open, opened))


def is_open(one: socket.socket) -> bool:
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def ask_health(address: str, source: str = "127.0.0.1") -> bytes:
    """The status line of /healthz."""
    with connected(address, 1, source) as (one,):
        one.setblocking(True)
        one.settimeout(20)
        one.sendall(HEAD)
        return one.recv(1_000).partition(b"\r\n")[0]


async def served(address: str) -> None:
    """Whether a new client is served: a memory, an observation, a recall."""
    async with memstream.connect(address) as client:
        memory = await client.create_memory(f"others/m{time.time_ns()}")
        await memory.observe_batch(["the code is 4711"])
        assert (await memory.recall_once("code"))[0].fragment.content == "the code is 4711"


async def test_grpc_port_keeps_few_connections_of_an_address(make_server: MakeServer) -> None:
    server = await started(make_server(**BOUNDS))

    async def few() -> bool:
        return count_open(idle) == BOUNDS["address_connections_max"]

    with connected(server.address, 30) as idle, connected(server.address, 1, "127.0.0.2") as other:
        await until(few)
        assert is_open(other[0])
        await served(server.address)


async def test_grpc_port_closes_what_exceeds_its_bound(make_server: MakeServer) -> None:
    server = await started(make_server(**BOUNDS))
    opened: list[socket.socket] = []

    async def at_most() -> bool:
        return count_open(opened) <= BOUNDS["port_connections_max"]

    with ExitStack() as stack:
        for number in range(1, 9):
            opened += stack.enter_context(connected(server.address, 8, f"127.0.1.{number}"))
        await until(at_most)
        await asyncio.sleep(2 * _LOOK_S)  # no address has too many
        assert count_open(opened) == BOUNDS["port_connections_max"]
    await served(server.address)


async def test_http_port_ends_the_longest_idle_for_a_new_one(make_server: MakeServer) -> None:
    http, metrics = free_address(), free_address()
    server = await started(make_server(**BOUNDS, http_listen=http, metrics_listen=metrics))
    async with memstream.connect(server.address) as client:
        await client.create_memory("others/joy")
    with connected(http, 1) as busy:
        watch = b"\0" + len(body := b'{"namespace":"others","memory":"joy"}').to_bytes(4) + body
        head = "POST /memstream.v1.StreamService/Watch HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/connect+json\r\nContent-Length: {len(watch)}\r\n\r\n"
        busy[0].sendall(head.encode() + watch)
        await until(lambda: watched(metrics))
        with connected(http, 60) as idle:

            async def few() -> bool:
                return count_open(idle) <= BOUNDS["address_connections_max"] - 1

            await until(few)
            assert all(map(is_open, idle[-5:]))
            assert await asyncio.to_thread(ask_health, http) == b"HTTP/1.1 200 OK"
            assert await asyncio.to_thread(ask_health, http, "127.0.0.2") == b"HTTP/1.1 200 OK"
            assert is_open(busy[0])
            await served(server.address)


async def watched(metrics: str) -> bool:
    seen = await asyncio.to_thread(scrape_metrics, metrics)
    return seen.get('memstream_streams{rpc="Watch"}') == 1


@pytest.fixture
async def cramped(tmp_path: Path) -> AsyncIterator[tuple[str, str, Path]]:
    """A server that may have 256 descriptors, and raise that to 1,024: its two addresses and its log."""
    grpc, http, log = free_address(), free_address(), tmp_path / "log"
    command = [sys.executable, "-m", "memstream_server", "serve", "--data", str(tmp_path / "data")]
    command += ["--listen", grpc, "--http-listen", http, "--port-file", str(tmp_path / "port")]
    place = environment(["serve", "--data", str(tmp_path / "data")])
    limited = ["bash", "-c", 'ulimit -Sn 256; ulimit -Hn 1024; exec "$@"', "bash", *command]
    with log.open("wb") as output:
        process = await asyncio.to_thread(
            subprocess.Popen, limited, env=os.environ | place, stdout=output, stderr=output
        )

    async def ready() -> bool:
        assert process.poll() is None, log.read_text()
        return (tmp_path / "port").exists()

    try:
        await until(ready)
        yield grpc, http, log
    finally:
        process.terminate()
        assert process.wait(60) == 0
        assert "Traceback" not in log.read_text()


async def test_idle_sockets_leave_room_for_others(cramped: tuple[str, str, Path]) -> None:
    """1,500 sockets of nobody on each port, at 1,024 open files: a new client, /healthz and the journal work."""
    grpc, http, log = cramped
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[1], own[1]))
    assert "limit=1024" in log.read_text()
    with connected(grpc, 1_500), connected(http, 1_500):
        for _ in range(3):
            assert await asyncio.to_thread(ask_health, http) == b"HTTP/1.1 200 OK"
            await served(grpc)
    assert "descriptor limit" not in log.read_text()
    assert "out of system resource" not in log.read_text()


def test_address_is_a_network_of_64_bits_in_ipv6() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::2:3%eth0") == "2001:db8::/64"
    assert source_of("2001:db8:0:1::1") == "2001:db8:0:1::/64"
    assert source_of("::ffff:192.0.2.1") == source_of("192.0.2.1") == "192.0.2.1"
    assert source_of("testclient") == "testclient"
