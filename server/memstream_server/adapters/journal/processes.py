"""`ports.processes` on PostgreSQL: leases by the database's clock, and locks that end with a writer's session.

Rule 1. From `join` on, the writer's session holds the process's lock. A session that gets this lock (shared, for a
moment) knows that the process can no longer commit anything.
Rule 2. Nothing here waits for a lock: waiting would block every write of this process, and the renewal of its lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, TextClause, text

from memstream_server.adapters.journal.database.database import Read, Write
from memstream_server.adapters.journal.database.postgres import LEADING, SCHEMA, PostgresDatabase, process_lock_key
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.processes import Owner, Renewal

KEPT_US = 3600 * 1_000_000
"""How long the row of a process that ended without leaving is kept, for diagnosis."""
_NOW = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
_LIVES = f"p.lease_until_us > {_NOW} AND NOT pg_try_advisory_xact_lock_shared({process_lock_key('p.number')})"
_LIVING = f"SELECT p.number FROM processes p WHERE p.number <> :n AND {_LIVES}"

_TIDY = text(f"DELETE FROM processes WHERE number = :old OR lease_until_us < {_NOW} - {KEPT_US}")
_JOIN = text(f"INSERT INTO processes (id, address, lease_until_us) VALUES (:i, :a, {_NOW} + :us) RETURNING number")
_LOCK = text(f"SELECT pg_try_advisory_lock({process_lock_key(':n')})")
_UNLOCK = text(f"SELECT pg_advisory_unlock({process_lock_key(':n')})")
_LEAD = text(f"SELECT pg_try_advisory_lock({LEADING}, {SCHEMA})")
_FOLLOW = text(f"SELECT pg_advisory_unlock({LEADING}, {SCHEMA})")
_RENEW = text(
    f"UPDATE processes SET lease_until_us = {_NOW} + :us, address = :a"
    f" WHERE number = :n AND lease_until_us > {_NOW} RETURNING number"
)
_LEAVE = text("DELETE FROM processes WHERE number = :n")
_RELEASE_ALL = text("UPDATE memories SET owner = NULL WHERE owner = :n")
_RELEASE = text("UPDATE memories SET owner = NULL WHERE uid = :u AND owner = :n")
_SEIZE = text("SELECT owner FROM memories WHERE uid = :u FOR NO KEY UPDATE SKIP LOCKED")
_EXISTS = text("SELECT number FROM memories WHERE uid = :u")
_HOLDER = text(f"SELECT p.number, p.address FROM processes p WHERE p.number = :o AND {_LIVES}")
_TAKE = text("UPDATE memories SET owner = :n, epoch = epoch + 1 WHERE uid = :u RETURNING epoch")
_OWNER = text(
    "SELECT p.number, p.address FROM memories m JOIN processes p ON p.number = m.owner"
    f" WHERE m.namespace = :ns AND m.name = :name AND p.number <> :n AND {_LIVES}"
)
_LIVING_NUMBERS = text(_LIVING)
_OWNED_BY_OTHERS = text(
    f"WITH living AS MATERIALIZED ({_LIVING}) SELECT uid FROM memories JOIN living ON owner = living.number"
)
_ABANDONED = text(
    f"WITH living AS MATERIALIZED ({_LIVING})"
    " SELECT uid FROM memories WHERE number IN (SELECT memory FROM observations)"
    " AND (owner IS NULL OR owner <> :n AND owner NOT IN (SELECT number FROM living))"
)


class SqlProcesses:
    """See the port and the rules above. `submit` runs work on the writer's session, `look` on a reader's."""

    def __init__(self, database: PostgresDatabase, submit: Write, look: Read) -> None:
        self._database = database
        self._submit = submit
        self._look = look
        self._joined: object | None = None
        """The session of the latest join."""
        self._leading: object | None = None
        """The session that holds the leader's lock, if this process has it."""

    def is_connected(self) -> bool:
        """See the port."""
        session = self._database.session
        return session is not None and session is self._joined and session.is_alive()

    async def join(self, address: str, lease_s: float) -> int:
        """See the port."""

        def work(connection: Connection) -> tuple[int, object | None]:
            return self._join(connection, address, lease_s)

        number, self._joined = await self._submit(work, 1, False)
        return number

    def _join(self, connection: Connection, address: str, lease_s: float) -> tuple[int, object | None]:
        database, old = self._database, self._database.number
        connection.execute(_TIDY, {"old": old})
        if old:
            connection.execute(_UNLOCK, {"n": old})
        if self._leading is database.session:
            connection.execute(_FOLLOW)
        self._leading = None
        given = {"i": database.name, "a": address, "us": round(lease_s * 1e6)}
        number: int = connection.execute(_JOIN, given).scalar_one()
        if not connection.execute(_LOCK, {"n": number}).scalar_one():
            raise JournalError(f"the lock of process {number} is taken, which never was before")
        database.number = number
        return number, database.session

    async def renew(self, number: int, address: str, lease_s: float) -> Renewal | None:
        """See the port."""

        def work(connection: Connection) -> Renewal | None:
            given = {"n": number, "a": address, "us": round(lease_s * 1e6)}
            if connection.execute(_RENEW, given).first() is None:
                return None
            session = self._database.session
            if self._leading is not session:
                self._leading = session if connection.execute(_LEAD).scalar_one() else None
            return Renewal(self._leading is not None)

        return await self._submit(work, 1, False)

    async def leave(self, number: int) -> None:
        """See the port."""

        def work(connection: Connection) -> None:
            connection.execute(_RELEASE_ALL, {"n": number})
            connection.execute(_LEAVE, {"n": number})

        await self._submit(work, 1, False)

    async def take_memory(self, uid: str, number: int) -> int | Owner | None:
        """See the port."""
        return await self._submit(lambda connection: _take_memory(connection, uid, number), 1, False, uid)

    async def release_memory(self, uid: str, number: int) -> None:
        """See the port."""

        def work(connection: Connection) -> None:
            connection.execute(_RELEASE, {"u": uid, "n": number})

        await self._submit(work, 1, False, uid)

    async def find_owner(self, namespace: str, name: str, number: int) -> Owner | None:
        """See the port."""
        found = await self._read_rows(_OWNER, ns=namespace, name=name, n=number)
        return Owner(*found[0]) if found else None

    async def list_living(self, number: int) -> frozenset[int]:
        """See the port."""
        return frozenset(row[0] for row in await self._read_rows(_LIVING_NUMBERS, n=number))

    async def owned_by_others(self, number: int) -> frozenset[str]:
        """See the port."""
        return frozenset(row[0] for row in await self._read_rows(_OWNED_BY_OTHERS, n=number))

    async def list_abandoned(self, number: int) -> list[str]:
        """See the port."""
        return [row[0] for row in await self._read_rows(_ABANDONED, n=number)]

    async def _read_rows(self, statement: TextClause, **given: str | int) -> Sequence[Any]:
        return await self._look(lambda connection: connection.execute(statement, given).all())


def _take_memory(connection: Connection, uid: str, number: int) -> int | Owner | None:
    """Runs under the memory's row lock, so the owner found cannot change before the epoch is raised.

    Does not wait for a locked row: a stale owner may have stopped inside a transaction.
    """
    row = connection.execute(_SEIZE, {"u": uid}).first()
    if row is None:
        if connection.execute(_EXISTS, {"u": uid}).first() is None:
            raise StaleWrite(f"memory {uid} is gone")
        return None
    if row.owner not in (None, number):
        holder = connection.execute(_HOLDER, {"o": row.owner}).first()
        if holder is not None:
            return Owner(*holder)
    epoch: int = connection.execute(_TAKE, {"u": uid, "n": number}).scalar_one()
    return epoch
