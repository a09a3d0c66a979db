"""The data directory: who holds it, which format it has, and how a backup is put into one.

format       what this directory is and the version of its layout
lock         locked while a server runs; says which
journal.db   the journal (with -wal and -shm beside it)
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal import migrate, outbox, sqlite, wal, writes
from memstream_server.adapters.journal.reads import meta_value
from memstream_server.engine.clock import Clock, Ids
from memstream_server.ports.journal.errors import AlreadyExists, JournalError, Unreadable

FORMAT = 1
"""Version of the directory's layout; the tables have their own (migrate.py)."""
_FORMAT_TEXT = "memstream data directory, format {}\n"
GENERATION = "index_generation"
"""Meta value raised by every restore: an index filled under another generation belongs to another history."""


def journal_path(data_dir: Path) -> Path:
    return data_dir / "journal.db"


def _unfinished(data_dir: Path) -> Path:
    return data_dir / "journal.db.restoring"


def acquire(data_dir: Path) -> int:
    """Make the directory if need be and lock it: returns the descriptor that holds the lock. Raises Unreadable.

    flock, not lockf: two servers of one process exclude each other too, and a child process does not inherit it.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = holder(lock)
        os.close(lock)
        raise Unreadable(
            f"{data_dir} is in use by {who}: stop it, or give this server another directory (see memstream doctor)"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def holder(lock: int) -> str:
    """Who holds the lock that this descriptor could not get, for people."""
    named = os.pread(lock, 200, 0).decode(errors="replace").strip()
    if not named or alive(named) is False:  # who only looks does not write its name
        return "another process (memstream verify or doctor?)"
    return named


def alive(holder: str) -> bool | None:
    """Whether the process a lock names runs; None where that cannot be known from here."""
    named = re.fullmatch(r"pid (\d+) on (.+)", holder)
    if named is None or named[2] != socket.gethostname():
        return None
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def release(lock: int) -> None:
    os.close(lock)


@contextmanager
def held(data_dir: Path) -> Iterator[None]:
    """The directory's lock for the length of a block."""
    lock = acquire(data_dir)
    try:
        yield
    finally:
        release(lock)


def check_format(data_dir: Path) -> None:
    """Write the format file of a new directory, or see that this server can read an old one. Raises Unreadable."""
    if not read_format(data_dir):
        _write(data_dir / "format", _FORMAT_TEXT.format(FORMAT))


def read_format(data_dir: Path) -> bool:
    """Whether there is a format file, of a format this server reads; without one there is no journal either.

    Raises Unreadable.
    """
    file, journal = data_dir / "format", journal_path(data_dir)
    if _unfinished(data_dir).exists():
        raise Unreadable(f"a restore into {data_dir} did not finish: run memstream restore again, with --force")
    if not file.exists():
        if journal.exists():
            raise Unreadable(
                f"{journal} lies in no memstream data directory ({file} is missing; memstream doctor says more): "
                "put it in one with memstream restore"
            )
        return False
    words = file.read_text(errors="replace").split()
    version = words[-1] if words else ""
    if not version.isdigit():
        raise Unreadable(
            f"{file} is damaged: it should read {_FORMAT_TEXT.format(FORMAT)!r}; see memstream doctor before writing it"
        )
    if int(version) > FORMAT:
        raise Unreadable(f"{data_dir} has format {version}, this server reads up to {FORMAT}: start a newer memstream")
    if not journal.exists() and (data_dir / "milvus").exists():
        raise Unreadable(
            f"{journal} is missing and there is an index of it: what it held is gone (memstream doctor says more). "
            "Restore a backup with memstream restore, or remove the directory to begin anew"
        )
    return True


def check_log(data_dir: Path) -> None:
    """See that no commit in the journal's write-ahead log would be passed over silently. Raises Unreadable."""
    file = sqlite.wal_of(journal_path(data_dir))
    if damage := wal.read_wal(file).damage:
        raise Unreadable(
            f"{file} is damaged: {damage}. See what memstream doctor says, and restore a backup (memstream restore)"
        )


class DirectoryDatabase:
    """`database.Database` of a data directory, on SQLite. Made by `open_database`."""

    def __init__(self, data_dir: Path, lock: int, full: Callable[[], str | None], readers: int) -> None:
        path = journal_path(data_dir)
        self.description = f"sqlite {sqlite3.sqlite_version}"
        self.writer, self.reader = sqlite.writer_engine(path), sqlite.reader_engine(path, readers)
        self._data_dir, self._lock, self._full = data_dir, lock, full

    def commit(self, connection: Connection) -> None:
        """See database.py."""
        sqlite.commit(connection)

    def refused(self, error: DBAPIError) -> bool:
        """See database.py."""
        return sqlite.refused(error)

    def translated(self, error: DBAPIError) -> JournalError:
        """See database.py."""
        return sqlite.translated(error)

    def full(self) -> str | None:
        """Asked of the file system before every group, so that the disk is never quite full."""
        return self._full()

    def scrub(self) -> None:
        """See database.py."""
        sqlite.scrub(journal_path(self._data_dir))

    def backup(self, target: Path) -> None:
        """See `backup`."""
        backup(self._data_dir, target)

    def close(self) -> None:
        """Idempotent, but for the lock."""
        self.reader.dispose()
        self.writer.dispose()
        release(self._lock)


def open_database(
    data_dir: Path, *, readers: int, free_bytes: Callable[[], int] | None, reserve_bytes: int
) -> DirectoryDatabase:
    """Lock a directory and see that its journal is sound and of this version, making or migrating it. Blocking.

    Raises Unreadable when the directory is damaged, of a newer format, or held by another server.
    """
    lock = acquire(data_dir)
    engine = sqlite.writer_engine(journal_path(data_dir))
    try:
        check_format(data_dir)
        check_log(data_dir)
        with sqlite.translating(), engine.begin() as connection:
            migrate.upgrade(connection)
            sqlite.probe(connection)
        sync(data_dir)
    except BaseException:
        release(lock)
        raise
    finally:
        engine.dispose()
    measure = free_bytes or partial(sqlite.free_bytes, data_dir)
    full = partial(_full, sqlite.wal_of(journal_path(data_dir)), measure, reserve_bytes)
    return DirectoryDatabase(data_dir, lock, full, readers)


def _full(log: Path, free_bytes: Callable[[], int], reserve_bytes: int) -> str | None:
    """Why data cannot be added, or None."""
    free, needed = free_bytes(), reserve_bytes + sqlite.wal_bytes(log)
    if free >= needed:
        return None
    return f"{free} bytes are free for {log.parent}, {needed} must stay free: free space and retry"


def _write(file: Path, text: str) -> None:
    with file.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    sync(file.parent)


def sync(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def backup(data_dir: Path, target: Path) -> None:
    """A copy of the journal, whole or not there at all. Raises AlreadyExists, StorageFull."""
    if target.exists():
        raise AlreadyExists(f"{target} exists: name a new file")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    sqlite.copy(journal_path(data_dir), partial)
    partial.rename(target)
    sync(target.parent)


def restore(source: Path, data_dir: Path, *, force: bool = False) -> None:
    """Put a backup into a data directory that no server holds.

    What happened after the backup never did, and the numbers of its revisions will be given again: so every memory
    gets a new uid, by which a cursor or a copy from before is known to be void, and GENERATION is raised. The whole
    index is entered in the outbox again. With `force` the journal that was there is lost.

    Raises AlreadyExists when the directory holds anything and `force` is not given, and Unreadable when the backup is
    damaged, of a newer format, or the directory is in use.
    """
    if not source.is_file():
        raise Unreadable(f"there is no backup {source}")
    with held(data_dir):
        occupied = sorted(entry.name for entry in data_dir.iterdir() if entry.name != "lock")
        if occupied and not force:
            raise AlreadyExists(f"{data_dir} is not empty ({', '.join(occupied[:5])}): --force replaces its journal")
        _replace(source, data_dir)


def _replace(source: Path, data_dir: Path) -> None:
    """A crash on the way leaves the unfinished file, with which the directory is not opened."""
    fresh, journal = _unfinished(data_dir), journal_path(data_dir)
    _remove(fresh)
    try:
        shutil.copyfile(source, fresh)
        sqlite.checked(fresh)
        _begin_history(fresh)
    except BaseException:
        _remove(fresh)
        raise
    sqlite.settled(fresh)
    _remove(journal)
    shutil.rmtree(data_dir / "milvus", ignore_errors=True)  # of the other history, and filled again in any case
    (data_dir / "format").unlink(missing_ok=True)
    _write(data_dir / "format", _FORMAT_TEXT.format(FORMAT))
    fresh.rename(journal)
    sync(data_dir)


def _remove(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def _begin_history(database: Path) -> None:
    engine = sqlite.writer_engine(database)
    try:
        with sqlite.translating(), engine.begin() as connection:
            if not migrate.is_journal(connection):
                raise Unreadable(f"{database} is no memstream journal")
            migrate.upgrade(connection)
            writes.set_meta(connection, GENERATION, str(int(meta_value(connection, GENERATION) or 0) + 1))
            outbox.empty(connection)
            writes.rename_memories(connection, Ids(Clock()).next)
            outbox.refill(connection)
    finally:
        engine.dispose()
