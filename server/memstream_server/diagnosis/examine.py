"""Runs all checks for a server with the given settings, in order, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from memstream_server.adapters.journal.database import directory
from memstream_server.adapters.journal.verify import read_only_open
from memstream_server.app.dependencies import build_limits
from memstream_server.diagnosis.directory import check_directory
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.diagnosis.index import check_index
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
