"""An unreliable network between client and server: connections are reset or stalled after any number of bytes."""

from __future__ import annotations

import asyncio
import random
import socket
from types import TracebackType
from typing import Self

STALL_S = 0.15
"""Duration of a stall: long enough for the other end to send more."""
CHUNK = 1 << 14


class Relay:
    """Relays 127.0.0.1:`port` to `target` (host:port, or unix:/path).

    While `bytes_mean` is set, each direction of a new connection is reset, or first stalled, after that many bytes on
    average. A reset discards data in flight, and neither side knows how much the other received.
    """

    def __init__(self, target: str, draw: random.Random | None = None) -> None:
        self.target = target
        self.bytes_mean = 0
        self.cuts = 0
        self.stalls = 0
        self.port = 0
        self.trap: tuple[bytes, ...] = ()
        """The next connection whose requests contain these byte strings in order is reset, once; `sprung` counts it."""
        self.trap_done = False
        """Whether the last of these requests is delivered and only its answer is lost."""
        self.sprung = 0
        self._draw = draw or random.Random()
        self._trap_progress: dict[asyncio.StreamWriter, int] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.down()

    async def up(self) -> None:
        """Accept connections, on the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def down(self) -> None:
        """Refuse connections and reset the open ones."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self.cut()

    def _accept(self, listener: socket.socket) -> None:
        """Not asyncio's server: when that one closes, it forgets connections being accepted and leaves them open."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the client has disconnected already
        task = asyncio.create_task(self._relay_connection(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cut(self) -> int:
        """Reset all connections; returns how many there were."""
        ends = len(self._open)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        return ends // 2

    async def _relay_connection(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            there, here = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, here}
        if self._listener is None:  # stopped in the meantime
            for end in ends:
                end.transport.abort()
            return
        self._open |= ends
        answers_dropped = asyncio.Event()
        ways = [
            asyncio.create_task(self._copy_bytes(reader, here, answers_dropped, is_request=True)),
            asyncio.create_task(self._copy_bytes(there, writer, answers_dropped)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in ends:
                end.transport.abort()
            self._open -= ends

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.target.startswith("unix:"):
            return await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
        host, _, port = self.target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _copy_bytes(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers_dropped: asyncio.Event,
        is_request: bool = False,
    ) -> None:
        """Copy until end of stream, the drawn number of bytes, or the trap. After `answers_dropped`, answers are
        discarded."""
        left = self._draw_bytes()
        try:
            while data := await reader.read(CHUNK):
                if answers_dropped.is_set() and not is_request:
                    return
                if is_request and self._completes_trap(writer, data):
                    if not self.trap_done:
                        return
                    answers_dropped.set()
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await writer.drain()
                    if self._draw.random() < 0.5:
                        self.cuts += 1
                        return
                    self.stalls += 1
                    await asyncio.sleep(STALL_S)
                    data, left = data[left:], self._draw_bytes()
                elif left is not None:
                    left -= len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            return  # a failing socket ends the connection like a reset

    def _completes_trap(self, connection: asyncio.StreamWriter, request: bytes) -> bool:
        """Whether this request completes the trap."""
        if not self.trap:
            self._trap_progress.clear()
            return False
        place = self._trap_progress.get(connection, 0)
        while place < len(self.trap) and self.trap[place] in request:
            place += 1
        self._trap_progress[connection] = place
        if place < len(self.trap):
            return False
        self.trap = ()
        self._trap_progress.clear()
        self.sprung += 1
        return True

    def _draw_bytes(self) -> int | None:
        return 1 + int(self._draw.expovariate(1 / self.bytes_mean)) if self.bytes_mean else None
