"""Starts a server for these tests; each test gets its own conversation."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

import memstream
from tests.server.conftest import QUICK, check_log
from tests.support.server import ServerProcess


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("talking") / "data", **QUICK, content_max_bytes=2_048) as server:
        yield server
        assert server.stop() == 0
    check_log(server)


@pytest.fixture
async def client(talking: ServerProcess) -> AsyncIterator[memstream.Client]:
    async with memstream.connect(talking.address) as connected:
        yield connected


@pytest.fixture
def talk(client: memstream.Client) -> memstream.Conversation:
    return client.conversation(f"t-{uuid.uuid4().hex[:12]}/monday")
