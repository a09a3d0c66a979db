"""Starts and ends one Milvus Lite child process, from the parent's side, when a memory needs it.

In the server's process, Lite's pure-Python searches would stall the event loop. A `LiteProcess` is never restarted: a
restart is a new one with a new address, so a client of the old one cannot reach the new one by mistake.

It is needed when the vectors of the largest memory may soon not fit in RAM. A smaller memory is searched in RAM,
exactly, so its rows in the index would never be read. A child process takes 1 s of CPU to start, 330 MB of memory with
10,000 rows, and as much CPU for a row as its observation does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memstream_server.core.printable import number_text
from memstream_server.core.values import Vector
from memstream_server.ports.index import INDEX_FOLDER, IndexLost, IndexUnavailable, Point, VectorIndex
from memstream_server.ports.journal.records import Space

logger = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("child.py")

SOCKET_PATH_MAX = 100
"""Bytes of a unix socket's path; kernels allow 104 to 108, including the terminating zero."""
_CHECKS = 8
"""The largest memory is counted again after as many rows as this share of `needed_from`."""


@dataclass(frozen=True)
class LiteAddress:
    """The address a child listens on: a unix socket, or a free loopback port if `path` is None."""

    path: Path | None
    scratch: tempfile.TemporaryDirectory[str] | None = None
    """Temporary directory of the socket, if its path in the data directory would be invalid."""

    def remove_socket(self) -> None:
        """Remove the socket and its temporary directory. Idempotent."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        if self.scratch is not None:
            self.scratch.cleanup()


class LiteProcess:
    """A running child process. Made by `start`."""

    token = ""
    supervised = True

    def __init__(self, process: asyncio.subprocess.Process, endpoint: LiteAddress, stop_timeout_s: float) -> None:
        self.uri = ""
        self._process = process
        self._endpoint = endpoint
        self._stop_timeout_s = stop_timeout_s
        self._last_words: deque[str] = deque(maxlen=10)
        self._listener = asyncio.create_task(self._log_stderr())

    @classmethod
    async def start(
        cls,
        data_dir: Path,
        collections: Sequence[str],
        *,
        start_timeout_s: float,
        lock_timeout_s: float,
        stop_timeout_s: float,
    ) -> LiteProcess:
        """Start a child on `data_dir`/milvus and wait until it serves. Raises IndexUnavailable with the reason."""
        endpoint = make_endpoint(data_dir)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(CHILD)),
                *("--directory", str(data_dir / INDEX_FOLDER)),
                *(part for name in collections for part in ("--collection", name)),
                *(
                    "--socket",
                    str(endpoint.path or ""),
                    "--parent",
                    str(os.getpid()),
                    "--lock-timeout-s",
                    str(lock_timeout_s),
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except BaseException:  # also cancelled: no process will use the address
            endpoint.remove_socket()
            raise
        child = cls(process, endpoint, stop_timeout_s)
        try:
            async with asyncio.timeout(start_timeout_s):
                child.uri = await child._read_address()
        except TimeoutError:
            await child.kill()
            raise IndexUnavailable(f"Milvus Lite did not start within {number_text(start_timeout_s)} s") from None
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    async def wait_for_end(self) -> str:
        """Wait until the child ends; the reason, for display."""
        status = await self._process.wait()
        await asyncio.wait({self._listener})  # not `await`: a cancelled caller must not cancel the listener
        self._endpoint.remove_socket()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return ": ".join([f"Milvus Lite {how}", *list(self._last_words)[-1:]])

    async def kill(self) -> None:
        """Kill the child, without the flush of an orderly stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.wait_for_end()

    async def stop(self) -> None:
        """Stop the child in order; kill it after the timeout."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self.wait_for_end()
        except TimeoutError:
            await self.kill()

    async def _read_address(self) -> str:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise IndexUnavailable(await self.wait_for_end())
        message = json.loads(line)
        if "failed" in message:
            raise IndexUnavailable(f"Milvus Lite cannot open its directory: {message['failed']}")
        return str(message["ready"])

    async def _log_stderr(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(4096):
            lines = chunk.decode(errors="replace").splitlines()
            self._last_words.extend(lines)
            logger.debug("milvus-lite[%d]: %s", self._process.pid, "\n".join(lines))


def remove_files(data_dir: Path) -> None:
    """Remove the files of a child that has ended. After an interruption, call it again."""
    for name in (INDEX_FOLDER, f"{INDEX_FOLDER}.dropped"):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(data_dir / name)


def make_endpoint(data_dir: Path) -> LiteAddress:
    """The path of a new unix socket that only this user can access; a loopback port on Windows.

    In the data directory if gRPC's address syntax and the kernel's limit allow its path, otherwise in a temporary one.
    """
    if sys.platform == "win32":
        return LiteAddress(None)
    path = data_dir.absolute() / f"milvus-{secrets.token_hex(4)}.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_MAX and re.fullmatch(r"[A-Za-z0-9/._-]+", str(path)):
        return LiteAddress(path)
    scratch = tempfile.TemporaryDirectory(prefix="memstream-")
    return LiteAddress(Path(scratch.name) / "milvus.sock", scratch)


class OnDemandIndex:
    """`ports.index.VectorIndex` that opens `index` at `open` if `directory` exists, otherwise when it is needed.

    It is needed when a memory has `needed_from` fragments, which `count_largest` counts, or is searched here. Until
    then it is idle: upserts are dropped, deletes and flushes have nothing to do. An upsert or a search that finds the
    need raises IndexLost, and the next upsert starts it. A start that fails raises IndexUnavailable from `upsert`, and
    the next upsert tries again.
    """

    def __init__(
        self, index: VectorIndex, directory: Path, count_largest: Callable[[], Awaitable[int]], needed_from: int
    ) -> None:
        self._index = index
        self._directory = directory
        self._count_largest = count_largest
        self._needed_from = needed_from
        self._needed = False
        self._unchecked = 0
        """Rows dropped since the largest memory was counted."""
        self._spaces: list[Space] = []
        """Spaces to open with the first row, the default first; empty unless the index is open and not started."""
        self._start_failed = False

    @property
    def description(self) -> str:
        return self._index.description

    @property
    def keeps_deleted(self) -> bool:
        return self._index.keeps_deleted

    @property
    def is_idle(self) -> bool:
        return bool(self._spaces) and not self._needed

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """See the port. Without a directory it starts nothing; all rows are to be filled in if it is needed."""
        self._spaces = []
        if self._directory.exists():
            return await self._index.open(space, beside)
        self._spaces = [each for each in (space, beside) if each is not None]
        await self._check_need()
        return self._needed

    async def add_space(self, space: Space) -> bool:
        if not self._spaces:
            return await self._index.add_space(space)
        if space not in self._spaces:
            self._spaces.append(space)
        return self._needed

    async def remove_space(self, space: Space) -> None:
        if not self._spaces:
            await self._index.remove_space(space)
        elif self._spaces == [space]:
            raise IndexUnavailable(f"the index of {space.model} is the only one")
        elif space in self._spaces:
            self._spaces.remove(space)

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        if self.is_idle:
            self._unchecked += len(points)
            if self._unchecked * _CHECKS >= self._needed_from:
                await self._check_need()
            if self._needed:
                raise IndexLost("a memory has grown so large that it needs the index")
            return
        if self._spaces and points:
            await self._start()
        if not self._spaces:
            await self._index.upsert(points, model)

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None:
        if not self._spaces:
            await self._index.delete(memory, fragments, model)

    async def flush(self) -> None:
        if not self._spaces:
            await self._index.flush()

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        if self.is_idle:
            self._needed = True
            raise IndexLost("a memory is searched that does not fit in RAM")
        if self._spaces:
            return [], np.empty(0, np.float32)
        return await self._index.search(memory, vector, limit, model, timeout_s)

    async def count(self, memory: str, model: str = "") -> int:
        return 0 if self._spaces else await self._index.count(memory, model)

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        return [] if self._spaces else await self._index.list_ids(memory, model)

    async def erase_deleted(self) -> bool:
        return True if self._spaces else await self._index.erase_deleted()

    async def drop_all(self) -> None:
        self._spaces = []
        await self._index.drop_all()

    async def is_healthy(self) -> bool:
        return not self._start_failed if self._spaces else await self._index.is_healthy()

    async def close(self) -> None:
        await self._index.close()

    async def _check_need(self) -> None:
        self._unchecked = 0
        self._needed = self._needed_from == 0 or await self._count_largest() >= self._needed_from

    async def _start(self) -> None:
        """Open the index with all spaces. It stays an empty index until then, so a failure changes no answer."""
        default, *others = self._spaces
        self._start_failed = True
        await self._index.open(default, *others[:1])  # whether it is empty is known
        for space in others[1:]:
            await self._index.add_space(space)
        self._spaces, self._start_failed = [], False
