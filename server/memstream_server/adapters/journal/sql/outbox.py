"""The index outbox: entries added, waiting and done; and which fragments of a memory belong in the index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, Connection, bindparam, delete, exists, func, insert, literal, select

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql.bulk import IDS_MAX, PAGE_ROWS, fetch_pages, fetch_rows
from memstream_server.adapters.journal.sql.fragment_reads import OF_SPACE, UNLESS_STORED
from memstream_server.adapters.journal.sql.reads import get_row
from memstream_server.adapters.journal.sql.schema import fragments, key_range, memories, outbox, vectors
from memstream_server.adapters.journal.sql.vector_forms import Computing, decode_bytes, pack
from memstream_server.core.values import Tier
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.records import Indexable, IndexEntry

_low: BindParameter[int] = bindparam("low")
_high: BindParameter[int] = bindparam("high")
_limit: BindParameter[int] = bindparam("limit")
_model: BindParameter[str] = bindparam("model")

_ENTER = bulk.build_insert(outbox)
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
    .where(fragments.c.tier == Tier.LONG_TERM.value),
)
_CLEAR_UPSERTS = delete(outbox).where(outbox.c.deleted.is_(False))
_DONE = delete(outbox).where(outbox.c.id.in_(bindparam("ids", expanding=True)))

_RANGES = (
    select(outbox.c.memory, func.min(outbox.c.id), func.max(outbox.c.id))
    .where(outbox.c.memory.in_(bindparam("uids", expanding=True)))
    .group_by(outbox.c.memory)
)
_OF_MEMORY = select(outbox.c.fragment).where(outbox.c.memory == bindparam("uid"))
_SIZE = select(func.count()).select_from(outbox)
_LAST = select(func.max(outbox.c.id))
_live = (
    (fragments.c.memory == memories.c.number)
    & (fragments.c.id == outbox.c.fragment)
    & fragments.c.forget_time_us.is_(None)
    & (fragments.c.tier == Tier.LONG_TERM.value)
    & outbox.c.deleted.is_(False)
)
_ENTRIES = (
    select(
        outbox.c.id,
        outbox.c.memory,
        outbox.c.fragment,
        outbox.c.deleted,
        fragments.c.key,
        vectors.c.model,
        vectors.c.vector,
        memories.c.namespace,
        UNLESS_STORED,
    )
    .outerjoin(memories, memories.c.uid == outbox.c.memory)
    .outerjoin(fragments, _live)
    .outerjoin(vectors, OF_SPACE)
    .where(outbox.c.id > bindparam("after"))
    .order_by(outbox.c.id)
    .limit(_limit)
)
_INDEXABLE = (
    select(fragments.c.key, fragments.c.id)
    .join(vectors, OF_SPACE)
    .where(
        fragments.c.key.between(_low, _high),
        fragments.c.tier == Tier.LONG_TERM.value,
        fragments.c.forget_time_us.is_(None),
    )
    .order_by(fragments.c.key)
    .limit(_limit)
)
_LARGEST = (
    select(func.count()).select_from(fragments).group_by(fragments.c.memory).order_by(func.count().desc()).limit(1)
)


# ---- written


def enter_entries(connection: Connection, entries: Sequence[IndexEntry]) -> None:
    rows = [(entry.memory, entry.fragment, entry.delete) for entry in entries]
    bulk.write_rows(connection, _ENTER, rows)


def remove_entries(connection: Connection, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), IDS_MAX):
        connection.execute(_DONE, {"ids": ids[start : start + IDS_MAX]})


def enter_deletions(connection: Connection) -> None:
    """Enter the deletion of everything that an index may hold under the memories' present uids."""
    connection.execute(_EMPTY)


def enter_all(connection: Connection) -> int:
    """New upserts replace those that waited. Deletions stay, for an index that was not empty."""
    connection.execute(_CLEAR_UPSERTS)
    return connection.execute(_REFILL).rowcount


# ---- read


def read_entries(
    connection: Connection, computing: Computing, limit: int, model: str | None
) -> list[tuple[IndexEntry, Indexable | None]]:
    """Entries with the fragment's present content, not that of the time of the entry.

    All entries of a fragment get the content of its last entry: in whatever groups they are applied, the index ends
    up equal to the journal.
    """
    entries: list[IndexEntry] = []
    last: dict[tuple[str, str], Indexable | None] = {}
    unstored: dict[tuple[str, str], tuple[str, str, bytes]] = {}
    for number, uid, name, deleted, key, space, vector, namespace, blob in _read_waiting(connection, limit, model):
        entries.append(IndexEntry(uid, name, bool(deleted), number))
        packed = pack(decode_bytes(vector)) if vector else None
        last[uid, name] = None if key is None else Indexable(space or "", packed)
        unstored.pop((uid, name), None)
        if blob is not None:
            unstored[uid, name] = space, namespace, blob
    last |= _compute_vectors(computing, unstored)
    return [(entry, last[entry.memory, entry.fragment]) for entry in entries]


def _compute_vectors(
    computing: Computing, unstored: Mapping[tuple[str, str], tuple[str, str, bytes]]
) -> dict[tuple[str, str], Indexable]:
    """unstored: (space, namespace, record) of fragments whose vectors are to be computed."""
    by_space: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for which, (space, namespace, _) in unstored.items():
        by_space.setdefault((space, namespace), []).append(which)
    found: dict[tuple[str, str], Indexable] = {}
    for (space, namespace), some in by_space.items():
        made = computing.compute(space, [codec.decode_fragment(unstored[which][2], 0, 0) for which in some], namespace)
        found |= {which: Indexable(space, pack(vector)) for which, vector in zip(some, made, strict=True)}
    return found


def _read_waiting(connection: Connection, limit: int, model: str | None) -> Iterator[list[Any]]:
    after = 0
    while limit > 0:
        page = min(limit, PAGE_ROWS)
        rows = fetch_rows(connection, _ENTRIES, {"after": after, "limit": page, "model": model})
        yield from rows
        if len(rows) < page:
            return
        after, limit = rows[-1][0], limit - page


def count_entries(connection: Connection) -> int:
    return connection.execute(_SIZE).scalar_one()


def last_id(connection: Connection) -> int:
    return connection.execute(_LAST).scalar_one() or 0


def id_ranges(connection: Connection, uids: Sequence[str]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for start in range(0, len(uids), IDS_MAX):
        rows = connection.execute(_RANGES, {"uids": uids[start : start + IDS_MAX]})
        found |= {uid: (first, last) for uid, first, last in rows}
    return found


def entered_fragments(connection: Connection, uid: str) -> set[str]:
    return set(connection.execute(_OF_MEMORY, {"uid": uid}).scalars())


def list_indexable(connection: Connection, uid: str, model: str | None) -> list[str]:
    try:
        memory = get_row(connection, uid)
    except StaleWrite:
        return []
    return [name for _, name in fetch_pages(connection, _INDEXABLE, *key_range(memory.number), model=model)]


def count_largest_memory(connection: Connection) -> int:
    return connection.execute(_LARGEST).scalar_one_or_none() or 0
