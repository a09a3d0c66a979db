"""The copy that a migration makes first, of a journal that an older memstream wrote."""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import memstream
from memstream_server.adapters.journal.database import migrate, sqlite
from memstream_server.adapters.journal.database.migrate import BACKUP_FOLDER
from memstream_server.adapters.journal.store import open_journal
from memstream_server.ports.journal.errors import StorageFull
from tests.journal.samples import Now
from tests.support.server import ServerProcess

OLDER = Path(__file__).parent / "older/0010.db.gz"
"""Written by `memstream serve` of that revision: the memory older/joy with CONTENTS."""
CONTENTS = {"The key is under the mat.", "Bob likes tea.", "A heron stands by the canal."}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    (folder / "format").write_text("memstream data directory, format 1\n")
    (folder / "journal.db").write_bytes(gzip.decompress(OLDER.read_bytes()))
    return folder


async def open_and_close(data_dir: Path, backups_kept: int = 2, *, erased: bool = False) -> None:
    journal = await open_journal(data_dir, clock_us=Now(), reserve_bytes=0, backups_kept=backups_kept)
    try:
        if erased:
            await journal.scrub_files()
    finally:
        await journal.close()


def revision(file: Path) -> str:
    with closing(sqlite3.connect(file)) as connection:
        (found,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(found)


def count_fragments(file: Path) -> int:
    with closing(sqlite3.connect(file)) as connection:
        (found,) = connection.execute("SELECT count(*) FROM fragments").fetchone()
    return int(found)


def copies(data_dir: Path) -> list[str]:
    return sorted(file.name for file in (data_dir / BACKUP_FOLDER).glob("*"))


async def test_journal_is_copied_before_it_is_migrated(data_dir: Path) -> None:
    await open_and_close(data_dir)
    copy = data_dir / BACKUP_FOLDER / "journal-0010.memstream"
    assert copies(data_dir) == [copy.name]
    assert (revision(copy), revision(data_dir / "journal.db")) == ("0010", migrate.HEAD)
    assert count_fragments(copy) == count_fragments(data_dir / "journal.db") == len(CONTENTS)
    assert (copy.stat().st_mode & 0o777, copy.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    sqlite.check_pages(copy)
    await open_and_close(data_dir)
    assert copies(data_dir) == [copy.name], "nothing was migrated, so nothing was copied"


async def test_one_command_restores_the_copy(data_dir: Path) -> None:
    await open_and_close(data_dir)
    with closing(sqlite3.connect(data_dir / "journal.db", isolation_level=None)) as connection:
        connection.execute("DELETE FROM fragments")
    copy = data_dir / BACKUP_FOLDER / "journal-0010.memstream"
    command = (sys.executable, "-m", "memstream_server", "restore", copy, "--data", data_dir, "--force")
    await asyncio.to_thread(subprocess.run, list(map(str, command)), check=True, capture_output=True, timeout=120)
    assert count_fragments(data_dir / "journal.db") == len(CONTENTS)
    assert copies(data_dir) == [copy.name]


async def test_copies_of_the_latest_revisions_are_kept(data_dir: Path) -> None:
    folder = data_dir / BACKUP_FOLDER
    folder.mkdir()
    for name in ("journal-0003.memstream", "journal-0008.memstream", "journal-0009.new", "monday.memstream"):
        (folder / name).write_bytes(b"x")
    await open_and_close(data_dir)
    assert copies(data_dir) == ["journal-0008.memstream", "journal-0010.memstream", "monday.memstream"]


async def test_failed_migration_leaves_journal_and_copy(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(migrate, "run_migrations", fail)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="injected"):
            await open_and_close(data_dir)
        assert revision(data_dir / "journal.db") == "0010"
        assert copies(data_dir) == ["journal-0010.memstream"]
    monkeypatch.undo()
    await open_and_close(data_dir)
    assert revision(data_dir / "journal.db") == migrate.HEAD


async def test_nothing_is_migrated_without_room_for_a_copy(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "free_bytes", lambda _: 1_000)
    with pytest.raises(StorageFull, match=r"revision 0010.*migration_backups = 0"):
        await open_and_close(data_dir)
    assert revision(data_dir / "journal.db") == "0010"
    assert copies(data_dir) == []
    await open_and_close(data_dir, 0)
    assert revision(data_dir / "journal.db") == migrate.HEAD
    assert copies(data_dir) == []


async def test_erasing_removes_the_copies(data_dir: Path) -> None:
    await open_and_close(data_dir, erased=True)
    assert migrate.list_copies(data_dir) == []


async def test_server_serves_what_an_older_one_stored(data_dir: Path) -> None:
    with ServerProcess(data_dir) as server:
        async with memstream.connect(server.address) as client:
            memory = client.memory("older/joy")
            assert {one.content async for one in memory.list_fragments()} == CONTENTS
            answer = await memory.recall_once("Where is the key?", limit=1)
        assert server.stop() == 0
    assert answer[0].fragment.content == "The key is under the mat."
    assert "journal_migrated" in server.log()
    assert "backups/journal-0010.memstream" in server.log()
