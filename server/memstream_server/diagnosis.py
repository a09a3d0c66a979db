"""`memstream doctor`: what is wrong with a server's data and environment, and what to do. Changes nothing.

All checks for a server with the given settings run in order. They are of a data directory (files, lock, format,
write-ahead log, disk), of a journal's content, and of what a server needs besides: packages, a database, models,
endpoints, and the files of Milvus Lite. A check yields findings.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import re
import socket
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from sqlalchemy import BigInteger, ColumnElement, Connection, Table, func, literal_column, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database import directory, migrate, sqlite
from memstream_server.adapters.journal.database.migrate import list_copies
from memstream_server.adapters.journal.sql import reads, vector_upkeep
from memstream_server.adapters.journal.sql.schema import (
    POSITION_BITS,
    conversations,
    fragments,
    jobs,
    memories,
    observations,
    outbox,
    vectors,
)
from memstream_server.adapters.journal.verify import read_only_open, sqlite_wal, verify
from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal
from memstream_server.adapters.milvus.child import SOCKET_PATTERN, find_flaw
from memstream_server.adapters.milvus.naming import collection_name
from memstream_server.app.dependencies import build_limits
from memstream_server.app.embedders import EMBEDDERS, Spending, current_embedder
from memstream_server.app.errors import StartError
from memstream_server.app.models import chat_of, embedding_models
from memstream_server.core.values import Tier
from memstream_server.observability import Metrics
from memstream_server.ports.index import INDEX_FOLDER
from memstream_server.ports.journal.errors import JournalError, Unreadable
from memstream_server.ports.journal.records import Space
from memstream_server.ports.models import ModelError
from memstream_server.rpc.connections import RESERVED_DESCRIPTORS, ConnectionBounds, descriptor_limit
from memstream_server.settings import Settings

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


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a server starts and serves."""
    PROBLEM = "problem"
    """A server does not start, rejects writes, or has lost data."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` says what to do; empty if there is nothing to do."""

    level: Level
    subject: str
    text: str
    advice: str = ""


def fine(subject: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, advice: str = "nothing to do") -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, subject, text, advice)


def problem(subject: str, text: str, advice: str) -> Finding:
    """To be acted on."""
    return Finding(Level.PROBLEM, subject, text, advice)


_OUT_OF_SIGHT = (
    "pages, write-ahead log and disk belong to PostgreSQL and were not checked; only a data directory has a lock and a "
    "format file"
)
_PACKAGES = ("memstream", "grpcio", "protobuf", "sqlalchemy", "pymilvus", "milvus-lite", "numpy", "openai", "psycopg")
_ADVICE = "correct its settings, or start it: a server runs without it, with fewer features (docs/models.md)"
CONNECT_S = 5.0


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


def list_packages() -> Finding:
    """Versions of the installed packages."""
    found = [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return fine("packages", ", ".join(found))


def check_open_files(settings: Settings) -> Finding:
    """Whether the hard limit of open files allows the connections of the settings."""
    limit = descriptor_limit(hard=True)
    bounds = ConnectionBounds.from_settings(settings, limit)
    text = (
        f"at most {limit} (hard limit): {RESERVED_DESCRIPTORS} for data and models, {bounds.port_max} connections of a "
        f"port, {bounds.address_max} of one address"
    )
    if bounds.port_max < settings.port_connections_max:
        return note(
            "open files",
            f"{text}; port_connections_max is {settings.port_connections_max}",
            "raise the server's hard limit of open files (ulimit -Hn, LimitNOFILE of systemd), or lower the setting",
        )
    return fine("open files", text)


def check_embedding_model(settings: Settings, space: Space | None) -> Iterator[Finding]:
    """Whether the settings' embedding model is the model of the stored vectors."""
    name, dimension, why = _configured_model(settings)
    if why:
        yield problem("embedding", why, "correct the embedding settings")
    elif space is None:
        yield fine("embedding", f"{name}; no space is recorded yet")
    elif name != space.model or dimension not in (0, space.dimension):
        yield problem(
            "embedding",
            f"the vectors are of {space.model} ({space.dimension} dimensions), the settings name {name}: "
            "a server would fail with MODEL_MISMATCH",
            f"start it with {space.model}, or move the vectors to {name} with memstream reindex",
        )
    else:
        yield fine("embedding", f"{space.model}, {space.dimension} dimensions, as in the settings")


def check_reranker(settings: Settings) -> Iterator[Finding]:
    """Whether the settings' cross-encoder, if any, can be used."""
    if settings.reranker_model_dir is None:
        return
    from memstream_server.adapters.models.onnx_models import OnnxModelError, OnnxReranker

    try:
        yield fine("reranker", OnnxReranker(settings.reranker_model_dir).name)
    except OnnxModelError as error:
        yield problem("reranker", str(error), "correct reranker_model_dir, or leave it unset")


def _configured_model(settings: Settings) -> tuple[str, int, str]:
    """Name and dimension (0: unknown) of the settings' model, or why it is not available."""
    kind = EMBEDDERS[settings.embedding]
    if kind.remote:
        return current_embedder(settings).endpoint_model, 0, ""
    try:
        model = asyncio.run(kind.build(current_embedder(settings), settings, Spending.nowhere()).model())
    except StartError as error:
        return "", 0, str(error)
    return model.name, model.dimension, ""


def check_endpoints(settings: Settings) -> Iterator[Finding]:
    """Whether Milvus accepts connections, and the models' endpoints answer a harmless request."""
    if settings.milvus_uri:
        yield _check_connection("Milvus", settings.milvus_uri)
    metrics = Metrics()
    if any(EMBEDDERS[kind].remote for kind in (settings.embedding, settings.next_embedding) if kind is not None):
        yield from asyncio.run(_check_embedders(settings, metrics))
    if settings.llm_model:
        yield asyncio.run(_check_llm(settings, metrics))


async def _check_embedders(settings: Settings, metrics: Metrics) -> list[Finding]:
    models = embedding_models(settings, metrics)
    asked = [("embedding endpoint", settings.embedding, models.embedder)]
    if models.next is not None and settings.next_embedding is not None:
        asked.append(("next embedding endpoint", settings.next_embedding, models.next.embedder))
    found: list[Finding] = []
    for subject, kind, embedder in asked:
        if EMBEDDERS[kind].remote:
            try:
                model = await embedder.model()
                found.append(fine(subject, f"{model.name} answers with vectors of {model.dimension} dimensions"))
            except ModelError as error:
                found.append(note(subject, str(error), _ADVICE))
        await embedder.close()
    return found


async def _check_llm(settings: Settings, metrics: Metrics) -> Finding:
    chat = chat_of(settings, metrics)
    try:
        await chat.check_endpoint()
        return fine("LLM endpoint", f"{settings.llm_model} answers")
    except ModelError as error:
        return note("LLM endpoint", str(error), _ADVICE)
    finally:
        await chat.close()


def _check_connection(subject: str, url: str) -> Finding:
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 19_530)
        with closing(socket.create_connection((host, port), CONNECT_S)):
            return fine(subject, f"{host}:{port} accepts connections")
    except (OSError, ValueError) as error:
        return note(subject, f"{host} cannot be reached ({error})", _ADVICE)


_SAID_MAX = 100
"""Limit of the defects that SQLite reports, and of the operations listed."""
_NAMED_MAX = 5
"""Memories that one finding names."""
_GOES_ON = "nothing to do: a running server continues it; memstream operations cancel ID ends it"
_SALVAGE = (
    ". Without a backup, save what can be read: sqlite3 {} .recover | sqlite3 recovered.db, check it with "
    "memstream verify recovered.db, and put it in with memstream restore"
)


def check_pages(opened: OpenedJournal, data_dir: Path) -> Iterator[Finding]:
    """Reads every page."""
    file = directory.journal_path(data_dir)
    advice = RESTORE.format(data_dir) + _SALVAGE.format(file)
    short = _missing_bytes(file) if not opened.in_use else ""
    if short:
        yield problem("pages", short, advice)
        return
    try:
        with opened.engine.connect() as connection:  # rolled back: on a damaged file SQLite cannot even end a read
            if not (said := _integrity_errors(connection)):
                yield fine("pages", f"{file.name} is whole ({file.stat().st_size:,} bytes)")
                return
            tables = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars().all()
            torn = [name for name in tables if _integrity_errors(connection, name)]
    except DBAPIError as error:
        yield problem("pages", f"{file.name} cannot be read: {error.orig}", advice)
        return
    pages = sorted({int(number) for line in said for number in re.findall(r"\b[Pp]age (\d+)", line)})
    which = f" in pages {', '.join(map(str, pages[:20]))}" if pages else ""
    text = f"{', '.join(torn) or 'the file'} (or an index of it) is damaged{which}: {said[0].splitlines()[-1]}"
    yield problem("pages", text, advice)


def _integrity_errors(connection: Connection, table: str = "") -> list[str]:
    """The defects that SQLite finds in a table and its indexes, or in the whole file. Empty if there are none."""
    lines: list[str] = []
    wanted = f"'{table}'" if table else _SAID_MAX
    try:
        for line in connection.exec_driver_sql(f"PRAGMA integrity_check({wanted})").scalars():
            lines.append(str(line))  # line by line: with some kinds of damage it fails midway
    except DBAPIError as error:
        lines.append(str(error.orig))
    except sqlite3.DatabaseError as error:
        lines.append(str(error))
    return [] if lines == ["ok"] else lines


def _missing_bytes(file: Path) -> str:
    """A text if the file is shorter than its header says and no WAL explains it; otherwise empty."""
    with file.open("rb") as opened:
        header = opened.read(100)
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        return f"{file.name} is not a SQLite database: its header is damaged"
    page = int.from_bytes(header[16:18]) or 0
    wanted, size = int.from_bytes(header[28:32]) * (65_536 if page == 1 else page), file.stat().st_size
    if size < wanted and not sqlite.wal_bytes(sqlite.wal_path(file)):
        return f"{file.name} was cut off: it has {size:,} bytes of {wanted:,}"
    return ""


def check_content(opened: OpenedJournal) -> Iterator[Finding]:
    """Findings on the tables' content. Ends at damage, which other checks report."""
    try:
        with opened.engine.begin() as connection:
            version = _check_version(connection)
            yield version
            if version.level == "ok":  # other versions may have other tables
                yield from _count_waiting(connection)
    except (DBAPIError, JournalError) as error:
        yield problem("contents", f"cannot be read: {error}", "see the findings on the journal's pages")


def read_space(opened: OpenedJournal) -> Space | None:
    """The embedding space in force. None in a new store, or if it cannot be read."""
    try:
        with opened.engine.begin() as connection:
            return reads.read_spaces(connection).in_force
    except (DBAPIError, JournalError):
        return None  # content_findings reports the error


def has_long_term_fragments(opened: OpenedJournal) -> bool:
    """Whether an embedded index must have files: the first long-term fragment creates them. True if unreadable."""
    try:
        with opened.engine.begin() as connection:
            long_term = select(fragments.c.key).where(fragments.c.tier == Tier.LONG_TERM.value).limit(1)
            return connection.execute(long_term).first() is not None
    except DBAPIError:
        return True


def check_sizes(opened: OpenedJournal, space: Space, vectors_max: int) -> Finding:
    """Whether every memory can keep its vectors in RAM, for a server that has no vector index."""
    counted = func.count().label("vectors")
    memory: ColumnElement[int] = literal_column(f"vectors.key >> {POSITION_BITS}", BigInteger())
    large = (
        select(memory.label("number"), counted)
        .where(vectors.c.model == space.model)
        .group_by(memory)
        .having(counted > vectors_max)
        .subquery()
    )
    named = (
        select(memories.c.namespace, memories.c.name, large.c.vectors)
        .join(large, large.c.number == memories.c.number)
        .order_by(large.c.vectors.desc())
    )
    try:
        with opened.engine.begin() as connection:
            found = connection.execute(named).all()
    except DBAPIError as error:
        return problem("memory sizes", f"cannot be read: {error}", "see the other findings")
    if not found:
        return fine("memory sizes", f"no memory has more than {vectors_max:,} vectors, which fit in RAM")
    shown = ", ".join(f"{namespace}/{name} ({count:,} vectors)" for namespace, name, count in found[:_NAMED_MAX])
    more = f" and {len(found) - _NAMED_MAX:,} more" if len(found) > _NAMED_MAX else ""
    return problem(
        "memory sizes",
        f"without a vector index only words, and the vectors of the newest fragments, answer in {shown}{more}: "
        f"at most {vectors_max:,} vectors fit in RAM",
        "set milvus_uri on every server of the database (docs/operations.md#growing), or raise active_bytes_max "
        "and dense_bytes_max if the machines have the RAM",
    )


def _check_version(connection: Connection) -> Finding:
    if not migrate.is_journal(connection):
        return problem("version", "the journal has no tables of memstream", "it belongs to another program")
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar_one_or_none()
    if revision == migrate.HEAD:
        return fine("version", f"tables of revision {revision}")
    if str(revision) < migrate.HEAD:
        advice = "the next start migrates them; on PostgreSQL dump the database first (the data directory is copied)"
        return note("version", f"tables of revision {revision}, older than {migrate.HEAD}", advice)
    return problem("version", f"tables of revision {revision}, newer than {migrate.HEAD}", "start a newer memstream")


def _count_waiting(connection: Connection) -> Iterator[Finding]:
    def count(table: Table, *where: ColumnElement[bool]) -> int:
        return connection.execute(select(func.count()).select_from(table).where(*where)).scalar_one()

    for subject, table in (("memories", memories), ("conversations", conversations)):
        named = count(table, table.c.namespace != "")
        yield fine(subject, f"{named:,}")
        if aside := count(table) - named:
            yield note(subject, f"{aside:,} staged by imports", "nothing to do: a server publishes or removes them")
    for subject, table, what in (
        ("pending", observations, "receipts wait to be stored"),
        ("outbox", outbox, "entries wait for the vector index"),
        ("jobs", jobs, "jobs are unfinished"),
    ):
        number = count(table)
        yield (
            note(subject, f"{number:,} {what}", "nothing to do: a running server processes them")
            if number
            else fine(subject, f"no {what}")
        )
    yield _count_unvectored(connection)
    yield from _list_operations(connection)


def _count_unvectored(connection: Connection) -> Finding:
    space = reads.read_spaces(connection).in_force
    number = vector_upkeep.count_unvectored(connection, None if space is None else space.model)
    if not number:
        return fine("vectors", "no fragment lacks its vector")
    advice = (
        "a running server tries them again, memstream reindex --missing does so at once; its log says why the model "
        "gave none. If texts are too long for the model, set embedding_input_max_chars lower"
    )
    return note("vectors", f"{number:,} fragments have no vector: recall finds them by their words alone", advice)


def _list_operations(connection: Connection) -> Iterator[Finding]:
    unfinished = list(verify.describe_unfinished(connection))
    for id_, what in unfinished[:_SAID_MAX]:
        yield note("operations", f"{id_} has not ended: {what}", _GOES_ON)
    if len(unfinished) > _SAID_MAX:
        yield note("operations", f"{len(unfinished):,} in total have not ended", _GOES_ON)
    if not unfinished:
        yield fine("operations", "none is unfinished")
