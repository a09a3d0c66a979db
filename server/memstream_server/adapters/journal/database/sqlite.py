"""Everything specific to SQLite: connections, durability, bulk reads, errors, backup."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
from sqlalchemy import (
    URL,
    Boolean,
    ColumnElement,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    Select,
    Text,
    create_engine,
    event,
    func,
    literal_column,
    select,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from memstream_server.adapters.journal.database.database import Column, Packed, compile_statement
from memstream_server.ports.journal.errors import (
    AlreadyExists,
    JournalError,
    OutcomeUnknown,
    StaleWrite,
    StorageFull,
    Unreadable,
)

BUSY_TIMEOUT_S = 5.0
"""How long to wait for another program that holds SQLite's lock, for instance a shell on the file."""
WAL_CHECKPOINT_PAGES = 1_000
"""4 MB: writes wait for the disk while it takes the copies of a longer log."""
WAL_KEPT_BYTES = 64 << 20
EMPTY_READ = "PRAGMA user_version"
"""Opens the files and reads the latest state without the schema, of which each connection keeps half a megabyte."""
_COMMON = ("PRAGMA foreign_keys = OFF", "PRAGMA temp_store = MEMORY")
_WRITER = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # a commit is on disk, not only in a cache, when it returns
    "PRAGMA secure_delete = ON",  # deleted bytes are overwritten
    "PRAGMA wal_autocheckpoint = 0",  # see checkpoints.py
    f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}",
    "PRAGMA cache_size = -8000",  # KiB; the system caches the file, and a larger cache here makes nothing faster
)
_READER = ("PRAGMA query_only = ON",)  # and 2 MB of cache, the default: setting it reads the schema
_NULL = literal_column("'null'", Text)
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN})
_REFUSED = frozenset({sqlite3.SQLITE_CONSTRAINT})
_FILES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN})
_WAY_OUT = "stop the server, see what memstream doctor says, and restore a backup (memstream restore)"


def _engine(
    path: Path | str,
    begin: str,
    pragmas: tuple[str, ...],
    query: Mapping[str, str] = MappingProxyType({}),
    **options: Any,
) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=str(path), query=query),
        connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False, "cached_statements": 512},
        hide_parameters=True,
        **options,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        connection.isolation_level = None  # the driver starts no transaction implicitly, `start` does
        for pragma in _COMMON + pragmas:
            connection.execute(pragma)

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        run_statement(connection, begin)

    return engine


def run_statement(connection: Connection, text: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Execute a statement on the driver and return its rows, for the dozen statements of a small write.

    SQLAlchemy's path (an execution context, a result, their events) takes longer than SQLite itself. Raises DBAPIError.
    """
    driver: Any = connection.connection.dbapi_connection
    try:
        rows: list[tuple[Any, ...]] = driver.execute(text, values).fetchall()  # fetch all: a later row may fail
    except sqlite3.Error as error:
        raise cast(DBAPIError, DBAPIError.instance(text, None, error, sqlite3.Error)) from error
    return rows


def writer_engine(path: Path) -> Engine:
    """Engine of the one connection that writes. Its transactions take the write lock at BEGIN."""
    return _engine(path, "BEGIN IMMEDIATE", _WRITER, poolclass=NullPool)


def reader_engine(path: Path, connections: int) -> Engine:
    """Engine of the readers: each transaction is one snapshot that never waits for the writer.

    The connection that was used last is used first: the others keep neither pages nor the schema while few read.
    """
    return _engine(path, "BEGIN", _READER, pool_size=connections, max_overflow=0, pool_use_lifo=True)


@contextlib.contextmanager
def keep_log(engine: Engine) -> Iterator[None]:
    """Hold a connection open during a block: SQLite checkpoints when the last one closes, and removes the log."""
    with engine.connect() as held:
        held.exec_driver_sql(EMPTY_READ).all()
        held.rollback()
        yield


def fill_pool(engine: Engine, connections: int) -> None:
    """Open all files of the readers, so that reads need no descriptor later, when there may be none."""
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            stack.enter_context(engine.begin()).exec_driver_sql(EMPTY_READ).all()


def read_only_engine(uri: str, pragmas: tuple[str, ...], query: Mapping[str, str]) -> Engine:
    """One connection to a file that must not change; see read_only_open.py."""
    return _engine(uri, "BEGIN", (*pragmas, *_READER), query, pool_size=1, max_overflow=0)


def commit_transaction(connection: Connection) -> None:
    """Make the transaction durable. A separate function, so that tests can make it fail."""
    connection.commit()


# ---- bulk reads


def _join_values(values: ColumnElement[Any], between: str = "") -> ColumnElement[str]:
    return func.group_concat(values, literal_column(f"'{between}'", Text))


def _join_column(column: ColumnElement[Any]) -> list[ColumnElement[Any]]:
    """Integers joined by commas; for texts and blobs the concatenated bytes, and their lengths."""
    if isinstance(column.type, Integer | Boolean):
        return [_join_values(func.coalesce(column, _NULL), ",")]
    # length() counts the characters of a text, but the bytes of a blob.
    length = func.length(sql_cast(column, LargeBinary))
    return [sql_cast(_join_values(column), LargeBinary), _join_values(func.coalesce(length, _NULL), ",")]


@lru_cache(maxsize=64)
def _pack_statement(statement: Select[*tuple[Any, ...]]) -> Select[*tuple[Any, ...]]:
    rows = statement.subquery()
    return select(*chain.from_iterable(_join_column(column) for column in rows.columns)).select_from(rows)


_numbers_of = msgspec.json.Decoder(list[int | None])


def _parse_numbers(joined: str | None) -> list[int | None]:
    """NULL if there are no rows."""
    return _numbers_of.decode(f"[{joined or ''}]")


def fetch_columns(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[Column]:
    """All rows of `statement` by column, in its order; booleans as 0 and 1. Raises Unreadable.

    SQLite joins the values and returns a single row, for the reason given in bulk.py: with a busy event loop, 10,000
    fragments take a twentieth of the time of row by row. group_concat() treats blobs as text without inspecting it; if
    an SQLite version did, the separately computed lengths would not add up.
    """
    parts = iter(connection.execute(_pack_statement(statement), parameters).one())
    return [_parse_column(column, parts) for column in statement.selected_columns]


def fetch_together(
    connection: Connection, statements: tuple[Select[*tuple[Any, ...]], ...], parameters: Mapping[str, Any]
) -> list[list[Column]]:
    """Like `fetch_columns` for several statements without list parameters, read as one row by one statement."""
    text, constants, names = compile_statement(_pack_together(statements), connection.dialect)
    values = {**constants, **parameters}
    (row,) = run_statement(connection, text, tuple([values[name] for name in names or ()]))
    parts = iter(row)
    return [[_parse_column(column, parts) for column in one.selected_columns] for one in statements]


@lru_cache(maxsize=64)
def _pack_together(statements: tuple[Select[*tuple[Any, ...]], ...]) -> Select[*tuple[Any, ...]]:
    packed = [_pack_statement(one).subquery() for one in statements]
    return select(*chain.from_iterable(one.columns for one in packed)).select_from(*packed)


def _parse_column(column: ColumnElement[Any], parts: Iterator[Any]) -> Column:
    if isinstance(column.type, Integer | Boolean):
        return _parse_numbers(next(parts))
    packed = Packed(next(parts) or b"", _parse_numbers(next(parts)), not isinstance(column.type, LargeBinary))
    if len(packed.data) != sum(filter(None, packed.sizes)):
        raise Unreadable(
            f"SQLite {sqlite3.sqlite_version} joined blobs to another length: use another version of SQLite"
        )
    return packed


# ---- errors


def _error_code(error: DBAPIError) -> int:
    return getattr(error.orig, "sqlite_errorcode", 0) & 0xFF


def is_statement_error(error: DBAPIError) -> bool:
    """Whether only this statement failed, by a constraint: rolling back its savepoint keeps the rest of the group."""
    return _error_code(error) in _REFUSED


def is_disk_full(error: DBAPIError) -> bool:
    """Whether the file system has no space."""
    return _error_code(error) == sqlite3.SQLITE_FULL


def is_file_error(error: DBAPIError) -> bool:
    """Whether SQLite could not open, read or write a file; its own content may be whole."""
    return _error_code(error) in _FILES


def is_write_error(error: DBAPIError) -> bool:
    """Whether a write to a file failed, not its fsync.

    COMMIT appends to the log, last the frame that ends the transaction. If one of these writes fails, that frame is not
    there in full, so neither a reader nor a recovery takes the transaction. After a failed fsync a recovery may.
    """
    code = getattr(error.orig, "sqlite_errorcode", 0)
    return code == sqlite3.SQLITE_IOERR_WRITE or code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY)


def translate_error(error: DBAPIError) -> JournalError:
    """The port's error for a driver error before COMMIT, that is, while nothing is written."""
    code, text = _error_code(error), str(error.orig)
    if code in _CORRUPT:
        return Unreadable(f"the journal is damaged ({text}): {_WAY_OUT}")
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(f"the disk is full ({text}): free space and retry")
    if code in _REFUSED:
        taken = "external_id" in text or "memories.name" in text
        return AlreadyExists(text) if taken else StaleWrite(text)
    return OutcomeUnknown(text)


@contextlib.contextmanager
def translating_errors() -> Iterator[None]:
    """Convert driver errors to the port's errors."""
    try:
        yield
    except DBAPIError as error:
        raise translate_error(error) from error
    except sqlite3.Error as error:
        raise translate_error(DBAPIError(None, None, error)) from error


# ---- whole files


def probe_damage(connection: Connection) -> None:
    """Check quickly for damage: the header, the schema and the root page of every table. Raises DBAPIError.

    `PRAGMA quick_check` would read the whole file; deeper damage raises Unreadable when it is read.
    """
    for name in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all():
        connection.exec_driver_sql(f'SELECT 1 FROM "{name}" NOT INDEXED LIMIT 1').all()


def free_bytes(directory: Path) -> int:
    """Space left in the directory's file system."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def copy_database(source: Path, target: Path) -> None:
    """Copy a database durably and consistently, even one in use. Raises StorageFull; leaves no partial file."""
    needed, free = source.stat().st_size, free_bytes(target.parent)
    if free < needed:
        raise StorageFull(f"{target.parent} has {free} bytes free, the copy needs {needed}")
    try:
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
            old.backup(new)  # all pages in one step: a snapshot, without blocking the writer
        with target.open("rb") as file:
            os.fsync(file.fileno())
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise translate_error(DBAPIError(None, None, error)) from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def check_pages(path: Path, shown: Path | None = None) -> None:
    """Check every page of a database that no process has open. Raises Unreadable, which names `shown` or the path."""
    shown = shown or path
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            (answer,) = cast(tuple[str], connection.execute("PRAGMA quick_check(1)").fetchone())
    except sqlite3.Error as error:
        raise Unreadable(f"{shown} is not a journal or is damaged ({error})") from error
    if answer != "ok":
        raise Unreadable(f"{shown} is damaged: {answer}")


def checkpoint_wal(path: Path) -> None:
    """Checkpoint the WAL of a database that no process has open, and make the file durable."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("rb") as file:
        os.fsync(file.fileno())


def wal_path(path: Path) -> Path:
    """The write-ahead log of a database file."""
    return path.with_name(path.name + "-wal")


def wal_bytes(log: Path) -> int:
    """The bytes that a checkpoint of this WAL may add to the database file."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0
