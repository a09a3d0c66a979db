"""Vectors in an embedding space that is not in force: find fragments without one, add them, delete a space's vectors.

These writes raise no revision: recall does not use a space until it is put in force.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BindParameter,
    Connection,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    not_,
    null,
    or_,
    select,
    update,
)

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.bulk import IDS_MAX, fetch_pages
from memstream_server.adapters.journal.sql.fragment_reads import FRAGMENT, VECTORED
from memstream_server.adapters.journal.sql.reads import get_row
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    fragments,
    key_range,
    memories,
    outbox,
    row_key,
    vectors,
)
from memstream_server.adapters.journal.sql.vector_forms import COMPUTED, encode_anchor, encode_vector
from memstream_server.core.values import Fragment, Tier
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.records import Made
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
