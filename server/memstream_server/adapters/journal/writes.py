"""One function per write, each inside a savepoint of the writer's transaction.

They raise the port's errors; what they did before raising is rolled back. Statements are built once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Delete,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    true,
    update,
)

from memstream_server.adapters.journal import bulk, codec
from memstream_server.adapters.journal.schema import (
    anchors,
    events,
    fragments,
    jobs,
    key,
    memories,
    meta,
    observations,
    outbox,
    producers,
    receipts,
    requests,
    span,
    vectors,
)
from memstream_server.core.events import Event
from memstream_server.core.values import Tier
from memstream_server.ports.journal import (
    Access,
    AlreadyExists,
    Anchor,
    Answer,
    Commit,
    Conflict,
    IndexEntry,
    Job,
    MemoryRecord,
    Producer,
    Receipt,
    Row,
    Space,
)

ANSWER_KEPT_US = 24 * 3600 * 1_000_000
"""How long the answer to a request_id is served again."""
SEQUENCES_KEPT = 100_000
"""Sequence numbers of a producer whose hashes are kept; far more than a client can have unacknowledged."""
IDS_MAX = 500
"""Ids in one IN list."""

_FRAGMENTS = bulk.insertion(
    fragments,
    ("key",),
    # Access statistics belong to `touch` alone: what the RAM of the engine had when it wrote the row may be older
    # or newer than what was touched since, and either way would lose or double a count.
    "tier = excluded.tier, kind = excluded.kind, forget_time_us = excluded.forget_time_us, "
    "session = excluded.session, speaker = excluded.speaker, external_id = excluded.external_id, "
    "model = excluded.model, payload = excluded.payload, terms = coalesce(excluded.terms, fragments.terms)",
)
_VECTORS = bulk.insertion(vectors, ("key", "model"))
_ANCHORS = bulk.insertion(anchors, ("memory", "id"))
_OUTBOX = bulk.insertion(outbox)
_JOBS = bulk.insertion(jobs)
_TOUCH = bulk.Bulk(
    "WITH touched (memory, id, added, at) AS (VALUES ",
    4,
    ") UPDATE fragments SET access_count = access_count + added,"
    " access_time_us = CASE WHEN access_time_us < at THEN at ELSE access_time_us END"
    " FROM touched WHERE fragments.id = touched.id AND fragments.memory = touched.memory",
)

_number: BindParameter[int] = bindparam("m")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_IDENTITY = (memories.c.number, memories.c.next_position)
_FIND = select(*_IDENTITY).where(memories.c.uid == bindparam("u"))
_OWNED = select(*_IDENTITY).where(memories.c.uid == bindparam("u"), memories.c.epoch == bindparam("e"))
_EXISTS = select(memories.c.uid).where(memories.c.namespace == bindparam("ns"), memories.c.name == bindparam("n"))
_OWN = update(memories).where(memories.c.uid == bindparam("u")).values(epoch=memories.c.epoch + 1)
_ADVANCE = (
    update(memories)
    .where(memories.c.uid == bindparam("u"), memories.c.epoch == bindparam("e"), memories.c.revision == bindparam("r"))
    .values(
        revision=memories.c.revision + 1,
        next_position=case(
            (memories.c.next_position < bindparam("next"), bindparam("next")), else_=memories.c.next_position
        ),
        reflection_aggregate=func.coalesce(bindparam("aggregate"), memories.c.reflection_aggregate),
        policy=func.coalesce(bindparam("new_policy"), memories.c.policy),
        labels=func.coalesce(bindparam("new_labels"), memories.c.labels),
        update_time_us=func.coalesce(bindparam("updated"), memories.c.update_time_us),
    )
)
_RESERVE = update(memories).where(memories.c.number == _number).values(next_position=bindparam("next"))
_DELETE_MEMORY = delete(memories).where(memories.c.number == _number)
_BY_KEY = tuple(delete(t).where(t.c.key.between(_low, _high)) for t in (fragments, vectors, observations, events))
_BY_NUMBER = tuple(delete(t).where(t.c.memory == _number) for t in (producers, receipts, anchors, jobs))
_UNINDEX = insert(outbox).from_select(
    ["memory", "fragment", "deleted"],
    select(bindparam("u"), fragments.c.id, true()).where(
        fragments.c.key.between(_low, _high), fragments.c.tier == Tier.LONG_TERM.value, fragments.c.model != ""
    ),
)
_REFILL = insert(outbox).from_select(
    ["memory", "fragment", "deleted"],
    select(memories.c.uid, fragments.c.id, literal(False))
    .join(memories, memories.c.number == fragments.c.memory)
    .join(vectors, (vectors.c.key == fragments.c.key) & (vectors.c.model == fragments.c.model))
    .where(fragments.c.tier == Tier.LONG_TERM.value, fragments.c.forget_time_us.is_(None))
    .order_by(fragments.c.key),
)
_CLEAR_UPSERTS = delete(outbox).where(outbox.c.deleted.is_(False))

_A_PRODUCER = (producers.c.memory == _number) & (producers.c.name == bindparam("producer"))
_REOPEN = update(producers).where(_A_PRODUCER).values(epoch=producers.c.epoch + 1)
_PRODUCER = select(producers.c.epoch, producers.c.received, producers.c.stored).where(_A_PRODUCER)
_COMPACT = delete(receipts).where(
    receipts.c.memory == _number,
    receipts.c.producer == bindparam("producer"),
    receipts.c.last_sequence <= bindparam("before"),
)
_RECEIVED = (
    update(producers)
    .where(_A_PRODUCER, producers.c.epoch == bindparam("e"), producers.c.received == bindparam("first") - 1)
    .values(
        received=bindparam("last"),
        # A batch with nothing to store is stored as soon as all before it is.
        stored=case(
            (bindparam("nothing") & (producers.c.stored == producers.c.received), bindparam("last")),
            else_=producers.c.stored,
        ),
    )
)
_STORED = (
    update(producers)
    .where(_A_PRODUCER)
    .values(stored=case((producers.c.stored < bindparam("s"), bindparam("s")), else_=producers.c.stored))
)
FIRST_PENDING = select(func.min(observations.c.first_sequence)).where(
    observations.c.key.between(_low, _high), observations.c.producer == bindparam("producer")
)

_SOME_FRAGMENTS = (fragments.c.memory == _number) & fragments.c.id.in_(_ids)
_REMOVE = (
    delete(vectors).where(vectors.c.key.in_(select(fragments.c.key).where(_SOME_FRAGMENTS))),
    delete(anchors).where(anchors.c.memory == _number, anchors.c.id.in_(_ids)),
    delete(fragments).where(_SOME_FRAGMENTS),
)
_RELEASE = delete(anchors).where(anchors.c.memory == _number, anchors.c.id.in_(_ids))
_CONSUME = delete(observations).where(observations.c.key.in_(_ids))
_UNVECTOR = delete(vectors).where(vectors.c.key.in_(_ids))
_FINISH = delete(jobs).where(jobs.c.memory == _number, jobs.c.id.in_(_ids))
_DONE = delete(outbox).where(outbox.c.id.in_(_ids))
_FORGET_ANSWERS = delete(requests).where(requests.c.time_us < bindparam("before"))
_ANSWERED = select(requests.c.request).where(requests.c.request == bindparam("r"))
_META = update(meta).where(meta.c.name == bindparam("n")).values(value=bindparam("v"))


def _find(connection: Connection, uid: str) -> tuple[int, int]:
    found = connection.execute(_FIND, {"u": uid}).one_or_none()
    if found is None:
        raise Conflict(f"memory {uid} is gone")
    return found[0], found[1]


def _owned(connection: Connection, uid: str, epoch: int) -> tuple[int, int]:
    found = connection.execute(_OWNED, {"u": uid, "e": epoch}).one_or_none()
    if found is None:
        raise Conflict(f"memory {uid} is gone or no longer at epoch {epoch}")
    return found[0], found[1]


def _delete(
    connection: Connection, statements: Sequence[Delete], ids: Sequence[Any], number: int | None = None
) -> None:
    for start in range(0, len(ids), IDS_MAX):
        values: dict[str, Any] = {"ids": ids[start : start + IDS_MAX]}
        if number is not None:
            values["m"] = number
        for statement in statements:
            connection.execute(statement, values)


# ---- the store itself and its memories


def set_meta(connection: Connection, name: str, value: str) -> None:
    if connection.execute(_META, {"n": name, "v": value}).rowcount == 0:
        connection.execute(insert(meta), {"name": name, "value": value})


def set_space(connection: Connection, space: Space) -> None:
    set_meta(connection, "space", codec.encode_space(space))


def create_memory(
    connection: Connection, record: MemoryRecord, happened: tuple[Event, ...], answer: Answer | None, now_us: int
) -> None:
    if connection.execute(_EXISTS, {"ns": record.namespace, "n": record.name}).first() is not None:
        raise AlreadyExists(f"memory {record.namespace}/{record.name} exists")
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
        },
    ).scalar_one()
    _log(connection, number, 1, record.create_time_us, happened)
    _put_answer(connection, answer, now_us)


def delete_memory(connection: Connection, uid: str, answer: Answer | None, now_us: int) -> None:
    number, _ = _find(connection, uid)
    low, high = span(number)
    connection.execute(_UNINDEX, {"u": uid, "low": low, "high": high})
    for statement in _BY_KEY:
        connection.execute(statement, {"low": low, "high": high})
    for statement in _BY_NUMBER:
        connection.execute(statement, {"m": number})
    connection.execute(_DELETE_MEMORY, {"m": number})
    _put_answer(connection, answer, now_us)


def own(connection: Connection, uid: str) -> None:
    if connection.execute(_OWN, {"u": uid}).rowcount != 1:
        raise Conflict(f"memory {uid} is gone")


# ---- the way in


def open_producer(connection: Connection, uid: str, epoch: int, name: str) -> Producer:
    number, _ = _owned(connection, uid, epoch)
    who = {"m": number, "producer": name}
    if connection.execute(_REOPEN, who).rowcount == 0:
        connection.execute(insert(producers), {"memory": number, "name": name, "epoch": 1, "received": 0, "stored": 0})
    raised, received, stored = connection.execute(_PRODUCER, who).one()
    connection.execute(_COMPACT, who | {"before": received - SEQUENCES_KEPT})
    low, high = span(number)
    pending = connection.execute(FIRST_PENDING, {"low": low, "high": high, "producer": name}).scalar_one()
    return Producer(name, raised, received, stored_up_to(received, stored, pending))


def stored_up_to(received: int, stored: int, first_pending: int | None) -> int:
    """The last sequence number up to which all is stored or rejected, given the first one still pending.

    Derived, because the last batches may have been rejected whole: nothing of them is ever stored, so no commit
    says that they are done.
    """
    return max(stored, received if first_pending is None else first_pending - 1)


def receive(connection: Connection, receipt: Receipt) -> None:
    number, next_position = _owned(connection, receipt.memory, receipt.epoch)
    if receipt.producer:
        _advance_producer(connection, number, receipt)
    if not receipt.fragments:
        return
    after = 1 + max(fragment.position for fragment in receipt.fragments)
    if after > next_position:
        connection.execute(_RESERVE, {"m": number, "next": after})
    connection.execute(
        insert(observations),
        {
            "key": key(number, receipt.position),
            "memory": number,
            "producer": receipt.producer,
            "first_sequence": receipt.first_sequence,
            "count": len(receipt.fragments),
            "payload": codec.encode_receipt(receipt),
        },
    )


def _advance_producer(connection: Connection, number: int, receipt: Receipt) -> None:
    last = receipt.first_sequence + len(receipt.hashes) - 1
    moved = {
        "m": number,
        "producer": receipt.producer,
        "e": receipt.producer_epoch,
        "first": receipt.first_sequence,
        "last": last,
        "nothing": not receipt.fragments,
    }
    if connection.execute(_RECEIVED, moved).rowcount != 1:
        raise Conflict(
            f"producer {receipt.producer} is not at epoch {receipt.producer_epoch}, expecting {receipt.first_sequence}"
        )
    connection.execute(
        insert(receipts),
        {
            "memory": number,
            "producer": receipt.producer,
            "last_sequence": last,
            "first_sequence": receipt.first_sequence,
            "hashes": codec.encode_hashes(receipt.hashes),
            "rejections": codec.encode_rejections(receipt.rejections),
        },
    )


# ---- transitions


def commit(connection: Connection, commit: Commit, now_us: int) -> None:
    """Advance the memory first: a stale owner is refused before anything was written."""
    number, _ = _find(connection, commit.memory)
    _advance(connection, commit)
    _delete(connection, _REMOVE, commit.removed, number)
    _put_rows(connection, number, commit.rows)
    _delete(connection, (_RELEASE,), commit.released, number)
    _put_anchors(connection, number, commit.anchors)
    _delete(connection, (_CONSUME,), [key(number, position) for position in commit.stored_positions])
    for name, stored in commit.producers:
        connection.execute(_STORED, {"m": number, "producer": name, "s": stored})
    _put_index(connection, commit.index)
    _delete(connection, (_FINISH,), commit.finish_jobs, number)
    _put_jobs(connection, number, commit.jobs)
    _put_answer(connection, commit.answer, now_us)
    _log(connection, number, commit.revision + 1, commit.time_us, commit.events)


def _advance(connection: Connection, commit: Commit) -> None:
    described = commit.policy is not None or commit.labels is not None
    values = {
        "u": commit.memory,
        "e": commit.epoch,
        "r": commit.revision,
        "next": 1 + max((row.fragment.position for row in commit.rows), default=-1),
        "aggregate": commit.reflection_aggregate,
        "new_policy": None if commit.policy is None else codec.encode_policy(commit.policy),
        "new_labels": None if commit.labels is None else codec.encode_labels(commit.labels),
        "updated": commit.time_us if described else None,
    }
    if connection.execute(_ADVANCE, values).rowcount != 1:
        raise Conflict(f"memory {commit.memory} is not at epoch {commit.epoch}, revision {commit.revision}")


def _put_rows(connection: Connection, number: int, rows: Sequence[Row]) -> None:
    bulk.execute(connection, _FRAGMENTS, [_fragment_row(number, row) for row in rows])
    bulk.execute(
        connection,
        _VECTORS,
        [
            (key(number, row.fragment.position), row.fragment.model, row.vector)
            for row in rows
            if row.vector is not None
        ],
    )
    # A fragment that says it has no vector has none: what an older content had must not be found again.
    bare = [key(number, row.fragment.position) for row in rows if row.vector is None and not row.fragment.model]
    _delete(connection, (_UNVECTOR,), bare)


def _fragment_row(number: int, row: Row) -> tuple[Any, ...]:
    fragment = row.fragment
    return (
        key(number, fragment.position),
        number,
        fragment.id,
        fragment.tier.value,
        fragment.kind.value,
        fragment.forget_time_us,
        fragment.access_count,
        fragment.access_time_us,
        fragment.session,
        fragment.speaker,
        fragment.external_id or None,
        fragment.model,
        codec.encode_fragment(fragment),
        codec.encode_terms(row.terms),
    )


def _put_anchors(connection: Connection, number: int, held: Sequence[Anchor]) -> None:
    rows = [(number, anchor.id, anchor.vector, codec.encode_enhancements(anchor.enhancements)) for anchor in held]
    bulk.execute(connection, _ANCHORS, rows)


def _put_index(connection: Connection, entries: Sequence[IndexEntry]) -> None:
    bulk.execute(connection, _OUTBOX, [(entry.memory, entry.fragment, entry.delete) for entry in entries])


def _put_jobs(connection: Connection, number: int, work: Sequence[Job]) -> None:
    rows = [(job.id, number, job.type, job.payload, job.create_time_us, job.attempts) for job in work]
    bulk.execute(connection, _JOBS, rows)


def _put_answer(connection: Connection, answer: Answer | None, now_us: int) -> None:
    if answer is None:
        return
    connection.execute(_FORGET_ANSWERS, {"before": now_us - ANSWER_KEPT_US})
    if connection.execute(_ANSWERED, {"r": answer.request}).first() is not None:
        raise Conflict("this request was answered meanwhile: serve that answer")
    row = {
        "request": answer.request,
        "digest": answer.digest,
        "time_us": answer.time_us,
        "response": answer.response,
    }
    connection.execute(insert(requests), row)


def _log(connection: Connection, number: int, revision: int, time_us: int, happened: tuple[Event, ...]) -> None:
    row = {"key": key(number, revision), "time_us": time_us, "payload": codec.encode_events(happened)}
    connection.execute(insert(events), row)


def touch(connection: Connection, uid: str, accesses: Sequence[Access]) -> None:
    number, _ = _find(connection, uid)
    merged: dict[str, tuple[int, int]] = {}  # UPDATE ... FROM applies only one of several rows for a fragment
    for access in accesses:
        count, time_us = merged.get(access.fragment, (0, 0))
        merged[access.fragment] = (count + access.count, max(time_us, access.time_us))
    bulk.execute(connection, _TOUCH, [(number, name, count, at) for name, (count, at) in merged.items()])


# ---- the outbox


def outbox_done(connection: Connection, ids: Sequence[int]) -> None:
    _delete(connection, (_DONE,), ids)


def outbox_refill(connection: Connection) -> int:
    """The upserts that waited are covered by the new entries; deletions stay, for an index that was not empty."""
    connection.execute(_CLEAR_UPSERTS)
    return connection.execute(_REFILL).rowcount
