"""The gRPC channel: how it is configured, what every call sends, and errors turned into the one tree."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from grpc.aio import StreamStreamCall, UnaryStreamCall

from memstream.backoff import Backoff, Retry
from memstream.errors import DeadlineExceeded, MemstreamError, StreamClosed, Unavailable
from memstream.status import task_is_cancelled, translate
from memstream.v1.conversation_service_pb2_grpc import ConversationServiceStub
from memstream.v1.memory_service_pb2_grpc import MemoryServiceStub
from memstream.v1.operation_service_pb2_grpc import OperationServiceStub
from memstream.v1.server_service_pb2_grpc import ServerServiceStub
from memstream.v1.stream_service_pb2_grpc import StreamServiceStub
from memstream.wiretypes import invalid

Request = TypeVar("Request", contravariant=True)
Response = TypeVar("Response", covariant=True)
Message = TypeVar("Message")
Metadata: TypeAlias = tuple[tuple[str, str], ...]
Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or what gives the one to send with the next call."""

# CANCELLED by the server, whose grace ended while the call was under way; what the caller cancels is over.
_REPEATED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}")


class Unary(Protocol[Request, Response]):
    """What the stubs' unary methods have in common."""

    def __call__(
        self, request: Request, /, *, timeout: float | None = None, metadata: Metadata | None = None
    ) -> Awaitable[Response]: ...


class Tracing(Protocol):
    """Makes calls part of the program's traces; `memstream.otel.Tracing` is one."""

    def call(self, name: str) -> AbstractContextManager[None]:
        """Around a call of this name, a connection of a stream, or a query on one."""
        ...

    def carried(self) -> Metadata:
        """What goes along with a call or a stream that begins now."""
        ...


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS material as PEM bytes: roots None are the system's, key and chain make it mutual."""

    root_certificates: bytes | None = field(default=None, repr=False)
    private_key: bytes | None = field(default=None, repr=False)
    certificate_chain: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    @classmethod
    def of_files(
        cls,
        roots: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> Tls:
        """From PEM files, read now. Raises OSError, and ValueError for a certificate without its key."""
        if (certificate is None) != (key is None):
            raise ValueError("a certificate and its key go together")
        pem = [None if path is None else Path(path).read_bytes() for path in (roots, key, certificate)]
        return cls(pem[0], pem[1], pem[2], server_name)


@dataclass(frozen=True, slots=True)
class MemoryPath:
    """A memory by namespace and name."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def memory_path(path: str, field: str = "memory") -> MemoryPath:
    """`"namespace/name"`; checked here because a routing header cannot carry anything else."""
    namespace, slash, name = path.partition("/")
    if not slash or not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
        raise invalid(field, f'{path!r} is not "namespace/name" of letters, digits, "-", "_", "." and "~"')
    return MemoryPath(namespace, name)


def new_request_id() -> str:
    """Makes a repeat of a call return the first answer."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """What `connect` was told; its docstring explains."""

    target: str
    token: Token | None = field(repr=False)
    tls: Tls | None
    timeout_s: float
    retry: Retry
    keepalive_s: float
    receive_bytes_max: int
    options: Sequence[tuple[str, str | int]]
    tracing: Tracing | None


class Link:
    """A channel and its stubs, made in the event loop of the first call."""

    def __init__(self, settings: ChannelSettings) -> None:
        self.settings = settings
        self._channel = _channel(settings)
        self._closed = False
        self.conversations = ConversationServiceStub(self._channel)
        self.memories = MemoryServiceStub(self._channel)
        self.operations = OperationServiceStub(self._channel)
        self.server = ServerServiceStub(self._channel)
        self.streams = StreamServiceStub(self._channel)

    def check_open(self) -> None:
        """Raises StreamClosed once the client was closed."""
        if self._closed:
            raise StreamClosed("the client is closed")

    def metadata(self, memory: MemoryPath | None = None) -> Metadata:
        """What a call sends: who calls, and for which memory, for consistent-hash routing."""
        self.check_open()
        # In metadata and not in call credentials, which nearly double the cost of a unary call.
        token = self.settings.token() if callable(self.settings.token) else self.settings.token
        said: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        if memory is not None:
            said = (*said, ("memstream-memory", str(memory)))
        return said if self.settings.tracing is None else (*said, *self.settings.tracing.carried())

    async def call(
        self,
        method: Unary[Request, Response],
        request: Request,
        memory: MemoryPath | None = None,
        timeout_s: float | None = None,
    ) -> Response:
        """Calls and waits; `timeout_s` None takes the client's."""
        limit_s = self.settings.timeout_s if timeout_s is None else timeout_s
        with self.traced(type(request).__name__.removesuffix("Request")):
            return await self._answer(method, request, memory, limit_s)

    async def _answer(
        self, method: Unary[Request, Response], request: Request, memory: MemoryPath | None, timeout_s: float
    ) -> Response:
        """Repeats the call while the server is unavailable: every call reads, has a request_id, or is idempotent."""
        clock = asyncio.get_running_loop().time
        end_s, give_up_s = clock() + timeout_s, 0.0
        backoff: Backoff | None = None
        while True:
            try:
                with translated():
                    return await method(request, timeout=end_s - clock(), metadata=self.metadata(memory))
            except MemstreamError as error:
                if error.code not in _REPEATED or isinstance(error, StreamClosed):
                    raise
                if backoff is None:
                    backoff = Backoff(self.settings.retry, clock)
                    give_up_s = min(end_s, clock() + self.settings.retry.calls_s)
                delay_s = backoff.pause_s(error)
                if clock() + delay_s >= give_up_s:
                    raise
            await asyncio.sleep(delay_s)

    def traced(self, name: str) -> AbstractContextManager[None]:
        """Around a call, a connection of a stream or a query on one."""
        return nullcontext() if self.settings.tracing is None else self.settings.tracing.call(name)

    async def close(self) -> None:
        """Ends every call."""
        if not self._closed:
            self._closed = True
            await self._channel.close()


@contextmanager
def translated() -> Iterator[None]:
    """What a call raises becomes an exception of the tree; a task that is cancelled stays so."""
    try:
        yield
    except (grpc.RpcError, grpc.aio.UsageError) as error:
        raise translate(error) from error
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        raise StreamClosed("the client was closed during the call") from None


async def pages(fetch: Callable[[str], Awaitable[tuple[Sequence[Response], str]]]) -> AsyncIterator[Response]:
    """Every item of every page; `fetch(token)` gives a page and the next token, which is empty on the last."""
    token = ""
    while True:
        items, token = await fetch(token)
        for item in items:
            yield item
        if not token:
            return


async def read_message(call: StreamStreamCall[Any, Message] | UnaryStreamCall[Any, Message]) -> Message:
    """The next message of a stream; its end without a status is a break like any other."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise Unavailable("the server ended the stream")
    return cast("Message", message)


async def read_end(call: StreamStreamCall[Any, Any]) -> None:
    """Lets a stream that is over end by itself, so that the server does not take it for cancelled; a second at most."""
    last = asyncio.ensure_future(call.read())
    await asyncio.wait({last}, timeout=1.0)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)  # whatever the end was, everything was said before


def deadline(timeout_s: float) -> DeadlineExceeded:
    """What a query raises that took longer than its caller would wait."""
    return DeadlineExceeded(f"no answer within {timeout_s:g} s")


def _channel(settings: ChannelSettings) -> grpc.aio.Channel:
    options: list[tuple[str, str | int]] = [
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        # Retry soon after a restart; gRPC's own schedule waits up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        ("grpc.max_receive_message_length", settings.receive_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", 0),  # of its own it repeats by number, with the token of the first attempt
    ]
    if settings.tls is None:
        return grpc.aio.insecure_channel(settings.target, options=[*options, *settings.options])
    if settings.tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", settings.tls.server_name))
    credentials = grpc.ssl_channel_credentials(
        settings.tls.root_certificates, settings.tls.private_key, settings.tls.certificate_chain
    )
    return grpc.aio.secure_channel(settings.target, credentials, options=[*options, *settings.options])
