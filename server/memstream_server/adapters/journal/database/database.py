"""The protocol `Database`. `directory` implements it on SQLite, `postgres` on PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from memstream_server.ports.journal.errors import JournalError, WriteRefused

T = TypeVar("T")


class Database(Protocol):
    """An open database with this server's schema version, locked by this server until `close`."""

    @property
    def description(self) -> str:
        """Engine and version for display, for instance "sqlite 3.46.0" or "postgresql 15.8"."""
        ...

    @property
    def writer(self) -> Engine:
        """Engine of the one connection that writes. It connects only while this server holds the database's lock."""
        ...

    @property
    def reader(self) -> Engine:
        """Engine of the readers: each transaction is a snapshot of all earlier commits and never waits."""
        ...

    def commit(self, connection: Connection) -> None:
        """Commit the writer's transaction, durable on return. After any exception the outcome is unknown."""
        ...

    def is_statement_error(self, error: DBAPIError) -> bool:
        """Whether only this statement failed (a constraint): rolling back its savepoint keeps the rest of the group."""
        ...

    def translate_error(self, error: DBAPIError) -> JournalError:
        """The port's error for a driver error before COMMIT, that is, while nothing is written."""
        ...

    def why_uncommitted(self, error: Exception) -> WriteRefused | None:
        """Why this failed COMMIT certainly wrote nothing, or None: its outcome is unknown."""
        ...

    def why_full(self) -> str | None:
        """Why no data can be added, or None."""
        ...

    def why_unwritable(self) -> WriteRefused | None:
        """Why the storage takes no write, found without a write to the journal; else None. May block for long."""
        ...

    def tend_log(self) -> None:
        """Called on the writer's thread after each group."""
        ...

    def copy_log(self) -> None:
        """Do most of the work of `scrub`, on any thread, while the writer goes on."""
        ...

    @property
    def scrub(self) -> Callable[[], bool] | None:
        """Leave no bytes of deleted rows in the database's files; the writer has no open connection meanwhile. False if
        a reader still needs them: call it again.

        None if the database does this itself.
        """
        ...

    def backup(self, target: Path) -> None:
        """Copy the whole journal to a new file. Raises JournalError."""
        ...

    def close(self) -> None:
        """Close all connections and release the database."""
        ...


class Write(Protocol):
    """Runs `work` in a write transaction; durable on return (writer.py)."""

    def __call__(self, work: Callable[[Connection], T], rows: int, adds: bool, memory: str = "") -> Awaitable[T]: ...


class Read(Protocol):
    """Runs `work` in a read snapshot."""

    def __call__(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...


def read_snapshot(database: Database, read: Callable[[Connection], T]) -> T:
    """Run `read` in one transaction. Raises the port's errors.

    A pooled connection that died while idle fails on its first use: the read is then repeated once on a new one.
    """
    try:
        return _read_once(database, read)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise database.translate_error(error) from error
    try:
        return _read_once(database, read)
    except DBAPIError as error:
        raise database.translate_error(error) from error


def _read_once(database: Database, read: Callable[[Connection], T]) -> T:
    with database.reader.begin() as connection:
        return read(connection)
