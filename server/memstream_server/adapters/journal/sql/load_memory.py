"""Load an active memory in one snapshot. Determines how long an activation takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import BindParameter, Connection, Select, bindparam, case, func, select

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import (
    PAGE_ROWS,
    fetch_column_pages,
    fetch_columns,
    fetch_pages,
    split_ids,
)
from memstream_server.adapters.journal.sql.conflicts import read_open
from memstream_server.adapters.journal.sql.fragment_reads import FRAGMENT, read_fragments
from memstream_server.adapters.journal.sql.reads import decode_record, get_row, read_events
from memstream_server.adapters.journal.sql.row_columns import Packed
from memstream_server.adapters.journal.sql.schema import (
    anchors,
    events,
    fragments,
    key_range,
    observations,
    outbox,
    producers,
    row_key,
    vectors,
)
from memstream_server.adapters.journal.sql.writes import stored_up_to
from memstream_server.core.values import Fragment, Held, Tier
from memstream_server.ports.journal.reading import Changes, Gathering, LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord, Producer, Recorded
from memstream_server.ports.journal.rows import Block
from memstream_server.ports.journal.writing import Receipt

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
_ids: BindParameter[Any] = bindparam("ids", expanding=True)
_KEYS = select(fragments.c.key).where(fragments.c.memory == _number, fragments.c.id.in_(_ids))
_CHANGED: Select[*tuple[Any, ...]] = (
    select(fragments.c.key, *FRAGMENT, fragments.c.terms).where(fragments.c.key.in_(_ids)).order_by(fragments.c.key)
)
_CHANGED_VECTORS = (
    select(vectors.c.key, vectors.c.vector)
    .where(vectors.c.key.in_(_ids), vectors.c.model == _model)
    .order_by(vectors.c.key)
)
_LOG_TIME = select(events.c.time_us).where(events.c.key == _low)
_ACCESSED_PAGE = (
    select(fragments.c.key, fragments.c.access_time_us)
    .where(fragments.c.key.between(_low, _high), fragments.c.access_count > 0)
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
        fragments.c.key.between(_low, _high),  # or PostgreSQL may read all fragments of all memories
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


class _BlockList:
    """Collects the blocks if the caller passes no Gathering."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def restore(self, record: MemoryRecord, vectors_max: int, changes: Changes) -> None: ...

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None: ...

    def add(self, block: Block) -> None:
        self.blocks.append(block)

    def end(self) -> None: ...


def load_memory(
    connection: Connection, uid: str, model: str, vectors_max: int, into: Gathering | None = None
) -> LoadedMemory:
    memory = get_row(connection, uid)
    kept = _BlockList()
    gathering = kept if into is None else into
    record = decode_record(memory)
    restored = gathering.restore(record, vectors_max, _Changes(connection, record, memory.number, model))
    if restored is None:
        before_long_term = _gather_blocks(connection, record, memory.number, model, vectors_max, gathering)
    else:
        before_long_term = read_fragments(connection, uid, restored, model)
    held = _read_held(connection, memory.number, model, before_long_term)
    pending = tuple(_read_pending(connection, memory.number))
    return LoadedMemory(
        record=record,
        blocks=tuple(kept.blocks),
        sensory=tuple([item for item in held if item.fragment.tier is Tier.SENSORY]),
        short_term=tuple([item for item in held if item.fragment.tier is Tier.SHORT_TERM]),
        pending=pending,
        producers=_read_producers(connection, memory.number, pending),
        next_position=memory.next_position,
        suspicions=read_open(connection, memory.number),
    )


class _Changes:
    """`ports.journal.reading.Changes`."""

    def __init__(self, connection: Connection, record: MemoryRecord, number: int, model: str) -> None:
        self._connection, self._uid, self._number, self._model = connection, record.uid, number, model
        self.time_us = connection.execute(_LOG_TIME, {"low": row_key(number, record.revision)}).scalar() or 0

    def read_accesses(self) -> tuple[list[int], list[int]]:
        positions: list[int] = []
        times_us: list[int] = []
        low, high = key_range(self._number)
        for keys, times in fetch_column_pages(self._connection, _ACCESSED_PAGE, low, high):
            positions += [key - low for key in keys]
            times_us += times
        return positions, times_us

    def read_log(self, revision: int, limit: int) -> list[Recorded]:
        return read_events(self._connection, self._uid, revision - 1, limit)

    def read_blocks(self, ids: Collection[str]) -> Iterator[Block]:
        keys: list[int] = []
        for some in split_ids(sorted(ids)):
            (found,) = fetch_columns(self._connection, _KEYS, {"number": self._number, "ids": some})
            keys += found
        keys.sort()
        for some_keys in split_ids(keys):
            values = {"ids": some_keys, "model": self._model}
            columns = fetch_columns(self._connection, _CHANGED, values)
            vectored, packed = fetch_columns(self._connection, _CHANGED_VECTORS, values)
            yield _make_block(columns, vectored, _to_matrix(packed), vectored, self._model)


def _gather_blocks(
    connection: Connection, record: MemoryRecord, number: int, model: str, vectors_max: int, into: Gathering
) -> list[Fragment]:
    """Give `into` all blocks; returns the fragments before long-term that are not forgotten."""
    low, high = key_range(number)
    vectored = connection.execute(_VECTOR_COUNT, {"low": low, "high": high, "model": model}).scalar_one()
    all_vectors = vectored <= vectors_max
    into.begin(record, all_vectors)
    before_long_term: list[Fragment] = []
    for block in _read_blocks(connection, record.uid, number, model, all_vectors):
        into.add(block)
        before_long_term += [
            each for each in block.fragments if each.tier is not Tier.LONG_TERM and each.forget_time_us is None
        ]
    into.end()
    return before_long_term


def _read_blocks(connection: Connection, uid: str, number: int, model: str, all_vectors: bool) -> Iterator[Block]:
    """One block per page: the fragments and vectors of the same keys."""
    for columns in fetch_column_pages(connection, _PAGE, *key_range(number)):
        keys = columns[0]
        yield _make_block(columns, *_read_vectors(connection, uid, (keys[0], keys[-1]), model, all_vectors), model)


def _make_block(
    columns: Sequence[Any], found: list[int], vectors: npt.NDArray[np.float32], having: list[int], model: str
) -> Block:
    """columns: keys, FRAGMENT, terms. found: keys of `vectors`; having: keys that have a vector."""
    keys, blobs, counts, times, packed = columns
    models = [model if has else "" for has in _mark_members(keys, having)]
    fragments = codec.decode_fragments(blobs, counts, times, models)
    if found != keys:  # skip vectors whose fragment is gone
        vectors = vectors[_mark_members(found, keys)]
    hashes, term_counts, sizes, versions = codec.decode_terms_of_all(packed)
    return Block(fragments, hashes, term_counts, sizes, np.array(_mark_members(keys, found)), vectors, versions)


def _mark_members(keys: list[int], others: list[int]) -> list[bool]:
    """For each key, whether it is among the others; usually both lists are equal."""
    return [True] * len(keys) if keys == others else np.isin(keys, others).tolist()


def _read_vectors(
    connection: Connection, uid: str, keys: tuple[int, int], model: str, all_vectors: bool
) -> tuple[list[int], npt.NDArray[np.float32], list[int]]:
    """(keys of the vectors read, these vectors, keys that have a vector). Without `all_vectors` it reads only vectors
    that may not be in the index yet."""
    values: dict[str, Any] = {"low": keys[0], "high": keys[1], "limit": PAGE_ROWS, "model": model}
    if all_vectors:
        found, packed = fetch_columns(connection, _VECTOR_PAGE, values)
        return found, _to_matrix(packed), found
    (having,) = fetch_columns(connection, _VECTORED_PAGE, values)
    found, packed = fetch_columns(connection, _FRESH_PAGE, {**values, "uid": uid})
    return found, _to_matrix(packed), having


def _to_matrix(packed: Packed) -> npt.NDArray[np.float32]:
    """One vector per row."""
    rows = len(packed.sizes)
    return np.frombuffer(packed.data, "<f4").reshape(rows, -1 if rows else 0)


def _read_held(connection: Connection, number: int, model: str, fragments: Sequence[Fragment]) -> list[Held]:
    found = connection.execute(_ANCHORS, {"number": number, "model": model})
    sides = {name: (vector, packed) for name, vector, packed in found}
    return [_make_held(fragment, *sides.get(fragment.id, (None, None))) for fragment in fragments]


def _make_held(fragment: Fragment, vector: bytes | None, packed: bytes | None) -> Held:
    return Held(fragment, codec.decode_vector(vector), () if packed is None else codec.decode_enhancements(packed))


def _read_pending(connection: Connection, number: int) -> list[Receipt]:
    return [codec.decode_receipt(blob) for _, blob in fetch_pages(connection, _PENDING_PAGE, *key_range(number))]


def _read_producers(connection: Connection, number: int, pending: Sequence[Receipt]) -> tuple[Producer, ...]:
    first: dict[str, int] = {}
    for receipt in pending:
        first[receipt.producer] = min(receipt.first_sequence, first.get(receipt.producer, receipt.first_sequence))
    return tuple(
        [
            Producer(row.name, row.epoch, row.received, stored_up_to(row.received, row.stored, first.get(row.name)))
            for row in connection.execute(_PRODUCERS, {"number": number})
        ]
    )
