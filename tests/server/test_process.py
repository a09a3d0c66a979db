"""The server process: one per directory, graceful end, backup and restore."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

import memstream
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import contents, indexed
from tests.server.producing import PATIENT
from tests.support.forked import ForkedProgram
from tests.support.journals import DATABASE, environment, only_sqlite
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `memstream` with these arguments to its end."""
    with ForkedProgram(arguments, os.environ | environment(arguments)) as program:
        out, err = program.communicate()
        return subprocess.CompletedProcess(arguments, program.wait(), out, err)


def serving(data_dir: Path, listen: str = "127.0.0.1:0") -> tuple[str, ...]:
    return ("serve", "--listen", listen, "--data", str(data_dir))


async def read(call: Any) -> Any:
    """The next message of a call, of whichever type."""
    return await call.read()


@only_sqlite("several servers share a database")
async def test_second_server_on_journal_exits_with_error(shared: ServerProcess) -> None:
    ended = await asyncio.to_thread(run, *serving(shared.data_dir))
    assert ended.returncode == 1
    assert ("the database is in use by memstream pid" if DATABASE else str(shared.data_dir)) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert shared.is_running()


async def test_second_server_at_address_exits_with_error(shared: ServerProcess, tmp_path: Path) -> None:
    ended = await asyncio.to_thread(run, *serving(tmp_path / "data", shared.address))
    assert ended.returncode == 1
    assert shared.address in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.with_index
async def test_a_killed_server_is_replaced_at_once(make_server: MakeServer) -> None:
    """The operating system releases the lock, and Milvus Lite ends with its parent."""
    server = await started(make_server())
    for _ in range(3):
        server.kill()
        await started(server)
    async with memstream.connect(server.address) as client:
        await until(lambda: indexed(client))


async def test_sigterm_notifies_streams_and_exits_zero(make_server: MakeServer) -> None:
    server = await started(make_server(drain_grace_s=60.0))
    async with memstream.connect(server.address) as client:
        await client.create_memory("process/joy")
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = StreamServiceStub(channel)
        observe = stub.Observe()
        await observe.write(pb.ObserveRequest(open=pb.ObserveOpen(namespace="process", memory="joy", producer="p")))
        recall = stub.Recall()
        await recall.write(pb.RecallRequest(open=pb.RecallOpen(namespace="process", memory="joy")))
        soon = Duration(nanos=200_000_000)
        watch = stub.Watch(pb.WatchRequest(namespace="process", memory="joy", progress_interval=soon))
        assert (await read(observe)).HasField("opened")
        assert (await read(recall)).HasField("opened")
        await read(watch)  # it has begun
        ending = asyncio.create_task(stopped(server))
        for call in (observe, recall, watch):
            message = await read(call)
            while not message.HasField("going_away"):  # Watch may send a mark before
                message = await read(call)
            assert message.going_away.description
        await observe.write(pb.ObserveRequest(close=pb.ObserveClose()))
        await recall.write(pb.RecallRequest(close=pb.RecallClose()))
        assert (await read(observe)).HasField("closed")
        assert await ending == 0


async def test_sigterm_exits_zero_with_open_stream(make_server: MakeServer) -> None:
    server = await started(make_server(drain_grace_s=0.3))
    async with memstream.connect(server.address) as client:
        await client.create_memory("process/joy")
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = StreamServiceStub(channel).Observe()
        await call.write(pb.ObserveRequest(open=pb.ObserveOpen(namespace="process", memory="joy", producer="p")))
        assert (await read(call)).HasField("opened")
        assert await stopped(server) == 0
        assert (await read(call)).HasField("going_away")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_sdk_outlives_an_orderly_restart(make_server: MakeServer) -> None:
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("process/joy")
        async with memory.observe("joy") as stream, memory.recall() as recall, memory.watch("beginning") as watch:
            await (await stream.send("said before"))
            assert await stopped(server) == 0
            late = asyncio.create_task(recall.query("said", reinforce=False))
            await started(server)
            await (await stream.send("said afterwards"))
            assert "said before" in [one.fragment.content for one in await late]
            seen = [await asyncio.wait_for(anext(watch), 60) for _ in range(5)]
        assert len({(one.cursor.revision, one.cursor.ordinal) for one in seen}) == 5
        assert await contents(memory) == ["said before", "said afterwards"]


@pytest.mark.with_index
@only_sqlite("`backup` copies a data directory; for a database it is pg_dump")
async def test_a_restored_backup_answers_as_before(make_server: MakeServer, tmp_path: Path) -> None:
    """Backup while the server runs, more observations, restore: the answers of the backup, with a rebuilt index."""
    file = str(tmp_path / "monday.memstream")
    server = await started(make_server(dense_bytes_max=0))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("process/joy")
        async with memory.observe("joy") as stream:
            for number in range(100):
                await stream.send(f"On day {number} it rained {number * 3} millimetres.")
        await until(lambda: indexed(client, memory))
        before = await _answers(memory)
        assert run("backup", file, "--data", str(server.data_dir)).returncode == 0
        async with memory.observe("joy") as stream:
            for number in range(100, 150):
                await stream.send(f"On day {number} it rained {number * 3} millimetres.")
        await until(lambda: indexed(client, memory))
    assert await stopped(server) == 0
    refused = run("restore", file, "--data", str(server.data_dir))
    assert refused.returncode != 0
    assert "--force" in refused.stderr
    assert run("restore", file, "--data", str(server.data_dir), "--force").returncode == 0
    await started(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("process/joy")
        await until(lambda: indexed(client, memory))
        assert await _answers(memory) == before
        assert len(await contents(memory)) == 100
        assert "On day 120" not in (await memory.recall_once("day 120", limit=1))[0].fragment.content
        async with memory.observe("joy") as stream:
            assert stream.expected_sequence == 101


async def _answers(memory: memstream.Memory) -> list[list[str]]:
    questions = ["How much did it rain on day 17?", "297 millimetres", "rain"]
    answers = [await memory.recall_once(question, limit=5, reinforce=False) for question in questions]
    return [[one.fragment.content for one in answer] for answer in answers]


@only_sqlite("`backup` copies a data directory; for a database it is pg_dump")
async def test_client_ahead_of_restored_server_is_refused(make_server: MakeServer, tmp_path: Path) -> None:
    file = str(tmp_path / "empty.memstream")
    server = await started(make_server(listen=free_address()))
    async with memstream.connect(server.address, retry=PATIENT) as client:
        memory = await client.create_memory("process/joy")
        assert run("backup", file, "--data", str(server.data_dir)).returncode == 0
        stream = memory.observe("joy")
        await stream.__aenter__()
        await (await stream.send("this is not in the backup"))
        server.kill()
        assert run("restore", file, "--data", str(server.data_dir), "--force").returncode == 0
        await started(server)
        with pytest.raises(memstream.ServerBehind):
            await (await stream.send("neither is this"))
        with pytest.raises(memstream.ServerBehind):
            await stream.close()


@only_sqlite("the journal needs no directory")
async def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory", "utf-8")
    ended = await asyncio.to_thread(run, *serving(tmp_path / "file"))
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr


@only_sqlite("damages its file")
async def test_damaged_journal_is_refused_with_remedy(make_server: MakeServer) -> None:
    server = await started(make_server())
    assert await stopped(server) == 0
    journals = [file for file in server.data_dir.iterdir() if file.is_file() and file.stat().st_size > 8_192]
    assert len(journals) == 1
    journals[0].write_bytes(b"garbage" * 4_000)
    ended = await asyncio.to_thread(run, *serving(server.data_dir))
    assert ended.returncode == 1
    assert "restore" in ended.stderr
    assert "Traceback" not in ended.stderr
