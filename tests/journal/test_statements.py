"""No statement that the suite sends scans a table that grows, outside a list of statements with their bounds.

Every process of tests records what the tests of stores and of the engine send to SQLite, and explains it at its end
(tests/conftest.py) over tables that hold many small memories, before and after an ANALYZE, which no server runs. What
these tests send altogether is explained by a run of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection

from memstream_server.adapters.journal.sql.byte_counts import COUNTED, list_triggers
from memstream_server.adapters.journal.sql.schema import metadata
from tests.support import journals
from tests.support.scans import find_scans, find_unbounded, list_unbounded, open_filled
from tests.support.statement_recorder import RECORDED, Statement, list_recorded, record_suite

pytestmark = journals.only_sqlite("tests/toolchains/test_statements_on_postgres.py explains on PostgreSQL")

THIS = f"--ignore={Path(__file__)}"


@pytest.fixture(scope="module")
def tables() -> Iterator[Connection]:
    """Filled tables of a journal."""
    with open_filled() as connection:
        yield connection


def test_no_trigger_scans(tables: Connection) -> None:
    """SQLite explains a statement without its triggers."""
    bodies = [trigger.partition(" BEGIN ")[2].removesuffix("END") for trigger in list_triggers("sqlite")]
    parts = [part.strip() for body in bodies for part in body.split(";") if part.strip()]
    given = [re.subn(r"\b(?:new|old)[.]\w+", "?", part) for part in parts]
    statements = [Statement(text, ["str"] * count) for text, count in given]
    unchanging = sum(not columns for _, columns in COUNTED.values())
    assert len(statements) == 3 * len(COUNTED) - unchanging + 2 * 2 + 2
    assert {(one.text, table) for one in statements for table in find_scans(tables, one)} == set()


async def test_this_process_records_what_its_journals_send(tmp_path: Path) -> None:
    journal = await journals.open_test_journal(tmp_path, lambda: 1)
    await journal.close()
    assert any("requests" in one.text for one in list_recorded())  # opening removes old answers


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_table_is_used_and_no_statement_scans_one(tmp_path: Path) -> None:
    statements = record_suite(tmp_path, "-n", "2", *RECORDED, THIS)
    unseen = [name for name in metadata.tables if not any(name in one.text for one in statements)]
    assert (unseen, len(statements) > 150) == ([], True)
    assert list_unbounded(statements) == []


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
