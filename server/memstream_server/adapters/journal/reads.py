"""One function per read, each in a snapshot of its own; none waits for the writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, BindParameter, Connection, Select, bindparam, cast, exists, func, select
from sqlalchemy import Row as SqlRow

from memstream_server.adapters.journal import codec
from memstream_server.adapters.journal.bulk import PAGE_ROWS, fetch, fetch_columns
from memstream_server.adapters.journal.schema import (
    events,
    fragments,
    jobs,
    memories,
    meta,
    observations,
    outbox,
    position,
    receipts,
    requests,
    span,
    vectors,
)
from memstream_server.adapters.journal.transition import IDS_MAX
from memstream_server.adapters.journal.writes import ANSWER_KEPT_US, SPACES
from memstream_server.core.values import Fragment, FragmentKind, MemoryKind, Tier
from memstream_server.ports.journal.errors import Conflict
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import Answer, Counts, Indexable, IndexEntry, Job, MemoryRecord, Recorded
from memstream_server.ports.journal.spaces import Space, Spaces
from memstream_server.ports.journal.writing import Rejection

EVENTS_BYTES_MAX = 256 << 10
"""Of the event log read at once: what a watcher holds. A transition larger than that comes alone."""

_number: BindParameter[int] = bindparam("number")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_uid: BindParameter[str] = bindparam("u")
_model: BindParameter[str] = bindparam("model")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_META = select(meta.c.value).where(meta.c.name == bindparam("name"))
_NUMBER = select(memories.c.number).where(memories.c.uid == _uid)
_BY_UID = select(memories).where(memories.c.uid == _uid)
_BY_NAME = select(memories).where(memories.c.namespace == bindparam("ns"), memories.c.name == bindparam("n"))
_LAST = "\U0010ffff"
"""Sorts after everything that a name may go on with."""
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
_NAMESPACES = (
    select(memories.c.namespace, func.count())
    .where(memories.c.namespace > bindparam("after"))
    .group_by(memories.c.namespace)
    .order_by(memories.c.namespace)
    .limit(_limit)
)
_ALL = select(memories).where(memories.c.uid > bindparam("after")).order_by(memories.c.uid).limit(_limit)
_PENDING_MEMORIES = select(memories.c.uid).where(memories.c.number.in_(select(observations.c.memory)))

FRAGMENT = (fragments.c.payload, fragments.c.access_count, fragments.c.access_time_us)
_of_space = (vectors.c.key == fragments.c.key) & (vectors.c.model == func.coalesce(_model, fragments.c.model))
VECTORED = exists().where(_of_space)
"""Whether a fragment has a vector in the space of name `model` (null: in that it was written with)."""
_LIST = (
    select(fragments.c.key, *FRAGMENT, VECTORED)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
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
_SOME = select(fragments.c.id, *FRAGMENT, VECTORED).where(fragments.c.memory == _number, fragments.c.id.in_(_ids))
_SOME_VECTORS = (
    select(fragments.c.id, vectors.c.vector)
    .join(vectors, vectors.c.key == fragments.c.key)
    .where(fragments.c.memory == _number, fragments.c.id.in_(_ids), vectors.c.model == _model)
)
_EXPIRING = (
    select(memories.c.uid, fragments.c.id)
    .join(memories, memories.c.number == fragments.c.memory)
    .where(fragments.c.due_time_us.is_not(None), fragments.c.due_time_us <= bindparam("now"))
    .order_by(fragments.c.due_time_us)
    .limit(_limit)
)
_forgotten = fragments.c.forget_time_us.is_not(None)
_OLDEST_FORGOTTEN = (
    select(memories.c.uid, func.min(fragments.c.forget_time_us))
    .join(memories, memories.c.number == fragments.c.memory)
    .where(_forgotten)
    .group_by(memories.c.uid)
)
_PURGEABLE = (
    select(fragments.c.id)
    .where(fragments.c.memory == _number, _forgotten, fragments.c.forget_time_us <= bindparam("before"))
    .order_by(fragments.c.forget_time_us)
    .limit(_limit)
)
_TIERS = (
    select(fragments.c.tier, fragments.c.kind, _forgotten, func.count())
    .where(fragments.c.key.between(_low, _high))
    .group_by(fragments.c.tier, fragments.c.kind, _forgotten)
)
# Cast, because PostgreSQL sums up bigints to a decimal number.
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
_ANSWER = select(requests).where(requests.c.request == bindparam("r"), requests.c.time_us >= bindparam("since"))
_OUTBOX_ROWS = (
    select(outbox.c.memory, func.min(outbox.c.id), func.max(outbox.c.id))
    .where(outbox.c.memory.in_(bindparam("uids", expanding=True)))
    .group_by(outbox.c.memory)
)
_OUTBOX_SIZE = select(func.count()).select_from(outbox)
_OUTBOX_LAST = select(func.max(outbox.c.id))
_live = (
    (fragments.c.memory == memories.c.number)
    & (fragments.c.id == outbox.c.fragment)
    & fragments.c.forget_time_us.is_(None)
    & (fragments.c.tier == Tier.LONG_TERM.value)
    & outbox.c.deleted.is_(False)
)
_OUTBOX = (
    select(
        outbox.c.id,
        outbox.c.memory,
        outbox.c.fragment,
        outbox.c.deleted,
        fragments.c.key,
        vectors.c.model,
        vectors.c.vector,
    )
    .outerjoin(memories, memories.c.uid == outbox.c.memory)
    .outerjoin(fragments, _live)
    .outerjoin(vectors, _of_space)
    .where(outbox.c.id > bindparam("after"))
    .order_by(outbox.c.id)
    .limit(_limit)
)
_INDEXABLE = (
    select(fragments.c.key, fragments.c.id)
    .join(vectors, _of_space)
    .where(
        fragments.c.key.between(_low, _high),
        fragments.c.tier == Tier.LONG_TERM.value,
        fragments.c.forget_time_us.is_(None),
    )
    .order_by(fragments.c.key)
    .limit(_limit)
)
_JOBS = (
    select(jobs.c.id, memories.c.uid, jobs.c.type, jobs.c.payload, jobs.c.create_time_us, jobs.c.attempts)
    .join(memories, memories.c.number == jobs.c.memory)
    .order_by(jobs.c.create_time_us, jobs.c.id)
    .limit(_limit)
)


def meta_value(connection: Connection, name: str) -> str | None:
    return connection.execute(_META, {"name": name}).scalar_one_or_none()


def spaces(connection: Connection) -> Spaces:
    return Spaces(*(_space(connection, name) for name in SPACES))


def _space(connection: Connection, name: str) -> Space | None:
    value = meta_value(connection, name)
    return codec.decode_space(value) if value else None


def fragment_of(model: str | None, blob: bytes, count: int, at: int, vectored: object) -> Fragment:
    """From the columns FRAGMENT and VECTORED. `model` is the space in force; None while none is."""
    return codec.decode_fragment(blob, count, at, None if model is None else model if vectored else "")


# ---- memories


def record(row: SqlRow[Any]) -> MemoryRecord:
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
    )


def get_memory(connection: Connection, namespace: str, name: str) -> MemoryRecord | None:
    row = connection.execute(_BY_NAME, {"ns": namespace, "n": name}).one_or_none()
    return None if row is None else record(row)


def by_uid(connection: Connection, uid: str) -> MemoryRecord:
    return record(memory_of(connection, uid))


def memory_of(connection: Connection, uid: str) -> SqlRow[Any]:
    row = connection.execute(_BY_UID, {"u": uid}).one_or_none()
    if row is None:
        raise Conflict(f"memory {uid} is gone")
    return row


def _number_of(connection: Connection, uid: str) -> int | None:
    return connection.execute(_NUMBER, {"u": uid}).scalar_one_or_none()


def list_memories(
    connection: Connection, namespace: str, after: str, limit: int, prefix: str = ""
) -> list[MemoryRecord]:
    values = {"ns": namespace, "after": after, "limit": limit, "prefix": prefix, "until": prefix + _LAST}
    return [record(row) for row in connection.execute(_LISTED, values)]


def all_memories(connection: Connection, after: str, limit: int) -> list[MemoryRecord]:
    return [record(row) for row in connection.execute(_ALL, {"after": after, "limit": limit})]


def list_namespaces(connection: Connection, after: str, limit: int) -> list[tuple[str, int]]:
    rows = connection.execute(_NAMESPACES, {"after": after, "limit": limit}).all()
    return [(namespace, count) for namespace, count in rows]


def pending_memories(connection: Connection) -> list[str]:
    return list(connection.execute(_PENDING_MEMORIES).scalars())


def pages(
    connection: Connection,
    statement: Select[*tuple[Any, ...]],
    low: int,
    high: int,
    limit: int | None = None,
    **values: Any,
) -> Iterator[list[Any]]:
    """The first `limit` rows (all, if None) of a statement over a range of keys, the key first, a page at a time."""
    while limit is None or limit > 0:
        page = PAGE_ROWS if limit is None else min(limit, PAGE_ROWS)
        rows = fetch(connection, statement, {"low": low, "high": high, "limit": page, **values})
        yield from rows
        if len(rows) < page:
            return
        low = rows[-1][0] + 1
        limit = None if limit is None else limit - page


def column_pages(
    connection: Connection, statement: Select[*tuple[Any, ...]], low: int, high: int, **values: Any
) -> Iterator[list[Any]]:
    """The same by column, all rows, of integers and blobs."""
    while True:
        columns = fetch_columns(connection, statement, {"low": low, "high": high, "limit": PAGE_ROWS, **values})
        keys = columns[0]
        if keys:
            yield columns
        if len(keys) < PAGE_ROWS:
            return
        low = keys[-1] + 1


def received_hashes(
    connection: Connection, uid: str, producer: str, first: int, last: int
) -> list[tuple[int, bytes, Rejection | None]]:
    found: list[tuple[int, bytes, Rejection | None]] = []
    number = _number_of(connection, uid)
    ahead = first
    while number is not None and ahead <= last:
        batches = fetch(connection, _RECEIPTS, {"number": number, "producer": producer, "first": ahead})
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


# ---- fragments


def _chunks(ids: Sequence[str]) -> Iterator[list[str]]:
    return (list(ids[start : start + IDS_MAX]) for start in range(0, len(ids), IDS_MAX))


def some_fragments(connection: Connection, uid: str, ids: Sequence[str], model: str | None) -> list[Fragment]:
    number = _number_of(connection, uid)
    if number is None:
        return []
    found: dict[str, Fragment] = {}
    for chunk in _chunks(ids):
        for name, *columns in fetch(connection, _SOME, {"number": number, "ids": chunk, "model": model}):
            found[name] = fragment_of(model, *columns)
    return [found[name] for name in ids if name in found]


def some_vectors(connection: Connection, uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]:
    number = _number_of(connection, uid)
    found: dict[str, bytes] = {}
    if number is not None:
        for chunk in _chunks(ids):
            rows = fetch(connection, _SOME_VECTORS, {"number": number, "model": model, "ids": chunk})
            found.update((name, vector) for name, vector in rows)
    return found


def list_fragments(connection: Connection, uid: str, query: FragmentQuery, model: str | None) -> list[Fragment]:
    number = _number_of(connection, uid)
    if number is None:
        return []
    low, high = span(number)
    chosen = {
        "tier": [tier.value for tier in query.tiers],
        "kind": query.kinds,
        "session": query.sessions,
        "speaker": query.speakers,
    }
    values = {name: list(wanted) for name, wanted in chosen.items() if wanted}
    statement = _selection(query.forgotten, tuple(values))
    rows = pages(connection, statement, low + max(query.after + 1, 0), high, query.limit, model=model, **values)
    return [fragment_of(model, *columns) for _, *columns in rows]


@lru_cache  # to build a statement takes longer than to run it
def _selection(forgotten: bool, columns: tuple[str, ...]) -> Select[*tuple[Any, ...]]:
    wanted = [fragments.c[name].in_(bindparam(name, expanding=True)) for name in columns]
    return _LIST.where(_forgotten if forgotten else fragments.c.forget_time_us.is_(None), *wanted)


def expiring(connection: Connection, now_us: int, limit: int) -> list[tuple[str, str]]:
    rows = connection.execute(_EXPIRING, {"now": now_us, "limit": limit})
    return [(uid, name) for uid, name in rows]


def oldest_forgotten(connection: Connection) -> list[tuple[str, int]]:
    return [(uid, time_us) for uid, time_us in connection.execute(_OLDEST_FORGOTTEN)]


def purgeable(connection: Connection, uid: str, before_us: int, limit: int) -> list[str]:
    number = _number_of(connection, uid)
    if number is None:
        return []
    values = {"number": number, "before": before_us, "limit": limit}
    return list(connection.execute(_PURGEABLE, values).scalars())


def counts(connection: Connection, uid: str) -> Counts:
    number = _number_of(connection, uid)
    if number is None:
        return Counts()
    low, high = span(number)
    keys = {"low": low, "high": high}
    live: dict[str, int] = {}
    insights = forgotten = 0
    for tier, kind, gone, count in connection.execute(_TIERS, keys):
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


def recorded(connection: Connection, uid: str, after_revision: int, limit: int) -> list[Recorded]:
    number = _number_of(connection, uid)
    if number is None:
        return []
    low, high = span(number)
    found: list[Recorded] = []
    size = 0
    for row, time_us, blob in pages(connection, _EVENTS, low + max(after_revision + 1, 0), high, limit):
        size += len(blob)
        if found and size > EVENTS_BYTES_MAX:
            break
        found.append(Recorded(position(row), time_us, codec.decode_events(blob)))
    return found


# ---- answers, outbox, jobs


def answer(connection: Connection, request: str, now_us: int) -> Answer | None:
    row = connection.execute(_ANSWER, {"r": request, "since": now_us - ANSWER_KEPT_US}).one_or_none()
    return None if row is None else Answer(row.request, row.digest, row.response, row.time_us)


def outbox_entries(connection: Connection, limit: int, model: str | None) -> list[tuple[IndexEntry, Indexable | None]]:
    """What an entry's fragment is now, not what it was when the entry was made.

    Of several entries for a fragment, all get what the last gets: however they are grouped into upserts and
    deletions, the index ends where the journal is.
    """
    entries: list[IndexEntry] = []
    last: dict[tuple[str, str], Indexable | None] = {}
    for number, uid, name, deleted, key, space, vector in _outbox_rows(connection, limit, model):
        entries.append(IndexEntry(uid, name, bool(deleted), number))
        last[uid, name] = None if key is None else Indexable(space or "", vector)
    return [(entry, last[entry.memory, entry.fragment]) for entry in entries]


def _outbox_rows(connection: Connection, limit: int, model: str | None) -> Iterator[list[Any]]:
    after = 0
    while limit > 0:
        page = min(limit, PAGE_ROWS)
        rows = fetch(connection, _OUTBOX, {"after": after, "limit": page, "model": model})
        yield from rows
        if len(rows) < page:
            return
        after, limit = rows[-1][0], limit - page


def outbox_size(connection: Connection) -> int:
    return connection.execute(_OUTBOX_SIZE).scalar_one()


def outbox_last(connection: Connection) -> int:
    return connection.execute(_OUTBOX_LAST).scalar_one() or 0


def outbox_rows(connection: Connection, uids: Sequence[str]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for start in range(0, len(uids), IDS_MAX):
        rows = connection.execute(_OUTBOX_ROWS, {"uids": uids[start : start + IDS_MAX]})
        found |= {uid: (first, last) for uid, first, last in rows}
    return found


def indexable(connection: Connection, uid: str, model: str | None) -> list[str]:
    try:
        memory = memory_of(connection, uid)
    except Conflict:
        return []
    return [name for _, name in pages(connection, _INDEXABLE, *span(memory.number), model=model)]


def waiting_jobs(connection: Connection, limit: int) -> list[Job]:
    return [Job(*row) for row in connection.execute(_JOBS, {"limit": limit}).all()]
