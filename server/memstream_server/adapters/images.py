"""The files of images: one per memory, replaced atomically, named by memory, epoch and software.

Rule 1. One thread writes, in the order of the calls. A removal waits for it only if a write of that memory waits there:
a commit must not wait for images of other memories.
Rule 2. A file that another version of the software wrote has another name, and the next start removes it.
Rule 3. A file is renamed, replaced or removed under `_changing` only, so that a removal meets the file's present name.

A file is: magic (16), CRC-32 of all that follows (4), length of the header (4), header, arrays. The header is msgpack:
the key, the values, and name, type, shape and place of each array. Arrays begin at multiples of 64 bytes, are
little-endian and hold numbers only. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import re
import shutil
import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.core.arrays import Parts
from memstream_server.ports.images import Image, ImageKey

log = structlog.get_logger(__name__)

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Uids that may be part of a file's name."""
READERS_MAX = 4
"""Images read at once."""
MAPPED_BYTES_MIN = 16 << 20
"""Images from this size on are mapped, not read: the system reads the pages that are used, and may drop them again. A
mapping keeps a descriptor open, so not every small memory has one."""
_PART = "part"
"""Name of the file that is being written."""
MAGIC = b"memstream image\n"
LAYOUT = 7
"""Raise it with every change of the layout or of what a working set packs."""
_PREFIX = struct.Struct("<16sII")
_ALIGNMENT = 64
_READ_BYTES = 1 << 20
_KINDS = frozenset("biuf")
"""Of numpy types: booleans, integers, floats."""


class _Kept(NamedTuple):
    """An image of the folder."""

    epoch: int
    size: int
    """In bytes."""
    written: int = 0
    """Tells it from other images of the memory."""


class FolderImages:
    """`ports.images.Images` in a folder. `close` it after the last use."""

    def __init__(
        self,
        folder: Path,
        software: str,
        bytes_max: int,
        free_min_bytes: int = 0,
        count_read: Callable[[str], None] = lambda _outcome: None,
    ) -> None:
        """`software`: an image of another one is not read. `count_read` is called with "hit", "miss" or "damaged"."""
        self._folder, self._bytes_max, self._free_min_bytes = folder, bytes_max, free_min_bytes
        self._suffix = "." + blake2b(f"{LAYOUT} {software}".encode(), digest_size=8).hexdigest()
        self._count_read = count_read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")
        self._readers = ThreadPoolExecutor(READERS_MAX, thread_name_prefix="images-read")
        self._tickets: dict[str, int] = {}
        """The latest announced write of a memory, until it is done."""
        self._last_ticket = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """By memory, in order of writing; changed under `_changing`."""
        self._changing = threading.Lock()
        self._lock = -1
        self._unsynced = False
        """Whether a removal may not be durable."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all images."""
        with self._changing:
            return sum(kept.size for kept in self._kept.values())

    async def open(self) -> None:
        """Lock the folder and find the images of an earlier process; remove what this software cannot read.

        Raises OSError, also if another process has the folder.
        """
        await self._run(self._scan_folder)

    async def close(self) -> None:
        """Wait for the waiting reads and writes."""
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._thread.shutdown)
        if self._lock >= 0:
            os.close(self._lock)

    def read(self, memory: str, epoch: int, space: str, analyzer: int) -> Future[Image | None] | None:
        """See Images."""
        kept = self._kept.get(memory)
        if kept is None or memory in self._tickets:
            self._count_read("miss")
            return None
        return self._readers.submit(self._read_image, memory, kept, (epoch, space, analyzer))

    def list_epochs(self) -> dict[str, int]:
        """See Images."""
        with self._changing:
            return {memory: kept.epoch for memory, kept in self._kept.items()}

    def set_epoch(self, memory: str, epoch: int) -> None:
        """See Images."""
        kept = self._kept.get(memory)
        if kept is None or kept.epoch == epoch:  # usual on SQLite: no lock
            return
        with self._changing, contextlib.suppress(OSError):  # deleted
            kept = self._kept.get(memory)
            if kept is not None:
                self._path(memory, kept.epoch).rename(self._path(memory, epoch))
                self._kept[memory] = kept._replace(epoch=epoch)

    def drop(self, memory: str, epoch: int | None = None) -> None:
        """See Images."""
        kept = self._kept.get(memory)
        if kept is not None and epoch in (None, kept.epoch):
            self._thread.submit(self._remove_file, memory, kept)

    def has(self, memory: str) -> bool:
        """See Images."""
        return memory in self._tickets or memory in self._kept

    def announce(self, memory: str) -> int:
        """See Images."""
        self._last_ticket += 1
        self._tickets[memory] = self._last_ticket
        return self._last_ticket

    async def write(self, ticket: int, key: ImageKey, pack: Callable[[], Parts | None]) -> None:
        """See Images."""
        await self._run(self._write_image, ticket, key, pack)

    async def remove(self, memory: str, durable: bool = False) -> None:
        """See Images."""
        if self._tickets.pop(memory, None) is not None:
            await self._run(self._remove_file, memory)
        elif memory in self._kept:
            await asyncio.to_thread(self._remove_file, memory)
        if durable and self._unsynced:
            await self._run(self._sync_folder)

    async def remove_all(self) -> None:
        """See Images."""
        self._tickets.clear()
        await self._run(self._remove_files)

    # ---- in threads
    async def _run(self, work: Callable[..., None], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))

    def _path(self, memory: str, epoch: int) -> Path:
        return self._folder / f"{memory}.{epoch}{self._suffix}"

    def _read_image(self, memory: str, kept: _Kept, wanted: tuple[int, str, int]) -> Image | None:
        epoch, *rest = wanted
        image, outcome = None, "miss"
        try:
            if kept.epoch in (epoch, epoch - 1):
                image = _read_file(self._path(memory, kept.epoch))
        except OSError:  # deleted
            pass
        except Damaged as error:
            log.warning("image_damaged", memory=memory, reason=error)
            outcome = "damaged"
        if image is not None and [image.key.memory, image.key.space, image.key.analyzer] == [memory, *rest]:
            outcome = "hit"
        else:
            image = None
            self._thread.submit(self._remove_file, memory, kept)
        self._count_read(outcome)
        return image

    def _scan_folder(self) -> None:
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found: list[tuple[float, str, _Kept]] = []
        for entry in os.scandir(self._folder):
            memory, _, epoch = entry.name.removesuffix(self._suffix).partition(".")
            if entry.name.endswith(self._suffix) and epoch.isdecimal():
                seen = entry.stat()
                found.append((seen.st_mtime, memory, _Kept(int(epoch), seen.st_size)))
            else:
                os.unlink(entry)
        for _, memory, kept in sorted(found):
            if memory in self._kept:
                self._remove_file(memory)  # a crash kept it beside its successor
            self._kept[memory] = kept
        self._enforce_bound()

    def _write_image(self, ticket: int, key: ImageKey, pack: Callable[[], Parts | None]) -> None:
        try:
            if self._tickets.get(key.memory) == ticket and _NAME.fullmatch(key.memory):
                parts = pack()
                if parts is not None:
                    self._write_file(ticket, key, encode_image(key, parts))
        finally:
            if self._tickets.get(key.memory) == ticket:
                del self._tickets[key.memory]

    def _write_file(self, ticket: int, key: ImageKey, pieces: list[memoryview]) -> None:
        size, part = sum(piece.nbytes for piece in pieces), self._folder / _PART
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if size > self._bytes_max or shutil.disk_usage(self._folder).free - size < self._free_min_bytes:
                return
            with open(part, "wb", opener=partial(os.open, mode=0o600)) as file:
                file.writelines(pieces)
            with self._changing:
                if self._tickets.get(key.memory) == ticket:
                    self._replace_file(part, key, _Kept(key.epoch, size, ticket))
        except OSError as error:
            log.warning("image_not_written", memory=key.memory, error=error)
        finally:
            with contextlib.suppress(OSError):  # if it stays, the next write or start removes it
                part.unlink(missing_ok=True)
        self._enforce_bound()

    def _replace_file(self, part: Path, key: ImageKey, kept: _Kept) -> None:
        part.replace(self._path(key.memory, kept.epoch))
        former = self._kept.pop(key.memory, kept)
        self._kept[key.memory] = kept
        if former.epoch != kept.epoch:
            self._path(key.memory, former.epoch).unlink(missing_ok=True)

    def _remove_file(self, memory: str, which: _Kept | None = None) -> None:
        """Remove the memory's file; with `which` only that one."""
        with self._changing:
            kept = self._kept.get(memory)
            if kept is not None and which in (None, kept):
                self._path(memory, kept.epoch).unlink(missing_ok=True)
                del self._kept[memory]
                self._unsynced = True

    def _remove_files(self) -> None:
        for memory in self.list_epochs():
            self._remove_file(memory)
        self._sync_folder()

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._unsynced = False

    def _enforce_bound(self) -> None:
        while self.size_bytes > self._bytes_max:
            with self._changing:
                first = next(iter(self._kept), "")
            self._remove_file(first)


def _read_file(path: Path) -> Image:
    """Raises OSError and Damaged."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size >= MAPPED_BYTES_MIN:
            check_file(file)  # a failing disk is an error here, and would end the process at a mapped page
            return decode_image(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8), True)
        data = np.empty(size, np.uint8)
        view, done = data.data, 0
        while done < len(data) and (count := file.readinto(view[done:])):
            done += count
        return decode_image(data[:done])


class Damaged(ValueError):
    """The bytes are not those that were written."""


class _Array(msgspec.Struct, array_like=True):
    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    """Counted from the first array."""


class _Header(msgspec.Struct):
    key: ImageKey
    values: dict[str, Any]
    arrays: list[_Array]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_image(key: ImageKey, parts: Parts) -> list[memoryview]:
    """The file in pieces; the arrays are not copied."""
    arrays, pieces, at = [], [], 0
    for name, array in parts.arrays.items():
        flat = np.ascontiguousarray(array)
        arrays.append(_Array(name, flat.dtype.newbyteorder("<").str, flat.shape, at))
        padding = -flat.nbytes % _ALIGNMENT
        pieces += [flat.reshape(-1).view(np.uint8).data, memoryview(bytes(padding))]
        at += flat.nbytes + padding
    header = _encoder.encode(_Header(key, dict(parts.values), arrays))
    pieces.insert(0, memoryview(bytes(-(_PREFIX.size + len(header)) % _ALIGNMENT)))
    check = zlib.crc32(header)
    for piece in pieces:
        check = zlib.crc32(piece, check)
    return [memoryview(_PREFIX.pack(MAGIC, check, len(header))), memoryview(header), *pieces]


def check_file(file: BinaryIO) -> None:
    """Read a file from its start, and compare its checksum. Raises Damaged and OSError."""
    prefix = file.read(_PREFIX.size)
    check, buffer = 0, bytearray(_READ_BYTES)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # of every file that is opened unbuffered
        check = zlib.crc32(memoryview(buffer)[:count], check)
    if len(prefix) < _PREFIX.size or check != _PREFIX.unpack(prefix)[1]:
        raise Damaged("its checksum differs")


def decode_image(data: npt.NDArray[np.uint8], mapped: bool = False) -> Image:
    """What was encoded, as views of `data`. `mapped`: these are a file's pages, which `check_file` has read.

    Raises Damaged.
    """
    if len(data) < _PREFIX.size:
        raise Damaged("it is shorter than its prefix")
    magic, check, header_bytes = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != MAGIC:
        raise Damaged("it does not begin like an image")
    if not mapped and zlib.crc32(data.data[_PREFIX.size :]) != check:
        raise Damaged("its checksum differs")
    end = _PREFIX.size + header_bytes
    header = _decode_header(data[_PREFIX.size : end].tobytes())
    first = end + -end % _ALIGNMENT
    arrays = {each.name: _view_array(data, first, each) for each in header.arrays}
    return Image(header.key, Parts(arrays, header.values, mapped))


def _decode_header(packed: bytes) -> _Header:
    try:
        return _decoder.decode(packed)
    except msgspec.DecodeError as error:
        raise Damaged("its header cannot be decoded") from error


def _view_array(data: npt.NDArray[np.uint8], first: int, entry: _Array) -> npt.NDArray[Any]:
    type_ = np.dtype(entry.type)
    count = int(np.prod(entry.shape, dtype=np.int64))
    if type_.kind not in _KINDS or first + entry.start + count * type_.itemsize > len(data):
        raise Damaged("an array does not fit")
    found: npt.NDArray[Any] = np.frombuffer(data, type_, count, first + entry.start)
    return found.reshape(entry.shape)
