"""`memstream verify`: checks that a journal matches its event logs, one memory or conversation at a time, each in one
snapshot. The checks are the same for every database; `memstream doctor` checks SQLite's files (pages, WAL, lock).

RAM: ids and places of the largest memory's fragments; neither contents nor vectors are kept.

The checks of producers, their receipts and the receipts that are not yet stored are here, the others in other modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from sqlalchemy import BigInteger, Connection, Row, Table, bindparam, func, select
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.sql import byte_counts, codec, reads
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.schema import (
    KEYED_TABLES,
    NUMBERED_TABLES,
    POSITION_BITS,
    blocks,
    conversation_labels,
    conversations,
    deletions,
    key_position,
    key_range,
    memories,
    memory_labels,
    message_bodies,
    messages,
    observations,
    plans,
    producers,
    receipts,
)
from memstream_server.adapters.journal.sql.writes import SEQUENCES_KEPT
from memstream_server.adapters.journal.verify.conversations import check_conversation, check_states
from memstream_server.adapters.journal.verify.fragments import (
    check_conflicts,
    check_fragments,
    check_recall_receipts,
    check_versions,
)
from memstream_server.adapters.journal.verify.operations import check_operations
from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal, check_version
from memstream_server.adapters.journal.verify.report import Report
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import MemoryRecord, NamespaceBytes
from memstream_server.ports.journal.spaces import Space

_PRODUCERS = select(producers.c.name, producers.c.received, producers.c.stored).where(
    producers.c.memory == bindparam("number")
)
_RECEIPTS = (
    select(receipts.c.first_sequence, receipts.c.last_sequence, func.length(receipts.c.hashes, type_=BigInteger))
    .where(
        receipts.c.memory == bindparam("number"),
        receipts.c.producer == bindparam("producer"),
        receipts.c.last_sequence > bindparam("after"),
    )
    .order_by(receipts.c.last_sequence)
    .limit(PAGE_ROWS)
)
_STRANGERS = (
    select(receipts.c.producer)
    .where(
        receipts.c.memory == bindparam("number"),
        receipts.c.producer.not_in(select(producers.c.name).where(producers.c.memory == bindparam("number"))),
    )
    .distinct()
)
_PENDING = (
    select(
        observations.c.key,
        observations.c.producer,
        observations.c.first_sequence,
        observations.c.count,
        observations.c.payload,
    )
    .where(observations.c.key.between(bindparam("low"), bindparam("high")))
    .order_by(observations.c.key)
    .limit(bindparam("limit", type_=BigInteger))
)


def verify_journal(
    opened: OpenedJournal, report_progress: Callable[[int, int], None], computed: Collection[str]
) -> Report:
    """Check everything; calls `report_progress(done, total)` after every memory and conversation.

    computed: the embedding spaces whose vectors need not be stored.
    Unreadable rows become violations. Raises Unreadable if this is not a journal of this version.
    """
    report = Report()
    try:
        with opened.engine.begin() as connection:
            check_version(connection)
            numbers, conversation_numbers = (
                _list_numbers(connection, memories),
                _list_numbers(connection, conversations),
            )
            space = _check_store(connection, report)
    except DBAPIError as error:
        raise opened.translate_error(error) from error
    total = len(numbers) + len(conversation_numbers)
    for done, number in enumerate(numbers):
        report_progress(done, total)
        _check_memory(opened, number, space, report, computed)
    for done, number in enumerate(conversation_numbers, len(numbers)):
        report_progress(done, total)
        check_conversation(opened, number, report)
    report_progress(total, total)
    try:
        with opened.engine.begin() as connection:
            check_operations(connection, report)
            check_states(connection, report)
            _check_strays(connection, report, (*KEYED_TABLES, *NUMBERED_TABLES), (memories, deletions), "memory")
            _check_strays(connection, report, (messages, message_bodies, plans), (conversations,), "conversation")
            _check_strays(connection, report, (conversation_labels,), (conversations,), "conversation")
            _check_bytes(connection, report)
    except DBAPIError as error:
        report.add_violation("store", f"cannot be read: {opened.translate_error(error)}")
    return report


def _check_memory(
    opened: OpenedJournal, number: int, space: Space | None, report: Report, computed: Collection[str]
) -> None:
    name = f"number {number}"
    try:
        with opened.engine.begin() as connection:
            row = connection.execute(select(memories).where(memories.c.number == number)).one_or_none()
            if row is None:
                return  # a running server has deleted it
            name = f"{row.namespace}/{row.name}"
            report.count_checked("memories")
            _check_labels(connection, row, reads.decode_record(row), name, report)
            is_erased = check_fragments(connection, row, name, space, report, computed)
            check_producers(connection, row, name, report, is_erased=is_erased)
            check_conflicts(connection, row, name, report)
            check_versions(connection, row, name, report, computed)
            check_recall_receipts(connection, row, name, report)
            _check_blocks(connection, row, name, report)
    except DBAPIError as error:
        report.add_violation("memories", f"cannot be read: {opened.translate_error(error)}", name)
    except (JournalError, ValueError) as error:
        report.add_violation("memories", f"cannot be read: {error}", name)


def _check_blocks(connection: Connection, memory: Any, name: str, report: Report) -> None:
    """Each version can be read, says what its columns say, and is not above the memory's last one."""
    low, high = key_range(memory.number)
    for row in connection.execute(select(blocks).where(blocks.c.key.between(low, high))):
        report.count_checked("blocks")
        version = key_position(row.key)
        try:
            block = codec.decode_block(row.payload)
        except (JournalError, ValueError) as error:
            report.add_violation("blocks", f"version {version} of the block {row.name} cannot be read: {error}", name)
            continue
        if (block.version, block.name, memory.number) != (version, row.name, row.memory):
            text = f"version {version} of the block {row.name} says that it is {block.version} of {block.name}"
            report.add_violation("blocks", text, name)
        if version > memory.block_version:
            report.add_violation("blocks", f"version {version} is above the last one, {memory.block_version}", name)


def _check_labels(connection: Connection, row: Any, record: MemoryRecord, name: str, report: Report) -> None:
    """A memory is found by each of its labels, by no other one, and under its name."""
    entered = connection.execute(
        select(memory_labels.c.namespace, memory_labels.c.name, memory_labels.c.label).where(
            memory_labels.c.memory == row.number
        )
    )
    expected = {(record.namespace, record.name, codec.hash_label(label)) for label in record.labels}
    if {(namespace, named, bytes(label)) for namespace, named, label in entered} != expected:
        report.add_violation("memories", "is not found by its labels, or by labels that it does not have", name)


def _check_store(connection: Connection, report: Report) -> Space | None:
    report.count_checked("store", 2)
    generation = reads.meta_value(connection, "index_generation")
    if generation is not None and not generation.isdigit():
        report.add_violation("store", f"the index's generation is {generation!r}, not a number")
    recorded = reads.meta_value(connection, "space")
    try:
        return None if recorded is None else codec.decode_space(recorded)
    except JournalError as error:
        report.add_violation("store", f"the embedding space in force cannot be read: {error}")
        return None


def _check_bytes(connection: Connection, report: Report) -> None:
    """What a namespace stores is what its rows sum up to, once all rows are counted."""
    if reads.meta_value(connection, byte_counts.UNCOUNTED) is not None:
        return
    sums = byte_counts.list_sums(connection.dialect.name)
    expected = byte_counts.sum_up((kind, connection.exec_driver_sql(text)) for kind, text in sums)
    counted = byte_counts.read_bytes(connection, list(expected))
    report.count_checked("store", len(expected))
    for namespace, counts in expected.items():
        if counted.get(namespace) != counts:
            found = counted.get(namespace, NamespaceBytes())
            report.add_violation("store", f"namespace {namespace} counts {found.total} bytes, its rows {counts.total}")


def _check_strays(
    connection: Connection, report: Report, tables: tuple[Table, ...], owners: tuple[Table, ...], what: str
) -> None:
    """Report rows of an owner that neither exists nor is being deleted: a deleted memory's number goes last."""
    known = {number for owner in owners for number in _list_numbers(connection, owner)}
    for table in tables:
        report.count_checked("store")
        for number in _find_numbers(connection, table):
            if number not in known:
                report.add_violation("store", f"{table.name} has rows of {what} number {number}, which does not exist")


def _list_numbers(connection: Connection, table: Table) -> list[int]:
    return list(connection.execute(select(table.c.number).order_by(table.c.number)).scalars())


def _find_numbers(connection: Connection, table: Table) -> Iterator[int]:
    """The memory numbers in a table: one index lookup each, however many rows a memory has."""
    if table is conversation_labels:
        column, shift = table.c.conversation, 0
    else:
        column, shift = (table.c.memory, 0) if table in NUMBERED_TABLES else (table.c.key, POSITION_BITS)
    least = connection.execute(select(func.min(column))).scalar()
    while least is not None:
        number = int(least) >> shift
        yield number
        least = connection.execute(select(func.min(column)).where(column >= number + 1 << shift)).scalar()


def check_producers(
    connection: Connection, memory: Row[Any], name: str, report: Report, *, is_erased: bool = False
) -> None:
    """Raises DBAPIError and JournalError for unreadable rows.

    is_erased: an erasure may have removed the receipts of stored observations, whose hashes are traces of their words.
    """
    known: dict[str, tuple[int, int]] = {}
    for producer, received, stored in connection.execute(_PRODUCERS, {"number": memory.number}):
        known[producer] = received, stored
        report.count_checked("producers")
        if not 0 <= stored <= received:
            report.add_violation("producers", f"producer {producer} has {received} received and {stored} stored", name)
        removable = stored if is_erased else 0
        _check_receipts(connection, memory.number, producer, (received, removable), name, report)
    for stranger in connection.execute(_STRANGERS, {"number": memory.number}).scalars():
        report.add_violation(
            "receipts", f"there are receipts of {stranger}, which is not a producer of this memory", name
        )
    _check_pending(connection, memory, known, name, report)


def _check_receipts(
    connection: Connection, number: int, producer: str, reached: tuple[int, int], name: str, report: Report
) -> None:
    """Receipts detect repeats: those of the latest SEQUENCES_KEPT numbers must exist.

    reached: (last number received, last number whose receipt may have been removed by an erasure).
    """
    received, removable = reached
    last = begun = 0
    more = True
    while more:
        rows = fetch_rows(connection, _RECEIPTS, {"number": number, "producer": producer, "after": last})
        for first, final, hashed in rows:
            report.count_checked("receipts")
            begun = begun or first
            if last and first != last + 1:
                report.add_violation("receipts", f"producer {producer}: {first} follows {last}", name)
            if hashed != (final - first + 1) * codec.HASH_WIDTH:
                text = f"producer {producer}: {first} to {final} has {hashed} bytes of hashes"
                report.add_violation("receipts", text, name)
            last = final
        more = len(rows) == PAGE_ROWS
    if last != received and not (last == 0 and removable == received):
        report.add_violation("receipts", f"producer {producer}: receipts end at {last}, {received} were received", name)
    if begun > max(1, received - SEQUENCES_KEPT + 1, removable + 1):
        report.add_violation(
            "receipts", f"producer {producer}: receipts begin at {begun}, later ones than must be kept", name
        )


def _check_pending(
    connection: Connection, memory: Row[Any], known: dict[str, tuple[int, int]], name: str, report: Report
) -> None:
    for key, producer, first, count, payload in fetch_pages(connection, _PENDING, *key_range(memory.number)):
        report.count_checked("pending")
        where = f"the receipt at position {key_position(key)}"
        try:
            receipt = codec.decode_receipt(payload)
        except JournalError as error:
            report.add_violation("pending", f"{where} cannot be read: {error}", name)
            continue
        if (receipt.producer, receipt.first_sequence) != (producer, first) or len(receipt.fragments) != count:
            report.add_violation("pending", f"{where} differs from its columns", name)
        if receipt.position != key_position(key):
            report.add_violation("pending", f"{where} has position {receipt.position} in its record", name)
        if any(one.position >= memory.next_position for one in receipt.fragments):
            report.add_violation("pending", f"{where} has positions that are not assigned yet", name)
        if not producer:
            continue
        if producer not in known:
            report.add_violation(
                "pending", f"{where} belongs to {producer}, which is not a producer of this memory", name
            )
            continue
        received, stored = known[producer]
        last = receipt.last_sequence
        if last > received or last <= stored:
            text = f"{where} has {first} to {last} of {producer}, which has {received} received and {stored} stored"
            report.add_violation("pending", text, name)
