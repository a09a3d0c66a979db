"""The Milvus Lite child when it is killed, orphaned, locked out, damaged or its disk is full."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from memstream_server.adapters.milvus.child import SOCKET_PATTERN, with_write_lock
from memstream_server.adapters.milvus.collection import Timeouts
from memstream_server.adapters.milvus.index import READ_THREADS, MilvusIndex, connect_milvus, open_lite
from memstream_server.adapters.milvus.naming import collection_name, partition_name
from memstream_server.ports.index import IndexLost, IndexUnavailable
from tests.index.conformance import SPACE, fragment_id, points, unit_vectors
from tests.index.processes import DEADLINE_S, children, listening, until
from tests.support.processes import paused
from tests.support.seeds import THOROUGH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

COLLECTION = collection_name(SPACE, "memstream")
VECTORS = unit_vectors(200)


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[MilvusIndex]:
    """An index that holds VECTORS of memory "m", flushed."""
    index = await open_lite(tmp_path)
    assert await index.open(SPACE)
    await index.upsert(points("m", VECTORS))
    await index.flush()
    yield index
    await index.close()
    assert children(tmp_path) == []
    assert sockets_in(tmp_path) == []


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed data directory that holds VECTORS of memory "m" in two flushes."""
    data_dir = tmp_path_factory.mktemp("filled")

    async def fill() -> None:
        index = await open_lite(data_dir)
        await index.open(SPACE)
        for first in (0, 100):
            await index.upsert(points("m", VECTORS[first : first + 100], first))
            await index.flush()
        await index.close()

    asyncio.run(fill())
    return data_dir


def sockets_in(data_dir: Path) -> list[Path]:
    return list(data_dir.glob(SOCKET_PATTERN))


def only_child(data_dir: Path) -> int:
    (pid,) = children(data_dir)
    return pid


async def kill_child(index: MilvusIndex, data_dir: Path) -> None:
    """kill -9, then wait until the next child serves."""
    pid = only_child(data_dir)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: pid not in children(data_dir))
    await until(lambda: bool(children(data_dir)))
    await until(index.is_healthy)


async def fill_again(index: MilvusIndex) -> None:
    """The engine's reaction to IndexLost."""
    await index.upsert(points("m", VECTORS))
    await index.flush()
    assert await index.count("m") == len(VECTORS)
    assert (await index.search("m", VECTORS[3], 1))[0] == [fragment_id(3)]


async def test_flush_never_covers_writes_of_killed_child(index: MilvusIndex, tmp_path: Path) -> None:
    """The next child serves what was flushed."""
    more = unit_vectors(50, seed=2)
    await index.upsert(points("m", more, first=1000))
    await kill_child(index, tmp_path)
    assert (await index.search("m", VECTORS[9], 1))[0] == [fragment_id(9)]
    with pytest.raises(IndexUnavailable, match="since the last flush") as raised:
        await index.flush()
    assert not isinstance(raised.value, IndexLost)
    await index.upsert(points("m", more, first=1000))
    await index.flush()
    assert await index.count("m") == len(VECTORS) + 50


async def test_calls_fail_at_once_without_child(index: MilvusIndex, tmp_path: Path) -> None:
    """The flush that follows reports the lost writes, once."""
    more = unit_vectors(50, seed=2)
    await index.upsert(points("m", more, first=1000))
    os.kill(only_child(tmp_path), signal.SIGKILL)
    with pytest.raises(IndexUnavailable):
        await search_until_it_fails(index, IndexUnavailable)
    with pytest.raises(IndexUnavailable):
        await index.flush()
    await until(index.is_healthy)
    await index.upsert(points("m", more, first=1000))
    await index.flush()
    assert await index.count("m") == len(VECTORS) + 50


def logged(data_dir: Path) -> int:
    """Bytes in Lite's log, which show the progress of a write."""
    return sum(log.stat().st_size for log in collection_of(data_dir).glob("wal/wal_data_*.arrow"))


def came_to(data_dir: Path, least: int, write: asyncio.Task[None]) -> bool:
    return logged(data_dir) > least or write.done()


async def finish(index: MilvusIndex, write: asyncio.Task[None]) -> None:
    """The kill fails the write, or the flush if the write had finished."""
    await write
    await index.flush()


@pytest.mark.drawn
async def test_kill_during_write(index: MilvusIndex, tmp_path: Path) -> None:
    many = unit_vectors(6000, seed=3)
    for attempt in range(3) if THOROUGH else (1,):
        pid = only_child(tmp_path)
        write = asyncio.create_task(index.upsert(points(f"many-{attempt}", many)))
        await until(functools.partial(came_to, tmp_path, attempt * 150_000, write))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(IndexUnavailable):
            await finish(index, write)
        await until(index.is_healthy)
        assert await index.count("m") == len(VECTORS)
        await index.upsert(points(f"many-{attempt}", many))
        await index.flush()
        assert await index.count(f"many-{attempt}") == len(many)


async def search_until_it_fails(index: MilvusIndex, kind: type[IndexUnavailable]) -> None:
    """Search, ignoring IndexUnavailable."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await index.search("m", VECTORS[0], 1)
            except kind:
                raise
            except IndexUnavailable:
                await asyncio.sleep(0.02)


async def test_search_ends_with_its_timeout(tmp_path: Path) -> None:
    index = await open_lite(tmp_path, timeouts=Timeouts(search_s=600.0))
    await index.open(SPACE)
    await index.upsert(points("m", VECTORS))
    pid = only_child(tmp_path)
    with paused(pid):
        searches = [index.search("m", VECTORS[0], 1, timeout_s=0.5) for _ in range(READ_THREADS)]
        for one in await asyncio.gather(*searches, return_exceptions=True):
            assert isinstance(one, IndexUnavailable)
            assert str(one) == "Milvus gave no answer within 0.5 s"
        async with asyncio.timeout(DEADLINE_S):  # a thread is free long before the search's own time limit
            await asyncio.get_running_loop().run_in_executor(index._readers, time.monotonic)
    assert (await index.search("m", VECTORS[3], 1, timeout_s=60.0))[0] == [fragment_id(3)]
    await index.close()


async def test_child_ends_with_killed_parent(tmp_path: Path) -> None:
    """The next start, even while the old process exits, gets the lock and the flushed data."""
    script = f"""
import asyncio, pathlib, sys
from memstream_server.adapters.milvus.index import open_lite
from tests.index.conformance import SPACE, points, unit_vectors
async def main():
    index = await open_lite(pathlib.Path({str(tmp_path)!r}))
    await index.open(SPACE)
    await index.upsert(points("m", unit_vectors(70)))
    await index.flush()
    print("flushed", flush=True)
    while True:
        await index.upsert(points("m", unit_vectors(1000)))
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        script,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"flushed\n"
    orphan = only_child(tmp_path)
    parent.kill()
    await parent.wait()
    index = await open_lite(tmp_path)
    assert not await index.open(SPACE)
    assert orphan not in children(tmp_path)
    assert set(await index.list_ids("m")) >= {fragment_id(number) for number in range(70)}
    await index.close()


async def test_child_ends_with_its_stdin(filled: Path, tmp_path: Path) -> None:
    """The end of stdin ends an orphan without a parent-death signal; in order, so that the lock is free at once."""
    child = Path(with_write_lock.__code__.co_filename)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(child), "--directory", str(tmp_path / "milvus"), "--collection", COLLECTION),
        *("--parent", str(os.getpid()), "--lock-timeout-s", "1"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert ready["ready"].startswith("http://127.0.0.1:")
    (address,) = listening(process.pid)
    assert address.partition(":")[0] in ("0100007F", "0000000000000000FFFF00000100007F")
    os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGINT)
    remote = connect_milvus(ready["ready"])
    assert await remote.open(SPACE)
    assert remote.description.startswith("milvus-lite")
    await remote.close()
    process.stdin.close()
    assert await process.wait() == 0


async def test_start_waits_for_exiting_predecessor(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "milvus" / "LOCK").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = await open_lite(tmp_path)
        opening = asyncio.create_task(index.open(SPACE))
        await until(lambda: bool(children(tmp_path)))
        await asyncio.sleep(0.5)
        assert not opening.done()
    assert not await opening
    assert await index.count("m") == len(VECTORS)
    await index.close()


def check_private(pid: int, data_dir: Path) -> None:
    """The child listens on a socket of its user's alone, and nowhere else."""
    assert listening(pid) == []
    (socket,) = sockets_in(data_dir)
    mode = socket.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert mode & 0o077 == 0
    assert (data_dir / "milvus").stat().st_mode & 0o077 == 0


async def test_private_directory_refuses_a_second_server(index: MilvusIndex, tmp_path: Path) -> None:
    first = only_child(tmp_path)
    check_private(first, tmp_path)
    second = await open_lite(tmp_path, lock_timeout_s=0.2)
    with pytest.raises(IndexUnavailable, match="another process holds the lock"):
        await second.open(SPACE)
    await second.close()
    assert children(tmp_path) == [first]
    await index.upsert(points("m", VECTORS))
    await index.flush()
    assert await index.count("m") == len(VECTORS)


def test_child_serializes_writes() -> None:
    inside, most = 0, 0
    go = threading.Event()

    def write(_request: object, _context: object) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        go.wait(0.001)
        inside -= 1

    locked = with_write_lock(write, threading.Lock())
    threads = [threading.Thread(target=locked, args=(None, None)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


async def test_long_data_path_uses_temporary_socket(tmp_path: Path) -> None:
    data_dir = tmp_path / ("long, with space, 50%#? " * 6)
    index = await open_lite(data_dir)
    assert await index.open(SPACE)
    assert sockets_in(data_dir) == []
    assert listening(only_child(data_dir)) == []
    await fill_again(index)
    await index.close()


async def test_start_removes_stale_sockets(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    stale = tmp_path / "milvus-00000000.sock"
    stale.touch()
    index = await open_lite(tmp_path)
    assert not await index.open(SPACE)
    assert not stale.exists()
    await index.close()


def collection_of(data_dir: Path) -> Path:
    return data_dir / "milvus" / "collections" / COLLECTION


def data_file(data_dir: Path) -> Path:
    return sorted(collection_of(data_dir).glob("partitions/*/data/*.parquet"))[0]


def truncate(data_dir: Path) -> None:
    with data_file(data_dir).open("r+b") as file:
        file.truncate(200)


def scribble(data_dir: Path) -> None:
    size = data_file(data_dir).stat().st_size
    data_file(data_dir).write_bytes(b"\xff" * size)


def lose_file(data_dir: Path) -> None:
    data_file(data_dir).unlink()


def damage_manifest(data_dir: Path) -> None:
    """Lite would silently use the previous manifest, with half of the rows."""
    (collection_of(data_dir) / "manifest.json").write_text('{"version": 3, "partit')


def lose_manifest(data_dir: Path) -> None:
    for manifest in collection_of(data_dir).glob("manifest.json*"):
        manifest.unlink()


def lose_schema(data_dir: Path) -> None:
    (collection_of(data_dir) / "schema.json").unlink()


def damage_schema(data_dir: Path) -> None:
    (collection_of(data_dir) / "schema.json").write_text("{}")


def lose_all(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "milvus")


def file_for_directory(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "milvus")
    (data_dir / "milvus").write_text("not a directory")


def file_for_collections(data_dir: Path) -> None:
    shutil.rmtree(data_dir / "milvus" / "collections")
    (data_dir / "milvus" / "collections").write_text("not a directory")


DAMAGES = [truncate, damage_manifest, lose_schema, file_for_directory]
"""One of each kind: data, manifest, schema, directory."""
MORE_DAMAGES = [scribble, lose_file, lose_manifest, damage_schema, lose_all, file_for_collections]


@pytest.mark.drawn
@pytest.mark.parametrize("damage", DAMAGES + (MORE_DAMAGES if THOROUGH else []))
async def test_damaged_directory_is_dropped_and_refilled(
    filled: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    shutil.copytree(filled, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    index = await open_lite(tmp_path)
    assert await index.open(SPACE)
    assert await index.count("m") == 0
    await fill_again(index)
    await index.close()
    assert not (tmp_path / "milvus.dropped").exists()
    assert not collection_of(tmp_path).with_name(f"{COLLECTION}.dropped").exists()


async def test_damaged_log_loses_nothing(index: MilvusIndex, tmp_path: Path) -> None:
    await index.upsert(points("m", unit_vectors(20, seed=5), first=500))
    (log,) = collection_of(tmp_path).glob("wal/wal_data_*.arrow")
    log.write_bytes(b"\x00" * 50)
    await kill_child(index, tmp_path)
    assert await index.count("m") == len(VECTORS)


async def test_damage_found_on_restart_is_reported_once(index: MilvusIndex, tmp_path: Path) -> None:
    truncate(tmp_path)
    os.kill(pid := only_child(tmp_path), signal.SIGKILL)
    await until(lambda: bool(set(children(tmp_path)) - {pid}))
    with pytest.raises(IndexLost):
        await search_until_it_fails(index, IndexLost)
    assert (await index.search("m", VECTORS[0], 1))[0] == []
    assert await index.is_healthy()
    await fill_again(index)


async def test_reopening_reports_loss(index: MilvusIndex, tmp_path: Path) -> None:
    """An empty index must be filled, also after a crash interrupted its filling."""
    truncate(tmp_path)
    os.kill(only_child(tmp_path), signal.SIGKILL)
    assert await index.open(SPACE)
    assert await index.open(SPACE)
    await fill_again(index)
    assert not await index.open(SPACE)


async def test_dropped_collection_is_recreated(index: MilvusIndex, tmp_path: Path) -> None:
    from pymilvus import MilvusClient

    (socket,) = sockets_in(tmp_path)
    client = MilvusClient(f"unix:{socket}", timeout=10, dedicated=True)
    for call in (
        lambda: index.search("m", VECTORS[0], 1),
        lambda: index.upsert(points("m", VECTORS)),
        lambda: index.count("m"),
    ):
        client.drop_collection(COLLECTION, timeout=10)
        with pytest.raises(IndexLost, match="was recreated"):
            await call()
        await fill_again(index)
    client.close()


async def test_failed_flush_restarts_child_and_keeps_flushed(index: MilvusIndex, tmp_path: Path) -> None:
    """A file in place of the partition's data directory simulates a full disk."""
    memory = next(name for name in map(str, range(99)) if partition_name(name, 64) != partition_name("m", 64))
    obstacle = collection_of(tmp_path) / "partitions" / partition_name(memory, 64) / "data"
    obstacle.write_text("in the way")
    more = points(memory, unit_vectors(30, seed=7))
    first = only_child(tmp_path)
    await index.upsert(more)
    with pytest.raises(IndexUnavailable, match="flush"):
        await index.flush()
    assert first not in children(tmp_path)
    obstacle.unlink(missing_ok=True)
    await until(index.is_healthy)
    assert await index.count("m") == len(VECTORS)
    await index.upsert(more)
    await index.flush()
    await kill_child(index, tmp_path)
    assert await index.count("m") == len(VECTORS)
    assert await index.count(memory) == 30


async def test_unreachable_server_raises_unavailable(unused_tcp_port: int) -> None:
    index = connect_milvus(f"http://127.0.0.1:{unused_tcp_port}")
    with pytest.raises(IndexUnavailable):
        await index.open(SPACE)
    assert not await index.is_healthy()
    await index.close()
