"""Memory rpcs of MemoryService, with the streams of exports and imports; the fragment rpcs are in fragments.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import memory_service_pb2 as pb
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import EtagMismatch, MemoryExists, ProtocolViolation, QuotaExceeded
from memstream_server.engine.operations.transfer.check_lines import Summary
from memstream_server.engine.operations.transfer.export_memory import Wanted
from memstream_server.engine.operations.transfer.import_memory import Target
from memstream_server.engine.operations.transfer.upload import Upload, open_in_thread
from memstream_server.engine.requests import ChangeCount, MemoryChange, NewMemory, memory_etag
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.access.caller import list_readable
from memstream_server.rpc.fragments import FragmentMethods
from memstream_server.rpc.idempotency import (
    IdempotentCall,
    answer_from,
    answer_of,
    commit_with_answer,
    idempotent_call,
    respond_once,
    respond_to_write,
)
from memstream_server.rpc.limits import encode_fitting
from memstream_server.rpc.memory_records import ConflictMethods, ReceiptMethods, SessionMethods, StandingQueryMethods
from memstream_server.rpc.operations import operation_message
from memstream_server.rpc.validation import Violations, check_identifier, memory_name, quote_text
from memstream_server.rpc.wire import policies
from memstream_server.rpc.wire.filters import read_filter
from memstream_server.rpc.wire.fragments import TIERS

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.engine.requests import AnswerOf
    from memstream_server.rpc.limits import RequestLimits


_Context = grpc.aio.ServicerContext[Any, Any]
_UPDATE_TRIES = 5
"""An update without an etag is retried if another update came between its read and its write."""
INTAKES_MAX = 4
"""Concurrent uploads: each takes disk space before it is validated."""


class MemoryService(ConflictMethods, ReceiptMethods, SessionMethods, StandingQueryMethods, FragmentMethods):
    """The handlers; rpc/pipeline.py refuses rpcs that are missing."""

    def __init__(self, engine: Engine, limits: RequestLimits) -> None:
        super().__init__(engine, limits)
        self._intakes = 0

    # ---- memories
    async def create_memory(self, request: pb.CreateMemoryRequest, _context: _Context) -> pb.CreateMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        new = NewMemory(
            namespace,
            name,
            policies.KINDS.read_value(found, "kind", request.kind, MemoryKind.HYBRID),
            policies.read_policy(found, request.policy),
            policies.read_labels(found, request.labels, self._limits),
            request.exist_ok,
        )
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.CreateMemoryResponse)

        def respond(record: MemoryRecord) -> pb.CreateMemoryResponse:
            return _create_response(record, True)

        async def create() -> pb.CreateMemoryResponse:
            record, created = await self._engine.memories.create(new, answer_from(call, respond))
            if not created:
                _check_same(request, record)
            return _create_response(record, created)

        return await respond_once(call, self._engine, create, try_first=not new.exist_ok)

    async def get_memory(self, request: pb.GetMemoryRequest, _context: _Context) -> pb.GetMemoryResponse:
        namespace, name = self._memory_of(request)
        record = await self._engine.memories.get(namespace, name)
        fields = policies.describe_policy(record.policy) if request.describe_policy else ()
        return pb.GetMemoryResponse(memory=policies.memory_message(record), policy_fields=fields)

    async def list_memories(self, request: pb.ListMemoriesRequest, _context: _Context) -> bytes:
        """A serialised ListMemoriesResponse."""
        found = Violations()
        namespace = validation.check_name(found, "namespace", request.namespace, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        prefix = request.name_prefix and validation.check_name(found, "name_prefix", request.name_prefix, self._limits)
        labels = policies.read_labels(found, request.labels, self._limits)
        found.check()
        after = page_tokens.read_name(request)
        records = await self._engine.memories.list_page(namespace, after, size + 1, prefix, labels)
        shown, count = await encode_fitting(
            records[:size], pb.ListMemoriesResponse(), _add_memory, self._limits.page_bytes_max
        )
        token = page_tokens.make_token(request, records[count - 1].name) if len(records) > count else ""
        return shown + pb.ListMemoriesResponse(next_page_token=token).SerializeToString()

    async def update_memory(self, request: pb.UpdateMemoryRequest, _context: _Context) -> pb.UpdateMemoryResponse:
        found = Violations()
        namespace = validation.check_name(found, "memory.namespace", request.memory.namespace, self._limits)
        name = validation.check_name(found, "memory.name", request.memory.name, self._limits)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        _check_mask(found, request.update_mask.paths)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.UpdateMemoryResponse)
        update = partial(self._update_memory, request, namespace, name)
        return await respond_to_write(call, self._engine, update, _update_response)

    async def _update_memory(
        self, request: pb.UpdateMemoryRequest, namespace: str, name: str, answer: AnswerOf | None
    ) -> MemoryRecord:
        for tries_left in reversed(range(_UPDATE_TRIES)):
            current = await self._engine.memories.get(namespace, name)
            change = self._read_change(request, current)
            try:
                return await self._engine.memories.update(namespace, name, change, answer)
            except EtagMismatch:
                if request.memory.etag or not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _read_change(self, request: pb.UpdateMemoryRequest, current: MemoryRecord) -> MemoryChange:
        found, paths = Violations(), request.update_mask.paths
        policy = policies.change_policy(found, current.policy, request.memory, paths)
        labels = policies.read_labels(found, request.memory.labels, self._limits) if "labels" in paths else None
        found.check()
        return MemoryChange(policy, labels, request.memory.etag or memory_etag(current))

    async def delete_memory(self, request: pb.DeleteMemoryRequest, _context: _Context) -> pb.DeleteMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.DeleteMemoryResponse)
        answer = answer_of(call, pb.DeleteMemoryResponse)

        async def delete() -> pb.DeleteMemoryResponse:
            await self._engine.memories.delete(namespace, name, request.etag, answer)
            return pb.DeleteMemoryResponse()

        return await respond_once(call, self._engine, delete)

    async def clone_memory(self, request: pb.CloneMemoryRequest, _context: _Context) -> pb.CloneMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        new_name = validation.check_name(found, "new_memory", request.new_memory, self._limits)
        new_namespace = namespace
        if request.new_namespace:
            new_namespace = validation.check_name(found, "new_namespace", request.new_namespace, self._limits)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.CloneMemoryResponse)
        clone = partial(self._engine.memories.clone, namespace, name, new_namespace, new_name)
        return await respond_to_write(call, self._engine, clone, _clone_response)

    async def clear_memory(self, request: pb.ClearMemoryRequest, _context: _Context) -> pb.ClearMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        if 0 in request.tiers:  # UNSPECIFIED means any tier in other rpcs; a permanent removal must name its tiers
            found.add("tiers", "has TIER_UNSPECIFIED: name the tiers, or none for all")
        tiers = TIERS.read_all(found, "tiers", request.tiers)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.ClearMemoryResponse)

        async def clear() -> pb.ClearMemoryResponse:
            return _clear_response(
                await self._engine.fragments.clear(namespace, name, tiers, commit_with_answer(call, _clear_response))
            )

        return await respond_once(call, self._engine, clear)

    async def list_namespaces(self, request: pb.ListNamespacesRequest, _context: _Context) -> pb.ListNamespacesResponse:
        found = Violations()
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()

        def name(each: tuple[str, int]) -> str:
            return each[0]

        after = page_tokens.read_name(request)
        namespaces = await list_readable(self._engine.memories.list_namespaces, after, size + 1, name, name)
        stored = await self._engine.memories.read_bytes([each for each, _ in namespaces[:size]])
        return pb.ListNamespacesResponse(
            namespaces=[
                policies.namespace_message(each, count, stored.get(each), self._engine.memories.byte_quotas)
                for each, count in namespaces[:size]
            ],
            next_page_token=page_tokens.make_token(request, namespaces[size - 1][0]) if len(namespaces) > size else "",
        )

    async def get_memory_stats(
        self, request: pb.GetMemoryStatsRequest, _context: _Context
    ) -> pb.GetMemoryStatsResponse:
        statistics = await self._engine.memories.get_statistics(*self._memory_of(request))
        return pb.GetMemoryStatsResponse(stats=policies.stats_message(statistics))

    async def reflect_memory(self, request: pb.ReflectMemoryRequest, _context: _Context) -> pb.ReflectMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        request_id = check_identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = idempotent_call(request, namespace, request_id, pb.ReflectMemoryResponse)

        def make_response(operation: Operation) -> pb.ReflectMemoryResponse:
            return pb.ReflectMemoryResponse(operation=operation_message(operation))

        start = partial(self._engine.reflecting.start, namespace, name)
        return await respond_to_write(call, self._engine, start, make_response)

    def _memory_of(self, request: pb.GetMemoryRequest | pb.GetMemoryStatsRequest) -> tuple[str, str]:
        found = Violations()
        named = memory_name(found, request.namespace, request.memory, self._limits)
        found.check()
        return named

    async def export_memories(
        self, request: pb.ExportMemoriesRequest, _context: _Context
    ) -> AsyncIterator[pb.ExportMemoriesResponse]:
        found = Violations()
        chosen = read_filter(found, request.filter, self._limits, "filter")
        found.check()
        wanted = Wanted(*self._validate_target(request.namespace, request.memory), request.include_vectors, chosen)
        parts = self._engine.exporter.export(wanted)
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
        importer = self._engine.importer
        intake = await open_in_thread(lambda: importer.open_upload(opening.memory))
        try:
            async for request in requests:
                if request.WhichOneof("message") != "lines":
                    raise ProtocolViolation("after open, every message of an import must be lines")
                await run_in_thread(partial(intake.add_lines, request.lines))
            summary = await run_in_thread(intake.finish)
            return await self._begin_import(opening, intake, summary)
        finally:
            await asyncio.shield(run_in_thread(intake.close))

    async def _begin_import(
        self, opening: pb.ImportOpen, intake: Upload, summary: Summary
    ) -> pb.ImportMemoriesResponse:
        importer = self._engine.importer
        target = Target(opening.namespace, opening.memory)
        if opening.validate_only:
            await importer.check_target(intake, summary, target)
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
            await importer.check_target(intake, summary, target)
            answer = answer_from(call, _import_response)
            return _import_response(await importer.begin_import(intake, summary, target, answer))

        return await respond_once(call, self._engine, begin)

    def _validate_target(self, namespace: str, memory: str) -> tuple[str, str]:
        found = Violations()
        validation.check_name(found, "namespace", namespace, self._limits)
        if memory:
            validation.check_name(found, "memory", memory, self._limits)
        found.check()
        return namespace, memory


def _check_mask(found: Violations, paths: Any) -> None:
    if not paths:
        found.add("update_mask", "is empty: name the fields to set")
    for path in paths:
        if path != "labels" and path.split(".")[0] != "policy":
            found.add("update_mask", f'has {quote_text(path)}: "labels", "policy" and paths below it can be set')


def _add_memory(page: pb.ListMemoriesResponse, record: MemoryRecord) -> None:
    page.memories.append(policies.memory_message(record))


def _check_same(request: pb.CreateMemoryRequest, record: MemoryRecord) -> None:
    """Raises MemoryExists if an existing memory differs from the request."""
    differing = policies.list_differences(request, policies.memory_message(record))
    if differing:
        named = ", ".join(f"{field} ({how})" for field, how in differing.items())
        raise MemoryExists(
            f"memory {record.namespace}/{record.name} exists and differs in {named}: "
            "leave that out to use it as it is, change it with UpdateMemory, or choose another name",
            namespace=record.namespace,
            memory=record.name,
            differs=", ".join(differing),
        )


def _create_response(record: MemoryRecord, created: bool) -> pb.CreateMemoryResponse:
    return pb.CreateMemoryResponse(memory=policies.memory_message(record), created=created)


def _clone_response(record: MemoryRecord) -> pb.CloneMemoryResponse:
    return pb.CloneMemoryResponse(memory=policies.memory_message(record))


def _clear_response(changed: ChangeCount) -> pb.ClearMemoryResponse:
    return pb.ClearMemoryResponse(cleared=changed.count, revision=changed.revision)


def _update_response(record: MemoryRecord) -> pb.UpdateMemoryResponse:
    return pb.UpdateMemoryResponse(memory=policies.memory_message(record))


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
