"""What a context is built from, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from enum import IntEnum
from typing import Annotated

from msgspec import Meta, Struct

from memstream_server.core.values import Fragment

FORMAT = 1
"""Of Position."""
NUMBER_MAX = 2**32
Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
Name = Annotated[str, Meta(pattern="^[!-~]{1,300}$")]


class PartKind(IntEnum):
    """What a part is; the contract's numbers."""

    BLOCK = 1
    MESSAGE = 2
    EVIDENCE = 3
    QUESTION = 4
    SUMMARY = 5


class Omitted(IntEnum):
    """Why something is not in the text; the contract's numbers."""

    BUDGET = 1
    WEAK = 2
    REPEATS = 3
    IN_TAIL = 4
    SUPERSEDED = 5
    UNAVAILABLE = 6
    CHANGED = 7
    QUESTION_NOT_RECORDED = 8
    FAILED = 9


class BudgetTooSmall(ValueError):
    """The question and the minima of the parts need more than the budget. The text says how much."""


class Omission(Struct, frozen=True, gc=False):
    """Something that is not in the text, or not any more."""

    kind: PartKind
    reason: Omitted
    memory: str = ""
    name: str = ""
    ids: tuple[str, ...] = ()
    number: int = 0
    count: int = 1


class ContextPart(Struct, frozen=True, gc=False):
    """A part of the text."""

    kind: PartKind
    text: str
    tokens: int
    key: str
    """Names it among the parts."""
    memory: str = ""
    name: str = ""
    ids: tuple[str, ...] = ()
    number: int = 0
    role: str = ""
    label_bytes: int = 0
    fresh: bool = False


class Entry(Struct, frozen=True, gc=False, array_like=True):
    """A memory that a turn showed."""

    number: Number
    memory: Number
    """Its place in Position.memories."""
    id: Name
    corrects: Number = 0
    """Number of the entry that it supersedes."""
    again: bool = False
    """Only its number is shown: an earlier turn has its text."""
    excerpt: tuple[Annotated[int, Meta(ge=0, le=NUMBER_MAX)], ...] = ()
    """Where its shown sentences begin and end, in turn, in characters of the content; empty: its beginning."""


class Turn(Struct, frozen=True, gc=False, array_like=True):
    """The memories of a turn, before the message `anchor`; 0 without a conversation."""

    anchor: Number
    day: Annotated[str, Meta(max_length=20)]
    entries: tuple[Entry, ...]
    unknown: bool = False


class Seen(Struct, frozen=True, gc=False, array_like=True):
    """A part of the last text."""

    kind: PartKind
    key: str
    digest: bytes


class Position(Struct, frozen=True, gc=False, array_like=True):
    """What the next turn must know of this one."""

    format: int
    conversation: str
    tail_start: Number
    next_number: Number
    memories: tuple[Name, ...] = ()
    turns: tuple[Turn, ...] = ()
    seen: tuple[Seen, ...] = ()
    is_cut: bool = False
    """Messages before tail_start are cut,"""
    summary: Number = 0
    """and this version of a block replaces them; 0: none."""


class ContextBlock(Struct, frozen=True, gc=False):
    """A block that was read."""

    memory: str
    name: str
    text: str
    max_tokens: int = 0
    """Of its text; 0: no bound."""
    version: int = 0


class Said(Struct, frozen=True, gc=False):
    """A message of the conversation."""

    number: int
    role: str
    text: str
    name: str = ""
    is_result: bool = False
    """Of a tool."""
    calls: tuple[str, ...] = ()
    """Ids of the tool calls in it,"""
    answers: tuple[str, ...] = ()
    """and of those that it answers."""


class FoundMemory(Struct, frozen=True, gc=False, eq=False):
    """A memory that the recall found."""

    memory: str
    fragment: Fragment
    is_reply: bool = False
    """Found because of the message that it answers."""


class Bounds(Struct, frozen=True, gc=False):
    """Of a part, in tokens."""

    minimum: int = 0
    maximum: int | None = None

    def limit(self, room: int) -> int:
        """At most so many of `room`."""
        return max(0, room if self.maximum is None else min(room, self.maximum))


NO_BOUNDS = Bounds()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Inputs:
    """All that the text depends on."""

    question: str
    now_us: int
    zone: tzinfo = UTC
    conversation: str = ""
    budget: int
    count: Callable[[str], int]
    """Tokens of a text."""
    block_bounds: Bounds = NO_BOUNDS
    tail_bounds: Bounds = NO_BOUNDS
    evidence_bounds: Bounds = NO_BOUNDS
    memory_tokens: int = 0
    """Most tokens of one memory; 0: see Texts."""
    blocks: Sequence[ContextBlock] = ()
    summary: ContextBlock | None = None
    """Replaces the messages that are cut,"""
    last_summary: ContextBlock | None = None
    """unless this earlier version of it, which the last text has, still may."""
    messages: Sequence[Said] = ()
    """From Position.tail_start on, ascending; older ones may be missing."""
    before: int = 0
    """The last number before `messages` that belongs to the tail and was too much to read; 0: none."""
    found: Sequence[FoundMemory] = ()
    """Best first."""
    left_out: Sequence[Omission] = ()
    """Of what the recall found."""
    unknown: bool = False
    """Every memory's answer is weak."""
    known: Mapping[tuple[str, str], Fragment] = field(default_factory=dict)
    """By memory and id: those of the position that the caller may still read, and what supersedes them."""
    after: Position | None = None
    tail_failed: bool = False
    """The conversation could not be read: its place is kept for the next turn."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """The context of a turn."""

    parts: tuple[ContextPart, ...]
    tokens: int
    unchanged_tokens: int
    broken_by: tuple[Omission, ...]
    left_out: tuple[Omission, ...]
    citations: tuple[tuple[int, str, str], ...]
    """(number, memory, id)."""
    corrections: tuple[tuple[str, str, int, str, int], ...]
    """(memory, id that was shown, its number, id of the later one, its number)."""
    position: Position
