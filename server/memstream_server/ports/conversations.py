"""The store of conversations: the messages of agent frameworks and of DB-GPT's GptsMemory, and plans.

Contract
- Writes return only after they are durable, and a write that raises leaves nothing, as in the journal
  (ports/journal/port.py), whose errors they raise: StorageFull, OutcomeUnknown, and StaleWrite if the request_id of
  `answer` has been answered meanwhile (return that answer).
- Appending, completing and saving plans create the conversation if necessary; other methods raise NotThere for one
  that does not exist. Deleting messages or plans keeps the conversation, and numbers are not reused.
- A message's number is one more than the last that the conversation ever had, and its create time is not before that of
  the message before it. Appending to a completed conversation reopens it.
- A client id names one message of its conversation: a message that is there already is not appended again.
- Reads give bodies up to a number of bytes; messages beyond it come without (`Message.is_whole`). They end beyond a
  number of bytes of records: the last message is then there by its number only, and not whole.
- `answer` is called inside the transaction with the result of the write, and its answer is stored with the write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

from memstream_server.core.values import Metadata
from memstream_server.ports.journal.errors import AlreadyExists, PreconditionFailed
from memstream_server.ports.journal.records import Answer, Labels

T = TypeVar("T")
AnswerOf: TypeAlias = Callable[[T], Answer] | None
"""Makes the stored answer to a request_id from the result of a write; None if repeats are not detected."""


@dataclass(frozen=True, slots=True, order=True)
class ConversationName:
    """A conversation by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class NotThere(PreconditionFailed):
    """The conversation, or a message or plan in it, does not exist. The text says which."""

    def __init__(self, text: str, conversation: ConversationName) -> None:
        super().__init__(text)
        self.conversation = conversation


class ConversationExists(PreconditionFailed, AlreadyExists):
    """There is a conversation of that name."""

    def __init__(self, conversation: ConversationName) -> None:
        super().__init__(f"conversation {conversation} exists")
        self.conversation = conversation


class LastNumberDiffers(PreconditionFailed):
    """The conversation's last message is not the one of the precondition."""

    def __init__(self, text: str, last_number: int) -> None:
        super().__init__(text)
        self.last_number = last_number


class ClientIdTaken(PreconditionFailed):
    """Another message of the conversation has the client id."""


class PlanState(StrEnum):
    """State of a plan. TODO and RETRYING count as to do."""

    TODO = "todo"
    RUNNING = "running"
    WAITING = "waiting"
    RETRYING = "retrying"
    FAILED = "failed"
    COMPLETE = "complete"


TO_DO = (PlanState.TODO, PlanState.RETRYING)


@dataclass(frozen=True, slots=True)
class Message:
    """A message. `body` is JSON in UTF-8, kept unchanged; `context`, `review_info`, `action_report`, `resource_info`,
    of DB-GPT, are JSON, too.
    """

    sender: str = ""
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
    """From 1, ascending in the conversation; assigned when the message is appended."""
    create_time_us: int = 0
    update_time_us: int = 0
    name: str = ""
    tool_call_id: str = ""
    client_id: str = ""
    metadata: Metadata = ()
    time_us: int | None = None
    """When it was said, by the client's clock."""
    body: bytes | None = None
    """None: it has none, or it was not read."""
    body_size_bytes: int = 0
    """UNREAD: only the number was read."""

    @property
    def is_read(self) -> bool:
        """Whether more than its number was read."""
        return self.body_size_bytes != UNREAD

    @property
    def is_whole(self) -> bool:
        """Whether the body, if it has one, was read."""
        return self.body is not None or not self.body_size_bytes


UNREAD = -1


@dataclass(frozen=True, slots=True)
class Precondition:
    """What must hold for messages to be appended."""

    last_number: int | None = None
    """Number of the present last message; 0: there is none. None: any."""
    absent: bool = False
    """The conversation does not exist."""


@dataclass(frozen=True, slots=True)
class Appended:
    """Messages of one call are stored."""

    numbers: tuple[int, ...]
    """Of each message, in the order of the call."""
    count: int
    """How many were appended; the others were there."""
    last_number: int
    create_time_us: int
    """Of those that were appended."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Which messages to delete: exactly one is set."""

    numbers: tuple[int, ...] = ()
    """These. Each must exist."""
    oldest: int | None = None
    """So many, the oldest first."""
    from_number: int | None = None
    """This one and all above."""
    last_number: int | None = None
    """What must hold: the number of the present last message; 0: there is none. None: any."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Messages are deleted."""

    count: int
    last_number: int
    """Of the message that is the last now; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A step of a conversation's plan."""

    number: int
    """Number of the sub-task, from 1."""
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
    """Fields of a plan to set; None keeps the present value."""

    state: PlanState | None = None
    retry_times: int | None = None
    agent: str | None = None
    agent_model: str | None = None
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """Progress of a conversation."""

    last_number: int
    """Number of the last message ever appended; 0 if there was none."""
    completed: bool
    completions: int
    """How often it was completed: shows a watcher a completion even after the conversation was reopened."""
    completed_number: int
    """The last message's number at the latest completion."""


NEVER = Status(0, False, 0, 0)
"""Status of a conversation that does not exist."""


@dataclass(frozen=True, slots=True)
class MessageQuery:
    """Selects messages that `agent` sent or received, or (with `other_agent`) messages between both; empty: any."""

    agent: str = ""
    other_agent: str = ""
    current_goal: str = ""
    after: int = 0
    """Only above this number,"""
    limit: int = 100
    before: int | None = None
    """below this one,"""
    after_us: int | None = None
    before_us: int | None = None
    """and appended between these times."""
    newest_first: bool = False
    bodies_max: int = 4 << 20
    """Bytes of bodies to read; the first message with a body gets it in any case. 0: no bodies."""
    records_max: int = 4 << 20
    """Bytes of records to read, at least one message. The one beyond them is UNREAD."""


@dataclass(frozen=True, slots=True)
class PlanQuery:
    """Selects plans; empty `numbers` selects all."""

    numbers: tuple[int, ...] = ()
    to_do: bool = False
    after: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Details:
    """What a conversation has besides messages and plans. `state`: the document of its session; None: there is none."""

    labels: Labels = ()
    ttl_us: int | None = None
    update_time_us: int = 0
    state: bytes | None = None


@dataclass(frozen=True, slots=True)
class ConversationScan:
    """A whole conversation in one snapshot; valid during the scan."""

    status: Status
    details: Details
    create_time_us: int
    message_count: int
    plan_count: int
    messages: Callable[[], Iterator[Message]]
    plans: Callable[[], Iterator[Plan]]


class ConversationStore(Protocol):
    """See the module's contract. Methods may be called concurrently from one event loop; none blocks it."""

    async def append_message(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        """Returns the message with its number and times."""
        ...

    async def append_messages(
        self,
        conversation: ConversationName,
        messages: Sequence[Message],
        condition: Precondition,
        now_us: int,
        answer: AnswerOf[Appended] = None,
    ) -> Appended:
        """All or none. Raises LastNumberDiffers, ConversationExists, ClientIdTaken. If all are there already, the
        condition is not checked. The client ids of `messages` are distinct."""
        ...

    def store_bodies(
        self, namespace: str, bodies: Sequence[bytes | None], now_us: int
    ) -> AbstractAsyncContextManager[Mapping[bytes, int]]:
        """Write large bodies of messages, and documents, in parts, for the transaction that runs inside
        (`JointWrites.stored`). Nobody reads parts without an owner; they are deleted at the end if there is none. The
        methods below do this themselves."""
        ...

    async def purge_deleted(self, namespace: str) -> None:
        """Delete the rows of what a transaction has deleted or replaced; what fails is left to `prune_conversations`.
        The methods below do this themselves."""
        ...

    async def list_messages(self, conversation: ConversationName, query: MessageQuery) -> list[Message]:
        """In order of number."""
        ...

    async def get_message(self, conversation: ConversationName, which: int | str) -> Message:
        """By its number or its client id. Raises NotThere if there is none."""
        ...

    async def replace_message(
        self, conversation: ConversationName, message: Message, now_us: int, answer: AnswerOf[Message] = None
    ) -> Message:
        """Replaces the message with that number, which keeps its create time. Raises NotThere, ClientIdTaken."""
        ...

    async def remove_messages(
        self, conversation: ConversationName, removal: Removal, now_us: int, answer: AnswerOf[Removed] = None
    ) -> Removed:
        """Raises NotThere if one of the numbers is not there, LastNumberDiffers. Readers see all of it or nothing."""
        ...

    async def pop_message(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[Message] = None
    ) -> Message:
        """Deletes the last message and returns it. Raises NotThere if there is none, LastNumberDiffers."""
        ...

    async def last_message(self, conversation: ConversationName) -> Message:
        """Raises NotThere if there is none."""
        ...

    async def get_status(self, conversation: ConversationName) -> Status:
        """NEVER for a conversation that does not exist."""
        ...

    async def complete_conversation(
        self, conversation: ConversationName, now_us: int, answer: AnswerOf[None] = None
    ) -> None:
        """Completing a completed conversation changes nothing."""
        ...

    async def delete_messages(self, conversation: ConversationName, now_us: int, answer: AnswerOf[int] = None) -> int:
        """Returns the number of deleted messages."""
        ...

    async def save_plans(
        self,
        conversation: ConversationName,
        plans: Sequence[Plan],
        now_us: int,
        answer: AnswerOf[tuple[Plan, ...]] = None,
    ) -> tuple[Plan, ...]:
        """Save plans with distinct numbers, replacing existing ones; returns them with their times."""
        ...

    async def list_plans(self, conversation: ConversationName, query: PlanQuery) -> list[Plan]:
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
        """Returns the changed plan."""
        ...

    async def remove_plans(self, conversation: ConversationName, answer: AnswerOf[int] = None) -> int:
        """Returns the number of deleted plans."""
        ...

    # ---- export and import
    async def list_names(self, namespace: str, after: str, limit: int) -> list[str]:
        """Names of a namespace's conversations greater than `after`, ascending."""
        ...

    async def scan_conversation(self, conversation: ConversationName, visit: Callable[[ConversationScan], T]) -> T:
        """Read a conversation in one snapshot; `visit` runs in a thread, and may run twice."""
        ...

    async def stage_rows(
        self, staged: str, create_time_us: int, messages: Sequence[Message], plans: Sequence[Plan]
    ) -> None:
        """Add messages and plans unchanged under the staging name `staged`; earlier ones stay."""
        ...

    async def publish_staged(
        self, staged: str, conversation: ConversationName, status: Status, details: Details
    ) -> None:
        """Turn the staged rows into this conversation. Raises AlreadyExists, or StaleWrite if nothing is staged."""
        ...

    async def discard_staged(self, staged: str) -> None:
        """Delete the staged rows."""
        ...
