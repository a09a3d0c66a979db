"""The protocol `Database`; rows by column, and statements compiled once.

`directory` implements the protocol on SQLite, `postgres` on PostgreSQL. SQLAlchemy's own path to a statement's text
(cache key, compiled cache, bind processors) costs 15 µs a statement, and several times as much with a busy event loop
in the process. A text with its values costs 6 µs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from sqlalchemy import ClauseElement, Connection, CursorResult, Dialect, Engine
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
        """Do most of the work of `scrub`, on any thread, while the writer continues."""
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


class SharedRun:
    """Runs a function once for all who asked before the run began."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()
        self._asked = self._done = 0
        self.not_before = 0.0
        """When the next run may begin, by time.monotonic."""

    async def run(self, function: Callable[[], Awaitable[None]]) -> None:
        """Returns once a run that began after this call has ended. If it fails, the next who waits runs it again."""
        self._asked += 1
        mine = self._asked
        async with self._running:
            if self._done < mine:
                await asyncio.sleep(max(0.0, self.not_before - time.monotonic()))
                serves = self._asked
                await function()
                self._done = serves


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


class Packed(NamedTuple):
    """A column of texts or blobs: all bytes, and the length of each value; None for NULL."""

    data: bytes
    sizes: Sequence[int | None]
    text: bool = False

    def values(self) -> Iterator[Any]:
        """Each value: str, bytes or None."""
        end = 0
        for size in self.sizes:
            if size is None:
                yield None
                continue
            start, end = end, end + size
            yield self.data[start:end].decode() if self.text else self.data[start:end]


Column: TypeAlias = list[int | None] | Packed
"""One value per row."""


def pack_blobs(values: Sequence[bytes | None]) -> Packed:
    """Concatenate blobs."""
    return Packed(b"".join(filter(None, values)), [None if value is None else len(value) for value in values])


def to_rows(columns: Sequence[Column]) -> list[list[Any]]:
    """Convert columns to rows."""
    apart = [column.values() if isinstance(column, Packed) else column for column in columns]
    return [list(row) for row in zip(*apart, strict=True)]


@lru_cache(maxsize=64)
def compile_statement(statement: ClauseElement, dialect: Dialect) -> tuple[str, dict[str, Any], tuple[str, ...] | None]:
    """(text, values of its constants, parameter names in the order of the marks, or None if marks have names)."""
    made = statement.compile(dialect=dialect)
    names = getattr(made, "positiontup", None)
    return str(made), dict(made.params), None if names is None else tuple(names)


def run_compiled(connection: Connection, statement: ClauseElement, values: Mapping[str, Any]) -> CursorResult[Any]:
    """Execute a statement that is built once and has no list parameters.

    `values` has a value for every bind parameter, in the driver's types: a number, text, bytes, a boolean or None.
    """
    text, constants, names = compile_statement(statement, connection.dialect)
    given = {**constants, **values}
    return connection.exec_driver_sql(text, given if names is None else tuple([given[name] for name in names]))
