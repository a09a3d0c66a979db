"""The blocking Conversation, ConversationWatch.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Unpack

import memstream.conversation_watch
import memstream.conversations
from memstream.argument_types import Count, Int32, Items, Position, Several
from memstream.arguments import check_methods
from memstream.conversation_values import Appended, Message, MessageFields, NewMessage, Plan, PlanState
from memstream.listed_values import ConversationSummary
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

    def append_messages(
        self, messages: Items[NewMessage], *, last_number: Position | None = None, absent: bool = False
    ) -> Appended:
        """Appends several messages, all or none; they are durable when this returns.

        last_number: raises EtagMismatch unless this is the number of the last message (0: there is none).
        absent: raises MemoryExists if the conversation exists.
        """
        return LOOP.run(self._inner.append_messages(messages, last_number=last_number, absent=absent))

    def messages(
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
    ) -> Iterator[Message]:
        """Messages in order: all, those of `agent`, or those between both agents; optionally of one goal.

        limit: at most so many. after, before: only messages with numbers between; after_time, before_time: and appended
        between. bodies: with their bodies.
        """
        return LOOP.iterate_from(
            lambda: self._inner.messages(
                agent,
                other_agent,
                current_goal=current_goal,
                page_size=page_size,
                limit=limit,
                newest_first=newest_first,
                after=after,
                before=before,
                after_time=after_time,
                before_time=before_time,
                bodies=bodies,
            )
        )

    def message(self, number: Position = 0, *, client_id: str = "") -> Message:
        """The message with that number, or with your id. Raises ConversationNotFound when there is none."""
        return LOOP.run(self._inner.message(number, client_id=client_id))

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

    def replace_message(self, number: Position, message: NewMessage) -> Message:
        """Replaces the message with that number, and returns the new one without its body."""
        return LOOP.run(self._inner.replace_message(number, message))

    def remove_messages(self, numbers: Several[Position], *, last_number: Position | None = None) -> int:
        """Deletes these messages. Raises ConversationNotFound, and deletes none, when one is not there.

        last_number: raises EtagMismatch, and deletes nothing, unless this is the number of the last message (0: there
        is none).
        """
        return LOOP.run(self._inner.remove_messages(numbers, last_number=last_number))

    def remove_oldest(self, count: Position, *, last_number: Position | None = None) -> int:
        """Deletes the oldest messages, so many or all, and returns how many. `last_number`: as in remove_messages."""
        return LOOP.run(self._inner.remove_oldest(count, last_number=last_number))

    def truncate(self, from_number: Position, *, last_number: Position | None = None) -> int:
        """Deletes the message with that number and all after it, and returns how many. `last_number`: as in
        remove_messages."""
        return LOOP.run(self._inner.truncate(from_number, last_number=last_number))

    def pop_message(self, *, last_number: Position | None = None) -> Message:
        """Deletes the last message and returns it. Raises ConversationNotFound when there is none. `last_number`: as in
        remove_messages."""
        return LOOP.run(self._inner.pop_message(last_number=last_number))

    def describe(self) -> ConversationSummary:
        """Its labels, counts and times."""
        return LOOP.run(self._inner.describe())

    def update(
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
        return LOOP.run(
            self._inner.update(labels=labels, ttl=ttl, create=create, absent=absent, feed_memory=feed_memory)
        )

    def delete(self, *, last_number: Position | None = None) -> int:
        """Deletes it with messages, plans and state; returns how many messages it had. `last_number`: as in
        remove_messages."""
        return LOOP.run(self._inner.delete(last_number=last_number))

    def fork(self, new_name: str, number: Position = 0) -> ConversationSummary:
        """Copies it up to a message (0: all) to a new conversation of its namespace. Raises MemoryExists."""
        return LOOP.run(self._inner.fork(new_name, number))

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

    def __init__(self, inner: memstream.conversation_watch.ConversationWatch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def number(self) -> int:
        """The number of the last message returned."""
        return self._inner.number
