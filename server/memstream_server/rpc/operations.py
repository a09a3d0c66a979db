"""OperationService: start, follow and cancel long operations, and operations as messages."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import grpc.aio
from google.rpc import status_pb2

from memstream.v1 import operation_pb2
from memstream.v1 import operation_service_pb2 as pb
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import list_readable
from memstream_server.rpc.errors import status_of_rejection
from memstream_server.rpc.idempotency import idempotent_call, respond_to_write
from memstream_server.rpc.limits import RequestLimits, encode_fitting
from memstream_server.rpc.validation import Violations, check_identifier
from memstream_server.rpc.wire.scalars import timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine

_STATES = {state: operation_pb2.OperationState.Value(f"OPERATION_STATE_{state.name}") for state in OperationState}


def operation_message(operation: Operation) -> operation_pb2.Operation:
    """An operation as a client sees it."""
    message = operation_pb2.Operation(
        id=operation.id,
        namespace=operation.namespace,
        memory=operation.memory,
        type=operation.type,
        state=_STATES[operation.state],
        done=operation.done,
        total=operation.total,
        unit=operation.unit,
        create_time=timestamp_message(operation.create_time_us),
    )
    if operation.end_time_us:
        message.end_time.CopyFrom(timestamp_message(operation.end_time_us))
    if operation.error is not None:
        message.error.CopyFrom(_error_status(operation))
    return message


def _error_status(operation: Operation) -> status_pb2.Status:
    error = operation.error
    assert error is not None
    return status_of_rejection(error)


_Context = grpc.aio.ServicerContext[Any, Any]


class OperationService:
    """The servicer."""

    def __init__(self, engine: Engine, limits: RequestLimits) -> None:
        self._engine = engine
        self._limits = limits

    async def start_reindex(self, request: pb.StartReindexRequest, _context: _Context) -> pb.StartReindexResponse:
        found = Violations()
        check_identifier(found, "request_id", request.request_id, self._limits)
        if request.embed and request.missing:
            found.add("missing", "excludes embed: that makes every vector")
        found.check()
        call = idempotent_call(request, "", request.request_id, pb.StartReindexResponse)

        def make_response(operation: Operation) -> pb.StartReindexResponse:
            return pb.StartReindexResponse(operation=operation_message(operation))

        start = partial(self._engine.reindexing.start, request.embed, request.missing)
        return await respond_to_write(call, self._engine, start, make_response)

    async def start_purge(self, request: pb.StartPurgeRequest, _context: _Context) -> pb.StartPurgeResponse:
        found = Violations()
        namespace, memory = self._validate_scope(found, request.namespace, request.memory)
        check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request.request_id, pb.StartPurgeResponse)

        def make_response(operation: Operation) -> pb.StartPurgeResponse:
            return pb.StartPurgeResponse(operation=operation_message(operation))

        start = partial(self._engine.purging.start, namespace, memory)
        return await respond_to_write(call, self._engine, start, make_response)

    async def get_operation(self, request: pb.GetOperationRequest, _context: _Context) -> pb.GetOperationResponse:
        operation = await self._engine.operations.get(self._validate_id(request.id))
        return pb.GetOperationResponse(operation=operation_message(operation))

    async def list_operations(self, request: pb.ListOperationsRequest, _context: _Context) -> bytes:
        """A serialised ListOperationsResponse."""
        found = Violations()
        namespace, memory = self._validate_scope(found, request.namespace, request.memory)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()

        async def fetch(before: str, limit: int) -> list[Operation]:
            return await self._engine.operations.list_page(namespace, memory, before, limit)

        by_id, where = attrgetter("id"), attrgetter("namespace")
        rows = await list_readable(fetch, page_tokens.read_name(request), size + 1, by_id, where)
        shown, count = await encode_fitting(
            rows[:size], pb.ListOperationsResponse(), _add_operation, self._limits.page_bytes_max
        )
        token = page_tokens.make_token(request, rows[count - 1].id) if len(rows) > count else ""
        return shown + pb.ListOperationsResponse(next_page_token=token).SerializeToString()

    async def cancel_operation(
        self, request: pb.CancelOperationRequest, _context: _Context
    ) -> pb.CancelOperationResponse:
        operation = await self._engine.operations.cancel(self._validate_id(request.id))
        return pb.CancelOperationResponse(operation=operation_message(operation))

    def _validate_id(self, id: str) -> str:
        found = Violations()
        check_identifier(found, "id", id, self._limits, required=True)
        found.check()
        return id

    def _validate_scope(self, found: Violations, namespace: str, memory: str) -> tuple[str, str]:
        """Validates (namespace, memory). Both may be empty; a memory needs a namespace."""
        if memory and not namespace:
            found.add("namespace", "is required with memory")
        elif memory:
            validation.memory_name(found, namespace, memory, self._limits)
        elif namespace:
            validation.check_name(found, "namespace", namespace, self._limits)
        return namespace, memory


def _add_operation(page: pb.ListOperationsResponse, operation: Operation) -> None:
    page.operations.append(operation_message(operation))
