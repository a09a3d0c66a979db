"""Reading all of an active memory in one snapshot: what decides how fast a memory wakes up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from sqlalchemy import BindParameter, Connection, bindparam, case, func, select

from memstream_server.adapters.journal import codec
from memstream_server.adapters.journal.packed import Packed, joined
from memstream_server.adapters.journal.reads import FRAGMENT, column_pages, memory_of, pages, record
from memstream_server.adapters.journal.schema import (
    anchors,
    fragments,
    observations,
    outbox,
    producers,
    span,
    vectors,
)
from memstream_server.adapters.journal.writes import stored_up_to
from memstream_server.core.values import Fragment, Held, Tier
from memstream_server.ports.journal import (
    Block,
    Image,
    Producer,
    Receipt,
)

Keys: TypeAlias = npt.NDArray[np.int64]

_number: BindParameter[int] = bindparam("number")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_model: BindParameter[str] = bindparam("model")
_PAGE = (
    select(fragments.c.key, *FRAGMENT, fragments.c.terms)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_VECTOR_COUNT = select(func.count()).where(vectors.c.key.between(_low, _high), vectors.c.model == _model)
_VECTOR_PAGE = (
    select(vectors.c.key, vectors.c.vector)
    .where(vectors.c.key.between(_low, _high), vectors.c.model == _model)
    .order_by(vectors.c.key)
    .limit(_limit)
)
_waiting = select(outbox.c.fragment).where(outbox.c.memory == bindparam("uid"))
_FRESH_PAGE = (
    select(vectors.c.key, vectors.c.vector)
    .join(fragments, fragments.c.key == vectors.c.key)
    .where(
        vectors.c.key.between(_low, _high),
        vectors.c.model == _model,
        (fragments.c.tier != Tier.LONG_TERM.value) | fragments.c.id.in_(_waiting),
    )
    .order_by(vectors.c.key)
    .limit(_limit)
)
_VECTORED_PAGE = (
    select(vectors.c.key)
    .where(vectors.c.key.between(_low, _high), vectors.c.model == _model)
    .order_by(vectors.c.key)
    .limit(_limit)
)
_ANCHORS = select(
    anchors.c.id,
    case((anchors.c.model == _model, anchors.c.vector), (anchors.c.next_model == _model, anchors.c.next_vector)),
    anchors.c.enhancements,
).where(anchors.c.memory == _number)
_PENDING_PAGE = (
    select(observations.c.key, observations.c.payload)
    .where(observations.c.key.between(_low, _high))
    .order_by(observations.c.key)
    .limit(_limit)
)
_PRODUCERS = select(producers).where(producers.c.memory == _number).order_by(producers.c.name)


def load(connection: Connection, uid: str, model: str, vectors_max: int) -> Image:
    memory = memory_of(connection, uid)
    block = _block(connection, uid, memory.number, model, vectors_max)
    held = _held(connection, memory.number, model, block.fragments)
    pending = tuple(_pending(connection, memory.number))
    return Image(
        record=record(memory),
        block=block,
        sensory=tuple([item for item in held if item.fragment.tier is Tier.SENSORY]),
        short_term=tuple([item for item in held if item.fragment.tier is Tier.SHORT_TERM]),
        pending=pending,
        producers=_producers(connection, memory.number, pending),
        next_position=memory.next_position,
    )


def _block(connection: Connection, uid: str, number: int, model: str, vectors_max: int) -> Block:
    found, vectors, having = _vectors(connection, uid, number, model, vectors_max)
    keys: list[int] = []
    fragments: list[Fragment] = []
    terms: list[Packed] = []
    for rows, blobs, counts, times, packed in column_pages(connection, _PAGE, *span(number)):
        models = [model if has else "" for has in np.isin(rows, having).tolist()]
        keys += rows
        fragments += codec.decode_fragments(blobs, counts, times, models)
        terms.append(packed)
    here = np.array(keys, np.int64)
    hashes, numbers, sizes = codec.decode_terms_of_all(joined(terms))
    owned = np.isin(found, here)
    vectors = vectors if owned.all() else vectors[owned]
    return Block(fragments, hashes, numbers, sizes, np.isin(here, found), vectors)


def _vectors(
    connection: Connection, uid: str, number: int, model: str, vectors_max: int
) -> tuple[Keys, npt.NDArray[np.float32], Keys]:
    """(keys of the vectors read, these vectors, keys that have one); of more than `vectors_max` only vectors that the
    index cannot have yet."""
    low, high = span(number)
    count = connection.execute(_VECTOR_COUNT, {"low": low, "high": high, "model": model}).scalar_one()
    if count <= vectors_max:
        found, vectors = _matrix(column_pages(connection, _VECTOR_PAGE, low, high, model=model), count)
        return found, vectors, found
    having = np.concatenate([keys for (keys,) in column_pages(connection, _VECTORED_PAGE, low, high, model=model)])
    return *_matrix(column_pages(connection, _FRESH_PAGE, low, high, model=model, uid=uid), count), having


def _matrix(pages: Iterable[list[Any]], count: int) -> tuple[Keys, npt.NDArray[np.float32]]:
    """Keys, and vectors by row: at most `count`, put into their place page by page, for they are most of a memory."""
    keys, vectors, at = np.empty(count, np.int64), np.empty((0, 0), np.float32), 0
    for rows, packed in pages:
        part = np.frombuffer(packed.data, "<f4").reshape(len(rows), -1)
        if not at:
            vectors = np.empty((count, part.shape[1]), np.float32)
        keys[at : at + len(rows)], vectors[at : at + len(rows)] = rows, part
        at += len(rows)
    return (keys, vectors) if at == count else (keys[:at], vectors[:at].copy())


def _held(connection: Connection, number: int, model: str, fragments: Sequence[Fragment]) -> list[Held]:
    found = connection.execute(_ANCHORS, {"number": number, "model": model})
    sides = {name: (vector, packed) for name, vector, packed in found}
    return [
        _hold(fragment, *sides.get(fragment.id, (None, None)))
        for fragment in fragments
        if fragment.tier is not Tier.LONG_TERM and fragment.forget_time_us is None
    ]


def _hold(fragment: Fragment, vector: bytes | None, packed: bytes | None) -> Held:
    return Held(fragment, codec.decode_vector(vector), () if packed is None else codec.decode_enhancements(packed))


def _pending(connection: Connection, number: int) -> list[Receipt]:
    return [codec.decode_receipt(blob) for _, blob in pages(connection, _PENDING_PAGE, *span(number))]


def _producers(connection: Connection, number: int, pending: Sequence[Receipt]) -> tuple[Producer, ...]:
    first: dict[str, int] = {}
    for receipt in pending:
        first[receipt.producer] = min(receipt.first_sequence, first.get(receipt.producer, receipt.first_sequence))
    return tuple(
        [
            Producer(row.name, row.epoch, row.received, stored_up_to(row.received, row.stored, first.get(row.name)))
            for row in connection.execute(_PRODUCERS, {"number": number})
            if row.create_time_us is None or row.name in first
        ]
    )
