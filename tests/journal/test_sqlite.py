"""The SQLite journal passes the conformance suite."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from sqlalchemy import Column, Integer, LargeBinary, MetaData, Table, Text, create_engine, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database.directory import DirectoryDatabase
from memstream_server.adapters.journal.database.sqlite import writer_engine
from memstream_server.adapters.journal.sql.bulk import Bulk, fetch_rows, write_rows
from memstream_server.adapters.journal.sql.commit import MEMORY_FIELDS, PARTS, list_filled
from memstream_server.adapters.journal.store import SCRUB_REST, open_journal
from memstream_server.adapters.models.hashing import computed_spaces
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.rows import Row
from memstream_server.ports.journal.writing import Commit
from tests.journal.conformance.suite import JournalConformance
from tests.journal.samples import Now, Opener, fragment, record, transition


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def opener(tmp_path: Path, now: Now) -> Opener:
    async def open_again() -> Journal:
        return await open_journal(tmp_path / "data", clock_us=now, reserve_bytes=0, computed=computed_spaces())

    return open_again


class TestSqlite(JournalConformance):
    """See conformance/suite.py."""


def files(data_dir: Path) -> bytes:
    return b"".join(path.read_bytes() for path in data_dir.rglob("journal.db*"))


async def test_scrub_removes_deleted_bytes(opener: Opener, tmp_path: Path) -> None:
    """Alternate rows of many memories: page splits leave copies of moved rows that a deletion does not find."""
    journal = await opener()
    memories, turns = [f"u{number}" for number in range(20)], 60
    for uid in memories:
        await journal.create_memory(record(uid, uid), ())
        await journal.own_memory(uid)
    sizes = random.Random(1)
    words: dict[str, bytes] = {}

    def said(uid: str, turn: int) -> Fragment:
        word = f"<{uid}:{turn}>"
        return fragment(turn, content=word + "x" * sizes.randint(50, 1_500), id=f"{uid:0>10}{turn:016d}")

    for turn in range(turns):
        commits = [(uid, said(uid, turn)) for uid in sizes.sample(memories, len(memories))]
        next_ = transition(turn + 1)
        await asyncio.gather(*(journal.commit(replace(next_, memory=uid, rows=(Row(one),))) for uid, one in commits))
    for uid in memories:
        chosen = [turn for turn in range(turns) if sizes.random() < 0.5]
        words |= {f"{uid}/{turn}": f"<{uid}:{turn}>".encode() for turn in chosen}
        gone = tuple(f"{uid:0>10}{turn:016d}" for turn in chosen)
        await journal.commit(replace(transition(turns + 1), memory=uid, removed=gone))
    held = files(tmp_path)
    assert any(word in held for word in words.values())
    await journal.scrub_files()
    held = files(tmp_path)
    assert [name for name, word in words.items() if word in held] == []
    assert held.count(b"<u") >= len(memories) * turns - len(words)
    await journal.close()


async def test_scrubs_share_and_leave_the_writer_to_others(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[float, float]] = []

    def scrub(_: DirectoryDatabase) -> bool:
        begun = time.monotonic()
        time.sleep(0.01)
        spans.append((begun, time.monotonic()))
        return True

    monkeypatch.setattr(DirectoryDatabase, "scrub", scrub)
    journal = await opener()
    await journal.scrub_files()
    await asyncio.gather(*(journal.scrub_files() for _ in range(20)))
    (begun, ended), (next_begun, _) = spans
    assert next_begun - ended >= SCRUB_REST * (ended - begun)


def test_every_field_of_a_commit_is_written() -> None:
    written = {name for part in PARTS for name in part.fields}
    assert written.isdisjoint(MEMORY_FIELDS)
    assert written | MEMORY_FIELDS == {field.name for field in fields(Commit)}


def test_empty_commit_enters_no_part() -> None:
    empty = Commit(memory="u", epoch=1, revision=1, time_us=0)
    assert list_filled(empty) == []
    assert set(list_filled(replace(empty, labels=(), removed=("f",)))) == {"removed", "labels"}


def test_failure_in_later_row_raises_journal_error(tmp_path: Path) -> None:
    least = -(1 << 63)
    engine = writer_engine(tmp_path / "journal.db")
    with engine.begin() as connection, pytest.raises(DBAPIError, match="overflow"):
        write_rows(
            connection, Bulk("WITH given (n) AS (VALUES ", 1, ") SELECT abs(n) FROM given"), [(1,), (least,)], True
        )
    engine.dispose()


def test_column_reads_keep_every_byte() -> None:
    table = Table("t", MetaData(), Column("n", Integer), Column("b", LargeBinary), Column("t", Text))
    rows = [
        [-(2**63), bytes(range(256)), "a\0b"],
        [None, b"", ""],
        [2**63 - 1, None, None],
        [0, b"\0\0", "我叫 Bob, 🙂"],
        [1, b"\xff\xfe\0", "'quoted', \\ and \n"],
    ]
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        table.create(connection)
        statement = select(table.c.n, table.c.b, table.c.t).order_by(table.c.n.is_(None), table.c.n)
        assert fetch_rows(connection, statement, {}) == []
        connection.execute(table.insert(), [dict(zip("nbt", row, strict=True)) for row in rows])
        assert fetch_rows(connection, statement, {}) == [rows[at] for at in (0, 3, 4, 2, 1)]
