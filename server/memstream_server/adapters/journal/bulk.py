"""Many rows in one statement, written or read; more than that a page at a time.

Not executemany: Python's sqlite3 gives up the interpreter lock at every row it steps over and must win it back, which
beside a busy event loop makes a row cost 0.3 to 2 ms instead of 2 to 15 µs. A statement of many rows is one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, Table

from memstream_server.adapters.journal import postgres, sqlite
from memstream_server.adapters.journal.packed import by_row

T = TypeVar("T")

ROWS_MAX = 256
"""Rows a statement; SQLite takes 32,766 parameters, the widest table here has 15 columns."""

IDS_MAX = 500
"""Ids in one IN list."""

STEP_ROWS = 32
"""Above this, statements have a multiple of it: 40 texts a table at most, and each prepared once."""


@dataclass(frozen=True, eq=False)
class Bulk:
    """A statement around a list of rows: `head` (?, ?), (?, ?) `tail`. SQL that SQLite and PostgreSQL both read."""

    head: str
    width: int
    tail: str = ""
    unique: int = 0
    """How many of a row's first values are its key, where a row replaces; 0 where it does not."""


def update_from(table: str, given: Sequence[str], assignments: str, where: str, tail: str = "") -> Bulk:
    """Update a row of `table` for every row of values; these are `given.NAME` in the SQL, by the names in `given`."""
    head = f"WITH given ({', '.join(given)}) AS (VALUES "
    return Bulk(head, len(given), f") UPDATE {table} SET {assignments} FROM given WHERE {where}{tail}")


def insertion(table: Table, conflict: Sequence[str] = (), change: str | None = None) -> Bulk:
    """Insert whole rows, in the order of the table's columns (an id of the database's own giving excepted).

    With `conflict`, a row whose columns of that name are taken replaces the old one: `change` is the SET list,
    all other columns by default.
    """
    names = [column.name for column in table.columns if column.autoincrement is not True]
    head = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES "
    if not conflict:
        return Bulk(head, len(names))
    change = change or ", ".join(f"{name} = excluded.{name}" for name in names if name not in conflict)
    assert tuple(names[: len(conflict)]) == tuple(conflict), "a key comes first"
    return Bulk(head, len(names), f" ON CONFLICT ({', '.join(conflict)}) DO UPDATE SET {change}", len(conflict))


@lru_cache(maxsize=1_024)
def _text(bulk: Bulk, rows: int, mark: str) -> str:
    row = f"({', '.join([mark] * bulk.width)})"
    return bulk.head + ", ".join([row] * rows) + bulk.tail


def execute(connection: Connection, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> None:
    """In one statement of a multiple of STEP_ROWS and one of the rest: few executions, and few texts to prepare.

    Of rows that replace each other the last counts; PostgreSQL would refuse to replace twice in a statement.
    """
    for _ in _executions(connection, bulk, rows):
        pass


def returned(connection: Connection, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same with a statement that returns something: all of it."""
    return [tuple(row) for result in _executions(connection, bulk, rows) for row in result]


def _executions(connection: Connection, bulk: Bulk, rows: Sequence[tuple[Any, ...]]) -> Iterator[Iterable[Any]]:
    """What each returned."""
    if bulk.unique:
        rows = list({row[: bulk.unique]: row for row in rows}.values())
    run, mark = (sqlite.run, "?") if connection.dialect.name == "sqlite" else (Connection.exec_driver_sql, "%s")
    start = 0
    while start < len(rows):
        left = min(len(rows) - start, ROWS_MAX)
        count = left - left % STEP_ROWS or left
        values = tuple(chain.from_iterable(rows[start : start + count]))
        yield run(connection, _text(bulk, count, mark), values)
        start += count


def rounds(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items in their order, in rounds in which each key is there once: a statement updates a row once."""
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
"""Rows of one `fetch`: a few MB."""


def fetch(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[list[Any]]:
    """All rows of `statement` (columns of integers, text, blobs and booleans, the latter perhaps as 0 and 1), in its
    order, in the way that is quick on this database. The caller bounds the rows (PAGE_ROWS at a time)."""
    if connection.dialect.name == "sqlite":
        return by_row(sqlite.columns(connection, statement, parameters))
    return postgres.fetch(connection, statement, parameters)


def fetch_columns(
    connection: Connection, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, Any]
) -> list[Any]:
    """The same by column, lists of integers and Packed blobs, for those who need no row by itself."""
    read = sqlite.columns if connection.dialect.name == "sqlite" else postgres.columns
    return read(connection, statement, parameters)


def pages(
    connection: Connection,
    statement: Select[*tuple[Any, ...]],
    low: int,
    high: int,
    limit: int | None = None,
    **values: Any,
) -> Iterator[list[Any]]:
    """The first `limit` rows (all, if None) of a statement over a range of keys, the key first, a page at a time."""
    while limit is None or limit > 0:
        page = PAGE_ROWS if limit is None else min(limit, PAGE_ROWS)
        rows = fetch(connection, statement, {"low": low, "high": high, "limit": page, **values})
        yield from rows
        if len(rows) < page:
            return
        low = rows[-1][0] + 1
        limit = None if limit is None else limit - page


def column_pages(
    connection: Connection, statement: Select[*tuple[Any, ...]], low: int, high: int, **values: Any
) -> Iterator[list[Any]]:
    """The same by column, all rows, of integers and blobs."""
    while True:
        columns = fetch_columns(connection, statement, {"low": low, "high": high, "limit": PAGE_ROWS, **values})
        keys = columns[0]
        if keys:
            yield columns
        if len(keys) < PAGE_ROWS:
            return
        low = keys[-1] + 1
