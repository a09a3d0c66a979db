"""Checkpoints of SQLite's log, which leave no bytes of deleted rows in the database file.

`secure_delete` zeroes a deleted cell, but not the copies of it that a page keeps after a split has moved its cells: of
2,000 rows deleted from 20,000, 51 could still be read. Such copies lie between a page's array of cells and its first
cell, or in its free blocks, and a page gets them only by a write, which goes through the log.

Rule 1. Nobody else checkpoints. After pages of the log were copied into the database file, the unused bytes of exactly
these pages are zeroed there. So a database that was clean once stays clean, at a cost that depends on the log alone.
Rule 2. SQLite never reads unused bytes, so readers and the writer may go on, and a crash in between harms nothing. A
read transaction keeps the log until its pages are clean: a crash repeats both steps.
Rule 3. The writer's page cache may hold such copies and write them again: it is dropped when the log is emptied. What
the writer writes meanwhile goes through the log, so a later checkpoint cleans it.
Rule 4. A mark next to the database has its size and time as of the last clean state, and during a checkpoint the salts
of the log that is copied. If another program, or a memstream without these rules, has written since, the mark does not
fit, and all pages are read once.
Rule 5. Pages and frames are read many at a time: after each read the thread waits for the interpreter, and a busy event
loop hands it over and takes it back.
Rule 6. A thread copies a long log while writes continue, so no write waits for that. Only the rest, which came
meanwhile, is copied on the writer's thread; then the log restarts.
Formats: https://www.sqlite.org/fileformat2.html, https://www.sqlite.org/walformat.html
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from memstream_server.adapters.journal.database.sqlite import EMPTY_READ

_LOG_HEADER_BYTES, _FRAME_HEADER = 32, struct.Struct(">4I8x")
_INDEX_HEADER_BYTES = 48
_COMMITTED, _SALTS = struct.Struct("=16xI28x"), struct.Struct(">32x2I8x")
_PAGE_HEADER, _FREE_BLOCK = struct.Struct(">BHHH"), struct.Struct(">HH")
_INTERIOR, _LEAF = frozenset({2, 5}), frozenset({10, 13})
_CELLS = _INTERIOR | _LEAF
PAGES_MAX = 1 << 25
"""Below this number of pages (128 GiB) no overflow page begins like a page of cells: its first byte is 0. A larger
database is rewritten when its log is emptied."""
_BUSY_S = 0.02
"""How long emptying the log may wait for readers; the writer waits too."""
REST_FRAMES = 250
"""Frames that may be copied while the writer waits: 1 MB."""
LOG_FRAMES_MAX = 16_000
"""64 MB: from there on the writer waits for the copy of the log."""
_SWEEP_PAGES, _BLOCK_FRAMES = 256, 64
"""Pages of the database file and frames of the log that are read at once."""


class Checkpoints:
    """All checkpoints of one database. Call it on the writer's thread, except for `copy_log`, while the writer has no
    open transaction.

    Make it before the last other connection is closed, because SQLite then checkpoints too, and close it last.
    """

    def __init__(self, path: Path) -> None:
        self._mark = path.with_name(path.name + "-clean")
        self._connection, self._copier, self._holder = (_connect(path) for _ in range(3))
        self._copier.execute("PRAGMA synchronous = FULL")
        (self._page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()
        for connection in (self._connection, self._copier, self._holder):
            connection.execute(EMPTY_READ).fetchall()  # opens the files
        # Closed last: closing any descriptor of a file drops the locks of this process on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._log = os.open(path.with_name(path.name + "-wal"), os.O_RDONLY | os.O_CLOEXEC)
        self._index = os.open(path.with_name(path.name + "-shm"), os.O_RDONLY | os.O_CLOEXEC)
        self._lock = threading.RLock()
        """Guards what follows."""
        self._salts = (0, 0)
        """They tell one content of the log from the next."""
        self._frames, self._copied, self._clean = 0, 0, True
        """Committed frames of the log; how many of them are in the database file and clean there; whether all before
        them are."""
        self._marked = self._mark.read_text("ascii", "replace") if self._mark.exists() else ""
        self._thread = ThreadPoolExecutor(1, "journal-checkpoint")
        self._copying: Future[None] | None = None

    def read_latest(self) -> None:
        """Read the latest state, so that no reader is the first. Call after each commit.

        The first reader after a commit writes its mark into the WAL index, a mapped file. On a disk that hangs that
        page fault does not return, and neither does any other reader's.
        """
        self._connection.execute(EMPTY_READ).fetchall()

    def checkpoint_if_long(self, frames: int) -> None:
        """Checkpoint if that many frames are in the log, most of them on another thread. Call after each commit.

        Raises the error of the last copy.
        """
        _, count = self._read_index()
        if self._copying is not None:
            if not self._copying.done() and count < LOG_FRAMES_MAX:
                return
            done, self._copying = self._copying, None
            done.result()
        if count < frames:
            return
        with self._lock:
            self._follow_log()
            left = self._frames - self._copied
        if left > REST_FRAMES and count < LOG_FRAMES_MAX:
            self._copying = self._thread.submit(self.copy_log)
        elif left:
            self.checkpoint()

    def copy_log(self) -> None:
        """Copy and clean what the log has now, durably. On any thread, while writes continue."""
        self.checkpoint()
        os.fsync(self._file)

    def checkpoint(self) -> bool:
        """Copy the log into the database and clean its pages. False if a reader still needs an older state."""
        with self._lock:
            self._holder.execute("BEGIN")
            try:
                self._holder.execute(EMPTY_READ).fetchall()  # from here on the log does not begin again
                return self._copy_frames()
            finally:
                self._holder.execute("COMMIT")

    def empty_log(self) -> bool:
        """Checkpoint, make it durable, and truncate the log, which holds earlier pages. False: readers hold it."""
        with self._lock:
            if self._is_large():
                self._copier.execute("VACUUM")
            if not self.checkpoint():
                return False
            os.fsync(self._file)
            (busy, _, _) = self._copier.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return bool(busy == 0)

    def close(self) -> None:
        """Empty the log and close the files."""
        self._thread.shutdown()
        with contextlib.suppress(sqlite3.Error):  # a full disk: the log stays for the next start
            self.empty_log()
        for connection in (self._connection, self._copier, self._holder):
            connection.close()
        for file in (self._index, self._log, self._file):
            os.close(file)

    # ---- the log
    def _read_index(self) -> tuple[tuple[int, int], int]:
        """The salts of the log and its committed frames, from the WAL index; its header is written twice."""
        while True:
            found = os.pread(self._index, 2 * _INDEX_HEADER_BYTES, 0)
            header = found[:_INDEX_HEADER_BYTES]
            if header == found[_INDEX_HEADER_BYTES:]:
                first, second = _SALTS.unpack(header)
                return (first, second), int(_COMMITTED.unpack(header)[0])

    def _follow_log(self) -> None:
        """Note what was committed since the last call."""
        salts, frames = self._read_index()
        if salts != self._salts:
            self._clean = self._clean and self._copied >= self._frames  # else another program has checkpointed
            self._salts, self._copied = salts, 0
        self._frames = frames

    def _copy_frames(self) -> bool:
        """Copy frames and zero the unused bytes of their pages. False if some have to wait."""
        self._follow_log()
        log_state = f"log {self._salts[0]} {self._salts[1]}\n"
        self._clean = self._clean and self._marked in (self._state(), log_state)
        if self._clean:
            self._write_mark(log_state)
        (_, frames, copied) = self._copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        if copied < self._copied or self._read_index()[0] != self._salts:
            return False  # -1, as the writer was changing the index; or frames of another content, none of them copied
        if self._is_large():
            self._copied, self._clean = copied, False
            return bool(copied == frames)
        if self._clean:
            self._zero_unused(self._read_pages(self._list_pages(self._copied, copied)))
        else:
            self._zero_unused(self._sweep())
        self._frames, self._copied, self._clean = frames, copied, True
        self._write_mark(self._state())
        return bool(copied == frames)

    def _list_pages(self, first: int, end: int) -> list[int]:
        """The pages of these frames that have cells: they are committed, and nobody overwrites them meanwhile."""
        width = _FRAME_HEADER.size + self._page_bytes
        has_cells: dict[int, bool] = {1: True}
        for start in range(first, end, _BLOCK_FRAMES):
            count = min(_BLOCK_FRAMES, end - start)
            block = os.pread(self._log, count * width, _LOG_HEADER_BYTES + start * width)
            for offset in range(0, count * width, width):
                number, _, *salts = _FRAME_HEADER.unpack_from(block, offset)
                if tuple(salts) != self._salts:
                    raise sqlite3.DatabaseError(f"frame {start + 1} of the log, or a later one, is not of this content")
                has_cells[number] = number == 1 or block[offset + _FRAME_HEADER.size] in _CELLS
        return sorted(number for number in has_cells if has_cells[number])

    # ---- pages
    def _is_large(self) -> bool:
        return bool(os.fstat(self._file).st_size >= PAGES_MAX * self._page_bytes)

    def _read(self, first: int, count: int) -> bytes:
        return os.pread(self._file, count * self._page_bytes, (first - 1) * self._page_bytes)

    def _read_pages(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """These pages; neighbours are read at once. The numbers ascend."""
        start = 0
        while start < len(numbers):
            end = start + 1
            while end < min(start + _SWEEP_PAGES, len(numbers)) and numbers[end] - numbers[start] == end - start:
                end += 1
            yield from self._split(numbers[start], self._read(numbers[start], end - start))
            start = end

    def _split(self, first: int, block: bytes) -> Iterator[tuple[int, bytes]]:
        for number in range(len(block) // self._page_bytes):
            yield first + number, block[number * self._page_bytes : (number + 1) * self._page_bytes]

    def _sweep(self) -> Iterator[tuple[int, bytes]]:
        for first in range(1, os.fstat(self._file).st_size // self._page_bytes + 1, _SWEEP_PAGES):
            yield from self._split(first, self._read(first, _SWEEP_PAGES))

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


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, _BUSY_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    return connection


def find_unused(page: bytes, header: int) -> list[tuple[int, int]]:
    """The unused parts of a page that are not zero, as (start, end). `header`: where its header begins.

    Empty for pages without cells: SQLite zeroes them when it frees them.
    """
    if len(page) <= header or page[header] not in _CELLS:
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
