"""Everything specific to PostgreSQL: connections, durability, locks, errors.

Rule 1. The writer's session holds session locks from its first statement to its end: SINGLE, exclusively or shared with
other servers, and, once the process has a number, the lock of that number. So a writer that lost its connection starts
again only after its old session, and any COMMIT in it, has ended: what it reads then is final.
Rule 2. Only the engines keep a URL's password; no text contains it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, LargeBinary, Select, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from memstream_server.adapters.journal.database import migrate
from memstream_server.adapters.journal.database.database import Column, pack_blobs, read_snapshot
from memstream_server.ports.journal.errors import (
    AlreadyExists,
    JournalError,
    NotWritable,
    OutcomeUnknown,
    StaleWrite,
    StorageFull,
    Unreadable,
    WriteRefused,
)

logger = logging.getLogger(__name__)

LOCK_WAIT_S = 5.0
"""How long a session waits for an earlier session of the same server to end, before the database counts as in use."""
LOCK_PAUSE_S = 0.1
SINGLE, MIGRATING, LEADING, NAMING = 0x6D656D73, 0x6D656D6D, 0x6D656D6C, 0x6D656D6E
"""First keys of the advisory locks: of servers that write, of a migration, of the leader among several servers, and of
naming a memory in a namespace with a limit. The second key is the schema's hash."""
COUNTING, SHARDS = 0x6D656D63, 64
"""First key of the locks of shards of byte counts, and how many there are; the second key is the shard."""
SCHEMA = "hashtext(coalesce(current_schema(), ''))"
PREPARED_MAX = 500
"""Prepared statements per connection: bulk.py has some 40 texts a table."""
SERVER_VERSION_MIN = 12
PATIENCE: Mapping[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,  # milliseconds until an unanswered COMMIT is given up
}
"""Defaults of libpq's parameters unless the URL sets them: packet loss is detected within half a minute."""
_SESSION = (
    "SET tcp_keepalives_idle = 30",  # the lock of a machine that failed is free after a minute, not after hours
    "SET tcp_keepalives_interval = 10",
    "SET tcp_keepalives_count = 3",
    # An acknowledged commit survives power loss: never weaker than `on`, but as strong as the database is set up.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
)
_HOLDER = (
    "SELECT coalesce(a.application_name, '') || coalesce(' at ' || host(a.client_addr), '')"
    " FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
    f" WHERE l.locktype = 'advisory' AND l.granted AND l.classid = {SINGLE}"
    f" AND l.objid::bigint = {SCHEMA}::bigint & 4294967295"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_END_HOLDER = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks"
    " WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND mode = 'ExclusiveLock'"
    " AND (classid::bigint << 32 | objid::bigint) = {lock}"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_TABLE_EXISTS = "42P07"
_DISK_FULL = "53100"
_READ_ONLY_STATE = "25006"
_READ_ONLY = "its database is read-only"
_IS_READ_ONLY = (  # of the writer's sessions: the readers' own are read-only anyway
    "SELECT pg_is_in_recovery() OR reset_val = 'on' FROM pg_settings WHERE name = 'default_transaction_read_only'"
)
_LOCKED_OUT = ("40P01", "55P03")
"""A deadlock with another server or a row that it locks: rolling back the savepoint loses nothing else."""
_FOR_GOOD = ("28", "3D", "3F", "42", "XX")
"""SQLSTATE classes that no retry fixes: credentials, names, privileges, damage."""


def process_lock_key(number: str) -> str:
    """The key of a process's own advisory lock; `number` is an SQL expression for the process's number."""
    return f"hashtextextended('memstream process ' || coalesce(current_schema(), '') || ' ' || ({number})::text, 0)"


def parse_url(text: str) -> URL:
    """A journal's URL with its driver. Raises Unreadable if it is not a valid URL or psycopg is not installed."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise Unreadable("journal_url is no URL: it should read postgresql://user:password@host/database") from None
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise Unreadable(f"a journal cannot be on {url.drivername}: journal_url begins with postgresql://")
    if importlib.util.find_spec("psycopg") is None:
        raise Unreadable("PostgreSQL needs psycopg: pip install '.[server,postgres]'")
    return url.set(drivername="postgresql+psycopg")


class WriterSession:
    """The writer's current connection to the database."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._poll = select.poll()
        self._poll.register(raw.fileno(), getattr(select, "POLLRDHUP", 0))  # poll always reports POLLHUP

    def is_alive(self) -> bool:
        """False after the other side has closed the connection. Takes a microsecond; callable from any thread."""
        return not self._raw.closed and not self._poll.poll(0)


class PostgresDatabase:
    """`database.Database` on a PostgreSQL server. Made by `open_database`."""

    scrub = None

    def __init__(self, url: URL, readers: int, shared: bool, lease_s: float) -> None:
        self.description = "postgresql"
        self.name = _application_name()
        self.number: int | None = None
        """Number of this process among the servers of the database, once it has joined (processes.py)."""
        self.session: WriterSession | None = None
        self._shared = shared
        self._lease_ms = max(1, round(lease_s * 1_000))
        # A pool of one: a NullPool would release the lock between opening and the first write.
        self.writer = _engine(url, "READ COMMITTED", pool_size=1)
        self.reader = _engine(url, "REPEATABLE READ", pool_size=readers)
        event.listen(self.writer, "connect", lambda raw, _: self._take_locks(raw))
        event.listen(self.reader, "connect", lambda raw, _: _read_only(raw))

    def commit(self, connection: Connection) -> None:
        """Checks the status first: COMMIT of a failed transaction rolls back, and psycopg does not report it."""
        from psycopg.pq import TransactionStatus

        status = connection.connection.driver_connection.info.transaction_status  # type: ignore[union-attr]  # psycopg's
        if status is not TransactionStatus.INTRANS:
            raise JournalError(f"the transaction is {status.name}")
        connection.commit()

    def is_statement_error(self, error: DBAPIError) -> bool:
        """Constraint violations, and values that PostgreSQL cannot store."""
        return _is_data_error(error) or _sqlstate(error).startswith("23") or _sqlstate(error) in _LOCKED_OUT

    def translate_error(self, error: DBAPIError) -> JournalError:
        """See database.py."""
        state, text = _sqlstate(error), _error_text(error)
        if state == _DISK_FULL:
            return StorageFull(f"the database's disk is full ({text}): free space there and retry")
        if state == _READ_ONLY_STATE:
            return NotWritable(f"the database refuses writes ({text})", _READ_ONLY)
        if state.startswith("23"):
            return AlreadyExists(text) if _is_taken(error) else StaleWrite(text)
        if _is_data_error(error):
            if not state and "NUL" in text:  # psycopg refuses it before PostgreSQL sees it; its text holds no content
                return JournalError("PostgreSQL cannot hold a NUL character (U+0000) in a text")
            return JournalError(f"PostgreSQL cannot hold a value of the row (SQLSTATE {state or 'unknown'})")
        if state.startswith(_FOR_GOOD):
            return Unreadable(f"the database refuses ({text}, SQLSTATE {state})")
        return OutcomeUnknown(text)

    def tend_log(self) -> None:
        """PostgreSQL does."""

    def copy_log(self) -> None:
        """PostgreSQL does."""

    def why_uncommitted(self, error: Exception) -> WriteRefused | None:
        """See database.py: a full disk while PostgreSQL writes the commit's record rolls back."""
        translated = self.translate_error(error) if isinstance(error, DBAPIError) else None
        return translated if isinstance(translated, WriteRefused) else None

    def why_full(self) -> str | None:
        """None: a full disk shows up as an error of the database."""
        return None

    def why_unwritable(self) -> WriteRefused | None:
        """See database.py. Of the database's disk it knows nothing: a full one shows up at a write."""
        try:
            is_read_only = read_snapshot(self, lambda connection: connection.exec_driver_sql(_IS_READ_ONLY).scalar())
        except PoolTimeout:  # all readers read
            return None
        except JournalError as error:
            return NotWritable(str(error), "its database cannot be reached")
        return NotWritable("the database is read-only", _READ_ONLY) if is_read_only else None

    @contextmanager
    def begin_migrating(self) -> Iterator[Connection]:
        """A transaction of the writer in which no other server migrates."""
        with self.writer.begin() as connection:
            _lock_tables(connection)
            yield connection

    def backup(self, target: Path) -> None:
        """Always raises JournalError."""
        raise JournalError("the journal is on PostgreSQL: back it up with pg_dump")

    def close(self) -> None:
        """The locks end with their session."""
        self.reader.dispose()
        self.writer.dispose()

    def _take_locks(self, raw: Any) -> None:
        """Take the writer's locks on a new connection. If another session has them, close it and raise Unreadable."""
        try:
            _run_statements(raw, *_SESSION, *self._timeout_settings())
            until = time.monotonic() + LOCK_WAIT_S
            locks = self._lock_calls()
            while locks:
                if _try_lock(raw, locks[0]):
                    locks.pop(0)
                    continue
                if time.monotonic() >= until:
                    raise Unreadable(_in_use_text(_read_holder(raw)))
                self._end_former_session(raw)
                time.sleep(LOCK_PAUSE_S)
            _take_shard(raw)
            self.session = WriterSession(raw)
        except BaseException:
            raw.close()
            raise

    def _lock_calls(self) -> list[str]:
        single = f"pg_try_advisory_lock{'_shared' if self._shared else ''}({SINGLE}, {SCHEMA})"
        own = [] if self.number is None else [f"pg_try_advisory_lock({process_lock_key(str(self.number))})"]
        return [*own, single]

    def _timeout_settings(self) -> tuple[str, ...]:
        """A server that stops inside a transaction, or waits for one that did, must not block the others."""
        return (
            f"SET idle_in_transaction_session_timeout = {self._lease_ms}",
            f"SET lock_timeout = {max(1, self._lease_ms // 2)}",
        )

    def _end_former_session(self, raw: Any) -> None:
        """End this process's previous session: the database may not have seen that its connection broke."""
        if self.number is not None:
            _run_statements(raw, _END_HOLDER.format(lock=process_lock_key(str(self.number))))


def open_database(url: str, *, readers: int, shared: bool = False, lease_s: float = 10.0) -> PostgresDatabase:
    """Connect, take the locks, create or migrate the tables. Blocking.

    shared: share the database with other servers opened in the same way; otherwise hold it alone. lease_s: limits how
    long other servers wait for one that stopped. Raises Unreadable if the database cannot be reached or used, has
    unknown tables, or another server holds it.
    """
    database = PostgresDatabase(parse_url(url), readers, shared, lease_s)
    try:
        with database.writer.begin() as connection:
            database.description = _check_server(connection)
            _lock_tables(connection)
            former = migrate.read_revision(connection)
            migrate.upgrade_tables(connection)
        migrate.finish_migrating(database.begin_migrating)
        if former not in (None, migrate.HEAD):
            logger.warning("migrated the tables from revision %s to %s; PostgreSQL has no copy", former, migrate.HEAD)
    except DBAPIError as error:
        database.close()
        raise Unreadable(why_unusable(error)) from error
    except BaseException:
        database.close()
        raise
    return database


def _lock_tables(connection: Connection) -> None:
    """Servers that start at the same time migrate one after the other; later ones find nothing to do."""
    connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
    connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATING}, {SCHEMA})")


def read_only_engine(url: URL) -> Engine:
    """One read-only connection that needs no lock; each transaction is one snapshot."""
    engine = _engine(url, "REPEATABLE READ", pool_size=1)
    event.listen(engine, "connect", lambda raw, _: _read_only(raw))
    return engine


def find_holder(connection: Connection) -> str:
    """The server that holds the database; empty if there is none."""
    return connection.exec_driver_sql(_HOLDER).scalar() or ""


def fetch_rows(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[list[Any]]:
    """All rows of `statement` in its order. psycopg reads them in C without releasing the interpreter lock."""
    return [list(row) for row in connection.execute(statement, parameters)]


def fetch_columns(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[Column]:
    """Like `fetch`, by column: integers and blobs."""
    found = connection.execute(statement, parameters).all()
    apart: list[Sequence[Any]] = list(zip(*found, strict=True)) if found else [()] * len(statement.selected_columns)
    return [
        pack_blobs(values) if isinstance(column.type, LargeBinary) else list(values)
        for column, values in zip(statement.selected_columns, apart, strict=True)
    ]


# ---- connections


def _engine(url: URL, isolation: str, pool_size: int) -> Engine:
    patience = {name: value for name, value in PATIENCE.items() if name not in url.query}
    engine = create_engine(
        url,
        isolation_level=isolation,
        pool_size=pool_size,
        max_overflow=0,
        hide_parameters=True,
        connect_args=patience | {"client_encoding": "utf8", "application_name": _application_name()},
    )

    @event.listens_for(engine, "connect")
    def prepare(raw: Any, _: object) -> None:
        raw.prepared_max = PREPARED_MAX

    return engine


def _application_name() -> str:
    """This process's name in pg_stat_activity, shown by servers that find the database in use; at most 63 bytes."""
    return f"memstream pid {os.getpid()} on {socket.gethostname()}"[:63]


def _run_statements(raw: Any, *statements: str) -> None:
    """Run statements on a new driver connection, each in its own transaction, so that SET lasts."""
    with raw.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
            raw.commit()


def _read_only(raw: Any) -> None:
    _run_statements(raw, "SET default_transaction_read_only = on")


def _try_lock(raw: Any, lock: str) -> bool:
    """Try to take a session lock; it outlives the transaction."""
    with raw.cursor() as cursor:
        cursor.execute(f"SELECT {lock}")
        (taken,) = cursor.fetchone()
    raw.commit()
    return bool(taken)


def _take_shard(raw: Any) -> None:
    """Give a writer's session the first free shard of byte counts; those beyond SHARDS wait for each other."""
    free = (shard for shard in range(SHARDS) if _try_lock(raw, f"pg_try_advisory_lock({COUNTING}, {shard})"))
    _run_statements(raw, f"SET memstream.shard = {next(free, SHARDS)}")


def _in_use_text(holder: str) -> str:
    return (
        f"the database is in use by {holder}, which does not share it (an older version without milvus_uri): stop it, "
        "or give this server another database"
    )


def _read_holder(raw: Any) -> str:
    with raw.cursor() as cursor:
        cursor.execute(_HOLDER)
        found = cursor.fetchone()
    return str(found[0]) if found and found[0] else "another server"


# ---- opening


def _check_server(connection: Connection) -> str:
    """The description of a database that can hold a journal. Raises Unreadable for any other."""

    def shown(name: str) -> str:
        return str(connection.exec_driver_sql(f"SHOW {name}").scalar_one())

    if connection.exec_driver_sql("SELECT current_schema()").scalar_one() is None:
        raise Unreadable("the database has no schema to put tables into: correct search_path, or make the schema")
    version, encoding = shown("server_version"), shown("server_encoding")
    if int(shown("server_version_num")) < SERVER_VERSION_MIN * 10_000:
        raise Unreadable(f"PostgreSQL {version} is too old: {SERVER_VERSION_MIN} or newer is needed")
    if encoding != "UTF8":
        raise Unreadable(f"the database's encoding is {encoding}: make one with ENCODING 'UTF8'")
    if shown("transaction_read_only") == "on":
        raise Unreadable("the database is read-only (a standby?): journal_url must lead to the primary")
    if shown("fsync") == "off":
        logger.warning("PostgreSQL runs with fsync off: what is acknowledged does not survive a power loss")
    return f"postgresql {version.partition(' ')[0]}"


def why_unusable(error: DBAPIError) -> str:
    """Why a database cannot be used, for display."""
    if _sqlstate(error) == _TABLE_EXISTS:
        text = _error_text(error)
        return f"the database holds tables of something else ({text}): give memstream one, or a schema, of its own"
    return f"the database cannot be used: {_error_text(error)}"


# ---- errors


def _sqlstate(error: DBAPIError) -> str:
    """The five characters of SQLSTATE; empty if the server sent none."""
    return getattr(error.orig, "sqlstate", None) or ""


def _error_text(error: DBAPIError) -> str:
    """The server's message without detail and context, which repeat values of the row."""
    said = getattr(getattr(error.orig, "diag", None), "message_primary", None) or str(error.orig)
    return " ".join(said.split())


def _is_data_error(error: DBAPIError) -> bool:
    """A value out of range, or a text with NUL, which psycopg rejects before it sends it."""
    from psycopg import DataError

    return isinstance(error.orig, DataError)


def _is_taken(error: DBAPIError) -> bool:
    name = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
    return name in ("memories_name", "fragments_external_id")
