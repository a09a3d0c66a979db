"""The entry point: connect to a server, create and find memories, run operations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from memstream.answer_codec import answer_from_wire
from memstream.answer_values import Answer
from memstream.argument_types import Count, Items, KeepaliveSeconds, Seconds, Several
from memstream.arguments import check_arguments, check_constructor, check_methods
from memstream.backoff import Backoff, Retry
from memstream.channel import (
    CLIENT_NAME,
    ChannelSettings,
    Link,
    Tls,
    Token,
    Tracing,
    check_client_name,
    check_target,
    iterate_pages,
    memory_path,
    new_request_id,
)
from memstream.codec import kind_to_wire, query_to_wire, scope_to_wire
from memstream.context import Context, ContextOptions, ContextText, context_to_wire
from memstream.conversations import Conversation
from memstream.errors import MemstreamError
from memstream.listed_codec import iterate_conversations
from memstream.listed_values import ConversationSummary
from memstream.memory import Memory
from memstream.policy import PolicyLike, Profile
from memstream.policy_codec import policy_to_wire
from memstream.recall import RecallStream
from memstream.resource_codec import (
    memory_from_wire,
    namespace_from_wire,
    operation_from_wire,
    server_info_from_wire,
    server_status_from_wire,
)
from memstream.resources import MemoryInfo, Namespace, Operation, ServerInfo, ServerStatus
from memstream.states import State, StateKey, StateScope, delete_state, get_state, get_states
from memstream.transactions import SetState, TransactionResult, TransactionWrite, set_state, write_together
from memstream.transfer import ExportPart, Source, export_parts, import_source
from memstream.v1 import conversation_service_pb2, operation_service_pb2, server_service_pb2, stream_service_pb2
from memstream.v1 import memory_service_pb2 as pb
from memstream.values import Filter, MemoryKind, RecallOptions, Scope, Structured

_LOOK_MIN_S, _LOOK_MAX_S = 0.01, 1.0
"""Polling interval of an operation: the first, and the longest."""


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
    client_name: str = CLIENT_NAME,
    options: Sequence[tuple[str, str | int]] = (),
    tracing: Tracing | None = None,
    any_loop: bool = False,
) -> Client:
    """A client of the server at `target` ("host:port", or any gRPC name); use it with `async with`.

    `token`: bearer token of every call, or a function that returns it (called for each call, must not block), for
    tokens that expire.
    `tls`: None means plain text, which exposes the token to the network.
    `timeout_s`: default timeout of unary calls and queries.
    `retry`: how long streams try to reconnect and calls are retried.
    `keepalive_s`: idle time before a keepalive ping; a server must be configured to allow less than five minutes.
    `receive_bytes_max`: largest message accepted from the server.
    `client_name`: your program, as operators see it (`memstream server`): 1 to 64 visible ASCII characters.
    `options`: further gRPC channel arguments; they override the SDK's.
    `tracing`: adds calls to your traces (`memstream.otel.Tracing()`).
    `any_loop`: every event loop of the process may use the client and what comes from it, also several at once, in any
    thread: its work runs on the background loop of memstream.sync, for about 0.05 ms of CPU a call. For frameworks that
    run your code in loops of their own. A call that is cancelled may have been done; `progress` and `token` functions
    are called on a background thread.

    `connect` itself sends nothing. Without `any_loop` a client belongs to the event loop of its first call; when
    that loop is closed (asyncio.run has returned), the next call reconnects in its own loop. All clients of a process
    must share one event loop at a time, and a process that has a client must not fork.
    """
    check_target(target)
    check_client_name(client_name)
    client = Client(
        ChannelSettings(
            target=target,
            token=token,
            tls=tls,
            timeout_s=timeout_s,
            retry=retry or Retry(),
            keepalive_s=keepalive_s,
            receive_bytes_max=receive_bytes_max,
            client_name=client_name,
            options=options,
            tracing=tracing,
        )
    )
    if not any_loop:
        return client
    from memstream.any_loop import use_anywhere  # it imports this module

    return use_anywhere(client)


@check_constructor
@check_methods
class Client:
    """A connection to a server, created by `connect`. Every method raises a MemstreamError (see memstream.errors)."""

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
        """Closes the connection and every stream on it."""
        await self._link.close()

    async def server_info(self) -> ServerInfo:
        """The server's version, models, capabilities and limits."""
        answer = await self._link.call(self._link.server.GetServerInfo, server_service_pb2.GetServerInfoRequest())
        return server_info_from_wire(answer)

    async def server_status(self) -> ServerStatus:
        """What the server uses and does: RAM, disk, calls, settings. Needs the right `admin` in every namespace."""
        answer = await self._link.call(self._link.server.GetServerStatus, server_service_pb2.GetServerStatusRequest())
        return server_status_from_wire(answer)

    def memory(self, path: str) -> Memory:
        """A handle of the memory `namespace/name`; does not check whether it exists."""
        return Memory(self._link, memory_path(path))

    def conversation(self, path: str) -> Conversation:
        """A handle of the conversation `namespace/name`; does not check whether it exists."""
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
        """Creates the memory `namespace/name`, hybrid by default; unset policy fields take the profile's defaults.

        With `exist_ok`, returns an existing memory if its kind, policy fields and labels equal the ones passed
        (arguments that are not passed are not compared). Else raises MemoryExists, whose `details["differs"]` names
        the differences.
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
        """The memory's kind, policy, labels and revision; same as `memory(path).describe()`."""
        return await self.memory(path).describe()

    async def list_memories(
        self,
        namespace: str,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        page_size: Count = 0,
    ) -> AsyncIterator[MemoryInfo]:
        """A namespace's memories in order of name, optionally only names that begin with `name_prefix`, and only
        memories that have each of `labels` with exactly that value.
        """

        async def fetch(token: str) -> tuple[list[MemoryInfo], str]:
            request = pb.ListMemoriesRequest(
                namespace=namespace,
                name_prefix=name_prefix,
                labels=dict(labels or {}),
                page_size=page_size,
                page_token=token,
            )
            answer = await self._link.call(self._link.memories.ListMemories, request)
            return [memory_from_wire(wire) for wire in answer.memories], answer.next_page_token

        async for memory in iterate_pages(fetch):
            yield memory

    async def list_namespaces(self, *, page_size: Count = 0) -> AsyncIterator[Namespace]:
        """Namespaces that have memories, in order of name."""

        async def fetch(token: str) -> tuple[list[Namespace], str]:
            request = pb.ListNamespacesRequest(page_size=page_size, page_token=token)
            answer = await self._link.call(self._link.memories.ListNamespaces, request)
            return [namespace_from_wire(wire) for wire in answer.namespaces], answer.next_page_token

        async for namespace in iterate_pages(fetch):
            yield namespace

    def list_conversations(
        self,
        namespace: str,
        *,
        name_prefix: str = "",
        labels: Mapping[str, str] | None = None,
        latest_first: bool = False,
        page_size: Count = 0,
    ) -> AsyncIterator[ConversationSummary]:
        """A namespace's conversations in order of name, or the latest changed first; optionally only names that begin
        with `name_prefix`, and only conversations that have each of `labels` with exactly that value.
        """
        return iterate_conversations(self._link, namespace, name_prefix, labels, latest_first, page_size)

    async def get_state(self, namespace: str, scope: StateScope, name: str) -> State:
        """The state document of an app, a user or a session. Raises ConversationNotFound when there is none."""
        return await get_state(self._link, namespace, scope, name)

    async def get_states(self, namespace: str, keys: Items[StateKey]) -> dict[StateKey, State]:
        """State documents in one read, by key: those that exist. Of one moment, unless they are larger than a page
        (2 MiB) together."""
        return await get_states(self._link, namespace, keys)

    async def set_state(
        self,
        namespace: str,
        scope: StateScope,
        name: str,
        document: str,
        *,
        etag: str | None = None,
        absent: bool = False,
    ) -> State:
        """Writes a state document, any JSON as text. Raises EtagMismatch unless `etag` is the present one; with
        `absent`, unless there is none. That of a session creates the conversation if needed.
        """
        return await set_state(self._link, namespace, SetState(scope, name, document, etag, absent))

    async def delete_state(self, namespace: str, scope: StateScope, name: str, *, etag: str = "") -> bool:
        """Deletes a state document, and returns whether there was one. Raises EtagMismatch unless `etag`, if it is not
        empty, is the present one."""
        return await delete_state(self._link, namespace, scope, name, etag)

    async def write_together(
        self, namespace: str, writes: Several[TransactionWrite], *, memory: str = ""
    ) -> tuple[TransactionResult, ...]:
        """Writes messages, conversations, state documents and fragments in one transaction: all or nothing. Returns
        the result of each, in their order.

        memory: the name of the memory of every PutFragment. Raises what the writes raise alone, when the precondition
        of one does not hold.
        """
        return await write_together(self._link, namespace, list(writes), memory)

    async def erase_user(self, namespace: str, user: str) -> int:
        """Deletes a user's state and the conversations with the label `user` of that value; returns how many these
        were. Nothing of them stays in the server's files.
        """
        request = conversation_service_pb2.EraseUserRequest(namespace=namespace, user=user)
        return (await self._link.call(self._link.conversations.EraseUser, request)).conversations

    def recall(self, scopes: Several[str | Scope], *, session: str = "", partial: bool = False) -> RecallStream:
        """A stream of queries over several memories, each answered by one ranking; also of standing queries. See
        `recall_once`; a prefix and labels select the memories that exist when a query is ranked.
        """
        return RecallStream(self._link, None, session, list(map(scope_to_wire, scopes)), partial)

    async def recall_once(
        self,
        scopes: Several[str | Scope],
        what: str | Structured,
        *,
        session: str = "",
        partial: bool = False,
        **options: Unpack[RecallOptions],
    ) -> Answer:
        """Answers one query over several memories by one ranking: `["user/bob", "team/core"]`, or scopes with weights,
        limits, filters, prefixes or labels. See RecallOptions; `min_revision` is given by scope.

        A memory that does not exist or that you may not recall raises MemoryNotFound or PermissionDenied; with
        `partial` it is left out.
        """
        query = query_to_wire("", what, **options)
        query.scopes.extend(map(scope_to_wire, scopes))
        query.partial = partial
        request = stream_service_pb2.RecallOnceRequest(session=session, query=query)
        answer = await self._link.call(self._link.streams.RecallOnce, request, None, options.get("timeout_s"))
        return answer_from_wire([answer.recollections], answer.done)

    async def context(
        self,
        scopes: Several[str | Scope],
        question: str,
        *,
        conversation: str = "",
        blocks: Several[str] = (),
        budget: Count = 0,
        after: ContextText | bytes | None = None,
        partial: bool = False,
        **options: Unpack[ContextOptions],
    ) -> Context:
        """What an agent sends to its model before a turn: blocks, the end of the conversation, memories, the question,
        within `budget` tokens (default 4,000). See docs/context.md.

        `scopes`: the memories, as in `recall_once`. `blocks`: paths such as "agent/joy#persona". `after`: the context
        of the turn before; the text then begins with its text, so that the model's prompt cache reads it, or
        `broken_by` says why not. `partial`: leaves out what does not exist or may not be recalled.
        """
        request = context_to_wire(scopes, question, conversation, blocks, budget, after, partial, options)
        answer = await self._link.call(self._link.contexts.Context, request, None, options.get("timeout_s"))
        return Context(self._link, request, answer)

    async def delete_memory(self, path: str, *, etag: str = "") -> None:
        """Deletes a memory and all of its content permanently."""
        await self.memory(path).delete(etag=etag)

    def export(
        self, namespace: str, memory: str = "", *, include_vectors: bool = False, filter: Filter | None = None
    ) -> AsyncGenerator[ExportPart, None]:
        """Exports a memory, or a namespace with its conversations, as JSON Lines; see docs/export.md.

        Each memory is a snapshot at one revision. The last line has the type "end"; without it the export is truncated.
        With a filter, it has the matching fragments alone: no conversations, and no links to what it leaves out.
        """
        return export_parts(self._link, namespace, memory, include_vectors, filter)

    async def import_(
        self,
        namespace: str,
        source: Source,
        *,
        memory: str = "",
        request_id: str = "",
        validate_only: bool = False,
    ) -> Operation:
        """Uploads an export (a file, or its bytes) and starts the import; wait for it with `finished`.

        An invalid export writes nothing: InvalidRequest names the line. `memory` renames the memory of an export that
        has only one. A repeat with the same `request_id` returns the same operation, or resumes one that failed or was
        cancelled.
        """
        return await import_source(self._link, namespace, source, memory, request_id, validate_only)

    # ---- operations
    async def start_reindex(self, *, embed: bool = False, missing: bool = False) -> Operation:
        """Rebuilds the vector index from stored vectors; with `embed` re-embeds all content, with `missing` what has no
        vector. Recalls keep working.
        """
        request = operation_service_pb2.StartReindexRequest(request_id=new_request_id(), embed=embed, missing=missing)
        return operation_from_wire((await self._link.call(self._link.operations.StartReindex, request)).operation)

    async def start_purge(self, namespace: str = "", memory: str = "") -> Operation:
        """Erases forgotten fragments past their grace period now; an empty name means all."""
        request = operation_service_pb2.StartPurgeRequest(
            request_id=new_request_id(), namespace=namespace, memory=memory
        )
        return operation_from_wire((await self._link.call(self._link.operations.StartPurge, request)).operation)

    async def operations(
        self, namespace: str = "", memory: str = "", *, page_size: Count = 0
    ) -> AsyncIterator[Operation]:
        """Operations, newest first; an empty name means all. The server keeps them for 7 days after their end."""

        async def fetch(token: str) -> tuple[list[Operation], str]:
            request = operation_service_pb2.ListOperationsRequest(
                namespace=namespace, memory=memory, page_size=page_size, page_token=token
            )
            answer = await self._link.call(self._link.operations.ListOperations, request)
            return [operation_from_wire(wire) for wire in answer.operations], answer.next_page_token

        async for operation in iterate_pages(fetch):
            yield operation

    async def operation(self, id: str) -> Operation:
        """The state and progress of an operation."""
        request = operation_service_pb2.GetOperationRequest(id=id)
        return operation_from_wire((await self._link.call(self._link.operations.GetOperation, request)).operation)

    async def cancel_operation(self, id: str) -> Operation:
        """Cancels an operation; completed work is kept."""
        request = operation_service_pb2.CancelOperationRequest(id=id)
        return operation_from_wire((await self._link.call(self._link.operations.CancelOperation, request)).operation)

    async def finished(
        self, operation: Operation | str, progress: Callable[[Operation], None] | None = None
    ) -> Operation:
        """Waits until an operation (or the operation with this id) ends; reconnects as streams do.

        `progress` is called after every poll. Returns the operation, succeeded or cancelled; raises its error if it
        failed.
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
            backoff.mark_opened()
            backoff.mark_progress()
            if progress is not None:
                progress(now)
            if now.end_time is not None:
                if now.error is not None:  # the error of a running operation says what it waits for
                    raise now.error
                return now
            await asyncio.sleep(look_s)
            look_s = min(look_s * 1.5, _LOOK_MAX_S)
