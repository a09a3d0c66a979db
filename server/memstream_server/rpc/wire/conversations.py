"""Converts conversations, their messages and plans, and state documents."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.core.json_text import find_fault
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.ports.conversation_records import ConversationRecord, StateDocument, StateName, StateScope
from memstream_server.ports.conversations import ConversationName, Message, Plan, PlanChange, PlanState
from memstream_server.rpc import page_tokens
from memstream_server.rpc.limits import ENTRIES_PER_SLICE, RequestLimits
from memstream_server.rpc.validation import (
    Violations,
    check_bounds,
    check_identifier,
    check_name,
    not_negative,
    quote_text,
)
from memstream_server.rpc.wire.scalars import (
    Enums,
    duration_message,
    read_metadata,
    time_us,
    timestamp_message,
    write_metadata,
)

PLAN_STATES = Enums(pb.PlanState, PlanState)
STATE_SCOPES = Enums(pb.StateScope, StateScope)
NUMBER_MAX = 2**31 - 1
"""The largest number of a sub-task."""
MESSAGE_NUMBER_MAX = page_tokens.NUMBER_MAX
_CHECKED_AT_ONCE = 65_536
"""Bytes of a body that are checked on the event loop; at most half a millisecond."""
_NUMBERS = re.compile(r"\s*(?:\d+\s*(?:,\s*\d+\s*)*)?")


def conversation_name(
    found: Violations, namespace: str, conversation: str, limits: RequestLimits, prefix: str = ""
) -> ConversationName:
    """Validates the conversation that a request names."""
    check_name(found, "namespace", namespace, limits)
    check_name(found, f"{prefix}conversation", conversation, limits)
    return ConversationName(namespace, conversation)


def check_text(found: Violations, field: str, value: str, limits: RequestLimits) -> str:
    """Validates a text up to the content limit; it may be empty."""
    size = len(value) if value.isascii() else len(value.encode())
    if size > limits.content_bytes_max:
        found.add(field, f"has {size} bytes, at most {limits.content_bytes_max} are allowed")
    return value


def check_goal(found: Violations, field: str, value: str, limits: RequestLimits) -> str:
    """Validates a goal. The database selects by it, and not every database can store NUL."""
    if "\0" in value:
        found.add(field, "has a NUL character")
    return check_text(found, field, value, limits)


def _check_json(found: Violations, field: str, value: str, limits: RequestLimits) -> str:
    if value and check_text(found, field, value, limits):
        try:
            json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            found.add(field, f"is not JSON: {error}")
    return value


def _no_constant(value: str) -> None:
    raise ValueError(f"{value} is no number of JSON")


async def read_body(
    found: Violations, field: str, message: pb.ConversationMessage, limits: RequestLimits
) -> bytes | None:
    """The body of a message: any JSON, as text that is kept unchanged."""
    if not message.HasField("body"):
        return None
    return await read_json(found, field, message.body, limits)


async def read_json(found: Violations, field: str, text: str, limits: RequestLimits) -> bytes:
    """Any JSON, as text that is kept unchanged."""
    body = text.encode()
    if len(body) > limits.message_bytes_max:
        found.add(field, f"has {len(body)} bytes, at most {limits.message_bytes_max} are allowed")
    elif wrong := find_fault(body) if len(body) <= _CHECKED_AT_ONCE else await run_in_thread(partial(find_fault, body)):
        found.add(field, f"is not JSON: {wrong}")
    return body


def read_message(
    found: Violations,
    message: pb.ConversationMessage,
    body: bytes | None,
    limits: RequestLimits,
    at: str = "message.",
    *,
    sent: bool = True,
) -> Message:
    """A message to store, with its checked body; the server assigns its number and times. `sent`: has a sender."""
    return Message(
        sender=check_identifier(found, f"{at}sender", message.sender, limits, required=sent),
        receiver=check_identifier(found, f"{at}receiver", message.receiver, limits),
        role=check_identifier(found, f"{at}role", message.role, limits),
        content=check_text(found, f"{at}content", message.content, limits),
        rounds=not_negative(found, f"{at}rounds", message.rounds),
        success=message.success if message.HasField("success") else None,
        app_code=check_identifier(found, f"{at}app_code", message.app_code, limits),
        app_name=check_identifier(found, f"{at}app_name", message.app_name, limits),
        current_goal=check_goal(found, f"{at}current_goal", message.current_goal, limits),
        context=_check_json(found, f"{at}context", message.context, limits),
        review_info=_check_json(found, f"{at}review_info", message.review_info, limits),
        action_report=_check_json(found, f"{at}action_report", message.action_report, limits),
        model_name=check_identifier(found, f"{at}model_name", message.model_name, limits),
        resource_info=_check_json(found, f"{at}resource_info", message.resource_info, limits),
        name=check_identifier(found, f"{at}name", message.name, limits),
        tool_call_id=check_identifier(found, f"{at}tool_call_id", message.tool_call_id, limits),
        client_id=check_identifier(found, f"{at}client_id", message.client_id, limits),
        metadata=read_metadata(found, f"{at}metadata", message.metadata, limits),
        time_us=time_us(found, f"{at}time", message.time) if message.HasField("time") else None,
        body=body,
        body_size_bytes=len(body or b""),
    )


def message_number(found: Violations, field: str, value: int) -> int:
    """Validates the number of a message."""
    return int(check_bounds(found, field, value, 1, MESSAGE_NUMBER_MAX))


def read_last_number(found: Violations, request: Any) -> int | None:
    """The precondition `last_number` of a request; None: it has none."""
    if not request.HasField("last_number"):
        return None
    return int(check_bounds(found, "last_number", request.last_number, 0, MESSAGE_NUMBER_MAX))


def message_of(conversation: ConversationName, message: Message) -> pb.ConversationMessage:
    """The message of the contract."""
    made = pb.ConversationMessage(
        number=message.number,
        conversation=conversation.name,
        sender=message.sender,
        receiver=message.receiver,
        role=message.role,
        content=message.content,
        rounds=message.rounds,
        success=message.success,
        app_code=message.app_code,
        app_name=message.app_name,
        current_goal=message.current_goal,
        context=message.context,
        review_info=message.review_info,
        action_report=message.action_report,
        model_name=message.model_name,
        resource_info=message.resource_info,
        create_time=timestamp_message(message.create_time_us),
        update_time=timestamp_message(message.update_time_us),
        body=None if message.body is None else message.body.decode(),
        body_size_bytes=message.body_size_bytes,
        name=message.name,
        tool_call_id=message.tool_call_id,
        client_id=message.client_id,
        time=None if message.time_us is None else timestamp_message(message.time_us),
    )
    if message.metadata:
        write_metadata(made.metadata, message.metadata)
    return made


async def read_plans(
    found: Violations, plans: Sequence[pb.Plan], conversation: str, limits: RequestLimits
) -> tuple[Plan, ...]:
    """Plans to save, with distinct numbers."""
    read: list[Plan] = []
    async for some in in_slices(plans, ENTRIES_PER_SLICE):
        read += [
            _read_plan(found, f"plans[{len(read) + place}].", plan, conversation, limits)
            for place, plan in enumerate(some)
        ]
    if not read:
        found.add("plans", "is empty")
    if len(read) > limits.batch_max:
        found.add("plans", f"has {len(read)} plans, at most {limits.batch_max} are allowed")
    if len({plan.number for plan in read}) < len(read):
        found.add("plans", "has one number twice")
    return tuple(read)


def _read_plan(found: Violations, at: str, plan: pb.Plan, conversation: str, limits: RequestLimits) -> Plan:
    if plan.conversation not in ("", conversation):
        found.add(
            f"{at}conversation", f"is {quote_text(plan.conversation)}, the request's is {quote_text(conversation)}"
        )
    if not _NUMBERS.fullmatch(check_text(found, f"{at}rely", plan.rely, limits)):
        found.add(f"{at}rely", f'is {quote_text(plan.rely)}: numbers joined by "," are allowed')
    return Plan(
        number=plan_number(found, f"{at}sub_task_number", plan.sub_task_number),
        title=check_text(found, f"{at}sub_task_title", plan.sub_task_title, limits),
        content=check_text(found, f"{at}sub_task_content", plan.sub_task_content, limits),
        agent=check_identifier(found, f"{at}sub_task_agent", plan.sub_task_agent, limits),
        resource_name=check_identifier(found, f"{at}resource_name", plan.resource_name, limits),
        rely=plan.rely,
        agent_model=check_identifier(found, f"{at}agent_model", plan.agent_model, limits),
        retry_times=not_negative(found, f"{at}retry_times", plan.retry_times),
        max_retry_times=not_negative(found, f"{at}max_retry_times", plan.max_retry_times),
        state=PLAN_STATES.read_value(found, f"{at}state", plan.state, PlanState.TODO),
        result=check_text(found, f"{at}result", plan.result, limits),
    )


def plan_number(found: Violations, field: str, value: int) -> int:
    """Validates a sub-task's number."""
    return int(check_bounds(found, field, value, 1, NUMBER_MAX))


def read_change(found: Violations, request: pb.UpdatePlanRequest, limits: RequestLimits) -> PlanChange:
    """The changes of an update; at least one."""
    change = PlanChange(
        state=PLAN_STATES.read_value(found, "state", request.state, PlanState.TODO) if request.state else None,
        retry_times=(
            not_negative(found, "retry_times", request.retry_times) if request.HasField("retry_times") else None
        ),
        agent=(
            check_identifier(found, "sub_task_agent", request.sub_task_agent, limits)
            if request.HasField("sub_task_agent")
            else None
        ),
        agent_model=(
            check_identifier(found, "agent_model", request.agent_model, limits)
            if request.HasField("agent_model")
            else None
        ),
        result=check_text(found, "result", request.result, limits) if request.HasField("result") else None,
    )
    if change == PlanChange():
        found.add("state", "nothing is set: give a state, retries, an agent, a model or a result")
    return change


def plan_of(conversation: ConversationName, plan: Plan) -> pb.Plan:
    """The plan as a message of the contract."""
    return pb.Plan(
        conversation=conversation.name,
        sub_task_number=plan.number,
        sub_task_title=plan.title,
        sub_task_content=plan.content,
        sub_task_agent=plan.agent,
        resource_name=plan.resource_name,
        rely=plan.rely,
        agent_model=plan.agent_model,
        retry_times=plan.retry_times,
        max_retry_times=plan.max_retry_times,
        state=PLAN_STATES.numbers[plan.state],
        result=plan.result,
        create_time=timestamp_message(plan.create_time_us),
        update_time=timestamp_message(plan.update_time_us),
    )


def conversation_message(record: ConversationRecord) -> pb.Conversation:
    """The conversation of the contract."""
    return pb.Conversation(
        name=record.conversation.name,
        labels=dict(record.labels),
        ttl=None if record.ttl_us is None else duration_message(record.ttl_us / 1e6),
        expire_time=None if record.expire_time_us is None else timestamp_message(record.expire_time_us),
        message_count=record.message_count,
        last_number=record.last_number,
        completed=record.completed,
        create_time=timestamp_message(record.create_time_us),
        update_time=timestamp_message(record.update_time_us),
        feed_memory=record.feed_memory,
        fed_number=record.fed_number,
    )


def read_state_name(
    found: Violations, namespace: str, scope: pb.StateScope.ValueType, name: str, limits: RequestLimits, at: str = ""
) -> StateName:
    """Validates the state document that a request names."""
    if not at:
        check_name(found, "namespace", namespace, limits)
    if scope == pb.STATE_SCOPE_UNSPECIFIED:
        found.add(f"{at}scope", "is not set")
    read = STATE_SCOPES.read_value(found, f"{at}scope", scope, StateScope.APP)
    if read is StateScope.SESSION:
        check_name(found, f"{at}name", name, limits)
    else:
        check_identifier(found, f"{at}name", name, limits, required=True)
    return StateName(namespace, read, name)


def state_message(name: StateName, state: StateDocument, *, document: bool) -> pb.State:
    """The state of the contract, with its document or without."""
    return pb.State(
        scope=STATE_SCOPES.numbers[name.scope],
        name=name.name,
        document=state.document.decode() if document else "",
        etag=str(state.version),
        update_time=timestamp_message(state.update_time_us),
    )
