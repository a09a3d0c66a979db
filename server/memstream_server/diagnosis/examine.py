"""Runs all checks for a server with the given settings, in order, without changing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from memstream_server.adapters.journal import directory, looking
from memstream_server.diagnosis.directory import directory_findings
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.diagnosis.index import index_findings
from memstream_server.diagnosis.journal import content_findings, space_of, sqlite_findings
from memstream_server.diagnosis.outside import endpoint_findings, model_findings, packages, reranker_findings
from memstream_server.ports.journal.errors import Unreadable
from memstream_server.ports.journal.spaces import Space
from memstream_server.settings import Settings

_OUT_OF_SIGHT = (
    "pages, write-ahead log and disk belong to PostgreSQL and were not checked; only a data directory has a lock and a "
    "format file"
)


def examine(settings: Settings, online: bool) -> Iterator[Finding]:
    """`online` also checks endpoints; the journal's database is always queried."""
    yield packages()
    if settings.journal_url.get_secret_value():
        yield from _database(settings)
    else:
        yield from _directory(settings)
    if online:
        yield from endpoint_findings(settings)
    yield from reranker_findings(settings)


def _directory(settings: Settings) -> Iterator[Finding]:
    data_dir = settings.data_dir
    try:
        if not data_dir.is_dir():
            yield problem(
                "directory", f"{data_dir} is not a directory", "name it with --data; a server's first start creates it"
            )
            return
        with looking.in_use(data_dir) as holder:
            yield from directory_findings(data_dir, holder, settings.disk_free_min_bytes)
            yield from _journal(settings, data_dir, holder)
    except OSError as error:
        yield problem("directory", f"{data_dir} cannot be read: {error}", "run this as the server's user")


def _journal(settings: Settings, data_dir: Path, holder: str) -> Iterator[Finding]:
    if not directory.journal_path(data_dir).is_file():
        yield _no_journal(data_dir)
        return
    space: Space | None = None
    with ExitStack() as stack:
        try:
            looked = stack.enter_context(looking.data_directory(data_dir))
        except Unreadable as error:
            yield problem("journal", str(error), "see the findings on its files")
            return
        pages = list(sqlite_findings(looked, data_dir))
        yield from pages
        if all(one.level == "ok" for one in pages):
            space = space_of(looked)
            yield from content_findings(looked)
            yield from model_findings(settings, space)
            if not settings.milvus_uri:
                yield from index_findings(data_dir, holder, space)


def _no_journal(data_dir: Path) -> Finding:
    if (data_dir / "milvus").exists():
        text = "journal.db is missing, and there is an index of it: the content of the journal is lost"
        return problem("journal", text, f"restore a backup: memstream restore FILE --data {data_dir} --force")
    return note("journal", "there is none yet", "nothing to do: the first start creates it")


def _database(settings: Settings) -> Iterator[Finding]:
    try:
        with looking.database(settings.journal_url.get_secret_value()) as looked:
            with looked.engine.begin() as connection:
                version = connection.exec_driver_sql("SHOW server_version").scalar_one()
            yield fine("database", f"PostgreSQL {version} answers")
            yield note("files", _OUT_OF_SIGHT, "pg_amcheck, run on the database's host, checks its tables and indexes")
            if looked.in_use:
                yield note("lock", f"a server uses it: {looked.in_use}", "memstream info shows the state of the server")
            yield from content_findings(looked)
            space = space_of(looked)
            yield from model_findings(settings, space)
            if not settings.milvus_uri and settings.data_dir.is_dir():
                yield from index_findings(settings.data_dir, looked.in_use, space)
    except Unreadable as error:
        yield problem("database", str(error), "correct journal_url, or start the database")
