"""No statement that the suite sends scans a table that grows, outside a list of statements with their bounds.

The suite runs once more in a process that records what it sends to SQLite; each statement is then explained over tables
that hold many small memories, before and after an ANALYZE, which no server runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine

from memstream_server.adapters.journal.database.migrate import create_tables
from memstream_server.adapters.journal.sql.byte_counts import COUNTED, list_triggers
from memstream_server.adapters.journal.sql.schema import metadata
from tests.support import journals
from tests.support.scans import fill_tables, find_scans, find_unbounded
from tests.support.seeds import THOROUGH
from tests.support.statement_recorder import Statement, record_suite

pytestmark = journals.only_sqlite("tests/toolchains/test_statements_on_postgres.py explains on PostgreSQL")

STORES = (
    *(("tests/journal",) if THOROUGH else ("tests/journal/test_sqlite.py", "tests/journal/test_directory.py")),
    "tests/blocks/test_store.py",
    "tests/conversations/test_store.py",
    "tests/operations/test_store.py",
    "tests/engine/test_reembedding.py",
)
THIS = f"--ignore={Path(__file__)}"


@pytest.fixture(scope="module")
def tables() -> Iterator[Connection]:
    """Filled tables of a journal."""
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        create_tables(connection)
        fill_tables(connection)
        yield connection
        connection.rollback()
    engine.dispose()


def explain(tables: Connection, statements: Sequence[Statement]) -> list[str]:
    before = find_unbounded(tables, statements)
    tables.exec_driver_sql("ANALYZE")
    return sorted({*before, *find_unbounded(tables, statements)})


@pytest.mark.drawn
def test_no_statement_of_the_stores_scans(tables: Connection, tmp_path: Path) -> None:
    statements = record_suite(tmp_path, *STORES, THIS)
    unseen = [name for name in metadata.tables if not any(name in one.text for one in statements)]
    assert (unseen, len(statements) > 150) == ([], True)
    assert explain(tables, statements) == []


def test_no_trigger_scans(tables: Connection) -> None:
    """SQLite explains a statement without its triggers."""
    bodies = [trigger.partition(" BEGIN ")[2].removesuffix("END") for trigger in list_triggers("sqlite")]
    parts = [part.strip() for body in bodies for part in body.split(";") if part.strip()]
    given = [re.subn(r"\b(?:new|old)[.]\w+", "?", part) for part in parts]
    statements = [Statement(text, ["str"] * count) for text, count in given]
    unchanging = sum(not columns for _, columns in COUNTED.values())
    assert len(statements) == 3 * len(COUNTED) - unchanging + 2 * 2 + 2
    assert {(one.text, table) for one in statements for table in find_scans(tables, one)} == set()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_statement_of_the_engine_scans(tables: Connection, tmp_path: Path) -> None:
    suite = (
        "tests/journal",
        "tests/blocks",
        "tests/conversations/test_store.py",
        "tests/operations/test_store.py",
        "tests/engine",
        "tests/transfer",
        "tests/rpc",
        "tests/access",
    )
    assert explain(tables, record_suite(tmp_path, *suite, THIS)) == []


@pytest.mark.parametrize(
    ("text", "types", "table"),
    [
        ("DELETE FROM anchors WHERE (memory, id) IN (VALUES (?, ?))", ["int", "str"], "anchors"),
        ("DELETE FROM jobs WHERE attempts = ?", ["int"], "jobs"),
        ("SELECT f.payload FROM fragments AS f WHERE f.session IN (?)", ["str"], "fragments"),
        ("SELECT uid FROM memories JOIN operations ON operations.memory = name WHERE uid = ?", ["str"], "operations"),
    ],
)
def test_a_statement_that_scans_is_found(tables: Connection, text: str, types: list[str], table: str) -> None:
    assert find_scans(tables, Statement(text, types)) == [table]
    assert any(line.startswith(f"scans {table}") for line in find_unbounded(tables, [Statement(text, types)]))


def test_statements_are_explained_with_more_rows() -> None:
    one = Statement("SELECT 1 FROM t WHERE a = ? AND b IN (?) AND c = ?", ["int", "str", "bytes"])
    assert one.repeat_rows(2) == Statement(
        "SELECT 1 FROM t WHERE a = ? AND b IN (?, ?) AND c = ?", ["int", "str", "str", "bytes"]
    )
