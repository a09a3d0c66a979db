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
    Bounds,
    BudgetTooSmall,
    Built,
    ContextBlock,
    FoundMemory,
    Inputs,
    Omission,
    Omitted,
    PartKind,
    Position,
    Said,
)
from memstream_server.core.filters import EVERYTHING, passes
from memstream_server.core.values import Fragment, TruthStatus
from memstream_server.engine.background.standing_blocks import still_holds
from memstream_server.engine.errors import BlockNotFound, EngineError, FieldViolation, InvalidField, MemoryNotFound
from memstream_server.engine.lifecycle import drop_expired
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.ports.blocks import Block, BlockName
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery
from memstream_server.ports.journal.reading import Moment, MomentQuery

if TYPE_CHECKING:
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
Tokenizers = Mapping[str, Callable[[str], int]]
"""Functions that count the tokens of a text, by name; "" is the default."""
TOKENIZERS: Tokenizers = {"": estimated_tokens, "bytes/4": estimated_tokens}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ContextRequest:
    """A turn, validated; blocks: those that the caller may read."""

    question: str
    budget: int
    count: Callable[[str], int] = estimated_tokens
    """Tokens of a text."""
    memory_tokens: int = 0
    """Most of one memory; 0: by the budget."""
    conversation: ConversationName | None = None
    blocks: Sequence[BlockName] = ()
    summary: BlockName | None = None
    """Replaces the messages that are cut."""
    block_bounds: Bounds = NO_BOUNDS
    tail_bounds: Bounds = NO_BOUNDS
    evidence_bounds: Bounds = NO_BOUNDS
    after: Position | None = None
    now_us: int | None = None
    zone: tzinfo = UTC
    partial: bool = False

    @property
    def all_blocks(self) -> list[BlockName]:
        """The summary, too."""
        return [*self.blocks] if self.summary is None else [*self.blocks, self.summary]


@dataclass(frozen=True, slots=True, eq=False)
class ContextAnswer:
    """The context of a turn. receipts: (memory, id)."""

    built: Built
    degraded: str
    weak: bool
    receipts: Sequence[tuple[str, str]]


class Contexts:
    """Builds contexts."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def build(self, request: ContextRequest, scoped: ScopedQuery | None, time_s: float) -> ContextAnswer:
        """The context, its parts read within `time_s`. Raises InvalidField, and what finding the memories raises."""
        asked = [] if scoped is None else await scoped.find_memories()
        shown, reading = self._find_shown(request.after, asked), _Reading(time_s)
        answer = moment = started = None
        if (rest := _name_rest(request, shown)) or asked:
            query = _make_query(request, asked, shown.absent)
            started = asyncio.create_task(self._engine.fragments.read_moment(query))
        try:
            if scoped is not None and asked:
                answer = await reading.wait("memories", scoped.recall(asked, time_s))
            if started is not None:
                moment = await reading.wait(rest or "snapshot", started)
        finally:
            if started is not None and not started.cancel() and not started.cancelled():
                started.exception()  # marks it as retrieved
        read = _Read(answer, shown, moment)
        if moment is not None and not read.is_of_one_moment(asked):
            query = _make_query(request, asked, _list_wanted(request.after, asked, read))
            again = await reading.wait("snapshot", self._engine.fragments.read_moment(query))
            read = replace(read, moment=again or moment, is_read_again=again is not None)
        if (version := _find_last_summary(request, read.moment)) and (name := request.summary) is not None:
            read = replace(read, last_summary=await reading.wait(str(name), self._read_summary(name, version)))
        return await self._lay_out(request, asked, read, reading.problems)

    async def _lay_out(
        self, request: ContextRequest, asked: Sequence[Asked], read: _Read, problems: Sequence[str]
    ) -> ContextAnswer:
        answer, known = read.answer, self._list_known(asked, read)
        found: list[FoundMemory] = []
        left_out: list[Omission] = []
        if answer is not None:
            found, left_out = self._sort_out(answer, asked[0].path, known if read.is_read_again else None)
        unknown = answer is not None and not found
        if read.moment is not None and not request.partial:
            for name in request.all_blocks:
                if name not in read.moment.blocks:
                    raise BlockNotFound(f"there is no block {name}", block=name.name)
        inputs = Inputs(
            question=request.question,
            now_us=self._clock.now_us() if request.now_us is None else request.now_us,
            zone=request.zone,
            budget=request.budget,
            count=request.count,
            block_bounds=request.block_bounds,
            tail_bounds=request.tail_bounds,
            evidence_bounds=request.evidence_bounds,
            memory_tokens=request.memory_tokens,
            found=found,
            left_out=left_out,
            unknown=unknown,
            known=known,
            after=request.after,
        )
        work = partial(_build_with_rest, inputs, request, read)
        try:
            built = await run_in_thread(work) if _is_heavy(request, read) else work()
        except BudgetTooSmall as error:
            raise InvalidField(f"budget: {error}", violations=(FieldViolation("budget", str(error)),)) from None
        degraded = [*problems, *([answer.degraded] if answer is not None and answer.degraded else [])]
        receipts = [] if answer is None else _list_receipts(answer, asked)
        return ContextAnswer(built, "; ".join(degraded), unknown, receipts)

    # ---- what earlier turns showed
    async def _read_summary(self, name: BlockName, version: int) -> Block | None:
        """An earlier version of the summary; None if it is not kept, or what it was made of is not as it was."""
        try:
            block = await self._engine.blocks.get(name, version)
            standing = block.content.standing
            if standing is None:
                return block
            there = await self._engine.fragments.read_many(name.of.namespace, name.of.memory, standing.sources)
        except (BlockNotFound, MemoryNotFound):
            return None
        return block if still_holds(block.content, there, self._clock.now_us()) else None

    def _find_shown(self, after: Position | None, asked: Sequence[Asked]) -> _Shown:
        """In RAM, as far as the memories are active here; the rest is absent."""
        shown = _Shown()
        if after is None:
            return shown
        for each in asked:
            if ids := _list_shown(after, each.path):
                uid = each.record.uid
                found = self._engine.fragments.find_cached(uid, ids, _CHAIN_MAX)
                shown.fragments[uid], shown.absent[uid], shown.revisions[uid] = found
        return shown

    def _list_known(self, asked: Sequence[Asked], read: _Read) -> Mapping[tuple[str, str], Fragment]:
        """By memory and id, of what was read by id: what the caller may read by rights, filter and validity."""
        now_us = self._clock.now_us()
        known: dict[tuple[str, str], Fragment] = {}
        for each in asked:
            chosen, path = each.scope.query.filter, each.path
            for one in drop_expired(read.list_fragments(each).values(), each.record, now_us):
                may_show = one.forget_time_us is None and one.is_valid_at(now_us)
                if may_show and (chosen == EVERYTHING or passes(one, chosen)):
                    known[path, one.id] = one
        return known

    def _sort_out(
        self, answer: RecallAnswer, alone: str, again: Mapping[tuple[str, str], Fragment] | None
    ) -> tuple[list[FoundMemory], list[Omission]]:
        """What the recall found, best first, and what of it is left out. again: what of it the caller may read in the
        snapshot, if it was read again."""
        now_us = self._clock.now_us()
        weak = {one.memory for one in answer.memories if one.answer.weak}
        if not answer.memories and answer.weak:
            weak.add(alone)
        found: list[FoundMemory] = []
        left_out: list[Omission] = []
        for one in answer.recollections:
            memory = one.memory or alone
            for each in _with_companion(one):
                fragment: Fragment | None = each.fragment
                status: TruthStatus | None = each.status
                if again is not None:
                    fragment = again.get((memory, each.fragment.id))
                    status = None if fragment is None else fragment.status_at(now_us)
                reason = Omitted.WEAK if memory in weak else _why_not(status)
                if reason is None and fragment is not None:
                    found.append(FoundMemory(memory, fragment, is_reply=each is not one))
                else:
                    reason = reason or Omitted.UNAVAILABLE
                    left_out.append(Omission(PartKind.EVIDENCE, reason, memory, ids=(each.fragment.id,)))
        return found, left_out


def _build_with_rest(inputs: Inputs, request: ContextRequest, read: _Read) -> Built:
    """The context with blocks and conversation; may run in a thread. Raises BudgetTooSmall."""
    moment, summary = read.moment, request.summary
    blocks = {} if moment is None else moment.blocks
    reason = Omitted.FAILED if moment is None else Omitted.UNAVAILABLE
    missing = [
        Omission(PartKind.SUMMARY if one == summary else PartKind.BLOCK, reason, str(one.of), one.name)
        for one in request.all_blocks
        if one not in blocks
    ]
    messages, before = _read_messages(() if moment is None else moment.messages, request)
    whole = replace(
        inputs,
        conversation="" if request.conversation is None else str(request.conversation),
        blocks=[_show_block(one, blocks[one]) for one in request.blocks if one in blocks],
        summary=_show_block(summary, blocks[summary]) if summary and summary in blocks else None,
        last_summary=_show_block(summary, read.last_summary) if summary and read.last_summary else None,
        messages=messages,
        before=before,
        left_out=[*missing, *inputs.left_out],
        tail_failed=request.conversation is not None and moment is None,
    )
    return build_context(whole)


def _show_block(name: BlockName, block: Block) -> ContextBlock:
    content = block.content
    return ContextBlock(str(name.of), name.name, content.text, content.max_tokens, block.version)


def _find_last_summary(request: ContextRequest, moment: Moment | None) -> int:
    """The version of the summary that the last text has, if it is not the present one; else 0."""
    after, name = request.after, request.summary
    if after is None or moment is None or name is None or name not in moment.blocks:
        return 0
    there = any(one.kind is PartKind.SUMMARY and one.key == f"summary {name}" for one in after.seen)
    return after.summary if there and after.summary != moment.blocks[name].version else 0


def _name_rest(request: ContextRequest, shown: _Shown) -> str:
    is_named, is_absent = request.conversation is not None, any(shown.absent.values())
    named = {"conversation": is_named, "blocks": bool(request.all_blocks), "shown memories": is_absent}
    return ", ".join(name for name, wanted in named.items() if wanted)


def _list_shown(after: Position, path: str) -> list[str]:
    return sorted({entry.id for turn in after.turns for entry in turn.entries if after.memories[entry.memory] == path})


def _list_wanted(after: Position | None, asked: Sequence[Asked], read: _Read) -> Mapping[str, Sequence[str]]:
    """The ids of all that the text may show, by uid."""
    wanted: dict[str, Sequence[str]] = {}
    for each in asked:
        ids = {one.id for one in read.list_read(each, alone=len(asked) == 1)}
        wanted[each.record.uid] = sorted(ids if after is None else ids.union(_list_shown(after, each.path)))
    return wanted


def _make_query(request: ContextRequest, asked: Sequence[Asked], fragments: Mapping[str, Sequence[str]]) -> MomentQuery:
    """What the database is asked. fragments: ids by uid."""
    start = 0 if request.after is None else request.after.tail_start
    return MomentQuery(
        memories=[each.record.uid for each in asked],
        blocks=request.all_blocks,
        conversation=request.conversation,
        messages=MessageQuery(
            after=max(0, start - 1),
            limit=_limit_messages(request),
            newest_first=True,
            bodies_max=min(_BODIES_MAX, max(_ON_LOOP, request.budget * 8)),
        ),
        fragments=fragments,
        next_of=lambda one: one.superseded_by,
        steps=_CHAIN_MAX,
    )


def _limit_messages(request: ContextRequest) -> int:
    return max(1, min(MESSAGES_MAX, request.budget // 2))


def _is_heavy(request: ContextRequest, read: _Read) -> bool:
    bodies = sum(len(row.body or b"") for row in read.moment.messages) if read.moment is not None else 0
    return request.budget > _ON_LOOP or bodies > _ON_LOOP or request.count is not estimated_tokens


def _read_messages(rows: Sequence[Message], request: ContextRequest) -> tuple[Sequence[Said], int]:
    """(messages, the last number before them that is too much to read; 0: none). rows: the newest first."""
    start = 0 if request.after is None else request.after.tail_start
    whole = list(takewhile(lambda row: row.is_whole, rows))
    more = len(whole) < len(rows) or len(rows) == _limit_messages(request)
    oldest = whole[-1].number if whole else rows[0].number + 1 if rows else 0
    return [read_said(row) for row in whole[::-1]], oldest - 1 if more and oldest - 1 >= max(start, 1) else 0


@dataclass(slots=True, eq=False)
class _Shown:
    """What earlier turns showed, and what supersedes it, by uid."""

    fragments: dict[str, Mapping[str, Fragment]] = field(default_factory=dict)
    """In RAM,"""
    revisions: dict[str, int] = field(default_factory=dict)
    """at these revisions of the memories."""
    absent: dict[str, Sequence[str]] = field(default_factory=dict)
    """Ids of the others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What was read; None: it failed."""

    answer: RecallAnswer | None
    shown: _Shown
    moment: Moment | None
    is_read_again: bool = False
    """The moment has all fragments."""
    last_summary: Block | None = None
    """The version that the last text has, if it is an earlier one and may be shown."""

    def list_fragments(self, asked: Asked) -> Mapping[str, Fragment]:
        """Those of a memory that were read by id."""
        uid = asked.record.uid
        read = {} if self.moment is None else self.moment.fragments.get(uid, {})
        return read if self.is_read_again else {**self.shown.fragments.get(uid, {}), **read}

    def is_of_one_moment(self, asked: Sequence[Asked]) -> bool:
        """Whether recall and RAM read the revisions of the snapshot, and nothing newer."""
        assert self.moment is not None
        return all(
            self._list_revisions(each, len(asked) == 1) == {self.moment.revisions.get(each.record.uid)}
            for each in asked
        )

    def _list_revisions(self, asked: Asked, alone: bool) -> set[int | None]:
        """Those of the moment and of the reads before; None: unknown."""
        moment, answer, uid = self.moment, self.answer, asked.record.uid
        assert moment is not None
        found: set[int | None] = {moment.revisions.get(uid)}
        if answer is not None and alone and not answer.memories:
            found.add(answer.revision)
        elif answer is not None:
            found |= {
                one.answer.revision for one in answer.memories if one.memory == asked.path and one.answer.revision
            }
        if self.shown.fragments.get(uid):
            found.add(self.shown.revisions[uid])
        newest = max([one.version for one in self.list_read(asked, alone)], default=0)
        return found | ({newest} if newest > (moment.revisions.get(uid) or 0) else set())

    def list_read(self, asked: Asked, alone: bool) -> list[Fragment]:
        """What the recall found in a memory, and what was read by id."""
        found = () if self.answer is None else self.answer.recollections
        recalled = [
            each.fragment for one in found if alone or one.memory == asked.path for each in _with_companion(one)
        ]
        return [*recalled, *self.list_fragments(asked).values()]


class _Reading:
    """Reads within a time."""

    def __init__(self, time_s: float) -> None:
        self.problems: list[str] = []
        self._time_s = time_s
        self._until_s = asyncio.get_running_loop().time() + time_s

    async def wait(self, name: str, read: Awaitable[T]) -> T | None:
        """The result; None if it failed or is late. Raises InvalidField, BlockNotFound."""
        try:
            async with asyncio.timeout_at(self._until_s) as limit:
                return await read
        except TimeoutError:
            if not limit.expired():
                raise
            self.problems.append(f"{name}: not read within {self._time_s:g} s")
        except EngineError as error:
            if isinstance(error, (InvalidField, BlockNotFound)):
                raise
            self.problems.append(f"{name}: {error.message}")
        return None


def _with_companion(one: Recollection) -> Sequence[Recollection]:
    return (one,) if one.companion is None else (one, one.companion)


def _why_not(status: TruthStatus | None) -> Omitted | None:
    if status is TruthStatus.CURRENT:
        return None
    return Omitted.SUPERSEDED if status is TruthStatus.SUPERSEDED else Omitted.UNAVAILABLE


def _list_receipts(answer: RecallAnswer, asked: Sequence[Asked]) -> list[tuple[str, str]]:
    several = [(one.memory, one.answer.receipt_id) for one in answer.memories if one.answer.receipt_id]
    return several or ([(asked[0].path, answer.receipt_id)] if answer.receipt_id else [])


# ---- messages of frameworks
_ROLES = {"human": "user", "ai": "assistant", "function": "tool", "view": "assistant"}


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
