"""The upload of an import: stores and checks its lines as they arrive, in bounded memory.

Blocking; call it in a thread, one call at a time.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from memstream_server.engine.errors import FieldViolation, InvalidField, StorageIsFull
from memstream_server.engine.operations.transfer.check_lines import Checker, ImportTerms, MalformedExport, Summary
from memstream_server.engine.operations.transfer.disk_space import Disk

SUFFIX = ".import"

LINE_BYTES_MAX = 16 << 20
"""A line with a body of 4 MiB, each byte of it escaped, has half of it."""


class Upload:
    """The lines of one import. `close` it; that deletes the file unless it was kept."""

    def __init__(self, disk: Disk, terms: ImportTerms, bytes_max: int) -> None:
        disk.check_free()
        self.path: Path = disk.directory / f"{uuid.uuid4().hex}{SUFFIX}"
        self._disk = disk
        self._bytes_max = bytes_max
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
        if self._size > self._bytes_max:
            raise invalid_field("lines", f"exceed {self._bytes_max} bytes, the limit of this server for one import")
        self._disk.check_free()
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
        opened.add_done_callback(_close_opened)
        raise


def _close_opened(opened: asyncio.Future[Any]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


def invalid_field(field: str, description: str) -> InvalidField:
    return InvalidField(f"{field}: {description}", violations=(FieldViolation(field, description),))


def malformed_error(error: MalformedExport) -> InvalidField:
    """The error for a malformed line, with its place."""
    place = f"line {error.line}, {error.field}" if error.field else f"line {error.line}"
    return InvalidField(str(error), violations=(FieldViolation(place, error.description),), line=error.line)
