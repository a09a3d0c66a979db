"""Reads fragments: by id, in pages, and those that are due. Like reads.py, one function per read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
from sqlalchemy import BindParameter, Connection, Select, bindparam, case, func, select, text

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import fetch_pages, fetch_rows, split_ids
from memstream_server.adapters.journal.sql.reads import find_number, find_row
from memstream_server.adapters.journal.sql.schema import fragments, key_range, memories, vectors
from memstream_server.adapters.journal.sql.vector_forms import COMPUTED, INDEXED, Computing, decode_bytes, pack
from memstream_server.core.speakers import fold_name
from memstream_server.core.values import Fragment, Vector
from memstream_server.ports.journal.reading import FragmentQuery
from memstream_server.ports.journal.records import MemoryRecord

_number: BindParameter[int] = bindparam("number")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_model: BindParameter[str] = bindparam("model")
_ids: BindParameter[Any] = bindparam("ids", expanding=True)

FRAGMENT = (fragments.c.payload, fragments.c.access_count, fragments.c.access_time_us)
OF_SPACE = (vectors.c.key == fragments.c.key) & (vectors.c.model == func.coalesce(_model, fragments.c.model))
UNLESS_STORED = case((func.length(vectors.c.vector) == 0, fragments.c.payload))
"""The record that the vector is to be computed from."""
VECTORED = select(vectors.c.key).where(OF_SPACE).correlate(fragments).scalar_subquery().is_not(None)
"""Whether a fragment has a vector in the space `model` (null: the space that the fragment was written with).

Not EXISTS, which PostgreSQL may answer by reading all vectors of all memories.
"""
_LIST = (
    select(fragments.c.key, *FRAGMENT, VECTORED)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_SPEAKERS = (
    select(fragments.c.key, fragments.c.speaker)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_BY_KEY = select(fragments.c.key, *FRAGMENT, VECTORED).where(fragments.c.key.in_(_ids)).order_by(fragments.c.key)
_SOME = select(fragments.c.id, *FRAGMENT, VECTORED).where(fragments.c.memory == _number, fragments.c.id.in_(_ids))
_SOME_VECTORS = (
    select(fragments.c.id, vectors.c.vector, UNLESS_STORED)
    .join(vectors, vectors.c.key == fragments.c.key)
    .where(fragments.c.memory == _number, fragments.c.id.in_(_ids), vectors.c.model == _model)
)
_CITING = {
    dialect: text(f"SELECT id, payload FROM fragments WHERE key BETWEEN :low AND :high AND {names} > 0")
    for dialect, names in {"sqlite": "instr(payload, :field)", "postgresql": "position(:field IN payload)"}.items()
}
_EXPIRING = (
    select(memories.c.uid, fragments.c.id)
    .join(memories, memories.c.number == fragments.c.memory)
    .where(fragments.c.due_time_us.is_not(None), fragments.c.due_time_us <= bindparam("now"))
    .order_by(fragments.c.due_time_us)
    .limit(_limit)
)
_forgotten = fragments.c.forget_time_us.is_not(None)
_oldest = (  # apart, so that no database starts at the memories
    select(fragments.c.memory, func.min(fragments.c.forget_time_us).label("time_us"))
    .where(_forgotten)
    .group_by(fragments.c.memory)
    .subquery()
)
_OLDEST_FORGOTTEN = select(memories.c.uid, _oldest.c.time_us).join(memories, memories.c.number == _oldest.c.memory)
_PURGEABLE = (
    select(fragments.c.id)
    .where(fragments.c.memory == _number, _forgotten, fragments.c.forget_time_us <= bindparam("before"))
    .order_by(fragments.c.forget_time_us)
    .limit(_limit)
)


def decode_row(model: str | None, blob: bytes, count: int, at: int, vectored: object) -> Fragment:
    """Decode the columns FRAGMENT and VECTORED. `model` is the space in force; None if there is none."""
    return codec.decode_fragment(blob, count, at, None if model is None else model if vectored else "")


def read_fragments(connection: Connection, uid: str, ids: Sequence[str], model: str | None) -> list[Fragment]:
    number = find_number(connection, uid)
    if number is None:
        return []
    found: dict[str, Fragment] = {}
    for chunk in split_ids(ids):
        for name, *columns in fetch_rows(connection, _SOME, {"number": number, "ids": chunk, "model": model}):
            found[name] = decode_row(model, *columns)
    return [found[name] for name in ids if name in found]


def read_vectors(
    connection: Connection, computing: Computing, uid: str, model: str, ids: Sequence[str]
) -> dict[str, bytes]:
    memory = find_row(connection, uid)
    found: dict[str, bytes] = {}
    if memory is not None:
        for chunk in split_ids(ids):
            rows = fetch_rows(connection, _SOME_VECTORS, {"number": memory.number, "model": model, "ids": chunk})
            lacking: list[tuple[str, Fragment]] = []
            for name, vector, blob in rows:
                if vector:
                    found[name] = pack(decode_bytes(vector))
                else:
                    lacking.append((name, codec.decode_fragment(blob, 0, 0)))
            if lacking:
                made = computing.compute(model, [each for _, each in lacking], memory.namespace)
                found.update((name, pack(vector)) for (name, _), vector in zip(lacking, made, strict=True))
    return found


def resolve_anchors(
    connection: Connection,
    computing: Computing,
    record: MemoryRecord,
    model: str,
    stored: Mapping[str, bytes],
    held: Sequence[Fragment],
) -> dict[str, Vector]:
    """The vectors of anchors by fragment, of the space `model`, from what their rows have. `held`: the fragments."""
    found = {id_: decode_bytes(blob) for id_, blob in stored.items() if blob not in (COMPUTED, INDEXED)}
    if indexed := [id_ for id_, blob in stored.items() if blob == INDEXED]:
        packed = read_vectors(connection, computing, record.uid, model, indexed)
        found |= {id_: np.frombuffer(raw, "<f4") for id_, raw in packed.items()}
    if computed := [each for each in held if stored.get(each.id) == COMPUTED]:
        made = computing.compute_contents(model, [each.content for each in computed], record.namespace)
        found |= {each.id: vector for each, vector in zip(computed, made, strict=True)}
    return found


def list_fragments(connection: Connection, uid: str, query: FragmentQuery, model: str | None) -> list[Fragment]:
    number = find_number(connection, uid)
    if number is None:
        return []
    low, high = key_range(number)
    chosen = {"tier": [tier.value for tier in query.tiers], "kind": query.kinds, "session": query.sessions}
    values = {name: list(wanted) for name, wanted in chosen.items() if wanted}
    low += max(query.after + 1, 0)
    statement = _build_selection(query.forgotten, tuple(values), bool(query.speakers))
    if not query.speakers:
        rows = fetch_pages(connection, statement, low, high, query.limit, model=model, **values)
        return [decode_row(model, *columns) for _, *columns in rows]
    # No database compares as `fold_name` does, so the speakers alone are read first.
    wanted = set(map(fold_name, query.speakers))
    said = fetch_pages(connection, statement, low, high, None, **values)
    keys = list(islice((key for key, speaker in said if fold_name(speaker) in wanted), query.limit))
    found = (fetch_rows(connection, _BY_KEY, {"ids": part, "model": model}) for part in split_ids(keys))
    return [decode_row(model, *columns) for rows in found for _, *columns in rows]


def list_citing(connection: Connection, uid: str) -> dict[str, tuple[str, ...]]:
    """The database searches the records, of which only those that have sources name the field."""
    number = find_number(connection, uid)
    if number is None:
        return {}
    low, high = key_range(number)
    found = connection.execute(_CITING[connection.dialect.name], {"low": low, "high": high, "field": codec.SOURCES})
    return {id_: sources for id_, payload in found if (sources := codec.decode_sources(payload))}


@lru_cache  # building a statement takes longer than running it
def _build_selection(forgotten: bool | None, columns: tuple[str, ...], speakers: bool) -> Select[*tuple[Any, ...]]:
    """The fragments; `speakers`: their keys and speakers alone."""
    wanted = [fragments.c[name].in_(bindparam(name, expanding=True)) for name in columns]
    if forgotten is not None:
        wanted.append(_forgotten if forgotten else fragments.c.forget_time_us.is_(None))
    return (_SPEAKERS if speakers else _LIST).where(*wanted)


def list_expired(connection: Connection, now_us: int, limit: int) -> list[tuple[str, str]]:
    rows = connection.execute(_EXPIRING, {"now": now_us, "limit": limit})
    return [(uid, name) for uid, name in rows]


def list_oldest_forgotten(connection: Connection) -> list[tuple[str, int]]:
    return [(uid, time_us) for uid, time_us in connection.execute(_OLDEST_FORGOTTEN)]


def list_purgeable(connection: Connection, uid: str, before_us: int, limit: int) -> list[str]:
    number = find_number(connection, uid)
    if number is None:
        return []
    values = {"number": number, "before": before_us, "limit": limit}
    return list(connection.execute(_PURGEABLE, values).scalars())
