"""`ports.operations.Operations` on the journal's database."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, literal, select, update

from memstream_server.adapters.journal.database.database import Read, Write
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.schema import operations
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Operation, OperationFailure, OperationState

_UNFINISHED = operations.c.end_time_us == 0
"""By the end, which has an index; it is set together with a state that ends the operation."""
_LISTED = [literal("").label(each.name) if each is operations.c.payload else each for each in operations.c]
"""A page has no payload: it has as many ids as a call may name."""


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
