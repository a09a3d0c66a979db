"""The context of an agent's turn: its parts, the forms that model APIs take, and the record of the turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any, TypedDict

from memstream.argument_types import Count, Seconds
from memstream.arguments import check_fields, check_methods
from memstream.channel import Link, memory_path
from memstream.codec import batch_result_from_wire, observation_to_wire, scope_to_wire
from memstream.conversation_values import NewMessage
from memstream.conversations import Conversation
from memstream.errors import InvalidRequest
from memstream.filter_codec import filter_to_wire
from memstream.v1 import context_service_pb2 as pb
from memstream.v1.stream_service_pb2 import AckLevel, ObserveBatchRequest
from memstream.values import Filter, Observation, Role, Scope, Vector
from memstream.wiretypes import encoding, members_by_number, optional_timestamp_to_wire, pack_floats


class PartKind(StrEnum):
    """What a part of a context is."""

    BLOCK = "block"
    MESSAGE = "message"
    EVIDENCE = "evidence"
    """Memories."""
    QUESTION = "question"
    SUMMARY = "summary"
    """The block that replaces the messages that are cut."""


class ContextReason(StrEnum):
    """Why something is not in a context, or not any more; see ContextReason of the contract."""

    BUDGET = "budget"
    WEAK = "weak"
    REPEATS = "repeats"
    IN_TAIL = "in_tail"
    SUPERSEDED = "superseded"
    UNAVAILABLE = "unavailable"
    CHANGED = "changed"
    QUESTION_NOT_RECORDED = "question_not_recorded"
    FAILED = "failed"


_KINDS = members_by_number(PartKind, pb.ContextPartKind.DESCRIPTOR)
_REASONS = members_by_number(ContextReason, pb.ContextReason.DESCRIPTOR)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """Bounds of a part, in tokens: the others leave it `minimum`, and it takes `maximum` at most."""

    minimum: Count = 0
    maximum: Count | None = None


class ContextOptions(TypedDict, total=False):
    """Options of a context.

    `summary`: path of a block that replaces the messages of the conversation that are cut.
    `block_tokens`, `tail_tokens`, `evidence_tokens`: bounds of the parts. `tokenizer`: how the server counts tokens
    (default: UTF-8 bytes / 4). `memory_tokens`: most of one memory, of which the sentences that match are shown.
    `limit`: most new memories. `filter`: of all memories in the text. `now`, `time_zone`: the time of the turn.
    `reinforce`, `receipt`, `embedding`: as in RecallOptions. `parts_timeout_s`: what is not read by then is missing,
    and named in `degraded` (default 2). `timeout_s`: of the call.
    """

    summary: str | None
    block_tokens: TokenBounds | None
    tail_tokens: TokenBounds | None
    evidence_tokens: TokenBounds | None
    tokenizer: str | None
    memory_tokens: Count | None
    limit: Count | None
    filter: Filter | None
    now: datetime | None
    time_zone: str | None
    reinforce: bool | None
    receipt: bool | None
    embedding: Vector | None
    parts_timeout_s: Seconds | None
    timeout_s: Seconds | None


@dataclass(frozen=True, slots=True)
class ContextPart:
    """A part of the text. `content` is the text without its label; `fresh`: not in the text of the turn before."""

    kind: PartKind
    text: str
    content: str
    tokens: int
    role: str
    memory: str
    name: str
    fragment_ids: tuple[str, ...]
    number: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Omission:
    """Something that is not in the text, or not any more. `number`: of the first of `count` messages."""

    kind: PartKind
    reason: ContextReason
    memory: str
    name: str
    fragment_ids: tuple[str, ...]
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Citation:
    """A memory in the text, where it is "[number]"."""

    number: int
    memory: str
    fragment_id: str


@dataclass(frozen=True, slots=True)
class Correction:
    """A memory that an earlier turn showed and that `superseded_by` supersedes; the text says so."""

    memory: str
    fragment_id: str
    number: int
    superseded_by: str
    superseded_by_number: int


class ContextText:
    """The context of a turn.

    `parts` in order are `text`. `unchanged_tokens` at its beginning are as in the turn before, or `broken_by` says why
    not. `weak`: nothing is known. `degraded` names what is missing. `receipts` are by memory. `position` is what
    `after` takes.
    """

    def __init__(self, answer: pb.ContextResponse, conversation: str = "") -> None:
        self.parts = tuple(map(_part_from_wire, answer.parts))
        self.tokens = answer.tokens
        self.unchanged_tokens = answer.unchanged_tokens
        self.broken_by = tuple(map(_omission_from_wire, answer.broken_by))
        self.left_out = tuple(map(_omission_from_wire, answer.left_out))
        self.citations = tuple([Citation(one.number, one.memory, one.fragment_id) for one in answer.citations])
        self.corrections = tuple(
            [
                Correction(one.memory, one.fragment_id, one.number, one.superseded_by, one.superseded_by_number)
                for one in answer.corrections
            ]
        )
        self.weak = answer.weak
        self.degraded = answer.degraded
        self.position = answer.position
        self.receipts: Mapping[str, str] = {one.memory: one.receipt_id for one in answer.receipts}
        self._conversation = conversation

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Context of {len(self.parts)} parts, {self.tokens} tokens, {self.unchanged_tokens} unchanged>"

    @property
    def text(self) -> str:
        """All parts, for a model that takes one text."""
        return "".join(part.text for part in self.parts)

    def to_anthropic(self, *, system: str = "") -> dict[str, Any]:
        """Arguments of Anthropic's `messages.create`: `system` (yours, then the blocks) and `messages`.

        Cache markers are set after the blocks, after what the turn before had, and at the end: three of the four that
        the API allows.
        """
        head = [{"type": "text", "text": text} for text in (system, *self._blocks()) if text]
        if head:
            head[-1] |= _CACHED
        messages: list[dict[str, Any]] = []
        last_known: dict[str, Any] | None = None
        for role, text, fresh in self._turns():
            if not messages and role == "assistant":  # the API wants the user first
                messages.append({"role": "user", "content": [{"type": "text", "text": "..."}]})
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            block: dict[str, Any] = {"type": "text", "text": text}
            messages[-1]["content"].append(block)
            last_known = last_known if fresh else block
        if last_known is not None:
            last_known |= _CACHED
        if messages:
            messages[-1]["content"][-1] |= _CACHED
        return ({"system": head} if head else {}) | {"messages": messages}

    def to_openai(self, *, system: str = "") -> dict[str, Any]:
        """Arguments of OpenAI's `responses.create`: `instructions`, `input`, and `prompt_cache_key` if there is a
        conversation. The API caches the longest known beginning without a marker."""
        head = "\n\n".join(filter(None, (system, *self._blocks())))
        items = [{"role": role, "content": text} for role, text, _ in self._turns()]
        return ({"instructions": head} if head else {}) | {"input": items} | self._cache_key()

    def to_openai_chat(self, *, system: str = "") -> dict[str, Any]:
        """The same for `chat.completions.create`: `messages`, and `prompt_cache_key`."""
        head = "\n\n".join(filter(None, (system, *self._blocks())))
        messages = [{"role": "system", "content": head}] if head else []
        messages += [{"role": role, "content": text} for role, text, _ in self._turns()]
        return {"messages": messages} | self._cache_key()

    def _blocks(self) -> list[str]:
        return [part.text.rstrip("\n") for part in self.parts if part.kind is PartKind.BLOCK]

    def _turns(self) -> list[tuple[str, str, bool]]:
        """(role, text, whether it is new). APIs know tool results only with their calls: here these are texts."""
        turns: list[tuple[str, str, bool]] = []
        for part in self.parts:
            if part.kind is PartKind.BLOCK:
                continue
            plain = part.role in ("user", "assistant")
            text = part.content if plain and part.kind is not PartKind.EVIDENCE else part.text.rstrip("\n")
            if text.strip():
                turns.append(("assistant" if part.role == "assistant" else "user", text, part.fresh))
        return turns

    def _cache_key(self) -> dict[str, str]:
        if not self._conversation:
            return {}
        return {"prompt_cache_key": f"memstream-{_digest(self._conversation.encode())}"}


@check_methods
class Context(ContextText):
    """A ContextText that can record its turn."""

    def __init__(self, link: Link, request: pb.ContextRequest, answer: pb.ContextResponse) -> None:
        super().__init__(answer, request.conversation)
        self._link = link
        self._memory = next((scope.memory for scope in request.scopes if scope.memory), "")

    async def record(self, question: str, reply: str, *, memory: str = "") -> None:
        """Stores question and reply in the conversation and in a memory (default: the first that the scopes name).

        A repeat with the same texts stores nothing again. Pass the question alone, without the context's text. Raises
        InvalidRequest if there is neither a conversation nor a memory.
        """
        memory = memory or self._memory
        if not memory and not self._conversation:
            raise InvalidRequest("there is neither a conversation nor a memory to record the turn in")
        turn = _digest(b"\0".join([self.position, question.encode(), reply.encode()]))
        session = self._conversation.partition("/")[2]
        if memory:
            said = [Observation(question, role=Role.USER), Observation(reply, role=Role.ASSISTANT)]
            path = memory_path(memory)
            batch = ObserveBatchRequest(
                namespace=path.namespace,
                memory=path.name,
                session=session,
                observations=map(observation_to_wire, said),
                ack_level=AckLevel.ACK_LEVEL_STORED,
                request_id=f"turn-{turn}",
            )
            stored = await self._link.call(self._link.streams.ObserveBatch, batch, path)
            for rejected in batch_result_from_wire(stored.ack).rejected:
                raise rejected.error
        if self._conversation:
            messages = [
                NewMessage(role="user", content=question, client_id=f"{turn}-question"),
                NewMessage(role="assistant", content=reply, client_id=f"{turn}-reply"),
            ]
            await Conversation(self._link, memory_path(self._conversation, "conversation")).append_messages(messages)


_CACHED: Mapping[str, Any] = {"cache_control": {"type": "ephemeral"}}


def context_to_wire(
    scopes: Iterable[str | Scope],
    question: str,
    conversation: str,
    blocks: Iterable[str],
    budget: int,
    after: ContextText | bytes | None,
    partial: bool,
    options: ContextOptions,
) -> pb.ContextRequest:
    """Converts a request."""
    with encoding("context"):
        wire = pb.ContextRequest(
            scopes=map(scope_to_wire, scopes),
            partial=partial,
            question=question,
            conversation=conversation,
            blocks=blocks,
            summary=options.get("summary") or "",
            budget=budget,
            tokenizer=options.get("tokenizer") or "",
            memory_tokens=options.get("memory_tokens") or 0,
            after=after.position if isinstance(after, ContextText) else after or b"",
            now=optional_timestamp_to_wire("now", options.get("now")),
            time_zone=options.get("time_zone") or "",
            limit=options.get("limit"),
            reinforce=options.get("reinforce"),
            receipt=options.get("receipt") or False,
        )
        if (chosen := options.get("filter")) is not None:
            wire.filter.CopyFrom(filter_to_wire(chosen))
        for name in ("block_tokens", "tail_tokens", "evidence_tokens"):
            bounds: Any = options.get(name)
            if bounds is not None:
                getattr(wire, name).CopyFrom(pb.TokenBounds(minimum=bounds.minimum, maximum=bounds.maximum))
        if (time_s := options.get("parts_timeout_s")) is not None:
            wire.timeout.FromMicroseconds(round(time_s * 1e6))
    if (embedding := options.get("embedding")) is not None:
        wire.MergeFromString(pack_floats(pb.ContextRequest.EMBEDDING_FIELD_NUMBER, embedding))
    return wire


def _digest(content: bytes) -> str:
    """24 hexadecimal digits, the same in every SDK."""
    return sha256(content).hexdigest()[:24]


def _part_from_wire(wire: pb.ContextPart) -> ContextPart:
    content = wire.text.encode()[wire.label_bytes :].decode().removesuffix("\n\n")
    return ContextPart(
        _KINDS[wire.kind],
        wire.text,
        content,
        wire.tokens,
        wire.role,
        wire.memory,
        wire.name,
        tuple(wire.fragment_ids),
        wire.number,
        wire.fresh,
    )


def _omission_from_wire(wire: pb.ContextOmission) -> Omission:
    return Omission(
        _KINDS[wire.kind],
        _REASONS[wire.reason],
        wire.memory,
        wire.name,
        tuple(wire.fragment_ids),
        wire.number,
        wire.count,
    )
