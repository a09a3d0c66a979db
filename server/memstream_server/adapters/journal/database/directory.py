"""The data directory: its lock, its format, opening its journal, backup and restore.

format       names the directory and its layout version
lock         locked while a server runs; holds the server's pid and host
journal.db   the journal (with -wal, -shm and -clean files)
images       images of memories, derived from the journal
backups      copies of the journal from before a migration (migration_backups.py)
"""

from __future__ import annotations

import errno
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

import structlog
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database import migrate, sqlite
from memstream_server.adapters.journal.database.checkpoints import Checkpoints
from memstream_server.adapters.journal.sql import outbox, writes
from memstream_server.adapters.journal.verify import sqlite_wal
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.ports.images import IMAGE_FOLDER
from memstream_server.ports.index import INDEX_FOLDER
from memstream_server.ports.journal.errors import (
    AlreadyExists,
    JournalError,
    NotWritable,
    StorageFull,
    Unreadable,
    WriteRefused,
)

log = structlog.get_logger(__name__)

_CAUSES = {
    errno.EROFS: "its file system is read-only",
    errno.EMFILE: "the server has no file descriptor left",
    errno.ENFILE: "the machine has no file descriptor left",
    errno.EIO: "its disk fails",
}
"""What a caller may read of an error of the file system."""
FORMAT = 1
"""Version of the directory's layout; tables have their own version (migrate.py)."""
_FORMAT_TEXT = "memstream data directory, format {}\n"


def journal_path(data_dir: Path) -> Path:
    return data_dir / "journal.db"


def _unfinished_path(data_dir: Path) -> Path:
    return data_dir / "journal.db.restoring"


def acquire_lock(data_dir: Path) -> int:
    """Make the directory if necessary and lock it; returns the lock's file descriptor. Raises Unreadable.

    flock, not lockf: it also excludes a second server in the same process, and child processes do not inherit it.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        what = "it is a file" if data_dir.is_file() else f"{error.filename}: {error.strerror}"
        raise Unreadable(f"{data_dir} cannot be a data directory: {what}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        who = lock_holder(lock)
        os.close(lock)
        raise Unreadable(
            f"{data_dir} is in use by {who}: stop it, or give this server another directory (see memstream doctor)"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock


def lock_holder(lock: int) -> str:
    """Name the process that holds the lock, for display."""
    named = os.pread(lock, 200, 0).decode(errors="replace").strip()
    if not named or is_holder_alive(named) is False:  # a read-only opener does not write its name
        return "another process (memstream verify or doctor?)"
    return named


def is_holder_alive(holder: str) -> bool | None:
    """Whether the process named in the lock file runs; None if this host cannot tell."""
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


def release_lock(lock: int) -> None:
    os.close(lock)


@contextmanager
def hold_lock(data_dir: Path) -> Iterator[None]:
    """Hold the directory's lock during a block."""
    lock = acquire_lock(data_dir)
    try:
        yield
    finally:
        release_lock(lock)


def check_format(data_dir: Path) -> None:
    """Write the format file of a new directory, or check that this server can read an old one. Raises Unreadable."""
    if not read_format(data_dir):
        _write_file(data_dir / "format", _FORMAT_TEXT.format(FORMAT))


def read_format(data_dir: Path) -> bool:
    """Whether there is a format file, with a format that this server reads. Without one there must be no journal.

    Raises Unreadable.
    """
    file, journal = data_dir / "format", journal_path(data_dir)
    if _unfinished_path(data_dir).exists():
        raise Unreadable(f"a restore into {data_dir} did not finish: run memstream restore again, with --force")
    if not file.exists():
        if journal.exists():
            raise Unreadable(
                f"{journal} is not in a memstream data directory ({file} is missing; memstream doctor says more): "
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
    if not journal.exists() and (data_dir / INDEX_FOLDER).exists():
        raise Unreadable(
            f"{journal} is missing and there is an index of it: its content is lost (memstream doctor says more). "
            "Restore a backup with memstream restore, or remove the directory to start empty"
        )
    return True


def check_log(data_dir: Path) -> None:
    """Check that SQLite would not silently skip a commit in the write-ahead log. Raises Unreadable."""
    file = sqlite.wal_path(journal_path(data_dir))
    if damage := sqlite_wal.read_wal(file).damage:
        raise Unreadable(
            f"{file} is damaged: {damage}. See what memstream doctor says, and restore a backup (memstream restore)"
        )


class DirectoryDatabase:
    """`database.Database` on SQLite in a data directory. Made by `open_database`."""

    def __init__(
        self, data_dir: Path, lock: int, checkpoints: Checkpoints, full: Callable[[], str | None], readers: int
    ) -> None:
        path = journal_path(data_dir)
        self._checkpoints = checkpoints
        self.description = f"sqlite {sqlite3.sqlite_version}"
        self.writer, self.reader = sqlite.writer_engine(path), sqlite.reader_engine(path, readers)
        self._data_dir, self._lock, self._full = data_dir, lock, full
        sqlite.fill_pool(self.reader, readers)

    def commit(self, connection: Connection) -> None:
        """See database.py."""
        sqlite.commit_transaction(connection)

    def is_statement_error(self, error: DBAPIError) -> bool:
        """See database.py."""
        return sqlite.is_statement_error(error)

    def translate_error(self, error: DBAPIError) -> JournalError:
        """See database.py."""
        return self._find_cause(error) or sqlite.translate_error(error)

    def why_uncommitted(self, error: Exception) -> WriteRefused | None:
        """See database.py."""
        if not isinstance(error, DBAPIError) or not sqlite.is_write_error(error):
            return None
        return self._find_cause(error) or NotWritable(f"the journal cannot be written ({error.orig})")

    def _find_cause(self, error: DBAPIError) -> WriteRefused | None:
        """What keeps SQLite from a file: it reports neither the system's error number nor a shortage of descriptors."""
        if not sqlite.is_file_error(error):
            return None
        if sqlite.is_disk_full(error):
            return StorageFull(f"the disk is full ({error.orig}): free space and retry")
        return self.why_unwritable()

    def why_unwritable(self) -> WriteRefused | None:
        """See database.py."""
        try:
            os.pwrite(self._lock, os.pread(self._lock, 1, 0), 0)  # what it holds already
            os.close(os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as found:
            if cause := _CAUSES.get(found.errno or 0):
                return NotWritable(f"{self._data_dir}: {found.strerror}", cause)
        return None

    def why_full(self) -> str | None:
        """Measured before every group, so that the disk never fills up completely."""
        return self._full()

    def tend_log(self) -> None:
        """See database.py."""
        self._checkpoints.read_latest()
        self._checkpoints.checkpoint_if_long(sqlite.WAL_CHECKPOINT_PAGES)

    def copy_log(self) -> None:
        """See database.py."""
        with sqlite.translating_errors():
            self._checkpoints.copy_log()

    def scrub(self) -> bool:
        """See database.py."""
        with sqlite.translating_errors():
            emptied = self._checkpoints.empty_log()
        if removed := migrate.remove_copies(self._data_dir, 0):
            log.info("migration_backups_removed", files=[file.name for file in removed], reason="something was erased")
        return emptied

    def backup(self, target: Path) -> None:
        """See `backup`."""
        write_backup(self._data_dir, target)

    def close(self) -> None:
        """Close all connections and release the lock. Call once: the lock's descriptor is closed."""
        self.reader.dispose()
        self.writer.dispose()
        self._checkpoints.close()
        release_lock(self._lock)


def open_database(
    data_dir: Path,
    *,
    readers: int,
    free_bytes: Callable[[], int] | None,
    reserve_bytes: int,
    backups_kept: int = migrate.BACKUPS_KEPT,
) -> DirectoryDatabase:
    """Lock a directory, check its journal, and create or migrate its tables. Blocking.

    backups_kept: copies that migrations make first and keep; 0 makes none (migration_backups.py).

    Raises Unreadable if the directory is damaged, has a newer format, or another server holds it.
    """
    lock = acquire_lock(data_dir)
    engine = sqlite.writer_engine(journal_path(data_dir))
    try:
        check_format(data_dir)
        check_log(data_dir)
        with sqlite.translating_errors(), sqlite.keep_log(engine):
            copied = _copy_before_migration(data_dir, engine) if backups_kept else None
            with engine.begin() as connection:
                migrate.upgrade_tables(connection)
                sqlite.probe_damage(connection)
            migrate.finish_migrating(engine.begin)
            checkpoints = Checkpoints(journal_path(data_dir))
        with sqlite.translating_errors():
            checkpoints.checkpoint()  # of the log of a killed server; of a file that others wrote it reads all pages
        sync_directory(data_dir)
        if copied is not None:
            log.info("journal_migrated", revision=migrate.HEAD, backup=str(copied))
            migrate.remove_copies(data_dir, backups_kept)
    except BaseException:
        release_lock(lock)
        raise
    finally:
        engine.dispose()
    measure = free_bytes or partial(sqlite.free_bytes, data_dir)
    full = partial(_why_full, sqlite.wal_path(journal_path(data_dir)), measure, reserve_bytes)
    return DirectoryDatabase(data_dir, lock, checkpoints, full, readers)


def _why_full(log: Path, free_bytes: Callable[[], int], reserve_bytes: int) -> str | None:
    """Why no data can be added, or None."""
    free, needed = free_bytes(), reserve_bytes + sqlite.wal_bytes(log)
    if free >= needed:
        return None
    return f"{free} bytes are free for {log.parent}, {needed} must stay free: free space and retry"


def _write_file(file: Path, text: str) -> None:
    with file.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    sync_directory(file.parent)


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _copy_before_migration(data_dir: Path, engine: Engine) -> Path | None:
    with sqlite.translating_errors(), engine.begin() as connection:
        return migrate.copy_before_migration(data_dir, connection, partial(write_backup, data_dir))


def write_backup(data_dir: Path, target: Path) -> None:
    """Write a copy of the journal, complete or not at all. Raises AlreadyExists, StorageFull."""
    if target.exists():
        raise AlreadyExists(f"{target} exists: name a new file")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    sqlite.copy_database(journal_path(data_dir), partial)
    partial.rename(target)
    sync_directory(target.parent)


def restore(source: Path, data_dir: Path, *, force: bool = False) -> None:
    """Put a backup into a data directory that no server holds.

    History after the backup is lost, and its revision numbers will be used again. So every memory gets a new uid, which
    invalidates older cursors and copies, and the whole index is entered in the outbox again. `force` deletes the
    directory's journal.

    Raises AlreadyExists if the directory holds anything and `force` is not given, and Unreadable if the backup is
    damaged or of a newer format, or the directory is in use.
    """
    if not source.is_file():
        raise Unreadable(f"there is no backup {source}")
    with hold_lock(data_dir):
        occupied = sorted(entry.name for entry in data_dir.iterdir() if entry.name != "lock")
        if occupied and not force:
            raise AlreadyExists(f"{data_dir} is not empty ({', '.join(occupied[:5])}): --force replaces its journal")
        _replace_journal(source, data_dir)


def _replace_journal(source: Path, data_dir: Path) -> None:
    """A crash leaves the unfinished file; `read_format` then refuses to open the directory."""
    fresh, journal = _unfinished_path(data_dir), journal_path(data_dir)
    _remove_database(fresh)
    try:
        shutil.copyfile(source, fresh)
        sqlite.check_pages(fresh, shown=source)
        _begin_history(fresh)
    except BaseException:
        _remove_database(fresh)
        raise
    sqlite.checkpoint_wal(fresh)
    _remove_database(journal)
    for derived in (INDEX_FOLDER, IMAGE_FOLDER):  # of the old history; the outbox fills the index again
        shutil.rmtree(data_dir / derived, ignore_errors=True)
    (data_dir / "format").unlink(missing_ok=True)
    _write_file(data_dir / "format", _FORMAT_TEXT.format(FORMAT))
    fresh.rename(journal)
    sync_directory(data_dir)


def _remove_database(database: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-clean"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def _begin_history(database: Path) -> None:
    engine = sqlite.writer_engine(database)
    try:
        with sqlite.translating_errors(), engine.begin() as connection:
            if not migrate.is_journal(connection):
                raise Unreadable(f"{database} is no memstream journal")
            migrate.upgrade_tables(connection)
            outbox.enter_deletions(connection)
            writes.rename_memories(connection, Ids(Clock()).next_id)
            outbox.enter_all(connection)
    finally:
        engine.dispose()
