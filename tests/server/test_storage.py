"""A disk that is nearly full: writes are refused early, reads continue, and nothing is lost."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc.aio
import pytest

import memstream
from memstream.v1 import fragment_pb2, stream_service_pb2
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT
from tests.support.journals import only_sqlite
from tests.support.server import free_address

pytestmark = only_sqlite("of a database's disk a server knows nothing until the database refuses")


def more_than_there_is(place: Path) -> float:
    """A larger reserve than any disk of this machine has."""
    return shutil.disk_usage(place).total + 1


async def test_writes_are_refused_and_reads_go_on(make_server: MakeServer, tmp_path: Path) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("storage/joy")
        await memory.observe_batch(["said with room"], producer="joy", first_sequence=1)
    await restarted(server.configure(disk_free_min_bytes=more_than_there_is(tmp_path)))
    async with memstream.connect(server.address) as client:
        memory = client.memory("storage/joy")
        with pytest.raises(memstream.StorageFull) as raised:
            await memory.observe_batch(["said without"], timeout_s=20)
        assert (raised.value.reason, raised.value.code) == ("STORAGE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert raised.value.retry_after
        with pytest.raises(memstream.StorageFull):
            await client.create_memory("storage/new")
        assert [one.fragment.content for one in await memory.recall_once("room")] == ["said with room"]
        assert await contents(memory) == ["said with room"]
        assert (await memory.stats()).backlog == 0
    await restarted(server.configure(disk_free_min_bytes=0))
    async with memstream.connect(server.address) as client:
        memory = client.memory("storage/joy")
        await memory.observe_batch(["said with room again"], producer="joy", first_sequence=2)
        assert await contents(memory) == ["said with room", "said with room again"]


async def test_throttled_stream_continues_after_backlog(make_server: MakeServer, tmp_path: Path) -> None:
    """The SDK keeps what it sent, waits as asked, and delivers once."""
    address = free_address()
    server = await started(make_server(listen=address))
    async with memstream.connect(address, retry=PATIENT) as client:
        memory = await client.create_memory("storage/joy")
        async with memory.observe("joy") as stream:
            await (await stream.send("said with room"))
            await restarted(server.configure(disk_free_min_bytes=more_than_there_is(tmp_path)))
            waiting = await stream.send("said without")
            await _refused(address)
            assert not waiting.done
            await restarted(server.configure(disk_free_min_bytes=0))
            await waiting
        assert await contents(memory) == ["said with room", "said without"]
        assert await observed_once(memory) == 2


async def _refused(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        request = stream_service_pb2.ObserveBatchRequest(
            namespace="storage", memory="joy", observations=[fragment_pb2.Observation(content="refused")]
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await StreamServiceStub(channel).ObserveBatch(request, wait_for_ready=True, timeout=20)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_disk_that_fills_up_while_observing(make_server: MakeServer, tmp_path: Path) -> None:
    """A tiny disk that another process fills during a stream, and empties again."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk), stderr=asyncio.subprocess.DEVNULL
    )
    if await mounting.wait():
        pytest.skip("mounting a tmpfs takes root")
    try:
        await _fill_while_observing(make_server, disk)
    finally:
        for server in disk.glob("*.process"):
            shutil.rmtree(server, ignore_errors=True)
        unmounting = await asyncio.create_subprocess_exec("umount", "--lazy", str(disk))
        assert await unmounting.wait() == 0


async def _fill_while_observing(make_server: MakeServer, disk: Path) -> None:
    server = await started(make_server("disk/data", listen=free_address(), disk_free_min_bytes=2 << 20))
    try:
        async with memstream.connect(server.address, retry=PATIENT) as client:
            memory = await client.create_memory("storage/joy", kind=memstream.MemoryKind.LONG_TERM)
            async with memory.observe("joy") as stream:
                await (await stream.send("said with room"))
                filler = disk / "filler"
                filler.write_bytes(b"\0" * (shutil.disk_usage(disk).free - (1 << 20)))
                waiting = await stream.send("said without")
                await _refused(server.address)
                assert (await memory.recall_once("room"))[0].fragment.content == "said with room"
                assert not waiting.done
                filler.unlink()
                await waiting
            assert await contents(memory) == ["said with room", "said without"]
            assert await observed_once(memory) == 2
    finally:
        server.kill()
