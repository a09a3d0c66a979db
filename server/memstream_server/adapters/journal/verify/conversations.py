"""`memstream verify`: checks conversations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Connection, Row, bindparam, func, select, tuple_
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.sql import codec
from memstream_server.adapters.journal.sql.bulk import fetch_pages
from memstream_server.adapters.journal.sql.hidden_conversations import HIDDEN
from memstream_server.adapters.journal.sql.schema import (
    conversation_labels,
    conversations,
    key_position,
    key_range,
    message_bodies,
    messages,
    plans,
    states,
)
from memstream_server.adapters.journal.sql.states import read_document
from memstream_server.adapters.journal.verify.read_only_open import OpenedJournal
from memstream_server.core.json_text import find_fault
from memstream_server.ports.conversation_records import StateScope
from memstream_server.ports.journal.errors import JournalError

if TYPE_CHECKING:
    from memstream_server.adapters.journal.verify.report import Report

_STATES = 4
"""Documents read at once."""
_within = (bindparam("low", type_=BigInteger), bindparam("high", type_=BigInteger))
_limit = bindparam("limit", type_=BigInteger)
_MESSAGES = (
    select(
        messages.c.key,
        messages.c.sender,
        messages.c.receiver,
        messages.c.current_goal,
        messages.c.conversation,
        messages.c.client_id,
        messages.c.payload,
    )
    .where(messages.c.key.between(*_within))
    .order_by(messages.c.key)
    .limit(_limit)
)
_BODIES = (
    select(message_bodies.c.key, func.length(message_bodies.c.body), message_bodies.c.parts)
    .where(message_bodies.c.key.between(*_within))
    .order_by(message_bodies.c.key)
    .limit(_limit)
)
_PLANS = (
    select(plans.c.key, plans.c.state, plans.c.payload)
    .where(plans.c.key.between(*_within))
    .order_by(plans.c.key)
    .limit(_limit)
)


@dataclass(frozen=True, slots=True)
class _ConversationCheck:
    """The conversation that is checked."""

    connection: Connection
    row: Row[Any]
    report: Report

    def add_violation(self, check: str, text: str) -> None:
        self.report.add_violation(check, f"{_display_name(self.row)}: {text}")


def check_conversation(opened: OpenedJournal, number: int, report: Report) -> None:
    """Check one conversation in one snapshot. Unreadable rows become violations."""
    name = f"conversation number {number}"
    try:
        with opened.engine.begin() as connection:
            row = connection.execute(select(conversations).where(conversations.c.number == number)).one_or_none()
            if row is None:
                return  # a running server has discarded it
            name = _display_name(row)
            report.count_checked("conversations")
            checking = _ConversationCheck(connection, row, report)
            if row.name.startswith(HIDDEN):
                _check_hidden(checking)
                return
            _check_status(checking)
            _check_messages(checking)
            _check_plans(checking)
            _check_labels(checking)
    except DBAPIError as error:
        report.add_violation("conversations", f"{name} cannot be read: {opened.translate_error(error)}")


def _display_name(row: Row[Any]) -> str:
    return f"conversation {row.namespace}/{row.name}"


def _check_hidden(checking: _ConversationCheck) -> None:
    """What is never purged is the body of a message, or the document of a state."""
    number = checking.row.number
    messages_of = select(message_bodies.c.key).where(message_bodies.c.parts == number).limit(1)
    states_of = select(states.c.name).where(states.c.parts == number).limit(1)
    if checking.row.expire_time_us is None and all(
        checking.connection.execute(referring).first() is None for referring in (messages_of, states_of)
    ):
        checking.report.add_violation("messages", f"the body in parts, number {number}, has no message and no state")


def _check_status(checking: _ConversationCheck) -> None:
    row = checking.row
    if not 0 <= row.completed_number <= row.last_number:
        text = f"completed at message {row.completed_number}, its last is {row.last_number}"
        checking.add_violation("conversations", text)
    elif row.completed and (not row.completions or row.completed_number != row.last_number):
        text = f"completed {row.completions} times, the last at message {row.completed_number} of {row.last_number}"
        checking.add_violation("conversations", text)
    if not 0 <= row.fed_number <= row.last_number:
        text = f"has fed its memory up to message {row.fed_number}, its last is {row.last_number}"
        checking.add_violation("conversations", text)


def _check_messages(checking: _ConversationCheck) -> None:
    """Numbers may have gaps: messages are deleted. Their count is right, and no number is above the last one; an import
    that is staging messages (empty namespace) has not written that yet. Bodies belong to messages, whole."""
    count = 0
    bodies = dict(_read_sizes(checking))
    for key, sender, receiver, current_goal, conversation, client_id, payload in fetch_pages(
        checking.connection, _MESSAGES, *_key_range(checking)
    ):
        checking.report.count_checked("messages")
        count += 1
        number = key_position(key)
        if checking.row.namespace and number > checking.row.last_number:
            checking.add_violation("messages", f"message {number} is above the last number {checking.row.last_number}")
        body_size_bytes = bodies.pop(key, None)
        try:
            message = codec.decode_message(payload)
        except JournalError as error:
            checking.add_violation("messages", f"message {number} cannot be read: {error}")
            continue
        said = message.number, message.sender, message.receiver, message.current_goal, message.client_id
        named = (checking.row.number, message.client_id) if message.client_id else (None, None)
        if said != (number, sender, receiver, current_goal, client_id or "") or named != (conversation, client_id):
            checking.add_violation("messages", f"message {number} has columns that differ from its record")
        if (len(message.body or b"") if body_size_bytes is None else body_size_bytes) != message.body_size_bytes:
            checking.add_violation("messages", f"message {number} lacks its body of {message.body_size_bytes} bytes")
    if count != checking.row.message_count:
        checking.add_violation("messages", f"has {count} messages, {checking.row.message_count} are counted")
    for key in bodies:
        checking.add_violation("messages", f"message {key_position(key)} has a body and no record")


def _read_sizes(checking: _ConversationCheck) -> Iterator[tuple[int, int]]:
    """The key of each body, and how many bytes are there."""
    for key, length, parts in fetch_pages(checking.connection, _BODIES, *_key_range(checking)):
        within = message_bodies.c.key.between(*key_range(parts or 0))
        of_parts = select(func.coalesce(func.sum(func.length(message_bodies.c.body)), 0)).where(within)
        yield key, length if parts is None else int(checking.connection.execute(of_parts).scalar_one())


def _check_labels(checking: _ConversationCheck) -> None:
    """A conversation is found by each of its labels, and by no other; it expires when its time to live says."""
    row = checking.row
    entered = checking.connection.execute(
        select(conversation_labels.c.namespace, conversation_labels.c.label).where(
            conversation_labels.c.conversation == row.number
        )
    )
    found = {(namespace, bytes(label)) for namespace, label in entered}
    labels = codec.decode_labels(row.labels) if row.labels else ()
    if found != {(row.namespace, codec.hash_label(label)) for label in labels}:
        checking.add_violation("conversations", "is not found by its labels, or by labels that it does not have")
    expires_us = None if row.ttl_us is None else row.update_time_us + row.ttl_us
    if row.expire_time_us != expires_us:
        checking.add_violation(
            "conversations", f"expires at {row.expire_time_us} µs, its time to live says {expires_us}"
        )


def check_states(connection: Connection, report: Report) -> None:
    """Documents are JSON, and those of sessions have their conversation."""
    after = ("", "", "")
    order = (states.c.namespace, states.c.scope, states.c.name)
    place = tuple_(*order)
    while rows := connection.execute(select(states).where(place > after).order_by(*order).limit(_STATES)).all():
        for row in rows:
            report.count_checked("states")
            name = f"the state of {row.scope} {row.namespace}/{row.name}"
            if wrong := find_fault(read_document(connection, row)):
                report.add_violation("states", f"{name} is not JSON: {wrong}")
            owner = select(conversations.c.number).filter_by(namespace=row.namespace, name=row.name)
            if row.scope == StateScope.SESSION.value and connection.execute(owner).first() is None:
                report.add_violation("states", f"{name} has no conversation")
        after = (rows[-1].namespace, rows[-1].scope, rows[-1].name)


def _check_plans(checking: _ConversationCheck) -> None:
    for key, state, payload in fetch_pages(checking.connection, _PLANS, *_key_range(checking)):
        checking.report.count_checked("plans")
        number = key_position(key)
        try:
            plan = codec.decode_plan(payload)
        except JournalError as error:
            checking.add_violation("plans", f"plan {number} cannot be read: {error}")
            continue
        if (plan.number, plan.state.value) != (number, state):
            checking.add_violation("plans", f"plan {number} has columns that differ from its record")


def _key_range(checking: _ConversationCheck) -> tuple[int, int]:
    return key_range(checking.row.number)
