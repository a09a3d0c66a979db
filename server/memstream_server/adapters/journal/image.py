"""Reading all of an active memory in one snapshot: what decides how fast a memory wakes up."""

from __future__ import annotations

from collections.abc import Container, Sequence

from sqlalchemy import BindParameter, Connection, bindparam, case, func, select

from memstream_server.adapters.journal import codec
from memstream_server.adapters.journal.reads import FRAGMENT, memory_of, pages, record
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
    Image,
    Producer,
    Receipt,
    Row,
)

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
    rows = _rows(connection, uid, memory.number, model, vectors_max)
    held = _held(connection, memory.number, model, rows)
    pending = tuple(_pending(connection, memory.number))
    return Image(
        record=record(memory),
        rows=rows,
        sensory=tuple([item for item in held if item.fragment.tier is Tier.SENSORY]),
        short_term=tuple([item for item in held if item.fragment.tier is Tier.SHORT_TERM]),
        pending=pending,
        producers=_producers(connection, memory.number, pending),
        next_position=memory.next_position,
    )


def _rows(connection: Connection, uid: str, number: int, model: str, vectors_max: int) -> tuple[Row, ...]:
    found, having = _vectors(connection, uid, number, model, vectors_max)
    decode, terms = codec.decode_fragment, codec.decode_terms
    rows = pages(connection, _PAGE, *span(number))
    return tuple(
        [
            Row(decode(blob, count, at, model if row in having else ""), terms(packed), found.get(row))
            for row, blob, count, at, packed in rows
        ]
    )


def _vectors(
    connection: Connection, uid: str, number: int, model: str, vectors_max: int
) -> tuple[dict[int, bytes], Container[int]]:
    """(vectors by key, keys that have one); of more than `vectors_max` only vectors that the index cannot have yet."""
    low, high = span(number)
    count = connection.execute(_VECTOR_COUNT, {"low": low, "high": high, "model": model}).scalar_one()
    if count <= vectors_max:
        found = dict(pages(connection, _VECTOR_PAGE, low, high, model=model)) if count else {}
        return found, found
    having = {row[0] for row in pages(connection, _VECTORED_PAGE, low, high, model=model)}
    return dict(pages(connection, _FRESH_PAGE, low, high, model=model, uid=uid)), having


def _held(connection: Connection, number: int, model: str, rows: Sequence[Row]) -> list[Held]:
    found = connection.execute(_ANCHORS, {"number": number, "model": model})
    sides = {name: (vector, packed) for name, vector, packed in found}
    return [
        _hold(row.fragment, *sides.get(row.fragment.id, (None, None)))
        for row in rows
        if row.fragment.tier is not Tier.LONG_TERM and row.fragment.forget_time_us is None
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
