"""The gRPC channel: its configuration, the metadata of every call, retries, and the translation of errors."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from grpc.aio import StreamStreamCall, UnaryStreamCall

from memstream.argument_types import Secret, quote_text
from memstream.arguments import check_fields, check_methods
from memstream.backoff import Backoff, Retry
from memstream.connections import Connections
from memstream.errors import DeadlineExceeded, EventLoopMismatch, MemstreamError, StreamClosed, Unavailable
from memstream.names import name_problem
from memstream.status import task_is_cancelled, translate_error
from memstream.v1.block_service_pb2_grpc import BlockServiceStub
from memstream.v1.context_service_pb2_grpc import ContextServiceStub
from memstream.v1.conversation_service_pb2_grpc import ConversationServiceStub
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.operation_service_pb2_grpc import OperationServiceStub
from memstream.v1.server_service_pb2_grpc import ServerServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream.wiretypes import encoding, invalid_field

if TYPE_CHECKING:  # these exist only in the stubs' declarations
    from memstream.v1.block_service_pb2_grpc import BlockServiceAsyncStub
    from memstream.v1.context_service_pb2_grpc import ContextServiceAsyncStub
    from memstream.v1.conversation_service_pb2_grpc import ConversationServiceAsyncStub
    from memstream.v1.memory_service_pb2_grpc import MemoryServiceAsyncStub
    from memstream.v1.operation_service_pb2_grpc import OperationServiceAsyncStub
    from memstream.v1.server_service_pb2_grpc import ServerServiceAsyncStub
    from memstream.v1.stream_service_pb2_grpc import StreamServiceAsyncStub

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Message = TypeVar("Message")
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Token: TypeAlias = Annotated[str | Callable[[], str], Secret]
"""A bearer token, or a function that returns the token for the next call."""

_PING_TIMEOUT_MS = 20_000
_RECONNECT_MS = (100, 5_000)
"""Delay before the first attempt to reconnect, and the longest: soon after a restart. gRPC's own are 1 s and 2 min."""
_TOKEN = re.compile(r"[\x21-\x7e]+")
# CANCELLED comes from a server whose shutdown grace ended during the call; a caller's own cancellation is not retried.
_REPEATED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


class Unary(Protocol[Request, Response]):
    """The signature of the stubs' unary methods."""

    def __call__(
        self, request: Request, /, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Awaitable[Response]: ...


class Tracing(Protocol):
    """Adds calls to the program's traces; `memstream.otel.Tracing` implements it."""

    def call(self, name: str) -> AbstractContextManager[None]:
        """A span around a call of this name, a connection of a stream, or a query on one."""
        ...

    def memory(
        self, request: Any, memory: MemoryPath | None = None, session: str = ""
    ) -> AbstractContextManager[Callable[[Any], None]]:
        """A span around what a message does to a memory; its value takes the answer."""
        ...

    def carried(self) -> Metadata:
        """Metadata that propagates the current span to the server."""
        ...


class OwnServer(Protocol):
    """A server that lives as long as its clients; `memstream.local_server.LocalServer` implements it."""

    def check_process(self) -> None:
        """Raises StreamClosed in a process that was forked after the client was made."""
        ...

    async def revive(self) -> None:
        """Starts the server again if it has ended. Raises LocalServerFailed."""
        ...

    async def release(self) -> None:
        """Ends the use of the server; if this was the last use, waits until the server has ended. Idempotent."""
        ...


@check_methods
@check_fields
@dataclass(frozen=True, slots=True)
class Tls:
    """TLS material as PEM bytes: roots None uses the system's, key and chain enable mutual TLS."""

    root_certificates: Annotated[bytes, Secret] | None = field(default=None, repr=False)
    private_key: Annotated[bytes, Secret] | None = field(default=None, repr=False)
    certificate_chain: Annotated[bytes, Secret] | None = field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def of_files(
        cls,
        roots: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> Tls:
        """Reads PEM files. Raises InvalidArgument for a file that cannot be read or is not PEM, and for a key or
        certificate without the other."""
        if (certificate is None) != (key is None):
            raise invalid_field(
                "certificate" if certificate is None else "key", "a certificate and its key go together"
            )
        return cls(
            _read_file("roots", roots), _read_file("key", key), _read_file("certificate", certificate), server_name
        )


def _read_file(argument: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise invalid_field(
            argument, f"cannot read {str(path)!a}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if b"-----BEGIN " not in content:
        raise invalid_field(argument, f"{str(path)!a} is not PEM: it has no line -----BEGIN ...-----")
    return content


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """The namespace and name of a memory or conversation."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


_GRPC_NAME = re.compile(r"(?:dns|unix|unix-abstract|ipv4|ipv6|vsock|xds|google-c2p|passthrough):(?!\d+$)")
"""Names of gRPC's resolvers."""
CLIENT_NAME = "memstream-python"
"""What a client is called without a name of its own."""
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/?#@\[\]\\]+)(?::(?P<port>[0-9]{1,5}))?")


def check_target(target: str) -> None:
    """Raises InvalidArgument for what gRPC would only fail to resolve: an empty target, a URL, what is no address."""
    if not target:
        raise invalid_field("target", "is empty: name the server, as in 127.0.0.1:7700")
    if target.startswith(("http://", "https://")):
        encrypted = "; for TLS pass `tls`" if target.startswith("https") else ""
        raise invalid_field("target", f"{quote_text(target)} is a URL: write host:port of the gRPC port{encrypted}")
    if _GRPC_NAME.match(target):
        return
    found = _ADDRESS.fullmatch(target)
    if not found or (found["port"] is not None and not 0 < int(found["port"]) < 65_536):
        raise invalid_field("target", f"{quote_text(target)} is no address: write host:port, as in 127.0.0.1:7700")


def check_client_name(name: str) -> None:
    """Raises InvalidArgument unless a header can carry the name."""
    if not re.fullmatch(r"[\x21-\x7e]{1,64}", name):
        raise invalid_field("client_name", f"{quote_text(name)} must have 1 to 64 visible ASCII characters")


def memory_path(path: str, field: str = "memory") -> MemoryPath:
    """Parses `"namespace/name"`; checked here because the routing header cannot carry other characters."""
    namespace, slash, name = path.partition("/")
    if not slash:
        raise invalid_field(field, f'{quote_text(path)} has no "/": write "namespace/name"')
    for part, text in (("namespace", namespace), ("name", name)):
        if problem := name_problem(text):
            raise invalid_field(field, f"the {part} of {quote_text(path)} {problem}")
    return MemoryPath(namespace, name)


def new_request_id() -> str:
    """A new idempotency key: a retry with the same one returns the first answer."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """The arguments of `connect`; see its docstring."""

    target: str
    token: Token | None = field(repr=False)
    tls: Tls | None
    timeout_s: float
    retry: Retry
    keepalive_s: float
    receive_bytes_max: int
    client_name: str
    options: Sequence[tuple[str, str | int]]
    tracing: Tracing | None
    server: OwnServer | None = None
    """The server that this client started or found with memstream.local."""


class Link:
    """The connections to a server and their stubs, created in the event loop of the first call.

    When that loop is closed (asyncio.run has returned), the next call creates them again in its own loop.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings
        self._stubs: _Stubs | None = None
        self._closed = False

    @property
    def blocks(self) -> BlockServiceAsyncStub:
        """The stub of BlockService."""
        return self._open_stubs().blocks

    @property
    def contexts(self) -> ContextServiceAsyncStub:
        """The stub of ContextService."""
        return self._open_stubs().contexts

    @property
    def conversations(self) -> ConversationServiceAsyncStub:
        """The stub of ConversationService."""
        return self._open_stubs().conversations

    @property
    def memories(self) -> MemoryServiceAsyncStub:
        """The stub of MemoryService."""
        return self._open_stubs().memories

    @property
    def operations(self) -> OperationServiceAsyncStub:
        """The stub of OperationService."""
        return self._open_stubs().operations

    @property
    def server(self) -> ServerServiceAsyncStub:
        """The stub of ServerService."""
        return self._open_stubs().server

    @property
    def streams(self) -> StreamServiceAsyncStub:
        """The stub of StreamService."""
        return self._open_stubs().streams

    def check_open(self) -> None:
        """Raises StreamClosed if the client is closed, EventLoopMismatch as `check_loop` does."""
        if self._closed:
            raise StreamClosed("the client is closed")
        if self.settings.server is not None:
            self.settings.server.check_process()
        self.check_loop()

    def check_loop(self) -> None:
        """Raises EventLoopMismatch unless the client's event loop is the running one."""
        running = _running_loop()
        if self._stubs is not None and self._stubs.loop is not running and not self._stubs.loop.is_closed():
            raise EventLoopMismatch(
                "the client belongs to another event loop that still runs: create it with memstream.connect(..., "
                "any_loop=True), or use memstream.sync from threads"
            )

    def _open_stubs(self) -> _Stubs:
        self.check_open()
        running = _running_loop()
        if self._stubs is None or self._stubs.loop is not running:
            self._stubs = _Stubs(running, _connections(self.settings))
        return self._stubs

    def allow_calls(self, limit: int) -> None:
        """The server allows this many calls on a connection; 0: it does not say."""
        if self._stubs is not None:
            self._stubs.connections.allow_calls(limit)

    def metadata(self, memory: MemoryPath | None = None) -> Metadata:
        """Metadata of a call: the bearer token, the memory (for consistent-hash routing) and the trace context."""
        self.check_open()
        # The token travels in metadata: call credentials nearly double the cost of a unary call.
        token = self.settings.token() if callable(self.settings.token) else self.settings.token
        pairs: Metadata = () if token is None else (("authorization", f"Bearer {_checked_token(token)}"),)
        if memory is not None:
            pairs = (*pairs, ("memstream-memory", str(memory)))
        return pairs if self.settings.tracing is None else (*pairs, *self.settings.tracing.carried())

    async def call(
        self,
        method: Unary[Request, Response],
        request: Request,
        memory: MemoryPath | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Calls and waits for the answer; `timeout_s` None means the client's default."""
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        if self.settings.tracing is None:
            return await self._call_with_retries(method, request, memory, limit_s)
        with self.traced_memory(request) as note, self.traced(type(request).__name__.removesuffix("Request")):
            answer = await self._call_with_retries(method, request, memory, limit_s)
            note(answer)
            return answer

    async def _call_with_retries(
        self, method: Unary[Request, Response], request: Request, memory: MemoryPath | None, timeout_s: float
    ) -> Response:
        """Retries while the server is unavailable. This is safe: every call reads, has a request_id, or is
        idempotent."""
        clock = asyncio.get_running_loop().time
        end_s, give_up_s = clock() + timeout_s, 0.0
        backoff: Backoff | None = None
        while True:
            try:
                with translate_errors():
                    return await await_answer(method(request, timeout=end_s - clock(), metadata=self.metadata(memory)))
            except MemstreamError as error:
                if error.code not in _REPEATED or isinstance(error, StreamClosed):
                    raise
                if backoff is None:
                    backoff = Backoff(self.settings.retry, clock)
                    give_up_s = min(end_s, clock() + self.settings.retry.calls_s)
                delay_s = backoff.pause_s(error)
                if clock() + delay_s >= give_up_s:
                    raise
            await self.revive()
            await asyncio.sleep(delay_s)

    async def revive(self) -> None:
        """Before a retry: starts the client's own server again if it has ended. Raises LocalServerFailed."""
        if self.settings.server is not None:
            await self.settings.server.revive()

    def traced(self, name: str) -> AbstractContextManager[None]:
        """A span around a call, a connection of a stream, or a query on one."""
        return nullcontext() if self.settings.tracing is None else self.settings.tracing.call(name)

    def traceparent(self) -> str:
        """The current span as W3C trace context, for a message of a stream; empty without one."""
        tracing = self.settings.tracing
        return "" if tracing is None else dict(tracing.carried()).get("traceparent", "")

    def traced_memory(
        self, request: Any, memory: MemoryPath | None = None, session: str = ""
    ) -> AbstractContextManager[Callable[[Any], None]]:
        """A span around what a message does to a memory, sent alone or on a stream of that memory and session."""
        tracing = self.settings.tracing
        return nullcontext(_ignore_answer) if tracing is None else tracing.memory(request, memory, session)

    async def close(self) -> None:
        """Ends every call. Idempotent."""
        if self._closed:
            return
        self.check_open()
        self._closed = True
        try:
            if self._stubs is not None and not self._stubs.loop.is_closed():
                await self._stubs.connections.close()
        finally:
            if self.settings.server is not None:
                await self.settings.server.release()


class _Stubs:
    """The connections, their stubs and their event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self.loop = loop
        self.connections = connections
        channel = cast("grpc.aio.Channel", connections)
        self.blocks = BlockServiceStub(channel)
        self.contexts = ContextServiceStub(channel)
        self.conversations = ConversationServiceStub(channel)
        self.memories = MemoryServiceStub(channel)
        self.operations = OperationServiceStub(channel)
        self.server = ServerServiceStub(channel)
        self.streams = StreamServiceStub(channel)


def _ignore_answer(_answer: object) -> None:
    return None


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise EventLoopMismatch(
            "no event loop runs here: call this from a coroutine, or use memstream.sync in a script"
        ) from None


def _checked_token(token: object) -> str:
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise invalid_field("token", "must be a string of visible ASCII characters without spaces")
    return token


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translates what a call raises into a MemstreamError; does not swallow the cancellation of the task."""
    try:
        yield
    except (grpc.RpcError, grpc.aio.UsageError) as error:
        raise translate_error(error) from error
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        raise StreamClosed("the client was closed during the call") from None


async def await_answer(call: Awaitable[Response]) -> Response:
    """The answer of a call with one answer. The cancellation of the task cancels the call and is raised as it came.

    grpc.aio raises a CancelledError of its own instead, which the scopes of anyio do not recognize.
    """
    answer = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        answer.cancel()
        raise


async def iterate_pages(fetch: Callable[[str], Awaitable[tuple[Sequence[Response], str]]]) -> AsyncIterator[Response]:
    """Yields the items of all pages; `fetch(token)` returns a page and the next token (empty: last page)."""
    token = ""
    while True:
        items, token = await fetch(token)
        for item in items:
            yield item
        if not token:
            return


async def read_message(call: StreamStreamCall[Any, Message] | UnaryStreamCall[Any, Message]) -> Message:
    """The next message of a stream. Raises Unavailable when the stream ends."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise Unavailable("the server ended the stream")
    return cast("Message", message)


async def read_end(call: StreamStreamCall[Any, Any]) -> None:
    """Waits up to one second for the end of a finished stream, so that the server does not see it as cancelled."""
    last = asyncio.ensure_future(call.read())
    await asyncio.wait({last}, timeout=1.0)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)  # the status does not matter: all messages were read before


def deadline_error(timeout_s: float) -> DeadlineExceeded:
    """The error of a query that exceeded its timeout."""
    return DeadlineExceeded(f"no answer within {timeout_s} s")


def _connections(settings: ChannelSettings) -> Connections:
    with encoding("options"):
        return Connections(lambda: _made_channel(settings))


def _made_channel(settings: ChannelSettings) -> grpc.aio.Channel:
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # grpc.keepalive_timeout_ms has no effect in gRPC core
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_MS[0]),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MS[1]),
        ("grpc.max_receive_message_length", settings.receive_bytes_max),
        ("grpc.primary_user_agent", settings.client_name),
        ("grpc.use_local_subchannel_pool", 1),  # else all channels to a server share one connection
        ("grpc.enable_retries", 0),  # gRPC's own retries would reuse the token of the first attempt
    ]
    if settings.tls is None:
        return grpc.aio.insecure_channel(settings.target, options=[*options, *settings.options])
    if settings.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        settings.tls.root_certificates, settings.tls.private_key, settings.tls.certificate_chain
    )
    return grpc.aio.secure_channel(settings.target, credentials, options=[*options, *settings.options])
