"""Conversations: the messages and plans beside the memories, what DB-GPT keeps in its GptsMemory.

Contract
- Writes return only after they are durable, and leave nothing behind when they raise, as those of the journal
  (ports/journal/port.py), whose errors they raise: StorageFull, OutcomeUnknown, and Conflict when the request_id of
  `answer` was answered meanwhile (serve that answer).
- `append`, `complete` and `save_plans` make the conversation they name; everything else raises NotThere for one
  that nobody has made. Deleting messages or plans leaves the conversation, and its numbers are not given again.
- A message's number is one more than the conversation's last. Appending to a completed conversation opens it again.
- `answer` is called inside the transaction with what the write returns, and what it makes is stored with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Answer

T = TypeVar("T")
AnswerOf: TypeAlias = Callable[[T], Answer] | None
"""Makes the stored answer to a request_id from what the write returns; None where repeats are not to be known."""


@dataclass(frozen=True, slots=True, order=True)
class ConversationName:
    """A conversation by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class NotThere(JournalError):
    """No such conversation, or no such message or plan in it. The text says which."""

    def __init__(self, text: str, conversation: ConversationName) -> None:
        super().__init__(text)
        self.conversation = conversation


class PlanState(StrEnum):
    """Where a plan stands. TODO and RETRYING are to do."""

    TODO = "todo"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    FAILED = "failed"
    COMPLETE = "complete"


TO_DO = (PlanState.TODO, PlanState.RETRYING)


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one agent to another. `context`, `review_info`, `action_report`, `resource_info` are JSON."""

    sender: str
    receiver: str = ""
    role: str = ""
    content: str = ""
    rounds: int = 0
    success: bool | None = None
    app_code: str = ""
    app_name: str = ""
    current_goal: str = ""
    context: str = ""
    review_info: str = ""
    action_report: str = ""
    model_name: str = ""
    resource_info: str = ""
    number: int = 0
    """From 1, ascending in the conversation; given when it is appended."""
    create_time_us: int = 0
    update_time_us: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of a conversation's plan."""

    number: int
    """Of the sub-task, from 1."""
    title: str = ""
    content: str = ""
    agent: str = ""
    resource_name: str = ""
    rely: str = ""
    agent_model: str = ""
    retry_times: int = 0
    max_retry_times: int = 0
    state: PlanState = PlanState.TODO
    result: str = ""
    create_time_us: int = 0
    update_time_us: int = 0


@dataclass(frozen=True, slots=True)
class PlanChange:
    """What to set of a plan; None keeps."""

    state: PlanState | None = None
    retry_times: int | None = None
    agent: str | None = None
    agent_model: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """How far a conversation is."""

    last_number: int
    """Of the last message ever appended; 0 when there was none."""
    completed: bool
    completions: int
    """How often it was completed: a watcher sees by it that it was, although it is open again."""
    completed_number: int
    """The last message's number when it was last completed."""


NEVER = Status(0, False, 0, 0)
"""Of a conversation that nobody has made."""


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """Which messages: those `agent` sent or received, or (with `other_agent`) those between the two; empty is any."""

    agent: str = ""
    other_agent: str = ""
    current_goal: str = ""
    after: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Which plans; no numbers are all."""

    numbers: tuple[int, ...] = ()
    to_do: bool = False
    after: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class ConversationScan:
    """All of a conversation in one snapshot, for as long as the scan lasts."""

    status: Status
    create_time_us: int
    message_count: int
    plan_count: int
    messages: Callable[[], Iterator[Message]]
    plans: Callable[[], Iterator[Plan]]


class ConversationStore(Protocol):
    """See the module's contract. Methods may be called concurrently from one event loop; none blocks it."""

    async def append(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        """The message with its number and times."""
        ...

    async def messages(self, conversation: ConversationName, query: MessageQuery) -> list[Message]:
        """Ascending by number, after `query.after`."""
        ...

    async def last_message(self, conversation: ConversationName) -> Message:
        """Raises NotThere when there is none."""
        ...

    async def status(self, conversation: ConversationName) -> Status:
        """NEVER for one that nobody has made."""
        ...

    async def complete(self, conversation: ConversationName, now_us: int, answer: AnswerOf[None] = None) -> None:
        """Completing a completed one changes nothing."""
        ...

    async def delete_messages(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        """How many they were."""
        ...

    async def save_plans(
        self,
        conversation: ConversationName,
        plans: Sequence[Plan],
        now_us: int,
        answer: AnswerOf[tuple[Plan, ...]] = None,
    ) -> tuple[Plan, ...]:
        """The plans, whose numbers differ, with their times; one of an existing number replaces it."""
        ...

    async def plans(self, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
        """Ascending by number, after `query.after`."""
        ...

    async def change_plan(
        self,
        conversation: ConversationName,
        number: int,
        change: PlanChange,
        now_us: int,
        answer: AnswerOf[Plan] = None,
    ) -> Plan:
        """The plan as changed."""
        ...

    async def remove_plans(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        """How many they were."""
        ...

    # ---- export and import
    async def names(self, namespace: str, after: str, limit: int) -> list[str]:
        """Of a namespace's conversations, ascending, after `after`."""
        ...

    async def scan(self, conversation: ConversationName, visit: Callable[[ConversationScan], T]) -> T:
        """Read all of it in one snapshot; `visit` runs in a thread, perhaps twice."""
        ...

    async def stage(self, staged: str, create_time_us: int, messages: Sequence[Message], plans: Sequence[Plan]) -> None:
        """Put messages and plans, as they are, aside under the name `staged`; those that are there stay."""
        ...

    async def publish(self, staged: str, conversation: ConversationName, status: Status) -> None:
        """What was staged becomes this conversation. Raises AlreadyExists, or Conflict when nothing was staged."""
        ...

    async def discard(self, staged: str) -> None:
        """What was staged goes."""
        ...
