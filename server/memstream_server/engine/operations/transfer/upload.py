"""The uploaded file of an import: its lines are checked and stored as they arrive, and read while the import runs.

Both in bounded memory. `Upload` is blocking: call it in a thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec

from memstream_server.engine.errors import FieldViolation, InvalidField, StorageIsFull
from memstream_server.engine.operations.transfer.check_lines import Checker, ImportTerms, MalformedExport, Summary
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
from memstream_server.engine.runtime.call_context import close_result
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.settings import TransferSettings
from memstream_server.ports.blocks import Block, BlockContent, StandingAnswer
from memstream_server.ports.conversations import Message, Plan

SUFFIX = ".import"

LINE_BYTES_MAX = 16 << 20
"""A line with a body of 4 MiB, each byte of it escaped, has half of it."""
AHEAD, AHEAD_BYTES = 256, 4 << 20
"""Lines, or about as many bytes, that are read at once."""
L = TypeVar("L", FragmentLine, BlockLine, MessageLine, PlanLine)


class Upload:
    """The lines of one import. `close` it; that deletes the file unless it was kept."""

    def __init__(self, settings: TransferSettings, terms: ImportTerms) -> None:
        settings.check_free()
        self.path: Path = settings.directory / f"{uuid.uuid4().hex}{SUFFIX}"
        self._settings = settings
        self._checker = Checker(terms)
        self._size = 0
        self._kept = False
        self._rest = b""
        """The beginning of a line that has not ended."""
        self._file = self.path.open("xb", buffering=0)

    def add_lines(self, lines: bytes) -> None:
        """Add lines; the last may go on in the next call. Raises InvalidField, StorageIsFull."""
        if not lines:
            return
        self._size += len(lines)
        if self._size > (most := self._settings.import_bytes_max):
            raise invalid_field("lines", f"exceed {most} bytes, the limit of this server for one import")
        self._settings.check_free()
        try:
            *whole, rest = lines.split(b"\n")
            for raw in whole:
                self._checker.check_line(self._rest + raw)
                self._rest = b""
            self._rest += rest
            if len(self._rest) > LINE_BYTES_MAX:
                raise invalid_field("lines", f"a line has more than {LINE_BYTES_MAX} bytes")
            self._file.write(lines)
        except MalformedExport as error:
            raise malformed_error(error) from error
        except OSError as error:
            raise StorageIsFull(
                f"the import could not be written to disk: {error.strerror}", retry_after_s=5.0
            ) from error

    def finish(self) -> Summary:
        """All lines have arrived. Raises InvalidField, StorageIsFull."""
        if self._rest:
            raise invalid_field("lines", "end within a line")
        try:
            summary = self._checker.summarize_export()
            os.fsync(self._file.fileno())
        except MalformedExport as error:
            raise malformed_error(error) from error
        except OSError as error:
            raise StorageIsFull(
                f"the import could not be written to disk: {error.strerror}", retry_after_s=5.0
            ) from error
        return summary

    def keep_file(self) -> None:
        """Keep the file after `close`."""
        self._kept = True

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
        if not self._kept:
            self.path.unlink(missing_ok=True)


class _Closing(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closing)


async def open_in_thread(make: Callable[[], T]) -> T:
    """What `make` opens in a thread. If the caller is cancelled meanwhile, it is closed as soon as it is open."""
    opened = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(opened)
    except asyncio.CancelledError:
        opened.add_done_callback(close_result)
        raise


def invalid_field(field: str, description: str) -> InvalidField:
    return InvalidField(f"{field}: {description}", violations=(FieldViolation(field, description),))


def malformed_error(error: MalformedExport) -> InvalidField:
    """The error for a malformed line, with its place."""
    place = f"line {error.line}, {error.field}" if error.field else f"line {error.line}"
    return InvalidField(str(error), violations=(FieldViolation(place, error.description),), line=error.line)


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
            self._ahead.extend(await run_in_thread(self._read_ahead))
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
    """The block of a line, written by `principal`. What other memories said is left out: it is asked again, with the
    rights of `principal`."""
    text, standing = line.text, line.standing
    if standing is not None and (standing.question.scopes or standing.memories):
        text, standing = "", StandingAnswer(standing.question)
    content = BlockContent(text, line.max_tokens, tuple(sorted(line.metadata.items())), standing)
    return Block(line.name, line.version, content, line.create_time_us, line.update_time_us, principal)


def message_of(line: MessageLine) -> Message:
    """The message of a line."""
    body = None if line.body is None else line.body.encode()
    given = msgspec.structs.asdict(line) | {"metadata": tuple(line.metadata.items()), "body": body}
    return Message(**given, body_size_bytes=len(body or b""))


def plan_of(line: PlanLine) -> Plan:
    """The plan of a line."""
    return Plan(**msgspec.structs.asdict(line))
