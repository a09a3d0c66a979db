"""A full disk under the index alone: Lite restarts, no observation is lost, and the index catches up."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import memstream
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import contents, indexed
from tests.server.test_index import SEARCHES_MILVUS, about, check_index
from tests.support.waiting import until

pytestmark = [pytest.mark.with_index, pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")]


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Path]:
    """A tiny file system for Milvus Lite's files."""
    place = tmp_path / "data" / "milvus"
    yield place
    unmounting = await asyncio.create_subprocess_exec("umount", "--lazy", str(place), stderr=asyncio.subprocess.DEVNULL)
    await unmounting.wait()


async def mounted(disk: Path) -> None:
    await asyncio.to_thread(disk.mkdir, exist_ok=True)
    mounting = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk), stderr=asyncio.subprocess.DEVNULL
    )
    if await mounting.wait():
        pytest.skip("mounting a tmpfs takes root")


async def test_full_index_disk_loses_nothing(make_server: MakeServer, disk: Path) -> None:
    server = await started(make_server(**SEARCHES_MILVUS))
    assert await stopped(server) == 0
    await mounted(disk)
    await started(server)
    try:
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("index/full", kind=memstream.MemoryKind.LONG_TERM)
            await memory.observe_batch([about(number) for number in range(100)])
            await until(lambda: indexed(client, memory))
            (first,) = server.children()
            filler = disk / "filler"
            filler.write_bytes(b"\0" * shutil.disk_usage(disk).free)
            async with memory.observe("joy") as stream:
                for number in range(100, 400):
                    await stream.send(about(number))
                await stream.flush()
            assert len(await contents(memory)) == 400
            assert (await memory.recall_once("island number 1050", limit=1))[0].fragment.content == about(150)
            await until(lambda: _degraded(client))
            assert (await memory.recall_once("island number 2100", limit=1))[0].fragment.content == about(300)
            assert (await memory.stats()).unindexed
            filler.unlink()
            await until(lambda: indexed(client, memory))
            assert server.children() != [first], "Lite was started again"
            answer = await memory.recall_once("island number 2660", limit=1, reinforce=False)
            assert (answer[0].fragment.content, answer.degraded) == (about(380), "")
            await check_index(server, memory)
    finally:
        server.kill()


async def _degraded(client: memstream.Client) -> str:
    return (await client.server_info()).degraded
