"""The rpcs of ConversationService about conversations as wholes, and about state documents."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.ports.conversation_records import ConversationChange, ConversationQuery, ConversationRecord
from memstream_server.ports.conversations import ConversationName
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.limits import encode_fitting
from memstream_server.rpc.messages import MessageService
from memstream_server.rpc.validation import Violations, check_identifier, check_name
from memstream_server.rpc.wire import conversations as wire
from memstream_server.rpc.wire.policies import read_labels
from memstream_server.rpc.wire.scalars import duration_us

_Context = grpc.aio.ServicerContext[Any, Any]
_VERSION_CHARS_MAX = 18


class SessionService(MessageService):
    """MessageService with conversations and state."""

    async def get_conversation(
        self, request: pb.GetConversationRequest, _context: _Context
    ) -> pb.GetConversationResponse:
        record = await self._conversations.get_conversation(self._checked_name(request))
        return pb.GetConversationResponse(conversation=wire.conversation_message(record))

    async def list_conversations(self, request: pb.ListConversationsRequest, _context: _Context) -> bytes:
        """A serialised ListConversationsResponse."""
        found = Violations()
        namespace = check_name(found, "namespace", request.namespace, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        prefix = request.name_prefix and check_name(found, "name_prefix", request.name_prefix, self._limits)
        labels = read_labels(found, request.labels, self._limits)
        found.check()
        name, place = "", None
        if request.latest_first:
            place, _ = page_tokens.read_place(request)
        else:
            name = page_tokens.read_name(request)
        query = ConversationQuery(namespace, size + 1, prefix, labels, name, request.latest_first, place)
        rows = await self._conversations.list_conversations(query)

        def add(page: pb.ListConversationsResponse, row: ConversationRecord) -> None:
            page.conversations.append(wire.conversation_message(row))

        page, most = pb.ListConversationsResponse(), self._limits.page_bytes_max
        shown, count = await encode_fitting(rows[:size], page, add, most)
        token = ""
        if count < len(rows):
            last = rows[count - 1]
            after = f"{last.update_time_us}:{last.number}:-" if request.latest_first else last.conversation.name
            token = page_tokens.make_token(request, after)
        return shown + pb.ListConversationsResponse(next_page_token=token).SerializeToString()

    async def update_conversation(
        self, request: pb.UpdateConversationRequest, _context: _Context
    ) -> pb.UpdateConversationResponse:
        found = Violations()
        named = self._conversation_of(found, request)
        labels = read_labels(found, request.labels.labels, self._limits) if request.HasField("labels") else None
        ttl_us = None
        if request.HasField("ttl"):
            ttl_us = duration_us(found, "ttl", request.ttl) if request.ttl != Duration() else 0
        self._check_request(found, request.request_id)
        change = ConversationChange(labels, ttl_us, request.allow_missing, request.absent)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.update_conversation(named, change, answer),
            lambda done: pb.UpdateConversationResponse(conversation=wire.conversation_message(done)),
        )

    async def delete_conversation(
        self, request: pb.DeleteConversationRequest, _context: _Context
    ) -> pb.DeleteConversationResponse:
        named = self._checked_name(request, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.delete_conversation(named, answer),
            lambda count: pb.DeleteConversationResponse(messages=count),
        )

    async def fork_conversation(
        self, request: pb.ForkConversationRequest, _context: _Context
    ) -> pb.ForkConversationResponse:
        found = Violations()
        named = self._conversation_of(found, request)
        target = check_name(found, "new_conversation", request.new_conversation, self._limits)
        number = wire.message_number(found, "number", request.number) if request.number else None
        self._check_request(found, request.request_id)
        new = ConversationName(request.namespace, target)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.fork_conversation(named, new, number, answer),
            lambda done: pb.ForkConversationResponse(conversation=wire.conversation_message(done)),
        )

    async def get_state(self, request: pb.GetStateRequest, _context: _Context) -> pb.GetStateResponse:
        found = Violations()
        name = wire.read_state_name(found, request.namespace, request.scope, request.name, self._limits)
        found.check()
        state = await self._conversations.get_state(name)
        return pb.GetStateResponse(state=wire.state_message(name, state, document=True))

    async def set_state(self, request: pb.SetStateRequest, _context: _Context) -> pb.SetStateResponse:
        found = Violations()
        name = wire.read_state_name(found, request.namespace, request.scope, request.name, self._limits)
        document = await wire.read_json(found, "document", request.document, self._limits)
        version = None
        if request.WhichOneof("precondition") == "etag":
            digits = request.etag
            if not (digits.isascii() and digits.isdigit() and len(digits) <= _VERSION_CHARS_MAX):
                found.add("etag", "is not one that the server gave")
            else:
                version = int(digits)
        elif request.absent:
            version = 0
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.set_state(name, document, version, answer),
            lambda done: pb.SetStateResponse(state=wire.state_message(name, done, document=False)),
        )

    async def delete_state(self, request: pb.DeleteStateRequest, _context: _Context) -> pb.DeleteStateResponse:
        found = Violations()
        name = wire.read_state_name(found, request.namespace, request.scope, request.name, self._limits)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.delete_state(name, answer),
            lambda deleted: pb.DeleteStateResponse(deleted=deleted),
        )

    async def erase_user(self, request: pb.EraseUserRequest, _context: _Context) -> pb.EraseUserResponse:
        found = Violations()
        check_name(found, "namespace", request.namespace, self._limits)
        check_identifier(found, "user", request.user, self._limits, required=True)
        found.check()
        count, state = await self._conversations.erase_user(request.namespace, request.user)
        return pb.EraseUserResponse(conversations=count, state=state)
