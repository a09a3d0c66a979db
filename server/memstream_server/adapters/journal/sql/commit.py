"""The commit of transitions, and the write of access statistics."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, TypeAlias

from sqlalchemy import BindParameter, Connection, Delete, bindparam, delete, func, select, update

from memstream_server.adapters.journal.blocks import erase_sources
from memstream_server.adapters.journal.sql import bulk, codec, conflicts, outbox
from memstream_server.adapters.journal.sql.answers import put_answer, put_answers, replace_answers
from memstream_server.adapters.journal.sql.bulk import IDS_MAX
from memstream_server.adapters.journal.sql.joint_writes import cost_rows, write_together
from memstream_server.adapters.journal.sql.recall_receipts import erase_evidence, keep_receipt
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    fragments,
    jobs,
    memories,
    producers,
    receipts,
    requests,
    row_key,
    vectors,
    versions,
)
from memstream_server.adapters.journal.sql.vector_forms import COMPUTED, encode_anchor, encode_vector
from memstream_server.adapters.journal.sql.versions import drop_versions, forget_versions, keep_versions
from memstream_server.adapters.journal.sql.writes import (
    append_events,
    check_namespace_limit,
    count_received,
    drop_labels,
    not_owned_error,
    put_labels,
)
from memstream_server.core.events import EventType
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.records import batch_request
from memstream_server.ports.journal.rows import Row
from memstream_server.ports.journal.writing import Accesses, Commit

_FRAGMENTS = bulk.build_insert(
    fragments,
    ("key",),
    # Only `touch` writes access statistics: the engine's RAM may be older or newer than what was touched since, and
    # writing it here would lose or double a count.
    "tier = excluded.tier, kind = excluded.kind, due_time_us = excluded.due_time_us, "
    "forget_time_us = excluded.forget_time_us, "
    "session = excluded.session, speaker = excluded.speaker, external_id = excluded.external_id, "
    "model = excluded.model, payload = excluded.payload, terms = coalesce(excluded.terms, fragments.terms)",
)
_VECTORS = bulk.build_insert(vectors, ("key", "model"))
_RENEWED = "excluded.next_model IS NOT NULL OR excluded.model <> anchors.model"
_ANCHORS = bulk.build_insert(
    anchors,
    ("memory", "id"),
    # KEPT: of the space that the memory is in now, which may have been the next one when the anchor was written.
    "vector = CASE WHEN length(excluded.vector) <> 1 OR excluded.vector IS NULL THEN excluded.vector"
    " WHEN anchors.model = excluded.model THEN anchors.vector"
    " WHEN anchors.next_model = excluded.model THEN anchors.next_vector END, "
    "enhancements = excluded.enhancements, model = excluded.model, "
    # A commit without a vector of the other space keeps the stored one while the content is the same.
    f"next_model = CASE WHEN {_RENEWED} THEN excluded.next_model ELSE anchors.next_model END, "
    f"next_vector = CASE WHEN {_RENEWED} THEN excluded.next_vector ELSE anchors.next_vector END",
)
_JOBS = bulk.build_insert(jobs)
_TOUCH = bulk.build_update(
    "fragments",
    ("memory", "id", "added", "at"),
    "access_count = access_count + given.added,"
    " access_time_us = CASE WHEN access_time_us < given.at THEN given.at ELSE access_time_us END",
    "fragments.id = given.id AND fragments.memory = given.memory",
)
_OWNED = bulk.Bulk(  # without a lock: a count is valid even if another process takes ownership meanwhile
    "WITH given (uid, epoch) AS (VALUES ",
    2,
    ") SELECT memories.uid, memories.number FROM given"
    " JOIN memories ON memories.uid = given.uid AND memories.epoch = given.epoch",
)
_ADVANCE = bulk.build_update(
    "memories",
    ("uid", "epoch", "revision", "after", "added", "at", "aggregate"),
    "revision = memories.revision + 1, fragments = memories.fragments + given.added, change_time_us = given.at, "
    "next_position = CASE WHEN memories.next_position < given.after THEN given.after ELSE memories.next_position END, "
    # PostgreSQL types a column of only NULL as text.
    "reflection_aggregate = coalesce(CAST(given.aggregate AS double precision), memories.reflection_aggregate)",
    "memories.uid = given.uid AND memories.epoch = given.epoch AND memories.revision = given.revision",
    " RETURNING memories.uid, memories.number",
)
_STORED = bulk.build_update(
    "producers",
    ("memory", "name", "stored"),
    "stored = CASE WHEN producers.stored < given.stored THEN given.stored ELSE producers.stored END",
    "producers.memory = given.memory AND producers.name = given.name",
)
_OUTCOMES = bulk.build_update(
    "receipts",
    ("memory", "producer", "last", "outcomes"),
    "outcomes = given.outcomes",
    "receipts.memory = given.memory AND receipts.producer = given.producer AND receipts.last_sequence = given.last",
)

_number: BindParameter[int] = bindparam("m")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_DESCRIBE = (
    update(memories)
    .where(memories.c.number == _number)
    .values(
        policy=func.coalesce(bindparam("new_policy"), memories.c.policy),
        labels=func.coalesce(bindparam("new_labels"), memories.c.labels),
        update_time_us=bindparam("updated"),
    )
)
_RENAME = update(memories).where(memories.c.number == _number).values(namespace=bindparam("ns"), name=bindparam("n"))
_AN_ID = re.compile(rb"(?=([0-9A-HJKMNP-TV-Z]{26}))")
"""Matched at every byte, since the bytes before an id may look like a part of it."""
_NAMESPACE = select(memories.c.namespace).where(memories.c.number == _number)
_NAMED = select(memories.c.namespace, memories.c.name, memories.c.labels).where(memories.c.number == _number)
_ANSWERS = select(requests.c.request, requests.c.response).where(
    requests.c.request >= bindparam("low"), requests.c.request < bindparam("high")
)
_UNHASH = (
    update(requests)
    .where(requests.c.request >= bindparam("low"), requests.c.request < bindparam("high"))
    .where(requests.c.digest != b"", requests.c.response != b"")
    .values(digest=b"")
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
_KEYS = select(fragments.c.key).where(_SOME_FRAGMENTS)
_REMOVE = (
    delete(vectors).where(vectors.c.key.in_(_KEYS)),
    delete(versions).where(versions.c.key.in_(_KEYS)),
    delete(anchors).where(anchors.c.memory == _number, anchors.c.id.in_(_ids)),
    delete(fragments).where(_SOME_FRAGMENTS),
)
_RELEASE = bulk.Bulk(  # SQLite scans the table for (memory, id) IN (VALUES ...) with more than one row
    "WITH given (memory, id) AS (VALUES ",
    2,
    ") DELETE FROM anchors WHERE (memory, id) IN (SELECT memory, id FROM given)",
)
_CONSUME = bulk.Bulk("DELETE FROM observations WHERE key IN (VALUES ", 1, ")")
_UNVECTOR = delete(vectors).where(vectors.c.key.in_(_ids))
_FINISH = delete(jobs).where(jobs.c.memory == _number, jobs.c.id.in_(_ids))


def _delete_by_id(
    connection: Connection, statements: Sequence[Delete], ids: Sequence[Any], number: int | None = None
) -> None:
    for start in range(0, len(ids), IDS_MAX):
        values: dict[str, Any] = {"ids": ids[start : start + IDS_MAX]}
        if number is not None:
            values["m"] = number
        for statement in statements:
            connection.execute(statement, values)


def cost_of(commit: Commit) -> tuple[int, bool]:
    """(rows that it writes, about; whether it adds data)."""
    rows = 2 + 2 * (len(commit.rows) + len(commit.receipts))
    rows += len(commit.anchors) + len(commit.index) + len(commit.removed)
    if commit.joint is not None:
        rows += sum(cost_rows(write, commit.joint.stored) for write in commit.joint.writes)
    adds = commit.rows or commit.anchors or commit.jobs or commit.receipts or commit.recall_receipt or commit.joint
    return rows, bool(adds)


Numbered: TypeAlias = tuple[int, Commit]
"""A commit with the number of its memory."""


def commit_transitions(connection: Connection, given: Sequence[Commit]) -> None:
    """Commit transitions of different memories. Advances revisions first: a stale owner fails before any write."""
    numbers = _advance_revisions(connection, given)
    commits = [(numbers[one.memory], one, list_filled(one)) for one in given]
    # Part by part, not commit by commit: the rows of all memories of a group go in one statement.
    for part in PARTS:
        some: list[Numbered] = []
        for number, one, filled in commits:
            if not part.fields.isdisjoint(filled):
                some.append((number, one))
        if some:
            part.write(connection, some)
    # Each revision has a row in the log, even one without an event.
    append_events(connection, [(number, one.revision + 1, one.time_us, one.events) for number, one, _ in commits])


@dataclass(frozen=True, slots=True)
class CommitPart:
    """What commits write of one kind. Only commits that fill one of its fields enter it."""

    fields: frozenset[str]
    write: Callable[[Connection, Sequence[Numbered]], None]


def list_filled(commit: Commit) -> list[str]:
    """The fields of a commit that are not at their default."""
    return [name for name, default in _DEFAULTS.items() if getattr(commit, name) is not default]


def _receive_batches(connection: Connection, commits: Sequence[Numbered]) -> None:
    received = [(number, receipt) for number, one in commits for receipt in one.receipts]
    for some in bulk.split_rounds(received, lambda one: (one[0], one[1].producer)):
        count_received(connection, some, stored=True)


def _erase_evidence(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        erase_evidence(connection, number, one.erased_evidence)
        erase_sources(connection, number, one.erased_evidence)


def _remove_fragments(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        _delete_by_id(connection, _REMOVE, one.removed, number)
        conflicts.remove_conflicts(connection, number, one.removed)


def _keep_versions(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        keep_versions(connection, number, one)


def _forget_versions(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        forget_versions(connection, number, one.forgotten_versions)


def _release_anchors(connection: Connection, commits: Sequence[Numbered]) -> None:
    bulk.write_rows(connection, _RELEASE, [(number, id_) for number, one in commits for id_ in one.released])


def _consume_receipts(connection: Connection, commits: Sequence[Numbered]) -> None:
    consumed = [(row_key(number, position),) for number, one in commits for position in one.stored_positions]
    bulk.write_rows(connection, _CONSUME, consumed)


def _advance_stored(connection: Connection, commits: Sequence[Numbered]) -> None:
    bulk.write_rows(connection, _STORED, [(number, *stored) for number, one in commits for stored in one.producers])


def _keep_outcomes(connection: Connection, commits: Sequence[Numbered]) -> None:
    kept = [(number, some) for number, one in commits for some in one.outcomes]
    encoded = [(number, it.producer, it.last_sequence, codec.encode_record(it.each)) for number, it in kept]
    bulk.write_rows(connection, _OUTCOMES, encoded)


def _put_batch_answers(connection: Connection, commits: Sequence[Numbered]) -> None:
    """The answers of calls whose batches these commits store. Raises AnswerExists for a batch that they also
    receive, if its request was answered before.
    """
    at_once = {receipt.answer.request for _, one in commits for receipt in one.receipts if receipt.answer is not None}
    answers = [answer for _, one in commits for answer in one.answers]
    put_answers(connection, [answer for answer in answers if answer.request in at_once])
    # The receipt of a batch that was received earlier has entered an answer without a response: this one completes it.
    replace_answers(connection, [answer for answer in answers if answer.request not in at_once])


def _end_conflicts(connection: Connection, commits: Sequence[Numbered]) -> None:
    ended = [(n, event) for n, one in commits for event in one.events if event.type is EventType.CONFLICT_ENDED]
    if ended:
        conflicts.end_conflicts(connection, ended)


def _enter_index(connection: Connection, commits: Sequence[Numbered]) -> None:
    outbox.enter_entries(connection, [entry for _, one in commits for entry in one.index])


def _finish_jobs(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        _delete_by_id(connection, (_FINISH,), one.finish_jobs, number)


def _keep_recall_receipts(connection: Connection, commits: Sequence[Numbered]) -> None:
    for number, one in commits:
        keep_receipt(connection, number, one)


def _put_answer(connection: Connection, commits: Sequence[Numbered]) -> None:
    for _, one in commits:
        put_answer(connection, one.answer)


def _write_joint(connection: Connection, commits: Sequence[Numbered]) -> None:
    for _, one in commits:
        if one.joint is not None:
            write_together(connection, one.joint)


def _erase_traces(connection: Connection, commits: Sequence[Numbered]) -> None:
    """Remove traces of erased fragments: stored answers that name them, and the hashes that detect repeats.

    Answers to ObserveBatch hold no content and may be many: all digests of a memory's answers are cleared, like its
    receipts.
    """
    for number, one in commits:
        gone = {id_.encode() for id_ in one.erased}
        namespace = connection.execute(_NAMESPACE, {"m": number}).scalar_one()
        batches, batch = batch_request(namespace), batch_request(namespace, one.memory)
        for low, high in ((f"{namespace}\n", f"{batches}\n"), (f"{batches}\v", f"{namespace}\v")):
            for request, response in connection.execute(_ANSWERS, {"low": low, "high": high}).all():
                if not gone.isdisjoint(_AN_ID.findall(response)):
                    connection.execute(_VOID, {"r": request})
        connection.execute(_UNHASH, {"low": f"{batch}\n", "high": f"{batch}\v"})
        connection.execute(_COMPACT_ALL, {"m": number})


def _advance_revisions(connection: Connection, given: Sequence[Commit]) -> dict[str, int]:
    """Compare and set revision and epoch; the memories' numbers by uid."""
    rows = [
        (
            *(one.memory, one.epoch, one.revision),
            *(_next_position(one), one.added, one.time_us, one.reflection_aggregate),
        )
        for one in given
    ]
    numbers: dict[str, int] = {row[0]: row[1] for row in bulk.write_rows(connection, _ADVANCE, rows, returns=True)}
    for one in given:
        if one.memory not in numbers:
            raise StaleWrite(f"memory {one.memory} is not at epoch {one.epoch}, revision {one.revision}")
    return numbers


def _next_position(commit: Commit) -> int:
    """After the positions that the commit uses."""
    used = [row.fragment.position for row in commit.rows]
    for receipt in commit.receipts:
        used += [one.position for one in receipt.fragments]
    return 1 + max(used, default=-1)


def _update_records(connection: Connection, commits: Sequence[Numbered]) -> None:
    """Update policy, labels and name, those that a commit changes."""
    for number, commit in commits:
        if commit.policy is not None or commit.labels is not None:
            values = {
                "m": number,
                "new_policy": None if commit.policy is None else codec.encode_policy(commit.policy),
                "new_labels": None if commit.labels is None else codec.encode_labels(commit.labels),
                "updated": commit.time_us,
            }
            connection.execute(_DESCRIBE, values)
            if commit.policy is not None and not commit.policy.history.versions:
                drop_versions(connection, number)
        if commit.name is not None:
            check_namespace_limit(connection, commit.name[0], commit.namespace_max)
            connection.execute(_RENAME, {"m": number, "ns": commit.name[0], "n": commit.name[1]})
        if commit.name is not None or commit.labels is not None:
            namespace, name, labels = connection.execute(_NAMED, {"m": number}).one()
            drop_labels(connection, number)
            put_labels(connection, number, namespace, name, codec.decode_labels(labels))


def _put_rows(connection: Connection, commits: Sequence[Numbered]) -> None:
    given = [(number, row) for number, one in commits for row in one.rows]
    bulk.write_rows(connection, _FRAGMENTS, [_fragment_row(number, row) for number, row in given])
    stale: list[int] = []
    rewritten: dict[int, list[str]] = {}
    encoded: list[tuple[int, str, bytes]] = []
    for number, row in given:
        at, model = row_key(number, row.fragment.position), row.fragment.model
        if row.replaces or (row.vector is None and not model):
            stale.append(at)  # without a model it has no vector: one of earlier content must not be found
        if row.replaces:
            rewritten.setdefault(number, []).append(row.fragment.id)
        if row.vector:
            encoded.append((at, model, _encode(row, model, row.vector)))
        if row.beside is not None:
            encoded.append((at, row.beside[0], _encode(row, *row.beside)))
    _delete_by_id(connection, (_UNVECTOR,), stale)
    bulk.write_rows(connection, _VECTORS, encoded)
    for number, ids in rewritten.items():
        conflicts.remove_conflicts(connection, number, ids)


def _encode(row: Row, space: str, vector: bytes) -> bytes:
    return COMPUTED if row.computed == space else encode_vector(vector)


def _fragment_row(number: int, row: Row) -> tuple[Any, ...]:
    fragment = row.fragment
    return (
        row_key(number, fragment.position),
        number,
        fragment.id,
        fragment.tier.value,
        fragment.kind.value,
        _due_time_us(fragment),
        fragment.forget_time_us,
        fragment.access_count,
        fragment.access_time_us,
        fragment.session,
        fragment.speaker,
        fragment.external_id or None,
        fragment.model,
        codec.encode_record(fragment),
        codec.encode_terms(row.terms),
    )


def _due_time_us(fragment: Fragment) -> int | None:
    """Expiry time; None if forgotten or pinned."""
    return None if fragment.pinned or fragment.forget_time_us is not None else fragment.expire_time_us


def _put_anchors(connection: Connection, commits: Sequence[Numbered]) -> None:
    rows = [
        (
            *(number, anchor.id, encode_anchor(anchor.vector, anchor.origin)),
            *(codec.encode_record(anchor.enhancements), anchor.model),
            *((None, None) if beside is None else (beside[0], encode_anchor(beside[1], anchor.origin_beside))),
        )
        for number, one in commits
        for anchor in one.anchors
        for beside in (anchor.beside,)
    ]
    bulk.write_rows(connection, _ANCHORS, rows)


def _put_jobs(connection: Connection, commits: Sequence[Numbered]) -> None:
    rows = [
        (job.id, number, job.type, job.payload, job.create_time_us, job.attempts)
        for number, one in commits
        for job in one.jobs
    ]
    bulk.write_rows(connection, _JOBS, rows)


PARTS = tuple(
    CommitPart(frozenset(fields), write)
    for fields, write in (
        (("receipts",), _receive_batches),
        (("erased_evidence",), _erase_evidence),  # while the fragments and their versions are there
        (("removed",), _remove_fragments),
        (("replaced",), _keep_versions),  # before the rows that replace what they copy
        (("forgotten_versions",), _forget_versions),
        (("rows",), _put_rows),
        (("released",), _release_anchors),
        (("anchors",), _put_anchors),
        (("stored_positions",), _consume_receipts),
        (("producers",), _advance_stored),
        (("outcomes",), _keep_outcomes),
        (("answers",), _put_batch_answers),
        (("index",), _enter_index),
        (("events",), _end_conflicts),
        (("suspicions",), conflicts.enter_conflicts),
        (("resolutions",), conflicts.resolve_conflicts),
        (("jobs",), _put_jobs),
        (("policy", "labels", "name"), _update_records),
        (("recall_receipt", "policy"), _keep_recall_receipts),
        (("finish_jobs",), _finish_jobs),
        (("erased",), _erase_traces),
        (("answer",), _put_answer),
        (("joint",), _write_joint),
    )
)
"""What a commit writes, in the order of the writes. A new field of a commit is a part here, or of MEMORY_FIELDS."""
MEMORY_FIELDS = frozenset(
    {
        *("memory", "epoch", "revision", "time_us", "added", "reflection_aggregate"),
        *("versions_max", "versions_since_us", "namespace_max", "recall_receipts_max"),
    }
)
"""Fields that are no part: those of the memory's row, which every commit updates, and bounds that parts apply."""
_DEFAULTS = {field.name: field.default for field in fields_of(Commit) if field.name not in MEMORY_FIELDS}


def touch_fragments(connection: Connection, given: Sequence[Accesses]) -> None:
    """Write access statistics of different memories."""
    owned = [(one.memory, one.epoch) for one in given]
    numbers: dict[str, int] = {row[0]: row[1] for row in bulk.write_rows(connection, _OWNED, owned, returns=True)}
    merged: dict[tuple[int, str], tuple[int, int]] = {}  # UPDATE ... FROM applies only one of several rows
    for one in given:
        if one.memory not in numbers:
            raise not_owned_error(one.memory, one.epoch)
        for access in one.each:
            which = numbers[one.memory], access.fragment
            count, time_us = merged.get(which, (0, 0))
            merged[which] = count + access.count, max(time_us, access.time_us)
    bulk.write_rows(connection, _TOUCH, [(*which, *added) for which, added in merged.items()])
