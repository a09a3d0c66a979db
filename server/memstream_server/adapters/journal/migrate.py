"""Bring a journal's tables to this server's version, in one transaction that holds the write lock."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from memstream_server.ports.journal import Unreadable

HEAD = "0007"
"""The newest file in migrations/versions."""
SCRIPTS = Path(__file__).parent / "migrations"


def is_journal(connection: Connection) -> bool:
    """Whether a database has ever been migrated."""
    return connection.dialect.has_table(connection, "alembic_version")


def upgrade(connection: Connection) -> None:
    """Raises Unreadable when the journal was written by a newer server."""
    revision = None
    if is_journal(connection):
        revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision == HEAD:
        return  # without importing Alembic, which takes longer than all the rest of opening
    _migrate(connection, revision)


def _migrate(connection: Connection, revision: str | None) -> None:
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
