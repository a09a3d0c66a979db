"""Rpcs of MemoryService for receipts of recalls: list, replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import stream_service_pb2 as stream_pb
from memstream_server.engine.requests import Query
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.limits import Limits, encode_fitting
from memstream_server.rpc.validation import Violations, invalid_field, memory_name
from memstream_server.rpc.wire import queries
from memstream_server.rpc.wire.recall_receipts import encode_replay, write_receipt

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_Context = grpc.aio.ServicerContext[Any, Any]


class ReceiptMethods:
    """The handlers."""

    _engine: Engine
    _limits: Limits

    async def list_recall_receipts(self, request: pb.ListRecallReceiptsRequest, _context: _Context) -> bytes:
        """A serialised ListRecallReceiptsResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        before, uid_before = page_tokens.read_position(request)
        page, more, uid = await self._engine.recall_receipts.list_page(namespace, name, before, size)
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        receipts, count = await encode_fitting(
            page,
            pb.ListRecallReceiptsResponse(),
            lambda response, each: write_receipt(response.receipts.add(), each[1]),
            self._limits.page_bytes_max,
        )
        more = more or count < len(page)
        token = page_tokens.make_token(request, f"{page[count - 1][0]}:{uid}") if more else ""
        return receipts + pb.ListRecallReceiptsResponse(next_page_token=token).SerializeToString()

    async def replay_recall(self, request: pb.ReplayRecallRequest, _context: _Context) -> bytes:
        """A serialised ReplayRecallResponse."""
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        validation.fragment_id(found, "receipt_id", request.receipt_id)
        found.check()
        replay = await self._engine.recall_receipts.replay(namespace, name, request.receipt_id, self._read_query)
        response = await encode_replay(replay)
        if len(response) > self._limits.message_bytes_max:
            raise invalid_field(
                "receipt_id",
                f"leads to an answer of {len(response)} bytes, a message has at most "
                f"{self._limits.message_bytes_max}: recall with as_of on the Recall stream",
            )
        return response

    def _read_query(self, given: bytes) -> Query:
        """The query as it was given. A client's embedding of another model is left out."""
        message = stream_pb.RecallQuery.FromString(given)
        if len(message.embedding) != self._engine.dimension:
            message.ClearField("embedding")
        return queries.read_query(message, "", self._limits, self._engine.dimension)
