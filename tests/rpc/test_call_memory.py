"""The memory of a call is free when the call ends: no reference cycle keeps it until a late garbage collection."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from memstream.v1.memory_service_pb2 import CreateMemoryRequest, ExportMemoriesRequest, GetMemoryRequest
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream_server.rpc.access.opening import open_access
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.server import build_server
from memstream_server.settings import Settings
from tests.access.conftest import guarded_files
from tests.rpc.conftest import LIMITS
from tests.rpc.wire import Wire, refused
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import until

CALLS = 20
WAIT_S = 60.0


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Turns the garbage collector off, so that only reference counts free memory."""
    gc.collect()
    gc.disable()
    EARLIER.extend(list_calls())
    yield
    EARLIER.clear()
    gc.enable()


EARLIER: list[Any] = []
"""Calls of other tests, which pytest may hold: the record of a failed task, caught in this test, has its frames."""


def list_calls() -> list[Any]:
    """The calls in memory."""
    return [each for each in gc.get_objects() if type(each).__name__ == "_ServicerContext"]


async def all_freed() -> None:
    """Waits until no call of the test is in memory: a call ends shortly after its client has the status."""

    async def no_call() -> bool:
        earlier = {id(each) for each in EARLIER}
        return not [each for each in list_calls() if id(each) not in earlier]

    await until(no_call, WAIT_S)


@asynccontextmanager
async def guarded_memories(directory: Path) -> AsyncIterator[tuple[Any, list[tuple[str, str]]]]:
    """A server with authentication in this process: its MemoryService, and metadata with the key of alice."""
    keys_file, policy_file, keys = guarded_files(directory)
    access = open_access(Settings(api_keys_file=keys_file, access_policy_file=policy_file))
    server = build_server(FakeEngine(), LIMITS, Drain(1.0), access=access)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield MemoryServiceStub(channel), [("authorization", f"Bearer {keys['alice']}")]
    await server.stop(0.1)


@pytest.mark.usefixtures("script", "uncollected")
async def test_refused_calls_are_freed(wire: Wire) -> None:
    for _ in range(CALLS):
        await refused(wire.memories.GetMemory(GetMemoryRequest(namespace="ns", memory="absent")))
    await all_freed()


@pytest.mark.usefixtures("script", "uncollected")
async def test_refused_streams_are_freed(wire: Wire) -> None:
    for _ in range(CALLS):
        await refused(wire.memories.ExportMemories(ExportMemoriesRequest(namespace="")).read())
    await all_freed()


@pytest.mark.usefixtures("uncollected")
async def test_authorized_calls_are_freed(tmp_path: Path) -> None:
    async with guarded_memories(tmp_path) as (memories, metadata):
        for _ in range(CALLS):
            request = CreateMemoryRequest(namespace="a", memory="m", exist_ok=True)
            await memories.CreateMemory(request, metadata=metadata)
        await all_freed()


@pytest.mark.usefixtures("uncollected")
async def test_calls_without_a_right_are_freed(tmp_path: Path) -> None:
    async with guarded_memories(tmp_path) as (memories, metadata):
        for _ in range(CALLS):
            await refused(memories.GetMemory(GetMemoryRequest(namespace="b", memory="m"), metadata=metadata))
        await all_freed()
