"""Copies of a data directory's journal that a migration makes first, and the bound of their number.

Rule 1. A journal whose tables are older is copied before its first migration; without the copy nothing is migrated.
Rule 2. There is one copy for each revision of the tables, the latest, and of the latest revisions only.
Rule 3. What is erased leaves every file of the directory, so erasing removes the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sqlalchemy import Connection

from memstream_server.adapters.journal.database import migrate
from memstream_server.ports.journal.errors import StorageFull

BACKUP_FOLDER = "backups"
BACKUPS_KEPT = 2


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
