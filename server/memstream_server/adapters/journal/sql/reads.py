"""Reads, one function each, in a snapshot that never waits for the writer. fragment_reads.py reads fragments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Connection, Select, bindparam, cast, exists, func, select
from sqlalchemy import Row as SqlRow

from memstream_server.adapters.journal.database.database import run_compiled
from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.answers import ANSWER_KEPT_US
from memstream_server.adapters.journal.sql.bulk import PAGE_ROWS, fetch_pages, fetch_rows, split_ids
from memstream_server.adapters.journal.sql.schema import (
    event_fragments,
    events,
    fragments,
    jobs,
    key_position,
    key_range,
    memories,
    memory_labels,
    meta,
    observations,
    outbox,
    receipts,
    requests,
    row_key,
)
from memstream_server.adapters.journal.sql.writes import SPACES
from memstream_server.core.values import FragmentKind, MemoryKind, Tier
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.reading import KeptReceipt
from memstream_server.ports.journal.records import Answer, Counts, Job, Labels, MemoryRecord, Recorded, Space, Spaces
from memstream_server.ports.journal.writing import Rejection

EVENTS_BYTES_MAX = 256 << 10
"""Limit of the event log read at once, which a watch holds in RAM. A larger transition is returned alone."""
_EVENT_BYTES = 100
"""Of an event, about; their stored bytes are compressed."""

_BEFORE_ALL_US = -(1 << 63)

_number: BindParameter[int] = bindparam("number")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_uid: BindParameter[str] = bindparam("u")
_META = select(meta.c.value).where(meta.c.name == bindparam("name"))
_NUMBER = select(memories.c.number).where(memories.c.uid == _uid)
_BY_UID = select(memories).where(memories.c.uid == _uid)
_BY_NAME = select(memories).where(memories.c.namespace == bindparam("ns"), memories.c.name == bindparam("n"))
_LAST = "\U0010ffff"
"""Sorts after every character of a name."""
_LISTED = (
    select(memories)
    .where(
        memories.c.namespace == bindparam("ns"),
        memories.c.name > bindparam("after"),
        memories.c.name >= bindparam("prefix"),
        memories.c.name < bindparam("until"),
    )
    .order_by(memories.c.name)
    .limit(_limit)
)
_labelled = memory_labels.alias()
_OF_LABEL = (  # in the order of `memory_labels`, of which a page reads no more than it shows
    select(memories)
    .select_from(memory_labels.join(memories, memories.c.number == memory_labels.c.memory))
    .where(
        memory_labels.c.namespace == bindparam("ns"),
        memory_labels.c.label == bindparam("label0"),
        memory_labels.c.name > bindparam("after"),
        memory_labels.c.name >= bindparam("prefix"),
        memory_labels.c.name < bindparam("until"),
    )
    .order_by(memory_labels.c.name)
    .limit(_limit)
)
_RECORDS = select(memories).where(memories.c.uid.in_(bindparam("uids", expanding=True))).order_by(memories.c.uid)
_REVISIONS = select(memories.c.uid, memories.c.revision).where(memories.c.uid.in_(bindparam("uids", expanding=True)))
_EPOCHS = select(memories.c.uid, memories.c.epoch).where(memories.c.uid.in_(bindparam("uids", expanding=True)))
_ALL = select(memories).where(memories.c.uid > bindparam("after")).order_by(memories.c.uid).limit(_limit)
_PENDING_MEMORIES = select(memories.c.uid).where(memories.c.number.in_(select(observations.c.memory)))
_RECEIPTS = (
    select(receipts.c.first_sequence, receipts.c.hashes, receipts.c.rejections)
    .where(
        receipts.c.memory == _number,
        receipts.c.producer == bindparam("producer"),
        receipts.c.last_sequence >= bindparam("first"),
    )
    .order_by(receipts.c.last_sequence)
    .limit(PAGE_ROWS)
)
_KEPT = (
    select(receipts.c.first_sequence, receipts.c.last_sequence, receipts.c.rejections, receipts.c.outcomes)
    .where(
        receipts.c.memory == _number,
        receipts.c.producer == bindparam("producer"),
        receipts.c.last_sequence > bindparam("after"),
    )
    .order_by(receipts.c.last_sequence)
    .limit(_limit)
)
_WITHOUT_OUTCOMES = select(func.max(receipts.c.last_sequence)).where(
    receipts.c.memory == _number,
    receipts.c.producer == bindparam("producer"),
    receipts.c.last_sequence > bindparam("after"),
    receipts.c.last_sequence <= bindparam("upto"),
    receipts.c.outcomes.is_(None),
)
_forgotten = fragments.c.forget_time_us.is_not(None)
_TIERS = (
    select(fragments.c.tier, fragments.c.kind, _forgotten, func.count())
    .where(
        fragments.c.key.between(_low, _high),
        fragments.c.due_time_us.is_(None) | (fragments.c.due_time_us > bindparam("now")),
    )
    .group_by(fragments.c.tier, fragments.c.kind, _forgotten)
)
# Cast, because PostgreSQL sums bigints to numeric.
_PENDING = select(cast(func.coalesce(func.sum(observations.c.count), 0), BigInteger)).where(
    observations.c.key.between(_low, _high)
)
_UNINDEXED = select(func.count()).where(outbox.c.memory == _uid)
_EVENTS = (
    select(events.c.key, events.c.time_us, events.c.payload)
    .where(events.c.key.between(_low, _high))
    .order_by(events.c.key)
    .limit(_limit)
)
_REVISIONS_OF_FRAGMENT = (
    select(event_fragments.c.revision)
    .where(
        event_fragments.c.memory == _number,
        event_fragments.c.fragment == bindparam("fragment"),
        event_fragments.c.revision > bindparam("after"),
    )
    .order_by(event_fragments.c.revision)
    .limit(_limit)
)
_ANSWER = select(requests).where(requests.c.request == bindparam("r"), requests.c.time_us >= bindparam("since"))
_JOBS = (
    select(jobs.c.id, memories.c.uid, jobs.c.type, jobs.c.payload, jobs.c.create_time_us, jobs.c.attempts)
    .join(memories, memories.c.number == jobs.c.memory)
    .order_by(jobs.c.create_time_us, jobs.c.id)
    .limit(_limit)
)


def meta_value(connection: Connection, name: str) -> str | None:
    return connection.execute(_META, {"name": name}).scalar_one_or_none()


def read_spaces(connection: Connection) -> Spaces:
    return Spaces(*(_read_space(connection, name) for name in SPACES))


def _read_space(connection: Connection, name: str) -> Space | None:
    value = meta_value(connection, name)
    return codec.decode_space(value) if value else None


# ---- memories


def decode_record(row: SqlRow[Any]) -> MemoryRecord:
    return MemoryRecord(
        uid=row.uid,
        namespace=row.namespace,
        name=row.name,
        kind=MemoryKind(row.kind),
        policy=codec.decode_policy(row.policy),
        seed=row.seed,
        labels=codec.decode_labels(row.labels),
        epoch=row.epoch,
        revision=row.revision,
        create_time_us=row.create_time_us,
        update_time_us=row.update_time_us,
        reflection_aggregate=row.reflection_aggregate,
        fragments=row.fragments,
        change_time_us=row.change_time_us,
    )


def get_memory(connection: Connection, namespace: str, name: str) -> MemoryRecord | None:
    row = run_compiled(connection, _BY_NAME, {"ns": namespace, "n": name}).one_or_none()
    return None if row is None else decode_record(row)


def get_by_uid(connection: Connection, uid: str) -> MemoryRecord:
    return decode_record(get_row(connection, uid))


def get_records(connection: Connection, uids: Sequence[str]) -> list[MemoryRecord]:
    return [decode_record(row) for row in connection.execute(_RECORDS, {"uids": uids})]


def find_revisions(connection: Connection, uids: Sequence[str]) -> dict[str, int]:
    """By uid, of the memories that exist."""
    return {row.uid: row.revision for row in connection.execute(_REVISIONS, {"uids": uids})} if uids else {}


def find_row(connection: Connection, uid: str) -> SqlRow[Any] | None:
    return connection.execute(_BY_UID, {"u": uid}).one_or_none()


def get_row(connection: Connection, uid: str) -> SqlRow[Any]:
    row = find_row(connection, uid)
    if row is None:
        raise StaleWrite(f"memory {uid} is gone")
    return row


def find_number(connection: Connection, uid: str) -> int | None:
    number: int | None = run_compiled(connection, _NUMBER, {"u": uid}).scalar_one_or_none()
    return number


def list_memories(
    connection: Connection, namespace: str, after: str, limit: int, prefix: str = "", labels: Labels = ()
) -> list[MemoryRecord]:
    values = {"ns": namespace, "after": after, "limit": limit, "prefix": prefix, "until": prefix + _LAST}
    hashes = {f"label{place}": codec.hash_label(label) for place, label in enumerate(labels)}
    rows = connection.execute(_build_listing(len(labels)), values | hashes)
    return [decode_record(row) for row in rows]


@lru_cache
def _build_listing(labels: int) -> Select[*tuple[Any, ...]]:
    """The statement for so many labels: the first is searched, the others are looked up for each memory of it."""
    if not labels:
        return _LISTED
    others = [
        exists().where(
            _labelled.c.namespace == memory_labels.c.namespace,
            _labelled.c.label == bindparam(f"label{place}"),
            _labelled.c.name == memory_labels.c.name,
        )
        for place in range(1, labels)
    ]
    return _OF_LABEL.where(*others)


def all_memories(connection: Connection, after: str, limit: int) -> list[MemoryRecord]:
    return [decode_record(row) for row in connection.execute(_ALL, {"after": after, "limit": limit})]


def read_epochs(connection: Connection, uids: Sequence[str]) -> dict[str, int]:
    rows = [row for some in split_ids(uids) for row in connection.execute(_EPOCHS, {"uids": some})]
    return {row.uid: row.epoch for row in rows}


def pending_memories(connection: Connection) -> list[str]:
    return list(connection.execute(_PENDING_MEMORIES).scalars())


def received_hashes(
    connection: Connection, uid: str, producer: str, first: int, last: int
) -> list[tuple[int, bytes, Rejection | None]]:
    found: list[tuple[int, bytes, Rejection | None]] = []
    number = find_number(connection, uid)
    ahead = first
    while number is not None and ahead <= last:
        batches = fetch_rows(connection, _RECEIPTS, {"number": number, "producer": producer, "first": ahead})
        for start, hashes, rejections in batches:
            rejected = {rejection.sequence: rejection for rejection in codec.decode_rejections(rejections)}
            found.extend(
                (sequence, digest, rejected.get(sequence))
                for sequence, digest in enumerate(codec.decode_hashes(hashes), start)
                if first <= sequence <= last
            )
            ahead = start + len(hashes) // codec.HASH_WIDTH
        if len(batches) < PAGE_ROWS:
            break
    return found


def kept_receipts(connection: Connection, uid: str, producer: str, after: int, limit: int) -> list[KeptReceipt]:
    number = find_number(connection, uid)
    if number is None:
        return []
    keys = {"number": number, "producer": producer, "after": after, "limit": limit}
    return [
        KeptReceipt(first, last, codec.decode_rejections(rejections), codec.decode_outcomes(outcomes))
        for first, last, rejections, outcomes in connection.execute(_KEPT, keys)
    ]


def last_without_outcomes(connection: Connection, uid: str, producer: str, after: int, upto: int) -> int:
    number = find_number(connection, uid)
    if number is None:
        return 0
    keys = {"number": number, "producer": producer, "after": after, "upto": upto}
    return connection.execute(_WITHOUT_OUTCOMES, keys).scalar_one() or 0


def count_fragments(connection: Connection, uid: str, now_us: int | None = None) -> Counts:
    number = find_number(connection, uid)
    if number is None:
        return Counts()
    low, high = key_range(number)
    keys = {"low": low, "high": high}
    live: dict[str, int] = {}
    insights = forgotten = 0
    since = {"now": _BEFORE_ALL_US if now_us is None else now_us}
    for tier, kind, gone, count in connection.execute(_TIERS, keys | since):
        if gone:
            forgotten += count
            continue
        live[tier] = live.get(tier, 0) + count
        insights += count if kind == FragmentKind.INSIGHT.value else 0
    return Counts(
        sensory=live.get(Tier.SENSORY.value, 0),
        short_term=live.get(Tier.SHORT_TERM.value, 0),
        long_term=live.get(Tier.LONG_TERM.value, 0),
        insights=insights,
        forgotten=forgotten,
        pending=connection.execute(_PENDING, keys).scalar_one(),
        unindexed=connection.execute(_UNINDEXED, {"u": uid}).scalar_one(),
    )


def read_events(connection: Connection, uid: str, after_revision: int, limit: int) -> list[Recorded]:
    number = find_number(connection, uid)
    if number is None:
        return []
    low, high = key_range(number)
    found: list[Recorded] = []
    size = 0
    for row, time_us, blob in fetch_pages(connection, _EVENTS, low + max(after_revision + 1, 0), high, limit):
        events = codec.decode_events(blob)
        size += len(events) * _EVENT_BYTES
        if found and size > EVENTS_BYTES_MAX:
            break
        found.append(Recorded(key_position(row), time_us, events))
    return found


def read_fragment_events(
    connection: Connection, uid: str, fragment: str, after_revision: int, limit: int
) -> tuple[list[Recorded], bool]:
    """See the port. A transition is decoded as a whole, so their size counts, not that of the fragment's own events."""
    number = find_number(connection, uid)
    if number is None:
        return [], False
    given = {"number": number, "fragment": fragment, "after": after_revision, "limit": limit + 1}
    revisions = list(connection.execute(_REVISIONS_OF_FRAGMENT, given).scalars())
    found: list[Recorded] = []
    count = size = 0
    for revision in revisions:
        key = row_key(number, revision)
        ((_, time_us, blob),) = fetch_rows(connection, _EVENTS, {"low": key, "high": key, "limit": 1})
        decoded = codec.decode_events(blob)
        events = tuple(each for each in decoded if each.concerns(fragment))
        found.append(Recorded(revision, time_us, events))
        count += len(events)
        size += len(decoded) * _EVENT_BYTES
        if count >= limit or size > EVENTS_BYTES_MAX:
            break
    return found, len(found) < len(revisions)


# ---- answers, jobs


def read_answer(connection: Connection, request: str, now_us: int) -> Answer | None:
    row = run_compiled(connection, _ANSWER, {"r": request, "since": now_us - ANSWER_KEPT_US}).one_or_none()
    return None if row is None else Answer(row.request, row.digest, row.response, row.time_us)


def waiting_jobs(connection: Connection, limit: int) -> list[Job]:
    return [Job(*row) for row in connection.execute(_JOBS, {"limit": limit}).all()]
