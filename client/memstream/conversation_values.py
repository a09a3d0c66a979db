"""Messages and plans of conversations as frozen values, and their conversion to and from the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from memstream.argument_types import Int32, show_value
from memstream.arguments import check_fields
from memstream.kinds import kind_of
from memstream.v1 import conversation_service_pb2 as pb
from memstream.values import MetadataValue
from memstream.wiretypes import (
    invalid_field,
    members_by_number,
    metadata_from_wire,
    metadata_value_to_wire,
    optional_timestamp_from_wire,
    optional_timestamp_to_wire,
)


class PlanState(StrEnum):
    """The state of a plan; TODO and RETRYING are open. UNKNOWN: newer than this SDK."""

    UNKNOWN = "unknown"
    TODO = "todo"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    FAILED = "failed"
    COMPLETE = "complete"


_STATES = members_by_number(PlanState, pb.PlanState.DESCRIPTOR)
_NUMBERS = {state: number for number, state in _STATES.items()}


class MessageFields(TypedDict, total=False):
    """Optional fields of a message; see Message."""

    receiver: str
    role: str
    rounds: Int32
    success: bool
    app_code: str
    app_name: str
    current_goal: str
    context: str
    review_info: str
    action_report: str
    model_name: str
    resource_info: str
    body: str
    name: str
    tool_call_id: str
    client_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message from one agent to another; `number` ascends in the conversation; the server sets the times.

    `body` is JSON as text, None if the message has none or it was not asked for (`body_size_bytes` tells). `context`,
    `review_info`, `action_report` and `resource_info` are JSON, or empty.
    """

    number: int
    sender: str
    receiver: str
    role: str
    content: str
    rounds: int
    success: bool | None
    app_code: str
    app_name: str
    current_goal: str
    context: str
    review_info: str
    action_report: str
    model_name: str
    resource_info: str
    create_time: datetime | None
    update_time: datetime | None
    name: str
    tool_call_id: str
    client_id: str
    metadata: Mapping[str, MetadataValue]
    time: datetime | None
    body: str | None
    body_size_bytes: int


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A message to append, or in the place of another one.

    `body`: JSON of any kind as text, kept unchanged, up to the server's `message_bytes_max`. `client_id`: your own id,
    unique in the conversation: a message that is there already is not appended again. `time`: when it was said.
    """

    role: str = ""
    content: str = ""
    body: str | None = None
    name: str = ""
    tool_call_id: str = ""
    client_id: str = ""
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict[str, MetadataValue])
    time: datetime | None = None
    sender: str = ""
    receiver: str = ""
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Appended:
    """Messages of one call are stored. `numbers`: of each, in order; `count`: how many were not there before."""

    numbers: tuple[int, ...]
    count: int
    last_number: int
    create_time: datetime | None


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A step of a conversation's plan. `number` starts at 1; `rely` has the numbers it depends on, joined by ",".

    The server sets the times; `save_plans` ignores them.
    """

    number: Int32
    title: str = ""
    content: str = ""
    agent: str = ""
    resource_name: str = ""
    rely: str = ""
    agent_model: str = ""
    retry_times: Int32 = 0
    max_retry_times: Int32 = 0
    state: PlanState = PlanState.TODO
    result: str = ""
    create_time: datetime | None = None
    update_time: datetime | None = None


def message_from_wire(wire: pb.ConversationMessage) -> Message:
    """Converts a message."""
    return Message(
        number=wire.number,
        sender=wire.sender,
        receiver=wire.receiver,
        role=wire.role,
        content=wire.content,
        rounds=wire.rounds,
        success=wire.success if wire.HasField("success") else None,
        app_code=wire.app_code,
        app_name=wire.app_name,
        current_goal=wire.current_goal,
        context=wire.context,
        review_info=wire.review_info,
        action_report=wire.action_report,
        model_name=wire.model_name,
        resource_info=wire.resource_info,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        update_time=optional_timestamp_from_wire(wire.update_time, wire.HasField("update_time")),
        name=wire.name,
        tool_call_id=wire.tool_call_id,
        client_id=wire.client_id,
        metadata=metadata_from_wire(wire.metadata),
        time=optional_timestamp_from_wire(wire.time, wire.HasField("time")),
        body=wire.body if wire.HasField("body") else None,
        body_size_bytes=wire.body_size_bytes,
    )


def message_to_wire(message: NewMessage, at: str = "") -> pb.ConversationMessage:
    """Converts a message; `at` comes before the names of fields in errors."""
    made = pb.ConversationMessage(
        role=message.role,
        content=message.content,
        body=message.body,
        name=message.name,
        tool_call_id=message.tool_call_id,
        client_id=message.client_id,
        time=optional_timestamp_to_wire(f"{at}time", message.time),
        sender=message.sender,
        receiver=message.receiver,
        model_name=message.model_name,
    )
    for key, value in message.metadata.items():
        made.metadata[key].CopyFrom(metadata_value_to_wire(f"{at}metadata.{key}", value))
    return made


def plan_from_wire(wire: pb.Plan) -> Plan:
    """Converts a plan."""
    return Plan(
        number=wire.sub_task_number,
        title=wire.sub_task_title,
        content=wire.sub_task_content,
        agent=wire.sub_task_agent,
        resource_name=wire.resource_name,
        rely=wire.rely,
        agent_model=wire.agent_model,
        retry_times=wire.retry_times,
        max_retry_times=wire.max_retry_times,
        state=_STATES.get(wire.state, PlanState.UNKNOWN),
        result=wire.result,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        update_time=optional_timestamp_from_wire(wire.update_time, wire.HasField("update_time")),
    )


def appended_from_wire(wire: pb.AppendMessagesResponse) -> Appended:
    """Converts what an append has done."""
    created = optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time"))
    return Appended(tuple(wire.numbers), wire.appended, wire.last_number, created)


def plan_to_wire(plan: Plan) -> pb.Plan:
    """Converts a plan for `save_plans`."""
    return pb.Plan(
        sub_task_number=plan.number,
        sub_task_title=plan.title,
        sub_task_content=plan.content,
        sub_task_agent=plan.agent,
        resource_name=plan.resource_name,
        rely=plan.rely,
        agent_model=plan.agent_model,
        retry_times=plan.retry_times,
        max_retry_times=plan.max_retry_times,
        state=state_to_wire(plan.state),
        result=plan.result,
    )


def state_to_wire(state: PlanState | None) -> pb.PlanState.ValueType:
    """Converts a state; None is UNSPECIFIED. Raises InvalidArgument for UNKNOWN, which cannot be sent."""
    if state is None:
        return pb.PlanState.ValueType(0)
    if state not in _NUMBERS:
        raise invalid_field("state", f"must be {kind_of(PlanState).name}, not {show_value(state)}")
    return pb.PlanState.ValueType(_NUMBERS[state])
