"""A server over loopback gRPC with a scripted engine and with the real one: every test runs with both.

Tests that use the `script` fixture run with the scripted engine only, tests that use `real` with the real one only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from memstream.v1.memory_service_pb2 import CreateMemoryRequest
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.server import build_server
from tests.engine.conftest import open_engine
from tests.rpc.wire import Wire
from tests.support.fake_engine import FakeEngine

ENGINES = ("scripted", "real")
LIMITS = RequestLimits(
    content_bytes_max=2_048,
    batch_max=16,
    window_observations=32,
    window_bytes=65_536,
    queries_in_flight_max=4,
    backlog_wait_s=0.2,
    page_bytes_max=8_192,
)
GRACE_S = 60.0
"""So long that it ends in a test only if the test skips it: a loaded machine stalls for seconds."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" in metafunc.fixturenames:
        kinds = ENGINES[:1] if "script" in metafunc.fixturenames else ENGINES
        kinds = ENGINES[1:] if "real" in metafunc.fixturenames else kinds
        metafunc.parametrize("engine", kinds, indirect=True)


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "scripted":
        yield FakeEngine()
        return
    async with open_engine(tmp_path / "data") as real:
        yield real


@pytest.fixture
def script(engine: Any) -> Any:
    """The scripted engine, for tests that control it."""
    return engine.script


@pytest.fixture
def real(engine: Any) -> Any:
    """The real engine."""
    return engine


@pytest.fixture
async def wire(engine: Any) -> AsyncIterator[Wire]:
    drain = Drain(GRACE_S)
    server = build_server(engine, LIMITS, drain)
    address = await server.start("127.0.0.1:0")
    # A small transport buffer, so that a client that does not read soon blocks the server.
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1_024))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        wire = Wire(channel, server, drain, engine.dimension)
        await wire.memories.CreateMemory(CreateMemoryRequest(namespace="ns", memory="m"))
        yield wire
    await server.stop(0.1)
