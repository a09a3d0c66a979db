"""memstream.local: one server of a directory for all its users, and none without a user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from pathlib import Path

import memstream
from memstream.local_files import Directory, wait_until
from tests.local.users import WAIT_S, finish, holding, kill_server, read_line, script, server_ends, server_pid
from tests.support.processes import pause
from tests.support.server import ServerProcess


async def test_server_lives_as_long_as_the_block(directory: Path) -> None:
    async with memstream.local(directory) as client:
        memory = await client.create_memory("ns/m")
        async with memory.observe(producer="p") as stream:
            await stream.send("the key is under the mat")
        assert server_pid(directory) != os.getpid()
    assert not Directory(directory).is_served()
    async with memstream.local(str(directory)) as client:
        assert [hit.fragment.content for hit in await client.memory("ns/m").recall_once("key")] == [
            "the key is under the mat"
        ]


async def test_awaited_client_is_closed_by_hand(directory: Path) -> None:
    client = await memstream.local(directory)
    assert (await client.server_info()).embedding.dimension == 384
    await client.close()
    await client.close()
    assert not Directory(directory).is_served()


NOTEBOOK = """
import asyncio, sys, memstream.sync
async def cell():
    with memstream.sync.local(sys.argv[1]) as client:
        client.create_memory("ns/m")
    print("ready")
asyncio.run(cell())
"""


def test_blocking_sdk_works_below_a_running_loop(directory: Path) -> None:
    with script(NOTEBOOK, directory) as user:
        assert finish(user) == "ready\n"
    assert not Directory(directory).is_served()


def test_processes_that_start_at_once_share_one_server(directory: Path) -> None:
    with contextlib.ExitStack() as stack:
        users = [stack.enter_context(holding(directory)) for _ in range(3)]
        assert {read_line(user) for user in users} == {"ready"}
        pid = server_pid(directory)
        log = (directory / "local.log").read_text("utf-8")
        assert log.count("memstream listens on") == 1
        for user in users[:-1]:
            finish(user)
            assert server_pid(directory) == pid
        finish(users[-1])
        assert not Directory(directory).is_served()


def test_killed_user_leaves_no_server(directory: Path) -> None:
    with holding(directory) as user:
        assert read_line(user) == "ready"
        assert Directory(directory).is_served()
        user.kill()
        user.wait(WAIT_S)
        assert server_ends(directory)


def test_user_killed_during_the_start_leaves_no_server(directory: Path) -> None:
    with holding(directory) as user:
        while not Directory(directory).is_served():
            assert user.poll() is None
        user.kill()
        user.wait(WAIT_S)
        assert server_ends(directory)


async def test_directory_opens_after_everything_was_killed(directory: Path) -> None:
    with holding(directory) as user:
        assert read_line(user) == "ready"
        pause(user.pid)  # else the server could notice its end before it is killed
        kill_server(directory)
    assert (directory / "address").exists()
    async with memstream.local(directory) as client:
        assert await client.get_memory("ns/m")


INTERRUPTED = """
import sys, memstream.sync
with memstream.sync.local(sys.argv[1]) as client:
    memory = client.create_memory("ns/m", exist_ok=True)
    with memory.observe(producer="p") as stream:
        for number in range(1_000_000):
            stream.send(f"observation number {number}")
            if number % 50 == 0:
                stream.flush()
                print(number, flush=True)
"""


async def test_interrupt_ends_the_script_and_loses_nothing(directory: Path) -> None:
    with script(INTERRUPTED, directory, start_new_session=True) as user:
        for _ in range(3):
            acknowledged = int(read_line(user))
        os.killpg(user.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        _, errors = user.communicate(timeout=WAIT_S)
        assert "KeyboardInterrupt" in errors
    assert server_ends(directory)
    assert "memstream drains and stops" in (directory / "local.log").read_text("utf-8")
    async with memstream.local(directory) as client, client.memory("ns/m").observe(producer="p") as stream:
        assert stream.expected_sequence > acknowledged


def test_only_this_user_can_enter_directory_and_socket(directory: Path) -> None:
    with holding(directory) as user:
        assert read_line(user) == "ready"
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.iterdir())}
        assert {name for name, mode in modes.items() if mode & 0o077} == set()
        assert modes["local.sock"] == 0o700
        finish(user)


async def test_directory_with_a_long_path_is_served(directory: Path, tmp_path: Path) -> None:
    deep = directory / ("d" * 120)
    async with memstream.local(deep) as client:
        assert (await client.server_info()).version
        folder = Path(Directory(deep).address().removeprefix("unix:")).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not Directory(deep).is_served()


async def test_server_that_runs_already_is_used_and_left_alone(directory: Path) -> None:
    with ServerProcess(directory) as server:
        async with memstream.local(directory) as client:
            await client.create_memory("ns/m")
        async with memstream.connect(server.address) as client:
            assert await client.get_memory("ns/m")
        assert server.is_running()


FORKING = """
import os, sys, memstream, memstream.sync
with memstream.sync.local(sys.argv[1]) as client:
    worker = os.fork()
    if worker == 0:
        for attempt in (client.server_info, lambda: memstream.sync.local(sys.argv[1]), client.close):
            try:
                attempt()
            except memstream.StreamClosed as error:
                print(str(error)[:23], flush=True)
        sys.stdin.readline()
        os._exit(0)
    sys.stdin.readline()
"""


def test_forked_worker_gets_an_error_and_holds_no_server(directory: Path) -> None:
    with script(FORKING, directory) as user:
        assert [read_line(user) for _ in range(3)] == ["this process was forked"] * 3
        user.kill()  # the worker lives on until the pipe is closed
        assert server_ends(directory)


FORKING_FIRST = """
import os, sys, memstream.sync
worker = os.fork()
with memstream.sync.local(sys.argv[1]) as client:
    client.create_memory("ns/m", exist_ok=True)
    print("ready", flush=True)
    sys.stdin.readline()
if worker:
    os.waitpid(worker, 0)
"""


def test_workers_forked_before_share_one_server(directory: Path) -> None:
    with script(FORKING_FIRST, directory) as user:
        assert [read_line(user), read_line(user)] == ["ready", "ready"]
        finish(user)
    assert (directory / "local.log").read_text("utf-8").count("memstream listens on") == 1
    assert server_ends(directory)


async def test_cancelled_start_leaves_no_server(directory: Path) -> None:
    starting = asyncio.ensure_future(memstream.local(directory).__aenter__())
    assert await asyncio.to_thread(wait_until, Directory(directory).is_served, WAIT_S)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    assert starting.cancelled()
    assert await asyncio.to_thread(server_ends, directory)
