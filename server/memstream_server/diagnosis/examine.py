"""Runs all checks for a server with the given settings, in order, without changing anything."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from memstream_server.adapters.journal.database import directory
from memstream_server.adapters.journal.verify import read_only_open
from memstream_server.adapters.milvus.child import SOCKET_PATTERN, find_flaw
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.app.dependencies import build_limits
from memstream_server.diagnosis.directory import check_directory
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.diagnosis.journal import (
    check_content,
    check_pages,
    check_sizes,
    has_long_term_fragments,
    read_space,
)
from memstream_server.diagnosis.outside import (
    check_embedding_model,
    check_endpoints,
    check_open_files,
    check_reranker,
    list_packages,
)
from memstream_server.ports.index import INDEX_FOLDER
from memstream_server.ports.journal.errors import Unreadable
from memstream_server.ports.journal.spaces import Space
from memstream_server.settings import Settings

_OUT_OF_SIGHT = (
    "pages, write-ahead log and disk belong to PostgreSQL and were not checked; only a data directory has a lock and a "
    "format file"
)


def run_checks(settings: Settings, online: bool) -> Iterator[Finding]:
    """`online` also checks endpoints; the journal's database is always queried."""
    yield list_packages()
    yield check_open_files(settings)
    if settings.journal_url.get_secret_value():
        yield from _check_database(settings)
    else:
        yield from _check_directory(settings)
    if online:
        yield from check_endpoints(settings)
    yield from check_reranker(settings)


def _check_directory(settings: Settings) -> Iterator[Finding]:
    data_dir = settings.data_dir
    try:
        if not data_dir.is_dir():
            yield problem(
                "directory", f"{data_dir} is not a directory", "name it with --data; a server's first start creates it"
            )
            return
        with read_only_open.probe_lock(data_dir) as holder:
            yield from check_directory(data_dir, holder, settings.disk_free_min_bytes)
            yield from _check_journal(settings, data_dir, holder)
    except OSError as error:
        yield problem("directory", f"{data_dir} cannot be read: {error}", "run this as the server's user")


def _check_journal(settings: Settings, data_dir: Path, holder: str) -> Iterator[Finding]:
    if not directory.journal_path(data_dir).is_file():
        yield _missing_journal(data_dir)
        return
    space: Space | None = None
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(read_only_open.open_data_directory(data_dir))
        except Unreadable as error:
            yield problem("journal", str(error), "see the findings on its files")
            return
        pages = list(check_pages(opened, data_dir))
        yield from pages
        if all(one.level == "ok" for one in pages):
            space = read_space(opened)
            yield from check_content(opened)
            yield from check_embedding_model(settings, space)
            yield from check_index(settings, holder, space, has_long_term_fragments(opened))


def _missing_journal(data_dir: Path) -> Finding:
    if (data_dir / INDEX_FOLDER).exists():
        text = "journal.db is missing, and there is an index of it: the content of the journal is lost"
        return problem("journal", text, f"restore a backup: memstream restore FILE --data {data_dir} --force")
    return note("journal", "there is none yet", "nothing to do: the first start creates it")


def _check_database(settings: Settings) -> Iterator[Finding]:
    try:
        with read_only_open.open_database(settings.journal_url.get_secret_value()) as opened:
            with opened.engine.begin() as connection:
                version = connection.exec_driver_sql("SHOW server_version").scalar_one()
            yield fine("database", f"PostgreSQL {version} answers")
            yield note("files", _OUT_OF_SIGHT, "pg_amcheck, run on the database's host, checks its tables and indexes")
            if opened.in_use:
                yield note("lock", f"a server uses it: {opened.in_use}", "memstream info shows the state of the server")
            yield from check_content(opened)
            space = read_space(opened)
            yield from check_embedding_model(settings, space)
            yield from check_index(settings, opened.in_use, space, has_long_term_fragments(opened))
            if settings.is_without_index and space is not None:
                yield check_sizes(opened, space, build_limits(settings).dense_max(space.dimension))
    except Unreadable as error:
        yield problem("database", str(error), "correct journal_url, or start the database")


# Checks the files of Milvus Lite. They derive from the journal, so no finding is a problem.


_REBUILT = "nothing to do: the next start fills it again from the journal; recall answers meanwhile"


def check_index(settings: Settings, holder: str, space: Space | None, has_rows: bool) -> Iterator[Finding]:
    """Findings on the index of the settings, if its files are ours. has_rows: whether the journal has rows for it."""
    data_dir = settings.data_dir
    folder = data_dir / INDEX_FOLDER
    if settings.is_without_index and folder.exists():
        yield note("index", f"{folder} has no use: with journal_url, only Milvus is an index", "delete the directory")
    if settings.milvus_uri or settings.is_without_index or not data_dir.is_dir():
        return
    if space is None:
        yield fine("index", "no embedding space is recorded yet, so there is no index")
        return
    if not has_rows and not folder.exists():
        yield fine("index", "there is no long-term fragment yet, so there is no index")
        return
    yield _check_files(folder, space)
    if holder:
        return
    if _is_locked(folder / "LOCK"):
        text = f"a Milvus Lite process{_find_process(folder)} still has it open, though no server runs"
        yield note("index", text, "wait until it ends, which it does after its server; otherwise kill it")
    elif left := sorted(file.name for file in data_dir.glob(SOCKET_PATTERN)):
        yield note("index", f"sockets of a server that was killed are left: {', '.join(left)}")


def _check_files(folder: Path, space: Space) -> Finding:
    if not folder.exists():
        return note("index", "its directory is missing", _REBUILT)
    collection = folder / "collections" / collection_name(space, "memstream")
    if not collection.is_dir():
        others = sorted(file.name for file in (folder / "collections").glob("*") if file.is_dir())
        text = f"it has {', '.join(others)}, of another embedding space" if others else "it is empty"
        return note("index", text, _REBUILT)
    try:
        reason = find_flaw(collection)
    except OSError as error:
        reason = f"it cannot be read ({error})"
    if reason:
        return note("index", f"{collection.name} is damaged: {reason}", _REBUILT)
    return fine("index", f"{collection.name} has all its files; the next start checks their content")


def _is_locked(lock: Path) -> bool:
    """Whether a process holds Lite's lock. Takes and releases it immediately, without writing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _find_process(folder: Path) -> str:
    """The process that serves the directory, if /proc shows it."""
    wanted = os.fsencode(folder.absolute())
    for commands in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = commands.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
        if b"--directory" in words and any(os.path.abspath(word) == wanted for word in words if word):
            return f" (pid {commands.parent.name})"
    return ""
