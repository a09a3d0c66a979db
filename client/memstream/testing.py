"""Fixtures of pytest for programs that use a memory: `pytest_plugins = ["memstream.testing"]` in your conftest.py.

    def test_agent_remembers_a_name(memory):
        with memory.observe(producer="test") as stream:
            stream.send("My name is Bob", speaker="user")
        assert "Bob" in memory.recall_once("What is my name?")[0].fragment.content

memstream_server         address of one server for the whole session, all workers of pytest-xdist included
memstream_client         a blocking client of it
memory                   a fresh memory for each test (blocking SDK), deleted after it
async_memstream_client   the same with the asynchronous SDK; these two need pytest-asyncio
async_memory

Override memstream_settings (settings of the server) or memory_policy (of the memories) with fixtures of your own.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

import memstream.client
import memstream.sync
from memstream.argument_types import LocalSetting
from memstream.errors import MemoryNotFound
from memstream.local_client import local_server
from memstream.memory import Memory
from memstream.policy import PolicyLike

NAMESPACE = "tests"
START_TIMEOUT_S = 120.0
"""Test runs often share a loaded machine."""
_NAME_CHARS_MAX = 60


@pytest.fixture(scope="session")
def memstream_settings() -> Mapping[str, LocalSetting]:
    """Settings of the server, as memstream.local takes them; by default none."""
    return {}


@pytest.fixture
def memory_policy() -> PolicyLike | None:
    """Policy of the memories; by default that of the server."""
    return None


@pytest.fixture(scope="session")
def memstream_server(
    tmp_path_factory: pytest.TempPathFactory, memstream_settings: Mapping[str, LocalSetting]
) -> Iterator[str]:
    """The address of a server that ends with the session; workers of pytest-xdist share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # each worker has a folder of its own in that of the session
    server = local_server(folder / "memstream", START_TIMEOUT_S, memstream_settings)
    server.open()
    yield server.address
    server.close()


@pytest.fixture(scope="session")
def memstream_client(memstream_server: str) -> Iterator[memstream.sync.Client]:
    """A blocking client of the server."""
    with memstream.sync.connect(memstream_server) as client:
        yield client


@pytest.fixture
def memory(
    memstream_client: memstream.sync.Client, memory_policy: PolicyLike | None, request: pytest.FixtureRequest
) -> Iterator[memstream.sync.Memory]:
    """A fresh memory, deleted after the test."""
    path = _path_of(request)
    yield memstream_client.create_memory(path, policy=memory_policy)
    with contextlib.suppress(MemoryNotFound):  # the test has deleted it
        memstream_client.delete_memory(path)


def _path_of(request: pytest.FixtureRequest) -> str:
    """A new memory's name that shows the test in logs and listings."""
    shown = re.sub(r"[^A-Za-z0-9._]+", "-", str(request.node.name)).strip("-._")[:_NAME_CHARS_MAX]
    return f"{NAMESPACE}/{shown or 'test'}-{uuid.uuid4().hex[:8]}"


try:
    import pytest_asyncio
except ModuleNotFoundError:  # without it pytest knows no asynchronous fixtures
    pass
else:

    @pytest_asyncio.fixture
    async def async_memstream_client(memstream_server: str) -> AsyncIterator[memstream.client.Client]:
        """A client of the server, in the event loop of the test."""
        async with memstream.client.connect(memstream_server) as client:
            yield client

    @pytest_asyncio.fixture
    async def async_memory(
        async_memstream_client: memstream.client.Client,
        memory_policy: PolicyLike | None,
        request: pytest.FixtureRequest,
    ) -> AsyncIterator[Memory]:
        """A fresh memory, deleted after the test."""
        path = _path_of(request)
        yield await async_memstream_client.create_memory(path, policy=memory_policy)
        with contextlib.suppress(MemoryNotFound):
            await async_memstream_client.delete_memory(path)
