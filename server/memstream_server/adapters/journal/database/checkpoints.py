"""Checkpoints of SQLite's log, which leave no bytes of deleted rows in the database file.

`secure_delete` zeroes a deleted cell, but not the copies of it that a page keeps after a split has moved its cells: of
2,000 rows deleted from 20,000, 51 could still be read. Such copies lie between a page's array of cells and its first
cell, or in its free blocks, and a page gets them only by a write, which goes through the log.

Rule 1. Nobody else checkpoints. After all pages of the log are in the database file, the unused bytes of exactly these
pages are zeroed there. So a database that was clean once stays clean, at a cost that depends on the log alone.
Rule 2. SQLite never reads unused bytes, so readers may go on, and a crash in between harms nothing. The log is kept
until its pages are clean: a crash repeats both steps.
Rule 3. The writer's page cache may hold such copies and write them again: it is dropped when the log is emptied.
Rule 4. A mark beside the database has its size and time as of the last clean state, and during a checkpoint the salts
of the log that is copied. If another program, or a memstream without these rules, has written since, the mark does not
fit, and all pages are read once.
Format: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_LOG_HEADER, _FRAME_HEADER = struct.Struct(">8I"), struct.Struct(">4I8x")
_PAGE_HEADER, _FREE_BLOCK = struct.Struct(">BHHH"), struct.Struct(">HH")
_INTERIOR, _LEAF = frozenset({2, 5}), frozenset({10, 13})
PAGES_MAX = 1 << 25
"""Below this number of pages (128 GiB) no overflow page begins like a page of cells: its first byte is 0. A larger
database is rewritten when its log is emptied."""
_BUSY_S = 0.02
"""How long emptying the log may wait for readers; the writer waits too."""
_SWEEP_PAGES = 256


class Checkpoints:
    """All checkpoints of one database. Call it on one thread at a time, while the writer has no open transaction.

    Make it before the last other connection is closed, because SQLite then checkpoints too, and close it last.
    """

    def __init__(self, path: Path) -> None:
        self._mark = path.with_name(path.name + "-clean")
        self._log_path = path.with_name(path.name + "-wal")
        self._connection = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
        for pragma in ("synchronous = FULL", "wal_autocheckpoint = 0"):
            self._connection.execute(f"PRAGMA {pragma}")
        (self._page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        self.read_latest()  # opens the files
        # Closed last: closing any descriptor of the file drops the locks of this process on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._log = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
        self._salts, self._frames, self._clean = (0, 0), 0, True
        self._pages: set[int] = set()
        """Pages of the log that are not known to be clean in the database file."""
        self._marked = self._mark.read_text("ascii", "replace") if self._mark.exists() else ""

    def read_latest(self) -> None:
        """Read the latest state, so that no reader is the first. Call after each commit.

        The first reader after a commit writes its mark into the WAL index, a mapped file. On a disk that hangs that
        page fault does not return, and neither does any other reader's.
        """
        self._connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()

    def checkpoint_if_long(self, frames: int) -> None:
        """Checkpoint if that many frames are in the log. Call after each commit."""
        self._follow_log()
        if len(self._pages) and self._frames >= frames:
            self.checkpoint()

    def checkpoint(self) -> bool:
        """Copy the log into the database and clean its pages. False if a reader still needs an older state."""
        self._follow_log()
        log_state = f"log {self._salts[0]} {self._salts[1]}\n"
        self._clean = self._clean and self._marked in (self._state(), log_state)
        if self._clean:
            self._write_mark(log_state)
        (_, frames, copied) = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if copied < frames:
            return False
        if self._is_large():
            self._clean = False
            return True
        if self._clean:
            self._zero_unused((number, self._read(number, 1)) for number in sorted(self._pages))
        else:
            self._zero_unused(self._sweep())
        self._pages.clear()
        self._clean = True
        self._write_mark(self._state())
        return True

    def empty_log(self) -> bool:
        """Checkpoint, make it durable, and truncate the log, which holds earlier pages. False: readers hold it."""
        if self._is_large():
            self._connection.execute("VACUUM")
        if not self.checkpoint():
            return False
        os.fsync(self._file)
        (busy, _, _) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return bool(busy == 0)

    def close(self) -> None:
        """Empty the log and close the files."""
        with contextlib.suppress(sqlite3.Error):  # a full disk: the log stays for the next start
            self.empty_log()
        self._connection.close()
        os.close(self._log)
        os.close(self._file)

    # ---- the log
    def _follow_log(self) -> None:
        """Note the pages of the frames that were added. A frame that no commit ended names a page too many."""
        header = os.pread(self._log, _LOG_HEADER.size, 0)
        salts = _LOG_HEADER.unpack(header)[4:6] if len(header) == _LOG_HEADER.size else (0, 0)
        if salts != self._salts:
            self._clean = self._clean and not self._pages  # else another program has checkpointed
            self._salts, self._frames = salts, 0
        width = _FRAME_HEADER.size + self._page_bytes
        while True:
            found = os.pread(self._log, _FRAME_HEADER.size, _LOG_HEADER.size + self._frames * width)
            if len(found) < _FRAME_HEADER.size:
                return
            number, _, *frame_salts = _FRAME_HEADER.unpack(found)
            if tuple(frame_salts) != salts:
                return
            self._pages.add(number)
            self._frames += 1

    # ---- pages
    def _is_large(self) -> bool:
        return bool(os.fstat(self._file).st_size >= PAGES_MAX * self._page_bytes)

    def _read(self, first: int, count: int) -> bytes:
        return os.pread(self._file, count * self._page_bytes, (first - 1) * self._page_bytes)

    def _sweep(self) -> Iterator[tuple[int, bytes]]:
        for first in range(1, os.fstat(self._file).st_size // self._page_bytes + 1, _SWEEP_PAGES):
            block = self._read(first, _SWEEP_PAGES)
            for number in range(len(block) // self._page_bytes):
                yield first + number, block[number * self._page_bytes : (number + 1) * self._page_bytes]

    def _zero_unused(self, pages: Iterable[tuple[int, bytes]]) -> None:
        for number, page in pages:
            for start, end in find_unused(page, 100 if number == 1 else 0):
                os.pwrite(self._file, bytes(end - start), (number - 1) * self._page_bytes + start)

    # ---- the mark
    def _state(self) -> str:
        found = os.fstat(self._file)
        return f"{found.st_size} {found.st_mtime_ns}\n"

    def _write_mark(self, state: str) -> None:
        """Not durable: after a power loss it may not fit, and the next start reads all pages."""
        self._mark.write_text(state, encoding="ascii")
        self._marked = state


def find_unused(page: bytes, header: int) -> list[tuple[int, int]]:
    """The unused parts of a page that are not zero, as (start, end). `header`: where its header begins.

    Empty for pages without cells: SQLite zeroes them when it frees them.
    """
    if len(page) <= header or page[header] not in _INTERIOR | _LEAF:
        return []
    kind, block, cells, content = _PAGE_HEADER.unpack_from(page, header)
    found = [(header + (12 if kind in _INTERIOR else 8) + 2 * cells, content or 1 << 16)]
    if not found[0][0] <= found[0][1] <= len(page):
        return []
    before = 0
    while before < block <= len(page) - _FREE_BLOCK.size:
        following, size = _FREE_BLOCK.unpack_from(page, block)
        found.append((block + _FREE_BLOCK.size, min(block + size, len(page))))
        before, block = block, following
    return [(start, end) for start, end in found if page[start:end].strip(b"\0")]
