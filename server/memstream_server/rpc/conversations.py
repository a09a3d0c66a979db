"""ConversationService: messages (rpc/messages.py), conversations and state (rpc/conversation_records.py), plans, and
the stream that watches a conversation until it is completed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.message import Message as WireMessage

from memstream.v1 import conversation_service_pb2 as pb
from memstream_server.core.printable import number_text
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.ports.conversations import (
    Message,
    Plan,
    PlanChange,
    PlanQuery,
    PlanState,
)
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.conversation_records import SessionService
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import WatcherStalled
from memstream_server.rpc.limits import ENTRIES_PER_SLICE, RequestLimits, encode_fitting
from memstream_server.rpc.messages import start_after
from memstream_server.rpc.slow_consumer import end_if_stalled, follow_changes, read_progress_s
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import conversations as wire

if TYPE_CHECKING:
    from memstream_server.engine.conversations import Conversations

_Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
R = TypeVar("R", bound=WireMessage)


class ConversationService(SessionService):
    """The servicer."""

    def __init__(self, conversations: Conversations, limits: RequestLimits, drain: Drain) -> None:
        super().__init__(conversations, limits)
        self._drain = drain

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
