"""No statement that the suite sends to PostgreSQL scans a table that grows (see tests/journal/test_statements.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, make_url

from memstream_server.adapters.journal.database.migrate import upgrade_tables
from memstream_server.adapters.journal.sql.schema import metadata
from tests.support.journals import VARIABLE
from tests.support.scans import fill_tables, find_scans, find_unbounded
from tests.support.statement_recorder import Statement, record_suite
from tests.toolchains.postgres import Cluster

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SUITE = (
    "tests/blocks/test_store.py",
    *("tests/conversations/test_store.py", "tests/operations/test_store.py", "tests/engine/test_reembedding.py"),
    *(str(HERE / f"test_{name}.py") for name in ("postgres", "ownership")),
)


@pytest.fixture(scope="module")
def tables(postgres: Cluster) -> Iterator[Connection]:
    """Filled and analysed tables of a journal, with plans as PostgreSQL makes them without knowing the values."""
    engine = create_engine(make_url(postgres.database()).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        upgrade_tables(connection)
        fill_tables(connection)
        connection.exec_driver_sql("ANALYZE")
        connection.exec_driver_sql("SET plan_cache_mode = force_generic_plan")
        yield connection
        connection.rollback()
    engine.dispose()


def test_no_statement_scans_on_postgres(tables: Connection, postgres: Cluster, tmp_path: Path) -> None:
    statements = record_suite(tmp_path, "-n", "2", *SUITE, "-m", "", **{VARIABLE: postgres.database()})
    unseen = [name for name in metadata.tables if not any(name in one.text for one in statements)]
    assert unseen == []
    assert find_unbounded(tables, statements) == []


@pytest.mark.parametrize(
    ("text", "types", "table"),
    [
        ("DELETE FROM jobs WHERE attempts = ?", ["int"], "jobs"),
        ("SELECT f.payload FROM fragments AS f WHERE f.session IN (?)", ["str"], "fragments"),
    ],
)
def test_a_scan_on_postgres_is_found(tables: Connection, text: str, types: list[str], table: str) -> None:
    assert find_scans(tables, Statement(text, types)) == [table]
