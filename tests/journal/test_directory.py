"""The data directory: one server at a time, formats, damage, migrations, backup and restore."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from memstream_server.adapters.journal.database import migrate, sqlite
from memstream_server.adapters.journal.database.directory import restore
from memstream_server.adapters.journal.sql import byte_counts
from memstream_server.adapters.journal.sql.schema import metadata
from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.core.events import Event, EventType
from memstream_server.ports.journal.errors import AlreadyExists, JournalError, StorageFull, Unreadable
from memstream_server.ports.journal.records import Answer, IndexEntry
from tests.journal.samples import MODEL, Now, fragment, record, row, transition


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def opened(data_dir: Path) -> SqlJournal:
    return await open_journal(data_dir, clock_us=Now(), reserve_bytes=0)


async def filled(data_dir: Path, rows: int = 3) -> SqlJournal:
    """A journal with a memory of that many long-term fragments, all indexed."""
    journal = await opened(data_dir)
    await journal.create_memory(record(), ())
    await journal.own_memory("u1")
    entries = tuple(IndexEntry("u1", fragment(place).id) for place in range(rows))
    await journal.commit(transition(1, rows=tuple(row(fragment(place)) for place in range(rows)), index=entries))
    await journal.outbox_done([entry.id for entry, _ in await journal.read_outbox(rows)])
    return journal


async def uid_of(journal: SqlJournal) -> str:
    """The only memory's uid: a restore changes it."""
    found = await journal.get_memory("comedy", "joy")
    assert found is not None
    return found.uid


# ---- one server at a time


async def test_second_server_error_names_lock_holder(data_dir: Path) -> None:
    first = await opened(data_dir)
    with pytest.raises(Unreadable, match=rf"in use by pid {os.getpid()} on "):
        await opened(data_dir)
    await first.close()
    await (await opened(data_dir)).close()


async def test_closed_journal_raises(data_dir: Path) -> None:
    journal = await opened(data_dir)
    await journal.close()
    await journal.close()
    for call in (journal.get_space(), journal.own_memory("u1")):
        with pytest.raises(JournalError, match="closed"):
            await call


# ---- formats and damage


async def test_newer_format_and_newer_tables_are_refused(data_dir: Path) -> None:
    await (await opened(data_dir)).close()
    with sqlite3.connect(data_dir / "journal.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(Unreadable, match=r"revision 9999.*newer memstream"):
        await opened(data_dir)
    (data_dir / "format").write_text("memstream data directory, format 2\n")
    with pytest.raises(Unreadable, match=r"format 2.*up to 1.*newer memstream"):
        await opened(data_dir)
    (data_dir / "format").write_text("")
    with pytest.raises(Unreadable, match="format is damaged"):
        await opened(data_dir)


async def test_journal_without_format_file_is_not_touched(data_dir: Path) -> None:
    os.mkdir(data_dir)
    (data_dir / "journal.db").write_bytes(b"mine")
    with pytest.raises(Unreadable, match="memstream restore"):
        await opened(data_dir)
    assert (data_dir / "journal.db").read_bytes() == b"mine"


@pytest.mark.parametrize("damage", ["header", "half"])
async def test_opening_detects_damage(data_dir: Path, damage: str) -> None:
    await (await filled(data_dir, 200)).close()
    file = data_dir / "journal.db"
    whole = file.read_bytes()
    file.write_bytes(b"\xff" * 100 + whole[100:] if damage == "header" else whole[: len(whole) // 2])
    with pytest.raises(Unreadable, match="restore a backup"):
        await opened(data_dir)
    file.write_bytes(whole)
    await (await opened(data_dir)).close()  # the lock is free


async def test_reading_detects_deeper_damage(data_dir: Path) -> None:
    await (await filled(data_dir, 200)).close()
    file = data_dir / "journal.db"
    whole = file.read_bytes()
    middle = whole.index(fragment(100).content.encode()) // 4096 * 4096
    file.write_bytes(whole[:middle] + os.urandom(4096) + whole[middle + 4096 :])
    journal = await opened(data_dir)
    try:
        with pytest.raises(Unreadable, match="restore a backup"):
            await journal.load_memory("u1", MODEL, 0)
        assert await journal.get_memory("comedy", "joy") is not None
    finally:
        await journal.close()


async def test_record_of_newer_codec_is_refused(data_dir: Path) -> None:
    await (await filled(data_dir)).close()
    with sqlite3.connect(data_dir / "journal.db") as connection:
        connection.execute("UPDATE fragments SET payload = x'09' || substr(payload, 2)")
    connection.close()
    journal = await opened(data_dir)
    try:
        with pytest.raises(Unreadable, match=r"version 9.*newer memstream"):
            await journal.load_memory("u1", MODEL, 0)
    finally:
        await journal.close()


# ---- migrations


def tables(connection: Connection) -> dict[str, Any]:
    """SQLite's description of every table: columns sorted, indexes with conditions, whether keys are reused."""
    found = {}
    master = "SELECT name, sql FROM sqlite_master WHERE type = 'table'"
    for name, sql in connection.exec_driver_sql(master).all():
        columns = [row[1:] for row in connection.exec_driver_sql(f'PRAGMA table_xinfo("{name}")').all()]
        indexes = {}
        for _, index, unique, origin, partly in connection.exec_driver_sql(f'PRAGMA index_list("{name}")').all():
            parts = connection.exec_driver_sql(f'PRAGMA index_xinfo("{index}")').all()
            where = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE name = ?", (index,)).scalar()
            condition = (where or "").partition(" WHERE ")[2]
            indexes[index] = (unique, origin, partly, condition, [row[2:] for row in parts])
        found[name] = (sorted(columns), indexes, "AUTOINCREMENT" in sql)
    return found


def test_migrations_match_tables_of_new_journal(tmp_path: Path) -> None:
    found = []
    for way in (migrate.create_tables, partial(migrate.run_migrations, revision=None)):
        engine = sqlite.writer_engine(tmp_path / f"{len(found)}.db")
        with engine.begin() as connection:
            way(connection)
            assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalars().all() == [
                migrate.HEAD
            ]
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []
            triggers = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' ORDER BY name"
            found.append({**tables(connection), "triggers": connection.exec_driver_sql(triggers).all()})
        engine.dispose()
    assert found[0] == found[1]
    assert found[0]["fragments"][1]["fragments_external_id"][3] == "external_id IS NOT NULL"
    assert ScriptDirectory(str(migrate.SCRIPTS)).get_current_head() == migrate.HEAD


def test_migration_removes_producers_of_request_ids(tmp_path: Path) -> None:
    """Only producers that have stored everything received: the others are still needed."""
    engine = sqlite.writer_engine(tmp_path / "old.db")
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(migrate.SCRIPTS))
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
        for name, stored, made in (("lasting", 2, None), ("request:r", 2, 1), ("request:waits", 0, 1)):
            connection.exec_driver_sql("INSERT INTO producers VALUES (1, ?, 1, 2, ?, ?)", (name, stored, made))
            connection.exec_driver_sql("INSERT INTO receipts VALUES (1, ?, 2, 1, ?, NULL)", (name, b"h" * 32))
        migrate.run_migrations(connection, "0007")
        for table, column in (("producers", "name"), ("receipts", "producer")):
            left = connection.exec_driver_sql(f"SELECT {column} FROM {table} ORDER BY 1").scalars().all()
            assert left == ["lasting", "request:waits"]
    engine.dispose()


def undo_feeds(connection: Connection) -> None:
    for table in ("standing_memories", "block_sources", "standing_blocks"):
        connection.exec_driver_sql(f"DROP TABLE {table}")
    connection.exec_driver_sql("DROP INDEX blocks_sources")
    connection.exec_driver_sql("ALTER TABLE blocks DROP COLUMN sources")
    connection.exec_driver_sql("DROP INDEX states_parts")
    connection.exec_driver_sql("ALTER TABLE states DROP COLUMN parts")
    connection.exec_driver_sql("DROP INDEX message_bodies_parts")
    connection.exec_driver_sql("ALTER TABLE message_bodies DROP COLUMN parts")
    connection.exec_driver_sql("ALTER TABLE conversations DROP COLUMN changes")
    connection.exec_driver_sql("DROP INDEX conversations_feeding")
    for column in ("feed_memory", "fed_number"):
        connection.exec_driver_sql(f"ALTER TABLE conversations DROP COLUMN {column}")


def undo_later(connection: Connection) -> None:
    """Undo what later migrations did to conversations, blocks and events; their triggers are gone."""
    connection.exec_driver_sql("ALTER TABLE memories DROP COLUMN block_version")
    undo_feeds(connection)
    for table in ("blocks", "message_bodies", "conversation_labels", "states", "event_fragments"):
        connection.exec_driver_sql(f"DROP TABLE {table}")
    for index in ("conversations_latest", "conversations_expire"):
        connection.exec_driver_sql(f"DROP INDEX {index}")
    connection.exec_driver_sql("DROP INDEX messages_client_id")
    added = ("message_time_us", "message_count", "labels", "ttl_us", "update_time_us", "expire_time_us")
    for column in added:
        connection.exec_driver_sql(f"ALTER TABLE conversations DROP COLUMN {column}")
    for column in ("conversation", "client_id"):
        connection.exec_driver_sql(f"ALTER TABLE messages DROP COLUMN {column}")


async def test_migration_keeps_labels_and_counts(data_dir: Path) -> None:
    labels = (("team", 'co"re 茶'), ("tier", "gold"))
    journal = await filled(data_dir)
    await journal.commit(transition(2, labels=labels))
    await journal.commit(transition(3, rows=(row(fragment(8)), row(fragment(9, forget_time_us=1))), added=4))
    memory, held = await journal.get_memory("comedy", "joy"), await journal.read_bytes(["comedy"])
    await journal.close()
    engine = sqlite.writer_engine(data_dir / "journal.db")
    with engine.begin() as connection:
        for (trigger,) in connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'trigger'").all():
            connection.exec_driver_sql(f"DROP TRIGGER {trigger}")
        connection.exec_driver_sql("DROP TABLE namespace_bytes")
        connection.exec_driver_sql("ALTER TABLE deletions DROP COLUMN namespace")
        connection.exec_driver_sql("DROP TABLE memory_labels")
        for column in ("fragments", "change_time_us"):
            connection.exec_driver_sql(f"ALTER TABLE memories DROP COLUMN {column}")
        undo_later(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0014'")
    engine.dispose()
    migrated = await opened(data_dir)
    for label in labels:
        assert await migrated.list_memories("comedy", "", 9, "", (label,)) == [memory]
    assert await migrated.read_bytes(["comedy"]) == held
    await migrated.close()


async def test_counting_continues_after_kills(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await filled(data_dir, 5)
    await journal.put_answer(Answer("drama\nDo\nr1", b"d", b"done", 1))
    held = await journal.read_bytes(["comedy", "drama"])
    await journal.close()
    engine = sqlite.writer_engine(data_dir / "journal.db")
    with engine.begin() as connection:
        for statement in byte_counts.list_removals("sqlite"):
            connection.exec_driver_sql(statement)
        connection.exec_driver_sql("ALTER TABLE namespace_bytes DROP COLUMN memories")
        older = "INSERT INTO namespace_bytes VALUES ('comedy', 1, 9, 9, 9, 9, 9)"
        undo_later(connection)
        connection.exec_driver_sql(f"CREATE TRIGGER plans_bytes_insert AFTER INSERT ON plans BEGIN {older}; END")
        connection.exec_driver_sql(older)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0017'")
    engine.dispose()
    count_slice, calls = migrate.count_slice, 0

    def die_in_every_third(connection: Connection) -> str | None:
        nonlocal calls
        calls += 1
        table = count_slice(connection, rows=2)
        if calls % 3 == 0:
            raise SystemExit
        return table

    monkeypatch.setattr(migrate, "count_slice", die_in_every_third)
    kills = 0
    while True:
        try:
            migrated = await opened(data_dir)
            break
        except SystemExit:
            kills += 1
    assert kills > len(byte_counts.COUNTED) / 2
    assert await migrated.read_bytes(["comedy", "drama"]) == held
    await migrated.close()


async def test_events_are_entered_again_after_each_kill(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = await filled(data_dir)
    for revision in range(2, 9):
        named = (Event(EventType.ENHANCED, "a", other="b"), Event(EventType.OBSERVED, f"c-{revision}"))
        await journal.commit(transition(revision, events=named))
    ids = ("a", "b", "c-2", "c-8", fragment(0).id)
    found = [await journal.list_fragment_events("u1", id_, 0, 100) for id_ in ids]
    assert [len(events) for events, _ in found] == [7, 7, 1, 1, 0]
    await journal.close()
    engine = sqlite.writer_engine(data_dir / "journal.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE event_fragments")
        undo_feeds(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0021'")
    engine.dispose()
    enter_slice, calls = migrate.enter_slice, 0

    def die_in_every_second(connection: Connection) -> str | None:
        nonlocal calls
        calls += 1
        table = enter_slice(connection, rows=2)
        if calls % 2 == 0:
            raise SystemExit
        return table

    monkeypatch.setattr(migrate, "enter_slice", die_in_every_second)
    kills = 0
    while True:
        try:
            migrated = await opened(data_dir)
            break
        except SystemExit:
            kills += 1
    assert kills > 2
    assert [await migrated.list_fragment_events("u1", id_, 0, 100) for id_ in ids] == found
    await migrated.close()


def test_every_table_of_tenants_is_counted() -> None:
    """The others follow from these, or hold nothing of a tenant for long."""
    others = {
        "memory_labels",
        "conversation_labels",
        "jobs",
        "outbox",
        "deletions",
        "processes",
        "meta",
        "namespace_bytes",
        "event_fragments",
        "standing_blocks",
        "standing_memories",
        "block_sources",
    }
    assert {*byte_counts.COUNTED} | others == {*metadata.tables}


async def test_connections_have_durable_settings(data_dir: Path) -> None:
    await (await opened(data_dir)).close()
    engine = sqlite.writer_engine(data_dir / "journal.db")
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "secure_delete")
        }
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "secure_delete": 1}


# ---- backup and restore


async def test_backup_during_writes_is_a_snapshot(data_dir: Path, tmp_path: Path) -> None:
    journal = await filled(data_dir)
    acknowledged = 2

    async def write() -> None:
        nonlocal acknowledged
        while not stop.is_set():
            rows = tuple(row(fragment(place, version=acknowledged)) for place in range(3))
            await journal.commit(transition(acknowledged, rows=rows))
            acknowledged += 1

    stop = asyncio.Event()
    writing = asyncio.ensure_future(write())
    copies: list[tuple[Path, int, int]] = []
    for number in range(3):
        before = acknowledged
        await journal.backup(str(tmp_path / f"backup{number}"))
        copies.append((tmp_path / f"backup{number}", before, acknowledged + 1))
        await asyncio.sleep(0)
    stop.set()
    await writing
    await journal.close()
    for number, (copy, least, most) in enumerate(copies):
        target = tmp_path / f"restored{number}"
        restore(copy, target)
        again = await opened(target)
        uid = await uid_of(again)
        image = await again.load_memory(uid, MODEL, 9)
        assert least <= image.record.revision <= most
        assert {one.fragment.version for one in image.rows} <= {0, image.record.revision - 1}
        assert len(await again.list_events(uid, 0, 100_000)) == image.record.revision
        await again.close()
    assert sorted(os.listdir(tmp_path)) == [
        "backup0",
        "backup1",
        "backup2",
        "data",
        *(f"restored{n}" for n in range(3)),
    ]


async def test_backup_needs_new_file_and_free_space(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await filled(data_dir)
    try:
        (tmp_path / "taken").write_text("mine")
        with pytest.raises(AlreadyExists, match="taken"):
            await journal.backup(str(tmp_path / "taken"))
        assert (tmp_path / "taken").read_text() == "mine"
        monkeypatch.setattr(sqlite, "free_bytes", lambda directory: 100)
        with pytest.raises(StorageFull, match="100 bytes free"):
            await journal.backup(str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()
    finally:
        await journal.close()


async def test_restore_refills_index(data_dir: Path, tmp_path: Path) -> None:
    journal = await filled(data_dir)
    await journal.backup(str(tmp_path / "backup"))
    assert await journal.outbox_size() == 0
    await journal.close()
    restore(tmp_path / "backup", tmp_path / "new")
    again = await opened(tmp_path / "new")
    try:
        renamed = await uid_of(again)
        entries = [entry for entry, _ in await again.read_outbox(9)]
        assert renamed != "u1"
        assert [(entry.memory, entry.delete) for entry in entries] == [("u1", True)] * 3 + [(renamed, False)] * 3
        assert [one.fragment.position for one in (await again.load_memory(renamed, MODEL, 9)).rows] == [0, 1, 2]
    finally:
        await again.close()


async def test_restore_needs_force_and_a_stopped_server(data_dir: Path, tmp_path: Path) -> None:
    journal = await filled(data_dir)
    await journal.backup(str(tmp_path / "backup"))
    with pytest.raises(Unreadable, match="in use by pid"):
        restore(tmp_path / "backup", data_dir, force=True)
    await journal.commit(transition(2, rows=(row(fragment(9)),)))
    await journal.close()
    with pytest.raises(AlreadyExists, match=r"not empty \(format, journal.db, journal.db-clean\)"):
        restore(tmp_path / "backup", data_dir)
    restore(tmp_path / "backup", data_dir, force=True)
    again = await opened(data_dir)
    assert [one.fragment.position for one in (await again.load_memory(await uid_of(again), MODEL, 9)).rows] == [0, 1, 2]
    await again.close()


@pytest.mark.parametrize("what", ["garbage", "truncated", "foreign", "absent"])
async def test_restore_of_invalid_file_changes_nothing(data_dir: Path, tmp_path: Path, what: str) -> None:
    journal = await filled(data_dir, 100)
    backup = tmp_path / "backup"
    if what == "garbage":
        backup.write_bytes(os.urandom(8192))
    elif what == "truncated":
        await journal.backup(str(backup))
        backup.write_bytes(backup.read_bytes()[:-8192])
    elif what == "foreign":
        with sqlite3.connect(backup) as connection:
            connection.execute("CREATE TABLE notes (text)")
        connection.close()
    await journal.close()
    with pytest.raises(Unreadable):
        restore(backup, data_dir, force=True)
    with pytest.raises(Unreadable):
        restore(backup, tmp_path / "empty")
    assert not (tmp_path / "empty").exists() or os.listdir(tmp_path / "empty") == ["lock"]
    again = await opened(data_dir)
    assert len((await again.load_memory("u1", MODEL, 9)).rows) == 100
    await again.close()


async def test_unfinished_restore_must_be_repeated(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = await filled(data_dir)
    await journal.backup(str(tmp_path / "backup"))
    await journal.close()

    def killed(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            restore(tmp_path / "backup", data_dir, force=True)
    with pytest.raises(Unreadable, match="did not finish"):
        await opened(data_dir)
    restore(tmp_path / "backup", data_dir, force=True)
    await (await opened(data_dir)).close()
