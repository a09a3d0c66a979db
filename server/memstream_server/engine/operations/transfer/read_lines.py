"""Reads checked lines, a few hundred at a time, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from memstream_server.engine.operations.transfer.lines import (
    BlockLine,
    ConversationLine,
    End,
    FragmentLine,
    Line,
    MemoryLine,
    MessageLine,
    PlanLine,
    StateLine,
    decode_line,
)
from memstream_server.engine.operations.transfer.upload import open_in_thread
from memstream_server.ports.blocks import Block, BlockContent
from memstream_server.ports.conversations import Message, Plan

AHEAD, AHEAD_BYTES = 256, 4 << 20
"""Lines, or about as many bytes, that are read at once."""
L = TypeVar("L", FragmentLine, BlockLine, MessageLine, PlanLine)


class Reader:
    """The lines of a file in order, with their offsets."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._ahead: deque[tuple[Line, int]] = deque()
        """Lines, each with the offset of its end."""
        self._offset = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, path: Path) -> AsyncGenerator[Reader, None]:
        file = await open_in_thread(lambda: path.open("rb"))
        try:
            yield cls(file)
        finally:
            file.close()

    @property
    def next_offset(self) -> int:
        """Offset of the line after the next one."""
        return self._ahead[0][1]

    async def peek(self) -> Line | None:
        """The next line without consuming it; None at the end."""
        if not self._ahead:
            self._ahead.extend(await asyncio.to_thread(self._read_ahead))
        return self._ahead[0][0] if self._ahead else None

    async def skip_line(self) -> None:
        """Skip the next line."""
        await self.peek()
        self._ahead.popleft()

    async def skip_section(self) -> None:
        """Skip the next line and all lines that belong to it."""
        await self.skip_line()
        while isinstance(await self.peek(), FragmentLine | BlockLine | MessageLine | PlanLine):
            self._ahead.popleft()

    async def read_body(self, kind: type[L], limit: int) -> list[L]:
        """The next lines of that type, at most `limit`, or about AHEAD_BYTES after the first."""
        found: list[L] = []
        start: int | None = None
        while len(found) < limit and isinstance(line := await self.peek(), kind):
            start = self._ahead[0][1] if start is None else start
            if self._ahead[0][1] - start > AHEAD_BYTES:
                break
            found.append(line)
            self._ahead.popleft()
        return found

    async def read_messages(self, limit: int) -> list[MessageLine]:
        return await self.read_body(MessageLine, limit)

    async def read_plans(self, limit: int) -> list[PlanLine]:
        return await self.read_body(PlanLine, limit)

    def _read_ahead(self) -> list[tuple[Line, int]]:
        found: list[tuple[Line, int]] = []
        start = self._offset
        for raw in self._file:
            self._offset += len(raw)
            found.append((decode_line(raw), self._offset))
            if len(found) == AHEAD or self._offset - start > AHEAD_BYTES:
                break
        return found


def lines_from(path: Path, offset: int) -> Iterator[Line]:
    """The lines of one section, from `offset` to the next memory, conversation or end. Blocking."""
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            line = decode_line(raw)
            if isinstance(line, MemoryLine | ConversationLine | StateLine | End):
                return
            yield line


def block_of(line: BlockLine, principal: str = "") -> Block:
    """The block of a line, written by `principal`."""
    content = BlockContent(line.text, line.max_tokens, tuple(sorted(line.metadata.items())), line.standing)
    return Block(line.name, line.version, content, line.create_time_us, line.update_time_us, principal)


def message_of(line: MessageLine) -> Message:
    """The message of a line."""
    body = None if line.body is None else line.body.encode()
    given = msgspec.structs.asdict(line) | {"metadata": tuple(line.metadata.items()), "body": body}
    return Message(**given, body_size_bytes=len(body or b""))


def plan_of(line: PlanLine) -> Plan:
    """The plan of a line."""
    return Plan(**msgspec.structs.asdict(line))
