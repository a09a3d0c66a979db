"""`memstream verify`: checks that a journal matches its event logs, one memory or conversation at a time, each in one
snapshot. The checks are the same for every database; `memstream doctor` checks SQLite's files (pages, WAL, lock).

RAM: ids and places of the largest memory's fragments; neither contents nor vectors are kept.

The checks of producers, their receipts, the receipts that are not yet stored, of conversations and of operations are
here, the others in other modules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, Connection, Row, Table, bindparam, func, select, tuple_
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.sql import byte_counts, codec, reads
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.hidden_conversations import HIDDEN
from memstream_server.adapters.journal.sql.schema import (
    KEYED_TABLES,
    NUMBERED_TABLES,
    POSITION_BITS,
    block_sources,
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
    operations,
    plans,
    processes,
    producers,
    receipts,
    states,
)
from memstream_server.adapters.journal.sql.states import read_document
from memstream_server.adapters.journal.sql.writes import SEQUENCES_KEPT
from memstream_server.adapters.journal.verify.fragments import (
    check_conflicts,
    check_fragments,
    check_recall_receipts,
    check_versions,
)
from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal, check_version
from memstream_server.adapters.journal.verify.report import Report
from memstream_server.core.json_text import find_fault
from memstream_server.ports.conversation_records import StateScope
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import MemoryRecord, NamespaceBytes, Space
from memstream_server.ports.operations import UNFINISHED, OperationFailure, OperationState

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
    made_of_others = set(connection.scalars(select(block_sources.c.key).where(block_sources.c.key.between(low, high))))
    for row in connection.execute(select(blocks).where(blocks.c.key.between(low, high))):
        report.count_checked("blocks")
        version = key_position(row.key)
        made_of_others.discard(row.key)
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
    for key in sorted(made_of_others):
        report.add_violation("blocks", f"version {key_position(key)} has sources, and does not exist", name)


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
    report.count_checked("store")
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


_STATES = 4
"""Documents read at once."""
_within = (bindparam("low", type_=BigInteger), bindparam("high", type_=BigInteger))
_limit = bindparam("limit", type_=BigInteger)
_MESSAGES = (
    select(
        messages.c.key,
        messages.c.sender,
        messages.c.receiver,
        messages.c.current_goal,
        messages.c.conversation,
        messages.c.client_id,
        messages.c.payload,
    )
    .where(messages.c.key.between(*_within))
    .order_by(messages.c.key)
    .limit(_limit)
)
_BODIES = (
    select(message_bodies.c.key, func.length(message_bodies.c.body), message_bodies.c.parts)
    .where(message_bodies.c.key.between(*_within))
    .order_by(message_bodies.c.key)
    .limit(_limit)
)
_PLANS = (
    select(plans.c.key, plans.c.state, plans.c.payload)
    .where(plans.c.key.between(*_within))
    .order_by(plans.c.key)
    .limit(_limit)
)


@dataclass(frozen=True, slots=True)
class _ConversationCheck:
    """The conversation that is checked."""

    connection: Connection
    row: Row[Any]
    report: Report

    def add_violation(self, check: str, text: str) -> None:
        self.report.add_violation(check, f"{_display_name(self.row)}: {text}")


def check_conversation(opened: OpenedJournal, number: int, report: Report) -> None:
    """Check one conversation in one snapshot. Unreadable rows become violations."""
    name = f"conversation number {number}"
    try:
        with opened.engine.begin() as connection:
            row = connection.execute(select(conversations).where(conversations.c.number == number)).one_or_none()
            if row is None:
                return  # a running server has discarded it
            name = _display_name(row)
            report.count_checked("conversations")
            checking = _ConversationCheck(connection, row, report)
            if row.name.startswith(HIDDEN):
                _check_hidden(checking)
                return
            _check_status(checking)
            _check_messages(checking)
            _check_plans(checking)
            _check_labels_of_conversations(checking)
    except DBAPIError as error:
        report.add_violation("conversations", f"{name} cannot be read: {opened.translate_error(error)}")


def _display_name(row: Row[Any]) -> str:
    return f"conversation {row.namespace}/{row.name}"


def _check_hidden(checking: _ConversationCheck) -> None:
    """What is never purged is the body of a message, or the document of a state."""
    number = checking.row.number
    messages_of = select(message_bodies.c.key).where(message_bodies.c.parts == number).limit(1)
    states_of = select(states.c.name).where(states.c.parts == number).limit(1)
    if checking.row.expire_time_us is None and all(
        checking.connection.execute(referring).first() is None for referring in (messages_of, states_of)
    ):
        checking.report.add_violation("messages", f"the body in parts, number {number}, has no message and no state")


def _check_status(checking: _ConversationCheck) -> None:
    row = checking.row
    if not 0 <= row.completed_number <= row.last_number:
        text = f"completed at message {row.completed_number}, its last is {row.last_number}"
        checking.add_violation("conversations", text)
    elif row.completed and (not row.completions or row.completed_number != row.last_number):
        text = f"completed {row.completions} times, the last at message {row.completed_number} of {row.last_number}"
        checking.add_violation("conversations", text)
    if not 0 <= row.fed_number <= row.last_number:
        text = f"has fed its memory up to message {row.fed_number}, its last is {row.last_number}"
        checking.add_violation("conversations", text)


def _check_messages(checking: _ConversationCheck) -> None:
    """Numbers may have gaps: messages are deleted. Their count is right, and no number is above the last one; an import
    that is staging messages (empty namespace) has not written that yet. Bodies belong to messages, whole."""
    count = 0
    bodies = dict(_read_sizes(checking))
    for key, sender, receiver, current_goal, conversation, client_id, payload in fetch_pages(
        checking.connection, _MESSAGES, *_key_range(checking)
    ):
        checking.report.count_checked("messages")
        count += 1
        number = key_position(key)
        if checking.row.namespace and number > checking.row.last_number:
            checking.add_violation("messages", f"message {number} is above the last number {checking.row.last_number}")
        body_size_bytes = bodies.pop(key, None)
        try:
            message = codec.decode_message(payload)
        except JournalError as error:
            checking.add_violation("messages", f"message {number} cannot be read: {error}")
            continue
        said = message.number, message.sender, message.receiver, message.current_goal, message.client_id
        named = (checking.row.number, message.client_id) if message.client_id else (None, None)
        if said != (number, sender, receiver, current_goal, client_id or "") or named != (conversation, client_id):
            checking.add_violation("messages", f"message {number} has columns that differ from its record")
        if (len(message.body or b"") if body_size_bytes is None else body_size_bytes) != message.body_size_bytes:
            checking.add_violation("messages", f"message {number} lacks its body of {message.body_size_bytes} bytes")
    if count != checking.row.message_count:
        checking.add_violation("messages", f"has {count} messages, {checking.row.message_count} are counted")
    for key in bodies:
        checking.add_violation("messages", f"message {key_position(key)} has a body and no record")


def _read_sizes(checking: _ConversationCheck) -> Iterator[tuple[int, int]]:
    """The key of each body, and how many bytes are there."""
    for key, length, parts in fetch_pages(checking.connection, _BODIES, *_key_range(checking)):
        within = message_bodies.c.key.between(*key_range(parts or 0))
        of_parts = select(func.coalesce(func.sum(func.length(message_bodies.c.body)), 0)).where(within)
        yield key, length if parts is None else int(checking.connection.execute(of_parts).scalar_one())


def _check_labels_of_conversations(checking: _ConversationCheck) -> None:
    """A conversation is found by each of its labels, and by no other; it expires when its time to live says."""
    row = checking.row
    entered = checking.connection.execute(
        select(conversation_labels.c.namespace, conversation_labels.c.label).where(
            conversation_labels.c.conversation == row.number
        )
    )
    found = {(namespace, bytes(label)) for namespace, label in entered}
    labels = codec.decode_labels(row.labels) if row.labels else ()
    if found != {(row.namespace, codec.hash_label(label)) for label in labels}:
        checking.add_violation("conversations", "is not found by its labels, or by labels that it does not have")
    expires_us = None if row.ttl_us is None else row.update_time_us + row.ttl_us
    if row.expire_time_us != expires_us:
        checking.add_violation(
            "conversations", f"expires at {row.expire_time_us} µs, its time to live says {expires_us}"
        )


def check_states(connection: Connection, report: Report) -> None:
    """Documents are JSON, and those of sessions have their conversation."""
    after = ("", "", "")
    order = (states.c.namespace, states.c.scope, states.c.name)
    place = tuple_(*order)
    while rows := connection.execute(select(states).where(place > after).order_by(*order).limit(_STATES)).all():
        for row in rows:
            report.count_checked("states")
            name = f"the state of {row.scope} {row.namespace}/{row.name}"
            if wrong := find_fault(read_document(connection, row)):
                report.add_violation("states", f"{name} is not JSON: {wrong}")
            owner = select(conversations.c.number).filter_by(namespace=row.namespace, name=row.name)
            if row.scope == StateScope.SESSION.value and connection.execute(owner).first() is None:
                report.add_violation("states", f"{name} has no conversation")
        after = (rows[-1].namespace, rows[-1].scope, rows[-1].name)


def _check_plans(checking: _ConversationCheck) -> None:
    for key, state, payload in fetch_pages(checking.connection, _PLANS, *_key_range(checking)):
        checking.report.count_checked("plans")
        number = key_position(key)
        try:
            plan = codec.decode_plan(payload)
        except JournalError as error:
            checking.add_violation("plans", f"plan {number} cannot be read: {error}")
            continue
        if (plan.number, plan.state.value) != (number, state):
            checking.add_violation("plans", f"plan {number} has columns that differ from its record")


def _key_range(checking: _ConversationCheck) -> tuple[int, int]:
    return key_range(checking.row.number)


_TIME_MAX_US = 1 << 57
"""In the year 6537, within the range of datetime."""


def check_operations(connection: Connection, report: Report) -> None:
    """Raises DBAPIError for unreadable rows."""
    for row in connection.execute(select(operations).order_by(operations.c.id)):
        report.count_checked("operations")
        for text in _find_flaws(row):
            report.add_violation("operations", f"operation {row.id} ({row.type}): {text}")
    report.unfinished.update(describe_unfinished(connection))


def describe_unfinished(connection: Connection) -> Iterator[tuple[str, str]]:
    """(id, description with progress and owner) of each unfinished operation, oldest first."""
    known = {*connection.execute(select(processes.c.number)).scalars()}
    waiting = operations.c.state.in_([state.value for state in UNFINISHED])
    for row in connection.execute(select(operations).where(waiting).order_by(operations.c.id)):
        where = "/".join(filter(None, (row.namespace, row.memory))) or "the whole store"
        far = f"{row.done:,} of {f'{row.total:,}' if row.total else 'an unknown number of'} {row.unit}"
        text = f"{row.type} of {where}, {row.state}, {far}, asked for {_format_time(row.create_time_us)}"
        if row.cancel_asked:
            text += ", to be cancelled"
        if row.process is not None:
            text += f", by server number {row.process}" + ("" if row.process in known else ", which is gone")
        yield row.id, text


def _format_time(time_us: int) -> str:
    if not 0 <= time_us < _TIME_MAX_US:
        return f"at {time_us} µs"
    return f"at {datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(' ', 'seconds')}"


def _find_flaws(row: Row[Any]) -> Iterator[str]:
    if row.state not in {*OperationState}:
        yield f"its state {row.state!r} is unknown"
        return
    ended = row.state not in {*UNFINISHED}
    if ended and not row.end_time_us:
        yield f"it is {row.state} without an end time"
    if not ended and row.end_time_us:
        yield f"it is {row.state} with an end time"
    if min(row.done, row.total) < 0:
        yield f"it has done {row.done} of {row.total}"
    if ended and (row.error is None) is (row.state == OperationState.FAILED):
        yield f"it is {row.state} {'without' if row.error is None else 'with'} an error"
    yield from _find_unreadable(row)


def _find_unreadable(row: Row[Any]) -> Iterator[str]:
    try:
        if not isinstance(json.loads(row.payload), dict):
            yield "its payload is not a JSON object"
    except ValueError:
        yield "its payload is not JSON"
    try:
        if row.error is not None:
            OperationFailure(**json.loads(row.error))
    except (ValueError, TypeError):
        yield "its error cannot be read"
