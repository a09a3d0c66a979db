"""Migrate a journal's tables to this server's version, in one transaction that holds the write lock.

A new SQLite journal gets its tables directly from the schema: Alembic would take a tenth of a server's first start.
Every other journal runs the migrations. A test checks that both ways give the same tables.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from memstream_server.adapters.journal.sql import byte_counts, schema
from memstream_server.ports.journal.errors import Unreadable

SCRIPTS = Path(__file__).parent.parent / "migrations"
HEAD = max(file.name[1:5] for file in (SCRIPTS / "versions").glob("r*.py"))
"""The newest revision in migrations/versions: r0008_NAME.py has the revision 0008."""
_VERSION = (  # the same statement as Alembic's
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)


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
    if revision is None and connection.dialect.name == "sqlite":
        create_tables(connection)
    else:
        run_migrations(connection, revision)


def create_tables(connection: Connection) -> None:
    """Create the tables of a new journal on SQLite, at revision HEAD."""
    schema.metadata.create_all(connection, checkfirst=False)
    for trigger in byte_counts.list_triggers("sqlite"):
        connection.exec_driver_sql(trigger)
    connection.exec_driver_sql(_VERSION)
    connection.exec_driver_sql("INSERT INTO alembic_version (version_num) VALUES (?)", (HEAD,))


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
