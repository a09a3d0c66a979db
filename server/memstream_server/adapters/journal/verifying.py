"""`memstream verify`: whether a journal is what its event logs say, a memory or conversation at a time, each in one
snapshot. It asks the same of every database: what is SQLite's own (pages, log, lock) is for `memstream doctor`.

RAM: what the largest memory's fragments take as ids and places; neither contents nor vectors are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal import codec, reads
from memstream_server.adapters.journal.conversing import check_conversation
from memstream_server.adapters.journal.holding import check_fragments
from memstream_server.adapters.journal.looking import Looked, check_version
from memstream_server.adapters.journal.numbering import check_producers
from memstream_server.adapters.journal.operating import check_operations
from memstream_server.adapters.journal.report import Report
from memstream_server.adapters.journal.schema import (
    POSITION_BITS,
    anchors,
    conversations,
    deletions,
    events,
    fragments,
    jobs,
    memories,
    messages,
    observations,
    plans,
    producers,
    receipts,
    vectors,
)
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.spaces import Space


def verify(looked: Looked, told: Callable[[int, int], None]) -> Report:
    """Check everything; `told(done, total)` after every memory and conversation. Raises Unreadable for what is no
    journal of this version; what cannot be read further in is among the violations."""
    report = Report()
    try:
        with looked.engine.begin() as connection:
            check_version(connection)
            numbers, talks = _all(connection, memories), _all(connection, conversations)
            space = _check_store(connection, report)
    except DBAPIError as error:
        raise looked.translated(error) from error
    total = len(numbers) + len(talks)
    for done, number in enumerate(numbers):
        told(done, total)
        _check_memory(looked, number, space, report)
    for done, number in enumerate(talks, len(numbers)):
        told(done, total)
        check_conversation(looked, number, report)
    told(total, total)
    try:
        with looked.engine.begin() as connection:
            check_operations(connection, report)
            _check_strays(connection, report, (*_KEYED, *_NUMBERED), (memories, deletions), "memory")
            _check_strays(connection, report, (messages, plans), (conversations,), "conversation")
    except DBAPIError as error:
        report.found("store", f"cannot be read: {looked.translated(error)}")
    return report


def _check_memory(looked: Looked, number: int, space: Space | None, report: Report) -> None:
    name = f"number {number}"
    try:
        with looked.engine.begin() as connection:
            row = connection.execute(select(memories).where(memories.c.number == number)).one_or_none()
            if row is None:
                return  # deleted since, by the server that runs
            name = f"{row.namespace}/{row.name}"
            report.saw("memories")
            reads.record(row)
            check_fragments(connection, row, name, space, report)
            check_producers(connection, row, name, report)
    except DBAPIError as error:
        report.found("memories", f"cannot be read: {looked.translated(error)}", name)
    except (JournalError, ValueError) as error:
        report.found("memories", f"cannot be read: {error}", name)


def _check_store(connection: Connection, report: Report) -> Space | None:
    report.saw("store", 2)
    generation = reads.meta_value(connection, "index_generation")
    if generation is not None and not generation.isdigit():
        report.found("store", f"the index's generation is {generation!r}, not a number")
    recorded = reads.meta_value(connection, "space")
    try:
        return None if recorded is None else codec.decode_space(recorded)
    except JournalError as error:
        report.found("store", f"the embedding space in force cannot be read: {error}")
        return None


_KEYED = (fragments, vectors, observations, events)
_NUMBERED = (producers, receipts, anchors, jobs)


def _check_strays(
    connection: Connection, report: Report, tables: tuple[Table, ...], owners: tuple[Table, ...], what: str
) -> None:
    """Rows of what neither exists nor is being removed: rows of a deleted memory go before its number does."""
    known = {number for owner in owners for number in _all(connection, owner)}
    for table in tables:
        report.saw("store")
        for number in _numbers(connection, table):
            if number not in known:
                report.found("store", f"{table.name} has rows of {what} number {number}, which does not exist")


def _all(connection: Connection, table: Table) -> list[int]:
    return list(connection.execute(select(table.c.number).order_by(table.c.number)).scalars())


def _numbers(connection: Connection, table: Table) -> Iterator[int]:
    """The memories a table has rows of: a look into its key for each, however many rows lie between."""
    column, shift = (table.c.memory, 0) if table in _NUMBERED else (table.c.key, POSITION_BITS)
    least = connection.execute(select(func.min(column))).scalar()
    while least is not None:
        number = int(least) >> shift
        yield number
        least = connection.execute(select(func.min(column)).where(column >= number + 1 << shift)).scalar()
