"""Supervision of a Milvus that ends, whether its next start succeeds or fails; without a child process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from memstream_server.adapters.milvus import index as module
from memstream_server.adapters.milvus.collection import Timeouts
from memstream_server.adapters.milvus.index import MilvusIndex, RunningMilvus
from tests.index.conformance import SPACE
from tests.support.waiting import until


class Child:
    """Ends on demand."""

    uri, token, supervised = "unix:none", "", True

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def wait_for_end(self) -> str:
        await self.over.wait()
        return "it ended"

    async def kill(self) -> None:
        self.over.set()

    async def stop(self) -> None:
        self.over.set()


class Collection:
    """A collection that answers nothing."""

    description = "scripted"

    def request_version(self) -> None: ...

    def close(self) -> None: ...


class Starts:
    """Children, one after the other; `fail` is the error of the next start."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.fail: list[Exception] = []
        self.begun = 0
        self.held = asyncio.Event()
        self.held.set()

    async def __call__(self, _collections: Sequence[str]) -> RunningMilvus:
        self.begun += 1
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # a killed child needs time to end
            raise
        if self.fail:
            raise self.fail.pop()
        self.children.append(Child())
        return self.children[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    def connect(*_: Any) -> tuple[Collection, bool]:
        return Collection(), False

    monkeypatch.setattr(module, "connect_collection", connect)
    monkeypatch.setattr(module, "PAUSE_MIN_S", 0.001)
    return Starts()


def made(starts: Starts) -> MilvusIndex:
    return MilvusIndex(starts, name="m", prefix="m", timeouts=Timeouts(), consistency="", remove_files=lambda: None)


async def test_failed_start_is_retried(starts: Starts) -> None:
    index = made(starts)
    await index.open(SPACE)
    starts.fail = [OSError(11, "Resource temporarily unavailable")]
    starts.children[0].over.set()

    async def again() -> bool:
        return len(starts.children) == 2 and await index.is_healthy()

    await until(again)
    await index.close()


async def test_close_during_failing_start_returns(starts: Starts) -> None:
    index = made(starts)
    await index.open(SPACE)
    starts.held.clear()
    starts.children[0].over.set()

    async def restarts() -> bool:
        return starts.begun == 2

    await until(restarts)
    dropping = asyncio.create_task(index.drop_all())
    await asyncio.sleep(0.01)
    dropping.cancel()
    await asyncio.wait({dropping})
    assert dropping.cancelled()
    await index.close()
