"""What belongs to processes: leases and ownership of memories (PostgreSQL, by the database's clock; locks end with a
writer's session), and long operations (`ports.operations`, on both databases).

Rule 1. From `join` on, the writer's session holds the process's lock. A session that gets this lock (shared, for a
moment) knows that the process can no longer commit anything.
Rule 2. Nothing here waits for a lock: waiting would block every write of this process, and the renewal of its lease.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, TextClause, delete, insert, literal, select, text, update

from memstream_server.adapters.journal.database.database import Read, Write
from memstream_server.adapters.journal.database.postgres import LEADING, SCHEMA, PostgresDatabase, process_lock_key
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.schema import operations
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Operation, OperationFailure, OperationState
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
_UNFINISHED = operations.c.end_time_us == 0
"""By the end, which has an index; it is set together with a state that ends the operation."""
_LISTED = [literal("").label(each.name) if each is operations.c.payload else each for each in operations.c]
"""A page has no payload: it has as many ids as a call may name."""


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
        session = self._database.session
        return session is not None and session is self._joined and session.is_alive()

    async def join(self, address: str, lease_s: float) -> int:
        number, self._joined = await self._submit(lambda connection: self._join(connection, address, lease_s), 1, False)
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
        def work(connection: Connection) -> None:
            connection.execute(_RELEASE_ALL, {"n": number})
            connection.execute(_LEAVE, {"n": number})

        await self._submit(work, 1, False)

    async def take_memory(self, uid: str, number: int) -> int | Owner | None:
        return await self._submit(lambda connection: _take_memory(connection, uid, number), 1, False, uid)

    async def release_memory(self, uid: str, number: int) -> None:
        await self._submit(lambda connection: connection.execute(_RELEASE, {"u": uid, "n": number}), 1, False, uid)

    async def find_owner(self, namespace: str, name: str, number: int) -> Owner | None:
        found = await self._read_rows(_OWNER, ns=namespace, name=name, n=number)
        return Owner(*found[0]) if found else None

    async def list_living(self, number: int) -> frozenset[int]:
        return frozenset(row[0] for row in await self._read_rows(_LIVING_NUMBERS, n=number))

    async def owned_by_others(self, number: int) -> frozenset[str]:
        return frozenset(row[0] for row in await self._read_rows(_OWNED_BY_OTHERS, n=number))

    async def list_abandoned(self, number: int) -> list[str]:
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


class SqlOperations:
    """`ports.operations.Operations` over a journal's writer and readers."""

    def __init__(self, write: Write, read: Read) -> None:
        self._write = write
        self._read = read

    async def create(self, operation: Operation, answer: Answer | None = None) -> None:
        await self._write(lambda c: _insert_operation(c, operation, answer), 2, True)

    async def get(self, id: str) -> Operation | None:
        return await self._read(partial(_get_operation, id=id))

    async def list_page(self, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
        return await self._read(lambda c: _list_operations(c, namespace, memory, before, limit))

    async def save(self, operation: Operation) -> bool:
        return await self._write(lambda c: _save_operation(c, operation), 1, False)

    async def ask_cancel(self, id: str) -> Operation | None:
        return await self._write(lambda c: _ask_cancel(c, id), 1, False)

    async def claim(self, id: str, process: int | None, former: int | None) -> bool:
        return await self._write(lambda c: _claim_operation(c, id, process, former), 1, False)

    async def list_unfinished(self) -> list[Operation]:
        return await self._read(_list_unfinished)

    async def remove_ended(self, before_us: int) -> int:
        return await self._write(lambda c: _remove_ended(c, before_us), 100, False)


def _insert_operation(connection: Connection, operation: Operation, answer: Answer | None) -> None:
    values = {"id": operation.id, "type": operation.type, "payload": operation.payload, "unit": operation.unit}
    values |= {"namespace": operation.namespace, "memory": operation.memory}
    connection.execute(
        insert(operations),
        {
            **values,
            **_progress_columns(operation),
            "create_time_us": operation.create_time_us,
            "cancel_asked": False,
            "process": operation.process,
        },
    )
    put_answer(connection, answer)


def _progress_columns(operation: Operation) -> dict[str, Any]:
    """The columns that change while the operation runs."""
    return {
        "state": operation.state.value,
        "done": operation.done,
        "total": operation.total,
        "end_time_us": operation.end_time_us,
        "error": None if operation.error is None else json.dumps(asdict(operation.error)),
    }


def _save_operation(connection: Connection, operation: Operation) -> bool:
    changed = update(operations).where(operations.c.id == operation.id).values(**_progress_columns(operation))
    return bool(connection.execute(changed.returning(operations.c.cancel_asked)).scalar_one_or_none())


def _ask_cancel(connection: Connection, id: str) -> Operation | None:
    connection.execute(update(operations).where(operations.c.id == id, _UNFINISHED).values(cancel_asked=True))
    return _get_operation(connection, id)


def _claim_operation(connection: Connection, id: str, process: int | None, former: int | None) -> bool:
    unclaimed = operations.c.process.is_not_distinct_from(former)
    claimed = update(operations).where(operations.c.id == id, unclaimed, _UNFINISHED).values(process=process)
    return connection.execute(claimed).rowcount == 1


def _get_operation(connection: Connection, id: str) -> Operation | None:
    row = connection.execute(select(operations).where(operations.c.id == id)).one_or_none()
    return None if row is None else _decode_row(row)


def _list_operations(connection: Connection, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
    chosen = select(*_LISTED).order_by(operations.c.id.desc()).limit(limit)
    if namespace:
        chosen = chosen.where(operations.c.namespace == namespace)
    if memory:
        chosen = chosen.where(operations.c.memory == memory)
    if before:
        chosen = chosen.where(operations.c.id < before)
    return [_decode_row(row) for row in connection.execute(chosen)]


def _list_unfinished(connection: Connection) -> list[Operation]:
    return [
        _decode_row(row) for row in connection.execute(select(operations).where(_UNFINISHED).order_by(operations.c.id))
    ]


def _remove_ended(connection: Connection, before_us: int) -> int:
    old = delete(operations).where(operations.c.end_time_us > 0, operations.c.end_time_us < before_us)
    return connection.execute(old).rowcount


def _decode_row(row: Row[Any]) -> Operation:
    values = dict(row._mapping)
    error = values.pop("error")
    return Operation(
        **values | {"state": OperationState(values["state"]), "cancel_asked": bool(values["cancel_asked"])},
        error=None if error is None else OperationFailure(**json.loads(error)),
    )
