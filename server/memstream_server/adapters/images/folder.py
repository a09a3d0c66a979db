"""The files of images: one per memory, replaced atomically.

Rule 1. One thread writes, in the order of the calls. A removal waits for it only if a write of that memory waits there:
a commit must not wait for images of other memories.
Rule 2. A file that another version of the software wrote has another name, and the next start removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.adapters.images.layout import LAYOUT, Damaged, decode_image, encode_image
from memstream_server.core.arrays import Parts
from memstream_server.ports.images import Image, ImageKey

log = structlog.get_logger(__name__)

_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Uids that may be part of a file's name."""
_PART = "part"
"""Name of the file that is being written."""


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
        self._tickets: dict[str, int] = {}
        """The latest announced write of a memory, until it is done."""
        self._last_ticket = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        """Bytes by memory, in order of writing; changed under `_changing`."""
        self._changing = threading.Lock()
        self._unsynced = False
        """Whether a removal may not be durable."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all images."""
        with self._changing:
            return sum(self._sizes.values())

    async def open(self) -> None:
        """Find the images of an earlier process; remove what this software cannot read."""
        await self._run(self._scan_folder)

    async def close(self) -> None:
        """Wait for the waiting writes."""
        await asyncio.to_thread(self._thread.shutdown)

    def read(self, memory: str, space: str, analyzer: int) -> Image | None:
        """See Images."""
        image, outcome = None, "miss"
        try:
            if memory not in self._tickets:
                data, inode = _read_file(self._path(memory))
                image = decode_image(data)
        except OSError:  # there is none
            pass
        except Damaged as error:
            log.warning("image_damaged", memory=memory, reason=error)
            outcome = "damaged"
            self._thread.submit(self._remove_file, memory, inode)
        if image is not None:
            wanted = replace(image.key, memory=memory, space=space, analyzer=analyzer)
            outcome = "hit" if image.key == wanted else "miss"
            if outcome == "miss":
                self._thread.submit(self._remove_file, memory, inode)
                image = None
        self._count_read(outcome)
        return image

    def drop(self, memory: str) -> None:
        """See Images."""
        self._thread.submit(self._remove_file, memory)

    def has(self, memory: str) -> bool:
        """See Images."""
        return memory in self._tickets or memory in self._sizes

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
        elif memory in self._sizes:
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

    def _path(self, memory: str) -> Path:
        return self._folder / (memory + self._suffix)

    def _scan_folder(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found: list[tuple[float, str, int]] = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(self._suffix):
                seen = entry.stat()
                found.append((seen.st_mtime, entry.name.removesuffix(self._suffix), seen.st_size))
            else:
                os.unlink(entry)
        self._sizes.update({memory: size for _, memory, size in sorted(found)})
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
            if self._tickets.get(key.memory) == ticket:
                with self._changing:
                    self._sizes[key.memory] = size
                    self._sizes.move_to_end(key.memory)
                part.replace(self._path(key.memory))
        except OSError as error:
            log.warning("image_not_written", memory=key.memory, error=error)
        finally:
            with contextlib.suppress(OSError):  # if it stays, the next write or start removes it
                part.unlink(missing_ok=True)
        self._enforce_bound()

    def _remove_file(self, memory: str, inode: int | None = None) -> None:
        """Remove the file, with `inode` only that one."""
        path = self._path(memory)
        if inode is not None and (not path.exists() or path.stat().st_ino != inode):
            return
        path.unlink(missing_ok=True)
        with self._changing:
            self._sizes.pop(memory, None)
        self._unsynced = True

    def _remove_files(self) -> None:
        with self._changing:
            memories = list(self._sizes)
        for memory in memories:
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
                first = next(iter(self._sizes), "")
            self._remove_file(first)


def _read_file(path: Path) -> tuple[npt.NDArray[np.uint8], int]:
    """(the bytes, the file's inode). Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        seen = os.fstat(file.fileno())
        data = np.empty(seen.st_size, np.uint8)
        view, done = data.data, 0
        while done < len(data) and (count := file.readinto(view[done:])):
            done += count
        return data[:done], seen.st_ino
