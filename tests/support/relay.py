"""A network between a client and a server that fails: connections cut off, or held up, after any number of bytes."""

from __future__ import annotations

import asyncio
import random
import socket
from types import TracebackType
from typing import Self

STALL_S = 0.15
"""How long a connection is held up: long enough for the other end to have more to say."""
CHUNK = 1 << 14


class Relay:
    """Carries 127.0.0.1:`port` to `target` (host:port, or unix:/path).

    While `bytes_mean` is set, each direction of a new connection meets its end, or first a stall, after so many bytes
    on the average. An end is a reset: what was on its way is gone, and neither side knows how much the other got.
    """

    def __init__(self, target: str, draw: random.Random | None = None) -> None:
        self.target = target
        self.bytes_mean = 0
        self.cuts = 0
        self.stalls = 0
        self.port = 0
        self.trap: tuple[bytes, ...] = ()
        """A connection ends whose requests have these in them one after the other; once, and `sprung` counts it."""
        self.trap_done = False
        """Whether the last of these requests still arrives, and only its answer does not."""
        self.sprung = 0
        self._draw = draw or random.Random()
        self._led: dict[asyncio.StreamWriter, int] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None
        self._carried: set[asyncio.Task[None]] = set()

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
        """Take connections, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def down(self) -> None:
        """Refuse connections and cut those that are open."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        self.cut()

    def _accept(self, listener: socket.socket) -> None:
        """Not asyncio's server: one that closes forgets whom it is accepting, and leaves them open and unheard."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # who it was has gone again
        task = asyncio.create_task(self._carry(connection))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    def cut(self) -> int:
        """Reset all connections; how many there were."""
        ends = len(self._open)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        return ends // 2

    async def _carry(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            there, here = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, here}
        if self._listener is None:  # it went down meanwhile
            for end in ends:
                end.transport.abort()
            return
        self._open |= ends
        deaf = asyncio.Event()
        ways = [
            asyncio.create_task(self._copy(reader, here, deaf, asking=True)),
            asyncio.create_task(self._copy(there, writer, deaf)),
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

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event, asking: bool = False
    ) -> None:
        """Until the end: the other's, that which was drawn, or the trap's. Once `deaf`, an answer is not carried."""
        left = self._drawn()
        try:
            while data := await reader.read(CHUNK):
                if deaf.is_set() and not asking:
                    return
                if asking and self._springs(writer, data):
                    if not self.trap_done:
                        return
                    deaf.set()
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    await writer.drain()
                    if self._draw.random() < 0.5:
                        self.cuts += 1
                        return
                    self.stalls += 1
                    await asyncio.sleep(STALL_S)
                    data, left = data[left:], self._drawn()
                elif left is not None:
                    left -= len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            return  # an end as good as any other

    def _springs(self, connection: asyncio.StreamWriter, request: bytes) -> bool:
        """Whether the trap is complete with this request."""
        if not self.trap:
            self._led.clear()
            return False
        place = self._led.get(connection, 0)
        while place < len(self.trap) and self.trap[place] in request:
            place += 1
        self._led[connection] = place
        if place < len(self.trap):
            return False
        self.trap = ()
        self._led.clear()
        self.sprung += 1
        return True

    def _drawn(self) -> int | None:
        return 1 + int(self._draw.expovariate(1 / self.bytes_mean)) if self.bytes_mean else None
