"""Reads a whole memory or conversation in one snapshot, page by page, for an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import BigInteger, BindParameter, Connection, bindparam, case, cast, func, select

from memstream_server.adapters.journal.blocks import read_all as read_blocks
from memstream_server.adapters.journal.sql import codec, conversation_records
from memstream_server.adapters.journal.sql.bulk import fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.conflicts import read_by_newer
from memstream_server.adapters.journal.sql.fragment_reads import (
    FRAGMENT,
    VECTORED,
    decode_row,
    read_fragments,
    resolve_anchors,
)
from memstream_server.adapters.journal.sql.hidden_conversations import AFTER_HIDDEN
from memstream_server.adapters.journal.sql.messages import scan_messages
from memstream_server.adapters.journal.sql.reads import decode_record, get_row, read_spaces
from memstream_server.adapters.journal.sql.schema import (
    POSITION_BITS,
    anchors,
    conversations,
    fragments,
    key_position,
    key_range,
    memories,
    messages,
    observations,
    plans,
    vectors,
)
from memstream_server.adapters.journal.sql.vector_forms import Computing, decode_bytes, pack
from memstream_server.core.values import Fragment
from memstream_server.ports.conversations import ConversationName, ConversationScan, Message, NotThere, Plan, Status
from memstream_server.ports.journal.reading import MemoryScan
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Anchor

T = TypeVar("T")
PAGE_ROWS = 500
PAGE_BYTES = 1 << 20
"""Approximate stored bytes of a page; the number of rows follows from the previous page."""

_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_model: BindParameter[str] = bindparam("model")
_COUNT = select(func.count()).select_from(fragments).where(fragments.c.key.between(_low, _high))
_PAGE = (
    select(fragments.c.key, *FRAGMENT, VECTORED)
    .where(fragments.c.key.between(_low, _high))
    .order_by(fragments.c.key)
    .limit(bindparam("limit"))
)
_VECTORS = select(vectors.c.key, vectors.c.model, vectors.c.vector).where(vectors.c.key.between(_low, _high))
_ANCHORS = select(
    anchors.c.id,
    case((anchors.c.model == _model, anchors.c.vector), (anchors.c.next_model == _model, anchors.c.next_vector)),
    anchors.c.enhancements,
).where(anchors.c.memory == bindparam("number"))
_FIRST_PENDING = select(func.min(observations.c.key)).where(observations.c.key.between(_low, _high))
_FIRST_KEY = memories.c.number * (1 << POSITION_BITS)
_OF_MEMORY = select(func.count()).where(fragments.c.key.between(_FIRST_KEY, _FIRST_KEY + (1 << POSITION_BITS) - 1))
_TOTAL = select(  # by ranges of keys: a join by fragments.memory would read the fragments of all namespaces
    cast(func.coalesce(func.sum(_OF_MEMORY.correlate(memories).scalar_subquery()), 0), BigInteger)
).select_from(memories)


def scan_memory(
    connection: Connection, computing: Computing, uid: str, all_vectors: bool, visit: Callable[[MemoryScan], T]
) -> T:
    row, space = get_row(connection, uid), read_spaces(connection).in_force
    record = decode_record(row)
    model = None if space is None else space.model
    low, high = key_range(row.number)
    keys = {"low": low, "high": high}
    pending = connection.execute(_FIRST_PENDING, keys).scalar_one_or_none()
    scan = MemoryScan(
        record=record,
        total=connection.execute(_COUNT, keys).scalar_one(),
        next_position=row.next_position,
        first_pending=None if pending is None else key_position(pending),
        anchors=_read_anchors(connection, computing, record, row.number, model),
        conflicts=read_by_newer(connection, row.number),
        blocks=read_blocks(connection, row.number),
        block_version=row.block_version,
        pages=lambda: _read_pages(connection, computing, record, (low, high), model, all_vectors),
    )
    return visit(scan)


def _read_anchors(
    connection: Connection, computing: Computing, record: MemoryRecord, number: int, model: str | None
) -> dict[str, Anchor]:
    rows = connection.execute(_ANCHORS, {"number": number, "model": model or ""}).all()
    stored = {id_: vector for id_, vector, _ in rows if vector is not None}
    held = read_fragments(connection, record.uid, list(stored), model)
    vectors = {} if model is None else resolve_anchors(connection, computing, record, model, stored, held)
    packed = {id_: pack(vector) for id_, vector in vectors.items()}
    return {id_: Anchor(id_, packed.get(id_), codec.decode_enhancements(blob)) for id_, _, blob in rows}


def _read_pages(
    connection: Connection,
    computing: Computing,
    record: MemoryRecord,
    keys: tuple[int, int],
    model: str | None,
    all_vectors: bool,
) -> Iterator[list[tuple[Fragment, bytes | None]]]:
    limit, (low, high) = PAGE_ROWS // 8, keys
    while True:
        rows = fetch_rows(connection, _PAGE, {"low": low, "high": high, "limit": limit, "model": model})
        if not rows:
            return
        found = [decode_row(model, blob, count, at, vectored) for _, blob, count, at, vectored in rows]
        last = rows[-1][0]
        wanted = all_vectors or any(fragment.own_vector for fragment in found)
        by_key = dict(zip([row[0] for row in rows], found, strict=True))
        have = _read_vectors(connection, computing, record.namespace, (low, last), by_key) if wanted else {}
        yield [
            (fragment, have.get((row[0], fragment.model)) if all_vectors or fragment.own_vector else None)
            for row, fragment in zip(rows, found, strict=True)
        ]
        low = last + 1
        size = sum(len(row[1]) for row in rows) / len(rows)
        limit = max(1, min(PAGE_ROWS, int(PAGE_BYTES / size)))


def _read_vectors(
    connection: Connection, computing: Computing, namespace: str, keys: tuple[int, int], by_key: Mapping[int, Fragment]
) -> dict[tuple[int, str], bytes]:
    found: dict[tuple[int, str], bytes] = {}
    lacking: dict[str, list[int]] = {}
    for key, model, vector in fetch_rows(connection, _VECTORS, {"low": keys[0], "high": keys[1]}):
        if vector:
            found[key, model] = pack(decode_bytes(vector))
        elif key in by_key:
            lacking.setdefault(model, []).append(key)
    for model, some in lacking.items():
        made = computing.compute(model, [by_key[key] for key in some], namespace)
        found |= {(key, model): pack(vector) for key, vector in zip(some, made, strict=True)}
    return found


def count_fragments(connection: Connection, namespace: str, name: str) -> int:
    chosen = _TOTAL.where(memories.c.namespace == namespace)
    return connection.execute(chosen.where(memories.c.name == name) if name else chosen).scalar_one()


def scan_conversation(connection: Connection, named: ConversationName, visit: Callable[[ConversationScan], T]) -> T:
    wanted = (conversations.c.namespace == named.namespace) & (conversations.c.name == named.name)
    row = connection.execute(select(conversations).where(wanted)).one_or_none()
    if row is None:
        raise NotThere(f"there is no conversation {named}", named)
    low, high = key_range(row.number)

    def count(table: Any) -> int:
        statement = select(func.count()).select_from(table).where(table.c.key.between(low, high))
        return connection.execute(statement).scalar_one()

    def messages_in() -> Iterator[Message]:
        records = (codec.decode_message(blob) for _, blob in _read_rows(connection, messages, low, high))
        return scan_messages(connection, row.number, records)

    def plans_in() -> Iterator[Plan]:
        return (codec.decode_plan(blob) for _, blob in _read_rows(connection, plans, low, high))

    scan = ConversationScan(
        status=Status(row.last_number, bool(row.completed), row.completions, row.completed_number),
        details=conversation_records.read_details(connection, row),
        create_time_us=row.create_time_us,
        message_count=count(messages),
        plan_count=count(plans),
        messages=messages_in,
        plans=plans_in,
    )
    return visit(scan)


def _read_rows(connection: Connection, table: Any, low: int, high: int) -> Iterator[Sequence[Any]]:
    statement = (
        select(table.c.key, table.c.payload)
        .where(table.c.key.between(_low, _high))
        .order_by(table.c.key)
        .limit(bindparam("limit"))
    )
    return iter(fetch_pages(connection, statement, low, high))


def list_conversation_names(connection: Connection, namespace: str, after: str, limit: int) -> list[str]:
    least = AFTER_HIDDEN if namespace else ""
    statement = (
        select(conversations.c.name)
        .where(conversations.c.namespace == namespace, conversations.c.name > (after or least))
        .order_by(conversations.c.name)
        .limit(limit)
    )
    return list(connection.execute(statement).scalars())
