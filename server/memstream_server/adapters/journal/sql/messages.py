"""Messages of a conversation: appended in one order, listed by number or time, replaced and deleted.

A list reads the records of its messages, then the bodies that fit. A body of up to BODY_INLINE_BYTES is in the record;
a larger one has a row of its own, so that a list without bodies reads none of its pages, or, if it was written in parts
before (`stored`, hidden_conversations.py), a row that refers to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, or_, select, update

from memstream_server.adapters.journal.sql import bulk, codec
from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql.hidden_conversations import BODY_INLINE_BYTES
from memstream_server.adapters.journal.sql.schema import (
    conversations,
    key_position,
    key_range,
    message_bodies,
    messages,
    row_key,
)
from memstream_server.ports.conversations import (
    UNREAD,
    Appended,
    ClientIdTaken,
    ConversationExists,
    ConversationName,
    LastNumberDiffers,
    Message,
    MessageQuery,
    NotThere,
    Precondition,
    Removal,
    Removed,
)

Stored = Mapping[bytes, int]
"""The hidden conversation of each body that has been written in parts."""
NOT_STORED: Stored = {}
_MESSAGES = bulk.build_insert(messages, ("key",))
_RECORD = select(messages.c.key, messages.c.payload)
_ROW = select(conversations).where(conversations.c.namespace == bindparam("ns"), conversations.c.name == bindparam("n"))
_LOCKED = _ROW.with_for_update()
_LISTED = (
    select(messages.c.payload)
    .where(messages.c.key.between(bindparam("low"), bindparam("high")))
    .order_by(messages.c.key)
    .limit(bindparam("k"))
)
_LATEST = _LISTED.order_by(None).order_by(messages.c.key.desc())
_ROWS_AT_ONCE = 32
"""Of records, which have up to 64 KB each."""


# ---- conversations


def find_row(connection: Connection, conversation: ConversationName, *, lock: bool = False) -> Row[Any] | None:
    """The conversation's row; `lock`: other processes wait to change it until this transaction ends."""
    named = {"ns": conversation.namespace, "n": conversation.name}
    return connection.execute(_LOCKED if lock else _ROW, named).one_or_none()


def get_row(connection: Connection, conversation: ConversationName, *, lock: bool = False) -> Row[Any]:
    """Raises NotThere."""
    found = find_row(connection, conversation, lock=lock)
    if found is None:
        raise NotThere(f"there is no conversation {conversation}", conversation)
    return found


def create_row(connection: Connection, namespace: str, name: str, now_us: int) -> Row[Any]:
    row = {
        "namespace": namespace,
        "name": name,
        "last_number": 0,
        "completed": False,
        "completions": 0,
        "completed_number": 0,
        "create_time_us": now_us,
        "update_time_us": now_us,
    }
    return connection.execute(insert(conversations).returning(*conversations.c), row).one()


def get_or_create(connection: Connection, conversation: ConversationName, now_us: int) -> Row[Any]:
    """The conversation's row, inserted if it does not exist."""
    found = find_row(connection, conversation, lock=True)
    return found or create_row(connection, conversation.namespace, conversation.name, now_us)


def update_row(connection: Connection, number: int, **values: Any) -> None:
    connection.execute(update(conversations).where(conversations.c.number == number).values(**values))


def touch_row(connection: Connection, number: int, now_us: int) -> None:
    """The conversation has changed now: its time to live begins again."""
    update_row(connection, number, update_time_us=now_us, expire_time_us=conversations.c.ttl_us + now_us)


# ---- writes


def append_message(
    connection: Connection, conversation: ConversationName, message: Message, now_us: int, stored: Stored = NOT_STORED
) -> Message:
    done = append_messages(connection, conversation, [message], Precondition(), now_us, stored)
    if not done.count:
        return read_message(connection, conversation, done.last_number)
    return replace(
        message, number=done.last_number, create_time_us=done.create_time_us, update_time_us=done.create_time_us
    )


def append_messages(
    connection: Connection,
    conversation: ConversationName,
    given: Sequence[Message],
    condition: Precondition,
    now_us: int,
    stored: Stored = NOT_STORED,
) -> Appended:
    row = find_row(connection, conversation, lock=True)
    present = {} if row is None else _find_present(connection, row.number, given)
    fresh = [one for one in given if one.client_id not in present]
    if fresh:
        check_condition(connection, conversation, row, condition)
        row = row or create_row(connection, conversation.namespace, conversation.name, now_us)
    assert row is not None
    time_us = max(now_us, row.message_time_us)
    made = [
        replace(one, number=row.last_number + place, create_time_us=time_us, update_time_us=time_us)
        for place, one in enumerate(fresh, 1)
    ]
    reached = row.last_number + len(made)
    if made:
        update_row(
            connection,
            row.number,
            last_number=reached,
            completed=False,
            message_time_us=time_us,
            message_count=row.message_count + len(made),
            update_time_us=time_us,
            expire_time_us=conversations.c.ttl_us + time_us,
        )
        write_messages(connection, row.number, made, stored)
    numbers = {id(old): new.number for old, new in zip(fresh, made, strict=True)}
    found = tuple(present[one.client_id] if one.client_id in present else numbers[id(one)] for one in given)
    return Appended(found, len(made), reached if made else max(found, default=0), time_us)


def put_staged(connection: Connection, number: int, given: Sequence[Message], stored: Stored) -> None:
    """Add messages with their numbers and times to a conversation that is being imported."""
    write_messages(connection, number, given, stored)
    _add_count(connection, number, len(given))
    if given:
        update_row(connection, number, message_time_us=max(one.create_time_us for one in given))


def write_messages(connection: Connection, number: int, given: Iterable[Message], stored: Stored) -> None:
    """Write messages with their numbers, in the place of those that have them."""
    rows, bodies = [], list[tuple[int, bytes, int | None]]()
    for one in given:
        key = row_key(number, one.number)
        if one.body is not None and len(one.body) > BODY_INLINE_BYTES:
            parts = stored.get(one.body) if stored else None
            bodies.append((key, one.body if parts is None else b"", parts))
            one = replace(one, body=None)
        named = (number, one.client_id) if one.client_id else (None, None)
        rows.append((key, one.sender, one.receiver, one.current_goal, codec.encode_record(one), *named))
    bulk.write_rows(connection, _MESSAGES, rows)
    hidden.write_bodies(connection, bodies)


def replace_message(
    connection: Connection, conversation: ConversationName, message: Message, now_us: int, stored: Stored = NOT_STORED
) -> Message:
    number = get_row(connection, conversation, lock=True).number
    old = _read_record(connection, conversation, number, message.number)
    if message.client_id:
        owners = _find_numbers(connection, number, [message.client_id])
        if owners.get(message.client_id, message.number) != message.number:
            raise ClientIdTaken("another message of this conversation has the client_id")
    made = replace(message, create_time_us=old.create_time_us, update_time_us=max(now_us, old.create_time_us))
    hidden.drop_bodies(connection, message_bodies.c.key == row_key(number, message.number))
    write_messages(connection, number, [made], stored)
    _add_count(connection, number, 0)
    return made


def remove_numbers(
    connection: Connection, conversation: ConversationName, number: int, wanted: Sequence[int]
) -> Removed:
    count = _delete_numbers(connection, conversation, number, wanted)
    return Removed(count, last_number(connection, number))


def find_range(connection: Connection, row: Row[Any], removal: Removal) -> tuple[int, int]:
    """The first and the last number of what is to be deleted."""
    if removal.from_number is not None:
        return removal.from_number, max(row.last_number, removal.from_number)
    assert removal.oldest is not None
    within = select(messages.c.key).where(messages.c.key.between(*key_range(row.number))).order_by(messages.c.key)
    last = connection.execute(within.limit(1).offset(removal.oldest - 1)).scalar_one_or_none()
    return 1, row.last_number if last is None else key_position(last)


def count_to(connection: Connection, number: int, first: int, last: int, limit: int) -> int:
    """How many messages there are from `first` to `last`, at most `limit`."""
    within = messages.c.key.between(row_key(number, first), row_key(number, last))
    return len(connection.execute(select(messages.c.key).where(within).limit(limit)).all())


def pop_message(connection: Connection, conversation: ConversationName, expected: int | None = None) -> Message:
    row = get_row(connection, conversation, lock=True)
    check_condition(connection, conversation, row, Precondition(expected))
    found = read_last_message(connection, conversation)
    delete_range(connection, row.number, found.number)
    return found


def delete_range(connection: Connection, number: int, first: int = 0, last: int | None = None) -> int:
    """Delete the messages from `first` to `last`, in one transaction; how many."""
    low, high = row_key(number, first), key_range(number)[1] if last is None else row_key(number, last)
    hidden.drop_bodies(connection, message_bodies.c.key.between(low, high))
    count = connection.execute(delete(messages).where(messages.c.key.between(low, high))).rowcount
    _add_count(connection, number, -count)
    return count


def _add_count(connection: Connection, number: int, count: int) -> None:
    """Messages were added or deleted. Whatever does not only append is a change, which a copy in slices must notice."""
    counted = {"message_count": conversations.c.message_count + count, "changes": conversations.c.changes + 1}
    connection.execute(update(conversations).where(conversations.c.number == number).values(counted))


def check_condition(
    connection: Connection, conversation: ConversationName, row: Row[Any] | None, condition: Precondition
) -> None:
    if condition.absent and row is not None:
        raise ConversationExists(conversation)
    if condition.last_number is not None:
        last = 0 if row is None else last_number(connection, row.number)
        if last != condition.last_number:
            raise LastNumberDiffers(f"the last message of {conversation} is {last}", last)


def _find_present(connection: Connection, number: int, given: Sequence[Message]) -> Mapping[str, int]:
    """The number of each message that is there already, by client id. Raises ClientIdTaken if it is another one."""
    wanted = {one.client_id: one for one in given if one.client_id}
    present = _find_numbers(connection, number, list(wanted)) if wanted else {}
    for client_id, place in present.items():
        key = row_key(number, place)
        blob = connection.execute(select(messages.c.payload).where(messages.c.key == key)).scalar_one()
        (found,) = _with_bodies(connection, number, [codec.decode_message(blob)], 1)
        if replace(found, number=0, create_time_us=0, update_time_us=0) != wanted[client_id]:
            raise ClientIdTaken("another message of this conversation has the client_id")
    return present


def _find_numbers(connection: Connection, number: int, client_ids: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for some in bulk.split_ids(client_ids):
        named = (messages.c.conversation == number) & messages.c.client_id.in_(some)
        for client_id, key in connection.execute(select(messages.c.client_id, messages.c.key).where(named)):
            found[client_id] = key_position(key)
    return found


def _delete_numbers(connection: Connection, conversation: ConversationName, number: int, wanted: Sequence[int]) -> int:
    keys = [row_key(number, one) for one in set(wanted)]
    count = 0
    for some in bulk.split_ids(keys):
        hidden.drop_bodies(connection, message_bodies.c.key.in_(some))
        count += connection.execute(delete(messages).where(messages.c.key.in_(some))).rowcount
    _add_count(connection, number, -count)
    if count < len(keys):
        raise NotThere(f"the conversation {conversation} lacks {len(keys) - count} of these messages", conversation)
    return count


# ---- reads


def read_messages(connection: Connection, conversation: ConversationName, query: MessageQuery) -> list[Message]:
    number = get_row(connection, conversation).number
    low, high = key_range(number)
    low = row_key(number, query.after) + 1
    if query.before is not None:
        high = row_key(number, query.before) - 1
    if query.after_us is not None:
        low = max(low, row_key(number, _first_after(connection, number, query.after_us)))
    if query.before_us is not None:
        high = min(high, row_key(number, _first_after(connection, number, query.before_us - 1)) - 1)
    statement = _LATEST if query.newest_first else _LISTED
    if query.current_goal:
        statement = statement.where(messages.c.current_goal == query.current_goal)
    if query.agent:
        sent = messages.c.sender == query.agent
        got = messages.c.receiver == query.agent
        if query.other_agent:
            sent &= messages.c.receiver == query.other_agent
            got &= messages.c.sender == query.other_agent
        statement = statement.where(or_(sent, got))
    found: list[Message] = []
    left = query.records_max
    given = {"low": low, "high": high, "k": query.limit}
    # Not all at once: a thousand messages may have 64 MB.
    with connection.execute(statement, given, execution_options={"yield_per": _ROWS_AT_ONCE}) as rows:
        for blob in rows.scalars():
            left -= len(blob)
            found.append(codec.decode_message(blob))
            if left < 0 and len(found) > 1:
                found[-1] = Message(number=found[-1].number, body_size_bytes=UNREAD)
                break
    return list(_with_bodies(connection, number, found, query.bodies_max))


def read_message(connection: Connection, conversation: ConversationName, which: int | str) -> Message:
    """By its number or its client id."""
    number = get_row(connection, conversation).number
    wanted = which if isinstance(which, int) else _find_numbers(connection, number, [which]).get(which)
    if wanted is None:
        raise NotThere(f"the conversation {conversation} has no message with this client_id", conversation)
    record = _read_record(connection, conversation, number, wanted)
    (found,) = _with_bodies(connection, number, [record], 1)
    return found


def read_last_message(connection: Connection, conversation: ConversationName) -> Message:
    number = get_row(connection, conversation).number
    last = last_number(connection, number)
    if not last:
        raise NotThere(f"the conversation {conversation} has no messages", conversation)
    return read_message(connection, conversation, last)


def scan_messages(connection: Connection, number: int, records: Iterable[Message]) -> Iterator[Message]:
    """Each with its body, one body at a time."""
    for record in records:
        yield from _with_bodies(connection, number, [record], 1)


def check_there(connection: Connection, conversation: ConversationName, number: int, wanted: int) -> None:
    """Raises NotThere unless the conversation has the message."""
    _read_record(connection, conversation, number, wanted)


def _read_record(connection: Connection, conversation: ConversationName, number: int, wanted: int) -> Message:
    statement = select(messages.c.payload).where(messages.c.key == row_key(number, wanted))
    blob = connection.execute(statement).scalar_one_or_none()
    if blob is None:
        raise NotThere(f"the conversation {conversation} has no message {wanted}", conversation)
    return codec.decode_message(blob)


def last_number(connection: Connection, number: int) -> int:
    within = messages.c.key.between(*key_range(number))
    statement = select(messages.c.key).where(within).order_by(messages.c.key.desc()).limit(1)
    last = connection.execute(statement).scalar_one_or_none()
    return 0 if last is None else key_position(last)


def _first_after(connection: Connection, number: int, time_us: int) -> int:
    """The least number whose message, and all above, came later than `time_us`. Times ascend with the numbers."""
    low, high = 0, last_number(connection, number) + 1
    end = row_key(number, high)
    while low < high:
        middle = (low + high) // 2
        within = messages.c.key.between(row_key(number, middle), end)
        found = connection.execute(_RECORD.where(within).order_by(messages.c.key).limit(1)).one_or_none()
        if found is None or codec.decode_message(found.payload).create_time_us > time_us:
            high = middle
        else:
            low = key_position(found.key) + 1
    return low


def _with_bodies(connection: Connection, number: int, found: Sequence[Message], bytes_max: int) -> Iterator[Message]:
    """The messages; up to the one that exceeds `bytes_max`, and the first in any case, with their bodies."""
    if not bytes_max:
        yield from (replace(one, body=None) for one in found)
        return
    size, fitting = 0, 0
    for one in found:
        size += one.body_size_bytes
        if fitting and (size > bytes_max or not one.is_read):
            break
        fitting += 1
    keys = [row_key(number, one.number) for one in found[:fitting] if not one.is_whole]
    read = {key_position(key): body for key, body in hidden.read_bodies(connection, keys).items()}
    for place, one in enumerate(found):
        if place >= fitting:
            yield replace(one, body=None) if one.body_size_bytes else one
        else:
            yield replace(one, body=read[one.number]) if one.number in read else one
