"""Location of a test's journal: its data directory, or a PostgreSQL schema if MEMSTREAM_TEST_JOURNAL_URL is set.

Every test opens its journals and starts its servers through this module, so that one variable runs the same suite on a
database. A data directory keeps its schema for the lifetime of the test process, so a restart finds it again.
"""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.adapters.models.hashing import computed_spaces

VARIABLE = "MEMSTREAM_TEST_JOURNAL_URL"
DATABASE = os.environ.get(VARIABLE, "")
_schemas: dict[Path, str] = {}


def journal_url(data_dir: Path) -> str:
    """The setting `journal_url` for a data directory; empty on SQLite."""
    if not DATABASE:
        return ""
    place = data_dir.resolve()
    if place not in _schemas:
        _schemas[place] = f"test_{uuid.uuid4().hex}"
        _execute(f"CREATE SCHEMA {_schemas[place]}")
    return f"{DATABASE}{'&' if '?' in DATABASE else '?'}options=-csearch_path%3D{_schemas[place]}"


def query_rows(data_dir: Path, statement: str) -> list[tuple[Any, ...]]:
    """Run a query on the journal of a data directory, also while a server has it open."""
    if not DATABASE:
        with closing(sqlite3.connect(f"file:{data_dir / 'journal.db'}?mode=ro", uri=True)) as database:
            return database.execute(statement).fetchall()
    import psycopg

    with psycopg.connect(journal_url(data_dir), autocommit=True) as connection:
        return connection.execute(statement.encode()).fetchall()


def change_rows(data_dir: Path, statement: str, value: bytes | int) -> int:
    """Run a statement with one value, written as ?, while nothing is written. Returns the number of changed rows."""
    if not DATABASE:
        with closing(sqlite3.connect(data_dir / "journal.db")) as database, database:
            return database.execute(statement, (value,)).rowcount
    import psycopg

    with psycopg.connect(journal_url(data_dir), autocommit=True) as connection:
        return connection.execute(statement.replace("?", "%s").encode(), (value,)).rowcount


def environment(words: Sequence[str]) -> dict[str, str]:
    """Environment variables with which `memstream WORDS` serves a data directory (`--data`) like these tests do."""
    if words[0] != "serve" or not DATABASE:
        return {}
    return {"MEMSTREAM_JOURNAL_URL": journal_url(Path(words[words.index("--data") + 1]))}


async def open_test_journal(data_dir: Path, clock_us: Callable[[], int], **options: Any) -> SqlJournal:
    """`open_journal` at the tests' location."""
    return await open_journal(
        data_dir, url=journal_url(data_dir), clock_us=clock_us, computed=computed_spaces(), **options
    )


def drop_schemas() -> None:
    """Drop all schemas. Waits for the sessions of killed servers to end."""
    while _schemas:
        _, schema = _schemas.popitem()
        _execute(f"DROP SCHEMA {schema} CASCADE")


def only_sqlite(reason: str) -> pytest.MarkDecorator:
    """Skip a test of a feature that a journal on PostgreSQL does not have."""
    return pytest.mark.skipif(bool(DATABASE), reason=f"SQLite's own: {reason}")


def _execute(statement: str) -> None:
    import psycopg

    with psycopg.connect(DATABASE, autocommit=True) as connection:
        connection.execute(statement.encode())
