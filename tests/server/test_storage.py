"""Disks that are nearly full, full, read-only or slow: reads continue, everything says why, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import memstream
from memstream.v1 import fragment_pb2, stream_service_pb2
from memstream.v1.server_service_pb2 import GetServerInfoRequest
from memstream.v1.server_service_pb2_grpc import ServerServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream_server.adapters.journal.store import open_journal
from tests.journal.samples import Now, record
from tests.server.conftest import MakeServer, restarted, started
from tests.server.listing import contents, observed_once
from tests.server.producing import PATIENT
from tests.support.journals import only_sqlite
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import DEADLINE_S, until

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
            await memory.observe_batch(["said without"], timeout_s=60)
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
            await StreamServiceStub(channel).ObserveBatch(request, wait_for_ready=True, timeout=60)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@contextlib.asynccontextmanager
async def mounted(place: Path, *options: str) -> AsyncIterator[Path]:
    """A file system of the test's own at `place`; skips the test where mounting is not possible."""
    if await run_command("mkdir", str(place)) or await run_command("mount", *options, str(place)):
        pytest.skip("mounting takes root, and a loop device for ext4")
    try:
        yield place
    finally:
        assert await run_command("umount", "--lazy", str(place)) == 0


async def run_command(*words: str) -> int:
    running = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
    return await running.wait()


def tiny_disk(place: Path) -> contextlib.AbstractAsyncContextManager[Path]:
    return mounted(place, "-t", "tmpfs", "-o", "size=24m", "tmpfs")


@contextlib.asynccontextmanager
async def ext4_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """A disk that turns read-only at an error, as most machines mount theirs."""
    image = str(tmp_path / "image")
    assert await run_command("truncate", "--size=48M", image) == await run_command("mkfs.ext4", "-q", image) == 0
    async with mounted(tmp_path / "data", "-o", "loop,noatime,errors=remount-ro", image) as disk:
        yield disk


def fill_up(disk: Path) -> Path:
    """Leave no byte free; returns the file that takes the space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while True:
            out.write(b"\0" * 4_096)
    return filler


class Operator:
    """What an operator sees of a server: its status, both kinds of probe, and the gauge."""

    def __init__(self, server: ServerProcess, http: str, metrics: str) -> None:
        self._server, self._http, self._metrics = server, http, metrics

    @property
    def pid(self) -> int:
        return self._server.pid

    async def sees(self) -> tuple[str, int, int, int, int, float]:
        """`degraded`, the health of writing, the HTTP statuses of both health paths and of the probe, the gauge."""
        async with grpc.aio.insecure_channel(self._server.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            writing = await stub.Check(health_pb2.HealthCheckRequest(service="memstream.journal.write"))
            info = await ServerServiceStub(channel).GetServerInfo(GetServerInfoRequest())
        paths = f"http://{self._http}/healthz", f"http://{self._http}/healthz/write", f"http://{self._metrics}/writez"
        statuses = [(await asyncio.to_thread(httpx2.get, path, timeout=DEADLINE_S)).status_code for path in paths]
        (gauge,) = await asyncio.to_thread(scrape, self._metrics, "memstream_journal_writable")
        return info.degraded, writing.status, statuses[0], statuses[1], statuses[2], gauge

    async def wait_for(self, cause: str) -> None:
        """Wait until everything says that writing fails for this cause; empty: that it works."""
        serving, status = (2, 503) if cause else (1, 200)

        async def agree() -> bool:
            degraded, *rest = await self.sees()
            said = cause in degraded if cause else not degraded
            return said and rest == [serving, 200, status, status, float(not cause)]

        await until(agree)


def scrape(address: str, name: str) -> list[float]:
    lines = httpx2.get(f"http://{address}/metrics", timeout=DEADLINE_S).text.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith(f"{name} ")]


@contextlib.asynccontextmanager
async def operated(make_server: MakeServer) -> AsyncIterator[tuple[Operator, memstream.Client]]:
    """A server on the disk at `data`, and a patient client of it."""
    http, metrics = free_address(), free_address()
    server = make_server(disk_free_min_bytes=0, http_listen=http, metrics_listen=metrics)
    await started(server)
    try:
        async with memstream.connect(server.address, retry=PATIENT) as client:
            yield Operator(server, http, metrics), client
    finally:
        await asyncio.to_thread(server.stop)


async def check_reads(*memories: memstream.Memory, cause: str) -> None:
    """Each has one fragment that mentions room; the answer says what fails."""
    for memory in memories:
        answer = await memory.recall_once("room", timeout_s=60)
        assert [one.fragment.content for one in answer] == [f"{memory.name} has room"]
        assert cause in answer.degraded
        assert await contents(memory) == [f"{memory.name} has room"]
        assert (await memory.stats()).long_term + (await memory.stats()).short_term == 1


async def two_memories(client: memstream.Client) -> tuple[memstream.Memory, memstream.Memory]:
    """One in RAM, and one that was only created and written."""
    memories = [await client.create_memory(f"storage/{name}") for name in ("warm", "cold")]
    for memory in memories:
        await memory.observe_batch([f"{memory.name} has room"])
    await memories[0].recall_once("room")
    return memories[0], memories[1]


async def test_a_full_disk_is_seen_and_reads_go_on(make_server: MakeServer, tmp_path: Path) -> None:
    """Not one byte is free: what needs no write answers, everything says why, and writing resumes with the space."""
    async with tiny_disk(tmp_path / "data") as disk, operated(make_server) as (operator, client):
        warm, cold = await two_memories(client)
        await operator.wait_for("")
        late = await client.create_memory("storage/late", kind=memstream.MemoryKind.LONG_TERM)
        async with late.observe("joy") as stream:
            await (await stream.send("late has room"))
            filler = await asyncio.to_thread(fill_up, disk)
            await operator.wait_for("no space left")
            await until(lambda: said_why(stream, "no space left"))
            waiting = await stream.send("said without")
            ids = [one.id async for one in warm.list_fragments()]
            for refused in (
                lambda: warm.observe_batch(["said without"], timeout_s=5),
                lambda: warm.forget_fragments(ids),
                lambda: client.create_memory("storage/new"),
            ):
                with pytest.raises(memstream.StorageFull, match="no space left"):
                    await refused()
            await check_reads(warm, cold, late, cause="no space left")
            assert not waiting.done
            filler.unlink()
            await waiting
            assert stream.waiting == ""
        await operator.wait_for("")
        assert await contents(late) == ["late has room", "said without"]
        assert await observed_once(late) == 2
        assert (await warm.recall_once("room")).degraded == ""


async def said_why(stream: memstream.ObserveStream, cause: str) -> bool:
    return cause in stream.waiting


async def test_a_read_only_disk_is_seen_and_reads_go_on(make_server: MakeServer, tmp_path: Path) -> None:
    async with ext4_disk(tmp_path) as disk, operated(make_server) as (operator, client):
        warm, cold = await two_memories(client)
        await asyncio.to_thread(fail_disk, disk)
        with pytest.raises(memstream.JournalUnavailable, match="read-only"):
            await warm.observe_batch(["said without"], timeout_s=5)
        await operator.wait_for("read-only")
        await check_reads(warm, cold, cause="read-only")


async def test_a_read_only_disk_is_seen_while_nobody_writes(make_server: MakeServer, tmp_path: Path) -> None:
    async with ext4_disk(tmp_path) as disk, operated(make_server) as (operator, client):
        warm, cold = await two_memories(client)
        await asyncio.to_thread(fail_disk, disk)
        await operator.wait_for("read-only")
        await check_reads(warm, cold, cause="read-only")


def fail_disk(disk: Path) -> None:
    """Let the kernel find an error of the file system."""
    (line,) = [one for one in Path("/proc/mounts").read_text("utf-8").splitlines() if f" {disk} " in one]
    Path(f"/sys/fs/ext4/{Path(line.split()[0]).name}/trigger_fs_error").write_text("the test's\n", encoding="utf-8")


async def test_a_journal_that_hangs_is_seen_and_reads_go_on(make_server: MakeServer, tmp_path: Path) -> None:
    """A frozen file system: a write neither fails nor returns."""
    async with ext4_disk(tmp_path) as disk, operated(make_server) as (operator, client):
        warm, cold = await two_memories(client)
        async with warm.observe("joy") as stream:
            assert await run_command("fsfreeze", "--freeze", str(disk)) == 0
            try:
                waiting = await stream.send("said meanwhile")
                await operator.wait_for("more than 5 s")
                await until(lambda: said_why(stream, "more than 5 s"))
                await check_reads(cold, cause="more than 5 s")
                assert not waiting.done
            finally:
                assert await run_command("fsfreeze", "--unfreeze", str(disk)) == 0
            await waiting
        await operator.wait_for("")
        assert await contents(warm) == ["warm has room", "said meanwhile"]


async def test_reads_go_on_after_a_write_that_nobody_has_read(tmp_path: Path) -> None:
    """The first reader after a commit would write into a mapped file, which a frozen disk does not let it do."""
    async with ext4_disk(tmp_path) as disk:
        journal = await open_journal(disk / "journal", clock_us=Now(), reserve_bytes=0)
        try:
            await journal.create_memory(record(), ())
            await journal._writer.run_exclusively(lambda: None)  # behind what the writer does after its answer
            assert await run_command("fsfreeze", "--freeze", str(disk)) == 0
            try:
                async with asyncio.timeout(DEADLINE_S):
                    found = await journal.list_memories("comedy", "", 1)
            finally:
                assert await run_command("fsfreeze", "--unfreeze", str(disk)) == 0
            assert [each.name for each in found] == [record().name]
        finally:
            await journal.close()


async def test_without_descriptors_reads_and_writes_go_on(make_server: MakeServer) -> None:
    """The journal's files are open before the descriptors run out."""
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        warm, cold = await two_memories(client)
        open_files = [int(name) for name in os.listdir(f"/proc/{server.pid}/fd")]
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (max(open_files) + 1, 4_096))
        await cold.observe_batch(["said without descriptors"])
        assert (await warm.recall_once("room"))[0].fragment.content == "warm has room"
        assert await contents(cold) == ["cold has room", "said without descriptors"]
        assert (await client.server_info()).degraded == ""


async def test_no_descriptor_left_is_seen_and_reads_go_on(make_server: MakeServer) -> None:
    async with operated(make_server) as (operator, client):
        warm, cold = await two_memories(client)
        await operator.wait_for("")
        before = resource.prlimit(operator.pid, resource.RLIMIT_NOFILE)

        async def is_seen() -> bool:
            """Opened for each use: the server may have closed earlier ones."""
            used = {int(name) for name in os.listdir(f"/proc/{operator.pid}/fd")}
            lowest = min(set(range(max(used) + 2)) - used)
            resource.prlimit(operator.pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
            return "no file descriptor left" in (await client.server_info()).degraded

        try:
            await until(is_seen)
            await check_reads(warm, cold, cause="")
            await cold.observe_batch(["said without descriptors"])
        finally:
            resource.prlimit(operator.pid, resource.RLIMIT_NOFILE, before)
        await operator.wait_for("")
        assert await contents(cold) == ["cold has room", "said without descriptors"]


async def test_a_disk_that_fills_up_while_observing(make_server: MakeServer, tmp_path: Path) -> None:
    """A tiny disk that another process fills during a stream, and empties again."""
    async with tiny_disk(tmp_path / "data"):
        await _fill_while_observing(make_server, tmp_path / "data")


async def _fill_while_observing(make_server: MakeServer, disk: Path) -> None:
    server = await started(make_server("data", listen=free_address(), disk_free_min_bytes=2 << 20))
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
