"""One conversation: its messages, its plans, and a watch that ends when it is completed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from datetime import timedelta
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc.aio

from memstream.argument_types import Count, Int32, Items, Position, Several
from memstream.arguments import check_methods, checked_items
from memstream.backoff import Backoff, repeat_until_done
from memstream.channel import Link, MemoryPath, iterate_pages, new_request_id, read_message
from memstream.conversation_values import (
    Message,
    MessageFields,
    Plan,
    PlanState,
    message_from_wire,
    plan_from_wire,
    plan_to_wire,
    state_to_wire,
)
from memstream.errors import MemstreamError, StreamClosed
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import duration_to_wire

_Call: TypeAlias = grpc.aio.UnaryStreamCall[pb.WatchMessagesRequest, pb.WatchMessagesResponse]
_AHEAD_MAX = 1000


@check_methods
class Conversation:
    """A handle of a conversation; creating one sends nothing. The first message or plan creates the conversation.

    Before that, methods that read or change it raise ConversationNotFound. Every method raises a MemstreamError.
    """

    def __init__(self, link: Link, path: MemoryPath) -> None:
        self._link = link
        self._path = path

    def __repr__(self) -> str:
        return f"<Conversation {self._path}>"

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return str(self._path)

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self._path.namespace

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self._path.name

    # Messages.

    async def append(self, sender: str, content: str, **said: Unpack[MessageFields]) -> Message:
        """Appends a message; it is durable when this returns. Reopens a completed conversation."""
        request = pb.AppendMessageRequest(
            namespace=self.namespace,
            message=pb.ConversationMessage(conversation=self.name, sender=sender, content=content, **said),
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.conversations.AppendMessage, request)
        return message_from_wire(answer.message)

    async def messages(
        self, agent: str = "", other_agent: str = "", *, current_goal: str = "", page_size: Count = 0
    ) -> AsyncIterator[Message]:
        """Messages in order: all, those of `agent`, or those between both agents; optionally of one goal."""

        async def fetch(token: str) -> tuple[list[Message], str]:
            request = pb.ListMessagesRequest(
                namespace=self.namespace,
                conversation=self.name,
                agent=agent,
                other_agent=other_agent,
                current_goal=current_goal,
                page_size=page_size,
                page_token=token,
            )
            answer = await self._link.call(self._link.conversations.ListMessages, request)
            return [message_from_wire(wire) for wire in answer.messages], answer.next_page_token

        async for message in iterate_pages(fetch):
            yield message

    async def last_message(self) -> Message:
        """The last message. Raises ConversationNotFound when there is none."""
        request = pb.GetLastMessageRequest(namespace=self.namespace, conversation=self.name)
        return message_from_wire((await self._link.call(self._link.conversations.GetLastMessage, request)).message)

    def watch(self, after_number: Position = 0, *, progress_interval: timedelta | None = None) -> ConversationWatch:
        """Watches the messages after a number, including new ones, until the conversation is completed."""
        return ConversationWatch(self._link, self._path, after_number, progress_interval)

    async def complete(self) -> None:
        """Completes the conversation, which ends its watches. A later message reopens it."""
        request = pb.CompleteConversationRequest(
            namespace=self.namespace, conversation=self.name, request_id=new_request_id()
        )
        await self._link.call(self._link.conversations.CompleteConversation, request)

    async def delete_messages(self) -> int:
        """Deletes all messages and returns how many; their numbers are not reused."""
        request = pb.DeleteMessagesRequest(
            namespace=self.namespace, conversation=self.name, request_id=new_request_id()
        )
        return (await self._link.call(self._link.conversations.DeleteMessages, request)).deleted

    # Plans.

    async def save_plans(self, plans: Items[Plan]) -> tuple[Plan, ...]:
        """Saves plans in one transaction; a plan replaces the one with its number. Returns them with their times."""
        request = pb.SavePlansRequest(
            namespace=self.namespace,
            conversation=self.name,
            plans=[plan_to_wire(plan) for plan in checked_items("plans", plans, Plan)],
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.conversations.SavePlans, request)
        return tuple(plan_from_wire(wire) for wire in answer.plans)

    async def plans(
        self, numbers: Several[Int32] = (), *, to_do: bool = False, page_size: Count = 0
    ) -> AsyncIterator[Plan]:
        """Plans in order of number: all, those of `numbers`, or the open ones (TODO or RETRYING)."""

        async def fetch(token: str) -> tuple[list[Plan], str]:
            request = pb.ListPlansRequest(
                namespace=self.namespace,
                conversation=self.name,
                sub_task_numbers=numbers,
                to_do=to_do,
                page_size=page_size,
                page_token=token,
            )
            answer = await self._link.call(self._link.conversations.ListPlans, request)
            return [plan_from_wire(wire) for wire in answer.plans], answer.next_page_token

        async for plan in iterate_pages(fetch):
            yield plan

    async def update_plan(
        self,
        number: Int32,
        *,
        state: PlanState | None = None,
        retry_times: Int32 | None = None,
        agent: str | None = None,
        agent_model: str | None = None,
        result: str | None = None,
    ) -> Plan:
        """Sets the fields passed. Raises ConversationNotFound when there is no such plan."""
        request = pb.UpdatePlanRequest(
            namespace=self.namespace,
            conversation=self.name,
            sub_task_number=number,
            state=state_to_wire(state),
            retry_times=retry_times,
            sub_task_agent=agent,
            agent_model=agent_model,
            result=result,
            request_id=new_request_id(),
        )
        return plan_from_wire((await self._link.call(self._link.conversations.UpdatePlan, request)).plan)

    async def complete_plan(self, number: Int32, result: str = "") -> Plan:
        """Marks a plan complete, with its result."""
        request = pb.CompletePlanRequest(
            namespace=self.namespace,
            conversation=self.name,
            sub_task_number=number,
            result=result,
            request_id=new_request_id(),
        )
        return plan_from_wire((await self._link.call(self._link.conversations.CompletePlan, request)).plan)

    async def remove_plans(self) -> int:
        """Removes all plans and returns how many."""
        request = pb.RemovePlansRequest(namespace=self.namespace, conversation=self.name, request_id=new_request_id())
        return (await self._link.call(self._link.conversations.RemovePlans, request)).removed


class ConversationWatch(AsyncIterator[Message]):
    """New messages, once each, across reconnections; iteration ends when the conversation is completed.

    `number` is the number of the last message returned: pass it to a later watch to resume. Waiting for the next
    message may be cancelled and resumed.
    """

    def __init__(
        self, link: Link, conversation: MemoryPath, after_number: int, progress_interval: timedelta | None
    ) -> None:
        self.number = after_number
        self.connections = 0
        self._link = link
        self._request = pb.WatchMessagesRequest(
            namespace=conversation.namespace,
            conversation=conversation.name,
            after_number=after_number,
            progress_interval=None if progress_interval is None else duration_to_wire(progress_interval),
        )
        self._ahead: deque[Message] = deque()
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._ended = False
        self._error: MemstreamError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._start_watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Message:
        self._start_watch()
        self._link.check_loop()
        while not self._ahead:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        message = self._ahead.popleft()
        self._room.set()
        self.number = message.number
        return message

    async def aclose(self) -> None:
        """Ends the watch; further iteration raises StreamClosed."""
        self._ahead.clear()
        self._end_watch(StreamClosed("the watch is closed"))  # first: the awaits below may be cancelled
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start_watch(self) -> None:
        if self._task is None and self._error is None:
            self._link.check_open()
            self._task = asyncio.create_task(self._run_connections(), name="memstream watch of messages")

    async def _run_connections(self) -> None:
        backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await repeat_until_done(lambda: self._run_connection(backoff), backoff, self._link.revive)
        except MemstreamError as error:
            self._end_watch(error)
        except asyncio.CancelledError:
            self._end_watch(StreamClosed("the event loop of the watch has ended"))
            raise

    def _end_watch(self, error: MemstreamError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    async def _run_connection(self, backoff: Backoff) -> None:
        """Runs one connection; returns when the conversation is completed."""
        call: _Call = self._link.conversations.WatchMessages(self._request, metadata=self._link.metadata())
        self.connections += 1
        try:
            while not self._ended:
                answer = await read_message(call)
                backoff.mark_opened()
                backoff.mark_progress()
                self._ahead.extend(message_from_wire(wire) for wire in answer.messages)
                if answer.messages:
                    self._request.after_number = answer.messages[-1].number
                self._ended = answer.completed
                self._changed.set()
                while len(self._ahead) > _AHEAD_MAX:
                    self._room.clear()
                    await self._room.wait()
        finally:
            call.cancel()
