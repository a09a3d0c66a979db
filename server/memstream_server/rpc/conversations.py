"""ConversationService: messages (rpc/messages.py), conversations as wholes, state documents, plans, and the stream
that watches a conversation until it is completed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as WireMessage

from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.core.printable import number_text
from memstream_server.engine.conversations import Transaction, Written
from memstream_server.engine.requests import NewObservation
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.ports.conversation_records import (
    AppendMessages,
    ConversationChange,
    ConversationQuery,
    ConversationRecord,
    ConversationResult,
    ConversationWrite,
    DeleteConversation,
    DeleteState,
    RemoveMessages,
    ReplaceMessage,
    SetState,
    StateDocument,
    StateName,
    UpdateConversation,
)
from memstream_server.ports.conversations import (
    Appended,
    ConversationName,
    Message,
    Plan,
    PlanChange,
    PlanQuery,
    PlanState,
    Removed,
)
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import PermissionDenied, WatcherStalled
from memstream_server.rpc.fragments import put_response, read_put
from memstream_server.rpc.idempotency import idempotent_call, respond_to_write
from memstream_server.rpc.limits import ENTRIES_PER_SLICE, RequestLimits, encode_fitting
from memstream_server.rpc.messages import (
    MessageService,
    appended_response,
    removed_response,
    replaced_response,
    start_after,
)
from memstream_server.rpc.slow_consumer import end_if_stalled, follow_changes, read_progress_s
from memstream_server.rpc.validation import Violations, check_identifier, check_name, read_etag
from memstream_server.rpc.wire import conversations as wire
from memstream_server.rpc.wire.policies import read_labels
from memstream_server.rpc.wire.scalars import duration_us

if TYPE_CHECKING:
    from memstream_server.engine.conversations import Conversations

_Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
R = TypeVar("R", bound=WireMessage)
_VERSION_CHARS_MAX = 18
_DELETIONS = ("remove_messages", "delete_conversation", "delete_state")


class ConversationService(MessageService):
    """The servicer: messages are the base class's."""

    def __init__(self, conversations: Conversations, limits: RequestLimits, drain: Drain) -> None:
        super().__init__(conversations, limits)
        self._drain = drain

    # ---- conversations as wholes, and state documents
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
        read = self._read_update(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.update_conversation(read.conversation, read.change, answer),
            _updated_response,
        )

    def _read_update(self, found: Violations, request: pb.UpdateConversationRequest) -> UpdateConversation:
        named = self._conversation_of(found, request)
        labels = read_labels(found, request.labels.labels, self._limits) if request.HasField("labels") else None
        ttl_us = None
        if request.HasField("ttl"):
            ttl_us = duration_us(found, "ttl", request.ttl) if request.ttl != Duration() else 0
        feed = request.feed_memory if request.HasField("feed_memory") else None
        if feed:
            check_name(found, "feed_memory", feed, self._limits)
        change = ConversationChange(labels, ttl_us, request.allow_missing, request.absent, feed)
        return UpdateConversation(named, change)

    async def delete_conversation(
        self, request: pb.DeleteConversationRequest, _context: _Context
    ) -> pb.DeleteConversationResponse:
        found = Violations()
        named, last = self._conversation_of(found, request), wire.read_last_number(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.delete_conversation(named, last, answer),
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

    async def get_states(self, request: pb.GetStatesRequest, _context: _Context) -> bytes:
        """A serialised GetStatesResponse."""
        found = Violations()
        check_name(found, "namespace", request.namespace, self._limits)
        if not request.keys:
            found.add("keys", "is empty")
        if len(request.keys) > self._limits.page_size_max:
            found.add("keys", f"has {len(request.keys)} keys, at most {self._limits.page_size_max} are allowed")
            found.check()
        names: list[StateName] = []
        async for some in in_slices(request.keys, ENTRIES_PER_SLICE):
            names += [
                wire.read_state_name(found, request.namespace, key.scope, key.name, self._limits, f"keys[{place}].")
                for place, key in enumerate(some, len(names))
            ]
        if len(set(names)) < len(names):
            found.add("keys", "has one key twice")
        found.check()
        most = self._limits.states_bytes_max
        states = await self._conversations.get_states(names, most)

        def add(page: pb.GetStatesResponse, row: tuple[StateName, StateDocument | None]) -> None:
            name, state = row
            if state is not None:
                page.states.append(wire.state_message(name, state, document=True))

        rows = list(zip(names, states, strict=False))
        shown, count = await encode_fitting(rows, pb.GetStatesResponse(), add, most)
        return shown + pb.GetStatesResponse(answered=count).SerializeToString()

    async def set_state(self, request: pb.SetStateRequest, _context: _Context) -> pb.SetStateResponse:
        found = Violations()
        read = await self._read_state(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.set_state(read.name, read.document, read.version, answer),
            lambda done: _state_response(read.name, done),
        )

    async def _read_state(self, found: Violations, request: pb.SetStateRequest) -> SetState:
        name = wire.read_state_name(found, request.namespace, request.scope, request.name, self._limits)
        document = await wire.read_json(found, "document", request.document, self._limits)
        version = None
        if request.WhichOneof("precondition") == "etag":
            version = read_etag(found, request.etag, _VERSION_CHARS_MAX)
        elif request.absent:
            version = 0
        return SetState(name, document, version)

    async def delete_state(self, request: pb.DeleteStateRequest, _context: _Context) -> pb.DeleteStateResponse:
        found = Violations()
        read = self._read_state_deletion(found, request)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.delete_state(read.name, read.version, answer),
            lambda deleted: pb.DeleteStateResponse(deleted=deleted),
        )

    def _read_state_deletion(self, found: Violations, request: pb.DeleteStateRequest) -> DeleteState:
        name = wire.read_state_name(found, request.namespace, request.scope, request.name, self._limits)
        return DeleteState(name, read_etag(found, request.etag, _VERSION_CHARS_MAX) if request.etag else None)

    async def erase_user(self, request: pb.EraseUserRequest, _context: _Context) -> pb.EraseUserResponse:
        found = Violations()
        check_name(found, "namespace", request.namespace, self._limits)
        check_identifier(found, "user", request.user, self._limits, required=True)
        found.check()
        count, state = await self._conversations.erase_user(request.namespace, request.user)
        return pb.EraseUserResponse(conversations=count, state=state)

    # ---- several writes in one transaction
    async def write_together(self, request: pb.WriteTogetherRequest, _context: _Context) -> pb.WriteTogetherResponse:
        found = Violations()
        check_name(found, "namespace", request.namespace, self._limits)
        if request.memory:
            check_name(found, "memory", request.memory, self._limits)
        check_identifier(found, "request_id", request.request_id, self._limits)
        if not request.writes:
            found.add("writes", "is empty")
        if len(request.writes) > self._limits.batch_max:
            found.add("writes", f"has {len(request.writes)} writes, at most {self._limits.batch_max} are allowed")
            found.check()
        _check_deletions(request)
        writes: list[ConversationWrite] = []
        puts: list[tuple[NewObservation, str | None]] = []
        for place, write in enumerate(request.writes):
            read = await self._read_write(found, place, write, request)
            if isinstance(read, tuple):
                puts.append(read)
            elif read is not None:
                writes.append(read)
        _check_puts(found, request, puts)
        found.check()
        call = idempotent_call(request, request.namespace, request.request_id, pb.WriteTogetherResponse)
        given = Transaction(request.namespace, writes, request.memory, puts, "" if call is None else call.key)

        def respond(done: Written) -> pb.WriteTogetherResponse:
            return _transaction_response(request, writes, done)

        together = partial(self._conversations.write_together, given)
        return await respond_to_write(call, self._conversations, together, respond)

    async def _read_write(
        self, found: Violations, place: int, write: pb.TransactionWrite, request: pb.WriteTogetherRequest
    ) -> ConversationWrite | tuple[NewObservation, str | None] | None:
        which = write.WhichOneof("write")
        if which is None:
            found.add(f"writes[{place}].write", "is not set")
            return None
        given, inside = getattr(write, which), found.within(f"writes[{place}].{which}.")
        if given.request_id:
            inside.add("request_id", "is set: the transaction has one for all writes")
        _fill_name(inside, given, "namespace", request.namespace)
        match which:
            case "append_messages":
                return await self._read_append(inside, write.append_messages)
            case "replace_message":
                return await self._read_replacement(inside, write.replace_message)
            case "update_conversation":
                return self._read_update(inside, write.update_conversation)
            case "set_state":
                return await self._read_state(inside, write.set_state)
            case "remove_messages":
                named = self._conversation_of(inside, write.remove_messages)
                return RemoveMessages(named, self._read_removal(inside, write.remove_messages))
            case "delete_conversation":
                named = self._conversation_of(inside, write.delete_conversation)
                return DeleteConversation(named, wire.read_last_number(inside, write.delete_conversation))
            case "delete_state":
                return self._read_state_deletion(inside, write.delete_state)
            case "put_fragment":
                _fill_name(inside, given, "memory", request.memory)
                check_name(inside, "memory", given.memory, self._limits)
                return read_put(inside, write.put_fragment, self._limits, self._conversations.dimension)

    # ---- the watch, completion
    async def watch_messages(
        self, request: pb.WatchMessagesRequest, context: _Context
    ) -> AsyncIterator[pb.WatchMessagesResponse]:
        found = Violations()
        named = self._conversation_of(found, request)
        after = int(validation.check_bounds(found, "after_number", request.after_number, 0, page_tokens.NUMBER_MAX))
        progress_s = read_progress_s(found, request)
        found.check()

        async def encode(messages: list[Message]) -> AsyncIterator[pb.WatchMessagesResponse]:
            made: list[pb.ConversationMessage] = []
            async for some in in_slices(messages, ENTRIES_PER_SLICE):
                made += [wire.message_of(named, message) for message in some]
            for part in _split_messages(made, self._limits.page_bytes_max) if made else [[]]:
                yield pb.WatchMessagesResponse(messages=part)

        pages = self._conversations.watch(named, after)
        sent = _until_completed(follow_changes(pages, progress_s, self._drain, encode, pb.WatchMessagesResponse))
        async with aclosing(
            end_if_stalled(sent, context, self._limits.watch_stalled_max_s, _stalled_error)
        ) as responses:
            async for response in responses:
                yield response

    async def complete_conversation(
        self, request: pb.CompleteConversationRequest, _context: _Context
    ) -> pb.CompleteConversationResponse:
        named = self._checked_name(request, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.complete(named, answer),
            lambda _: pb.CompleteConversationResponse(),
        )

    # ---- plans
    async def save_plans(self, request: pb.SavePlansRequest, _context: _Context) -> pb.SavePlansResponse:
        found = Violations()
        named = self._conversation_of(found, request)
        plans = await wire.read_plans(found, request.plans, request.conversation, self._limits)
        self._check_request(found, request.request_id)

        async def respond(saved: Sequence[Plan]) -> pb.SavePlansResponse:
            response = pb.SavePlansResponse()
            async for some in in_slices(saved, ENTRIES_PER_SLICE):
                response.plans.extend([wire.plan_of(named, plan) for plan in some])
            return response

        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.save_plans(named, plans, answer),
            lambda saved: pb.SavePlansResponse(plans=[wire.plan_of(named, plan) for plan in saved]),
            in_slices=respond,
        )

    async def list_plans(self, request: pb.ListPlansRequest, _context: _Context) -> bytes:
        """A serialised ListPlansResponse."""
        found = Violations()
        named = self._conversation_of(found, request)
        size = validation.page_size(found, request.page_size, self._limits)
        if len(request.sub_task_numbers) > self._limits.page_size_max:
            found.add("sub_task_numbers", f"has more than {self._limits.page_size_max} numbers")
        for place, number in enumerate(request.sub_task_numbers[: self._limits.page_size_max]):
            wire.plan_number(found, f"sub_task_numbers[{place}]", number)
        found.check()
        query = PlanQuery(tuple(request.sub_task_numbers), request.to_do, start_after(request), size + 1)
        rows = await self._conversations.list_plans(named, query)

        def add(page: pb.ListPlansResponse, row: Plan) -> None:
            page.plans.append(wire.plan_of(named, row))

        shown, count = await encode_fitting(rows[:size], pb.ListPlansResponse(), add, self._limits.page_bytes_max)
        token = page_tokens.make_token(request, str(rows[count - 1].number)) if count < len(rows) else ""
        return shown + pb.ListPlansResponse(next_page_token=token).SerializeToString()

    async def update_plan(self, request: pb.UpdatePlanRequest, _context: _Context) -> pb.UpdatePlanResponse:
        found = Violations()
        change = wire.read_change(found, request, self._limits)
        return await self._change_plan(found, request, change, pb.UpdatePlanResponse)

    async def complete_plan(self, request: pb.CompletePlanRequest, _context: _Context) -> pb.CompletePlanResponse:
        found = Violations()
        result = wire.check_text(found, "result", request.result, self._limits)
        return await self._change_plan(
            found, request, PlanChange(PlanState.COMPLETE, result=result), pb.CompletePlanResponse
        )

    async def remove_plans(self, request: pb.RemovePlansRequest, _context: _Context) -> pb.RemovePlansResponse:
        named = self._checked_name(request, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.remove_plans(named, answer),
            lambda count: pb.RemovePlansResponse(removed=count),
        )

    async def _change_plan(self, found: Violations, request: Any, change: PlanChange, response: Callable[..., R]) -> R:
        named = self._conversation_of(found, request)
        number = wire.plan_number(found, "sub_task_number", request.sub_task_number)
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            request.namespace,
            lambda answer: self._conversations.change_plan(named, number, change, answer),
            lambda plan: response(plan=wire.plan_of(named, plan)),
        )


def _fill_name(found: Violations, given: Any, field: str, value: str) -> None:
    if getattr(given, field) not in ("", value):
        found.add(field, "is another one than the transaction's")
    setattr(given, field, value)


def _check_deletions(request: pb.WriteTogetherRequest) -> None:
    deletes = any(write.WhichOneof("write") in _DELETIONS for write in request.writes)
    if deletes and not caller_may(Verb.FORGET, request.namespace):
        raise PermissionDenied("writes that delete need the right forget in this namespace")


def _check_puts(
    found: Violations, request: pb.WriteTogetherRequest, puts: Sequence[tuple[NewObservation, str | None]]
) -> None:
    if request.memory and not puts:
        found.add("memory", "is set, but no write puts a fragment")
    if len({new.external_id for new, _ in puts}) < len(puts):
        found.add("writes", "puts one external_id twice")


def _updated_response(done: ConversationRecord) -> pb.UpdateConversationResponse:
    return pb.UpdateConversationResponse(conversation=wire.conversation_message(done))


def _state_response(name: StateName, done: StateDocument) -> pb.SetStateResponse:
    return pb.SetStateResponse(state=wire.state_message(name, done, document=False))


def _transaction_response(
    request: pb.WriteTogetherRequest, writes: Sequence[ConversationWrite], done: Written
) -> pb.WriteTogetherResponse:
    puts, others = iter(done.puts), zip(writes, done.results, strict=True)
    return pb.WriteTogetherResponse(
        results=[
            pb.TransactionResult(put_fragment=put_response(next(puts)))
            if write.WhichOneof("write") == "put_fragment"
            else _result_message(*next(others))
            for write in request.writes
        ]
    )


def _result_message(write: ConversationWrite, done: ConversationResult) -> pb.TransactionResult:
    match write, done:
        case AppendMessages(), Appended():
            return pb.TransactionResult(append_messages=appended_response(done))
        case ReplaceMessage(), Message():
            return pb.TransactionResult(replace_message=replaced_response(write.conversation, done))
        case SetState(), StateDocument():
            return pb.TransactionResult(set_state=_state_response(write.name, done))
        case UpdateConversation(), ConversationRecord():
            return pb.TransactionResult(update_conversation=_updated_response(done))
        case RemoveMessages(), Removed():
            return pb.TransactionResult(remove_messages=removed_response(done))
        case DeleteState(), bool():
            return pb.TransactionResult(delete_state=pb.DeleteStateResponse(deleted=done))
        case DeleteConversation(), int():
            return pb.TransactionResult(delete_conversation=pb.DeleteConversationResponse(messages=done))
    raise TypeError(f"{type(done).__name__} is no result of {type(write).__name__}")


async def _until_completed(
    responses: AsyncGenerator[pb.WatchMessagesResponse, None],
) -> AsyncGenerator[pb.WatchMessagesResponse, None]:
    """The responses, and one that says that the conversation is completed."""
    async with aclosing(responses):
        async for response in responses:
            yield response
    yield pb.WatchMessagesResponse(completed=True)


def _stalled_error(response: pb.WatchMessagesResponse, limit_s: float) -> WatcherStalled:
    """The error of a watch whose client does not read `response`."""
    text = "what was sent is not read: read on to the end, and watch again after the last number"
    if not response.messages:
        return WatcherStalled(text, quota="watch_stalled_max_s", limit=number_text(limit_s))
    number = response.messages[-1].number
    return WatcherStalled(text, quota="watch_stalled_max_s", limit=number_text(limit_s), number=number)


def _split_messages(messages: Iterable[R], bytes_max: int) -> Iterator[list[R]]:
    """Splits messages into parts that fit, in order; a message that is too large is a part of its own."""
    part: list[R] = []
    size = 0
    for message in messages:
        more = message.ByteSize()
        if part and size + more > bytes_max:
            yield part
            part, size = [], 0
        part.append(message)
        size += more
    if part:
        yield part
