"""Forwards calls to the server that owns their memory, where several servers share a database.

Rule 1. A call goes to the current owner of its memory; if a memory has no owner, the server that gets the call takes
it.
Rule 2. A forwarded call is not forwarded again: if it does not reach the owner it fails, and the server that forwarded
it looks the owner up again.
Rule 3. Messages, deadline, cancellation, metadata and status are forwarded unchanged. Calls that cannot have begun are
retried; for others the client decides whether to retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from memstream.v1.stream_service_pb2 import RecallOnceRequest
from memstream_server.engine.errors import (
    EngineError,
    JournalUnavailable,
    LeaseLost,
    MemoryNotFound,
    OwnedElsewhere,
    OwnerUnreachable,
    RevisionNotReached,
)
from memstream_server.rpc.calls import REQUEST_ID, Tracing, Untraced, current_request_id, is_abandoned, wait_limit_s
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import PUSHBACK_KEY, STATUS_KEY, OwnerUntrusted
from memstream_server.rpc.rpc_table import RPC_RULES, names_memory, path_of
from memstream_server.rpc.wire.scopes import only_memory

if TYPE_CHECKING:
    from memstream_server.engine.runtime.ownership import Ownership
    from memstream_server.ports.processes import Owner
    from memstream_server.rpc.access.peers import Peers

log = structlog.get_logger(__name__)

MARK = "memstream-forwarded"
"""Metadata of a forwarded call."""
CONNECT_S = 2.0
"""Timeout of a connection to the owner's server."""
RETRY_S = 15.0
"""How long a unary call that has not begun is retried, at most until shortly before its deadline."""
CALLS_OF_CONNECTION = 100
"""Calls after which another connection to the owner is opened: a server limits the streams of a connection."""
RETRY_PAUSE_S = 0.1
_NOT_OURS = ("grpc-", "user-agent", ":", "te", "content-type", REQUEST_ID, "traceparent", "tracestate")
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # grpc.keepalive_timeout_ms has no effect in gRPC core
    ("grpc.enable_retries", 0),  # the call may have begun, and only the client may repeat it
    ("grpc.use_local_subchannel_pool", 1),  # a new channel gets a new connection, whatever the state of the last one
]
_Context = grpc.aio.ServicerContext[Any, Any]
_Call = Any


@dataclass(slots=True, eq=False)
class _ForwardedCall:
    """A call that was sent to an owner."""

    owner: int
    channel: grpc.aio.Channel
    call: _Call


@dataclass(slots=True, eq=False)
class _Retries:
    """The retries of a call that has not begun."""

    until_s: float
    tries: int = field(default=0)

    async def is_exhausted(self) -> bool:
        """Waits until the next try is due, or returns True if the time is over."""
        loop = asyncio.get_running_loop()
        self.tries += 1
        pause_s = min(1.0, RETRY_PAUSE_S * self.tries)
        if loop.time() + pause_s >= self.until_s:
            return True
        await asyncio.sleep(pause_s)
        return False


class Forwarding:
    """Wraps handlers. A task watches the owners of forwarded calls; `close` ends it and closes the channels."""

    def __init__(
        self, ownership: Ownership, drain: Drain, poll_interval_s: float, peers: Peers, tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing or Untraced()
        self._ownership = ownership
        self._peers = peers
        self._drain = drain
        self._poll_interval_s = poll_interval_s
        self._channels: dict[tuple[str, int], grpc.aio.Channel] = {}
        """By address and number of the connection to it."""
        self._forwarded: set[_ForwardedCall] = set()
        self._watch_task: asyncio.Task[None] | None = None

    def wrap_handler(self, method: MethodDescriptor, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        """The handler of an rpc, or one that first looks up the owner of the memory."""
        if not self._ownership.shared or RPC_RULES[path_of(method)].served_anywhere or not names_memory(method):
            return behaviour
        return self._wrap_stream(method, behaviour) if method.server_streaming else self._wrap_unary(method, behaviour)

    async def close(self) -> None:
        """Ends the forwarded calls."""
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        for channel in [*self._channels.values()]:
            await channel.close()
        self._channels.clear()

    # ---- owners
    async def _find_owner(self, request: object, context: _Context) -> Owner | None:
        """The server to forward the call to; None: this server handles it."""
        named = _memory_of(request)
        if named is None:
            return None
        owner = await self._ownership.find_owner(*named)
        if owner is None:
            return None
        if _is_marked(context):
            raise OwnedElsewhere("another server owns the memory, and the call was passed on already")
        if not owner.address:
            raise OwnerUnreachable("the server that owns the memory has not said yet where it is")
        return owner

    # ---- calls with one response
    def _wrap_unary(self, method: MethodDescriptor, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: Any, context: _Context) -> Any:
            requests, first = None, request
            if method.client_streaming:
                requests, first = request, await anext(request, None)
            wait = _Retries(_deadline_s(context))
            while True:
                try:
                    owner = await self._find_owner(first, context)
                    if owner is None:
                        return await behaviour(request if requests is None else _prepend(first, requests), context)
                    return await self._forward_unary(method, owner, first, requests, context)
                except (OwnedElsewhere, OwnerUnreachable, LeaseLost) as error:
                    # The memory is moving, or its owner has just ended: another server will own it in a moment.
                    passes = requests is None and not _is_marked(context) and _is_retryable(error)
                    if not passes or await wait.is_exhausted():
                        raise

        return answer

    async def _forward_unary(
        self, method: MethodDescriptor, owner: Owner, first: Message, requests: Any, context: _Context
    ) -> bytes:
        responses = self._forward(method, owner, first, requests, context)
        async with contextlib.aclosing(responses):
            async for response in responses:
                only: bytes = response
                return only
        raise OwnerUnreachable("the server that owns the memory gave no answer")

    # ---- calls with streamed responses
    def _wrap_stream(self, method: MethodDescriptor, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            requests, first = None, request
            if method.client_streaming:
                requests, first = request, await anext(request, None)
            owner = await self._find_owner(first, context)
            if owner is None:
                answers = behaviour(request if requests is None else _prepend(first, requests), context)
            else:
                answers = self._add_going_away(method, self._forward(method, owner, first, requests, context))
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield answer

        return stream

    async def _add_going_away(self, method: MethodDescriptor, answers: AsyncGenerator[bytes, None]) -> Any:
        """The owner's responses; adds `going_away` if this server shuts down."""
        drained = asyncio.Event()
        waiting: asyncio.Task[Any] = asyncio.create_task(drained.wait())
        following: asyncio.Task[bytes | None] = asyncio.create_task(_next_or_none(answers))
        told = False
        try:
            with self._drain.notify_on_drain(drained.set):
                while True:
                    await asyncio.wait({following, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    if following.done():
                        if (answer := following.result()) is None:
                            return
                        following = asyncio.create_task(_next_or_none(answers))
                        yield answer
                    elif told:
                        raise self._drain.shutdown_error()
                    else:
                        told, waiting = True, asyncio.create_task(_sleep(self._drain.grace_s))
                        if "going_away" in method.output_type.fields_by_name:
                            yield GetMessageClass(method.output_type)(going_away=self._drain.going_away_message())
        finally:
            following.cancel()
            waiting.cancel()
            await asyncio.gather(following, waiting, return_exceptions=True)
            await answers.aclose()

    # ---- questions of this server's own
    async def find_owner(self, namespace: str, name: str) -> Owner | None:
        """The other server that owns a memory; None: this one answers for it."""
        return await self._ownership.find_owner(namespace, name)

    async def ask(self, path: str, owner: Owner, request: Message, context: _Context) -> bytes:
        """The owner's response to a request for the caller, shortly before the deadline of the call at the latest.

        Raises OwnerUnreachable, MemoryNotFound, RevisionNotReached.
        """
        remaining_s: float | None = context.time_remaining()
        limit_s = None if remaining_s is None else wait_limit_s(remaining_s)
        if not owner.address:
            raise OwnerUnreachable("the server that owns the memory has not said yet where it is")
        try:
            async with contextlib.aclosing(self._exchange(path, owner, request, None, context, limit_s)) as responses:
                only: bytes | None = await anext(responses, None)
        except grpc.aio.AioRpcError as error:
            raise _error_of_owner(error) from None
        if only is not None:
            return only
        raise OwnerUnreachable("the server that owns the memory gave no answer")

    # ---- forwarding
    async def _forward(
        self, method: MethodDescriptor, owner: Owner, first: Message, requests: Any, context: _Context
    ) -> Any:
        """The owner's responses, as bytes. Raises OwnerUnreachable; ends the call with the owner's status."""
        limit_s = context.time_remaining()
        responses = self._exchange(path_of(method), owner, first, requests, context, limit_s)
        try:
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response
        except grpc.aio.AioRpcError as error:
            await _relay_status(error, context)

    async def _exchange(
        self, path: str, owner: Owner, first: Message, requests: Any, context: _Context, limit_s: float | None
    ) -> AsyncGenerator[Any, None]:
        """The owner's responses, as bytes. Raises OwnerUnreachable, AioRpcError."""
        channel = await self._connected_channel(owner)
        metadata = (
            *self._peers.forwarded_metadata(_forwarded_metadata(context), path),
            *self._tracing.current_metadata(),
        )
        call: _Call
        if requests is None:
            make: Any = channel.unary_stream(path, request_serializer=_serialize)
            call = make(first, timeout=limit_s, metadata=metadata)
        else:
            call = channel.stream_stream(path, request_serializer=_serialize)(timeout=limit_s, metadata=metadata)
        passage = _ForwardedCall(owner.number, channel, call)
        self._forwarded.add(passage)
        self._start_watching()
        pumping = None if requests is None else asyncio.create_task(_send_requests(call, first, requests))
        try:
            async for response in call:
                yield response
        except asyncio.CancelledError:
            if pumping is not None and pumping.done() and not pumping.cancelled() and pumping.exception() is not None:
                raise pumping.exception() from None  # type: ignore[misc]  # checked above
            if is_abandoned(context):
                raise
            # Cancelled by _watch_owners or by `close`.
            text = "the server that owned the memory ended or lost it: what was asked may have been done"
            raise OwnerUnreachable(text, begun="yes") from None
        finally:
            self._forwarded.discard(passage)
            call.cancel()
            if pumping is not None:
                pumping.cancel()
                await asyncio.gather(pumping, return_exceptions=True)
            await self._close_unused(channel)

    async def _connected_channel(self, owner: Owner) -> grpc.aio.Channel:
        """A connected channel. Raises OwnerUnreachable, at once if nothing listens at the address: a server that drains
        releases its memories at the same moment, and the caller looks the owner up again."""
        under_way = sum(each.owner == owner.number for each in self._forwarded)
        key = (owner.address, under_way // CALLS_OF_CONNECTION)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = self._peers.open_channel(owner.address, _OPTIONS)
        problem = ""
        try:
            async with asyncio.timeout(CONNECT_S):
                connected = await _try_connect(channel)
            if not connected:
                problem = await self._peers.certificate_problem(channel, owner.address)
        except (TimeoutError, grpc.aio.UsageError):  # another call has closed it
            connected = False
        if connected:
            return channel
        if self._channels.get(key) is channel:
            del self._channels[key]
        await self._close_unused(channel)
        text = "the server that owns the memory cannot be reached"
        if problem:
            raise OwnerUntrusted(f"{text}: {problem}")
        raise OwnerUnreachable(text, retry_after_s=0.2)

    async def _close_unused(self, channel: grpc.aio.Channel) -> None:
        """Closes a channel that gets no further calls, once its last call has ended. Closing earlier would end calls,
        and a server that drains accepts no new connection but completes its open calls."""
        if channel not in self._channels.values() and all(each.channel is not channel for each in self._forwarded):
            await channel.close()

    def _start_watching(self) -> None:
        if self._watch_task is None or self._watch_task.done():
            self._watch_task = asyncio.create_task(self._watch_owners(), context=contextvars.Context())

    async def _watch_owners(self) -> None:
        """Cancels the calls to a server whose lease has expired: a hung server may keep its connections open."""
        while self._forwarded:
            await asyncio.sleep(self._poll_interval_s)
            try:
                living = await self._ownership.list_living()
            except JournalUnavailable as error:
                log.info("owner_lookup_failed", error=error)
                continue
            for passage in [*self._forwarded]:
                if passage.owner not in living:
                    passage.call.cancel()


async def _try_connect(channel: grpc.aio.Channel) -> bool:
    """Whether the channel's next connection attempt succeeds; the channel makes later attempts only after a second or
    more."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
    return True


async def _next_or_none(answers: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(answers, None)


async def _sleep(seconds: float) -> bool:
    await asyncio.sleep(seconds)
    return True


async def _send_requests(call: _Call, first: Message | None, requests: AsyncIterator[Message]) -> None:
    """Forwards requests to the owner. An invalid request ends the call; a broken call ends its reader."""
    try:
        if first is not None:
            await call.write(first)
        async for request in requests:
            await call.write(request)
        await call.done_writing()
    except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        return
    except EngineError:
        call.cancel()
        raise


async def _relay_status(error: grpc.aio.AioRpcError, context: _Context) -> None:
    """Ends the call with the owner's status. Raises OwnerUnreachable if the owner sent none."""
    given = error.trailing_metadata() or ()
    rich = [(key, value) for key, value in given if key == STATUS_KEY and isinstance(value, bytes)]
    # CANCELLED is the status of a call that is left when the owner's grace ends; a call that the client cancels does
    # not get here.
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        if not rich:
            text = "the server that owns the memory ended, or the connection to it: what was asked may have been done"
            raise OwnerUnreachable(text, begun="yes") from None
        info = _error_info(rich[0][1])
        if info.reason == "OWNER_UNAVAILABLE" and "begun" not in info.metadata:
            raise OwnedElsewhere(error.details() or "the memory has moved") from None
    asked = [(key, value) for key, value in given if key == PUSHBACK_KEY]
    trailing = (*(context.trailing_metadata() or ()), *asked, *rich)
    await context.abort(error.code(), error.details() or "", trailing_metadata=trailing)


def _error_of_owner(error: grpc.aio.AioRpcError) -> EngineError:
    details = error.details() or "it refused"
    rich = [value for key, value in error.trailing_metadata() or () if key == STATUS_KEY]
    info = next((_error_info(each) for each in rich if isinstance(each, bytes)), error_details_pb2.ErrorInfo())
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return MemoryNotFound(details, namespace=info.metadata["namespace"], memory=info.metadata["memory"])
    if info.reason == RevisionNotReached.reason:
        return RevisionNotReached(details, revision=info.metadata["revision"])
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return OwnerUnreachable("the server that owns the memory gave no answer in time")
    return OwnerUnreachable(f"the server that owns the memory gave no answer: {details}")


def _error_info(status: bytes) -> error_details_pb2.ErrorInfo:
    info = error_details_pb2.ErrorInfo()
    for detail in status_pb2.Status.FromString(status).details:
        if detail.Unpack(info):
            break
    return info


def _is_retryable(error: EngineError) -> bool:
    """Whether to retry: the call has changed nothing, and a later try may succeed."""
    return "begun" not in error.details and not isinstance(error, OwnerUntrusted)


def _deadline_s(context: _Context) -> float:
    remaining: float | None = context.time_remaining()
    return asyncio.get_running_loop().time() + (RETRY_S if remaining is None else min(RETRY_S, wait_limit_s(remaining)))


def _is_marked(context: _Context) -> bool:
    return any(key == MARK for key, _ in context.invocation_metadata() or ())


def _forwarded_metadata(context: _Context) -> tuple[tuple[str, str | bytes], ...]:
    given = [(key, value) for key, value in context.invocation_metadata() or () if not key.startswith(_NOT_OURS)]
    return (*given, (MARK, "1"), (REQUEST_ID, current_request_id()))


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


async def _prepend(first: Message | None, rest: AsyncIterator[Message]) -> AsyncIterator[Message]:
    if first is not None:
        yield first
    async for message in rest:
        yield message


def _memory_of(request: Any) -> tuple[str, str] | None:
    """(namespace, name) of the request's memory; None if it names none, which its handler refuses."""
    if request is None:
        return None
    fields = request.DESCRIPTOR.fields_by_name
    if isinstance(request, RecallOnceRequest) and request.query.scopes:
        return only_memory(request.query)
    if "open" in fields:
        return _memory_of(request.open) if request.HasField("open") else None
    memory = getattr(request, "memory", "")
    if not isinstance(memory, str):
        return memory.namespace, memory.name
    return (request.namespace, memory) if memory else None
