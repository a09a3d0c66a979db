"""Open a journal read-only, without any change to the directory, the file or the database.

SQLite writes even for a reader: it creates a -shm file, and the last connection that closes checkpoints the -wal file.
So a journal that no server has open is read through a VFS without locks, with the WAL index in RAM. A journal in use is
read like by any other reader. A single file (a backup) is opened as immutable.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database import directory, migrate, postgres, sqlite
from memstream_server.adapters.journal.verify import sqlite_wal
from memstream_server.ports.journal.errors import JournalError, Unreadable


@dataclass(frozen=True, slots=True)
class OpenedJournal:
    """A journal that is open for reading only."""

    engine: Engine
    in_use: str
    """The server that has it open, for display; empty if there is none."""

    def translate_error(self, error: DBAPIError) -> JournalError:
        """The port's error for a driver error."""
        if self.engine.dialect.name == "sqlite":
            return sqlite.translate_error(error)
        return Unreadable(postgres.why_unusable(error))


@contextmanager
def probe_lock(data_dir: Path) -> Iterator[str]:
    """The process that holds a data directory. Empty if there is none; then no server can take it during the block.

    Writes nothing, and does not create a missing lock file. Raises OSError.
    """
    try:
        lock = os.open(data_dir / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield ""
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield directory.lock_holder(lock)
        else:
            yield ""
    finally:
        os.close(lock)


@contextmanager
def open_data_directory(data_dir: Path) -> Iterator[OpenedJournal]:
    """Open the journal of a data directory, in use or not. Raises Unreadable, OSError."""
    journal = directory.journal_path(data_dir)
    if not journal.is_file():
        raise Unreadable(f"there is no journal in {data_dir}")
    with ExitStack() as stack:
        holder = stack.enter_context(probe_lock(data_dir))
        if holder:
            engine = _open_file(journal, mode="ro")
        elif sqlite_wal.read_wal(sqlite.wal_path(journal)).committed:
            engine = _open_file(journal, "PRAGMA locking_mode = EXCLUSIVE", mode="ro", vfs="unix-none")
        else:
            engine = _open_file(journal, mode="ro", immutable="1")
        stack.callback(engine.dispose)
        yield OpenedJournal(engine, holder)


@contextmanager
def open_backup(file: Path) -> Iterator[OpenedJournal]:
    """Open a backup. Raises Unreadable."""
    if not file.is_file():
        raise Unreadable(f"there is no file {file}")
    engine = _open_file(file, mode="ro", immutable="1")
    try:
        yield OpenedJournal(engine, "")
    finally:
        engine.dispose()


@contextmanager
def open_database(url: str) -> Iterator[OpenedJournal]:
    """Open the journal of a PostgreSQL database without taking its lock. Raises Unreadable."""
    engine = postgres.read_only_engine(postgres.parse_url(url))
    try:
        with engine.begin() as connection:
            holder = postgres.find_holder(connection)
        yield OpenedJournal(engine, holder)
    except DBAPIError as error:
        raise Unreadable(postgres.why_unusable(error)) from error
    finally:
        engine.dispose()


def check_version(connection: Connection) -> None:
    """Raises Unreadable if the database is not a journal of this version."""
    if not migrate.is_journal(connection):
        raise Unreadable("this is no memstream journal")
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision != migrate.HEAD:
        raise Unreadable(
            f"the journal's tables are of revision {revision}, this memstream reads {migrate.HEAD}: use the memstream "
            "that wrote them, or bring older ones to this version by starting its server once"
        )


def _open_file(file: Path, *pragmas: str, **query: str) -> Engine:
    name = f"file:{quote(str(file.absolute()))}"
    return sqlite.read_only_engine(name, pragmas, {"uri": "true", **query})
