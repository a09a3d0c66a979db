"""A scripted server and a client of it, for every test of the SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import memstream
from tests.support.scripted_server import ScriptedServer

RETRY = memstream.Retry(first_s=60.0, later_s=60.0, delay_min_s=0.01, delay_max_s=0.1)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()  # type: ignore[abstract]  # the rpcs it lacks answer UNIMPLEMENTED
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[memstream.Client]:
    async with memstream.connect(server.target, token="secret", timeout_s=60.0, retry=RETRY) as connected:
        yield connected


@pytest.fixture
def memory(client: memstream.Client) -> memstream.Memory:
    return client.memory("ns/m")
