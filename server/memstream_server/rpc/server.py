"""The gRPC server: services, health, reflection, transport limits and graceful shutdown."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from memstream.v1 import (
    block_service_pb2,
    context_service_pb2,
    conversation_service_pb2,
    memory_service_pb2,
    operation_service_pb2,
    server_service_pb2,
    stream_service_pb2,
)
from memstream_server.engine.context import TOKENIZERS, Contexts, Tokenizers
from memstream_server.engine.runtime.turns import find_turns
from memstream_server.rpc.access.authorization import OpenAccess
from memstream_server.rpc.access.opening import AccessOptions
from memstream_server.rpc.access.peers import Peers
from memstream_server.rpc.blocks import BlockService
from memstream_server.rpc.calls import Tracing
from memstream_server.rpc.connections import AddressWatch
from memstream_server.rpc.context import ContextService
from memstream_server.rpc.conversations import ConversationService
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.forwarding import Forwarding
from memstream_server.rpc.http.port import HttpPort
from memstream_server.rpc.info import SERVICE, Health, ServerService
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.memories import MemoryService
from memstream_server.rpc.operations import OperationService
from memstream_server.rpc.pipeline import Pipeline, Registered, list_capabilities, make_handlers
from memstream_server.rpc.request_reader import COMPRESSION_ALGORITHMS
from memstream_server.rpc.scopes import BlockQuestions
from memstream_server.rpc.streams import StreamService
from memstream_server.settings import parse_listen

if TYPE_CHECKING:
    from memstream_server.engine.conversations import Conversations
    from memstream_server.engine.engine import Engine
    from memstream_server.engine.status import Serving
    from memstream_server.observability import Metrics
    from memstream_server.rpc.http.listener import HttpListener
    from memstream_server.settings import Settings

_METADATA_BYTES_MAX = 32_768
_KEEPALIVE_MS = 60_000
_PING_TIMEOUT_MS = 20_000
_PING_INTERVAL_MS = 1_000
_PING_STRIKES = 10
"""gRPC closes a connection after this many pings that come sooner than the interval, with no data between them; proxies
may ping every two seconds."""
_PENDING_MAX = 1 << 30
_UNREQUESTED_MAX_S = 86_400
"""How long a call may wait for Python. By default gRPC core ends it with CANCELLED after 30 s, before its deadline."""
_STOP_S = 1.0
"""Minimum time for calls that still run once the streams have ended; they get more if the grace period has more left.
"""


def _bind_problem(listen: str) -> str:
    """Why nobody can listen there; empty if unknown. gRPC says it in its own log alone."""
    if listen.startswith("unix:"):
        folder = Path(listen.removeprefix("unix:")).absolute().parent
        return "" if folder.is_dir() else f"there is no directory {folder}"
    host, port = parse_listen(listen)
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return ""
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)


class RpcServer:
    """Created by `create_server` or `build_server`. Call `start` once and `stop` once."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health: Health,
        drain: Drain,
        forwarding: Forwarding | None = None,
        http: HttpPort | None = None,
    ) -> None:
        self._forwarding = forwarding
        self._http = http
        self._listener: HttpListener | None = None
        self._server = server
        self._health = health
        self._drain = drain
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, listen: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listens at host:port (port 0: any free one) or unix:/path; without `credentials` there is no TLS.

        Returns the bound address. Raises OSError.
        """
        try:
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen at {listen}: {_bind_problem(listen) or error}") from error
        await self._health.start()
        await self._server.start()
        if self._http is not None and not listen.startswith("unix:"):
            watch = AddressWatch(port, self._http.connections, self._http.exempt)
            for watching in (watch.run(), self._http.reader.watch_streams(port)):
                self._watching.append(asyncio.create_task(watching))
        return listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"

    async def start_http(self, settings: Settings) -> str:
        """Listens at `http_listen`, after `start`. Returns the bound address. Raises OSError."""
        from memstream_server.rpc.http.listener import open_http

        assert self._http is not None
        self._listener, address = await open_http(self._http, settings, self._health.is_serving)
        return address

    def is_serving(self, service: str) -> bool:
        """Whether the health service reports this service of the contract as serving."""
        return self._health.is_serving(service)

    async def stop(self, grace_s: float | None = None) -> None:
        """Notifies the streams, waits until they have ended, then ends the rest.

        grpc's own stop resets open streams with UNAVAILABLE and no reason, so this ends them in band first.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._drain.grace_s if grace_s is None else grace_s)
        self._drain.begin()
        self._health.end()
        await self._drain.wait_finished(max(0.0, deadline - loop.time()) + _STOP_S)
        if self._listener is not None:
            await self._listener.stop(max(_STOP_S, deadline - loop.time()))
        await self._health.close()
        for watching in self._watching:
            watching.cancel()
        await self._server.stop(max(_STOP_S, deadline - loop.time()))
        if self._forwarding is not None:
            await self._forwarding.close()


def create_server(
    engine: Engine,
    conversations: Conversations,
    settings: Settings,
    metrics: Metrics | None = None,
    access: AccessOptions | None = None,
    tracing: Tracing | None = None,
    tokenizers: Tokenizers = TOKENIZERS,
) -> RpcServer:
    """A server of `engine` with the limits of `settings`, not yet listening. Call it in the running event loop."""
    drain = Drain(settings.drain_grace_s)
    engine.ownership.on_loss(lambda: drain.end_memory_streams("this server lost its lease on the memory"))
    access = access or AccessOptions(Peers())
    forwarding = Forwarding(engine.ownership, drain, settings.lease_renew_s / 3, access.peers, tracing)
    return build_server(
        engine,
        RequestLimits.from_settings(settings),
        drain,
        metrics,
        conversations,
        forwarding,
        access,
        tracing,
        engine.check_serving,
        settings,
        tokenizers,
    )


def build_server(
    engine: Engine,
    limits: RequestLimits,
    drain: Drain,
    metrics: Metrics | None = None,
    conversations: Conversations | None = None,
    forwarding: Forwarding | None = None,
    access: AccessOptions | None = None,
    tracing: Tracing | None = None,
    look: Callable[[], Awaitable[Serving]] | None = None,
    settings: Settings | None = None,
    tokenizers: Tokenizers = TOKENIZERS,
) -> RpcServer:
    """Like `create_server`, from its parts; without `conversations` the rpcs of that service are refused."""
    authorization = (
        None
        if access is None
        else access.create_authorization(
            lambda id: engine.operations.get(id), lambda namespace, name: engine.memories.get(namespace, name)
        )
    )
    gate = authorization or OpenAccess()
    exempt = (lambda _peer: False) if access is None else access.is_proxy
    if authorization is not None and authorization.admission.limits_cost and (turns := find_turns()) is not None:
        turns.on_cost = authorization.admission.charge_cost
    pipeline = Pipeline(drain, limits, gate, metrics, tracing)
    server = grpc.aio.server(interceptors=(pipeline,), options=_channel_options(limits))
    info = ServerService(engine, limits, metrics, settings, gate.admission.clients)
    conversation_service = object() if conversations is None else ConversationService(conversations, limits, drain)
    operations = OperationService(engine, limits)
    engine.standing_blocks.asking = BlockQuestions(
        engine, forwarding, limits, None if authorization is None else authorization.policy
    )
    contexts = ContextService(engine, Contexts(engine, engine.clock), limits, forwarding, tokenizers)
    services = [
        (memory_service_pb2.DESCRIPTOR.services_by_name["MemoryService"], MemoryService(engine, limits)),
        (
            stream_service_pb2.DESCRIPTOR.services_by_name["StreamService"],
            StreamService(engine, limits, drain, forwarding, contexts.context, tracing),
        ),
        (conversation_service_pb2.DESCRIPTOR.services_by_name["ConversationService"], conversation_service),
        (block_service_pb2.DESCRIPTOR.services_by_name["BlockService"], BlockService(engine, limits, drain)),
        (context_service_pb2.DESCRIPTOR.services_by_name["ContextService"], contexts),
        (operation_service_pb2.DESCRIPTOR.services_by_name["OperationService"], operations),
        (server_service_pb2.DESCRIPTOR.services_by_name["ServerService"], info),
    ]
    info.capabilities = list_capabilities(services)
    handlers = make_handlers(services, None if forwarding is None else forwarding.wrap_handler)
    server.add_generic_rpc_handlers((Registered(handlers),))
    names = [service.full_name for service, _ in services]
    health = Health(names, look)
    health_pb2_grpc.add_HealthServicer_to_server(cast("Any", health), server)  # typed for threads
    reflection.enable_server_reflection([*names, SERVICE, reflection.SERVICE_NAME], server)
    described = tuple(service for service, _ in services)
    http = HttpPort(
        described,
        handlers,
        pipeline.wrap_handler,
        gate.identify_holder,
        gate.rights_of,
        pipeline.reader,
        limits.connections,
        exempt,
        None if metrics is None else metrics.registry,
    )
    return RpcServer(server, health, drain, forwarding, http)


def _channel_options(limits: RequestLimits) -> list[tuple[str, int]]:
    """gRPC ignores an unknown option in silence: tests/rpc/test_grpc_options.py tests each by its effect."""
    return [
        ("grpc.so_reuseport", 0),  # otherwise a second server on the port binds silently and takes half the traffic
        ("grpc.max_receive_message_length", limits.received_bytes_max),
        ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES_MAX),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),  # grpc.keepalive_timeout_ms has no effect in gRPC core
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", _PING_STRIKES),
        ("grpc.server_handshake_timeout_ms", round(limits.opening_max_s * 1_000)),
        ("grpc.max_connection_idle_ms", round(limits.connection_idle_max_s * 1_000)),
        ("grpc.max_allowed_incoming_connections", limits.connections.port_max),
        ("grpc.max_concurrent_streams", limits.connection_streams_max),
        # Once 1,000 calls wait for Python, gRPC core ends further calls at random with CANCELLED, whichever client
        # makes them. Each connection can have at most as many waiting calls as open streams.
        ("grpc.server.max_pending_requests", _PENDING_MAX),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_MAX),
        ("grpc.server_max_unrequested_time_in_server", _UNREQUESTED_MAX_S),
        # A call's window stays at 64 KB until its message is read, which opens the window for that message. Otherwise
        # gRPC gives each call of a fast client megabytes before the server has authenticated it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.per_message_decompression", 0),  # request_reader.py decompresses, after authentication
        ("grpc.compression_enabled_algorithms_bitset", COMPRESSION_ALGORITHMS),
    ]
