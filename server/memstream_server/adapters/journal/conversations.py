"""`ports.conversations.ConversationStore` on the journal's database: same file, writer and snapshots.

A page limits every list, so rows are read without bulk statements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Table,
    delete,
    insert,
    or_,
    select,
    update,
)

from memstream_server.adapters.journal.database.database import Read, Write
from memstream_server.adapters.journal.sql import bulk, codec, export_reads, import_staging
from memstream_server.adapters.journal.sql.answers import put_answer
from memstream_server.adapters.journal.sql.schema import conversations, key_range, messages, plans, row_key
from memstream_server.ports.conversations import (
    NEVER,
    TO_DO,
    AnswerOf,
    ConversationName,
    ConversationScan,
    ConversationSummary,
    Message,
    MessageQuery,
    NotThere,
    Plan,
    PlanChange,
    PlanQuery,
    Status,
)

T = TypeVar("T")


class SqlConversations:
    """`ports.conversations.ConversationStore` over a journal's writer and readers."""

    def __init__(self, write: Write, read: Read) -> None:
        self._write = write
        self._read = read

    async def append_message(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        return await self._write_with_answer(
            lambda c: _append_message(c, conversation, message, now_us), 3, True, answer
        )

    async def list_messages(self, conversation: ConversationName, query: MessageQuery) -> list[Message]:
        return await self._read(lambda c: _read_messages(c, conversation, query))

    async def last_message(self, conversation: ConversationName) -> Message:
        return await self._read(lambda c: _read_last_message(c, conversation))

    async def get_status(self, conversation: ConversationName) -> Status:
        return await self._read(lambda c: _read_status(c, conversation))

    async def complete_conversation(
        self, conversation: ConversationName, now_us: int, answer: AnswerOf[None] = None
    ) -> None:
        await self._write_with_answer(lambda c: _complete_conversation(c, conversation, now_us), 2, False, answer)

    async def delete_messages(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        return await self._write_with_answer(lambda c: _delete_rows(c, messages, conversation), 1_000, False, answer)

    async def save_plans(
        self,
        conversation: ConversationName,
        plans: Sequence[Plan],
        now_us: int,
        answer: AnswerOf[tuple[Plan, ...]] = None,
    ) -> tuple[Plan, ...]:
        rows = 2 + 2 * len(plans)
        return await self._write_with_answer(lambda c: _save_plans(c, conversation, plans, now_us), rows, True, answer)

    async def list_conversations(self, namespace: str, after: str, limit: int) -> list[ConversationSummary]:
        return await self._read(lambda c: _list_conversations(c, namespace, after, limit))

    async def list_plans(self, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
        return await self._read(lambda c: _read_plans(c, conversation, query))

    async def change_plan(
        self,
        conversation: ConversationName,
        number: int,
        change: PlanChange,
        now_us: int,
        answer: AnswerOf[Plan] = None,
    ) -> Plan:
        return await self._write_with_answer(
            lambda c: _change_plan(c, conversation, number, change, now_us), 2, True, answer
        )

    async def remove_plans(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        return await self._write_with_answer(lambda c: _delete_rows(c, plans, conversation), 1_000, False, answer)

    async def list_names(self, namespace: str, after: str, limit: int) -> list[str]:
        return await self._read(lambda c: export_reads.list_conversation_names(c, namespace, after, limit))

    async def scan_conversation(self, conversation: ConversationName, visit: Callable[[ConversationScan], T]) -> T:
        return await self._read(lambda c: export_reads.scan_conversation(c, conversation, visit))

    async def stage_rows(
        self, staged: str, create_time_us: int, messages: Sequence[Message], plans: Sequence[Plan]
    ) -> None:
        rows = 2 + len(messages) + len(plans)
        await self._write(lambda c: import_staging.put_staged(c, staged, create_time_us, messages, plans), rows, True)

    async def publish_staged(self, staged: str, conversation: ConversationName, status: Status) -> None:
        await self._write(lambda c: import_staging.publish_staged(c, staged, conversation, status), 2, False)

    async def discard_staged(self, staged: str) -> None:
        await self._write(lambda c: import_staging.discard_staged(c, staged), 1_000, False)

    async def _write_with_answer(
        self, work: Callable[[Connection], T], rows: int, adds: bool, answer: AnswerOf[T]
    ) -> T:
        """Run the work and store the answer to the request in one transaction."""

        def both(connection: Connection) -> T:
            done = work(connection)
            put_answer(connection, None if answer is None else answer(done))
            return done

        return await self._write(both, rows, adds)


# ---- conversations


def _find_row(connection: Connection, conversation: ConversationName) -> Row[Any] | None:
    named = (conversations.c.namespace == conversation.namespace) & (conversations.c.name == conversation.name)
    return connection.execute(select(conversations).where(named)).one_or_none()


def _list_conversations(connection: Connection, namespace: str, after: str, limit: int) -> list[ConversationSummary]:
    columns = conversations.c
    statement = (
        select(columns.name, columns.last_number, columns.completed, columns.create_time_us)
        .where(columns.namespace == namespace, columns.name > after)
        .order_by(columns.name)
        .limit(limit)
    )
    return [ConversationSummary(*row) for row in connection.execute(statement)]


def _get_number(connection: Connection, conversation: ConversationName) -> int:
    found = _find_row(connection, conversation)
    if found is None:
        raise NotThere(f"there is no conversation {conversation}", conversation)
    return int(found.number)


def _get_or_create(connection: Connection, conversation: ConversationName, now_us: int) -> Row[Any]:
    """The conversation's row, inserted if it does not exist."""
    found = _find_row(connection, conversation)
    if found is not None:
        return found
    row = {
        "namespace": conversation.namespace,
        "name": conversation.name,
        "last_number": 0,
        "completed": False,
        "completions": 0,
        "completed_number": 0,
        "create_time_us": now_us,
    }
    return connection.execute(insert(conversations).returning(*conversations.c), row).one()


def _update_row(connection: Connection, number: int, **values: int | bool) -> None:
    connection.execute(update(conversations).where(conversations.c.number == number).values(**values))


def _read_status(connection: Connection, conversation: ConversationName) -> Status:
    found = _find_row(connection, conversation)
    if found is None:
        return NEVER
    return Status(found.last_number, bool(found.completed), found.completions, found.completed_number)


def _complete_conversation(connection: Connection, conversation: ConversationName, now_us: int) -> None:
    row = _get_or_create(connection, conversation, now_us)
    if not row.completed:
        _update_row(
            connection,
            row.number,
            completed=True,
            completions=row.completions + 1,
            completed_number=row.last_number,
        )


def _delete_rows(connection: Connection, table: Table, conversation: ConversationName) -> int:
    """Delete all rows of a conversation in one transaction, because the answer has their number."""
    low, high = key_range(_get_number(connection, conversation))
    return connection.execute(delete(table).where(table.c.key.between(low, high))).rowcount


# ---- messages


def _append_message(connection: Connection, conversation: ConversationName, message: Message, now_us: int) -> Message:
    row = _get_or_create(connection, conversation, now_us)
    made = replace(message, number=row.last_number + 1, create_time_us=now_us, update_time_us=now_us)
    _update_row(connection, row.number, last_number=made.number, completed=False)
    values = {
        "key": row_key(row.number, made.number),
        "sender": made.sender,
        "receiver": made.receiver,
        "current_goal": made.current_goal,
        "payload": codec.encode_message(made),
    }
    connection.execute(insert(messages), values)
    return made


def _read_messages(connection: Connection, conversation: ConversationName, query: MessageQuery) -> list[Message]:
    number = _get_number(connection, conversation)
    _, high = key_range(number)
    wanted: list[ColumnElement[bool]] = [messages.c.key.between(row_key(number, query.after) + 1, high)]
    if query.current_goal:
        wanted.append(messages.c.current_goal == query.current_goal)
    if query.agent:
        sent = messages.c.sender == query.agent
        got = messages.c.receiver == query.agent
        if query.other_agent:
            sent &= messages.c.receiver == query.other_agent
            got &= messages.c.sender == query.other_agent
        wanted.append(or_(sent, got))
    statement = select(messages.c.payload).where(*wanted).order_by(messages.c.key).limit(query.limit)
    return [codec.decode_message(blob) for blob in connection.execute(statement).scalars()]


def _read_last_message(connection: Connection, conversation: ConversationName) -> Message:
    low, high = key_range(_get_number(connection, conversation))
    statement = (
        select(messages.c.payload).where(messages.c.key.between(low, high)).order_by(messages.c.key.desc()).limit(1)
    )
    blob = connection.execute(statement).scalar_one_or_none()
    if blob is None:
        raise NotThere(f"the conversation {conversation} has no messages", conversation)
    return codec.decode_message(blob)


# ---- plans


def _save_plans(
    connection: Connection, conversation: ConversationName, given: Sequence[Plan], now_us: int
) -> tuple[Plan, ...]:
    row = _get_or_create(connection, conversation, now_us)
    saved = tuple(replace(plan, create_time_us=now_us, update_time_us=now_us) for plan in given)
    _put_plans(connection, row.number, saved)
    return saved


def _put_plans(connection: Connection, number: int, given: Sequence[Plan]) -> None:
    """Write plans in the place of those with their numbers; of several with one number the last."""
    latest = {row_key(number, plan.number): plan for plan in given}
    for places in bulk.split_ids(list(latest)):
        connection.execute(delete(plans).where(plans.c.key.in_(places)))
    rows = [
        {"key": place, "state": plan.state.value, "payload": codec.encode_plan(plan)} for place, plan in latest.items()
    ]
    if rows:
        connection.execute(insert(plans), rows)


def _read_plans(connection: Connection, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
    number = _get_number(connection, conversation)
    _, high = key_range(number)
    wanted: list[ColumnElement[bool]] = [plans.c.key.between(row_key(number, query.after) + 1, high)]
    if query.numbers:
        wanted.append(plans.c.key.in_([row_key(number, each) for each in query.numbers]))
    if query.to_do:
        wanted.append(plans.c.state.in_([state.value for state in TO_DO]))
    statement = select(plans.c.payload).where(*wanted).order_by(plans.c.key).limit(query.limit)
    return [codec.decode_plan(blob) for blob in connection.execute(statement).scalars()]


def _change_plan(
    connection: Connection, conversation: ConversationName, sub_task: int, change: PlanChange, now_us: int
) -> Plan:
    number = _get_number(connection, conversation)
    statement = select(plans.c.payload).where(plans.c.key == row_key(number, sub_task))
    blob = connection.execute(statement).scalar_one_or_none()
    if blob is None:
        raise NotThere(f"the conversation {conversation} has no plan {sub_task}", conversation)
    old = codec.decode_plan(blob)
    plan = replace(
        old,
        state=old.state if change.state is None else change.state,
        retry_times=old.retry_times if change.retry_times is None else change.retry_times,
        agent=old.agent if change.agent is None else change.agent,
        agent_model=old.agent_model if change.agent_model is None else change.agent_model,
        result=old.result if change.result is None else change.result,
        update_time_us=now_us,
    )
    _put_plans(connection, number, [plan])
    return plan
