"""The way in: connect to a server, make and find memories."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from memstream.argument_types import Count, KeepaliveSeconds, Seconds
from memstream.arguments import check_arguments, check_methods
from memstream.backoff import Backoff, Retry
from memstream.channel import ChannelSettings, Link, Tls, Token, Tracing, memory_path, new_request_id, pages
from memstream.codec import kind_to_wire
from memstream.conversations import Conversation
from memstream.errors import MemstreamError
from memstream.memory import Memory
from memstream.policy import PolicyLike, Profile
from memstream.policy_codec import policy_to_wire
from memstream.resource_codec import memory_from_wire, operation_from_wire, server_info_from_wire
from memstream.resources import MemoryInfo, Namespace, Operation, ServerInfo
from memstream.transfer import ExportPart, Source, exported, imported
from memstream.v1 import memory_service_pb2 as pb
from memstream.v1 import operation_service_pb2, server_service_pb2
from memstream.values import MemoryKind

_LOOK_MIN_S, _LOOK_MAX_S = 0.05, 1.0
"""How often a piece of long work is asked after: first and last."""


@check_arguments
def connect(
    target: str,
    *,
    token: Token | None = None,
    tls: Tls | None = None,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    keepalive_s: KeepaliveSeconds = 60.0,
    receive_bytes_max: Count = 64 << 20,
    options: Sequence[tuple[str, str | int]] = (),
    tracing: Tracing | None = None,
) -> Client:
    """A client of the server at `target` ("host:port", or any gRPC name); use it with `async with`.

    `token` is sent as a bearer token with every call; a function is asked for it each time, and must not block: that is
    for tokens that expire. `tls` None is plain text: whoever is on the way reads the token. `timeout_s` bounds every
    unary call and query that gives no limit of its own; `retry` says how long streams try to reconnect; `keepalive_s`
    is the time after which a silent connection is probed (a server that is not told to allow it refuses less than five
    minutes); `receive_bytes_max` bounds one message of the server; `options` are further gRPC channel arguments and
    win; `tracing` makes calls part of your traces (`memstream.otel.Tracing()`).
    Nothing is sent yet. A client belongs to the event loop of its first call; when that loop is closed (asyncio.run has
    returned), the next call connects anew in its own. All clients of a process belong in one event loop at a time, and
    a process that has one must not fork.
    """
    return Client(
        ChannelSettings(
            target=target,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retry=retry or Retry(),
            keepalive_s=keepalive_s,
            receive_bytes_max=receive_bytes_max,
            options=options,
            tracing=tracing,
        )
    )


@check_methods
class Client:
    """A connection to a server; made by `connect`. Every method raises a MemstreamError (see memstream.errors)."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._link = Link(settings)

    async def __aenter__(self) -> Self:
        self._link.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection and every stream on it."""
        await self._link.close()

    async def server_info(self) -> ServerInfo:
        """What the server is and can do."""
        answer = await self._link.call(self._link.server.GetServerInfo, server_service_pb2.GetServerInfoRequest())
        return server_info_from_wire(answer)

    def memory(self, path: str) -> Memory:
        """The memory `namespace/name`, without asking whether it exists."""
        return Memory(self._link, memory_path(path))

    def conversation(self, path: str) -> Conversation:
        """The conversation `namespace/name`, without asking whether it exists."""
        return Conversation(self._link, memory_path(path, "conversation"))

    async def create_memory(
        self,
        path: str,
        *,
        kind: MemoryKind | None = None,
        profile: Profile | None = None,
        policy: PolicyLike | None = None,
        labels: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> Memory:
        """Makes the memory `namespace/name`, hybrid by default; what the policy leaves open is the profile's.

        With `exist_ok` an existing one is taken, if it has the kind, policy fields and labels that are given here; what
        is not given is not compared. Else MemoryExists is raised; its `details["differs"]` names what differs.
        """
        where = memory_path(path)
        wire = policy_to_wire(policy)
        if profile is not None:
            wire.MergeFrom(policy_to_wire({"profile": profile}))
        request = pb.CreateMemoryRequest(
            namespace=where.namespace,
            memory=where.name,
            kind=kind_to_wire(kind),
            policy=wire,
            labels=dict(labels or {}),
            exist_ok=exist_ok,
            request_id=new_request_id(),
        )
        await self._link.call(self._link.memories.CreateMemory, request, where)
        return Memory(self._link, where)

    async def get_memory(self, path: str) -> MemoryInfo:
        """The memory as the server has it; `memory(path).describe()` by another name."""
        return await self.memory(path).describe()

    async def list_memories(
        self, namespace: str, *, name_prefix: str = "", page_size: Count = 0
    ) -> AsyncIterator[MemoryInfo]:
        """A namespace's memories by name: those whose name begins with `name_prefix`."""

        async def fetch(token: str) -> tuple[list[MemoryInfo], str]:
            request = pb.ListMemoriesRequest(
                namespace=namespace, name_prefix=name_prefix, page_size=page_size, page_token=token
            )
            answer = await self._link.call(self._link.memories.ListMemories, request)
            return [memory_from_wire(wire) for wire in answer.memories], answer.next_page_token

        async for memory in pages(fetch):
            yield memory

    async def list_namespaces(self, *, page_size: Count = 0) -> AsyncIterator[Namespace]:
        """Namespaces that have memories, by name."""

        async def fetch(token: str) -> tuple[list[Namespace], str]:
            request = pb.ListNamespacesRequest(page_size=page_size, page_token=token)
            answer = await self._link.call(self._link.memories.ListNamespaces, request)
            return [Namespace(wire.name, wire.memories) for wire in answer.namespaces], answer.next_page_token

        async for namespace in pages(fetch):
            yield namespace

    async def delete_memory(self, path: str, *, etag: str = "") -> None:
        """Deletes a memory and all of its content for good."""
        await self.memory(path).delete(etag=etag)

    def export(
        self, namespace: str, memory: str = "", *, include_vectors: bool = False
    ) -> AsyncGenerator[ExportPart, None]:
        """Lines of JSON with all of a memory, or of a namespace with its conversations; see docs/export.md.

        Each memory is of one revision. The last line is of type "end": without it the export was cut.
        """
        return exported(self._link, namespace, memory, include_vectors)

    async def import_(
        self,
        namespace: str,
        source: Source,
        *,
        memory: str = "",
        request_id: str = "",
        validate_only: bool = False,
    ) -> Operation:
        """Sends an export (a file, or its bytes) to be imported; wait with `finished`.

        Nothing is written when anything in it is wrong: InvalidRequest says in which line. `memory` gives the one
        memory of an export another name. The same `request_id` again returns the same operation, or goes on where
        one that failed or was cancelled stopped.
        """
        return await imported(self._link, namespace, source, memory, request_id, validate_only)

    # ---- long work
    async def start_reindex(self, *, embed: bool = False) -> Operation:
        """Rebuilds the vector index from stored vectors, or embeds everything anew, while recalls go on."""
        request = operation_service_pb2.StartReindexRequest(request_id=new_request_id(), embed=embed)
        return operation_from_wire((await self._link.call(self._link.operations.StartReindex, request)).operation)

    async def start_purge(self, namespace: str = "", memory: str = "") -> Operation:
        """Erases what was forgotten and whose grace has passed, now instead of in time; empty names do not restrict."""
        request = operation_service_pb2.StartPurgeRequest(
            request_id=new_request_id(), namespace=namespace, memory=memory
        )
        return operation_from_wire((await self._link.call(self._link.operations.StartPurge, request)).operation)

    async def operations(
        self, namespace: str = "", memory: str = "", *, page_size: Count = 0
    ) -> AsyncIterator[Operation]:
        """Pieces of long work, the newest first; empty names do not restrict. They are kept 7 days after their end."""

        async def fetch(token: str) -> tuple[list[Operation], str]:
            request = operation_service_pb2.ListOperationsRequest(
                namespace=namespace, memory=memory, page_size=page_size, page_token=token
            )
            answer = await self._link.call(self._link.operations.ListOperations, request)
            return [operation_from_wire(wire) for wire in answer.operations], answer.next_page_token

        async for operation in pages(fetch):
            yield operation

    async def operation(self, id: str) -> Operation:
        """How far a piece of long work is."""
        request = operation_service_pb2.GetOperationRequest(id=id)
        return operation_from_wire((await self._link.call(self._link.operations.GetOperation, request)).operation)

    async def cancel_operation(self, id: str) -> Operation:
        """Asks a piece of long work to end; what it has done stays done."""
        request = operation_service_pb2.CancelOperationRequest(id=id)
        return operation_from_wire((await self._link.call(self._link.operations.CancelOperation, request)).operation)

    async def finished(
        self, operation: Operation | str, progress: Callable[[Operation], None] | None = None
    ) -> Operation:
        """Waits for the end of a piece of long work (or its id); reconnects as streams do.

        `progress` is called with every look at it. Returns it succeeded or cancelled; raises its error if it failed.
        """
        self._link.check_open()
        id = operation if isinstance(operation, str) else operation.id
        backoff = Backoff(self._settings.retry, asyncio.get_running_loop().time)
        look_s = _LOOK_MIN_S
        while True:
            try:
                now = await self.operation(id)
            except MemstreamError as error:
                if (delay_s := backoff.delay_s(error)) is None:
                    raise
                await asyncio.sleep(delay_s)
                continue
            backoff.opened()
            backoff.progressed()
            if progress is not None:
                progress(now)
            if now.end_time is not None:
                if now.error is not None:  # of one at work it is what it waits for
                    raise now.error
                return now
            await asyncio.sleep(look_s)
            look_s = min(look_s * 1.5, _LOOK_MAX_S)
