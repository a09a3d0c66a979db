"""Migrate a journal's tables to this server's version, in one transaction that holds the write lock.

What must read all rows follows in transactions of its own, slice by slice, before the server serves
(`finish_migrating`).

A new journal gets its tables directly from the schema: Alembic would take a tenth of a server's first start, and on
PostgreSQL half a second. An older journal runs the migrations. Tests check that both ways give the same tables.

Rule 1. A journal of a data directory is copied before its first migration; without the copy nothing is migrated.
Rule 2. There is one copy for each revision of the tables, the latest, and of the latest revisions only.
Rule 3. What is erased leaves every file of the directory, so erasing removes the copies.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import structlog
from sqlalchemy import Connection, text
from sqlalchemy.dialects import registry
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from memstream_server.adapters.journal.database import migrate
from memstream_server.adapters.journal.sql import byte_counts, codec, schema
from memstream_server.core.events import list_concerned
from memstream_server.ports.journal.errors import StorageFull, Unreadable

log = structlog.get_logger(__name__)

REPORT_INTERVAL_S = 2.0
SLICE_ROWS = 50_000
"""Rows that one transaction counts, of those that were there before the triggers."""
SLICE_EVENTS = 1_000
"""Revisions whose fragments one transaction enters: a revision may name thousands."""
UNENTERED = "unentered_events"
"""Name in `meta` of the mark of migration 0022: the key of the last revision whose fragments are entered."""
_EVENTS = text("SELECT key, payload FROM events WHERE key > :after ORDER BY key LIMIT :limit")
_MARK = text("SELECT value FROM meta WHERE name = :name")
_SET_MARK = text("UPDATE meta SET value = :value WHERE name = :name")
_UNMARK = text("DELETE FROM meta WHERE name = :name")
SCRIPTS = Path(__file__).parent.parent / "migrations"
HEAD = max(file.name[1:5] for file in (SCRIPTS / "versions").glob("r*.py"))
"""The newest revision in migrations/versions: r0008_NAME.py has the revision 0008."""
_VERSION = (  # the same statement as Alembic's
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)
BACKUP_FOLDER = "backups"
BACKUPS_KEPT = 2


def is_journal(connection: Connection) -> bool:
    """Whether a database has been migrated at least once."""
    return connection.dialect.has_table(connection, "alembic_version")


def read_revision(connection: Connection) -> str | None:
    """The revision of a journal's tables; None if there are none."""
    if not is_journal(connection):
        return None
    revision: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    return revision


def upgrade_tables(connection: Connection) -> None:
    """Raises Unreadable if a newer server wrote the journal."""
    revision = read_revision(connection)
    if revision == HEAD:
        return  # without importing Alembic, which takes longer than the rest of opening
    if revision is None:
        create_tables(connection)
    else:
        run_migrations(connection, revision)


def finish_migrating(begin: Callable[[], AbstractContextManager[Connection]]) -> None:
    """Read the rows that migrations have left to be read, or continue where a start that was killed has ended.

    `begin` begins a transaction in which no other server does so.
    """
    steps = (("journal_counts_rows", count_slice, SLICE_ROWS), ("journal_enters_events", enter_slice, SLICE_EVENTS))
    for line, read, rows in steps:
        slices, reports, reported_s = 0, 0, time.monotonic()
        while True:
            with begin() as connection:
                table = read(connection)
            if table is None:
                break
            slices += 1
            if time.monotonic() - reported_s >= REPORT_INTERVAL_S:
                reports, reported_s = reports + 1, time.monotonic()
                log.info(line, table=table, rows=slices * rows)
        if reports:
            log.info(line, slices=slices, done=True)


def enter_slice(connection: Connection, rows: int = SLICE_EVENTS) -> str | None:
    """Enter the fragments of the next revisions after the mark of migration 0022; None if there are none left."""
    marked = connection.execute(_MARK, {"name": UNENTERED}).scalar_one_or_none()
    if marked is None:
        return None
    page = connection.execute(_EVENTS, {"after": int(marked), "limit": rows}).all()
    named = [
        {"memory": key >> schema.POSITION_BITS, "fragment": fragment, "revision": schema.key_position(key)}
        for key, blob in page
        for fragment in list_concerned(codec.decode_events(blob))
    ]
    if named:
        connection.execute(schema.event_fragments.insert(), named)
    if len(page) < rows:
        connection.execute(_UNMARK, {"name": UNENTERED})
    else:
        connection.execute(_SET_MARK, {"name": UNENTERED, "value": str(page[-1][0])})
    return "events"


def count_slice(connection: Connection, rows: int = SLICE_ROWS) -> str | None:
    """Count the next rows that the mark of migration 0018 names; the table of these rows, None if there are none left.

    Rows with the same first value of the key are in one slice.
    """
    marked = connection.execute(_MARK, {"name": byte_counts.UNCOUNTED}).scalar_one_or_none()
    if marked is None:
        return None
    table, after = json.loads(marked)
    key = schema.metadata.tables[table].primary_key.columns[0].name
    where, given = ("", {}) if after is None else (f" WHERE {key} > :after", {"after": after})
    cut = text(f"SELECT {key} FROM {table}{where} ORDER BY {key} LIMIT 1 OFFSET {rows - 1}")
    end = connection.execute(cut, given).scalar_one_or_none()
    if end is not None:
        where, given = f"{where}{' AND' if where else ' WHERE'} {key} <= :end", given | {"end": end}
    connection.execute(text(byte_counts.add_counts(connection.dialect.name, table, where)), given)
    _move_mark(connection, table, end)
    return str(table)


def _move_mark(connection: Connection, table: str, end: int | str | None) -> None:
    """To the end of a slice; without one, to the next table."""
    tables = [*byte_counts.COUNTED, None]
    following = table if end is not None else tables[tables.index(table) + 1]
    if following is None:
        connection.execute(_UNMARK, {"name": byte_counts.UNCOUNTED})
    else:
        connection.execute(_SET_MARK, {"name": byte_counts.UNCOUNTED, "value": json.dumps([following, end])})


@functools.cache
def _list_creations(dialect: str) -> tuple[str, ...]:
    """The statements that create all tables and triggers: to compile them takes longer than to run them."""
    created: list[ExecutableDDLElement] = []
    for table in schema.metadata.sorted_tables:
        indexes = sorted(table.indexes, key=lambda index: str(index.name))
        for index in indexes:  # the schema declares its condition for SQLite only
            index.dialect_options[dialect]["where"] = index.dialect_options["sqlite"]["where"]
        created += [CreateTable(table), *map(CreateIndex, indexes)]
    compiler = registry.load(dialect)()
    statements = [str(each.compile(dialect=compiler)) for each in created]
    return (*statements, *byte_counts.list_triggers(dialect), _VERSION)


def create_tables(connection: Connection) -> None:
    """Create the tables of a new journal, at revision HEAD."""
    for statement in _list_creations(connection.dialect.name):
        connection.exec_driver_sql(statement)
    connection.exec_driver_sql(f"INSERT INTO alembic_version (version_num) VALUES ('{HEAD}')")


def run_migrations(connection: Connection, revision: str | None) -> None:
    """Migrate from a revision (None: no tables) to HEAD with Alembic. Raises Unreadable for an unknown revision."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise Unreadable(f"the journal is at revision {revision}, unknown to this server: start a newer memstream")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def copy_before_migration(data_dir: Path, connection: Connection, write_backup: Callable[[Path], None]) -> Path | None:
    """Copy a journal whose tables are older than this server's; None if there is nothing to migrate.

    `write_backup` copies it to a new file. Raises StorageFull, Unreadable.
    """
    revision = migrate.read_revision(connection)
    if revision is None or revision >= migrate.HEAD:
        return None
    folder = data_dir / BACKUP_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"journal-{revision}.memstream"
    fresh = target.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # of a start that was killed
    try:
        write_backup(fresh)
    except StorageFull as error:
        raise StorageFull(
            f"the journal's tables are of revision {revision} and are copied before they become {migrate.HEAD}: "
            f"{error}. Free space, or make a backup elsewhere (memstream backup) and start with migration_backups = 0"
        ) from error
    fresh.chmod(0o600)
    fresh.rename(target)
    return target


def list_copies(data_dir: Path) -> list[Path]:
    """The copies, by revision of their tables, the oldest first."""
    return sorted((data_dir / BACKUP_FOLDER).glob("journal-*.memstream"))


def remove_copies(data_dir: Path, kept: int) -> list[Path]:
    """Remove all copies but those of the latest `kept` revisions, and what a killed start left; returns the copies."""
    for unfinished in (data_dir / BACKUP_FOLDER).glob("journal-*.new"):
        unfinished.unlink(missing_ok=True)
    found = list_copies(data_dir)
    removed = found[: max(0, len(found) - kept)]
    for file in removed:
        file.unlink(missing_ok=True)
    return removed
