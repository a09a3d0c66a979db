"""Background work on stored vectors: in a space that is not in force, missing ones, and those of an earlier server.

Writes in a space that is not in force (find fragments without a vector, add vectors, delete a space's) raise no
revision: recall does not use a space until it is put in force.

Fragments without a vector in the space in force are found by the index of the fragments that were written without one,
so that a store in which nothing is missing is not scanned. Forgotten fragments do not count.

Vectors that an earlier server stored as float32 are converted to the forms of vector_forms.py, a slice at a time. A
vector that its text gives bit by bit is no longer stored, an anchor that has its fragment's vector refers to it, and
the vector of a model is rounded as new ones are (values.round_vectors). A client's vector stays as it is, and all
vectors of a memory that keeps receipts of recalls, whose replays compare every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import (
    BindParameter,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal_column,
    not_,
    null,
    or_,
    select,
    update,
)

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.bulk import IDS_MAX, fetch_pages, fetch_rows, split_ids
from memstream_server.adapters.journal.sql.fragment_reads import FRAGMENT, VECTORED
from memstream_server.adapters.journal.sql.reads import find_number, find_row, get_row
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    fragments,
    jobs,
    key_position,
    key_range,
    memories,
    outbox,
    recall_receipts,
    row_key,
    vectors,
)
from memstream_server.adapters.journal.sql.vector_forms import (
    COMPUTED,
    INDEXED,
    Computing,
    decode_bytes,
    encode_anchor,
    encode_vector,
    pack,
)
from memstream_server.core.values import Fragment, Tier, round_vectors
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.records import Job, Made
from memstream_server.ports.journal.rows import Origin

_model: BindParameter[str] = bindparam("model")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_HELD = and_(fragments.c.tier != Tier.LONG_TERM.value, fragments.c.forget_time_us.is_(None))
_COMPARABLE = exists().where(
    anchors.c.memory == fragments.c.memory,
    anchors.c.id == fragments.c.id,
    or_(
        and_(anchors.c.model == _model, anchors.c.vector.is_not(None)),
        and_(anchors.c.next_model == _model, anchors.c.next_vector.is_not(None)),
    ),
)
_STORED = (
    select(fragments.c.key, *FRAGMENT)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_LACKING = _STORED.where(not_(VECTORED))
_LACKING_COMPARED = _STORED.where(or_(not_(VECTORED), and_(_HELD, not_(_COMPARABLE))))
_VECTORED = select(func.count()).select_from(vectors).where(vectors.c.model == _model)
_FRAGMENTS = select(func.count()).select_from(fragments)
# Locked, so that no other process commits between the comparison of the version and the write.
_MEMORY = select(memories.c.number).where(memories.c.uid == bindparam("u")).with_for_update(key_share=True)
_NOW = select(fragments.c.id, *FRAGMENT).where(fragments.c.memory == bindparam("m"), fragments.c.id.in_(_ids))
_VECTORS = bulk.build_insert(vectors, ("key", "model"))
_ANCHORS = bulk.build_insert(
    anchors, ("memory", "id"), "next_model = excluded.next_model, next_vector = excluded.next_vector"
)
_OUTBOX = bulk.build_insert(outbox)
_REFUSED = bulk.build_update(
    "fragments", ("key", "payload"), "model = '', payload = given.payload", "fragments.key = given.key"
)
_KEYS = (
    select(vectors.c.key)
    .where(vectors.c.model == _model, vectors.c.key > bindparam("after"))
    .order_by(vectors.c.key)
    .limit(_limit)
)
_DROP = delete(vectors).where(vectors.c.model == _model, vectors.c.key.in_(_ids))
_DROP_COMPARED = (
    update(anchors)
    .where(or_(anchors.c.model == _model, anchors.c.next_model == _model))
    .values(
        model=case((anchors.c.model == _model, func.coalesce(anchors.c.next_model, "")), else_=anchors.c.model),
        vector=case((anchors.c.model == _model, anchors.c.next_vector), else_=anchors.c.vector),
        next_model=null(),
        next_vector=null(),
    )
)
_type: BindParameter[str] = bindparam("type")
# A literal: PostgreSQL uses a partial index only for a condition that it can compare with the index's.
_UNVECTORED = (fragments.c.model == literal_column("''")) & fragments.c.forget_time_us.is_(None) & not_(VECTORED)
_IN_ALL = select(func.count()).select_from(fragments).where(_UNVECTORED)
_IN_ONE = _IN_ALL.where(fragments.c.memory == bindparam("number"))
_BY_MEMORY = (
    select(memories.c.uid, func.count())
    .join(memories, memories.c.number == fragments.c.memory)
    .where(_UNVECTORED)
    .group_by(memories.c.uid)
    .order_by(memories.c.uid)
)
_WITHOUT_JOB = select(memories.c.uid, memories.c.number).where(
    memories.c.uid.in_(bindparam("uids", expanding=True)),
    not_(exists().where(jobs.c.memory == memories.c.number, jobs.c.type == _type)),
)
_JOBS = bulk.build_insert(jobs)
_WAITING = select(func.count()).select_from(jobs).where(jobs.c.type == _type)
_number: BindParameter[int] = bindparam("number")


def list_lacking(
    connection: Connection, uid: str, model: str, compared: bool, after: int, limit: int
) -> list[Fragment]:
    try:
        low, high = key_range(get_row(connection, uid).number)
    except StaleWrite:
        return []
    statement = _LACKING_COMPARED if compared else _LACKING
    rows = fetch_pages(connection, statement, low + max(after + 1, 0), high, limit, model=model)
    return [codec.decode_fragment(blob, count, at) for _, blob, count, at in rows]


def add_vectors(connection: Connection, uid: str, model: str, made: Sequence[Made]) -> int:
    number = connection.execute(_MEMORY, {"u": uid}).scalar_one_or_none()
    if number is None:
        return 0
    now: dict[str, Fragment] = {}
    for start in range(0, len(made), IDS_MAX):
        ids = [one.fragment for one in made[start : start + IDS_MAX]]
        for name, blob, count, at in connection.execute(_NOW, {"m": number, "ids": ids}):
            now[name] = codec.decode_fragment(blob, count, at)
    kept = [(one, now[one.fragment]) for one in made if one.fragment in now]
    kept = [(one, fragment) for one, fragment in kept if fragment.version == one.version]
    given = [(one, fragment) for one, fragment in kept if one.vector is not None]
    stored = [
        (row_key(number, each.position), model, COMPUTED if one.computed else encode_vector(one.vector))
        for one, each in given
        if one.vector is not None
    ]
    bulk.write_rows(connection, _VECTORS, stored)
    refused = [(row_key(number, each.position), each) for one, each in kept if one.vector is None and each.model]
    bulk.write_rows(connection, _REFUSED, [(key, codec.encode_record(each.but(model=""))) for key, each in refused])
    indexed = [each for _, each in given if each.tier is Tier.LONG_TERM and each.forget_time_us is None]
    bulk.write_rows(connection, _OUTBOX, [(uid, each.id, False) for each in indexed])
    held = [
        (number, one.fragment, None, codec.encode_record(()), "", model, _encode_content(one))
        for one, each in kept
        if one.content_vector is not None and each.tier is not Tier.LONG_TERM and each.forget_time_us is None
    ]
    bulk.write_rows(connection, _ANCHORS, held)
    return len(kept)


def _encode_content(made: Made) -> bytes | None:
    origin = Origin.CONTENT if made.computed else Origin.GIVEN
    return encode_anchor(made.content_vector, Origin.INDEXED if made.content_vector == made.vector else origin)


def count_vectors(connection: Connection, model: str) -> tuple[int, int]:
    there: int = connection.execute(_VECTORED, {"model": model}).scalar_one()
    return there, connection.execute(_FRAGMENTS).scalar_one()


def list_vector_keys(connection: Connection, model: str, after: int, limit: int) -> list[int]:
    return list(connection.execute(_KEYS, {"model": model, "after": after, "limit": limit}).scalars())


def drop_vectors(connection: Connection, model: str, doomed: Sequence[int]) -> None:
    """Delete the vectors under the keys of one page; an empty page deletes the space's anchor vectors."""
    if not doomed:
        connection.execute(_DROP_COMPARED, {"model": model})
    for start in range(0, len(doomed), IDS_MAX):
        connection.execute(_DROP, {"model": model, "ids": doomed[start : start + IDS_MAX]})


def count_unvectored(connection: Connection, model: str | None) -> int:
    return connection.execute(_IN_ALL, {"model": model}).scalar_one()


def count_unvectored_in(connection: Connection, uid: str, model: str | None) -> int:
    number = find_number(connection, uid)
    return 0 if number is None else connection.execute(_IN_ONE, {"number": number, "model": model}).scalar_one()


def list_unvectored_memories(connection: Connection, model: str | None) -> list[tuple[str, int]]:
    return [(uid, count) for uid, count in fetch_rows(connection, _BY_MEMORY, {"model": model})]


def enter_jobs(connection: Connection, type_: str, entered: Sequence[Job]) -> None:
    by_uid = {job.memory: job for job in entered}
    for uids in split_ids(list(by_uid)):
        found = fetch_rows(connection, _WITHOUT_JOB, {"uids": uids, "type": type_})
        rows = [
            (job.id, number, type_, job.payload, job.create_time_us, job.attempts)
            for job, number in ((by_uid[uid], number) for uid, number in found)
        ]
        bulk.write_rows(connection, _JOBS, rows)


def count_jobs(connection: Connection, type_: str) -> int:
    return connection.execute(_WAITING, {"type": type_}).scalar_one()


def _is_whole(column: Any) -> Any:
    """Whether a stored vector is float32."""
    return (func.length(column) % 4 == 0) & (func.length(column) > 0)


_RECEIPT = select(recall_receipts.c.key).where(recall_receipts.c.key.between(_low, _high)).limit(1)
_WHOLE_VECTORS = (
    select(vectors.c.key, vectors.c.model, vectors.c.vector, fragments.c.payload)
    .join(fragments, fragments.c.key == vectors.c.key)
    .where(vectors.c.key.between(_low, _high), _is_whole(vectors.c.vector))
    .order_by(vectors.c.key, vectors.c.model)
    .limit(bindparam("limit"))
)
_anchored = (fragments.c.memory == anchors.c.memory) & (fragments.c.id == anchors.c.id)
_WHOLE_ANCHORS = (
    select(
        *(anchors.c.id, fragments.c.key, fragments.c.payload),
        *(anchors.c.model, anchors.c.vector, anchors.c.next_model, anchors.c.next_vector),
    )
    .join(fragments, _anchored)
    .where(anchors.c.memory == _number, or_(_is_whole(anchors.c.vector), _is_whole(anchors.c.next_vector)))
)
_INDEXED = select(vectors.c.vector).where(vectors.c.key == bindparam("key"), vectors.c.model == bindparam("model"))
_SET_VECTOR = bulk.build_update(
    "vectors",
    ("key", "model", "was", "now"),
    "vector = given.now",
    "vectors.key = given.key AND vectors.model = given.model AND vectors.vector = given.was",
)
_SET_ANCHOR = bulk.build_update(
    "anchors",
    ("memory", "id", "was", "now"),
    "vector = CASE WHEN vector = given.was THEN given.now ELSE vector END,"
    " next_vector = CASE WHEN next_vector = given.was THEN given.now ELSE next_vector END",
    "anchors.memory = given.memory AND anchors.id = given.id",
)


_SPACES_MAX = 3
"""Spaces in which a fragment may have a vector: the one in force, the next and the old one."""


class Slice(NamedTuple):
    """What is to be written, and where the next slice begins; the values are those that were read."""

    vectors: Sequence[tuple[int, str, bytes, bytes]]
    anchors: Sequence[tuple[int, str, bytes, bytes]]
    after: int | None
    """The last position that is done; None at the end of the memory."""
    is_rounded: bool
    """Whether a vector is not the one that it was."""


def read_slice(connection: Connection, computing: Computing, uid: str, after: int, limit: int) -> Slice:
    """The next conversions of a memory after a position (-1: from the start, with its anchors)."""
    memory = find_row(connection, uid)
    if memory is None:
        return Slice((), (), None, False)
    low, high = key_range(memory.number)
    exact = connection.execute(_RECEIPT, {"low": low, "high": high}).first() is not None
    converting = _Converting(computing, memory.namespace, exact)
    held = list(_read_anchors(connection, converting, memory.number)) if after < 0 else []
    limit = max(limit, _SPACES_MAX + 1)
    values = {"low": low + after + 1, "high": high, "limit": limit}
    rows = connection.execute(_WHOLE_VECTORS, values).all()
    last = key_position(rows[-1].key) if len(rows) == limit else None
    if last is not None:  # the last one may have another vector
        rows, last = [row for row in rows if row.key < rows[-1].key], last - 1
    changes = [(row.key, row.model, row.vector, converting.convert(*row[1:])) for row in rows]
    return Slice([one for one in changes if one[2] != one[3]], held, last, converting.is_rounded)


def write_slice(connection: Connection, given: Slice) -> None:
    """Write what is still as it was read."""
    bulk.write_rows(connection, _SET_ANCHOR, given.anchors)
    bulk.write_rows(connection, _SET_VECTOR, given.vectors)


class _Converting:
    """One slice of a memory."""

    def __init__(self, computing: Computing, namespace: str, exact: bool) -> None:
        self._computing, self._namespace, self._exact = computing, namespace, exact
        self.is_rounded = False

    def convert(self, model: str, vector: bytes, payload: bytes) -> bytes:
        """The fragment's vector in its new form."""
        fragment = codec.decode_fragment(payload, 0, 0)
        if model in self._computing.spaces:
            made = self._computing.compute(model, [fragment], self._namespace)
            return COMPUTED if pack(made[0]) == vector else encode_vector(vector)
        return self._round(fragment, model, vector)

    def convert_content(self, model: str, vector: bytes, payload: bytes) -> bytes:
        """The vector of its content in its new form."""
        fragment = codec.decode_fragment(payload, 0, 0)
        if model in self._computing.spaces:
            made = self._computing.compute_contents(model, [fragment.content], self._namespace)
            return COMPUTED if pack(made[0]) == vector else encode_vector(vector)
        return self._round(fragment, model, vector)

    def _round(self, fragment: Fragment, model: str, vector: bytes) -> bytes:
        own = fragment.own_vector and fragment.model == model
        if not self._exact and not own:
            rounded = pack(round_vectors(np.frombuffer(vector, "<f4")))
            self.is_rounded = self.is_rounded or rounded != vector
            vector = rounded
        return encode_vector(vector)


def _read_anchors(
    connection: Connection, converting: _Converting, number: int
) -> Iterator[tuple[int, str, bytes, bytes]]:
    for id_, key, payload, *sides in connection.execute(_WHOLE_ANCHORS, {"number": number}).all():
        for model, vector in zip(sides[::2], sides[1::2], strict=True):
            if not vector or len(vector) % 4:
                continue
            indexed = connection.execute(_INDEXED, {"key": key, "model": model}).scalar_one_or_none()
            if indexed and pack(decode_bytes(indexed)) == vector:
                now = INDEXED
            else:
                now = converting.convert_content(model, vector, payload)
            if now != vector:
                yield number, id_, vector, now
