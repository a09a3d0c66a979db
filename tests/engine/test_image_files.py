"""Files of images: damaged and foreign ones are not read, writes are atomic, and the folder stays within its bound."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog

from memstream_server.adapters import images as image_files
from memstream_server.adapters.images import Damaged, FolderImages, decode_image
from memstream_server.core.arrays import Parts
from memstream_server.ports.images import Image, ImageKey

KEY = ImageKey(memory="m1", epoch=1, revision=7, time_us=70, space="hashing-4", analyzer=3)
MIB = 1 << 20


def parts(size: int = 8) -> Parts:
    arrays = {"numbers": np.arange(size, dtype=np.int64), "flags": np.array([True, False, True])}
    return Parts(arrays | {"rows": np.ones((size, 4), np.float32)}, {"ids": ["a", "b"], "links": {"a": "b"}})


@asynccontextmanager
async def opened(
    path: Path, bytes_max: int = MIB, free_min_bytes: int = 0, software: str = "1"
) -> AsyncIterator[FolderImages]:
    images = FolderImages(path / "images", software, bytes_max, free_min_bytes)
    try:
        await images.open()
        yield images
    finally:
        await images.close()


async def write(images: FolderImages, key: ImageKey = KEY, size: int = 8) -> None:
    await images.write(images.announce(key.memory), key, lambda: parts(size))


def read_image(images: FolderImages, key: ImageKey = KEY) -> Image | None:
    reading = images.read(key.memory, key.epoch, key.space, key.analyzer)
    return None if reading is None else reading.result()


def read(images: FolderImages, key: ImageKey = KEY) -> Parts | None:
    """The parts of the memory's image, if it was written under this key."""
    image = read_image(images, key)
    return image.parts if image is not None and image.key == key else None


def files(path: Path) -> list[Path]:
    """Oldest first; by name those that were written within one tick of the file system's clock."""
    return sorted((path / "images").iterdir(), key=lambda file: (file.stat().st_mtime_ns, file.name))


def check_equal(found: Parts | None, size: int = 8) -> None:
    assert found is not None
    expected = parts(size)
    assert found.values == expected.values
    assert found.arrays.keys() == expected.arrays.keys()
    for name, array in found.arrays.items():
        assert (array.dtype, array.shape) == (expected.arrays[name].dtype, expected.arrays[name].shape)
        assert array.tobytes() == expected.arrays[name].tobytes()


async def test_an_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        check_equal(read(images))
    async with opened(tmp_path) as images:
        check_equal(read(images))
        assert images.size_bytes == files(tmp_path)[0].stat().st_size


async def test_no_damaged_byte_is_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        (file,) = files(tmp_path)
        whole = file.read_bytes()
        damaged = [whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :] for at in range(len(whole))]
        damaged += [whole[:length] for length in range(len(whole))]
        for data in [*damaged, whole + b"\0"]:
            with pytest.raises(Damaged):
                decode_image(np.frombuffer(data, np.uint8))
        file.write_bytes(damaged[-1])
        with structlog.testing.capture_logs() as logged:
            assert read(images) is None
        assert [(one["event"], one["memory"]) for one in logged] == [("image_damaged", "m1")]
    assert files(tmp_path) == []


async def test_a_large_image_is_mapped_and_may_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "MAPPED_BYTES_MIN", 1)
    async with opened(tmp_path) as images:
        await write(images)
        (file,) = files(tmp_path)
        whole = file.read_bytes()
        first, second = read(images), read(images)
        check_equal(first)
        assert first is not None
        assert first.mapped
        first.own_array("numbers")[:] = 7
        assert file.read_bytes() == whole
        await images.remove("m1")
        check_equal(second)  # which still has the pages of the removed file
        await write(images)
        (file,) = files(tmp_path)
        for data in (bytes([whole[0] ^ 1]) + whole[1:], whole[:-1], whole[:-1] + b"~", b"too short"):
            file.write_bytes(data)
            assert read(images) is None
            await write(images)


@pytest.mark.parametrize(
    "other",
    [
        {"space": "hashing-8"},
        {"analyzer": 4},
    ],
)
async def test_a_foreign_image_is_removed(tmp_path: Path, other: dict[str, object]) -> None:
    async with opened(tmp_path) as images:
        await write(images, replace(KEY, **other))  # type: ignore[arg-type]  # real fields
        assert read(images) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("other", [{"revision": 6}, {"revision": 8}, {"time_us": 71}])
async def test_the_caller_judges_the_revision(tmp_path: Path, other: dict[str, int]) -> None:
    async with opened(tmp_path) as images:
        await write(images, replace(KEY, **other))  # type: ignore[arg-type]  # real fields
        image = read_image(images)
        assert image is not None
        assert image.key == replace(KEY, **other)  # type: ignore[arg-type]  # real fields
        images.drop("m1")
    assert files(tmp_path) == []


async def test_an_announced_image_is_not_read_yet(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        later = images.announce("m1")
        assert read(images) is None
        await images.write(later, replace(KEY, revision=8), lambda: parts(9))
        check_equal(read(images, replace(KEY, revision=8)), 9)


async def test_an_image_of_another_memory_is_not_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
    (file,) = files(tmp_path)
    file.rename(file.with_name(file.name.replace("m1", "m2")))
    async with opened(tmp_path) as images:
        assert images.has("m2")
        assert read_image(images, replace(KEY, memory="m2")) is None
        assert read(images) is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("other", [4, 1])
async def test_an_image_follows_the_epochs_of_its_owner(tmp_path: Path, other: int) -> None:
    def read_at(epoch: int) -> Parts | None:
        image = read_image(images, replace(KEY, epoch=epoch))
        return None if image is None else image.parts

    async with opened(tmp_path) as images:
        await write(images)
        check_equal(read_at(2))
        images.set_epoch("m1", 2)
        images.set_epoch("m2", 2)
        check_equal(read_at(2))
    async with opened(tmp_path) as images:
        assert images.list_epochs() == {"m1": 2}
        check_equal(read_at(3))
        assert read_at(other) is None  # another process owned it, or the journal is older than the image
    assert files(tmp_path) == []


async def test_a_drop_removes_an_image_of_its_epoch_only(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        images.drop("m1", epoch=2)
    async with opened(tmp_path) as images:
        check_equal(read(images))
        writing = asyncio.create_task(write(images, replace(KEY, memory="m2")))  # the drop waits behind it
        images.drop("m1", epoch=1)
        images.set_epoch("m1", 2)
        await writing
    async with opened(tmp_path) as images:
        assert images.list_epochs() == {"m2": 1, "m1": 2}
        images.drop("m1", epoch=2)
    assert [file.name.split(".")[0] for file in files(tmp_path)] == ["m2"]


async def test_of_two_images_of_a_memory_a_start_keeps_the_newer(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
    (older,) = files(tmp_path)
    left = older.read_bytes()
    async with opened(tmp_path) as images:
        await write(images, replace(KEY, epoch=2), 9)
    (newer,) = files(tmp_path)
    older.write_bytes(left)  # as a kill between the two steps of a replacement leaves it
    os.utime(older, ns=(0, 0))
    async with opened(tmp_path) as images:
        assert files(tmp_path) == [newer]
        check_equal(read(images, replace(KEY, epoch=2)), 9)


async def test_two_processes_do_not_use_one_folder(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        with pytest.raises(BlockingIOError):
            async with opened(tmp_path):
                pass
        check_equal(read(images))
    async with opened(tmp_path) as images:
        check_equal(read(images))


async def test_a_start_removes_images_of_other_software(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
    (tmp_path / "images" / "part").write_bytes(b"left by a killed process")
    async with opened(tmp_path, software="2") as images:
        assert files(tmp_path) == []
        assert read(images) is None


async def test_the_least_recently_written_leave_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as images:
        await write(images)
        one = images.size_bytes
    async with opened(tmp_path, bytes_max=2 * one) as images:
        for name in ("m2", "m1", "m3"):
            await write(images, replace(KEY, memory=name))
        assert [file.name.partition(".")[0] for file in files(tmp_path)] == ["m1", "m3"]
        await write(images, replace(KEY, memory="m4"), size=1_000)  # larger than the bound
        assert not images.has("m4")
    async with opened(tmp_path, bytes_max=one) as images:
        assert (images.has("m1"), images.has("m3")) == (False, True)
        check_equal(read(images, replace(KEY, memory="m3")))


async def test_a_removal_cancels_a_write_in_progress(tmp_path: Path) -> None:
    packing, go_on = threading.Event(), threading.Event()

    def pack() -> Parts:
        packing.set()
        go_on.wait()
        return parts()

    async with opened(tmp_path) as images:
        writing = asyncio.create_task(images.write(images.announce("m1"), KEY, pack))
        await asyncio.to_thread(packing.wait)
        later = images.announce("m2")
        removing = [asyncio.create_task(images.remove(name, durable=True)) for name in ("m1", "m2")]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(writing, *removing)
        await images.write(later, replace(KEY, memory="m2"), parts)
        assert files(tmp_path) == []


async def test_a_removal_waits_for_no_other_memory(tmp_path: Path) -> None:
    go_on = threading.Event()

    def pack() -> Parts:
        go_on.wait()
        return parts()

    async with opened(tmp_path) as images:
        await write(images)
        writing = asyncio.create_task(images.write(images.announce("m2"), replace(KEY, memory="m2"), pack))
        await asyncio.sleep(0)
        await images.remove("m1")
        assert files(tmp_path) == []
        go_on.set()
        await writing
        assert images.has("m2")


async def test_without_space_nothing_is_written(tmp_path: Path) -> None:
    async with opened(tmp_path, free_min_bytes=1 << 60) as images:
        await write(images)
        assert files(tmp_path) == []


async def test_a_failed_write_is_logged_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as images:
        (tmp_path / "images").rmdir()
        (tmp_path / "images").write_bytes(b"no folder")
        with structlog.testing.capture_logs() as logged:
            await write(images)
        assert [one["event"] for one in logged] == ["image_not_written"]
        assert read(images) is None
        (tmp_path / "images").unlink()
        await write(images)  # the folder may be deleted at any time
        check_equal(read(images))


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from memstream_server.adapters import images as image_files
from tests.engine.test_image_files import KEY, STEPS, opened, write
from dataclasses import replace

async def main(step):
    async with opened(Path(sys.argv[1]) / step) as images:
        await write(images)
        def kill(*_, **_options):
            os.kill(os.getpid(), signal.SIGKILL)
        def write_half(path, mode, **options):
            file = open(path, mode, **options)
            class Half:
                def __enter__(self): return self
                def __exit__(self, *_): ...
                def writelines(self, pieces):
                    file.write(b"".join(pieces)[:300]); file.flush(); kill()
            return Half()
        if step == "packed":
            image_files.encode_image = kill
        elif step == "opened":
            image_files.open = kill
        elif step == "half":
            image_files.open = write_half
        elif step == "written":
            Path.replace = kill
        else:
            replacing = Path.replace
            Path.replace = lambda *both: (replacing(*both), kill())
        await write(images, replace(KEY, revision=8), size=9)

for step in STEPS:  # one start of Python for all
    child = os.fork()
    if not child:
        asyncio.run(main(step))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
STEPS = ("packed", "opened", "half", "written", "replaced")


async def test_a_kill_leaves_the_old_image_or_the_new_one(tmp_path: Path) -> None:
    killing = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KILLED, str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await killing.communicate()
    assert out.split() == [str(-signal.SIGKILL).encode()] * len(STEPS), err
    for step in STEPS:
        async with opened(tmp_path / step) as images:
            newer = read(images, replace(KEY, revision=8))
            if step == "replaced":
                check_equal(newer, 9)
            else:
                assert newer is None
            assert not (tmp_path / step / "images" / "part").exists()  # another file may be on its way out
