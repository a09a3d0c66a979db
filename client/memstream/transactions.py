"""Writes of one transaction: messages, conversations, state documents and fragments of a namespace, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from memstream.argument_types import Position
from memstream.arguments import check_fields, checked_items
from memstream.channel import Link, MemoryPath, new_request_id
from memstream.codec import observation_to_wire
from memstream.conversation_values import (
    Appended,
    Message,
    NewMessage,
    appended_from_wire,
    message_from_wire,
    message_to_wire,
)
from memstream.listed_codec import conversation_from_wire
from memstream.listed_values import ConversationSummary
from memstream.resource_codec import put_from_wire
from memstream.resources import Put
from memstream.states import State, StateScope, scope_to_wire, state_from_wire
from memstream.v1 import conversation_service_pb2 as pb
from memstream.v1 import memory_service_pb2
from memstream.values import Observation
from memstream.wiretypes import duration_to_wire


@check_fields
@dataclass(frozen=True, slots=True)
class AppendMessages:
    """See Conversation.append_messages. The result is an Appended."""

    conversation: str
    messages: Sequence[NewMessage]
    last_number: Position | None = None
    absent: bool = False


@check_fields
@dataclass(frozen=True, slots=True)
class ReplaceMessage:
    """See Conversation.replace_message. The result is a Message, without its body."""

    conversation: str
    number: Position
    message: NewMessage


@check_fields
@dataclass(frozen=True, slots=True)
class UpdateConversation:
    """See Conversation.update. The result is a ConversationSummary."""

    conversation: str
    labels: Mapping[str, str] | None = None
    ttl: timedelta | None = None
    create: bool = False
    absent: bool = False
    feed_memory: str | None = None


@check_fields
@dataclass(frozen=True, slots=True)
class SetState:
    """See Client.set_state. The result is a State."""

    scope: StateScope
    name: str
    document: str
    etag: str | None = None
    absent: bool = False


@check_fields
@dataclass(frozen=True, slots=True)
class RemoveMessages:
    """Deletes messages: `numbers`, the `oldest`, or all from a number; see Conversation.remove_messages. At most 1,000,
    or all (`from_number` 1). The result is how many were deleted."""

    conversation: str
    numbers: Sequence[int] = ()
    oldest: Position | None = None
    from_number: Position | None = None
    last_number: Position | None = None


@check_fields
@dataclass(frozen=True, slots=True)
class DeleteConversation:
    """See Conversation.delete. The result is how many messages it had."""

    conversation: str
    last_number: Position | None = None


@check_fields
@dataclass(frozen=True, slots=True)
class DeleteState:
    """See Client.delete_state. The result is whether there was one."""

    scope: StateScope
    name: str
    etag: str = ""


@check_fields
@dataclass(frozen=True, slots=True)
class PutFragment:
    """See Memory.put_fragment. The result is a Put."""

    observation: Observation
    etag: str = ""
    absent: bool = False


TransactionWrite: TypeAlias = (
    AppendMessages
    | ReplaceMessage
    | UpdateConversation
    | SetState
    | RemoveMessages
    | DeleteConversation
    | DeleteState
    | PutFragment
)
TransactionResult: TypeAlias = Appended | Message | ConversationSummary | State | Put | int | bool


async def write_together(
    link: Link, namespace: str, writes: Sequence[TransactionWrite], memory: str
) -> tuple[TransactionResult, ...]:
    """Sends the writes; the result of each, in their order."""
    given = list(checked_items("writes", writes, TransactionWrite))
    request = pb.WriteTogetherRequest(
        namespace=namespace,
        memory=memory,
        writes=[_write_to_wire(write, f"writes[{place}].") for place, write in enumerate(given)],
        request_id=new_request_id(),
    )
    path = MemoryPath(namespace, memory) if memory else None
    answer = await link.call(link.conversations.WriteTogether, request, path)
    return tuple(_result_from_wire(write, one) for write, one in zip(given, answer.results, strict=True))


def append_to_wire(write: AppendMessages, at: str = "") -> pb.AppendMessagesRequest:
    """Converts messages to append, with their precondition."""
    given = list(checked_items(f"{at}messages", write.messages, NewMessage))
    request = pb.AppendMessagesRequest(
        conversation=write.conversation,
        messages=[message_to_wire(message, f"{at}messages[{place}].") for place, message in enumerate(given)],
    )
    if write.last_number is not None:
        request.last_number = write.last_number
    elif write.absent:
        request.absent = write.absent
    return request


def update_to_wire(write: UpdateConversation) -> pb.UpdateConversationRequest:
    """Converts the change of a conversation."""
    request = pb.UpdateConversationRequest(
        conversation=write.conversation,
        labels=None if write.labels is None else pb.ConversationLabels(labels=dict(write.labels)),
        ttl=None if write.ttl is None else duration_to_wire(write.ttl),
        feed_memory=write.feed_memory,
    )
    if write.absent:
        request.absent = True
    elif write.create:
        request.allow_missing = True
    return request


def replacement_to_wire(write: ReplaceMessage, at: str = "") -> pb.ReplaceMessageRequest:
    """Converts a message that replaces another one."""
    wire = message_to_wire(write.message, f"{at}message.")
    wire.conversation, wire.number = write.conversation, write.number
    return pb.ReplaceMessageRequest(message=wire)


def state_to_wire(write: SetState) -> pb.SetStateRequest:
    """Converts a state document to write."""
    request = pb.SetStateRequest(scope=scope_to_wire(write.scope), name=write.name, document=write.document)
    if write.etag is not None:
        request.etag = write.etag
    elif write.absent:
        request.absent = write.absent
    return request


def _removal_to_wire(write: RemoveMessages) -> pb.RemoveMessagesRequest:
    request = pb.RemoveMessagesRequest(conversation=write.conversation, last_number=write.last_number)
    if write.numbers:
        request.numbers.numbers.extend(write.numbers)
    if write.oldest is not None:
        request.oldest = write.oldest
    if write.from_number is not None:
        request.from_number = write.from_number
    return request


async def set_state(link: Link, namespace: str, write: SetState) -> State:
    """Writes a state document."""
    request = state_to_wire(write)
    request.namespace, request.request_id = namespace, new_request_id()
    return state_from_wire((await link.call(link.conversations.SetState, request)).state, write.document)


def _write_to_wire(write: TransactionWrite, at: str) -> pb.TransactionWrite:
    match write:
        case AppendMessages():
            return pb.TransactionWrite(append_messages=append_to_wire(write, at))
        case ReplaceMessage():
            return pb.TransactionWrite(replace_message=replacement_to_wire(write, at))
        case UpdateConversation():
            return pb.TransactionWrite(update_conversation=update_to_wire(write))
        case SetState():
            return pb.TransactionWrite(set_state=state_to_wire(write))
        case RemoveMessages():
            return pb.TransactionWrite(remove_messages=_removal_to_wire(write))
        case DeleteConversation():
            gone = pb.DeleteConversationRequest(conversation=write.conversation, last_number=write.last_number)
            return pb.TransactionWrite(delete_conversation=gone)
        case DeleteState():
            state = pb.DeleteStateRequest(scope=scope_to_wire(write.scope), name=write.name, etag=write.etag)
            return pb.TransactionWrite(delete_state=state)
        case PutFragment():
            observation = observation_to_wire(write.observation)
            put = memory_service_pb2.PutFragmentRequest(observation=observation, etag=write.etag, absent=write.absent)
            return pb.TransactionWrite(put_fragment=put)


def _result_from_wire(write: TransactionWrite, wire: pb.TransactionResult) -> TransactionResult:
    match write:
        case AppendMessages():
            return appended_from_wire(wire.append_messages)
        case ReplaceMessage():
            return message_from_wire(wire.replace_message.message)
        case UpdateConversation():
            return conversation_from_wire(wire.update_conversation.conversation)
        case SetState():
            return state_from_wire(wire.set_state.state, write.document)
        case RemoveMessages():
            return wire.remove_messages.removed
        case DeleteConversation():
            return wire.delete_conversation.messages
        case DeleteState():
            return wire.delete_state.deleted
        case PutFragment():
            return put_from_wire(wire.put_fragment)
