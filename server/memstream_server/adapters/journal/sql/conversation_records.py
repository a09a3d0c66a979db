"""Conversations as wholes: list, label, expire, erase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, insert, or_, select, update

from memstream_server.adapters.journal.sql import bulk, codec, messages, states
from memstream_server.adapters.journal.sql import hidden_conversations as hidden
from memstream_server.adapters.journal.sql.schema import FEED_DUE, conversation_labels, conversations, requests
from memstream_server.ports.conversation_records import (
    USER_LABEL,
    ConversationChange,
    ConversationQuery,
    ConversationRecord,
    Feed,
    StateName,
    StateScope,
)
from memstream_server.ports.conversations import ConversationExists, ConversationName, Details, NotThere, Precondition
from memstream_server.ports.journal.records import Labels

_LAST = "\U0010ffff"
"""Above every character of a name."""
_ANSWERS_TO = (
    "AppendMessageRequest",
    "PopMessageRequest",
    "ReplaceMessageRequest",
    "SetStateRequest",
    "UpdateConversationRequest",
    "ForkConversationRequest",
    "SavePlansRequest",
    "UpdatePlanRequest",
    "CompletePlanRequest",
    "WriteTogetherRequest",
)
"""Requests whose stored answers have what a user said, or name the user."""
_ANSWERS_READ = 500


# ---- conversations


def get_record(connection: Connection, conversation: ConversationName) -> ConversationRecord:
    return _decode_row(messages.get_row(connection, conversation))


def list_records(connection: Connection, query: ConversationQuery) -> list[ConversationRecord]:
    table = conversations.c
    wanted: list[ColumnElement[bool]] = [table.namespace == query.namespace, table.name > hidden.AFTER_HIDDEN]
    if query.prefix:
        wanted += [table.name >= query.prefix, table.name <= query.prefix + _LAST]
    statement = select(conversations)
    for label in query.labels:  # the first index read is that of a label: a user has few of a namespace's conversations
        found = conversation_labels.alias()
        statement = statement.join(found, found.c.conversation == table.number)
        wanted += [found.c.namespace == query.namespace, found.c.label == codec.hash_label(label)]
    order: tuple[ColumnElement[Any], ...] = (table.name,)
    if query.latest_first:
        order = (table.update_time_us.desc(), table.number.desc())
        if query.before is not None:
            update_time_us, number = query.before
            wanted.append(table.update_time_us <= update_time_us)
            wanted.append(or_(table.update_time_us < update_time_us, table.number < number))
    else:
        wanted.append(table.name > query.after_name)
    statement = statement.where(*wanted).order_by(*order).limit(query.limit)
    return [_decode_row(row) for row in connection.execute(statement)]


def update_record(
    connection: Connection, conversation: ConversationName, change: ConversationChange, now_us: int
) -> ConversationRecord:
    row = messages.find_row(connection, conversation, lock=True)
    if row is None:
        if not (change.allow_missing or change.absent):
            raise NotThere(f"there is no conversation {conversation}", conversation)
        row = messages.create_row(connection, conversation.namespace, conversation.name, now_us)
    elif change.absent:
        raise ConversationExists(conversation)
    if change.labels is not None:
        put_labels(connection, conversation.namespace, row.number, change.labels)
    values: dict[str, Any] = {} if change.ttl_us is None else {"ttl_us": change.ttl_us or None}
    if change.feed_memory not in (None, row.feed_memory):
        values |= {"feed_memory": change.feed_memory, "fed_number": 0}
    if values:
        connection.execute(update(conversations).where(conversations.c.number == row.number).values(values))
    messages.touch_row(connection, row.number, now_us)
    return get_record(connection, conversation)


def delete_record(connection: Connection, conversation: ConversationName, last_number: int | None = None) -> int:
    row = messages.get_row(connection, conversation, lock=True)
    messages.check_condition(connection, conversation, row, Precondition(last_number))
    return _delete_row(connection, row)


def prune_expired(connection: Connection, now_us: int, limit: int) -> int:
    """Delete conversations for all readers; how many."""
    due = (conversations.c.expire_time_us <= now_us) & (conversations.c.name > hidden.AFTER_HIDDEN)
    first = select(conversations).where(due).order_by(conversations.c.expire_time_us).limit(limit)
    rows = connection.execute(first.with_for_update()).all()  # PostgreSQL: not those that another process touches
    for row in rows:
        _delete_row(connection, row)
    return len(rows)


def list_names_of(connection: Connection, namespace: str, user: str) -> list[str]:
    """The names of the user's conversations."""
    return list(connection.execute(select(conversations.c.name).where(_is_of(namespace, user))).scalars())


def erase_user(connection: Connection, namespace: str, user: str, limit: int) -> list[str]:
    """Delete at most `limit` of the user's conversations; their names."""
    rows = connection.execute(select(conversations).where(_is_of(namespace, user, limit))).all()
    for row in rows:
        _delete_row(connection, row)
    return [row.name for row in rows]


def _is_of(namespace: str, user: str, limit: int | None = None) -> ColumnElement[bool]:
    labels = conversation_labels.c
    labelled = (labels.namespace == namespace) & (labels.label == codec.hash_label((USER_LABEL, user)))
    return conversations.c.number.in_(select(labels.conversation).where(labelled).limit(limit))


def find_answers(connection: Connection, namespace: str, names: Iterable[str]) -> list[str]:
    """The stored answers in which one of the names is a field, as keys of `requests`."""
    marks = [_as_field(name) for name in names]
    found: list[str] = []
    for kind in _ANSWERS_TO:
        after = f"{namespace}\n{kind}\n"
        last = after + _LAST
        while True:
            stored = select(requests.c.request, requests.c.response).where(
                requests.c.request > after, requests.c.request <= last
            )
            page = connection.execute(stored.order_by(requests.c.request).limit(_ANSWERS_READ)).all()
            found += [request for request, response in page if any(mark in response for mark in marks)]
            if len(page) < _ANSWERS_READ:
                break
            after = page[-1].request
    return found


def _as_field(name: str) -> bytes:
    """A name as a protobuf message has it, behind its length: "ann" is not found in "joanna"."""
    data = name.encode()
    size = len(data)
    return (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])) + data


def empty_answers(connection: Connection, keys: Sequence[str]) -> None:
    """Remove what stored answers say: a repeat of their requests then ends with an error."""
    for some in bulk.split_ids(keys):
        emptied = update(requests).where(requests.c.request.in_(some))
        connection.execute(emptied.values(digest=b"", response=b""))


def _delete_row(connection: Connection, row: Row[Any]) -> int:
    """Its rows are left to the purge."""
    hidden.hide_conversation(connection, row)
    states.delete_state(connection, StateName(row.namespace, StateScope.SESSION, row.name))
    count: int = row.message_count
    return count


def put_labels(connection: Connection, namespace: str, number: int, labels: Labels) -> None:
    connection.execute(delete(conversation_labels).where(conversation_labels.c.conversation == number))
    rows = [{"namespace": namespace, "label": codec.hash_label(one), "conversation": number} for one in labels]
    if rows:
        connection.execute(insert(conversation_labels), rows)
    values = {"labels": codec.encode_labels(labels) if labels else ""}
    connection.execute(update(conversations).where(conversations.c.number == number).values(values))


def decode_labels(text: str) -> Labels:
    return codec.decode_labels(text) if text else ()


def _decode_row(row: Row[Any]) -> ConversationRecord:
    return ConversationRecord(
        ConversationName(row.namespace, row.name),
        row.number,
        decode_labels(row.labels),
        row.ttl_us,
        row.expire_time_us,
        row.message_count,
        row.last_number,
        bool(row.completed),
        row.create_time_us,
        row.update_time_us,
        row.feed_memory,
        row.fed_number,
    )


def put_details(
    connection: Connection, conversation: ConversationName, number: int, details: Details, stored: messages.Stored
) -> None:
    """What an imported conversation has besides messages and plans."""
    put_labels(connection, conversation.namespace, number, details.labels)
    messages.update_row(connection, number, ttl_us=details.ttl_us)
    if details.state is not None:
        named = StateName(conversation.namespace, StateScope.SESSION, conversation.name)
        states.set_state(connection, named, details.state, None, details.update_time_us, stored)
    messages.touch_row(connection, number, details.update_time_us)


def read_details(connection: Connection, row: Row[Any]) -> Details:
    """What `put_details` writes, of a row of `conversations`."""
    document = states.read_session(connection, ConversationName(row.namespace, row.name))
    return Details(decode_labels(row.labels), row.ttl_us, row.update_time_us, document)


def list_due_feeds(connection: Connection, after: int, limit: int) -> list[Feed]:
    table = conversations.c
    due = select(conversations).where(FEED_DUE, table.number > after).order_by(table.number).limit(limit)
    return [
        Feed(row.number, ConversationName(row.namespace, row.name), row.feed_memory, row.fed_number, row.last_number)
        for row in connection.execute(due)
    ]
