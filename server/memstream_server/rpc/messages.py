"""The rpcs of ConversationService about messages: append, list, replace, delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.message import Message as WireMessage

from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.ports.conversation_records import AppendMessages, ReplaceMessage
from memstream_server.ports.conversations import (
    AnswerOf,
    Appended,
    ConversationName,
    Message,
    MessageQuery,
    Precondition,
    Removal,
    Removed,
)
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.idempotency import IdempotentCall, idempotent_call, respond_to_write
from memstream_server.rpc.limits import RequestLimits, encode_fitting
from memstream_server.rpc.validation import Violations, check_identifier
from memstream_server.rpc.wire import conversations as wire
from memstream_server.rpc.wire.scalars import time_us, timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.conversations import Conversations

_Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
R = TypeVar("R", bound=WireMessage)


class MessageService:
    """What ConversationService does with messages. Stored answers and those of a list have bounded bytes."""

    def __init__(self, conversations: Conversations, limits: RequestLimits) -> None:
        self._conversations = conversations
        self._limits = limits

    async def append_message(self, request: pb.AppendMessageRequest, _context: _Context) -> pb.AppendMessageResponse:
        found = Violations()
        named = wire.conversation_name(
            found, request.namespace, request.message.conversation, self._limits, prefix="message."
        )
        body = await wire.read_body(found, "message.body", request.message, self._limits)
        message = wire.read_message(found, request.message, body, self._limits)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.append_message(named, message, answer),
            lambda done: pb.AppendMessageResponse(message=wire.message_of(named, replace(done, body=None))),
        )

    async def append_messages(self, request: pb.AppendMessagesRequest, _context: _Context) -> pb.AppendMessagesResponse:
        found = Violations()
        read = await self._read_append(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.append_messages(
                read.conversation, read.messages, read.condition, answer
            ),
            appended_response,
        )

    async def _read_append(self, found: Violations, request: pb.AppendMessagesRequest) -> AppendMessages:
        named = self._conversation_of(found, request)
        messages = await self._read_messages(found, request)
        condition = Precondition()
        match request.WhichOneof("precondition"):
            case "last_number":
                last = validation.check_bounds(found, "last_number", request.last_number, 0, wire.MESSAGE_NUMBER_MAX)
                condition = Precondition(last_number=int(last))
            case "absent":
                condition = Precondition(absent=request.absent)
        return AppendMessages(named, messages, condition)

    async def _read_messages(self, found: Violations, request: pb.AppendMessagesRequest) -> Sequence[Message]:
        if not request.messages:
            found.add("messages", "is empty")
        if len(request.messages) > self._limits.batch_max:
            found.add("messages", f"has {len(request.messages)} messages, at most {self._limits.batch_max} are allowed")
            return ()
        messages: list[Message] = []
        for place, message in enumerate(request.messages):
            at = f"messages[{place}]."
            if message.conversation not in ("", request.conversation):
                found.add(f"{at}conversation", "is another one than the request's")
            body = await wire.read_body(found, f"{at}body", message, self._limits)
            messages.append(wire.read_message(found, message, body, self._limits, at, sent=False))
        ids = [message.client_id for message in messages if message.client_id]
        if len(set(ids)) < len(ids):
            found.add("messages", "has one client_id twice")
        return messages

    async def list_messages(self, request: pb.ListMessagesRequest, _context: _Context) -> bytes:
        """A serialised ListMessagesResponse."""
        found = Violations()
        named = self._conversation_of(found, request)
        size = validation.page_size(found, request.page_size, self._limits)
        query = self._read_query(found, request, size)
        rows = await self._conversations.list_messages(named, query)
        whole = list(takewhile(lambda row: row.is_whole or (request.without_bodies and row.is_read), rows))

        def add(page: pb.ListMessagesResponse, row: Message) -> None:
            page.messages.append(wire.message_of(named, row))

        shown, count = await encode_fitting(whole[:size], pb.ListMessagesResponse(), add, self._limits.page_bytes_max)
        token = page_tokens.make_token(request, str(rows[count - 1].number)) if count < len(rows) else ""
        return shown + pb.ListMessagesResponse(next_page_token=token).SerializeToString()

    def _read_query(self, found: Violations, request: pb.ListMessagesRequest, size: int) -> MessageQuery:
        agent = check_identifier(found, "agent", request.agent, self._limits)
        other = check_identifier(found, "other_agent", request.other_agent, self._limits)
        if other and not agent:
            found.add("agent", "is required with other_agent")
        goal = wire.check_goal(found, "current_goal", request.current_goal, self._limits)
        for field in ("after_number", "before_number"):
            validation.check_bounds(found, field, getattr(request, field), 0, wire.MESSAGE_NUMBER_MAX)
        times = {
            field: time_us(found, field, getattr(request, field)) if request.HasField(field) else None
            for field in ("after_time", "before_time")
        }
        found.check()
        after, before = request.after_number, request.before_number or None
        if (place := page_tokens.read_number(request)) is not None:
            after, before = (after, place) if request.newest_first else (place, before)
        return MessageQuery(
            agent,
            other,
            goal,
            after,
            size + 1,
            before,
            times["after_time"],
            times["before_time"],
            request.newest_first,
            0 if request.without_bodies else self._limits.page_bytes_max,
            self._limits.page_bytes_max,
        )

    async def get_message(self, request: pb.GetMessageRequest, _context: _Context) -> pb.GetMessageResponse:
        found = Violations()
        named = self._conversation_of(found, request)
        client_id = check_identifier(found, "client_id", request.client_id, self._limits)
        if client_id and request.number:
            found.add("number", "is set beside client_id: give one of them")
        number = 0 if client_id else wire.message_number(found, "number", request.number)
        found.check()
        message = await self._conversations.get_message(named, client_id or number)
        return pb.GetMessageResponse(message=wire.message_of(named, message))

    async def get_last_message(
        self, request: pb.GetLastMessageRequest, _context: _Context
    ) -> pb.GetLastMessageResponse:
        named = self._checked_name(request)
        message = await self._conversations.last_message(named)
        return pb.GetLastMessageResponse(message=wire.message_of(named, message))

    async def replace_message(self, request: pb.ReplaceMessageRequest, _context: _Context) -> pb.ReplaceMessageResponse:
        found = Violations()
        read = await self._read_replacement(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.replace_message(read.conversation, read.message, answer),
            lambda done: replaced_response(read.conversation, done),
        )

    async def _read_replacement(self, found: Violations, request: pb.ReplaceMessageRequest) -> ReplaceMessage:
        given = request.message
        named = wire.conversation_name(found, request.namespace, given.conversation, self._limits, prefix="message.")
        number = wire.message_number(found, "message.number", given.number)
        body = await wire.read_body(found, "message.body", given, self._limits)
        return ReplaceMessage(
            named, replace(wire.read_message(found, given, body, self._limits, sent=False), number=number)
        )

    async def delete_messages(self, request: pb.DeleteMessagesRequest, _context: _Context) -> pb.DeleteMessagesResponse:
        named = self._checked_name(request, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.delete_messages(named, answer),
            lambda count: pb.DeleteMessagesResponse(deleted=count),
        )

    async def remove_messages(self, request: pb.RemoveMessagesRequest, _context: _Context) -> pb.RemoveMessagesResponse:
        found = Violations()
        named = self._conversation_of(found, request)
        removal = self._read_removal(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.remove_messages(named, removal, answer),
            removed_response,
        )

    def _read_removal(self, found: Violations, request: pb.RemoveMessagesRequest) -> Removal:
        return replace(self._read_which(found, request), last_number=wire.read_last_number(found, request))

    def _read_which(self, found: Violations, request: pb.RemoveMessagesRequest) -> Removal:
        match request.WhichOneof("which"):
            case "numbers":
                given = request.numbers.numbers
                if not given:
                    found.add("numbers.numbers", "is empty")
                if len(given) > self._limits.page_size_max:
                    found.add("numbers.numbers", f"has more than {self._limits.page_size_max} numbers")
                for place, number in enumerate(given[: self._limits.page_size_max]):
                    wire.message_number(found, f"numbers.numbers[{place}]", number)
                return Removal(numbers=tuple(given))
            case "oldest":
                most = validation.check_bounds(found, "oldest", request.oldest, 1, wire.MESSAGE_NUMBER_MAX)
                return Removal(oldest=int(most))
            case "from_number":
                return Removal(from_number=wire.message_number(found, "from_number", request.from_number))
            case _:
                found.add("which", "is not set: give numbers, oldest or from_number")
                return Removal()

    async def pop_message(self, request: pb.PopMessageRequest, _context: _Context) -> pb.PopMessageResponse:
        found = Violations()
        named, last = self._conversation_of(found, request), wire.read_last_number(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.pop_message(named, last, answer),
            lambda done: pb.PopMessageResponse(message=wire.message_of(named, done)),
        )

    def _conversation_of(self, found: Violations, request: Any) -> ConversationName:
        return wire.conversation_name(found, request.namespace, request.conversation, self._limits)

    def _checked_name(self, request: Any, request_id: str = "") -> ConversationName:
        found = Violations()
        named = self._conversation_of(found, request)
        self._check_request(found, request_id)
        return named

    def _check_request(self, found: Violations, request_id: str) -> None:
        check_identifier(found, "request_id", request_id, self._limits)
        found.check()

    async def _respond_once(
        self,
        request: Any,
        namespace: str,
        write: Callable[[AnswerOf[T]], Awaitable[T]],
        response: Callable[[T], R],
        *,
        in_slices: Callable[[T], Awaitable[R]] | None = None,
    ) -> R:
        """A repeat of a request_id gets the first response, even if both run at once; see respond_to_write."""
        call: IdempotentCall[R] | None = idempotent_call(
            request, namespace, request.request_id, _response_type(request)
        )
        return await respond_to_write(call, self._conversations, write, response, in_slices=in_slices)


def replaced_response(named: ConversationName, done: Message) -> pb.ReplaceMessageResponse:
    """Without the body."""
    return pb.ReplaceMessageResponse(message=wire.message_of(named, replace(done, body=None)))


def appended_response(done: Appended) -> pb.AppendMessagesResponse:
    """The numbers."""
    return pb.AppendMessagesResponse(
        numbers=done.numbers,
        appended=done.count,
        last_number=done.last_number,
        create_time=timestamp_message(done.create_time_us) if done.count else None,
    )


def removed_response(done: Removed) -> pb.RemoveMessagesResponse:
    """How many, and what is last now."""
    return pb.RemoveMessagesResponse(removed=done.count, last_number=done.last_number)


def start_after(request: Any) -> int:
    """The number that the page continues after; 0 for the first page."""
    return page_tokens.read_number(request) or 0


def _response_type(request: WireMessage) -> Any:
    """The response type: AppendMessageResponse for AppendMessageRequest."""
    return getattr(pb, request.DESCRIPTOR.name.removesuffix("Request") + "Response")
