"""A proxy between a server and PostgreSQL's unix socket; tests cut it, silently or not, and restore it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.listeners import close_listener


class Cable:
    """Forwards a socket of the same name in `folder` to the target. Runs in its own thread."""

    def __init__(self, target: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="memstream-cable-", dir="/tmp"))  # short: paths are limited
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._whole.set()
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut(silent=False)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def cut(self, *, silent: bool) -> None:
        """Stops all traffic. Silent: connections stay open. Otherwise they are closed, and new ones are rejected."""
        asyncio.run_coroutine_threadsafe(self._cut(silent), self._loop).result(10)

    def restore(self) -> None:
        """Restores traffic: delayed bytes and new connections pass."""
        asyncio.run_coroutine_threadsafe(self._restore(), self._loop).result(10)

    async def _cut(self, silent: bool) -> None:
        self._whole.clear()
        if not silent:
            self._refusing = True
            for writer in self._writers:
                writer.transport.abort()

    async def _end(self) -> None:
        """Stops listening and ends the tasks of the connections, so that the loop can be closed."""
        assert self._server is not None
        await close_listener(self._server)
        # Tasks of asyncio that make a transport of an accepted socket are awaited: cancelled, they would leave it open.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks & self._carrying:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # the transports close their sockets

    async def _restore(self) -> None:
        self._refusing = False
        self._whole.set()

    async def _listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._carry, self.folder / self._target.name)
        os.chmod(self.folder, 0o700)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        self._writers.add(writer)
        there, here = await asyncio.open_unix_connection(self._target)
        self._writers.add(here)
        await asyncio.gather(self._copy(reader, here), self._copy(there, writer))
        for end in (writer, here):
            with contextlib.suppress(OSError):
                await end.wait_closed()  # bytes that the peer has not read yet keep it open
        self._writers -= {writer, here}
        self._carrying.discard(task)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the connection has ended
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
