"""DB-GPT's GptsMemory (messages and plans) on the server's conversations.

DB-GPT's conversation `conv_id` is `namespace/conv_id` here. Calls block, as DB-GPT's interface requires (it calls them
from threads); a call from an event loop blocks the loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import cast

from dbgpt.agent.core.memory.gpts import GptsMemory, GptsMessage, GptsMessageMemory, GptsPlan, GptsPlansMemory
from dbgpt.util.executor_utils import blocking_func_to_async

from memstream.argument_types import show_value
from memstream.channel import memory_path
from memstream.conversation_values import Message, MessageFields, Plan, PlanState
from memstream.errors import ConversationNotFound, InvalidArgument
from memstream.sync import Client
from memstream.sync.conversations import Conversation


class RemoteGptsMemory(GptsMemory):
    """Messages and plans shared by every process that uses the namespace; pass it to DB-GPT's AgentMemory."""

    def __init__(self, client: Client, namespace: str, executor: Executor | None = None) -> None:
        super().__init__(RemotePlansMemory(client, namespace), RemoteMessageMemory(client, namespace), executor)
        self._conversations = _Conversations(client, namespace)
        self._appending: Counter[str] = Counter()

    async def append_message(self, conv_id: str, message: GptsMessage) -> None:
        """Appends to DB-GPT's cache and to the server; the message is durable when this returns."""
        self._appending[conv_id] += 1
        try:
            await super().append_message(conv_id, message)
        finally:
            self._appending[conv_id] -= 1
            if not self._appending[conv_id]:
                del self._appending[conv_id]

    async def get_messages(self, conv_id: str) -> list[GptsMessage]:
        """All messages, including those of other processes, which DB-GPT's cache lacks."""
        cached, appending = self.messages_cache[conv_id], self._appending[conv_id]
        count = len(cached)
        messages = await blocking_func_to_async(self._executor, self.message_memory.get_by_conv_id, conv_id)
        # A message appended during the call may be only in the cache: then keep the cache until the next call.
        if not appending and self.messages_cache[conv_id] is cached and len(cached) == count:
            self.messages_cache[conv_id] = messages
        return list(messages)

    async def complete(self, conv_id: str) -> None:
        """Completes the conversation in DB-GPT's cache and on the server, which ends its watches."""
        await blocking_func_to_async(self._executor, self._conversations.of(conv_id).complete)
        await super().complete(conv_id)


class RemoteMessageMemory(GptsMessageMemory):
    """DB-GPT's messages. A conversation that does not exist has none."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._conversations = _Conversations(client, namespace)

    def append(self, message: GptsMessage) -> None:
        """Appends a message; it is durable when this returns. The server sets its times."""
        said: MessageFields = {
            "receiver": message.receiver or "",
            "role": message.role or "",
            "rounds": message.rounds or 0,
            "app_code": message.app_code or "",
            "app_name": message.app_name or "",
            "current_goal": message.current_goal or "",
            "context": message.context or "",
            "review_info": message.review_info or "",
            "action_report": message.action_report or "",
            "model_name": message.model_name or "",
            "resource_info": message.resource_info or "",
        }
        if message.is_success is not None:
            said["success"] = message.is_success
        self._conversations.of(message.conv_id).append(message.sender, message.content or "", **said)

    def get_by_agent(self, conv_id: str, agent: str) -> list[GptsMessage]:
        """Messages that the agent sent or received, in order."""
        return self._listed(conv_id, agent)

    def get_between_agents(
        self, conv_id: str, agent1: str, agent2: str, current_goal: str | None = None
    ) -> list[GptsMessage]:
        """Messages between two agents, in order, optionally of one goal."""
        return self._listed(conv_id, agent1, agent2, current_goal or "")

    def get_by_conv_id(self, conv_id: str) -> list[GptsMessage]:
        """All messages, in order."""
        return self._listed(conv_id)

    def get_last_message(self, conv_id: str) -> GptsMessage | None:
        """The last message, if any."""
        try:
            return _message(conv_id, self._conversations.of(conv_id).last_message())
        except ConversationNotFound:
            return None

    def delete_by_conv_id(self, conv_id: str) -> None:
        """Deletes all messages."""
        try:
            self._conversations.of(conv_id).delete_messages()
        except ConversationNotFound:
            return

    def _listed(self, conv_id: str, agent: str = "", other: str = "", goal: str = "") -> list[GptsMessage]:
        try:
            listed = self._conversations.of(conv_id).messages(agent, other, current_goal=goal)
            return [_message(conv_id, message) for message in listed]
        except ConversationNotFound:
            return []


class RemotePlansMemory(GptsPlansMemory):
    """DB-GPT's plans. Changing a missing one raises ConversationNotFound."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._conversations = _Conversations(client, namespace)

    def batch_save(self, plans: Sequence[GptsPlan]) -> None:
        """Saves plans; a plan replaces the one with its number."""
        for conv_id in dict.fromkeys(plan.conv_id for plan in plans):
            here = [_plan_to(plan) for plan in plans if plan.conv_id == conv_id]
            self._conversations.of(conv_id).save_plans(here)

    def get_by_conv_id(self, conv_id: str) -> list[GptsPlan]:
        """All plans, in order of number."""
        return self._listed(conv_id)

    def get_by_conv_id_and_num(self, conv_id: str, task_nums: Iterable[int]) -> list[GptsPlan]:
        """Plans with these numbers."""
        numbers = [_number(number) for number in task_nums]
        return self._listed(conv_id, numbers) if numbers else []

    def get_todo_plans(self, conv_id: str) -> list[GptsPlan]:
        """Plans in state TODO or RETRYING."""
        return self._listed(conv_id, to_do=True)

    def complete_task(self, conv_id: str, task_num: int, result: str) -> None:
        """Marks a plan complete, with its result."""
        self._conversations.of(conv_id).complete_plan(_number(task_num), result or "")

    def update_task(
        self,
        conv_id: str,
        task_num: int,
        state: str,
        retry_times: int,
        agent: str | None = None,
        model: str | None = None,
        result: str | None = None,
    ) -> None:
        """Sets the fields passed, and always the result, as DB-GPT does."""
        self._conversations.of(conv_id).update_plan(
            _number(task_num),
            state=cast("PlanState", state),  # by value; update_plan rejects an invalid one
            retry_times=_number(retry_times, "retry_times"),
            agent=agent or None,
            agent_model=model or None,
            result=result or "",
        )

    def remove_by_conv_id(self, conv_id: str) -> None:
        """Removes all plans."""
        try:
            self._conversations.of(conv_id).remove_plans()
        except ConversationNotFound:
            return

    def _listed(self, conv_id: str, numbers: Sequence[int] = (), *, to_do: bool = False) -> list[GptsPlan]:
        try:
            return [_plan(conv_id, plan) for plan in self._conversations.of(conv_id).plans(numbers, to_do=to_do)]
        except ConversationNotFound:
            return []


def _number(value: object, argument: str = "task_num") -> int:
    """Parses a number; DB-GPT may pass text."""
    try:
        return int(str(value))
    except ValueError:
        raise InvalidArgument(argument, f"must be a whole number, not {show_value(value)}") from None


class _Conversations:
    def __init__(self, client: Client, namespace: str) -> None:
        memory_path(f"{namespace}/n", "namespace")
        self._client = client
        self._namespace = namespace

    def of(self, conv_id: str) -> Conversation:
        return self._client.conversation(f"{self._namespace}/{conv_id}")


def _message(conv_id: str, message: Message) -> GptsMessage:
    return GptsMessage(
        conv_id=conv_id,
        sender=message.sender,
        receiver=message.receiver,
        role=message.role,
        content=message.content,
        rounds=message.rounds,
        is_success=message.success is not False,
        app_code=message.app_code or None,
        app_name=message.app_name or None,
        current_goal=message.current_goal or None,
        context=message.context or None,
        review_info=message.review_info or None,
        action_report=message.action_report or None,
        model_name=message.model_name or None,
        resource_info=message.resource_info or None,
        created_at=_utc(message.create_time),
        updated_at=_utc(message.update_time),
    )


def _plan(conv_id: str, plan: Plan) -> GptsPlan:
    return GptsPlan(
        conv_id=conv_id,
        sub_task_num=plan.number,
        sub_task_content=plan.content,
        sub_task_title=plan.title or None,
        sub_task_agent=plan.agent or None,
        resource_name=plan.resource_name or None,
        rely=plan.rely or None,
        agent_model=plan.agent_model or None,
        retry_times=plan.retry_times,
        max_retry_times=plan.max_retry_times,
        state=plan.state.value,
        result=plan.result or None,
    )


def _plan_to(plan: GptsPlan) -> Plan:
    return Plan(
        number=int(plan.sub_task_num),
        content=plan.sub_task_content or "",
        title=plan.sub_task_title or "",
        agent=plan.sub_task_agent or "",
        resource_name=plan.resource_name or "",
        rely=plan.rely or "",
        agent_model=plan.agent_model or "",
        retry_times=plan.retry_times,
        max_retry_times=plan.max_retry_times,
        state=PlanState(plan.state or PlanState.TODO),
        result=plan.result or "",
    )


def _utc(time: datetime | None) -> datetime | None:
    """DB-GPT's times are UTC without a zone."""
    return None if time is None else time.astimezone(UTC).replace(tzinfo=None)
