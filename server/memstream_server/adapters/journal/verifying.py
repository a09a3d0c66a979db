"""`memstream verify`: whether a journal is what its event logs say, a memory or conversation at a time, each in one
snapshot. It asks the same of every database: what is SQLite's own (pages, log, lock) is for `memstream doctor`.

RAM: what the largest memory's fragments take as ids and places; neither contents nor vectors are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sqlalchemy import Connection, Table, func, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal import codec, reads
from memstream_server.adapters.journal.conversation_tables import conversations, messages, plans
from memstream_server.adapters.journal.conversing import check_conversation
from memstream_server.adapters.journal.holding import check_fragments
from memstream_server.adapters.journal.looking import Looked, check_version
from memstream_server.adapters.journal.numbering import check_producers
from memstream_server.adapters.journal.operating import check_operations
from memstream_server.adapters.journal.schema import (
    POSITION_BITS,
    anchors,
    deletions,
    events,
    fragments,
    jobs,
    memories,
    observations,
    producers,
    receipts,
    vectors,
)
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.spaces import Space

CHECKS = {
    "memories": "memories whose record can be read",
    "revisions": "transitions, without a gap, up to the memory's revision",
    "fragments": "fragments as their events say: tier, importance, enhancements, sources, forgotten or not",
    "columns": "fragments whose columns say what their record says",
    "anchors": "short-term sides, of held fragments alone",
    "vectors": "vectors of fragments, in the length of their space",
    "lineage": "sources that are there or left by an event",
    "producers": "producers, stored no further than received",
    "receipts": "receipts of known producers, without a gap",
    "pending": "receipts waiting to be stored, of known producers",
    "outbox": "entries for the index, of fragments known",
    "conversations": "conversations whose completion fits their messages",
    "messages": "messages as their columns say, numbered without a gap up to the conversation's last",
    "plans": "plans as their columns say",
    "operations": "operations that can be read, and say their end where they have one",
    "store": "facts of the store, and rows of memories and conversations that exist",
}
"""What is checked, in words, by name."""
SHOWN_MAX = 1_000
"""Violations kept with their text; the rest are counted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that is not as it must be. `memory` and `fragment` are empty where it concerns none."""

    check: str
    memory: str
    fragment: str
    text: str


@dataclass(slots=True)
class Report:
    """What was checked and what was found."""

    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violated: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    violations: list[Violation] = field(default_factory=list)
    compacted: dict[str, int] = field(default_factory=dict)
    """Memories whose log begins later than at its first revision, with the oldest revision kept."""
    unfinished: dict[str, str] = field(default_factory=dict)
    """Operations that have not ended, by id: what they are and how far they are."""

    def saw(self, check: str, count: int = 1) -> None:
        self.checked[check] += count

    def found(self, check: str, text: str, memory: str = "", fragment: str = "") -> None:
        self.violated[check] += 1
        if len(self.violations) < SHOWN_MAX:
            self.violations.append(Violation(check, memory, fragment, text))


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
