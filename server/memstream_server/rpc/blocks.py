"""BlockService: blocks of memories, their versions, edits, and the stream that watches them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from google.protobuf.message import Message as WireMessage

from memstream.v1 import block_service_pb2 as pb
from memstream.v1.scope_pb2 import RecallScope
from memstream.v1.stream_service_pb2 import RecallQuery
from memstream_server.core.blocks import Append, Edit, Insert, Replace
from memstream_server.core.budget import estimated_tokens
from memstream_server.core.printable import list_hidden, number_text
from memstream_server.engine.blocks import BlockChanges, BlockPut
from memstream_server.engine.errors import CursorVoid, MemoryNotFound
from memstream_server.ports.blocks import Block, BlockName, MemoryName, StandingAnswer, StandingQuestion, StandingScope
from memstream_server.ports.conversations import AnswerOf
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import WatcherStalled
from memstream_server.rpc.idempotency import IdempotentCall, idempotent_call, respond_to_write
from memstream_server.rpc.limits import RequestLimits, encode_fitting
from memstream_server.rpc.scopes import CallerRights
from memstream_server.rpc.slow_consumer import end_if_stalled, follow_changes, read_progress_s
from memstream_server.rpc.validation import (
    Violations,
    check_bounds,
    check_identifier,
    check_name,
    memory_name,
    read_etag,
)
from memstream_server.rpc.wire import observations, scalars
from memstream_server.rpc.wire.filters import read_filter
from memstream_server.rpc.wire.scopes import read_scopes

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")
R = TypeVar("R", bound=WireMessage)
KNOWN_MAX = 1_024
"""Blocks that a watch names; no setting allows more in a memory."""
TOKENS_MAX = 2**31 - 1
_ETAG_CHARS_MAX = 10
_INTERVAL_DEFAULT_US = 10_000_000
_INTERVAL_MAX_S = 86_400


class BlockService:
    """The servicer. Stored answers have no text."""

    def __init__(self, engine: Engine, limits: RequestLimits, drain: Drain) -> None:
        self._engine = engine
        self._limits = limits
        self._drain = drain

    async def put_block(self, request: pb.PutBlockRequest, _context: _Context) -> pb.PutBlockResponse:
        found = Violations()
        name = self._name_of(found, request)
        max_tokens = request.max_tokens if request.HasField("max_tokens") else None
        check_bounds(found, "max_tokens", request.max_tokens, 0, TOKENS_MAX)
        metadata = None
        if request.HasField("metadata"):
            metadata = scalars.read_metadata(found, "metadata.metadata", request.metadata.metadata, self._limits)
        version = None
        if request.WhichOneof("precondition") == "etag":
            version = read_etag(found, request.etag, _ETAG_CHARS_MAX)
        elif request.absent:
            version = 0
        standing = self._read_question(found, request) if request.HasField("standing") else None
        self._check_request(found, request.request_id)
        if standing is not None:
            await self._check_rights([scope.memory for scope in standing.scopes] or [name.of])
        put = BlockPut(request.text, max_tokens, metadata, standing)
        return await self._respond_once(
            request,
            pb.PutBlockResponse,
            lambda answer: self._engine.blocks.put(name, put, version, answer),
            lambda block: pb.PutBlockResponse(block=block_message(block, text=False)),
        )

    async def get_block(self, request: pb.GetBlockRequest, _context: _Context) -> pb.GetBlockResponse:
        found = Violations()
        name = self._name_of(found, request)
        version = int(check_bounds(found, "version", request.version, 0, page_tokens.NUMBER_MAX))
        found.check()
        return pb.GetBlockResponse(block=block_message(await self._engine.blocks.get(name, version)))

    async def list_blocks(self, request: pb.ListBlocksRequest, _context: _Context) -> bytes:
        """A serialised ListBlocksResponse."""
        found = Violations()
        memory = MemoryName(*memory_name(found, request.namespace, request.memory, self._limits))
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        rows = await self._engine.blocks.list_page(memory, page_tokens.read_name(request), size + 1)

        def add(page: pb.ListBlocksResponse, row: Block) -> None:
            page.blocks.append(block_message(row))

        shown, count = await encode_fitting(rows[:size], pb.ListBlocksResponse(), add, self._limits.page_bytes_max)
        token = page_tokens.make_token(request, rows[count - 1].name) if count < len(rows) else ""
        return shown + pb.ListBlocksResponse(next_page_token=token).SerializeToString()

    async def list_block_versions(self, request: pb.ListBlockVersionsRequest, _context: _Context) -> bytes:
        """A serialised ListBlockVersionsResponse."""
        found = Violations()
        name = self._name_of(found, request)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        rows = await self._engine.blocks.list_versions(name, page_tokens.read_number(request), size + 1)

        def add(page: pb.ListBlockVersionsResponse, row: Block) -> None:
            page.versions.append(block_message(row))

        shown, count = await encode_fitting(
            rows[:size], pb.ListBlockVersionsResponse(), add, self._limits.page_bytes_max
        )
        token = page_tokens.make_token(request, str(rows[count - 1].version)) if count < len(rows) else ""
        return shown + pb.ListBlockVersionsResponse(next_page_token=token).SerializeToString()

    async def edit_block(self, request: pb.EditBlockRequest, _context: _Context) -> pb.EditBlockResponse:
        found = Violations()
        name = self._name_of(found, request)
        edit = _read_edit(found, request)
        version = read_etag(found, request.etag, _ETAG_CHARS_MAX) if request.etag else None
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            pb.EditBlockResponse,
            lambda answer: self._engine.blocks.edit(name, edit, version, answer),
            lambda block: pb.EditBlockResponse(block=block_message(block, text=False)),
        )

    async def delete_block(self, request: pb.DeleteBlockRequest, _context: _Context) -> pb.DeleteBlockResponse:
        found = Violations()
        name = self._name_of(found, request)
        version = read_etag(found, request.etag, _ETAG_CHARS_MAX) if request.etag else None
        self._check_request(found, request.request_id)
        return await self._respond_once(
            request,
            pb.DeleteBlockResponse,
            lambda answer: self._engine.blocks.delete(name, version, answer),
            lambda deleted: pb.DeleteBlockResponse(deleted=deleted),
        )

    async def watch_blocks(
        self, request: pb.WatchBlocksRequest, context: _Context
    ) -> AsyncIterator[pb.WatchBlocksResponse]:
        found = Violations()
        memory = MemoryName(*memory_name(found, request.namespace, request.memory, self._limits))
        known = self._read_known(found, request)
        progress_s = read_progress_s(found, request)
        found.check()
        record = await self._engine.memories.get(memory.namespace, memory.memory)
        if known and request.memory_uid != record.uid:
            raise CursorVoid(f"the memory {memory} was created again: watch it with no known blocks")

        async def encode(changes: BlockChanges) -> AsyncIterator[pb.WatchBlocksResponse]:
            for response in _split_changes(changes, self._limits.page_bytes_max):
                response.memory_uid = record.uid
                yield response

        changes = self._engine.blocks.watch(memory, record.uid, known)
        mark = partial(pb.WatchBlocksResponse, memory_uid=record.uid)
        sent = follow_changes(changes, progress_s, self._drain, encode, mark)
        async with aclosing(
            end_if_stalled(sent, context, self._limits.watch_stalled_max_s, _stalled_error)
        ) as responses:
            async for response in responses:
                yield response

    def _name_of(self, found: Violations, request: Any) -> BlockName:
        memory = MemoryName(*memory_name(found, request.namespace, request.memory, self._limits))
        return BlockName(memory, check_name(found, "block", request.block, self._limits))

    def _read_question(self, found: Violations, request: pb.PutBlockRequest) -> StandingQuestion:
        asked, limits = request.standing, self._limits
        if request.text:
            found.add("text", "must be empty with standing")
        observations.content_checked(found, "standing.text", asked.text, limits)
        if asked.instructions:
            observations.content_checked(found, "standing.instructions", asked.instructions, limits)
        if asked.HasField("limit"):
            check_bounds(found, "standing.limit", asked.limit, 1, limits.recall_limit_max)
        check_bounds(found, "standing.min_relevance", asked.min_relevance, 0, 1)
        interval_us = _INTERVAL_DEFAULT_US
        if asked.HasField("min_interval"):
            interval_us = asked.min_interval.ToMicroseconds()
            check_bounds(found, "standing.min_interval", interval_us / 1e6, 0, _INTERVAL_MAX_S)
        return StandingQuestion(
            asked.text,
            asked.instructions,
            asked.limit if asked.HasField("limit") else None,
            asked.min_relevance if asked.HasField("min_relevance") else None,
            interval_us,
            read_filter(found, asked.filter, limits, "standing.filter"),
            asked.filter.SerializeToString(deterministic=True),
            self._read_scopes(found, asked) if asked.scopes else (),
        )

    def _read_scopes(self, found: Violations, asked: pb.StandingQuestion) -> tuple[StandingScope, ...]:
        message = RecallQuery(text=asked.text, scopes=asked.scopes)
        _, scopes = read_scopes(message, "", self._limits, self._engine.dimension, "standing.")
        read = []
        for at, (scope, given) in enumerate(zip(scopes, asked.scopes, strict=True)):
            if scope.memory is None:
                found.add(f"standing.scopes[{at}]", "selects memories: a standing question names each one by `memory`")
            else:
                read.append(StandingScope(MemoryName(*scope.memory), given.SerializeToString(deterministic=True)))
            if given.min_revision:
                found.add(f"standing.scopes[{at}].min_revision", "is given in a standing question, which never waits")
        return tuple(read)

    async def _check_rights(self, asked: Sequence[MemoryName]) -> None:
        """Raises PermissionDenied. A memory that does not exist yet is like one without labels."""
        for memory in asked:
            try:
                labels = (await self._engine.memories.get(memory.namespace, memory.memory)).labels
            except MemoryNotFound:
                labels = ()
            if not caller_may(Verb.RECALL, memory.namespace, labels):
                raise CallerRights().refuse(memory.namespace, memory.memory)

    def _read_known(self, found: Violations, request: pb.WatchBlocksRequest) -> dict[str, int]:
        if len(request.known) > KNOWN_MAX:
            found.add("known", f"has {len(request.known)} entries, at most {KNOWN_MAX} are allowed")
            return {}
        if request.known and not request.memory_uid:
            found.add("memory_uid", "is required with known")
        for name, version in request.known.items():
            check_name(found, "known", name, self._limits)
            check_bounds(found, "known", version, 1, page_tokens.NUMBER_MAX)
        return dict(request.known)

    def _check_request(self, found: Violations, request_id: str) -> None:
        check_identifier(found, "request_id", request_id, self._limits)
        found.check()

    async def _respond_once(
        self,
        request: Any,
        response_type: type[R],
        write: Callable[[AnswerOf[T]], Awaitable[T]],
        response: Callable[[T], R],
    ) -> R:
        """A repeat of a request_id gets the first response, even if both run at once."""
        call: IdempotentCall[R] | None = idempotent_call(request, request.namespace, request.request_id, response_type)
        return await respond_to_write(call, self._engine, write, response)


def block_message(block: Block, *, text: bool = True) -> pb.Block:
    """The message of the contract; without its text on request."""
    content = block.content
    message = pb.Block(
        name=block.name,
        text=content.text if text else "",
        etag=str(block.version),
        version=block.version,
        max_tokens=content.max_tokens,
        create_time=scalars.timestamp_message(block.create_time_us),
        update_time=scalars.timestamp_message(block.update_time_us),
        principal=block.principal,
        tokens=estimated_tokens(content.text),
    )
    scalars.write_metadata(message.metadata, content.metadata)
    texts = [content.text, *(part for pair in content.metadata for part in pair if isinstance(part, str))]
    message.hidden_characters.extend(list_hidden("\n".join(texts)))
    if content.standing is not None:
        _write_standing(message.standing, block, content.standing)
    return message


def _write_standing(message: pb.StandingAnswer, block: Block, standing: StandingAnswer) -> None:
    asked, question = standing.question, message.question
    question.text, question.instructions = asked.text, asked.instructions
    if asked.limit is not None:
        question.limit = asked.limit
    if asked.min_relevance is not None:
        question.min_relevance = asked.min_relevance
    if asked.filter_message:
        question.filter.MergeFromString(asked.filter_message)
    question.min_interval.CopyFrom(scalars.duration_message(asked.min_interval_us / 1e6))
    question.scopes.extend([RecallScope.FromString(scope.message) for scope in asked.scopes])
    paths = dict(zip(standing.sources, standing.memories, strict=bool(standing.memories)))
    for ids in standing.citations:
        message.citations.add(fragment_ids=ids, memories=[paths[id_] for id_ in ids if paths])
    message.model = standing.model
    if block.state is not None:
        message.problem = block.state.problem
        message.revision = 0 if asked.scopes else max(0, block.state.revision)
        message.revisions.update({str(one.memory): one.revision for one in block.state.asked if one.revision >= 0})


def _read_edit(found: Violations, request: pb.EditBlockRequest) -> Edit:
    match request.WhichOneof("edit"):
        case "append":
            _require(found, "append.text", request.append.text)
            return Append(request.append.text)
        case "replace":
            _require(found, "replace.old", request.replace.old)
            return Replace(request.replace.old, request.replace.new)
        case "insert":
            _require(found, "insert.text", request.insert.text)
            validation.not_negative(found, "insert.line", request.insert.line)
            return Insert(request.insert.line, request.insert.text)
        case _:
            found.add("edit", "is not set: give append, replace or insert")
            return Append("")


def _require(found: Violations, field: str, text: str) -> None:
    if not text:
        found.add(field, "is required")


def _split_changes(changes: BlockChanges, bytes_max: int) -> Iterator[pb.WatchBlocksResponse]:
    """The responses that carry the changes, each about so large; one block at least, and one empty one for none."""
    response = pb.WatchBlocksResponse(deleted=changes.deleted)
    size = 0
    for block in changes.written:
        message = block_message(block)
        more = message.ByteSize()
        if response.blocks and size + more > bytes_max:
            yield response
            response, size = pb.WatchBlocksResponse(), 0
        response.blocks.append(message)
        size += more
    yield response


def _stalled_error(_response: pb.WatchBlocksResponse, limit_s: float) -> WatcherStalled:
    text = "what was sent is not read: read on to the end, and watch again with what is known"
    return WatcherStalled(text, quota="watch_stalled_max_s", limit=number_text(limit_s))
