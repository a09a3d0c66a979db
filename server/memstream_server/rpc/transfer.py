"""ExportMemories and ImportMemories: streams of export lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.engine.errors import ProtocolViolation, QuotaExceeded
from memstream_server.engine.operations.transfer.check_lines import Summary
from memstream_server.engine.operations.transfer.export_memory import Wanted
from memstream_server.engine.operations.transfer.import_memory import Target
from memstream_server.engine.operations.transfer.upload import Upload, open_in_thread
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.rpc import validation
from memstream_server.rpc.idempotency import IdempotentCall, respond_once
from memstream_server.rpc.memories import MemoryService
from memstream_server.rpc.validation import Violations, check_identifier
from memstream_server.rpc.wire.filters import read_filter
from memstream_server.rpc.wire.operations import operation_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.rpc.limits import Limits

_Context = grpc.aio.ServicerContext[Any, Any]
INTAKES_MAX = 4
"""Concurrent uploads: each takes disk space before it is validated."""


class TransferringMemoryService(MemoryService):
    """MemoryService with the two rpcs that move memories between servers."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        super().__init__(engine, limits)
        self._intakes = 0

    async def export_memories(
        self, request: pb.ExportMemoriesRequest, _context: _Context
    ) -> AsyncIterator[pb.ExportMemoriesResponse]:
        found = Violations()
        chosen = read_filter(found, request.filter, self._limits, "filter")
        found.check()
        wanted = Wanted(*self._validate_target(request.namespace, request.memory), request.include_vectors, chosen)
        parts = self._engine.transfers.export(wanted)
        try:
            async for part in parts:
                yield pb.ExportMemoriesResponse(lines=part.lines, done=part.done, total=part.total)
        finally:
            await parts.aclose()

    async def import_memories(
        self, requests: AsyncIterator[pb.ImportMemoriesRequest], _context: _Context
    ) -> pb.ImportMemoriesResponse:
        if self._intakes >= INTAKES_MAX:
            raise QuotaExceeded(
                f"{INTAKES_MAX} imports are being sent in, more are not taken",
                retry_after_s=5.0,
                quota="imports_at_once",
                limit=INTAKES_MAX,
            )
        self._intakes += 1
        try:
            opening = await self._read_opening(requests)
            return await self._take_upload(opening, requests)
        finally:
            self._intakes -= 1

    async def _read_opening(self, requests: AsyncIterator[pb.ImportMemoriesRequest]) -> pb.ImportOpen:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "open":
            raise ProtocolViolation("the first message of an import must be open")
        self._validate_target(first.open.namespace, first.open.memory)
        found = Violations()
        check_identifier(found, "open.request_id", first.open.request_id, self._limits)
        found.check()
        return first.open

    async def _take_upload(
        self, opening: pb.ImportOpen, requests: AsyncIterator[pb.ImportMemoriesRequest]
    ) -> pb.ImportMemoriesResponse:
        imports = self._engine.transfers.imports
        intake = await open_in_thread(lambda: imports.open_upload(opening.memory))
        try:
            async for request in requests:
                if request.WhichOneof("message") != "lines":
                    raise ProtocolViolation("after open, every message of an import must be lines")
                await asyncio.to_thread(intake.add_lines, request.lines)
            summary = await asyncio.to_thread(intake.finish)
            return await self._begin_import(opening, intake, summary)
        finally:
            await asyncio.shield(asyncio.to_thread(intake.close))

    async def _begin_import(
        self, opening: pb.ImportOpen, intake: Upload, summary: Summary
    ) -> pb.ImportMemoriesResponse:
        imports = self._engine.transfers.imports
        target = Target(opening.namespace, opening.memory)
        if opening.validate_only:
            await imports.check_target(intake, summary, target)
            return _import_response(_validated_operation(opening, summary))
        call = _idempotent_import(opening, summary)
        while call is not None and (first := await call.first_answer(self._engine)) is not None:
            again = await self._engine.operations.get(first.operation.id)
            if again.state not in (OperationState.FAILED, OperationState.CANCELLED):
                return _import_response(again)
            # A new operation continues where the last one stopped. Its response is stored as well and answers the next
            # repeat.
            call = replace(call, key=f"{call.key}\n{again.id}")

        async def begin() -> pb.ImportMemoriesResponse:
            await imports.check_target(intake, summary, target)
            answer = None if call is None else lambda operation: call.make_answer(_import_response(operation))
            return _import_response(await imports.begin_import(intake, summary, target, answer))

        return await respond_once(call, self._engine, begin)

    def _validate_target(self, namespace: str, memory: str) -> tuple[str, str]:
        found = Violations()
        validation.check_name(found, "namespace", namespace, self._limits)
        if memory:
            validation.check_name(found, "memory", memory, self._limits)
        found.check()
        return namespace, memory


def _import_response(operation: Operation) -> pb.ImportMemoriesResponse:
    return pb.ImportMemoriesResponse(operation=operation_message(operation))


def _validated_operation(opening: pb.ImportOpen, summary: Summary) -> Operation:
    """The response to validate_only: an operation that did not run, with what it would do."""
    return Operation(
        id="",
        type="import",
        namespace=opening.namespace,
        memory=opening.memory,
        payload="",
        state=OperationState.SUCCEEDED,
        total=summary.fragments,
        unit="fragments",
    )


def _idempotent_import(opening: pb.ImportOpen, summary: Summary) -> IdempotentCall[pb.ImportMemoriesResponse] | None:
    """A repeat has the same names and the same lines."""
    if not opening.request_id:
        return None
    same = pb.ImportMemoriesRequest(lines=f"{opening.namespace}\n{opening.memory}\n{summary.sha256}".encode())
    key = "\n".join((opening.namespace, same.DESCRIPTOR.name, opening.request_id))
    return IdempotentCall(same, key, pb.ImportMemoriesResponse)
