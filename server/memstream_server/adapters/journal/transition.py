"""The writes that change what a memory holds: the transition's commit, access statistics, and the index's outbox."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    Delete,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    literal,
    select,
    update,
)

from memstream_server.adapters.journal import bulk, codec
from memstream_server.adapters.journal.prepared import run
from memstream_server.adapters.journal.schema import (
    anchors,
    fragments,
    jobs,
    key,
    memories,
    outbox,
    producers,
    receipts,
    requests,
    vectors,
)
from memstream_server.adapters.journal.writes import A_PRODUCER, check_room, find, log, owned, put_answer
from memstream_server.core.values import Fragment, Tier
from memstream_server.ports.journal import (
    Access,
    Anchor,
    Commit,
    Conflict,
    IndexEntry,
    Job,
    Row,
)

IDS_MAX = 500
"""Ids in one IN list."""

_FRAGMENTS = bulk.insertion(
    fragments,
    ("key",),
    # Access statistics belong to `touch` alone: what the RAM of the engine had when it wrote the row may be older
    # or newer than what was touched since, and either way would lose or double a count.
    "tier = excluded.tier, kind = excluded.kind, due_time_us = excluded.due_time_us, "
    "forget_time_us = excluded.forget_time_us, "
    "session = excluded.session, speaker = excluded.speaker, external_id = excluded.external_id, "
    "model = excluded.model, payload = excluded.payload, terms = coalesce(excluded.terms, fragments.terms)",
)
_VECTORS = bulk.insertion(vectors, ("key", "model"))
_RENEWED = "excluded.next_model IS NOT NULL OR excluded.model <> anchors.model"
_ANCHORS = bulk.insertion(
    anchors,
    ("memory", "id"),
    "vector = excluded.vector, enhancements = excluded.enhancements, model = excluded.model, "
    # What is not told of the other space stays, as long as this one's does: the content is the same.
    f"next_model = CASE WHEN {_RENEWED} THEN excluded.next_model ELSE anchors.next_model END, "
    f"next_vector = CASE WHEN {_RENEWED} THEN excluded.next_vector ELSE anchors.next_vector END",
)
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
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
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
    .returning(memories.c.number)
)
_RENAME = update(memories).where(memories.c.number == _number).values(namespace=bindparam("ns"), name=bindparam("n"))
_REFILL = (
    insert(outbox)
    .from_select(
        ["memory", "fragment", "deleted"],
        select(memories.c.uid, fragments.c.id, literal(False))
        .join(memories, memories.c.number == fragments.c.memory)
        .where(
            fragments.c.tier == Tier.LONG_TERM.value,
            fragments.c.forget_time_us.is_(None),
            exists().where(vectors.c.key == fragments.c.key),
        )
        .order_by(fragments.c.key),
    )
    .execution_options(preserve_rowcount=True)
)
_EMPTY = insert(outbox).from_select(
    ["memory", "fragment", "deleted"],
    select(memories.c.uid, fragments.c.id, literal(True))
    .join(memories, memories.c.number == fragments.c.memory)
    .where(fragments.c.tier == Tier.LONG_TERM.value, fragments.c.model != ""),
)
_CLEAR_UPSERTS = delete(outbox).where(outbox.c.deleted.is_(False))
_STORED = (
    update(producers)
    .where(A_PRODUCER)
    .values(stored=case((producers.c.stored < bindparam("s"), bindparam("s")), else_=producers.c.stored))
)

_AN_ID = re.compile(rb"(?=([0-9A-HJKMNP-TV-Z]{26}))")
"""Looked for at every byte, since what comes before an id may look like a part of it."""
_NAMESPACE = select(memories.c.namespace).where(memories.c.number == _number)
_ANSWERS = select(requests.c.request, requests.c.response).where(
    requests.c.request >= bindparam("low"), requests.c.request < bindparam("high")
)
_VOID = update(requests).where(requests.c.request == bindparam("r")).values(digest=b"", response=b"")
_COMPACT_ALL = delete(receipts).where(
    receipts.c.memory == _number,
    receipts.c.last_sequence
    <= select(producers.c.stored)
    .where(producers.c.memory == receipts.c.memory, producers.c.name == receipts.c.producer)
    .scalar_subquery(),
)

_SOME_FRAGMENTS = (fragments.c.memory == _number) & fragments.c.id.in_(_ids)
_REMOVE = (
    delete(vectors).where(vectors.c.key.in_(select(fragments.c.key).where(_SOME_FRAGMENTS))),
    delete(anchors).where(anchors.c.memory == _number, anchors.c.id.in_(_ids)),
    delete(fragments).where(_SOME_FRAGMENTS),
)
_RELEASE = bulk.Bulk("DELETE FROM anchors WHERE (memory, id) IN (VALUES ", 2, ")")
_CONSUME = bulk.Bulk("DELETE FROM observations WHERE key IN (VALUES ", 1, ")")
_UNVECTOR = delete(vectors).where(vectors.c.key.in_(_ids))
_FINISH = delete(jobs).where(jobs.c.memory == _number, jobs.c.id.in_(_ids))
_DONE = delete(outbox).where(outbox.c.id.in_(_ids))


def _delete(
    connection: Connection, statements: Sequence[Delete], ids: Sequence[Any], number: int | None = None
) -> None:
    for start in range(0, len(ids), IDS_MAX):
        values: dict[str, Any] = {"ids": ids[start : start + IDS_MAX]}
        if number is not None:
            values["m"] = number
        for statement in statements:
            connection.execute(statement, values)


def commit(connection: Connection, commit: Commit, now_us: int) -> None:
    """Advance the memory first: a stale owner is refused before anything was written."""
    number = _advance(connection, commit)
    _delete(connection, _REMOVE, commit.removed, number)
    _put_rows(connection, number, commit.rows)
    bulk.execute(connection, _RELEASE, [(number, id_) for id_ in commit.released])
    _put_anchors(connection, number, commit.anchors)
    bulk.execute(connection, _CONSUME, [(key(number, position),) for position in commit.stored_positions])
    for name, stored in commit.producers:
        run(connection, _STORED, {"m": number, "producer": name, "s": stored})
    _put_index(connection, commit.index)
    _delete(connection, (_FINISH,), commit.finish_jobs, number)
    _put_jobs(connection, number, commit.jobs)
    _forget_traces(connection, number, commit.erased)
    put_answer(connection, commit.answer, now_us)
    log(connection, number, commit.revision + 1, commit.time_us, commit.events)


def _forget_traces(connection: Connection, number: int, erased: Sequence[str]) -> None:
    """What was said of the erased elsewhere: in answers, and in the hashes that tell repeats from conflicts."""
    if not erased:
        return
    gone = {id_.encode() for id_ in erased}
    namespace = connection.execute(_NAMESPACE, {"m": number}).scalar_one()
    answers = connection.execute(_ANSWERS, {"low": f"{namespace}\n", "high": f"{namespace}\v"}).all()
    for request, response in answers:
        if not gone.isdisjoint(_AN_ID.findall(response)):
            connection.execute(_VOID, {"r": request})
    connection.execute(_COMPACT_ALL, {"m": number})


def _advance(connection: Connection, commit: Commit) -> int:
    """Compare and set; the memory's number."""
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
    number: int | None = run(connection, _ADVANCE, values).scalar_one_or_none()
    if number is None:
        raise Conflict(f"memory {commit.memory} is not at epoch {commit.epoch}, revision {commit.revision}")
    if commit.name is not None:
        check_room(connection, commit.name[0], commit.namespace_max)
        connection.execute(_RENAME, {"m": number, "ns": commit.name[0], "n": commit.name[1]})
    return number


def _put_rows(connection: Connection, number: int, rows: Sequence[Row]) -> None:
    bulk.execute(connection, _FRAGMENTS, [_fragment_row(number, row) for row in rows])
    # A fragment that says it has no vector has none: what an older content had must not be found again.
    stale = [
        key(number, row.fragment.position)
        for row in rows
        if row.replaces or (row.vector is None and not row.fragment.model)
    ]
    _delete(connection, (_UNVECTOR,), stale)
    given = [(key(number, row.fragment.position), row.fragment.model, row.vector) for row in rows if row.vector]
    beside = [(key(number, row.fragment.position), *row.beside) for row in rows if row.beside is not None]
    bulk.execute(connection, _VECTORS, given + beside)


def _fragment_row(number: int, row: Row) -> tuple[Any, ...]:
    fragment = row.fragment
    return (
        key(number, fragment.position),
        number,
        fragment.id,
        fragment.tier.value,
        fragment.kind.value,
        _due(fragment),
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


def _due(fragment: Fragment) -> int | None:
    """When its own expiry is to be acted on."""
    return None if fragment.pinned or fragment.forget_time_us is not None else fragment.expire_time_us


def _put_anchors(connection: Connection, number: int, held: Sequence[Anchor]) -> None:
    rows = [
        (
            *(number, anchor.id, anchor.vector, codec.encode_enhancements(anchor.enhancements), anchor.model),
            *(anchor.beside or (None, None)),
        )
        for anchor in held
    ]
    bulk.execute(connection, _ANCHORS, rows)


def _put_index(connection: Connection, entries: Sequence[IndexEntry]) -> None:
    bulk.execute(connection, _OUTBOX, [(entry.memory, entry.fragment, entry.delete) for entry in entries])


def _put_jobs(connection: Connection, number: int, work: Sequence[Job]) -> None:
    rows = [(job.id, number, job.type, job.payload, job.create_time_us, job.attempts) for job in work]
    bulk.execute(connection, _JOBS, rows)


def touch(connection: Connection, uid: str, accesses: Sequence[Access], epoch: int | None) -> None:
    number = find(connection, uid) if epoch is None else owned(connection, uid, epoch)
    merged: dict[str, tuple[int, int]] = {}  # UPDATE ... FROM applies only one of several rows for a fragment
    for access in accesses:
        count, time_us = merged.get(access.fragment, (0, 0))
        merged[access.fragment] = (count + access.count, max(time_us, access.time_us))
    bulk.execute(connection, _TOUCH, [(number, name, count, at) for name, (count, at) in merged.items()])


# ---- the outbox


def outbox_done(connection: Connection, ids: Sequence[int]) -> None:
    _delete(connection, (_DONE,), ids)


def outbox_enter(connection: Connection, entries: Sequence[IndexEntry]) -> None:
    _put_index(connection, entries)


def outbox_empty(connection: Connection) -> None:
    """Enter the removal of everything that an index may have under the memories' present uids."""
    connection.execute(_EMPTY)


def outbox_refill(connection: Connection) -> int:
    """The upserts that waited are covered by the new entries; deletions stay, for an index that was not empty."""
    connection.execute(_CLEAR_UPSERTS)
    return connection.execute(_REFILL).rowcount
