"""The way of every call, around its handler: request id, metrics and span, errors, limits, identity, rights.

A servicer is a plain object. Each rpc that it implements is a coroutine, or an async generator for a streamed response,
named in snake case. An rpc that is in the contract and not implemented is refused with CAPABILITY_MISSING.

Rule 1. The handler of an rpc is wrapped once; what belongs to one call is opened in the call.
Rule 2. Only statuses of errors.py reach clients: the text of a defect stays in the log, under an incident id.
Rule 3. Three exceptions pass unchanged: AbortError (a status is already set), a CancelledError of the call itself (the
client is gone), and gRPC's InternalError, which a read or write raises in that case. A CancelledError from something
that the call awaited is a defect like any other: grpc would leave the client without a status.
Rule 4. An AbortError ends here: gRPC raises it again when the handler returns, and then without the frames that would
keep the call in memory. The HTTP port finds its status in the call.
Rule 5. A delayed refusal is sent after its delay, within the call's deadline; meanwhile it does not count as a call.
Rule 6. A message is read only after the caller is authenticated.
Rule 7. No label and no attribute names a memory, a principal or an id. A request id appears in log lines only.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, aclosing, closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from memstream.v1 import server_service_pb2 as pb
from memstream_server.engine.errors import CapabilityMissing, QuotaExceeded
from memstream_server.engine.runtime.call_context import ACCOUNT
from memstream_server.engine.runtime.turns import find_turns
from memstream_server.rpc.calls import (
    REQUEST_ID,
    Metadata,
    Tracing,
    Untraced,
    bind_request_id,
    is_abandoned,
    release_frames,
    wait_limit_s,
)
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import RoutingMismatch, abort_call, status_of_any
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.request_reader import RequestReader, Requests
from memstream_server.rpc.rpc_table import RPC_RULES, path_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memstream_server.observability import Metrics

ROUTING_KEY = "memstream-memory"
DELAYED_REFUSALS_MAX = 1_024
"""Maximum number of delayed refusals that wait; beyond it refusals are sent at once."""
_NAMESPACE_CHARACTERS = 128
"""Of a namespace that a call is charged to: the account outlives the request, which is not validated yet."""
_OUR_PREFIX = "/memstream."
_Context = grpc.aio.ServicerContext[Any, Any]
_KINDS = {
    (False, False): ("unary_unary", grpc.stream_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.stream_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
"""By (requests, responses) that are streams: the handler's attribute, and the kind of its wrapper. Every wrapper takes
a stream of bytes: else gRPC would read and parse the request of a call before the handler runs."""


class CallAccess(Protocol):
    """The identity and the rights of one call. See rpc/access/authorization.py."""

    async def identify_caller(self, requests: Requests, context: _Context) -> None: ...

    def count_open(self, what: str) -> AbstractContextManager[None]: ...

    def count_client(self, context: _Context, what: str) -> AbstractContextManager[None]: ...

    async def read_request(self, requests: Requests, context: _Context, many: bool) -> Any: ...

    async def recheck(self, context: _Context) -> None: ...

    def end(self) -> None: ...


class Gate(Protocol):
    """Opens the access of calls."""

    def begin_call(self, path: str, metadata: Metadata) -> CallAccess: ...


class Pipeline(grpc.aio.ServerInterceptor):
    """Wraps every handler of the server. Health and reflection are neither limited nor measured."""

    def __init__(
        self,
        drain: Drain,
        limits: RequestLimits,
        gate: Gate,
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.reader = RequestReader(limits)
        self._drain = drain
        self._gate = gate
        self._streams_max = limits.streams_max
        self._calls_max = limits.calls_in_flight_max
        self._calls = 0
        self._delayed_refusals = 0
        self._metrics = metrics
        self._tracing = tracing or Untraced()
        self._wrapped: dict[str, Any] = {}
        """Handlers by path."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The wrapped handler; None for an rpc that the server does not have."""
        path = handler_call_details.method
        if path in self._wrapped:
            return self.wrap_handler(path, None)
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap_handler(path, handler)

    def wrap_handler(self, path: str, handler: Any) -> Any:
        """The handler for a call that has arrived, which may be wrapped already."""
        if (turns := find_turns()) is not None:
            turns.note_arrival()
        wrapped = self._wrapped.get(path)
        if wrapped is None:
            name, make = _KINDS[handler.request_streaming, handler.response_streaming]
            rpc = _Rpc(path, getattr(handler, name), handler.request_deserializer, handler.request_streaming)
            if not handler.response_streaming:
                behaviour: Any = self._wrap_unary(rpc, "calls")
            elif inspect.isasyncgenfunction(rpc.handle):
                behaviour = self._wrap_stream(rpc)
            else:  # a coroutine that writes: health's Watch
                behaviour = self._wrap_unary(rpc, "streams")
            wrapped = self._wrapped[path] = make(behaviour, None, handler.response_serializer)
        return wrapped

    def _wrap_unary(self, rpc: _Rpc, what: str) -> Callable[[Any, _Context], Awaitable[Any]]:
        async def answer(_raw: Any, context: _Context) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            bind_request_id(context, rpc.path, metadata)
            try:
                with self._observe_call(rpc, metadata, context):
                    try:
                        with self._open(rpc, metadata, context, self.count_call) as (requests, access):
                            await access.identify_caller(requests, context)
                            with access.count_open(what), access.count_client(context, what):
                                request = await access.read_request(requests, context, rpc.reads_many)
                                return await rpc.handle(request, context)
                    except grpc.aio.AbortError:
                        raise
                    except (Exception, asyncio.CancelledError) as error:
                        await self.end_call(error, context)
            except grpc.aio.AbortError as error:
                release_frames(error)

        return answer

    def _wrap_stream(self, rpc: _Rpc) -> Callable[[Any, _Context], AsyncIterator[Any]]:
        async def stream(_raw: Any, context: _Context) -> AsyncIterator[Any]:
            metadata = tuple(context.invocation_metadata() or ())
            given = bind_request_id(context, rpc.path, metadata)
            await context.send_initial_metadata(((REQUEST_ID, given),))  # the stream may last for hours
            try:
                with self._observe_call(rpc, metadata, context):
                    try:
                        counted = partial(self.count_stream, rpc.name)
                        with self._open(rpc, metadata, context, counted) as (requests, access):
                            await access.identify_caller(requests, context)
                            with access.count_open("streams"), access.count_client(context, "streams"):
                                request = await access.read_request(requests, context, rpc.reads_many)
                                async with aclosing(rpc.handle(request, context)) as responses:
                                    async for response in responses:
                                        await access.recheck(context)
                                        yield response
                    except grpc.aio.AbortError:
                        raise
                    except (Exception, asyncio.CancelledError) as error:
                        await self.end_call(error, context)
            except grpc.aio.AbortError as error:
                release_frames(error)

        return stream

    @contextmanager
    def _open(
        self, rpc: _Rpc, metadata: Metadata, context: _Context, counted: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[tuple[Requests, CallAccess]]:
        """Counts the call, and opens its requests and its access."""
        requests = Requests(self.reader, rpc.path, rpc.decode, partial(_check_first, metadata))
        access = self._gate.begin_call(rpc.path, metadata)
        # Health and reflection are not limited, and do not delay the end of the server.
        with counted() if rpc.is_ours else nullcontext(), closing(requests.read_from(context)):
            try:
                yield requests, access
            finally:
                access.end()

    @contextmanager
    def _observe_call(self, rpc: _Rpc, metadata: Metadata, context: _Context) -> Iterator[None]:
        """Counts, times and traces the body; every call has a task of its own. It observes the final status of a call,
        whichever layer sets it, and never changes it."""
        if not rpc.is_ours:
            yield
            return
        started_s, code = time.perf_counter(), grpc.StatusCode.OK
        with self._tracing.trace_call(rpc.path, metadata) as span:
            try:
                yield
            except grpc.aio.AbortError:
                code = _status_code(context)
                raise
            except (asyncio.CancelledError, GeneratorExit):
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                span.record_end(code)
                if self._metrics is not None:
                    self._metrics.calls.labels(rpc.name, code.name).inc()
                    self._metrics.call_seconds.labels(rpc.name).observe(time.perf_counter() - started_s)

    @contextmanager
    def count_stream(self, rpc: str) -> Iterator[None]:
        """Counts a stream. Raises QuotaExceeded, ShuttingDown."""
        if self._drain.open_streams >= self._streams_max:
            raise QuotaExceeded(
                f"{self._streams_max} streams are open, more are not allowed",
                quota="streams_max",
                limit=self._streams_max,
            )
        with ExitStack() as stack:
            stack.enter_context(self._drain.count_stream())
            if self._metrics is not None:
                gauge = self._metrics.streams.labels(rpc)
                gauge.inc()
                stack.callback(gauge.dec)
            yield

    @contextmanager
    def count_call(self) -> Iterator[None]:
        """Counts a call with one response. Raises QuotaExceeded."""
        if self._calls >= self._calls_max:
            raise QuotaExceeded(
                f"{self._calls_max} calls are under way, more at once are not allowed: try again soon",
                quota="calls_in_flight_max",
                limit=self._calls_max,
            )
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    async def end_call(self, error: BaseException, context: _Context) -> None:
        """Ends a call with the status of its handler's error. Raises AbortError, CancelledError."""
        if isinstance(error, asyncio.CancelledError) and is_abandoned(context):
            raise error
        if isinstance(error, grpc.aio.InternalError):  # a read or write failed: the client is gone
            raise asyncio.CancelledError from None
        status = status_of_any(error)
        release_frames(error)
        await self.wait_refusal_delay(error, context)
        await abort_call(context, status)

    async def wait_refusal_delay(self, error: BaseException, context: _Context) -> None:
        """Waits for the delay of a refusal, at most until shortly before the deadline."""
        if (
            not isinstance(error, QuotaExceeded)
            or not error.refusal_delay_s
            or self._delayed_refusals >= DELAYED_REFUSALS_MAX
        ):
            return
        remaining_s: float | None = context.time_remaining()
        at_most_s = error.refusal_delay_s if remaining_s is None else wait_limit_s(remaining_s)
        self._delayed_refusals += 1
        try:
            await asyncio.sleep(min(error.refusal_delay_s, at_most_s))
        finally:
            self._delayed_refusals -= 1


class _Rpc:
    """What the calls of one rpc share."""

    def __init__(self, path: str, handle: Callable[..., Any], decode: Callable[[bytes], Message], many: bool) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.handle = handle
        self.decode = decode
        self.reads_many = many
        """Whether its requests are a stream."""
        self.is_ours = path.startswith(_OUR_PREFIX)


def _check_first(metadata: Metadata, request: Message) -> None:
    """Charges the call to the namespace that its first message names, and checks its routing. Raises
    RoutingMismatch."""
    account = ACCOUNT.get()
    if account is not None:
        ACCOUNT.set((account[0], _namespace_of(request)))
    for key, value in metadata:
        if key == ROUTING_KEY:
            given = value if isinstance(value, str) else value.decode(errors="replace")
            named = _memory_of(request)
            if named is not None and given != named:
                raise RoutingMismatch(f"the metadata {ROUTING_KEY} is {given[:300]!a}, the request names {named!r}")


def _namespace_of(request: Any) -> str:
    """The namespace that a request names, as it was sent; empty if it names none."""
    fields = request.DESCRIPTOR.fields_by_name
    if "open" in fields:
        request, fields = request.open, fields["open"].message_type.fields_by_name
    if "memory" in fields and fields["memory"].message_type is not None:
        request, fields = request.memory, fields["memory"].message_type.fields_by_name
    return str(request.namespace)[:_NAMESPACE_CHARACTERS] if "namespace" in fields else ""


def _memory_of(request: Any) -> str | None:
    """Returns "namespace/memory" of the request, or None. A stream names it in `open`."""
    fields = request.DESCRIPTOR.fields_by_name
    if "open" in fields:
        return _memory_of(request.open) if request.HasField("open") else None
    if "memory" not in fields:
        return None
    if fields["memory"].message_type is not None:
        return f"{request.memory.namespace}/{request.memory.name}"
    return f"{request.namespace}/{request.memory}"


def _status_code(context: _Context) -> grpc.StatusCode:
    code: object = context.code()  # an int, despite its annotation
    if isinstance(code, grpc.StatusCode):
        return code
    return next((each for each in grpc.StatusCode if each.value[0] == code), grpc.StatusCode.UNKNOWN)


Services = Iterable[tuple[ServiceDescriptor, object]]


Wrap = Callable[[MethodDescriptor, Callable[..., Any]], Callable[..., Any]]


Handlers = dict[str, "grpc.RpcMethodHandler[Any, Any]"]


def make_handlers(services: Services, wrap: Wrap | None = None) -> Handlers:
    """The handler of every rpc, by path. `wrap` may wrap a handler; a wrapped handler may return bytes."""
    return {
        path_of(method): _make_handler(method, servicer, wrap)
        for service, servicer in services
        for method in service.methods
    }


class Registered(grpc.GenericRpcHandler):
    """Finds the handlers for the gRPC server."""

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a path; None for an unknown one."""
        return self._handlers.get(handler_call_details.method)


def list_capabilities(services: Services) -> list[pb.Capability.ValueType]:
    """Optional capabilities of which the server implements every rpc."""
    have: set[str] = set()
    missing: set[str] = set()
    for service, servicer in services:
        for method in service.methods:
            if capability := RPC_RULES[path_of(method)].capability:
                (have if hasattr(servicer, method_name(method)) else missing).add(capability)
    return sorted(pb.Capability.Value(f"CAPABILITY_{each}") for each in have - missing)


def method_name(method: MethodDescriptor) -> str:
    """The servicer's method: `RecallOnce` is `recall_once`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def _make_handler(method: MethodDescriptor, servicer: object, wrap: Wrap | None) -> grpc.RpcMethodHandler[Any, Any]:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    behaviour = getattr(servicer, method_name(method), None) or _refusing_handler(method)
    if wrap is not None:
        behaviour = wrap(method, behaviour)
    make = kinds[method.client_streaming, method.server_streaming]
    return make(behaviour, GetMessageClass(method.input_type).FromString, _serialize_response)


def _serialize_response(message: Any) -> bytes:
    data: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return data


def _refusing_handler(method: MethodDescriptor) -> Any:
    capability = RPC_RULES[path_of(method)].capability
    text = f"this server does not implement {method.full_name}"

    async def answer(_request: object, _context: object) -> None:
        raise CapabilityMissing(text, capability=capability)

    async def stream(_request: object, _context: object) -> AsyncIterator[None]:
        if capability:  # always true; the `yield` makes this a generator
            raise CapabilityMissing(text, capability=capability)
        yield None

    return stream if method.server_streaming else answer
