"""Checks a journal's content: pages, version, embedding space, and waiting work."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import BigInteger, ColumnElement, Connection, Table, func, literal_column, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database import directory, migrate, sqlite
from memstream_server.adapters.journal.sql import reads, unvectored
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
from memstream_server.adapters.journal.verify import operations
from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal
from memstream_server.core.values import Tier
from memstream_server.diagnosis.directory import RESTORE
from memstream_server.diagnosis.findings import Finding, fine, note, problem
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.spaces import Space

_SAID_MAX = 100
"""Limit of the defects that SQLite reports, and of the operations listed."""
_NAMED_MAX = 5
"""Memories that one finding names."""
_ADVICE = "nothing to do: a running server continues it; memstream operations cancel ID ends it"
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
    number = unvectored.count_all(connection, None if space is None else space.model)
    if not number:
        return fine("vectors", "no fragment lacks its vector")
    advice = (
        "a running server tries them again, memstream reindex --missing does so at once; its log says why the model "
        "gave none. If texts are too long for the model, set embedding_input_max_chars lower"
    )
    return note("vectors", f"{number:,} fragments have no vector: recall finds them by their words alone", advice)


def _list_operations(connection: Connection) -> Iterator[Finding]:
    unfinished = list(operations.describe_unfinished(connection))
    for id_, what in unfinished[:_SAID_MAX]:
        yield note("operations", f"{id_} has not ended: {what}", _ADVICE)
    if len(unfinished) > _SAID_MAX:
        yield note("operations", f"{len(unfinished):,} in total have not ended", _ADVICE)
    if not unfinished:
        yield fine("operations", "none is unfinished")
