"""One conversation: its messages, its plans, and a watch that ends when it is completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from datetime import datetime, timedelta
from typing import Unpack

from memstream.argument_types import Count, Int32, Items, Position, Several
from memstream.arguments import check_methods, checked_items
from memstream.channel import Link, MemoryPath, iterate_pages, new_request_id
from memstream.conversation_values import (
    Appended,
    Message,
    MessageFields,
    NewMessage,
    Plan,
    PlanState,
    appended_from_wire,
    message_from_wire,
    plan_from_wire,
    plan_to_wire,
    state_to_wire,
)
from memstream.conversation_watch import ConversationWatch
from memstream.listed_codec import conversation_from_wire
from memstream.listed_values import ConversationSummary
from memstream.transactions import (
    AppendMessages,
    ReplaceMessage,
    UpdateConversation,
    append_to_wire,
    replacement_to_wire,
    update_to_wire,
)
from memstream.v1 import conversation_service_pb2 as pb
from memstream.wiretypes import optional_timestamp_to_wire


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

    async def append_messages(
        self, messages: Items[NewMessage], *, last_number: Position | None = None, absent: bool = False
    ) -> Appended:
        """Appends several messages, all or none; they are durable when this returns.

        last_number: raises EtagMismatch unless this is the number of the last message (0: there is none).
        absent: raises MemoryExists if the conversation exists.
        """
        given = list(checked_items("messages", messages, NewMessage))
        request = append_to_wire(AppendMessages(self.name, given, last_number, absent))
        request.namespace = self.namespace
        # The ids of the messages make a repeat harmless, without an answer that the server has to store.
        request.request_id = "" if given and all(message.client_id for message in given) else new_request_id()
        return appended_from_wire(await self._link.call(self._link.conversations.AppendMessages, request))

    async def messages(
        self,
        agent: str = "",
        other_agent: str = "",
        *,
        current_goal: str = "",
        page_size: Count = 0,
        limit: Count = 0,
        newest_first: bool = False,
        after: Position = 0,
        before: Position = 0,
        after_time: datetime | None = None,
        before_time: datetime | None = None,
        bodies: bool = True,
    ) -> AsyncIterator[Message]:
        """Messages in order: all, those of `agent`, or those between both agents; optionally of one goal.

        limit: at most so many. after, before: only messages with numbers between; after_time, before_time: and appended
        between. bodies: with their bodies.
        """
        left = limit

        async def fetch(token: str) -> tuple[list[Message], str]:
            request = pb.ListMessagesRequest(
                namespace=self.namespace,
                conversation=self.name,
                agent=agent,
                other_agent=other_agent,
                current_goal=current_goal,
                page_size=min(page_size or left, left) if limit else page_size,
                page_token=token,
                newest_first=newest_first,
                after_number=after,
                before_number=before,
                after_time=optional_timestamp_to_wire("after_time", after_time),
                before_time=optional_timestamp_to_wire("before_time", before_time),
                without_bodies=not bodies,
            )
            answer = await self._link.call(self._link.conversations.ListMessages, request)
            return [message_from_wire(wire) for wire in answer.messages], answer.next_page_token

        async for message in iterate_pages(fetch):
            yield message
            left -= 1
            if not left:
                return

    async def message(self, number: Position = 0, *, client_id: str = "") -> Message:
        """The message with that number, or with your id. Raises ConversationNotFound when there is none."""
        request = pb.GetMessageRequest(
            namespace=self.namespace, conversation=self.name, number=number, client_id=client_id
        )
        return message_from_wire((await self._link.call(self._link.conversations.GetMessage, request)).message)

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

    async def replace_message(self, number: Position, message: NewMessage) -> Message:
        """Replaces the message with that number, and returns the new one without its body."""
        request = replacement_to_wire(ReplaceMessage(self.name, number, message))
        request.namespace, request.request_id = self.namespace, new_request_id()
        return message_from_wire((await self._link.call(self._link.conversations.ReplaceMessage, request)).message)

    async def remove_messages(self, numbers: Several[Position], *, last_number: Position | None = None) -> int:
        """Deletes these messages. Raises ConversationNotFound, and deletes none, when one is not there.

        last_number: raises EtagMismatch, and deletes nothing, unless this is the number of the last message (0: there
        is none)."""
        which = pb.MessageNumbers(numbers=list(numbers))
        return await self._remove(pb.RemoveMessagesRequest(numbers=which, last_number=last_number))

    async def remove_oldest(self, count: Position, *, last_number: Position | None = None) -> int:
        """Deletes the oldest messages, so many or all, and returns how many. `last_number`: as in remove_messages."""
        return await self._remove(pb.RemoveMessagesRequest(oldest=count, last_number=last_number))

    async def truncate(self, from_number: Position, *, last_number: Position | None = None) -> int:
        """Deletes the message with that number and all after it, and returns how many. `last_number`: as in
        remove_messages."""
        return await self._remove(pb.RemoveMessagesRequest(from_number=from_number, last_number=last_number))

    async def pop_message(self, *, last_number: Position | None = None) -> Message:
        """Deletes the last message and returns it. Raises ConversationNotFound when there is none. `last_number`: as in
        remove_messages."""
        request = pb.PopMessageRequest(
            namespace=self.namespace, conversation=self.name, request_id=new_request_id(), last_number=last_number
        )
        return message_from_wire((await self._link.call(self._link.conversations.PopMessage, request)).message)

    async def _remove(self, request: pb.RemoveMessagesRequest) -> int:
        request.namespace, request.conversation, request.request_id = self.namespace, self.name, new_request_id()
        return (await self._link.call(self._link.conversations.RemoveMessages, request)).removed

    # The conversation as a whole.

    async def describe(self) -> ConversationSummary:
        """Its labels, counts and times."""
        request = pb.GetConversationRequest(namespace=self.namespace, conversation=self.name)
        return conversation_from_wire(
            (await self._link.call(self._link.conversations.GetConversation, request)).conversation
        )

    async def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        ttl: timedelta | None = None,
        create: bool = False,
        absent: bool = False,
        feed_memory: str | None = None,
    ) -> ConversationSummary:
        """Sets labels, time to live (zero for none) and the memory of the namespace that its messages feed (empty for
        none); None keeps them.

        create: creates the conversation if it does not exist. absent: creates it; raises MemoryExists if it exists.
        """
        request = update_to_wire(UpdateConversation(self.name, labels, ttl, create, absent, feed_memory))
        request.namespace, request.request_id = self.namespace, new_request_id()
        answer = await self._link.call(self._link.conversations.UpdateConversation, request)
        return conversation_from_wire(answer.conversation)

    async def delete(self, *, last_number: Position | None = None) -> int:
        """Deletes it with messages, plans and state; returns how many messages it had. `last_number`: as in
        remove_messages."""
        request = pb.DeleteConversationRequest(
            namespace=self.namespace, conversation=self.name, request_id=new_request_id(), last_number=last_number
        )
        return (await self._link.call(self._link.conversations.DeleteConversation, request)).messages

    async def fork(self, new_name: str, number: Position = 0) -> ConversationSummary:
        """Copies it up to a message (0: all) to a new conversation of its namespace. Raises MemoryExists."""
        request = pb.ForkConversationRequest(
            namespace=self.namespace,
            conversation=self.name,
            new_conversation=new_name,
            number=number,
            request_id=new_request_id(),
        )
        answer = await self._link.call(self._link.conversations.ForkConversation, request)
        return conversation_from_wire(answer.conversation)

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
