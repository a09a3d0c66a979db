"""The blocking Conversation, ConversationWatch.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Unpack

import memstream.conversations
from memstream.argument_types import Count, Int32, Items, Position, Several
from memstream.arguments import check_methods
from memstream.conversation_values import Message, MessageFields, Plan, PlanState
from memstream.sync.bases import Handle, Iterated
from memstream.sync.loop import LOOP


@check_methods
class Conversation(Handle):
    """See memstream.Conversation."""

    def __init__(self, inner: memstream.conversations.Conversation) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return self._inner.path

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self._inner.namespace

    @property
    def name(self) -> str:
        """Its name in the namespace."""
        return self._inner.name

    def append(self, sender: str, content: str, **said: Unpack[MessageFields]) -> Message:
        """Appends a message; it is durable when this returns. Reopens a completed conversation."""
        return LOOP.run(self._inner.append(sender, content, **said))

    def messages(
        self, agent: str = "", other_agent: str = "", *, current_goal: str = "", page_size: Count = 0
    ) -> Iterator[Message]:
        """Messages in order: all, those of `agent`, or those between both agents; optionally of one goal."""
        return LOOP.iterate_from(
            lambda: self._inner.messages(agent, other_agent, current_goal=current_goal, page_size=page_size)
        )

    def last_message(self) -> Message:
        """The last message. Raises ConversationNotFound when there is none."""
        return LOOP.run(self._inner.last_message())

    def watch(self, after_number: Position = 0, *, progress_interval: timedelta | None = None) -> ConversationWatch:
        """Watches the messages after a number, including new ones, until the conversation is completed."""
        return ConversationWatch(
            LOOP.make(lambda: self._inner.watch(after_number, progress_interval=progress_interval))
        )

    def complete(self) -> None:
        """Completes the conversation, which ends its watches. A later message reopens it."""
        LOOP.run(self._inner.complete())

    def delete_messages(self) -> int:
        """Deletes all messages and returns how many; their numbers are not reused."""
        return LOOP.run(self._inner.delete_messages())

    def save_plans(self, plans: Items[Plan]) -> tuple[Plan, ...]:
        """Saves plans in one transaction; a plan replaces the one with its number. Returns them with their times."""
        return LOOP.run(self._inner.save_plans(plans))

    def plans(self, numbers: Several[Int32] = (), *, to_do: bool = False, page_size: Count = 0) -> Iterator[Plan]:
        """Plans in order of number: all, those of `numbers`, or the open ones (TODO or RETRYING)."""
        return LOOP.iterate_from(lambda: self._inner.plans(numbers, to_do=to_do, page_size=page_size))

    def update_plan(
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
        return LOOP.run(
            self._inner.update_plan(
                number, state=state, retry_times=retry_times, agent=agent, agent_model=agent_model, result=result
            )
        )

    def complete_plan(self, number: Int32, result: str = "") -> Plan:
        """Marks a plan complete, with its result."""
        return LOOP.run(self._inner.complete_plan(number, result))

    def remove_plans(self) -> int:
        """Removes all plans and returns how many."""
        return LOOP.run(self._inner.remove_plans())


class ConversationWatch(Iterated[Message]):
    """See memstream.ConversationWatch."""

    def __init__(self, inner: memstream.conversations.ConversationWatch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def number(self) -> int:
        """The number of the last message returned."""
        return self._inner.number
