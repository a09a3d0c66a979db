"""MemoryService: memories and their fragments as resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import fragment_pb2
from memstream.v1 import memory_service_pb2 as pb
from memstream_server.core.filters import Filter
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import EtagMismatch
from memstream_server.engine.requests import MemoryChange, NewMemory, memory_etag
from memstream_server.ports.journal import MemoryRecord
from memstream_server.rpc import page_tokens, validation
from memstream_server.rpc.errors import PageTokenInvalid
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.repeats import Repeatable, answer_of, first_answer, repeatable
from memstream_server.rpc.validation import Violations, identifier, memory_name, shown
from memstream_server.rpc.wire import policies
from memstream_server.rpc.wire.fragments import fragment_message, read_filter

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.engine.requests import AnswerOf

_Context = grpc.aio.ServicerContext[Any, Any]
_UPDATE_TRIES = 5
"""An update without an etag is decided anew when another came between reading and writing."""


class MemoryService:
    """What of the service this server has; the rest is refused by rpc/registration.py."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self._engine = engine
        self._limits = limits

    # ---- memories
    async def create_memory(self, request: pb.CreateMemoryRequest, _context: _Context) -> pb.CreateMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        new = NewMemory(
            namespace,
            name,
            policies.KINDS.read(found, "kind", request.kind, MemoryKind.HYBRID),
            policies.read_policy(found, request.policy),
            policies.read_labels(found, request.labels, self._limits),
            request.exist_ok,
        )
        request_id = identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = repeatable(request, namespace, request_id, pb.CreateMemoryResponse)
        if (first := await first_answer(call, self._engine)) is not None:
            return first
        answer = _answering(call, lambda record: _created(record, True))
        return _created(*await self._engine.create_memory(new, answer))

    async def get_memory(self, request: pb.GetMemoryRequest, _context: _Context) -> pb.GetMemoryResponse:
        namespace, name = self._named(request)
        record = await self._engine.get_memory(namespace, name)
        return pb.GetMemoryResponse(memory=policies.memory_message(record))

    async def list_memories(self, request: pb.ListMemoriesRequest, _context: _Context) -> pb.ListMemoriesResponse:
        found = Violations()
        namespace = validation.name(found, "namespace", request.namespace, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        records = await self._engine.list_memories(namespace, page_tokens.read(request), size + 1)
        return pb.ListMemoriesResponse(
            memories=[policies.memory_message(record) for record in records[:size]],
            next_page_token=page_tokens.make(request, records[size - 1].name) if len(records) > size else "",
        )

    async def update_memory(self, request: pb.UpdateMemoryRequest, _context: _Context) -> pb.UpdateMemoryResponse:
        found = Violations()
        namespace = validation.name(found, "memory.namespace", request.memory.namespace, self._limits)
        name = validation.name(found, "memory.name", request.memory.name, self._limits)
        request_id = identifier(found, "request_id", request.request_id, self._limits)
        _check_mask(found, request.update_mask.paths)
        found.check()
        call = repeatable(request, namespace, request_id, pb.UpdateMemoryResponse)
        if (first := await first_answer(call, self._engine)) is not None:
            return first
        return _updated(await self._update(request, namespace, name, _answering(call, _updated)))

    async def _update(
        self, request: pb.UpdateMemoryRequest, namespace: str, name: str, answer: AnswerOf | None
    ) -> MemoryRecord:
        for tries_left in reversed(range(_UPDATE_TRIES)):
            current = await self._engine.get_memory(namespace, name)
            change = self._change(request, current)
            try:
                return await self._engine.update_memory(namespace, name, change, answer)
            except EtagMismatch:
                if request.memory.etag or not tries_left:
                    raise
        raise AssertionError("unreachable: the last try returns or raises")

    def _change(self, request: pb.UpdateMemoryRequest, current: MemoryRecord) -> MemoryChange:
        found, paths = Violations(), request.update_mask.paths
        policy = policies.change_policy(found, current.policy, request.memory, paths)
        labels = policies.read_labels(found, request.memory.labels, self._limits) if "labels" in paths else None
        found.check()
        return MemoryChange(policy, labels, request.memory.etag or memory_etag(current))

    async def delete_memory(self, request: pb.DeleteMemoryRequest, _context: _Context) -> pb.DeleteMemoryResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        request_id = identifier(found, "request_id", request.request_id, self._limits)
        found.check()
        call = repeatable(request, namespace, request_id, pb.DeleteMemoryResponse)
        if (first := await first_answer(call, self._engine)) is not None:
            return first
        await self._engine.delete_memory(namespace, name, request.etag, answer_of(call, pb.DeleteMemoryResponse))
        return pb.DeleteMemoryResponse()

    async def list_namespaces(self, request: pb.ListNamespacesRequest, _context: _Context) -> pb.ListNamespacesResponse:
        found = Violations()
        size = validation.page_size(found, request.page_size, self._limits)
        found.check()
        namespaces = await self._engine.list_namespaces(page_tokens.read(request), size + 1)
        return pb.ListNamespacesResponse(
            namespaces=[pb.Namespace(name=name, memories=count) for name, count in namespaces[:size]],
            next_page_token=page_tokens.make(request, namespaces[size - 1][0]) if len(namespaces) > size else "",
        )

    async def get_memory_stats(
        self, request: pb.GetMemoryStatsRequest, _context: _Context
    ) -> pb.GetMemoryStatsResponse:
        statistics = await self._engine.statistics(*self._named(request))
        return pb.GetMemoryStatsResponse(stats=policies.stats_message(statistics))

    # ---- fragments
    async def get_fragment(self, request: pb.GetFragmentRequest, _context: _Context) -> pb.GetFragmentResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        key = request.WhichOneof("key")
        if key == "external_id":
            identifier(found, "external_id", request.external_id, self._limits, required=True)
        else:
            validation.fragment_id(found, "id", request.id)
        found.check()
        fragment, merged, revision = await self._engine.get_fragment(
            namespace, name, id=request.id, external_id=request.external_id
        )
        return pb.GetFragmentResponse(fragment=fragment_message(fragment, merged), revision=revision)

    async def list_fragments(self, request: pb.ListFragmentsRequest, _context: _Context) -> pb.ListFragmentsResponse:
        found = Violations()
        namespace, name = memory_name(found, request.namespace, request.memory, self._limits)
        size = validation.page_size(found, request.page_size, self._limits)
        chosen = read_filter(found, request.filter, self._limits, "filter") if request.HasField("filter") else Filter()
        found.check()
        position, _, uid_before = page_tokens.read(request).partition(":")
        after = int(position) if position else -1
        fragments, following, revision, uid = await self._engine.list_fragments(
            namespace, name, chosen, request.forgotten, after, size
        )
        if uid_before and uid_before != uid:
            raise PageTokenInvalid("the page_token is of an earlier memory of that name; start without one")
        messages = _fitting([fragment_message(fragment) for fragment in fragments], self._limits.page_bytes_max)
        if len(messages) < len(fragments):
            following = fragments[len(messages) - 1].position
        return pb.ListFragmentsResponse(
            fragments=messages,
            next_page_token="" if following is None else page_tokens.make(request, f"{following}:{uid}"),
            revision=revision,
            memory_uid=uid,
        )

    # ---- inside
    def _named(self, request: pb.GetMemoryRequest | pb.GetMemoryStatsRequest) -> tuple[str, str]:
        found = Violations()
        named = memory_name(found, request.namespace, request.memory, self._limits)
        found.check()
        return named


def _check_mask(found: Violations, paths: Any) -> None:
    if not paths:
        found.add("update_mask", "is empty: name the fields to set")
    for path in paths:
        if path != "labels" and path.split(".")[0] != "policy":
            found.add("update_mask", f'has {shown(path)}: "labels", "policy" and paths below it can be set')


def _answering(call: Repeatable[Any] | None, response: Any) -> AnswerOf | None:
    return None if call is None else lambda record: call.answer(response(record))


def _created(record: MemoryRecord, created: bool) -> pb.CreateMemoryResponse:
    return pb.CreateMemoryResponse(memory=policies.memory_message(record), created=created)


def _updated(record: MemoryRecord) -> pb.UpdateMemoryResponse:
    return pb.UpdateMemoryResponse(memory=policies.memory_message(record))


def _fitting(messages: list[fragment_pb2.Fragment], bytes_max: int) -> list[fragment_pb2.Fragment]:
    """The first of them that fit together, at least one."""
    size = 0
    for number, message in enumerate(messages):
        size += message.ByteSize()
        if size > bytes_max and number:
            return messages[:number]
    return messages
