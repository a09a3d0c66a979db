"""Fills a journal's tables as many small memories fill them, and finds statements whose plan scans one of these tables.

The rows are made inside the database and are never decoded: only their number and their keys matter to a planner.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Connection, Double, Integer, LargeBinary, Table, create_engine

from memstream_server.adapters.journal.database.migrate import create_tables
from memstream_server.adapters.journal.sql.schema import metadata
from tests.support.statement_recorder import Statement

MEMORIES = {"sqlite": 2_000, "postgresql": 20_000}
"""PostgreSQL's planner scans a table that is small, and rightly so."""
UNUSED = "a bound of no statement"
BOUNDED = frozenset({"meta", "processes", "deletions", "alembic_version"})
"""Tables that do not grow: settings of the store, living servers, memories whose rows are being removed."""
_EACH = {
    "fragments": 6,
    "vectors": 6,
    "anchors": 4,
    "events": 3,
    "receipts": 2,
    "requests": 2,
    "versions": 2,
    "messages": 3,
    "plans": 2,
    "blocks": 2,
}
"""Rows per memory (or conversation); one in most other tables."""
_FEW = {
    "operations": 5,
    "recall_receipts": 5,
    "standing_blocks": 10,
    "standing_memories": 10,
    "block_sources": 10,
}
"""One row in so many memories."""
_KEYED = "CAST(m AS BIGINT) * 4294967296 + i"
_NAMED = "m || '-' || i"
_VALUES = {
    "number": "m",
    "conversation_labels.conversation": "m",
    "conversation_labels.label": "CAST(CAST(m AS VARCHAR) AS bytea)",  # as of one user
    "conversations.update_time_us": _KEYED,
    "expire_time_us": "CASE WHEN m % 50 = 0 THEN m ELSE NULL END",
    "uid": "'u' || m",
    "key": _KEYED,
    "memory": "m",
    "outbox.memory": "'u' || m",
    "operations.memory": "'n' || m",
    "namespace": "'ns' || (m % 20)",
    "namespace_bytes.namespace": "'only' || m",
    "name": _NAMED,
    "producers.name": "'p' || i",
    "meta.name": _NAMED,
    "id": _NAMED,
    "outbox.id": "m * 100 + i",
    "fragment": _NAMED,
    "request": "'ns' || (m % 20) || '-' || " + _NAMED,
    "newer": _NAMED,
    "source": "m",
    "older": "m || '-' || (i + 1)",
    "producer": "'p' || i",
    "tier": "CASE WHEN i < 9 THEN 'LONG_TERM' ELSE 'SHORT_TERM' END",
    "state": "CASE WHEN m % 1000 = 0 THEN 'running' ELSE 'succeeded' END",
    "decision": "CASE WHEN m % 10 = 0 THEN '' ELSE 'distinct' END",
    "due_time_us": _KEYED,
    "forget_time_us": "CASE WHEN (m + i) % 50 = 0 THEN m ELSE NULL END",
    "time_us": _KEYED,
    "create_time_us": _KEYED,
    "end_time_us": "CASE WHEN m % 1000 = 0 THEN 0 ELSE m END",
    "session": "'s' || (i % 3)",
    "speaker": "'v' || (i % 2)",
    "model": "'hashing'",
    "owner": "CASE WHEN m % 10 = 0 THEN 1 ELSE NULL END",
    "message_bodies.parts": "CASE WHEN m % 2 = 0 THEN m ELSE NULL END",
}
_NUMBERS = "n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {most})"


def fill_tables(connection: Connection) -> None:
    """Fill every table that grows. All are empty."""
    memories = MEMORIES[connection.dialect.name]
    blob = "zeroblob(120)" if connection.dialect.name == "sqlite" else "decode(repeat('00', 120), 'hex')"
    for table in metadata.sorted_tables:
        if table.name in BOUNDED:
            continue
        columns = {column.name: _make_value(table, column, blob) for column in table.columns}
        each, few = _EACH.get(table.name, 1), _FEW.get(table.name, 1)
        statement = (
            f"WITH RECURSIVE {_NUMBERS.format(most=memories * each // few)},"
            f" given(m, i) AS (SELECT 1 + (n - 1) / {each} * {few}, (n - 1) % {each} FROM n)"
            f" INSERT INTO {table.name} ({', '.join(columns)}) SELECT {', '.join(columns.values())} FROM given"
        )
        connection.exec_driver_sql(statement.replace("%", "%%") if connection.dialect.name != "sqlite" else statement)


def _make_value(table: Table, column: Column[Any], blob: str) -> str:
    named = _VALUES.get(f"{table.name}.{column.name}") or _VALUES.get(column.name)
    if named is not None:
        return named
    if column.nullable:
        return "NULL"
    if isinstance(column.type, LargeBinary):
        return blob
    if isinstance(column.type, Boolean):
        return "(1 = 0)"
    if isinstance(column.type, BigInteger | Integer | Double):
        return "i"
    return "'x'"


_BOUNDS = {  # statements that may scan a table, and what bounds the rows that each reads
    r"FROM jobs JOIN memories .* ORDER BY jobs.create_time_us, jobs.id": "a page, in the order of an index",
    r"FROM operations ORDER BY operations.id DESC": "a page, in the order of the key",
    r"^SELECT count\(\*\) AS count_1 FROM outbox$": "rows that the index does not have yet",
    r"memories.number IN \(SELECT observations.memory FROM observations\)": "at a start: batches received, not stored",
    r"min\(fragments.forget_time_us\)": "retention: forgotten fragments, in an index of these alone",
    r"^SELECT count\(\*\) AS count_1 FROM fragments GROUP BY": "at a start with Milvus Lite: all fragments",
    r"FROM fragments (JOIN memories .*)?WHERE fragments.model = ''": "those without a vector, in their own index",
    r"^SELECT count\(\*\) AS count_1 FROM jobs WHERE jobs.type": "the progress of an operation: waiting jobs",
    r"^DELETE FROM outbox WHERE outbox.deleted IS": "a new index: rows that the former one does not have yet",
    r"^INSERT INTO outbox .* FROM fragments JOIN memories": "a new index or a restore: all fragments",
    r"^UPDATE anchors SET vector=CASE": "the end of a re-embedding: all anchors",
    r"^SELECT count\(\*\) AS count_1 FROM vectors WHERE vectors.model": "the progress of a re-embedding: all vectors",
    r"^SELECT count\(\*\) AS count_1 FROM fragments$": "the progress of a re-embedding: all fragments",
    r"FROM standing_blocks( JOIN memories|\))|^UPDATE standing_memories SET revision=\?(::BIGINT)?$": (
        "every few seconds: a row of each block that keeps itself; when rights change: of each memory that one asks"
    ),
    r"max\(.*FROM namespace_bytes GROUP BY": "once a minute with a quota: a row of each namespace",
}
_BOUNDS_OF = {
    "sqlite": {
        r"^SELECT 1 FROM \"\w+\" NOT INDEXED LIMIT": "at a start: one row of each table",
        r"^SELECT memories.number FROM memories ORDER BY memories.number$": "a restore: all memories",
    },
    "postgresql": {
        r"^WITH living .* SELECT uid FROM memories WHERE number IN \(SELECT memory FROM observations\)": (
            "the leader, from time to time: batches received, not stored"
        ),
    },
}


@contextmanager
def open_filled() -> Iterator[Connection]:
    """Filled tables of a journal on SQLite."""
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        create_tables(connection)
        fill_tables(connection)
        yield connection
        connection.rollback()
    engine.dispose()


def list_unbounded(statements: Sequence[Statement], *, are_all: bool = True) -> list[str]:
    """What `find_unbounded` finds on SQLite, before and after an ANALYZE, which no server runs.

    are_all: whether a bound that no statement needs is found as well.
    """
    if not statements:
        return []
    with open_filled() as tables:
        before = find_unbounded(tables, statements)
        tables.exec_driver_sql("ANALYZE")
        found = sorted({*before, *find_unbounded(tables, statements)})
    return found if are_all else [line for line in found if not line.startswith(UNUSED)]


def find_unbounded(connection: Connection, statements: Sequence[Statement]) -> list[str]:
    """Statements that scan a growing table and have no bound above; and bounds of no statement."""
    bounds = {**_BOUNDS, **_BOUNDS_OF[connection.dialect.name]}
    wrong, used = [], set()
    for statement in statements:
        text = " ".join(statement.text.split())
        of = {pattern for pattern in bounds if re.search(pattern, text)}
        used |= of
        if any(table in text for table in metadata.tables) and not of:
            scanned = find_scans(connection, statement)
            wrong += [f"scans {table}: {text}" for table in scanned]
    return wrong + [f"{UNUSED}: {pattern}" for pattern in bounds if pattern not in used]


def find_scans(connection: Connection, statement: Statement) -> list[str]:
    """The growing tables that the plan of the statement scans, with one, two and 40 rows in its lists of values."""
    find = _scanned_by_sqlite if connection.dialect.name == "sqlite" else _scanned_by_postgres
    found: set[str] = set()
    for rows in (1, 2, 40):
        found.update(find(connection, statement.repeat_rows(rows)))
    return sorted(found - BOUNDED)


_SQLITE_SCAN = re.compile(r"SCAN (\w+)|SEARCH (\w+) USING (?:.* )?(?:AUTOMATIC |.*ANY\()")
"""A scan, an index that is made of all rows for this statement alone, or a search for every value of a column."""


def _scanned_by_sqlite(connection: Connection, statement: Statement) -> Iterator[str]:
    driver: sqlite3.Connection = connection.connection.dbapi_connection  # type: ignore[assignment]  # pysqlite's
    plan = driver.execute(f"EXPLAIN QUERY PLAN {statement.text}", [None] * len(statement.types)).fetchall()
    names = _find_aliases(statement.text)
    for *_, detail in plan:
        if (found := _SQLITE_SCAN.match(detail)) is not None and (name := found[1] or found[2]) in names:
            yield names[name]


def _find_aliases(text: str) -> dict[str, str]:
    """The name of each table by the name that a plan has for it."""
    aliases = {name: name for name in metadata.tables}
    for table, alias in re.findall(r"\b(\w+) AS (\w+)", text):
        if table in metadata.tables:
            aliases[alias] = table
    return aliases


_TYPES = {"int": "bigint", "str": "text", "bytes": "bytea", "bool": "boolean", "float": "double precision"}


def _scanned_by_postgres(connection: Connection, statement: Statement) -> Iterator[str]:
    """With the generic plan, which PostgreSQL chooses without knowing the values."""
    if not statement.text.startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")):
        return
    number = 0

    def mark(_: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"${number}"

    text = re.sub(r"\?", mark, statement.text.replace("%%", "%"))
    types = ", ".join(_TYPES.get(kind, "unknown") for kind in statement.types)
    run = connection.exec_driver_sql
    run(f"PREPARE explained{f' ({types})' if types else ''} AS {text}".replace("%", "%%"))
    try:
        nulls = f"({', '.join(['NULL'] * len(statement.types))})" if statement.types else ""
        plan = run(f"EXPLAIN (FORMAT JSON) EXECUTE explained{nulls}").scalar_one()
    finally:
        run("DEALLOCATE explained")
    yield from _walk_plan(plan[0]["Plan"])


def _walk_plan(node: dict[str, Any]) -> Iterator[str]:
    conditions = [name for name in ("Index Cond", "Recheck Cond", "TID Cond") if name in node]
    if "Relation Name" in node and node["Node Type"] != "ModifyTable" and not conditions:
        yield node["Relation Name"]
    for child in node.get("Plans", ()):
        yield from _walk_plan(child)
