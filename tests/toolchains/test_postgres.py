"""The journal on PostgreSQL passes the conformance suite, and what is PostgreSQL's own holds."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database import migrate
from memstream_server.adapters.journal.database import postgres as adapter
from memstream_server.adapters.journal.sql.schema import metadata
from memstream_server.adapters.journal.store import SqlJournal, open_journal
from memstream_server.adapters.models.hashing import computed_spaces
from memstream_server.ports.journal.errors import (
    JournalError,
    NamespaceFull,
    NotWritable,
    OutcomeUnknown,
    StaleWrite,
    StorageFull,
    Unreadable,
)
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Space
from tests.journal.conformance.suite import JournalConformance
from tests.journal.samples import MODEL, Now, Opener, fragment, receipt, record, row, transition
from tests.journal.writer_process import acknowledged_until_killed, check_kept
from tests.journal.writes import WRITES, run_in_one_group, seen
from tests.server.test_storage import fill_up, mounted
from tests.toolchains.postgres import Cluster

pytestmark = pytest.mark.toolchain

PATIENCE_S = 60.0
"""For a lock that is released when PostgreSQL has noticed that a connection is closed."""


@pytest.fixture
def now() -> Now:
    return Now()


@pytest.fixture
def url(postgres: Cluster) -> str:
    return postgres.database()


@pytest.fixture
def opener(url: str, now: Now) -> Opener:
    async def open_again() -> Journal:
        return await open_journal(Path("/nonexistent"), url=url, clock_us=now, computed=computed_spaces())

    return open_again


class TestPostgres(JournalConformance):
    """See conformance/suite.py."""


async def open_with_memory(url: str) -> SqlJournal:
    """Opens a journal with a memory that has an owner and a producer."""
    journal = await open_journal(Path("/nonexistent"), url=url, clock_us=Now())
    if await journal.get_memory("comedy", "joy") is None:
        await journal.create_memory(record(), ())
        await journal.own_memory("u1")
        await journal.open_producer("u1", 1, "p")
    return journal


@pytest.fixture
async def journal(url: str) -> AsyncIterator[SqlJournal]:
    journal = await open_with_memory(url)
    yield journal
    await journal.close()


async def read_revision(journal: SqlJournal) -> int:
    return (await journal.load_memory("u1", MODEL, 0)).record.revision


# ---- one server at a time


async def test_a_second_server_reports_who_holds_the_database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "LOCK_WAIT_S", 0.3)
    first = await open_with_memory(url)
    with pytest.raises(Unreadable, match=r"in use by memstream pid \d+ on .*: stop it, or give"):
        await open_with_memory(url)
    await first.commit(transition(1))
    monkeypatch.setattr(adapter, "LOCK_WAIT_S", PATIENCE_S)
    await first.close()
    await (await open_with_memory(url)).close()


async def test_schemas_of_one_database_are_separate(postgres: Cluster, url: str) -> None:
    postgres.execute(url, "CREATE SCHEMA other")
    first, second = await open_with_memory(url), await open_with_memory(f"{url}&options=-csearch_path%3Dother")
    await first.commit(transition(1))
    assert (await read_revision(first), await read_revision(second)) == (2, 1)
    await first.close()
    await second.close()


def test_servers_that_start_at_once_take_turns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each creates the tables or finds them, and closes before the next opens."""
    monkeypatch.setattr(adapter, "LOCK_WAIT_S", 30)
    together, inside = threading.Barrier(4), threading.Semaphore(1)

    def start() -> str:
        together.wait()
        database = adapter.open_database(url, readers=1)
        assert inside.acquire(blocking=False), "another server is open"
        inside.release()
        database.close()
        return database.description

    with ThreadPoolExecutor(4) as pool:
        descriptions = [future.result() for future in [pool.submit(start) for _ in range(4)]]
    assert len(set(descriptions)) == 1
    assert descriptions[0].startswith("postgresql 1")


async def test_a_server_that_lost_the_database_lock_cannot_write(
    postgres: Cluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "LOCK_WAIT_S", 0.3)
    first = await open_with_memory(url)
    other = take_lock(postgres, url)
    try:
        with pytest.raises(Unreadable, match="in use by"):
            await first.commit(transition(1))
        assert await read_revision(first) == 1
    finally:
        monkeypatch.setattr(adapter, "LOCK_WAIT_S", PATIENCE_S)
        other.close()
    await first.commit(transition(1))  # the lock is free again
    assert await read_revision(first) == 2
    await first.close()


def take_lock(cluster: Cluster, url: str) -> Any:
    """Ends the sessions of a database and takes the lock before they reconnect."""
    import psycopg

    connection = psycopg.connect(url, autocommit=True)
    with ThreadPoolExecutor(1) as pool:
        lock = f"SELECT pg_advisory_lock({adapter.SINGLE}, {adapter.SCHEMA})"
        waits = pool.submit(connection.execute, lock.encode())
        cluster.execute(
            "postgres",
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = %s AND pid <> %s",
            connection.info.dbname,
            connection.info.backend_pid,
        )
        waits.result(10)
    return connection


# ---- the tables


CATALOG = (
    "SELECT table_name, column_name, data_type, is_nullable, column_default, is_identity, collation_name"
    " FROM information_schema.columns WHERE table_schema = 'public'",
    "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
    " WHERE connamespace = 'public'::regnamespace",
    "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal",
    "SELECT proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace",
    "SELECT relname, relkind, reloptions FROM pg_class WHERE relnamespace = 'public'::regnamespace",
    "SELECT version_num FROM alembic_version",
)
"""Columns, indexes, constraints, triggers, functions, storage and revision of the tables."""


def test_migrations_match_tables_of_new_journal(postgres: Cluster) -> None:
    found = []
    for way in (migrate.create_tables, partial(migrate.run_migrations, revision=None)):
        engine = create_engine(adapter.parse_url(postgres.database()))
        with engine.begin() as connection:
            way(connection)
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, metadata) == []
            rows = [sorted(map(repr, connection.exec_driver_sql(query).all())) for query in CATALOG]
            assert all(rows)
            found.append(rows)
            unordered = connection.exec_driver_sql(
                "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
                " AND table_name <> 'alembic_version' AND data_type = 'text' AND collation_name IS DISTINCT FROM 'C'"
            )
            assert unordered.all() == []
        engine.dispose()
    assert found[0] == found[1]


async def test_an_unusable_database_is_rejected_with_the_cause(postgres: Cluster, url: str) -> None:
    async def refusal(place: str) -> str:
        with pytest.raises(Unreadable) as caught:
            await open_journal(Path("/nonexistent"), url=place, clock_us=Now())
        return str(caught.value)

    assert 'database "nowhere" does not exist' in await refusal(postgres.url("nowhere"))
    latin = postgres.database("ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    assert "encoding is LATIN1" in await refusal(latin)
    assert "read-only" in await refusal(f"{url}&options=-cdefault_transaction_read_only%3Don")
    assert "no schema" in await refusal(f"{url}&options=-csearch_path%3Dnothere")
    foreign = postgres.database()
    postgres.execute(foreign, "CREATE TABLE events (mine integer)")
    assert "holds tables of something else" in await refusal(foreign)
    assert postgres.execute(foreign, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == [(1,)]
    await (await open_with_memory(url)).close()
    postgres.execute(url, "UPDATE alembic_version SET version_num = '9999'")
    assert "start a newer memstream" in await refusal(url)


@pytest.mark.parametrize(
    "wrong", ["postgresql://u:s3cret@127.0.0.1:1/d", "mysql://u:s3cret@h/d", "postgresql://u:s3cret@h:port/d"]
)
async def test_a_password_is_in_no_message(wrong: str) -> None:
    with pytest.raises(Unreadable) as caught:
        await open_journal(Path("/nonexistent"), url=wrong, clock_us=Now())
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cret" not in f"{error} {error!r}"
        error = error.__cause__


async def test_a_backup_refers_to_pg_dump(journal: SqlJournal, tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="pg_dump"):
        await journal.backup(str(tmp_path / "copy"))


# ---- durability


async def test_the_journal_commits_synchronously(postgres: Cluster, url: str) -> None:
    postgres.execute(url, f"ALTER DATABASE {url.split('?')[0].rpartition('/')[2]} SET synchronous_commit = 'off'")
    journal = await open_with_memory(url)

    def commits(connection: Connection) -> object:
        return connection.exec_driver_sql("SHOW synchronous_commit").scalar_one()

    assert await journal._writer.submit(commits, 1, False) == "on"
    await journal.close()


async def test_acknowledged_writes_survive_kill_9(url: str) -> None:
    for lines in (1, 40, 173):
        said = await asyncio.to_thread(acknowledged_until_killed, url, lines)
        journal = await open_journal(Path("/nonexistent"), url=url, clock_us=Now())
        try:
            await check_kept(journal, said)
        finally:
            await journal.close()


async def test_a_failed_transaction_is_not_committed(journal: SqlJournal) -> None:
    """PostgreSQL answers COMMIT of a failed transaction with ROLLBACK, which is no error to the driver."""
    database = journal._database
    await journal.close()
    with database.writer.connect() as connection:
        connection.begin()
        with pytest.raises(DBAPIError):
            connection.exec_driver_sql("SELECT nothing")
        with pytest.raises(JournalError, match="INERROR"):
            database.commit(connection)
        connection.invalidate()
    database.close()


# ---- connections that are lost


def end_session(cluster: Cluster, connection: Connection) -> None:
    """Ends a session as an administrator would, and returns when it has ended."""
    pid = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]  # psycopg's
    assert cluster.execute("postgres", "SELECT pg_terminate_backend(%s, 5000)", pid) == [(True,)]


async def test_sessions_that_ended_while_idle_are_replaced(postgres: Cluster, journal: SqlJournal, url: str) -> None:
    for number in range(1, 4):
        assert await read_revision(journal) == number
        postgres.end_sessions(url)
        await asyncio.gather(*(read_revision(journal) for _ in range(4)))
        postgres.end_sessions(url)
        await journal.commit(transition(number))


@pytest.mark.parametrize("name", ["commit", "receive", "create", "delete", "append", "save_plans", "operation"])
async def test_a_write_is_done_once_if_its_session_ends(postgres: Cluster, name: str) -> None:
    """Nothing was committed yet, so the write is retried in a new session, and the caller gets no error."""

    async def prepared() -> SqlJournal:
        journal = await open_with_memory(postgres.database())
        await journal.receive(receipt(1, 2, 0))
        await journal.commit(transition(1, rows=(row(fragment(9)),)))
        return journal

    async def effect(journal: SqlJournal) -> object:
        await WRITES[name](journal)
        *others, outbox, jobs = cast("tuple[Any, ...]", await seen(journal))
        await journal.close()
        return *others, [(replace(entry, id=0), row) for entry, row in outbox], jobs  # a sequence has gaps

    expected = await effect(await prepared())
    failing = ended = statements = 0

    def trip(connection: Connection, *_: object) -> None:
        nonlocal statements, ended
        statements += 1
        if statements == failing:
            ended += 1
            end_session(postgres, connection)

    while ended == failing:
        journal = await prepared()
        failing, statements = failing + 1, 0
        event.listen(journal._database.writer, "before_cursor_execute", trip)
        assert await effect(journal) == expected, failing
    assert failing - 1 == statements >= 2, "each of the statements was really cut off"


@pytest.mark.parametrize("lost", [True, False])
async def test_a_session_that_ends_during_commit_is_outcome_unknown(
    postgres: Cluster, journal: SqlJournal, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def fail(connection: Connection) -> None:
        monkeypatch.undo()
        if lost:
            end_session(postgres, connection)
            connection.commit()
        else:
            connection.commit()
            end_session(postgres, connection)
            connection.exec_driver_sql("SELECT 1")

    monkeypatch.setattr(journal._database, "commit", fail)
    results = await run_in_one_group(
        journal,
        journal.commit(transition(1, rows=(row(fragment(0)),))),
        journal.commit(transition(7)),
        journal.receive(receipt(1, 2, 1)),
    )
    assert [type(result) for result in results] == [OutcomeUnknown, StaleWrite, OutcomeUnknown]
    image = await journal.load_memory("u1", MODEL, 0)
    assert (image.record.revision, len(image.pending)) == ((1, 0) if lost else (2, 1))
    await journal.commit(transition(image.record.revision))  # the writer still works


async def test_calls_fail_while_the_database_is_away_then_succeed(postgres: Cluster, journal: SqlJournal) -> None:
    await journal.commit(transition(1, rows=(row(fragment(0)),)))
    for how in (signal.SIGINT, signal.SIGQUIT):
        number = await read_revision(journal)
        await asyncio.to_thread(postgres.stop, how)
        calls = [journal.commit(transition(number)), journal.receive(receipt(1, 1, 5)), read_revision(journal)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [OutcomeUnknown] * 3
        await asyncio.to_thread(postgres.start)
        assert await read_revision(journal) == number
        await journal.commit(transition(number))


# ---- what PostgreSQL refuses


async def test_a_read_only_database_refuses_writes_by_name(postgres: Cluster, journal: SqlJournal, url: str) -> None:
    await journal.commit(transition(1, rows=(row(fragment(0)),)))
    name = url.partition("?")[0].rpartition("/")[2]
    postgres.execute("postgres", f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    postgres.end_sessions(url)
    with pytest.raises(NotWritable, match="read-only"):
        await journal.commit(transition(2))
    await journal.check_writing()
    assert "its database is read-only" in journal.write_problem
    assert [one.id for one in await journal.get_fragments("u1", [fragment(0).id])] == [fragment(0).id]
    postgres.execute("postgres", f"ALTER DATABASE {name} SET default_transaction_read_only = off")
    postgres.end_sessions(url)
    await journal.commit(transition(2, rows=(row(fragment(1)),)))
    assert journal.write_problem == ""


async def test_a_full_disk_fails_only_the_writes_that_do_not_fit(
    postgres: Cluster, journal: SqlJournal, url: str
) -> None:
    postgres.execute(
        url,
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$",
    )
    postgres.execute(url, "CREATE TRIGGER full_disk BEFORE INSERT ON observations EXECUTE FUNCTION full_disk()")
    results = await run_in_one_group(journal, journal.receive(receipt(1, 2, 0)), journal.commit(transition(1)))
    assert isinstance(results[0], StorageFull)
    assert "No space left" in str(results[0])
    assert results[1] is None
    postgres.execute(url, "DROP TRIGGER full_disk ON observations")
    await journal.receive(receipt(1, 2, 0))
    image = await journal.load_memory("u1", MODEL, 0)
    assert (len(image.pending), image.producers[0].received) == (1, 2)


async def write_megabytes(journal: Journal, revision: int) -> None:
    """A hundred megabytes that compress badly, from that revision on."""
    for number in range(revision, 1_000):
        content = random.Random(number).randbytes(100_000).hex()
        await journal.commit(transition(number, rows=(row(fragment(number, content=content)),)))


async def test_full_disk_refuses_writes_until_there_is_space(postgres: Cluster) -> None:
    """A file system of 32 MB that holds the tables of one database, as a tablespace."""
    async with mounted(postgres.folder / "disk", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as disk:
        owner, space = postgres.folder.stat(), disk / "space"
        space.mkdir()
        for folder in (disk, space):
            os.chown(folder, owner.st_uid, owner.st_gid)
        url = postgres.database()
        postgres.execute(url, f"CREATE TABLESPACE tiny LOCATION '{space}'")
        ((name,),) = postgres.execute(url, "SELECT current_database()")
        postgres.execute(url, f"ALTER DATABASE {name} SET default_tablespace = tiny")
        journal = await open_with_memory(url)
        await journal.commit(transition(1, rows=(row(fragment(0)),)))
        filler = await asyncio.to_thread(fill_up, disk)
        with pytest.raises(StorageFull, match="disk is full"):
            await write_megabytes(journal, 2)
        assert [one.id for one in await journal.get_fragments("u1", [fragment(0).id])] == [fragment(0).id]
        assert "space" in journal.write_problem
        filler.unlink()
        revision = (await journal.load_memory("u1", MODEL, 0)).record.revision
        await journal.commit(transition(revision, rows=(row(fragment(2_000)),)))
        assert journal.write_problem == ""
        await journal.close()
        postgres.execute("postgres", f"DROP DATABASE {name}")
        postgres.execute("postgres", "DROP TABLESPACE tiny")


@pytest.mark.parametrize("field", ["session", "speaker", "external_id"])
async def test_a_nul_is_rejected_before_it_is_received(journal: SqlJournal, field: str) -> None:
    """A received observation must be storable. The wire rejects such text; a journal must not rely on that."""
    poison: dict[str, Any] = {field: "a\0b"}
    batch = receipt(1, 1, 0)
    poisoned = replace(batch, fragments=tuple(one.but(**poison) for one in batch.fragments))
    with pytest.raises(JournalError, match="NUL"):
        await journal.receive(poisoned)
    results = await run_in_one_group(
        journal,
        journal.commit(transition(1, rows=(row(fragment(1, **poison)),))),
        journal.commit(transition(1, rows=(row(fragment(2)),))),
        journal.receive(batch),
    )
    assert type(results[0]) is JournalError
    assert "NUL" in str(results[0])
    assert (results[1], results[2]) == (None, None)
    image = await journal.load_memory("u1", MODEL, 0)
    assert ([one.fragment.position for one in image.rows], len(image.pending)) == ([2], 1)


async def test_a_nul_in_a_content_is_kept(journal: SqlJournal) -> None:
    said = fragment(1, content="a\0b", metadata=(("k\0", "v\0"),))
    await journal.commit(transition(1, rows=(row(said),)))
    assert (await journal.list_fragments("u1", FragmentQuery()))[0] == said


async def test_a_query_for_a_nul_is_an_error(journal: SqlJournal) -> None:
    with pytest.raises(JournalError, match="NUL"):
        await journal.list_fragments("u1", FragmentQuery(sessions=("a\0",)))
    assert await journal.list_fragments("u1", FragmentQuery(sessions=("a",))) == []


async def test_names_are_ordered_by_bytes_in_any_locale(postgres: Cluster) -> None:
    journal = await open_with_memory(postgres.database("LOCALE_PROVIDER icu ICU_LOCALE 'en' TEMPLATE template0"))
    names = ["B", "a", "a-b", "aB", "ab", "Ä"]
    for number, name in enumerate(names):
        await journal.create_memory(record(f"n{number}", name, "names"), ())
    assert [one.name for one in await journal.list_memories("names", "", 10)] == sorted(names)
    assert [one.name for one in await journal.list_memories("names", "a-b", 10)] == ["aB", "ab", "Ä"]
    await journal.set_space(Space(MODEL, 4, 64))
    await journal.close()


async def test_concurrent_servers_never_exceed_a_namespace_quota(url: str, now: Now) -> None:
    journals = [await open_journal(Path(), url=url, clock_us=now, shared=True) for _ in range(3)]
    try:
        for turn in range(10):
            made = [
                journal.create_memory(record(f"{turn}-{number}-{place}", f"m{place}", f"n{number}{turn}"), (), None, 2)
                for place, journal in enumerate(journals)
                for number in range(4)
            ]
            results = await asyncio.gather(*made, return_exceptions=True)
            assert [type(one) for one in results if one is not None] == [NamespaceFull] * 4
        assert {count for _, count in await journals[0].list_namespaces("", 100)} == {2}
    finally:
        for journal in journals:
            await journal.close()
