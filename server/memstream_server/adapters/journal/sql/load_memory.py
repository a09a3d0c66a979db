"""Load an active memory in one snapshot. Determines how long an activation takes.

On SQLite a memory of one page is two statements of one row each: its record, and everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import BindParameter, Connection, Select, bindparam, case, func, select, text

from memstream_server.adapters.journal.database.database import Packed, run_compiled, to_rows
from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import (
    PAGE_ROWS,
    fetch_column_pages,
    fetch_columns,
    fetch_pages,
    fetch_together,
    split_ids,
)
from memstream_server.adapters.journal.sql.conflicts import KNOWN_PAIRS, make_suspicions
from memstream_server.adapters.journal.sql.fragment_reads import FRAGMENT, read_fragments, resolve_anchors
from memstream_server.adapters.journal.sql.reads import decode_record, read_events
from memstream_server.adapters.journal.sql.schema import (
    POSITION_BITS,
    anchors,
    events,
    fragments,
    key_range,
    memories,
    observations,
    outbox,
    producers,
    vectors,
)
from memstream_server.adapters.journal.sql.vector_forms import Computing, decode_rows
from memstream_server.adapters.journal.sql.writes import stored_up_to
from memstream_server.core.values import Fragment, Held, Tier
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.reading import Changes, Gathering, LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord, Producer, Recorded
from memstream_server.ports.journal.rows import RowBlock
from memstream_server.ports.journal.writing import BatchReceipt

_number: BindParameter[int] = bindparam("number")
_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_model: BindParameter[str] = bindparam("model")
_ROW = select(
    memories,
    select(events.c.time_us)
    .where(events.c.key == memories.c.number * (1 << POSITION_BITS) + memories.c.revision)
    .scalar_subquery()
    .label("log_time_us"),
).where(memories.c.uid == bindparam("uid"))
_PAGE: Select[*tuple[Any, ...]] = (
    select(fragments.c.key, *FRAGMENT, fragments.c.terms)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(_limit)
)
_WHOLE_PAGE: Select[*tuple[Any, ...]] = (
    select(fragments.c.key, *FRAGMENT, fragments.c.terms, vectors.c.vector)
    .outerjoin(vectors, (vectors.c.key == fragments.c.key) & (vectors.c.model == _model))
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
_ACCESSED_PAGE = (
    select(fragments.c.key, fragments.c.access_time_us)
    .where(fragments.c.key.between(_low, _high), text("access_count > 0"))  # as text: the condition of its index
    .order_by(fragments.c.key)
    .limit(_limit)
)
_VECTOR_COUNT = select(func.count()).where(vectors.c.key.between(_low, _high), vectors.c.model == _model)
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
_PENDING_PAGE: Select[*tuple[Any, ...]] = (
    select(observations.c.key, observations.c.payload)
    .where(observations.c.key.between(_low, _high))
    .order_by(observations.c.key)
    .limit(_limit)
)
_PRODUCERS = (
    select(producers.c.name, producers.c.epoch, producers.c.received, producers.c.stored)
    .where(producers.c.memory == _number)
    .order_by(producers.c.name)
)
_SIDE: tuple[Select[*tuple[Any, ...]], ...] = (_ANCHORS, _PENDING_PAGE, _PRODUCERS, KNOWN_PAIRS)
"""What a memory has besides its fragments and their vectors."""


class _BlockList:
    """Collects the blocks if the caller passes no Gathering."""

    def __init__(self) -> None:
        self.blocks: list[RowBlock] = []

    def restore(self, record: MemoryRecord, vectors_max: int, changes: Changes) -> None: ...

    def begin(self, record: MemoryRecord, all_vectors: bool) -> None: ...

    def add(self, block: RowBlock) -> None:
        self.blocks.append(block)

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """The memory that is read, and the space of its vectors."""

    connection: Connection
    computing: Computing
    record: MemoryRecord
    number: int
    model: str

    def compute(self, fragments: Sequence[Fragment]) -> npt.NDArray[np.float32]:
        return self.computing.compute(self.model, fragments, self.record.namespace)


def load_memory(
    connection: Connection,
    computing: Computing,
    uid: str,
    model: str,
    vectors_max: int,
    into: Gathering | None = None,
) -> LoadedMemory:
    memory = _read_row(connection, uid)
    kept = _BlockList()
    gathering = kept if into is None else into
    record, number = decode_record(memory), memory.number
    low, high = key_range(number)
    reading = _Reading(connection, computing, record, number, model)
    restored = gathering.restore(record, vectors_max, _Changes(reading, memory))
    # A vector belongs to a position: with few positions there is nothing to count.
    all_vectors = memory.next_position <= vectors_max or (
        restored is None and _count_vectors(connection, low, high, model) <= vectors_max
    )
    whole = restored is None and all_vectors
    values = {"number": number, "low": low, "high": high, "model": model, "limit": PAGE_ROWS}
    side = fetch_together(connection, (*_SIDE, _WHOLE_PAGE) if whole else _SIDE, values)
    if restored is not None:
        before_long_term = read_fragments(connection, uid, restored, model)
    else:
        blocks = _follow_pages(reading, side[-1], high) if whole else _read_blocks(reading)
        before_long_term = _gather_blocks(record, blocks, all_vectors, gathering)
    return _assemble(reading, memory, tuple(kept.blocks), before_long_term, side[: len(_SIDE)])


def _read_row(connection: Connection, uid: str) -> Any:
    row = run_compiled(connection, _ROW, {"uid": uid}).one_or_none()
    if row is None:
        raise StaleWrite(f"memory {uid} is gone")
    return row


def _count_vectors(connection: Connection, low: int, high: int, model: str) -> int:
    found: int = connection.execute(_VECTOR_COUNT, {"low": low, "high": high, "model": model}).scalar_one()
    return found


def _assemble(
    reading: _Reading,
    memory: Any,
    blocks: tuple[RowBlock, ...],
    before_long_term: Sequence[Fragment],
    side: Sequence[Sequence[Any]],
) -> LoadedMemory:
    """side: the columns of `_SIDE`."""
    anchored, waiting, producing, open_conflicts = side
    held = _pair_held(reading, before_long_term, anchored)
    pending = tuple(_follow_pending(reading.connection, waiting, key_range(reading.number)[1]))
    return LoadedMemory(
        record=reading.record,
        blocks=blocks,
        sensory=tuple([item for item in held if item.fragment.tier is Tier.SENSORY]),
        short_term=tuple([item for item in held if item.fragment.tier is Tier.SHORT_TERM]),
        pending=pending,
        producers=_make_producers(to_rows(producing), pending),
        next_position=memory.next_position,
        suspicions=make_suspicions(to_rows(open_conflicts)),
    )


class _Changes:
    """`ports.journal.reading.Changes`."""

    def __init__(self, reading: _Reading, memory: Any) -> None:
        self._reading, self._connection, self._number = reading, reading.connection, reading.number
        self.time_us = memory.log_time_us or 0

    def read_accesses(self) -> tuple[list[int], list[int]]:
        positions: list[int] = []
        times_us: list[int] = []
        low, high = key_range(self._number)
        for keys, times in fetch_column_pages(self._connection, _ACCESSED_PAGE, low, high):
            positions += [key - low for key in keys]
            times_us += times
        return positions, times_us

    def read_log(self, revision: int, limit: int) -> list[Recorded]:
        return read_events(self._connection, self._reading.record.uid, revision - 1, limit)

    def read_blocks(self, ids: Collection[str]) -> Iterator[RowBlock]:
        keys: list[int] = []
        for some in split_ids(sorted(ids)):
            (found,) = fetch_columns(self._connection, _KEYS, {"number": self._number, "ids": some})
            keys += found
        keys.sort()
        for some_keys in split_ids(keys):
            values = {"ids": some_keys, "model": self._reading.model}
            columns = fetch_columns(self._connection, _CHANGED, values)
            vectored, packed = fetch_columns(self._connection, _CHANGED_VECTORS, values)
            yield _make_block(self._reading, columns, vectored, packed, vectored)


def _gather_blocks(
    record: MemoryRecord, blocks: Iterator[RowBlock], all_vectors: bool, into: Gathering
) -> list[Fragment]:
    """Give `into` all blocks; returns the fragments before long-term that are not forgotten."""
    into.begin(record, all_vectors)
    before_long_term: list[Fragment] = []
    for block in blocks:
        into.add(block)
        before_long_term += [
            each for each in block.fragments if each.tier is not Tier.LONG_TERM and each.forget_time_us is None
        ]
    into.end()
    return before_long_term


def _follow_pages(reading: _Reading, page: list[Any], high: int) -> Iterator[RowBlock]:
    """One block for the page of `_WHOLE_PAGE`, and one for each that follows it."""
    while page[0]:
        *columns, packed = page
        keys = columns[0]
        found = [key for key, size in zip(keys, packed.sizes, strict=True) if size is not None]
        there = packed._replace(sizes=[size for size in packed.sizes if size is not None])
        yield _make_block(reading, columns, found, there, found)
        if len(keys) < PAGE_ROWS:
            return
        values = {"low": keys[-1] + 1, "high": high, "model": reading.model, "limit": PAGE_ROWS}
        page = fetch_columns(reading.connection, _WHOLE_PAGE, values)


def _read_blocks(reading: _Reading) -> Iterator[RowBlock]:
    """One block per page, with the vectors that may not be in the index yet."""
    connection, more = reading.connection, {"limit": PAGE_ROWS, "model": reading.model, "uid": reading.record.uid}
    for columns in fetch_column_pages(connection, _PAGE, *key_range(reading.number)):
        keys = columns[0]
        values = {"low": keys[0], "high": keys[-1], **more}
        (having,) = fetch_columns(connection, _VECTORED_PAGE, values)
        found, packed = fetch_columns(connection, _FRESH_PAGE, values)
        yield _make_block(reading, columns, found, packed, having)


def _make_block(
    reading: _Reading, columns: Sequence[Any], found: list[int], stored: Packed, having: list[int]
) -> RowBlock:
    """columns: keys, FRAGMENT, terms. found: keys of the `stored` vectors; having: keys that have a vector."""
    keys, blobs, counts, times, packed = columns
    models = [reading.model if has else "" for has in _mark_members(keys, having)]
    fragments = codec.decode_fragments(blobs, counts, times, models)
    by_key = fragments if found == keys else _pick(keys, fragments, found)
    # A vector whose fragment is gone is skipped below.
    vectors = decode_rows(stored, lambda rows: reading.compute([by_key[row] for row in rows]))
    if found != keys:
        vectors = vectors[_mark_members(found, keys)]
    hashes, term_counts, sizes, versions = codec.decode_terms_of_all(packed)
    return RowBlock(fragments, hashes, term_counts, sizes, np.array(_mark_members(keys, found)), vectors, versions)


_GONE = Fragment(id="", content="")


def _pick(keys: list[int], fragments: Sequence[Fragment], found: list[int]) -> list[Fragment]:
    """The fragments of the keys in `found`; _GONE for a key without one."""
    by_key = dict(zip(keys, fragments, strict=True))
    return [by_key.get(key, _GONE) for key in found]


def _mark_members(keys: list[int], others: list[int]) -> list[bool]:
    """For each key, whether it is among the others; usually both lists are equal."""
    if keys == others:
        return [True] * len(keys)
    wanted = frozenset(others)
    return [key in wanted for key in keys]


def _pair_held(reading: _Reading, fragments: Sequence[Fragment], anchored: Sequence[Any]) -> list[Held]:
    sides = {name: (vector, packed) for name, vector, packed in to_rows(anchored)}
    stored = {id_: vector for id_, (vector, _) in sides.items() if vector is not None}
    vectors = resolve_anchors(reading.connection, reading.computing, reading.record, reading.model, stored, fragments)
    return [
        Held(each, vectors.get(each.id), codec.decode_enhancements(sides[each.id][1]) if each.id in sides else ())
        for each in fragments
    ]


def _follow_pending(connection: Connection, page: Sequence[Any], high: int) -> Iterator[BatchReceipt]:
    """The receipts of the page of `_PENDING_PAGE`, and of those that follow it."""
    keys, payloads = page
    yield from map(codec.decode_receipt, payloads.values())
    if len(keys) == PAGE_ROWS:
        for _, blob in fetch_pages(connection, _PENDING_PAGE, keys[-1] + 1, high):
            yield codec.decode_receipt(blob)


def _make_producers(rows: Sequence[Sequence[Any]], pending: Sequence[BatchReceipt]) -> tuple[Producer, ...]:
    """rows: name, epoch, received, stored."""
    first: dict[str, int] = {}
    for receipt in pending:
        first[receipt.producer] = min(receipt.first_sequence, first.get(receipt.producer, receipt.first_sequence))
    return tuple(
        [
            Producer(name, epoch, received, stored_up_to(received, stored, first.get(name)))
            for name, epoch, received, stored in rows
        ]
    )
