"""ContextService: what an agent sends to its model before a turn. A Recall stream asks for the same (rpc/recall.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import context_service_pb2 as pb
from memstream.v1 import stream_service_pb2
from memstream_server.core.budget import estimated_tokens
from memstream_server.core.context.position import pack_position, unpack_position
from memstream_server.core.context.values import NO_BOUNDS, Bounds, ContextPart, Omission, Position
from memstream_server.engine.context import TOKENIZERS, ContextAnswer, ContextRequest, Contexts, Tokenizers
from memstream_server.engine.errors import MemoryNotFound
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.ports.blocks import BlockName, MemoryName
from memstream_server.ports.conversations import ConversationName
from memstream_server.rpc import validation as check
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.calls import wait_limit_s
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.scopes import ScopedCall, ScopeDenied
from memstream_server.rpc.validation import Violations
from memstream_server.rpc.wire import observations, scalars

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.rpc.forwarding import Forwarding

_Context = grpc.aio.ServicerContext[Any, Any]
BLOCKS_MAX = 32
BUDGET_MAX = 10_000_000
_BUDGET_DEFAULT = 4_000
_TIMEOUT_DEFAULT_S = 2.0


class ContextService:
    """The servicer. The budget bounds the response."""

    def __init__(
        self,
        engine: Engine,
        contexts: Contexts,
        limits: RequestLimits,
        forwarding: Forwarding | None,
        tokenizers: Tokenizers = TOKENIZERS,
    ) -> None:
        self._tokenizers = tokenizers
        self._engine = engine
        self._contexts = contexts
        self._limits = limits
        self._forwarding = forwarding

    async def context(self, request: pb.ContextRequest, context: _Context) -> pb.ContextResponse:
        read = await self._check_rights(self._read_request(request))
        scoped = None
        if request.scopes:
            session = "" if read.conversation is None else read.conversation.name
            query = _make_query(request)
            scoped = ScopedCall(self._engine, self._forwarding, self._limits, query, session, context, prefix="")
        time_s = request.timeout.ToMicroseconds() / 1e6 if request.HasField("timeout") else _TIMEOUT_DEFAULT_S
        if (remaining_s := context.time_remaining()) is not None:
            time_s = min(time_s, wait_limit_s(remaining_s))
        return _write_answer(await self._contexts.build(read, scoped, time_s))

    def _read_request(self, request: pb.ContextRequest) -> ContextRequest:
        found, limits = Violations(), self._limits
        observations.content_checked(found, "question", request.question, limits)
        check.check_bounds(found, "budget", request.budget, 0, BUDGET_MAX)
        check.check_bounds(found, "memory_tokens", request.memory_tokens, 0, BUDGET_MAX)
        if request.tokenizer not in self._tokenizers:
            known = ", ".join(repr(name) for name in self._tokenizers if name)
            found.add("tokenizer", f"is {check.quote_text(request.tokenizer)}: this server has {known}")
        if request.HasField("timeout") and scalars.duration_us(found, "timeout", request.timeout) <= 0:
            found.add("timeout", "must be more than 0")
        conversation = None
        if request.conversation:
            conversation = ConversationName(*_read_path(found, "conversation", request.conversation, limits))
        blocks = self._read_blocks(found, request.blocks)
        summary = self._read_summary(found, request) if request.summary else None
        bounds = [
            _read_bounds(found, name, getattr(request, name)) if request.HasField(name) else NO_BOUNDS
            for name in ("block_tokens", "tail_tokens", "evidence_tokens")
        ]
        read = ContextRequest(
            question=request.question,
            budget=request.budget or _BUDGET_DEFAULT,
            count=self._tokenizers.get(request.tokenizer, estimated_tokens),
            memory_tokens=request.memory_tokens,
            conversation=conversation,
            blocks=blocks,
            summary=summary,
            block_bounds=bounds[0],
            tail_bounds=bounds[1],
            evidence_bounds=bounds[2],
            after=_read_position(found, request),
            now_us=scalars.time_us(found, "now", request.now) if request.HasField("now") else None,
            zone=scalars.read_zone(found, "time_zone", request.time_zone),
            partial=request.partial,
        )
        found.check()
        return read

    def _read_blocks(self, found: Violations, paths: Sequence[str]) -> list[BlockName]:
        if len(paths) > BLOCKS_MAX:
            found.add("blocks", f"has {len(paths)} entries, at most {BLOCKS_MAX} are allowed")
            return []
        if len(set(paths)) < len(paths):
            found.add("blocks", "names a block twice")
        return [self._read_block(found, f"blocks[{number}]", path) for number, path in enumerate(paths)]

    def _read_summary(self, found: Violations, request: pb.ContextRequest) -> BlockName:
        if not request.conversation:
            found.add("summary", "replaces messages of a conversation: name one")
        if request.summary in request.blocks:
            found.add("summary", "is one of the blocks, which are in the text already")
        return self._read_block(found, "summary", request.summary)

    def _read_block(self, found: Violations, field: str, path: str) -> BlockName:
        memory, _, name = path.partition("#")
        where = MemoryName(*_read_path(found, field, memory, self._limits))
        check.check_name(found, field, name, self._limits)
        return BlockName(where, name)

    async def _check_rights(self, read: ContextRequest) -> ContextRequest:
        """Without the blocks that the caller may not read, if the request is partial. Raises ScopeDenied."""
        talk = read.conversation
        if talk is not None and not caller_may(Verb.READ, talk.namespace):
            raise _refuse(f"the conversation {talk}")
        denied = [name for name in read.all_blocks if not await self._may_read(name.of)]
        if denied and not read.partial:
            raise _refuse(f"the block {denied[0]}")
        blocks = [name for name in read.blocks if name not in denied]
        return replace(read, blocks=blocks, summary=None if read.summary in denied else read.summary)

    async def _may_read(self, memory: MemoryName) -> bool:
        if caller_may(Verb.READ, memory.namespace):
            return True
        if not caller_may(Verb.READ, memory.namespace, None):
            return False
        try:
            record = await self._engine.memories.get(memory.namespace, memory.memory)
        except MemoryNotFound:
            return False
        return caller_may(Verb.READ, memory.namespace, record.labels)


def _refuse(what: str) -> ScopeDenied:
    return ScopeDenied(f"{PRINCIPAL.get()[:200]!a} does not have the right read for {what[:300]!a}")


def _read_path(found: Violations, field: str, path: str, limits: RequestLimits) -> tuple[str, str]:
    namespace, slash, name = path.partition("/")
    if not slash:
        found.add(field, f"is {check.quote_text(path)}: a path is namespace/name")
        return namespace, name
    for each in (namespace, name):
        check.check_name(found, field, each, limits)
    return namespace, name


def _read_bounds(found: Violations, field: str, message: pb.TokenBounds) -> Bounds:
    check.check_bounds(found, f"{field}.minimum", message.minimum, 0, BUDGET_MAX)
    if not message.HasField("maximum"):
        return Bounds(message.minimum)
    check.check_bounds(found, f"{field}.maximum", message.maximum, message.minimum, BUDGET_MAX)
    return Bounds(message.minimum, message.maximum)


def _read_position(found: Violations, request: pb.ContextRequest) -> Position | None:
    if not request.after:
        return None
    position = unpack_position(request.after)
    if position is None:
        found.add("after", "is no position of this server's format: begin without one")
    elif position.conversation != request.conversation:
        found.add("after", "is of another conversation: begin without one")
    return position


def _make_query(request: pb.ContextRequest) -> stream_service_pb2.RecallQuery:
    query = stream_service_pb2.RecallQuery(
        text=request.question,
        embedding=request.embedding,
        scopes=request.scopes,
        partial=request.partial,
        receipt=request.receipt,
        time_zone=request.time_zone,
        omit_working_memory=True,
    )
    for name in ("now", "filter"):
        if request.HasField(name):
            getattr(query, name).CopyFrom(getattr(request, name))
    if request.HasField("limit"):
        query.limit = request.limit
    if request.HasField("reinforce"):
        query.reinforce = request.reinforce
    return query


# ---- the answer
def _write_answer(answer: ContextAnswer) -> pb.ContextResponse:
    built = answer.built
    return pb.ContextResponse(
        parts=map(_write_part, built.parts),
        tokens=built.tokens,
        unchanged_tokens=built.unchanged_tokens,
        broken_by=map(_write_omission, built.broken_by),
        left_out=map(_write_omission, built.left_out),
        citations=[
            pb.ContextCitation(number=number, memory=memory, fragment_id=id) for number, memory, id in built.citations
        ],
        corrections=[
            pb.ContextCorrection(
                memory=memory, fragment_id=id, number=number, superseded_by=later, superseded_by_number=later_number
            )
            for memory, id, number, later, later_number in built.corrections
        ],
        weak=answer.weak,
        degraded=answer.degraded,
        position=pack_position(built.position),
        receipts=[pb.ContextReceipt(memory=memory, receipt_id=id) for memory, id in answer.receipts],
    )


def _write_part(part: ContextPart) -> pb.ContextPart:
    return pb.ContextPart(
        kind=pb.ContextPartKind.ValueType(part.kind),
        memory=part.memory,
        name=part.name,
        text=part.text,
        tokens=part.tokens,
        fragment_ids=part.ids,
        number=part.number,
        role=part.role,
        label_bytes=part.label_bytes,
        fresh=part.fresh,
    )


def _write_omission(one: Omission) -> pb.ContextOmission:
    return pb.ContextOmission(
        kind=pb.ContextPartKind.ValueType(one.kind),
        reason=pb.ContextReason.ValueType(one.reason),
        memory=one.memory,
        name=one.name,
        fragment_ids=one.ids,
        number=one.number,
        count=one.count,
    )
