"""Operator files that are reloaded when they change."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")
POLL_INTERVAL_S = 1.0
"""Maximum age of the last check: a call after it notices a changed file."""
_Signature = tuple[int, int, int]


class AccessError(ValueError):
    """A file or setting of this package is missing or invalid; the text names it and shows no secret."""

    log_text = True


class Watched(Generic[T]):
    """The parsed contents of a file. An unreadable or invalid file leaves the last valid contents in force."""

    def __init__(self, path: Path, parse: Callable[[str], T]) -> None:
        """`parse` raises ValueError. Raises AccessError."""
        self._path = path
        self._parse = parse
        self._checked_s = time.monotonic()
        try:
            self._signature = _read_signature(path)
            self._parsed = parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise AccessError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise AccessError(f"{path}: {error}") from error

    def read_current(self) -> T:
        """At most POLL_INTERVAL_S old."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= POLL_INTERVAL_S:
            self._checked_s = now_s
            self._reload_if_changed()
        return self._parsed

    def _reload_if_changed(self) -> None:
        try:
            signature = _read_signature(self._path)
            if signature == self._signature:
                return
            data = self._path.read_bytes()
            self._signature = signature  # set only after a read, so that an unreadable file is tried again
            self._parsed = self._parse(data.decode("utf-8"))
        except (OSError, ValueError) as error:
            self._log_failure(error)
        else:
            log.info("file_reloaded", file=str(self._path))

    def _log_failure(self, error: OSError | ValueError) -> None:
        why = error.strerror if isinstance(error, OSError) else str(error)
        log.error("file_reload_failed", file=str(self._path), reason=why)


def _read_signature(path: Path) -> _Signature:
    status = path.stat()
    return status.st_mtime_ns, status.st_size, status.st_ino
