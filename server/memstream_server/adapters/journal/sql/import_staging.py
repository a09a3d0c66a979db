"""Staging of imported conversations: written in parts under an empty namespace, then named in one step."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, select, update

from memstream_server.adapters.journal.sql import bulk, codec, messages
from memstream_server.adapters.journal.sql.hidden_conversations import HIDDEN
from memstream_server.adapters.journal.sql.schema import conversations, key_range, message_bodies, plans, row_key
from memstream_server.ports.conversations import ConversationName, Message, Plan, Status
from memstream_server.ports.journal.errors import AlreadyExists, StaleWrite

_PLANS = bulk.build_insert(plans, ("key",))


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
