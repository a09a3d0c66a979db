"""Conversations that the transaction of their last part names: a fork, one of which much is deleted, and an import.

A copy is hidden until it has all messages; the transaction of its last slice names it. A conversation of which more
than a slice is deleted is replaced by a copy of what it keeps, so that no reader sees half of the deletion. A source
whose messages were replaced or deleted meanwhile raises SourceChanged; what was appended meanwhile is copied.

An imported conversation is staged: written in parts under an empty namespace, then named in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Row, case, cast, insert, select, update

from memstream_server.adapters.journal.sql import bulk, codec, messages, states
from memstream_server.adapters.journal.sql import conversation_records as records
from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql.hidden_conversations import HIDDEN
from memstream_server.adapters.journal.sql.schema import (
    conversations,
    key_position,
    key_range,
    message_bodies,
    plans,
    row_key,
)
from memstream_server.adapters.journal.sql.schema import messages as message_rows
from memstream_server.ports.conversation_records import REMOVED_MAX, ConversationRecord, RemovesTooMany
from memstream_server.ports.conversations import (
    ConversationExists,
    ConversationName,
    Message,
    Plan,
    Precondition,
    Removal,
    Removed,
    Status,
)
from memstream_server.ports.journal.errors import AlreadyExists, JournalError, StaleWrite

_PLANS = bulk.build_insert(plans, ("key",))


class SourceChanged(JournalError):
    """The conversation was changed while it was copied: the copy begins again."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that is not finished. Work on it returns another: a transaction may run twice."""

    number: int
    """Of the hidden conversation."""
    source: int
    changes: int
    """Of the source, when the copy began."""
    ranges: tuple[tuple[int, int | None], ...]
    """The first and the last number of what is copied; None: whatever the source has by then."""
    copied: int = 0
    """The last number that has been copied."""
    count: int = 0


def fork_slice(
    connection: Connection,
    source: ConversationName,
    target: ConversationName,
    last: int | None,
    now_us: int,
    begun: Copy | str,
) -> Copy | ConversationRecord:
    """Continue a copy, or begin the one of this hidden name; the fork once it is whole."""
    old = messages.get_row(connection, source, lock=True)
    if isinstance(begun, str):
        if messages.find_row(connection, target) is not None:
            raise ConversationExists(target)
        if last is not None:
            messages.check_there(connection, source, old.number, last)
        begun = _begin(connection, old, target.namespace, ((1, last or old.last_number),), now_us, begun)
    copy, whole = _copy_slice(connection, old, begun)
    if not whole:
        return copy
    if messages.find_row(connection, target) is not None:
        raise ConversationExists(target)
    messages.update_row(
        connection,
        copy.number,
        name=target.name,
        create_time_us=now_us,
        last_number=copy.ranges[0][1],
        message_count=copy.count,
        message_time_us=old.message_time_us,
        ttl_us=old.ttl_us,
    )
    records.put_labels(connection, target.namespace, copy.number, records.decode_labels(old.labels))
    states.copy_state(connection, source, target, now_us)
    messages.touch_row(connection, copy.number, now_us)
    return records.get_record(connection, target)


def remove_slice(
    connection: Connection, conversation: ConversationName, removal: Removal, now_us: int, begun: Copy | str
) -> Copy | Removed:
    """Delete what is one slice at once. Of more, continue a copy of the rest, or begin the one of this hidden name."""
    old = messages.get_row(connection, conversation, lock=True)
    messages.check_condition(connection, conversation, old, Precondition(removal.last_number))
    if isinstance(begun, str):
        if removal.numbers:
            return messages.remove_numbers(connection, conversation, old.number, removal.numbers)
        first, last = messages.find_range(connection, old, removal)
        _, _, is_slice = hidden.list_slice(connection, row_key(old.number, first), row_key(old.number, last))
        if is_slice:
            count = messages.delete_range(connection, old.number, first, last)
            return Removed(count, messages.last_number(connection, old.number))
        begun = _begin(connection, old, conversation.namespace, ((1, first - 1), (last + 1, None)), now_us, begun)
    copy, whole = _copy_slice(connection, old, begun)
    if not whole:
        return copy
    _replace(connection, old, copy)
    return Removed(old.message_count - copy.count, messages.last_number(connection, copy.number))


def remove_at_once(connection: Connection, conversation: ConversationName, removal: Removal, now_us: int) -> Removed:
    """Delete in this transaction: some messages, or all. Raises RemovesTooMany."""
    old = messages.get_row(connection, conversation, lock=True)
    messages.check_condition(connection, conversation, old, Precondition(removal.last_number))
    if removal.numbers:
        return messages.remove_numbers(connection, conversation, old.number, removal.numbers)
    first, last = messages.find_range(connection, old, removal)
    if first == 1 and last >= old.last_number:
        name = f"{hidden.HIDDEN}all.{old.number}.{old.changes}"
        _replace(connection, old, _begin(connection, old, conversation.namespace, (), now_us, name))
        return Removed(old.message_count, 0)
    if messages.count_to(connection, old.number, first, last, REMOVED_MAX + 1) > REMOVED_MAX:
        raise RemovesTooMany(f"more than {REMOVED_MAX} messages of {conversation} are to be deleted, and not all")
    count = messages.delete_range(connection, old.number, first, last)
    return Removed(count, messages.last_number(connection, old.number))


def _begin(
    connection: Connection,
    old: Row[Any],
    namespace: str,
    ranges: tuple[tuple[int, int | None], ...],
    now_us: int,
    name: str,
) -> Copy:
    number = hidden.create_hidden(connection, namespace, name, now_us + hidden.WRITING_US)
    return Copy(number, old.number, old.changes, ranges)


def _copy_slice(connection: Connection, old: Row[Any], copy: Copy) -> tuple[Copy, bool]:
    """The copy with a slice more, and whether it is whole."""
    if (old.number, old.changes) != (copy.source, copy.changes):
        raise SourceChanged("the conversation was changed while it was copied: try again")
    for first, last in copy.ranges:
        low = max(first, copy.copied + 1)
        high = old.last_number if last is None else min(last, old.last_number)
        if low > high:
            continue
        start = row_key(old.number, low)
        end, count, whole = hidden.list_slice(connection, start, row_key(old.number, high))
        _copy_rows(connection, start, end, row_key(copy.number, 0) - row_key(old.number, 0), copy.number)
        copy = replace(copy, copied=key_position(end), count=copy.count + count)
        if not whole:
            return copy, False
    return copy, True


def _copy_rows(connection: Connection, low: int, high: int, moved: int, number: int) -> None:
    """Parts of bodies are not copied: both messages refer to them."""
    rows, bodies = message_rows.c, message_bodies.c
    owner = case((rows.client_id.is_not(None), cast(number, BigInteger)))
    copied = select(
        rows.key + moved, rows.sender, rows.receiver, rows.current_goal, rows.payload, owner, rows.client_id
    ).where(rows.key.between(low, high))
    names = ["key", "sender", "receiver", "current_goal", "payload", "conversation", "client_id"]
    connection.execute(insert(message_rows).from_select(names, copied))
    within = bodies.key.between(low, high)
    whole = select(bodies.key + moved, bodies.body).where(within, bodies.parts.is_(None))
    connection.execute(insert(message_bodies).from_select(["key", "body"], whole))
    referring = connection.execute(select(bodies.key, bodies.parts).where(within, bodies.parts.is_not(None)))
    hidden.write_bodies(connection, [(key + moved, b"", parts) for key, parts in referring.all()])


def _replace(connection: Connection, old: Row[Any], copy: Copy) -> None:
    """Put the copy in the place of the conversation, which is deleted but for its state."""
    hidden.hide_conversation(connection, old)
    own = {"number", "message_count", "changes"}
    values = {column.name: getattr(old, column.name) for column in conversations.c if column.name not in own}
    messages.update_row(connection, copy.number, **values, message_count=copy.count, changes=old.changes + 1)
    records.put_labels(connection, old.namespace, copy.number, records.decode_labels(old.labels))
    moved = row_key(copy.number, 0) - row_key(old.number, 0)
    of_old = plans.c.key.between(*key_range(old.number))
    connection.execute(update(plans).where(of_old).values(key=plans.c.key + moved))


def put_staged(
    connection: Connection,
    staged: str,
    create_time_us: int,
    new_messages: Sequence[Message],
    new_plans: Sequence[Plan],
    stored: messages.Stored,
) -> None:
    number = find_staged(connection, staged)
    if number is None:
        number = messages.create_row(connection, "", staged, create_time_us).number
    messages.put_staged(connection, number, new_messages, stored)
    put_plans(connection, number, new_plans)


def put_plans(connection: Connection, number: int, given: Sequence[Plan]) -> None:
    """Write plans in the place of those with their numbers; of several with one number the last."""
    rows = [(row_key(number, plan.number), plan.state.value, codec.encode_record(plan)) for plan in given]
    bulk.write_rows(connection, _PLANS, rows)


def publish_staged(connection: Connection, staged: str, named: ConversationName, status: Status) -> int:
    """The number of the conversation."""
    number = find_staged(connection, staged)
    if number is None:
        raise StaleWrite(f"the conversation staged as {staged} is gone")
    taken = (conversations.c.namespace == named.namespace) & (conversations.c.name == named.name)
    if connection.execute(select(conversations.c.number).where(taken)).first() is not None:
        raise AlreadyExists(f"conversation {named} exists")
    connection.execute(
        update(conversations)
        .where(conversations.c.number == number)
        .values(
            namespace=named.namespace,
            name=named.name,
            last_number=status.last_number,
            completed=status.completed,
            completions=status.completions,
            completed_number=status.completed_number,
        )
    )
    parts = select(message_bodies.c.parts).where(message_bodies.c.key.between(*key_range(number)))
    publish_parts(
        connection, named.namespace, conversations.c.number.in_(parts.where(message_bodies.c.parts.is_not(None)))
    )
    return number


def publish_parts(connection: Connection, namespace: str, which: ColumnElement[bool]) -> None:
    """Move staged parts to the namespace of the body or document that refers to them."""
    hidden_name = HIDDEN + conversations.c.name
    connection.execute(update(conversations).where(which).values(namespace=namespace, name=hidden_name))


def find_staged(connection: Connection, staged: str) -> int | None:
    """The number of what is staged."""
    named = (conversations.c.namespace == "") & (conversations.c.name == staged)
    return connection.execute(select(conversations.c.number).where(named)).scalar_one_or_none()
