"""The lines of an import on their way in: put aside and checked as they come, in bounded memory.

Blocking; to be called in a thread, one call at a time.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from memstream_server.engine.errors import FieldViolation, InvalidField, StorageIsFull
from memstream_server.engine.operations.transfer.check_lines import Checker, Malformed, Summary, Terms
from memstream_server.engine.operations.transfer.disk_space import Disk

SUFFIX = ".import"


class Intake:
    """One import's lines. `close` it; what was not kept goes."""

    def __init__(self, disk: Disk, terms: Terms, bytes_max: int) -> None:
        disk.check()
        self.path: Path = disk.directory / f"{uuid.uuid4().hex}{SUFFIX}"
        self._disk = disk
        self._bytes_max = bytes_max
        self._checker = Checker(terms)
        self._size = 0
        self._kept = False
        self._file = self.path.open("xb", buffering=0)

    def take(self, lines: bytes) -> None:
        """Whole lines. Raises InvalidField, StorageIsFull."""
        if not lines:
            return
        self._size += len(lines)
        if self._size > self._bytes_max:
            raise invalid("lines", f"are more than {self._bytes_max} bytes, the most this server takes in one import")
        self._disk.check()
        try:
            *whole, rest = lines.split(b"\n")
            for raw in whole:
                self._checker.line(raw)
            if rest:
                raise invalid("lines", "a message ends inside of a line: send whole lines")
            self._file.write(lines)
        except Malformed as error:
            raise refused(error) from error
        except OSError as error:
            raise StorageIsFull(f"the import could not be put aside: {error.strerror}", retry_after_s=5.0) from error

    def finish(self) -> Summary:
        """All has come. Raises InvalidField, StorageIsFull."""
        try:
            summary = self._checker.summary()
            os.fsync(self._file.fileno())
        except Malformed as error:
            raise refused(error) from error
        except OSError as error:
            raise StorageIsFull(f"the import could not be put aside: {error.strerror}", retry_after_s=5.0) from error
        return summary

    def keep(self) -> None:
        """The file outlives this object."""
        self._kept = True

    def close(self) -> None:
        """Idempotent."""
        self._file.close()
        if not self._kept:
            self.path.unlink(missing_ok=True)


def invalid(field: str, description: str) -> InvalidField:
    return InvalidField(f"{field}: {description}", violations=(FieldViolation(field, description),))


def refused(error: Malformed) -> InvalidField:
    """What is wrong, and where."""
    place = f"line {error.line}, {error.field}" if error.field else f"line {error.line}"
    return InvalidField(str(error), violations=(FieldViolation(place, error.description),), line=error.line)
