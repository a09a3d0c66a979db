"""Writes, one function each, inside the writer's transaction.

They raise the port's errors; what they wrote before is rolled back. After a rollback the same write may be called
again. Statements are built once, at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from sqlalchemy import BindParameter, Connection, bindparam, case, delete, func, insert, select, true, update

from memstream_server.adapters.journal.blocks import erase_made_of
from memstream_server.adapters.journal.database import postgres
from memstream_server.adapters.journal.database.database import run_compiled
from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.answers import put_answer, put_answers
from memstream_server.adapters.journal.sql.schema import (
    KEYED_TABLES,
    NUMBERED_TABLES,
    deletions,
    event_fragments,
    events,
    fragments,
    key_position,
    key_range,
    memories,
    memory_labels,
    meta,
    observations,
    outbox,
    producers,
    receipts,
    row_key,
)
from memstream_server.core.events import Event, list_concerned
from memstream_server.core.values import Fragment, Tier
from memstream_server.ports.journal.errors import AlreadyExists, JournalError, NamespaceFull, StaleWrite
from memstream_server.ports.journal.records import Answer, Labels, MemoryRecord, Producer, Space, Spaces
from memstream_server.ports.journal.writing import BatchReceipt

SEQUENCES_KEPT = 100_000
"""Sequence numbers of a producer whose hashes are kept; far more than a client can have unacknowledged."""
SPACES = ("space", "next_space", "old_space")
"""Names in `meta` of the store's spaces, in the order of the port's `Spaces`; an empty value means none."""
COMPACT_EVERY = 10_000
"""Sequence numbers after which an open producer's old hashes are deleted."""
SLICE_ROWS = 1_000
"""Rows of a deleted memory removed in one write."""

_number: BindParameter[int] = bindparam("m")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_FIND = select(memories.c.number).where(memories.c.uid == bindparam("u"))
_OWNED = (
    select(memories.c.number)
    .where(memories.c.uid == bindparam("u"), memories.c.epoch == bindparam("e"))
    .with_for_update(key_share=True)  # PostgreSQL: no other process can raise the epoch before this commit
)
_EXISTS = select(memories.c.uid).where(memories.c.namespace == bindparam("ns"), memories.c.name == bindparam("n"))
_HELD = select(func.count()).select_from(memories).where(memories.c.namespace == bindparam("ns"))
_OWN = update(memories).where(memories.c.uid == bindparam("u")).values(epoch=memories.c.epoch + 1)
_NUMBERS = select(memories.c.number).order_by(memories.c.number)
_RENAME = update(memories).where(memories.c.number == _number).values(uid=bindparam("u"))
_RESERVE = bulk.build_update(
    "memories",
    ("uid", "epoch", "after"),
    "next_position = CASE WHEN memories.next_position < given.after THEN given.after ELSE memories.next_position END",
    "memories.uid = given.uid AND memories.epoch = given.epoch",
    " RETURNING memories.uid, memories.number",
)
_PUT_LABELS = bulk.build_insert(memory_labels)
_DROP_LABELS = delete(memory_labels).where(memory_labels.c.memory == _number)
_DELETE_MEMORY = delete(memories).where(memories.c.number == _number)
_CUTS_AND_DELETIONS = tuple(
    (
        select(t.c.key).where(t.c.key.between(_low, _high)).order_by(t.c.key).offset(SLICE_ROWS).limit(1),
        delete(t).where(t.c.key.between(_low, _high)),
    )
    for t in KEYED_TABLES
)
_CUT_EVENTS = (
    select(event_fragments.c.fragment)
    .where(event_fragments.c.memory == _number)
    .order_by(event_fragments.c.fragment)
    .offset(SLICE_ROWS)
    .limit(1)
)
_DROP_EVENTS = delete(event_fragments).where(
    event_fragments.c.memory == _number, event_fragments.c.fragment <= bindparam("until")
)
_BY_NUMBER = tuple(delete(t).where(t.c.memory == _number) for t in NUMBERED_TABLES)
_NOTE_DELETION = insert(deletions).from_select(
    ["number", "uid", "namespace"],
    select(
        memories.c.number,
        memories.c.uid,
        case((memories.c.namespace == "", "\n" + memories.c.name), else_=memories.c.namespace),  # see byte_counts.py
    ).where(memories.c.number == _number),
)
_DELETED = (
    select(deletions.c.number, deletions.c.uid)
    .order_by(deletions.c.number)
    .limit(1)
    .with_for_update(skip_locked=True)  # PostgreSQL: skip rows that another server is deleting
)
_PURGED = delete(deletions).where(deletions.c.number == _number)
_UNINDEX = insert(outbox).from_select(
    ["memory", "fragment", "deleted"],
    select(bindparam("u"), fragments.c.id, true()).where(
        fragments.c.key.between(_low, _high), fragments.c.tier == Tier.LONG_TERM.value
    ),
)

A_PRODUCER = (producers.c.memory == _number) & (producers.c.name == bindparam("producer"))
_REOPEN = update(producers).where(A_PRODUCER).values(epoch=producers.c.epoch + 1)
_PRODUCER = select(producers.c.epoch, producers.c.received, producers.c.stored).where(A_PRODUCER)
_COMPACT = delete(receipts).where(
    receipts.c.memory == _number,
    receipts.c.producer == bindparam("producer"),
    receipts.c.last_sequence <= bindparam("before"),
)
_RECEIVED = bulk.build_update(
    "producers",
    ("memory", "name", "epoch", "first", "last", "is_empty", "is_stored"),
    # A batch with nothing to store counts as stored as soon as everything before it is.
    "received = given.last, stored = CASE WHEN given.is_stored OR (given.is_empty AND producers.stored = "
    "producers.received) THEN given.last ELSE producers.stored END",
    "producers.memory = given.memory AND producers.name = given.name AND producers.epoch = given.epoch "
    "AND producers.received = given.first - 1",
    " RETURNING producers.memory",
)
_OBSERVATIONS = bulk.build_insert(observations)
_RECEIPTS = bulk.build_insert(receipts)
_EVENTS = bulk.build_insert(events)
_EVENT_FRAGMENTS = bulk.build_insert(event_fragments)
_FIRST_PENDING = select(func.min(observations.c.first_sequence)).where(
    observations.c.key.between(_low, _high), observations.c.producer == bindparam("producer")
)
_OLDEST_EVENTS = (
    select(events.c.key, events.c.time_us, events.c.payload)
    .where(events.c.key.between(_low, _high))
    .order_by(events.c.key)
)
_PRUNE = delete(events).where(events.c.key.between(_low, _high))
_PRUNE_FRAGMENTS = bulk.Bulk(
    "WITH given (memory, fragment, revision) AS (VALUES ",
    3,
    ") DELETE FROM event_fragments WHERE (memory, fragment, revision) IN"
    " (SELECT memory, fragment, revision FROM given)",
)
_META = update(meta).where(meta.c.name == bindparam("n")).values(value=bindparam("v"))


def find_number(connection: Connection, uid: str) -> int:
    number: int | None = run_compiled(connection, _FIND, {"u": uid}).scalar_one_or_none()
    if number is None:
        raise StaleWrite(f"memory {uid} is gone")
    return number


def find_owned(connection: Connection, uid: str, epoch: int) -> int:
    number: int | None = run_compiled(connection, _OWNED, {"u": uid, "e": epoch}).scalar_one_or_none()
    if number is None:
        raise not_owned_error(uid, epoch)
    return number


def not_owned_error(uid: str, epoch: int) -> StaleWrite:
    return StaleWrite(f"memory {uid} is gone or no longer at epoch {epoch}")


# ---- the store itself and its memories


def set_meta(connection: Connection, name: str, value: str) -> None:
    if connection.execute(_META, {"n": name, "v": value}).rowcount == 0:
        connection.execute(insert(meta), {"name": name, "value": value})


def set_space(connection: Connection, space: Space) -> None:
    set_meta(connection, SPACES[0], codec.encode_space(space))


def set_spaces(connection: Connection, spaces: Spaces) -> None:
    for name, space in zip(SPACES, (spaces.in_force, spaces.next, spaces.old), strict=True):
        set_meta(connection, name, "" if space is None else codec.encode_space(space))


def create_memory(
    connection: Connection,
    record: MemoryRecord,
    happened: tuple[Event, ...],
    answer: Answer | None,
    namespace_max: int = 0,
) -> None:
    if connection.execute(_EXISTS, {"ns": record.namespace, "n": record.name}).first() is not None:
        raise AlreadyExists(f"memory {record.namespace}/{record.name} exists")
    check_namespace_limit(connection, record.namespace, namespace_max)
    number = connection.execute(
        insert(memories).returning(memories.c.number),
        {
            "uid": record.uid,
            "namespace": record.namespace,
            "name": record.name,
            "kind": record.kind.value,
            "epoch": record.epoch,
            "revision": 1,
            "next_position": 0,
            "reflection_aggregate": record.reflection_aggregate,
            "create_time_us": record.create_time_us,
            "update_time_us": record.update_time_us,
            "seed": record.seed,
            "labels": codec.encode_labels(record.labels),
            "policy": codec.encode_policy(record.policy),
            "fragments": 0,
            "change_time_us": record.change_time_us,
        },
    ).scalar_one()
    put_labels(connection, number, record.namespace, record.name, record.labels)
    append_events(connection, [(number, 1, record.create_time_us, happened)])
    put_answer(connection, answer)


def put_labels(connection: Connection, number: int, namespace: str, name: str, labels: Labels) -> None:
    """Enter the labels of a memory that has none entered."""
    bulk.write_rows(connection, _PUT_LABELS, [(namespace, codec.hash_label(one), name, number) for one in labels])


def drop_labels(connection: Connection, number: int) -> None:
    """Remove the entries of a memory's labels."""
    connection.execute(_DROP_LABELS, {"m": number})


def check_namespace_limit(connection: Connection, namespace: str, namespace_max: int) -> None:
    """Check that the namespace may have one more memory. Raises NamespaceFull."""
    if not namespace_max:
        return
    if connection.dialect.name != "sqlite":  # SQLite has one writer; on PostgreSQL other servers create memories, too
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({postgres.NAMING}, {postgres.SCHEMA})")
    if connection.execute(_HELD, {"ns": namespace}).scalar_one() >= namespace_max:
        raise NamespaceFull(namespace, namespace_max)


def delete_memory(connection: Connection, uid: str, answer: Answer | None, epoch: int | None) -> None:
    """Delete the memory; `purge` removes its rows later."""
    number = find_number(connection, uid) if epoch is None else find_owned(connection, uid, epoch)
    drop_labels(connection, number)  # at once: another memory may get the name before the other rows are removed
    connection.execute(_NOTE_DELETION, {"m": number})
    connection.execute(_DELETE_MEMORY, {"m": number})
    erase_made_of(connection, number)
    put_answer(connection, answer)


def purge_slice(connection: Connection) -> bool:
    """Remove a slice of a deleted memory's rows, so that other writes run in between; False if none are left."""
    found = connection.execute(_DELETED).first()
    if found is None:
        return False
    number, uid = found
    low, high = key_range(number)
    for cut, deletion in _CUTS_AND_DELETIONS:
        last = connection.execute(cut, {"low": low, "high": high}).scalar_one_or_none()
        keys = {"low": low, "high": high if last is None else last}
        if deletion.table is fragments:
            connection.execute(_UNINDEX, {"u": uid, **keys})
        connection.execute(deletion, keys)
        if last is not None:
            return True
    last = connection.execute(_CUT_EVENTS, {"m": number}).scalar_one_or_none()
    if last is not None:
        connection.execute(_DROP_EVENTS, {"m": number, "until": last})
        return True
    for statement in _BY_NUMBER:
        connection.execute(statement, {"m": number})
    connection.execute(_PURGED, {"m": number})
    return True


def rename_memories(connection: Connection, new_uid: Callable[[], str]) -> None:
    """Give every memory a new uid."""
    for number in connection.execute(_NUMBERS).scalars().all():
        connection.execute(_RENAME, {"m": number, "u": new_uid()})


def raise_epoch(connection: Connection, uid: str) -> None:
    if connection.execute(_OWN, {"u": uid}).rowcount != 1:
        raise StaleWrite(f"memory {uid} is gone")


# ---- the way in


def open_producer(connection: Connection, uid: str, epoch: int, name: str) -> Producer:
    number = find_owned(connection, uid, epoch)
    who = {"m": number, "producer": name}
    if connection.execute(_REOPEN, who).rowcount == 0:
        connection.execute(insert(producers), {"memory": number, "name": name, "epoch": 1, "received": 0, "stored": 0})
    raised, received, stored = connection.execute(_PRODUCER, who).one()
    connection.execute(_COMPACT, who | {"before": received - SEQUENCES_KEPT})
    low, high = key_range(number)
    pending = connection.execute(_FIRST_PENDING, {"low": low, "high": high, "producer": name}).scalar_one()
    return Producer(name, raised, received, stored_up_to(received, stored, pending))


def stored_up_to(received: int, stored: int, first_pending: int | None) -> int:
    """The last sequence number up to which everything is stored or rejected, given the first pending one.

    Derived, because a last batch may consist of rejections only: nothing of it is stored, so no commit advances
    `stored`.
    """
    return max(stored, received if first_pending is None else first_pending - 1)


def receive_batches(connection: Connection, given: Sequence[BatchReceipt]) -> None:
    """Receive batches of different memories."""
    numbers = _reserve_positions(connection, given)
    count_received(connection, [(numbers[receipt.memory], receipt) for receipt in given], stored=False)
    pending = [
        (
            row_key(numbers[receipt.memory], receipt.position),
            numbers[receipt.memory],
            receipt.producer,
            receipt.first_sequence,
            len(receipt.fragments),
            codec.encode_record(receipt),
        )
        for receipt in given
        if receipt.fragments  # otherwise all were rejected: nothing is pending
    ]
    bulk.write_rows(connection, _OBSERVATIONS, pending)
    put_answers(connection, [receipt.answer for receipt in given if receipt.answer is not None])


def _reserve_positions(connection: Connection, given: Sequence[BatchReceipt]) -> dict[str, int]:
    """Reserve positions, so that none is used twice; the memories' numbers by uid."""
    rows = [
        (receipt.memory, receipt.epoch, 1 + max([receipt.position, *(one.position for one in receipt.fragments)]))
        for receipt in given
    ]
    numbers: dict[str, int] = {row[0]: row[1] for row in bulk.write_rows(connection, _RESERVE, rows, returns=True)}
    for receipt in given:
        if receipt.memory not in numbers:
            raise not_owned_error(receipt.memory, receipt.epoch)
    return numbers


def count_received(connection: Connection, given: Sequence[tuple[int, BatchReceipt]], *, stored: bool) -> None:
    """Advance the producers' `received`. Receipts of different memories, with the memories' numbers.

    stored: this transaction also stores them, and nothing received earlier is pending.
    """
    for _, receipt in given:
        _check_texts(receipt.fragments)
    _advance_producers(connection, [(number, receipt) for number, receipt in given if receipt.producer], stored)


def _check_texts(received: Sequence[Fragment]) -> None:
    """Texts that become columns must fit every database, or a received batch could never be stored."""
    for fragment in received:
        if "\0" in fragment.session or "\0" in fragment.speaker or "\0" in fragment.external_id:
            raise JournalError("a session, speaker or external id holds NUL, which PostgreSQL cannot")


def _advance_producers(connection: Connection, given: Sequence[tuple[int, BatchReceipt]], stored: bool) -> None:
    moved = [
        (
            *(number, receipt.producer, receipt.producer_epoch),
            *(receipt.first_sequence, receipt.last_sequence, not receipt.fragments, stored),
        )
        for number, receipt in given
    ]
    if len(bulk.write_rows(connection, _RECEIVED, moved, returns=True)) != len(moved):
        expected = ", ".join(
            f"{receipt.producer} is not at epoch {receipt.producer_epoch}, expecting {receipt.first_sequence}"
            for _, receipt in given
        )
        raise StaleWrite(f"producer {expected}")
    hashes = [
        (
            *(number, receipt.producer, receipt.last_sequence, receipt.first_sequence),
            *(codec.encode_hashes(receipt.hashes), codec.encode_rejections(receipt.rejections)),
            # If all items were rejected nothing is ever stored, so the outcomes are final.
            codec.encode_record(()) if receipt.outcomes and not receipt.fragments else None,
        )
        for number, receipt in given
    ]
    bulk.write_rows(connection, _RECEIPTS, hashes)
    for number, receipt in given:
        last = receipt.last_sequence
        if last // COMPACT_EVERY > (receipt.first_sequence - 1) // COMPACT_EVERY:
            run_compiled(
                connection, _COMPACT, {"m": number, "producer": receipt.producer, "before": last - SEQUENCES_KEPT}
            )


def append_events(connection: Connection, happened: Sequence[tuple[int, int, int, tuple[Event, ...]]]) -> None:
    """Append to the event log: (memory number, revision, time in µs, events) of each transition."""
    rows = [
        (row_key(number, revision), time_us, codec.encode_events(each)) for number, revision, time_us, each in happened
    ]
    bulk.write_rows(connection, _EVENTS, rows)
    named = [
        (number, fragment, revision) for number, revision, _, each in happened for fragment in list_concerned(each)
    ]
    bulk.write_rows(connection, _EVENT_FRAGMENTS, named)


def prune_events(connection: Connection, uid: str, before_us: int, limit: int) -> int:
    """Delete from the oldest on, so that the rest has no gap even if the clock jumped."""
    number = find_number(connection, uid)
    low, high = key_range(number)
    oldest = connection.execute(_OLDEST_EVENTS.limit(limit), {"low": low, "high": high}).all()
    old = list(takewhile(lambda row: row[1] < before_us, oldest))
    if old:
        named = [
            (number, fragment, key_position(key))
            for key, _, payload in old
            for fragment in list_concerned(codec.decode_events(payload))
        ]
        bulk.write_rows(connection, _PRUNE_FRAGMENTS, named)
        connection.execute(_PRUNE, {"low": low, "high": old[-1][0]})
    return len(old)
