"""Servers as processes of their own, and clients connected to them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import memstream
from tests.support.journals import DATABASE
from tests.support.server import ServerProcess

MakeServer = Callable[..., ServerProcess]
QUICK: dict[str, str | float] = {
    "index_flush_interval_s": 600.0,
    "index_overlay_s": 0.0,
    "access_flush_interval_s": 0.1,
    "maintenance_interval_s": 1.0,
    "drain_grace_s": 2.0,
    "disk_free_min_bytes": 0,
}
"""Short intervals for periodic work, except that the vector index is written when the server stops. Milvus Lite, which
takes a second of CPU, does not start for memories this small."""
WITH_INDEX: dict[str, str | float] = QUICK | {"index_flush_interval_s": 0.1, "index_from_fragments": 0}
"""For a test that the vector index matters to (mark `with_index`)."""


def check_log(server: ServerProcess) -> None:
    """The server's output shows no defect: unexpected exceptions are logged with their traceback."""
    assert "Traceback" not in server.log(), server.log()


@contextmanager
def serve_tests(files: pytest.TempPathFactory, **settings: str | float) -> Iterator[ServerProcess]:
    """A server for several tests, each with memories of its own; it must stop in order at the end.

    A start takes 0.5 s of CPU. Start a server per test only if the test restarts it or needs an untouched one.
    """
    with ServerProcess(files.mktemp("shared") / "data").configure(**(QUICK | settings)) as server:
        yield server
        assert server.stop() == 0
    check_log(server)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that only call it; each test uses memories of its own."""
    with serve_tests(tmp_path_factory) as server:
        yield server


@pytest.fixture
async def client(shared: ServerProcess) -> AsyncIterator[memstream.Client]:
    async with memstream.connect(shared.address) as connected:
        yield connected


@pytest.fixture
def path() -> str:
    """A memory that no other test uses."""
    return f"t-{uuid.uuid4().hex[:12]}/joy"


@pytest.fixture
def make_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MakeServer]:
    """Creates servers that are not yet started, over `data` in the test's directory by default."""
    made: list[ServerProcess] = []
    if DATABASE and request.node.get_closest_marker("with_index") and "toolchain" not in request.node.keywords:
        pytest.skip("on PostgreSQL the index is a Milvus: tests/toolchains has one")
    usual = WITH_INDEX if request.node.get_closest_marker("with_index") else QUICK

    def make(name: str = "data", *, listen: str = "127.0.0.1:0", **settings: str | float) -> ServerProcess:
        made.append(ServerProcess(tmp_path / name, listen).configure(**(usual | settings)))
        return made[-1]

    yield make
    for server in made:
        server.kill()
    for server in made:
        check_log(server)


async def started(server: ServerProcess) -> ServerProcess:
    """Starts the server without blocking the event loop, which may serve the server's requests."""
    return await asyncio.to_thread(server.start)


async def stopped(server: ServerProcess) -> int:
    """Sends SIGTERM and returns the exit code, without blocking the event loop."""
    return await asyncio.to_thread(server.stop)


async def restarted(server: ServerProcess) -> ServerProcess:
    """kill -9 and start, without blocking the event loop."""
    return await asyncio.to_thread(server.restart)
