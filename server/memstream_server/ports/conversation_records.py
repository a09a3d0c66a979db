"""Conversations as wholes: labels, time to live, forks, and state documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeAlias

from memstream_server.ports.conversations import (
    AnswerOf,
    Appended,
    ConversationName,
    ConversationStore,
    Message,
    Precondition,
    Removal,
    Removed,
)
from memstream_server.ports.journal.errors import PreconditionFailed
from memstream_server.ports.journal.records import Answer, Labels

USER_LABEL = "user"
"""The label by which the conversations of a user are found."""


class StateDiffers(PreconditionFailed):
    """The state document is not the one of the precondition. `version`: the present one; 0: there is none."""

    def __init__(self, text: str, version: int) -> None:
        super().__init__(text)
        self.version = version


class RemovesTooMany(PreconditionFailed):
    """A transaction cannot delete so many messages and keep others."""


class StateScope(StrEnum):
    """To what a state document belongs."""

    APP = "app"
    USER = "user"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class StateName:
    """A state document by its place. Of a session, `name` is that of its conversation."""

    namespace: str
    scope: StateScope
    name: str


@dataclass(frozen=True, slots=True)
class StateDocument:
    """A state document: JSON in UTF-8, and the number of its write."""

    document: bytes
    version: int
    update_time_us: int


@dataclass(frozen=True, slots=True)
class ConversationRecord:
    """What a conversation is."""

    conversation: ConversationName
    number: int
    """Of the conversation in the store."""
    labels: Labels
    ttl_us: int | None
    expire_time_us: int | None
    message_count: int
    last_number: int
    completed: bool
    create_time_us: int
    update_time_us: int
    feed_memory: str = ""
    """Name of the memory of the namespace that it feeds; empty: none."""
    fed_number: int = 0
    """Of the last message that it was fed with."""


@dataclass(frozen=True, slots=True)
class Feed:
    """A conversation whose messages above `fed_number` are to feed a memory of its namespace."""

    number: int
    """Of the conversation in the store."""
    conversation: ConversationName
    memory: str
    fed_number: int
    last_number: int

    def from_number(self, fed_number: int) -> Feed:
        """The same, fed up to this message."""
        return replace(self, fed_number=fed_number)


@dataclass(frozen=True, slots=True)
class ConversationQuery:
    """Which conversations to list: by name, or the latest first. `labels`: they have each."""

    namespace: str
    limit: int
    prefix: str = ""
    labels: Labels = ()
    after_name: str = ""
    latest_first: bool = False
    before: tuple[int, int] | None = None
    """With `latest_first`: continue below this (update time, number)."""


@dataclass(frozen=True, slots=True)
class ConversationChange:
    """Labels, time to live and memory to feed to set; None keeps them. A `ttl_us` of 0 ends it, an empty
    memory the feed. Another memory is fed from the first message."""

    labels: Labels | None = None
    ttl_us: int | None = None
    allow_missing: bool = False
    absent: bool = False
    """Create it. ConversationExists if it exists."""
    feed_memory: str | None = None


@dataclass(frozen=True, slots=True)
class AppendMessages:
    """Appends messages; see ConversationStore.append_messages."""

    conversation: ConversationName
    messages: Sequence[Message]
    condition: Precondition


@dataclass(frozen=True, slots=True)
class ReplaceMessage:
    """Replaces the message with that number."""

    conversation: ConversationName
    message: Message


@dataclass(frozen=True, slots=True)
class UpdateConversation:
    """Changes or creates a conversation."""

    conversation: ConversationName
    change: ConversationChange


@dataclass(frozen=True, slots=True)
class SetState:
    """Writes a state document; see SessionStore.set_state."""

    name: StateName
    document: bytes
    version: int | None = None


@dataclass(frozen=True, slots=True)
class RemoveMessages:
    """Deletes messages: at most `REMOVED_MAX`, or all; see ConversationStore.remove_messages. Raises RemovesTooMany."""

    conversation: ConversationName
    removal: Removal


REMOVED_MAX = 1_000


@dataclass(frozen=True, slots=True)
class DeleteConversation:
    """Deletes a conversation. `last_number`: as in Removal."""

    conversation: ConversationName
    last_number: int | None = None


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Deletes a state document; see SessionStore.delete_state."""

    name: StateName
    version: int | None = None


@dataclass(frozen=True, slots=True)
class AdvanceFeed:
    """Says that a conversation has fed its memory from one number to another. Raises PreconditionFailed if it does not
    feed that memory, or has another `fed_number`."""

    number: int
    """Of the conversation in the store."""
    memory: str
    from_number: int
    to_number: int


ConversationWrite: TypeAlias = (
    AppendMessages
    | ReplaceMessage
    | UpdateConversation
    | SetState
    | RemoveMessages
    | DeleteConversation
    | DeleteState
    | AdvanceFeed
)
ConversationResult: TypeAlias = Appended | Message | ConversationRecord | StateDocument | Removed | int | bool | None
"""int: how many messages a deleted conversation had. bool: whether there was a state document."""


@dataclass(frozen=True, slots=True, eq=False)
class JointWrites:
    """Writes of one transaction, in their order."""

    writes: Sequence[ConversationWrite]
    now_us: int
    finish: Callable[[Sequence[ConversationResult]], Answer | None]
    """Called inside the transaction with the result of each write; what it returns is stored with them. A transaction
    that is repeated calls it again."""
    stored: Mapping[bytes, int] = field(default_factory=dict)
    """What `ConversationStore.store_bodies` has given for them."""


class SessionStore(ConversationStore, Protocol):
    """The contract of ConversationStore holds. Methods raise NotThere."""

    async def get_conversation(self, conversation: ConversationName) -> ConversationRecord: ...

    async def list_conversations(self, query: ConversationQuery) -> list[ConversationRecord]: ...

    async def update_conversation(
        self,
        conversation: ConversationName,
        change: ConversationChange,
        now_us: int,
        answer: AnswerOf[ConversationRecord] = None,
    ) -> ConversationRecord: ...

    async def delete_conversation(
        self, conversation: ConversationName, last_number: int | None = None, answer: AnswerOf[int] = None
    ) -> int:
        """With messages, plans and state. How many messages it had. Raises LastNumberDiffers."""
        ...

    async def fork_conversation(
        self,
        source: ConversationName,
        target: ConversationName,
        number: int | None,
        now_us: int,
        answer: AnswerOf[ConversationRecord] = None,
    ) -> ConversationRecord:
        """Copy all up to message `number`. Raises ConversationExists."""
        ...

    async def get_state(self, name: StateName) -> StateDocument: ...

    async def get_states(self, names: Sequence[StateName], bytes_max: int) -> list[StateDocument | None]:
        """Of one snapshot; None for those that do not exist. As many, from the first, as `bytes_max` holds, but one in
        any case."""
        ...

    async def set_state(
        self, name: StateName, document: bytes, version: int | None, now_us: int, answer: AnswerOf[StateDocument] = None
    ) -> StateDocument:
        """`version`: that of the document to replace, 0 for none; None: any. Raises StateDiffers."""
        ...

    async def list_states(
        self, namespace: str, after: tuple[str, str], limit: int
    ) -> list[tuple[StateName, StateDocument]]:
        """Those of apps and users with (scope, name) above `after`, in that order."""
        ...

    async def delete_state(self, name: StateName, version: int | None = None, answer: AnswerOf[bool] = None) -> bool:
        """Whether there was one. `version`: as for set_state."""
        ...

    async def erase_user(self, namespace: str, user: str) -> tuple[int, bool]:
        """Delete the conversations with the label `user`, and the user's state; how many, and whether there was one.
        Stored answers that name one of them are emptied. In several writes: one that raises has erased some."""
        ...

    async def list_due_feeds(self, after: int, limit: int) -> list[Feed]:
        """Those of conversations with a number above `after`, in that order."""
        ...

    async def write_together(self, joint: JointWrites) -> None:
        """All or none. Raises what the methods of the single writes raise."""
        ...

    async def prune_conversations(self, now_us: int, limit: int) -> int:
        """Delete at most so many that have expired; how many."""
        ...
