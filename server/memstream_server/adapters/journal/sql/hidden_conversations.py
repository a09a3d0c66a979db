"""Hidden conversations: rows that no reader finds, for what takes several transactions.

One transaction holds up the writes of all callers, so none writes or deletes more than a slice. A large body is written
in parts before its message; a copy grows until it is named; a deleted conversation keeps its rows until they are
purged. Each has a row of `conversations` with a name that begins with a newline, as no other name does, and readers
find conversations by name. `expire_time_us` says when it is purged: DELETED is at once, null is never (the body of a
message), and a later time removes what a crash has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from memstream_server.adapters.journal.sql import bulk
from memstream_server.adapters.journal.sql.schema import (
    conversation_labels,
    conversations,
    key_range,
    message_bodies,
    messages,
    plans,
    row_key,
    states,
)
from memstream_server.ports.journal.errors import JournalError

HIDDEN = "\n"
"""Begins the names of hidden conversations."""
AFTER_HIDDEN = "\x0b"
"""After the names of hidden conversations, and before every other name."""
DELETED = 0
WRITING_US = 3_600 * 1_000_000
"""What has not been finished after this time is purged."""
BODY_INLINE_BYTES = 1_024
"""A body of up to this size is in the message's record."""
SLICE_BYTES = 128 << 10
"""A transaction writes or deletes about so many bytes of bodies and messages,"""
SLICE_ROWS = 500
"""and so many rows."""
_BODIES = bulk.build_insert(message_bodies, ("key",))
_PAYLOADS = ((message_bodies, message_bodies.c.body), (messages, messages.c.payload), (plans, plans.c.payload))


def create_hidden(connection: Connection, namespace: str, name: str, expire_time_us: int | None) -> int:
    """The number of a new conversation. `name`: with HIDDEN, or, of an import, without a namespace."""
    row = {
        "namespace": namespace,
        "name": name,
        "last_number": 0,
        "completed": False,
        "completions": 0,
        "completed_number": 0,
        "create_time_us": 0,
        "update_time_us": 0,  # after all others where the latest are listed first
        "expire_time_us": expire_time_us,
    }
    number: int = connection.execute(insert(conversations).returning(conversations.c.number), row).scalar_one()
    return number


def hide_conversation(connection: Connection, row: Row[Any]) -> None:
    """Delete a conversation for all readers, except for its state."""
    connection.execute(delete(conversation_labels).where(conversation_labels.c.conversation == row.number))
    hidden = {"labels": "", "ttl_us": None, "feed_memory": "", "update_time_us": 0, "expire_time_us": DELETED}
    if row.namespace:  # a conversation without one is found by the import that stages it
        hidden["name"] = f"{HIDDEN}{row.number}"
    connection.execute(update(conversations).where(conversations.c.number == row.number).values(hidden))


# ---- bodies in parts


def select_large(given: Iterable[bytes | None]) -> list[bytes]:
    """The bodies that are to be written in parts: if all of one call are more than a slice, those with a row."""
    bodies = [body for body in given if body is not None]
    if sum(map(len, bodies)) <= SLICE_BYTES:
        return []
    return list(dict.fromkeys(body for body in bodies if len(body) > BODY_INLINE_BYTES))


def split_bodies(stored: Mapping[bytes, int]) -> Iterator[list[tuple[int, bytes, None]]]:
    """Rows of `message_bodies`, a slice each."""
    rows: list[tuple[int, bytes, None]] = []
    size = 0
    for body, number in stored.items():
        for place, start in enumerate(range(0, len(body), SLICE_BYTES), 1):
            part = body[start : start + SLICE_BYTES]
            if rows and size + len(part) > SLICE_BYTES:
                yield rows
                rows, size = [], 0
            rows.append((row_key(number, place), part, None))
            size += len(part)
    yield rows


def write_bodies(connection: Connection, rows: Sequence[tuple[int, bytes, int | None]]) -> None:
    """Rows of `message_bodies`. Those that refer to parts keep them from being purged."""
    bulk.write_rows(connection, _BODIES, rows)
    keep_parts(connection, {number for _, _, number in rows if number is not None})


def keep_parts(connection: Connection, numbers: Iterable[int]) -> None:
    """A body or document refers to these parts: they are not purged. Raises JournalError if they were."""
    for some in bulk.split_ids(sorted(numbers)):
        present = conversations.c.number.in_(some) & conversations.c.expire_time_us.is_distinct_from(DELETED)
        kept = connection.execute(update(conversations).where(present).values(expire_time_us=None)).rowcount
        if kept != len(some):
            raise JournalError("the parts of a body are gone: send it again")


def read_bodies(connection: Connection, keys: Sequence[int]) -> dict[int, bytes]:
    """The bodies by the key of their messages."""
    found: dict[int, bytes] = {}
    for some in bulk.split_ids(keys):
        wanted = select(message_bodies.c.key, message_bodies.c.body, message_bodies.c.parts)
        for key, body, parts in connection.execute(wanted.where(message_bodies.c.key.in_(some))).all():
            found[key] = bytes(body) if parts is None else read_parts(connection, parts)
    return found


def read_parts(connection: Connection, number: int) -> bytes:
    """The body or document of these parts."""
    within = message_bodies.c.key.between(*key_range(number))
    parts = select(message_bodies.c.body).where(within).order_by(message_bodies.c.key)
    return b"".join(connection.execute(parts).scalars())


def drop_bodies(connection: Connection, which: ColumnElement[bool]) -> None:
    """Delete rows of `message_bodies`; parts that no other message refers to are left to the purge."""
    referring = select(message_bodies.c.parts).where(which, message_bodies.c.parts.is_not(None))
    numbers = sorted(set(connection.execute(referring).scalars()))
    connection.execute(delete(message_bodies).where(which))
    release_parts(connection, numbers)


def release_parts(connection: Connection, numbers: Sequence[int]) -> None:
    """Leave parts to the purge, unless another body or document refers to them."""
    for some in bulk.split_ids(numbers):
        of_these = conversations.c.number.in_(some)
        # PostgreSQL: another process that drops the other reference commits first, or waits.
        connection.execute(select(conversations.c.number).where(of_these).order_by("number").with_for_update()).all()
        kept = select(message_bodies.c.parts).where(message_bodies.c.parts.in_(some))
        of_states = select(states.c.parts).where(states.c.parts.in_(some))
        unused = update(conversations).where(
            of_these, conversations.c.number.not_in(kept), conversations.c.number.not_in(of_states)
        )
        connection.execute(unused.values(expire_time_us=DELETED))


def list_unused(connection: Connection, numbers: Sequence[int]) -> list[int]:
    """Those that are still to be purged: of a write that has failed, or has found its message there."""
    columns = (conversations.c.number, conversations.c.name, conversations.c.expire_time_us)
    found: list[int] = []
    for some in bulk.split_ids(numbers):  # by number alone: PostgreSQL would rather read all that expire
        rows = connection.execute(select(*columns).where(conversations.c.number.in_(some))).all()
        found += [row.number for row in rows if row.name < AFTER_HIDDEN and row.expire_time_us is not None]
    return found


def release_unused(connection: Connection, numbers: Sequence[int]) -> list[int]:
    """`list_unused`, as deleted: if the outcome of the write is unknown, it is not done after this."""
    unused = list_unused(connection, numbers)
    for some in bulk.split_ids(unused):
        left = conversations.c.number.in_(some) & conversations.c.expire_time_us.is_not(None)
        connection.execute(update(conversations).where(left).values(expire_time_us=DELETED))
    return list_unused(connection, unused)


# ---- slices


def list_slice(connection: Connection, low: int, high: int) -> tuple[int, int, bool]:
    """(the last key of a slice of the messages from `low` to `high`, how many it has, whether it has all of them)."""
    count, size, last = 0, 0, high
    sizes = dict(_sizes(connection, message_bodies, message_bodies.c.body, low, high))
    for key, length in _sizes(connection, messages, messages.c.payload, low, high):
        size += length + sizes.get(key, 0)
        if count == SLICE_ROWS or (count and size > SLICE_BYTES):
            return last, count, False
        count, last = count + 1, key
    return high, count, True


def purge_slice(connection: Connection, number: int) -> bool:
    """Delete some rows of a conversation; whether it is gone."""
    low, high = key_range(number)
    for table, payload in _PAYLOADS:
        size, last = 0, None
        for key, length in _sizes(connection, table, payload, low, high):
            if last is not None and size + length > SLICE_BYTES:
                break
            size, last = size + length, key
        if last is not None:
            rows = table.c.key.between(low, last)
            if table is message_bodies:
                drop_bodies(connection, rows)
            else:
                connection.execute(delete(table).where(rows))
            return False
    connection.execute(delete(conversation_labels).where(conversation_labels.c.conversation == number))
    connection.execute(delete(conversations).where(conversations.c.number == number))
    return True


def _sizes(connection: Connection, table: Any, payload: Any, low: int, high: int) -> Sequence[tuple[int, int]]:
    wanted = select(table.c.key, func.length(payload)).where(table.c.key.between(low, high))
    rows = connection.execute(wanted.order_by(table.c.key).limit(SLICE_ROWS + 1)).all()
    return [(key, length) for key, length in rows]


def find_due(connection: Connection, now_us: int) -> int | None:
    """The number of a hidden conversation that is to be purged."""
    due = (conversations.c.expire_time_us <= now_us) & (conversations.c.name < AFTER_HIDDEN)
    statement = select(conversations.c.number).where(due).order_by(conversations.c.expire_time_us).limit(1)
    return connection.execute(statement).scalar_one_or_none()


def list_deleted(connection: Connection, namespace: str) -> Sequence[int]:
    """The numbers of deleted conversations, and of the parts of deleted bodies, that are to be purged."""
    deleted = (conversations.c.expire_time_us == DELETED) & (conversations.c.namespace == namespace)
    return connection.execute(select(conversations.c.number).where(deleted)).scalars().all()
