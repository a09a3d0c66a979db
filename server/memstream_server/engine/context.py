"""The context of an agent's turn: reads its parts at once, within a time of its own, and lays them out (core/context/).

Rule 1. What fails, or is not there in time, is missing from the answer and named in `degraded`; the turn does not fail.
Rule 2. What earlier turns showed is read again, by the caller's present rights and filters: a position grants nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, tzinfo
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.layout import build_context
from memstream_server.core.context.values import (
    NO_BOUNDS,
    Block,
    Bounds,
    BudgetTooSmall,
    Built,
    Found,
    Inputs,
    Omission,
    Omitted,
    PartKind,
    Position,
    Said,
)
from memstream_server.core.filters import passes
from memstream_server.core.values import Fragment, TruthStatus
from memstream_server.engine.errors import (
    BlockNotFound,
    ConversationNotFound,
    EngineError,
    FieldViolation,
    InvalidField,
)
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.ports.blocks import BlockName
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery

if TYPE_CHECKING:
    from memstream_server.engine.conversations import Conversations
    from memstream_server.engine.engine import Engine
    from memstream_server.engine.recall.scopes import Asked, ScopedQuery
    from memstream_server.engine.requests import RecallAnswer, Recollection
    from memstream_server.engine.runtime.clock import Clock

T = TypeVar("T")
MESSAGES_MAX = 1_000
"""Messages of a tail."""
_BODIES_MAX = 4 << 20
_CHAIN_MAX = 8
"""Supersessions that are followed from a fragment that was shown."""
_ON_LOOP = 65_536
"""Bytes of bodies and tokens of a budget that the event loop works on; more go to a thread."""
TOKENIZERS: Mapping[str, Callable[[str], int]] = {"": estimated_tokens, "bytes/4": estimated_tokens}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContextRequest:
    """A turn, validated; blocks: those that the caller may read."""

    question: str
    budget: int
    tokenizer: str = ""
    conversation: ConversationName | None = None
    blocks: Sequence[BlockName] = ()
    block_bounds: Bounds = NO_BOUNDS
    tail_bounds: Bounds = NO_BOUNDS
    evidence_bounds: Bounds = NO_BOUNDS
    after: Position | None = None
    now_us: int | None = None
    zone: tzinfo = UTC
    partial: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ContextAnswer:
    """The context of a turn. receipts: (memory, id)."""

    built: Built
    degraded: str
    weak: bool
    receipts: Sequence[tuple[str, str]]


class Contexts:
    """Builds contexts."""

    def __init__(self, engine: Engine, clock: Clock, conversations: Conversations | None) -> None:
        self._engine = engine
        self._clock = clock
        self._conversations = conversations

    async def build(self, request: ContextRequest, scoped: ScopedQuery | None, time_s: float) -> ContextAnswer:
        """The context, its parts read within `time_s`. Raises InvalidField, and what finding the memories raises."""
        asked = [] if scoped is None else await scoped.find_memories()
        reading = _Reading(time_s)
        if scoped is not None and asked:
            reading.start("memories", scoped.recall(asked, time_s))
        if request.after is not None:
            reading.start("shown memories", self._read_shown(request.after, asked))
        if request.conversation is not None:
            reading.start("conversation", self._read_messages(request.conversation, request))
        if request.blocks:
            reading.start("blocks", self._read_blocks(request))
        got = await reading.finish()
        answer: RecallAnswer | None = got.get("memories")
        found, left_out = ([], []) if answer is None else _sort_out(answer, asked)
        inputs = self._make_inputs(request, got, found, left_out)
        unknown = answer is not None and not found
        inputs = replace(inputs, unknown=unknown)
        try:
            work = partial(build_context, inputs)
            built = await run_in_thread(work) if request.budget > _ON_LOOP else work()
        except BudgetTooSmall as error:
            raise InvalidField(f"budget: {error}", violations=(FieldViolation("budget", str(error)),)) from None
        degraded = [*reading.problems, *([answer.degraded] if answer is not None and answer.degraded else [])]
        receipts = [] if answer is None else _list_receipts(answer, asked)
        return ContextAnswer(built, "; ".join(degraded), unknown, receipts)

    def _make_inputs(
        self, request: ContextRequest, got: Mapping[str, Any], found: Sequence[Found], left_out: Sequence[Omission]
    ) -> Inputs:
        blocks = got.get("blocks", {})
        reason = Omitted.UNAVAILABLE if "blocks" in got else Omitted.FAILED
        missing = [
            Omission(PartKind.BLOCK, reason, str(name.of), name.name) for name in request.blocks if name not in blocks
        ]
        messages, before = got.get("conversation", ((), 0))
        return Inputs(
            question=request.question,
            now_us=self._clock.now_us() if request.now_us is None else request.now_us,
            zone=request.zone,
            conversation="" if request.conversation is None else str(request.conversation),
            budget=request.budget,
            count=TOKENIZERS[request.tokenizer],
            block_bounds=request.block_bounds,
            tail_bounds=request.tail_bounds,
            evidence_bounds=request.evidence_bounds,
            blocks=[blocks[name] for name in request.blocks if name in blocks],
            messages=messages,
            before=before,
            found=found,
            left_out=[*missing, *left_out],
            known=got.get("shown memories", {}),
            after=request.after,
            tail_failed=request.conversation is not None and "conversation" not in got,
        )

    async def _read_blocks(self, request: ContextRequest) -> Mapping[BlockName, Block]:
        """Raises BlockNotFound unless the request is partial."""
        read = await self._engine.blocks.read_many(request.blocks)
        for name in request.blocks:
            if name not in read and not request.partial:
                raise BlockNotFound(f"there is no block {name}", block=name.name)
        return {
            name: Block(str(name.of), name.name, one.content.text, one.content.max_tokens) for name, one in read.items()
        }

    # ---- the conversation
    async def _read_messages(
        self, conversation: ConversationName, request: ContextRequest
    ) -> tuple[Sequence[Said], int]:
        """(messages, the last number before them that is too much to read; 0: none)."""
        assert self._conversations is not None
        start = 0 if request.after is None else request.after.tail_start
        limit = max(1, min(MESSAGES_MAX, request.budget // 2))
        query = MessageQuery(
            after=max(0, start - 1),
            limit=limit,
            newest_first=True,
            bodies_max=min(_BODIES_MAX, max(_ON_LOOP, request.budget * 8)),
        )
        try:
            rows = await self._conversations.list_messages(conversation, query)
        except ConversationNotFound:
            return (), 0
        whole = list(takewhile(lambda row: row.is_whole, rows))
        read = partial(_read_all, whole[::-1])
        heavy = sum(len(row.body or b"") for row in whole) > _ON_LOOP
        messages = await run_in_thread(read) if heavy else read()
        more = len(whole) < len(rows) or len(rows) == limit
        oldest = whole[-1].number if whole else rows[0].number + 1 if rows else 0
        return messages, oldest - 1 if more and oldest - 1 >= max(start, 1) else 0

    # ---- what earlier turns showed
    async def _read_shown(self, after: Position, asked: Sequence[Asked]) -> Mapping[tuple[str, str], Fragment]:
        """By memory and id: those that the caller may read by rights, filter and validity, and what supersedes them."""
        memories = {each.path: each for each in asked}
        wanted: dict[str, set[str]] = {}
        for turn in after.turns:
            for entry in turn.entries:
                wanted.setdefault(after.memories[entry.memory], set()).add(entry.id)
        known: dict[tuple[str, str], Fragment] = {}
        now_us = self._clock.now_us()
        for path, ids in wanted.items():
            if (each := memories.get(path)) is None:
                continue
            left = ids
            for _ in range(_CHAIN_MAX + 1):
                read = await self._engine.fragments.read_shown(each.namespace, each.name, sorted(left))
                there = {(path, one.id): one for one in read if _may_show(one, each, now_us)}
                known |= there
                left = {one.superseded_by for one in there.values() if one.superseded_by}
                left -= {id for memory, id in known if memory == path}
                if not left:
                    break
        return known


@dataclass(slots=True, eq=False)
class _Reading:
    """Reads that run at once within a time."""

    time_s: float
    problems: list[str] = field(default_factory=list)
    _tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)

    def start(self, name: str, reading: Awaitable[T]) -> None:
        self._tasks[name] = asyncio.ensure_future(reading)

    async def finish(self) -> dict[str, Any]:
        """The results by name, without those that failed. Raises InvalidField, BlockNotFound."""
        try:
            if self._tasks:
                await asyncio.wait(self._tasks.values(), timeout=self.time_s)
            return {name: task.result() for name, task in self._tasks.items() if self._has_result(name, task)}
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _has_result(self, name: str, task: asyncio.Task[Any]) -> bool:
        if not task.done():
            self.problems.append(f"{name}: not read within {self.time_s:g} s")
            return False
        error = task.exception()
        if error is None:
            return True
        if not isinstance(error, EngineError) or isinstance(error, (InvalidField, BlockNotFound)):
            raise error
        self.problems.append(f"{name}: {error.message}")
        return False


def _may_show(fragment: Fragment, asked: Asked, now_us: int) -> bool:
    if fragment.forget_time_us is not None or not passes(fragment, asked.scope.query.filter):
        return False
    return fragment.status_at(now_us) in (TruthStatus.CURRENT, TruthStatus.SUPERSEDED)


def _sort_out(answer: RecallAnswer, asked: Sequence[Asked]) -> tuple[list[Found], list[Omission]]:
    """What the recall found, best first, and what of it is left out."""
    alone = asked[0].path
    weak = {one.memory for one in answer.memories if one.answer.weak}
    if not answer.memories and answer.weak:
        weak.add(alone)
    found: list[Found] = []
    left_out: list[Omission] = []
    for one in answer.recollections:
        memory = one.memory or alone
        for each in _with_companion(one):
            reason = _why_not(each, memory in weak)
            if reason is None:
                found.append(Found(memory, each.fragment))
            else:
                left_out.append(Omission(PartKind.EVIDENCE, reason, memory, ids=(each.fragment.id,)))
    return found, left_out


def _with_companion(one: Recollection) -> Sequence[Recollection]:
    return (one,) if one.companion is None else (one, one.companion)


def _why_not(one: Recollection, weak: bool) -> Omitted | None:
    if weak:
        return Omitted.WEAK
    if one.status is TruthStatus.CURRENT:
        return None
    return Omitted.SUPERSEDED if one.status is TruthStatus.SUPERSEDED else Omitted.UNAVAILABLE


def _list_receipts(answer: RecallAnswer, asked: Sequence[Asked]) -> list[tuple[str, str]]:
    several = [(one.memory, one.answer.receipt_id) for one in answer.memories if one.answer.receipt_id]
    return several or ([(asked[0].path, answer.receipt_id)] if answer.receipt_id else [])


# ---- messages of frameworks
_ROLES = {"human": "user", "ai": "assistant", "function": "tool", "view": "assistant"}
_RESULTS = ("tool_result", "function_call_output", "tool")


def _read_all(rows: Sequence[Message]) -> list[Said]:
    return [read_said(row) for row in rows]


def read_said(message: Message) -> Said:
    """A message as a context shows it: its text, or the text of its body, whose form is that of the common APIs."""
    body = None if message.body is None else _load_body(message.body)
    fields = body if isinstance(body, dict) else {}
    role = message.role or _text_of(fields.get("role")) or message.sender or "user"
    parts = fields.get("content")
    kinds = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    answers = [message.tool_call_id, fields.get("tool_call_id"), *(part.get("tool_use_id") for part in kinds)]
    calls = [part.get("id") for part in kinds if part.get("type") == "tool_use"]
    if isinstance(fields.get("tool_calls"), list):
        calls += [call.get("id") for call in fields["tool_calls"] if isinstance(call, dict)]
    call_id = fields.get("call_id")
    is_output = str(fields.get("type", "")).endswith("_output")
    (answers if is_output else calls).append(call_id)
    role = _ROLES.get(role, role)
    is_result = is_output or role == "tool" or bool([one for one in answers if one])
    return Said(
        message.number,
        "tool" if is_result and role == "user" else role,
        message.content or _show_body(body, fields),
        message.name,
        is_result,
        tuple([str(one) for one in calls if one]),
        tuple([str(one) for one in answers if one]),
    )


def _load_body(body: bytes) -> Any:
    """The value of a body; its text where Python cannot load it: too deep, or a number of thousands of digits."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode()


def _text_of(value: object) -> str:
    """A text that UTF-8 can encode: JSON may escape half of a character."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _show_body(body: Any, fields: Mapping[str, Any]) -> str:
    """The text of a body; JSON where it has a tool call or anything else that is no text."""
    if body is None:
        return ""
    if isinstance(body, str):
        return _text_of(body)
    content = fields.get("content", fields.get("text"))
    calls = fields.get("tool_calls")
    shown: list[str] = []
    if isinstance(content, str):
        shown.append(_text_of(content))
    elif isinstance(content, list):
        shown += [_text_of(part.get("text")) if _is_text(part) else _compact(part) for part in content]
    elif content is not None or not calls:
        shown.append(_compact(body))
    if calls:
        shown.append(_compact(calls))
    return "\n".join(filter(None, shown))


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _compact(value: object) -> str:
    return _text_of(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
