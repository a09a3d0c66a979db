"""`memstream verify` and `doctor`: checks operations and describes unfinished ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Row, select

from memstream_server.adapters.journal.sql.schema import operations, processes
from memstream_server.ports.operations import UNFINISHED, OperationFailure, OperationState

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report


_TIME_MAX_US = 1 << 57
"""In the year 6537, within the range of datetime."""


def check_operations(connection: Connection, report: Report) -> None:
    """Raises DBAPIError for unreadable rows."""
    for row in connection.execute(select(operations).order_by(operations.c.id)):
        report.count_checked("operations")
        for text in _find_flaws(row):
            report.add_violation("operations", f"operation {row.id} ({row.type}): {text}")
    report.unfinished.update(describe_unfinished(connection))


def describe_unfinished(connection: Connection) -> Iterator[tuple[str, str]]:
    """(id, description with progress and owner) of each unfinished operation, oldest first."""
    known = {*connection.execute(select(processes.c.number)).scalars()}
    waiting = operations.c.state.in_([state.value for state in UNFINISHED])
    for row in connection.execute(select(operations).where(waiting).order_by(operations.c.id)):
        where = "/".join(filter(None, (row.namespace, row.memory))) or "the whole store"
        far = f"{row.done:,} of {f'{row.total:,}' if row.total else 'an unknown number of'} {row.unit}"
        text = f"{row.type} of {where}, {row.state}, {far}, asked for {_format_time(row.create_time_us)}"
        if row.cancel_asked:
            text += ", to be cancelled"
        if row.process is not None:
            text += f", by server number {row.process}" + ("" if row.process in known else ", which is gone")
        yield row.id, text


def _format_time(time_us: int) -> str:
    if not 0 <= time_us < _TIME_MAX_US:
        return f"at {time_us} µs"
    return f"at {datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(' ', 'seconds')}"


def _find_flaws(row: Row[Any]) -> Iterator[str]:
    if row.state not in {*OperationState}:
        yield f"its state {row.state!r} is unknown"
        return
    ended = row.state not in {*UNFINISHED}
    if ended and not row.end_time_us:
        yield f"it is {row.state} without an end time"
    if not ended and row.end_time_us:
        yield f"it is {row.state} with an end time"
    if min(row.done, row.total) < 0:
        yield f"it has done {row.done} of {row.total}"
    if ended and (row.error is None) is (row.state == OperationState.FAILED):
        yield f"it is {row.state} {'without' if row.error is None else 'with'} an error"
    yield from _find_unreadable(row)


def _find_unreadable(row: Row[Any]) -> Iterator[str]:
    try:
        if not isinstance(json.loads(row.payload), dict):
            yield "its payload is not a JSON object"
    except ValueError:
        yield "its payload is not JSON"
    try:
        if row.error is not None:
            OperationFailure(**json.loads(row.error))
    except (ValueError, TypeError):
        yield "its error cannot be read"
