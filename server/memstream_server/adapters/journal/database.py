"""What the journal needs of the database it lives in. The implementations are in directory (SQLite) and postgres."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from memstream_server.ports.journal.errors import JournalError

T = TypeVar("T")


class Database(Protocol):
    """An opened database of this server's version, held for this server alone until `close`."""

    @property
    def description(self) -> str:
        """Engine and version for people, for instance "sqlite 3.46.0" or "postgresql 15.8"."""
        ...

    @property
    def writer(self) -> Engine:
        """For the one connection that writes. No connection of it is there unless this server holds the database."""
        ...

    @property
    def reader(self) -> Engine:
        """For readers: each transaction is one snapshot that sees every commit before it and waits for none."""
        ...

    def commit(self, connection: Connection) -> None:
        """Commit a transaction of the writer; durable when it returns. Whatever it raises, the outcome is unknown."""
        ...

    def refused(self, error: DBAPIError) -> bool:
        """Whether the statement alone failed, by what it said: its savepoint can be rolled back, the group goes on."""
        ...

    def translated(self, error: DBAPIError) -> JournalError:
        """The port's error for one of the driver's before COMMIT, that is, when nothing was written."""
        ...

    def full(self) -> str | None:
        """Why data cannot be added, or None."""
        ...

    @property
    def scrub(self) -> Callable[[], None] | None:
        """Rewrites the files of the database, with no connection of the writer open, so that nothing deleted is left.

        None where the database sees to that by itself.
        """
        ...

    def backup(self, target: Path) -> None:
        """Copy the whole journal to a new file. Raises JournalError."""
        ...

    def close(self) -> None:
        """Close every connection and let another server have the database."""
        ...


class Write(Protocol):
    """Runs `work` in a transaction; durable when it returns (writer.py)."""

    def __call__(self, work: Callable[[Connection], T], rows: int, adds: bool) -> Awaitable[T]: ...


class Read(Protocol):
    """Runs `work` in a snapshot."""

    def __call__(self, work: Callable[[Connection], T]) -> Awaitable[T]: ...


def snapshot(database: Database, read: Callable[[Connection], T]) -> T:
    """What `read` finds in one transaction. Raises the port's errors.

    Connections that died while they were idle are found out by using them: the read is then made once more on new
    ones.
    """
    try:
        return _once(database, read)
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise database.translated(error) from error
    try:
        return _once(database, read)
    except DBAPIError as error:
        raise database.translated(error) from error


def _once(database: Database, read: Callable[[Connection], T]) -> T:
    with database.reader.begin() as connection:
        return read(connection)
