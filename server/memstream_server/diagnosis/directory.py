"""Checks the data directory's files: presence, permissions, lock, format, write-ahead log, disk space."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from memstream_server.adapters.journal.database import directory, sqlite
from memstream_server.adapters.journal.database.migrate import list_copies
from memstream_server.adapters.journal.verify import sqlite_wal
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.ports.journal.errors import Unreadable

RESTORE = "restore a backup: memstream restore FILE --data {} --force"


def check_directory(data_dir: Path, holder: str, reserve_bytes: int) -> Iterator[Finding]:
    """Findings on an existing directory. `holder` is the process that holds its lock, if any. Raises OSError."""
    yield from _check_permissions(data_dir)
    yield _check_lock(data_dir, holder)
    yield _check_format(data_dir)
    yield _check_wal(data_dir, holder)
    yield _check_disk(data_dir, reserve_bytes)
    yield from _list_copies(data_dir)


def _check_permissions(data_dir: Path) -> Iterator[Finding]:
    files = [data_dir, *(file for file in data_dir.iterdir() if file.is_file())]
    denied = [file.name for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if denied:
        user = f"user {os.getuid()}"
        yield problem(
            "permissions", f"{user} may not read and write {', '.join(denied)}", "chown it to the server's user"
        )
        return
    mode = stat.S_IMODE(data_dir.stat().st_mode)
    if mode & 0o077:
        yield note("permissions", f"other users may enter {data_dir} (mode {mode:o})", f"chmod 700 {data_dir}")
        return
    yield fine("permissions", "readable and writable for its owner only")


def _check_lock(data_dir: Path, holder: str) -> Finding:
    if not holder:
        return fine("lock", "no server runs on this directory")
    if directory.is_holder_alive(holder) is None:
        return note(
            "lock", f"held by {holder}, which is not visible from here", "ask that server: memstream info --target ..."
        )
    return note(
        "lock", f"a server runs on it: {holder}; checked while it runs", "memstream info shows the state of the server"
    )


def _check_format(data_dir: Path) -> Finding:
    try:
        there = directory.read_format(data_dir)
    except Unreadable as error:
        return problem("format", str(error), _format_advice(data_dir))
    if not there:
        return problem("format", "there is neither a format file nor a journal", "the first start creates both")
    return fine("format", f"format {directory.FORMAT}")


def _format_advice(data_dir: Path) -> str:
    if (data_dir / "format").exists() or not directory.journal_path(data_dir).exists():
        return RESTORE.format(data_dir)
    return (
        "if this was a data directory, copy its journal with `memstream backup` and put the copy into a new one with "
        "`memstream restore`"
    )


def _check_wal(data_dir: Path, holder: str) -> Finding:
    file = sqlite.wal_path(directory.journal_path(data_dir))
    if holder:
        return fine("write-ahead log", "in use by the server")
    found = sqlite_wal.read_wal(file)
    if found.damage:
        return problem(
            "write-ahead log",
            f"{file.name}: {found.damage}",
            f"{RESTORE.format(data_dir)}. Without a backup: copy the directory away, then discard everything after the "
            f"damage with: sqlite3 {directory.journal_path(data_dir)} 'PRAGMA wal_checkpoint(TRUNCATE)'",
        )
    if found.torn:
        return note(
            "write-ahead log",
            f"{file.name} ends in {found.torn} frames of an unfinished commit; nothing in it was acknowledged",
        )
    if found.committed:
        return note("write-ahead log", f"{found.committed} frames, all whole, left by a server that was killed")
    return fine("write-ahead log", "empty")


def _list_copies(data_dir: Path) -> Iterator[Finding]:
    """The journal's copies from before migrations, and how one comes back."""
    if copies := list_copies(data_dir):
        names = ", ".join(f"{file.name} ({file.stat().st_size >> 20:,} MB)" for file in copies)
        yield fine("migration backups", f"{names}; {RESTORE.format(data_dir).replace('FILE', str(copies[-1]))}")


def _check_disk(data_dir: Path, reserve_bytes: int) -> Finding:
    free = sqlite.free_bytes(data_dir)
    needed = reserve_bytes + sqlite.wal_bytes(sqlite.wal_path(directory.journal_path(data_dir)))
    text = f"{free >> 20:,} MB free, {needed >> 20:,} MB must stay free (disk_free_min_bytes)"
    if free < needed:
        return problem("disk", text, "free space: until then a server rejects writes with STORAGE_FULL")
    return fine("disk", text)
