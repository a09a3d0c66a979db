"""Statements that read or write many rows at once, and paged reads.

They replace executemany: Python's sqlite3 releases the interpreter lock on every step and has to reacquire it. With a
busy event loop in the same process that costs 0.3 to 2 ms a row instead of 2 to 15 µs. A multi-row statement is one
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, Table

from memstream_server.adapters.journal.database import postgres, sqlite
from memstream_server.adapters.journal.database.database import to_rows

T = TypeVar("T")

ROWS_MAX = 256
"""Rows in one statement; SQLite allows 32,766 parameters, and the widest table has 15 columns."""

IDS_MAX = 500
"""Ids in one IN list."""

STEP_ROWS = 32
"""Larger statements have a multiple of this: at most 40 statement texts a table, each prepared once."""


def split_ids(ids: Sequence[T]) -> Iterator[list[T]]:
    """The ids in parts of IDS_MAX."""
    return (list(ids[start : start + IDS_MAX]) for start in range(0, len(ids), IDS_MAX))


@dataclass(frozen=True, eq=False)
class Bulk:
    """A statement around a list of rows: `head` (?, ?), (?, ?) `tail`, in SQL that both databases accept."""

    head: str
    width: int
    tail: str = ""
    unique: int = 0
    """How many leading values of a row are its key, if a row replaces another; else 0."""


def build_update(table: str, given: Sequence[str], assignments: str, where: str, tail: str = "") -> Bulk:
    """Update one row of `table` for each row of values; the SQL refers to the values as `given.NAME`."""
    head = f"WITH given ({', '.join(given)}) AS (VALUES "
    return Bulk(head, len(given), f") UPDATE {table} SET {assignments} FROM given WHERE {where}{tail}")


def build_insert(table: Table, conflict: Sequence[str] = (), change: str | None = None) -> Bulk:
    """Insert whole rows, in the order of the table's columns, except for an id that the database generates.

    With `conflict`, a row with the same values in those columns is updated: `change` is the SET list, by default all
    other columns.
    """
    names = [column.name for column in table.columns if column.autoincrement is not True]
    head = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES "
    if not conflict:
        return Bulk(head, len(names))
    change = change or ", ".join(f"{name} = excluded.{name}" for name in names if name not in conflict)
    assert tuple(names[: len(conflict)]) == tuple(conflict), "a key comes first"
    return Bulk(head, len(names), f" ON CONFLICT ({', '.join(conflict)}) DO UPDATE SET {change}", len(conflict))


@lru_cache(maxsize=1_024)
def _build_text(bulk: Bulk, rows: int, mark: str) -> str:
    row = f"({', '.join([mark] * bulk.width)})"
    return bulk.head + ", ".join([row] * rows) + bulk.tail


def write_rows(
    connection: Connection, bulk: Bulk, rows: Sequence[tuple[Any, ...]], returns: bool = False
) -> list[tuple[Any, ...]]:
    """Write the rows: a statement of a multiple of STEP_ROWS, then one of the rest, so that few texts are prepared.
    `returns`: the statements return rows, which are the result.

    If several rows replace the same one, the last wins; PostgreSQL rejects a statement that replaces a row twice.
    """
    if not rows:
        return []
    returned: list[tuple[Any, ...]] = []
    if bulk.unique and len(rows) > 1:
        rows = list({row[: bulk.unique]: row for row in rows}.values())
    run, mark = (
        (sqlite.run_statement, "?") if connection.dialect.name == "sqlite" else (Connection.exec_driver_sql, "%s")
    )
    start = 0
    while start < len(rows):
        left = min(len(rows) - start, ROWS_MAX)
        count = left - left % STEP_ROWS or left
        values = tuple(chain.from_iterable(rows[start : start + count]))
        result: Any = run(connection, _build_text(bulk, count, mark), values)
        if returns:
            returned += map(tuple, result)
        start += count
    return returned


def split_rounds(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items in order, split into rounds in which every key occurs once: one statement updates a row only once."""
    found: list[list[T]] = []
    taken: Counter[Hashable] = Counter()
    for item in items:
        which = key(item)
        if taken[which] == len(found):
            found.append([])
        found[taken[which]].append(item)
        taken[which] += 1
    return found


PAGE_ROWS = 1_024
"""Rows of one page: a few MB."""


def fetch_rows(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[list[Any]]:
    """All rows of `statement` in its order, by the fastest way of this database. Columns are integers, text, blobs or
    booleans (which may arrive as 0 and 1). The caller limits the rows (PAGE_ROWS at a time)."""
    if connection.dialect.name == "sqlite":
        return to_rows(sqlite.fetch_columns(connection, statement, parameters))
    return postgres.fetch_rows(connection, statement, parameters)


def fetch_columns(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[Any]:
    """Like `fetch`, by column: lists of integers and Packed blobs."""
    read = sqlite.fetch_columns if connection.dialect.name == "sqlite" else postgres.fetch_columns
    return read(connection, statement, parameters)


def fetch_together(
    connection: Connection, statements: tuple[Select[*tuple[Any, ...]], ...], parameters: Mapping[str, Any]
) -> list[list[Any]]:
    """`fetch_columns` of several statements without list parameters: on SQLite they are one statement and one row."""
    if connection.dialect.name == "sqlite":
        return sqlite.fetch_together(connection, statements, parameters)
    return [postgres.fetch_columns(connection, one, parameters) for one in statements]


def fetch_pages(
    connection: Connection,
    statement: Select[*tuple[Any, ...]],
    low: int,
    high: int,
    limit: int | None = None,
    **values: Any,
) -> Iterator[list[Any]]:
    """The first `limit` rows (None: all) of a statement over a range of keys, read in pages; the key comes first."""
    while limit is None or limit > 0:
        page = PAGE_ROWS if limit is None else min(limit, PAGE_ROWS)
        rows = fetch_rows(connection, statement, {"low": low, "high": high, "limit": page, **values})
        yield from rows
        if len(rows) < page:
            return
        low = rows[-1][0] + 1
        limit = None if limit is None else limit - page


def fetch_column_pages(
    connection: Connection, statement: Select[*tuple[Any, ...]], low: int, high: int, **values: Any
) -> Iterator[list[Any]]:
    """Like `pages`, for all rows and by column: integers and blobs."""
    while True:
        columns = fetch_columns(connection, statement, {"low": low, "high": high, "limit": PAGE_ROWS, **values})
        keys = columns[0]
        if keys:
            yield columns
        if len(keys) < PAGE_ROWS:
            return
        low = keys[-1] + 1
