"""The socket of the HTTP port: uvicorn in the server's event loop; from the settings to the listening port.

At the end open requests may finish within the grace period; the interceptors refuse new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from memstream_server.rpc.connections import BoundedListener, ConnectionBounds, Exempt
from memstream_server.rpc.http.port import PEER_URIS, Asgi, Receive, Scope, Send
from memstream_server.settings import parse_listen

if TYPE_CHECKING:
    from memstream_server.rpc.http.application import Page
    from memstream_server.rpc.http.port import HttpPort
    from memstream_server.settings import Settings

log = structlog.get_logger(__name__)

_HEAD_BYTES_MAX = 32_768
_KEEP_ALIVE_S = 75
_TLS_POLL_INTERVAL_S = 2.0
_BACKLOG = 128
"""asyncio accepts up to this many connections before it closes one."""


async def open_http(port: HttpPort, settings: Settings, serves: Callable[[str], bool]) -> tuple[HttpListener, str]:
    """The listener and its bound address. Raises OSError."""
    host, number = parse_listen(settings.http_listen)
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    listener = HttpListener(
        LateApplication(lambda: _build_application(port, settings, serves, host)),
        opening_max_s=settings.opening_max_s,
        connections=port.connections,
        exempt=port.exempt,
        tls=None if certificate is None or key is None else (certificate, key, settings.tls_client_ca_file),
    )
    return listener, await listener.start(host, number)


class LateApplication:
    """An ASGI application that the first request builds, in a thread.

    ConnectRPC, starlette and the console's files take 75 ms of CPU; a server without HTTP requests does without them.
    """

    def __init__(self, build: Callable[[], Asgi]) -> None:
        self._build = build
        self._building: asyncio.Task[Asgi] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._building is None:
            self._building = asyncio.create_task(asyncio.to_thread(self._build))
        building = self._building
        try:
            application = await asyncio.shield(building)  # other requests wait for it, too
        finally:
            if building is self._building and building.done() and (building.cancelled() or building.exception()):
                self._building = None  # the next request tries again
        await application(scope, receive, send)


def _build_application(port: HttpPort, settings: Settings, serves: Callable[[str], bool], host: str) -> Asgi:
    from memstream_server.rpc.http.application import HttpApplication, HttpSettings, allowed_hosts
    from memstream_server.rpc.http.endpoints import Endpoints
    from memstream_server.rpc.http.pages import Console, MetricsPage

    pages: list[Page] = []
    if settings.console:
        pages.append(Console(port.rights_of))
    if settings.http_metrics and port.registry is not None:
        pages.append(MetricsPage(port.registry, port.rights_of))

    def find_handler(path: str) -> Any:
        return port.wrap_handler(path, port.handlers[path])

    endpoints = Endpoints(port.services, find_handler, port.identify, port.reader)
    return HttpApplication(
        cast("Any", endpoints.application),
        HttpSettings(
            allowed_hosts(host, _split(settings.http_hosts)), _split(settings.http_cors_origins), settings.opening_max_s
        ),
        serves,
        pages,
    )


def _split(given: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in given.split(",") if each.strip())


class HttpListener:
    """Call `start` once and `stop` once."""

    def __init__(
        self,
        application: Asgi,
        *,
        opening_max_s: float,
        connections: ConnectionBounds,
        exempt: Exempt = lambda _peer: False,
        tls: tuple[Path, Path, Path | None] | None = None,
    ) -> None:
        """`exempt`: clients without a bound of their own. `tls`: certificate, key and client CA, PEM."""
        self._application = application
        self._opening_max_s = opening_max_s
        self._connections = connections
        self._exempt = exempt
        self._tls = tls
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loaded: tuple[bytes, ...] = ()

    async def start(self, host: str, port: int) -> str:
        """Listens. Returns host:port as bound. Raises OSError."""
        bound = _bind(host, port)
        protocol = protocol_class(self._opening_max_s)
        bound.bind_bounds(self._connections, self._exempt, protocol.is_idle)
        certificate, key, client_ca = self._tls or (None, None, None)
        config = uvicorn.Config(
            self._application,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=_HEAD_BYTES_MAX,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ssl_ca_certs=str(client_ca) if client_ca is not None else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if client_ca is not None else ssl.CERT_NONE,
        )
        try:
            config.load()
        except BaseException:
            bound.close()
            raise
        self._server = _Server(config)
        self._tasks = [asyncio.create_task(self._server.serve(sockets=[bound]))]
        while not self._server.started:
            if self._tasks[0].done():
                await self._tasks[0]
                raise OSError(f"the HTTP port at {host}:{port} did not start")
            await asyncio.sleep(0.005)
        if config.ssl is not None:
            self._loaded = self._read_tls()
            self._tasks.append(asyncio.create_task(self._reload_tls(config.ssl)))
        name = f"[{host}]" if ":" in host else host
        return f"{name}:{bound.getsockname()[1]}"

    async def stop(self, grace_s: float) -> None:
        """Stops listening, and ends what still runs after `grace_s`."""
        for task in self._tasks[1:]:
            task.cancel()
        if self._server is not None:
            self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
            self._server.should_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _read_tls(self) -> tuple[bytes, ...]:
        assert self._tls is not None
        return tuple(path.read_bytes() for path in self._tls if path is not None)

    async def _reload_tls(self, context: ssl.SSLContext) -> None:
        """Loads renewed files; invalid ones leave the last valid ones in force. A new client CA is valid too."""
        assert self._tls is not None
        client_ca = self._tls[2]
        while True:
            await asyncio.sleep(_TLS_POLL_INTERVAL_S)
            try:
                files = await asyncio.to_thread(self._read_tls)
                if files != self._loaded:
                    context.load_cert_chain(*self._tls[:2])
                    if client_ca is not None:
                        context.load_verify_locations(client_ca)
                    self._loaded = files
                    log.info("tls_files_reloaded", port="http")
            except (OSError, ssl.SSLError) as error:
                log.error("tls_files_not_in_order", reason=error, remedy="the former ones stay in force")


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> BoundedListener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with this protocol; without it every answer waits 40 ms for an ACK.
    bound = BoundedListener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return bound


# One connection of the HTTP port: how long it may wait, and its client certificate.
#
# Rule 1. A new connection is closed if it sends no complete head of a request within `opening_max_s`. A connection that
# is kept alive has as long from its first byte after an answer, and 75 s until that byte.
# Rule 2. After malformed HTTP nothing but one 400 is sent: a call whose body breaks off cannot answer as well.
# Rule 3. The URIs of a client certificate are in the state of every request of the connection.


class _BoundedProtocol(H11Protocol):
    opening_max_s = 0.0
    of_address: ClassVar[dict[Any, _BoundedProtocol]] = {}
    """By client address; each listener has a class and a table of its own."""
    _opening: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.of_address[transport.get_extra_info("peername")] = self
        self._expect_head()
        if (tls := transport.get_extra_info("ssl_object")) is not None:
            self.app_state = {**self.app_state, PEER_URIS: _certificate_uris(tls.getpeercert() or {})}

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_opening()
        self.of_address.pop(self.transport.get_extra_info("peername"), None)  # kept by the transport after its end
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._expect_head()
        else:
            self._cancel_opening()

    def send_400_response(self, msg: str) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # otherwise its answer raises in h11, and uvicorn logs a traceback
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @classmethod
    def is_idle(cls, address: Any) -> bool:
        """Whether the connection from that address waits for a request, or still for its TLS handshake."""
        protocol = cls.of_address.get(address)
        return protocol is None or protocol._is_waiting()

    def _is_waiting(self) -> bool:
        """Whether no request is being answered. The rest of a body that was answered early counts as waiting."""
        cycle: Any = self.cycle  # None until the first head is complete
        return cycle is None or bool(cycle.response_complete)

    def _expect_head(self) -> None:
        if self._opening is None:
            self._opening = self.loop.call_later(self.opening_max_s, self._close_if_waiting)

    def _cancel_opening(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None

    def _close_if_waiting(self) -> None:
        self._opening = None
        if self._is_waiting():
            self.transport.close()


def protocol_class(opening_max_s: float) -> type[_BoundedProtocol]:
    """The protocol of every connection of one listener."""
    return type("BoundedProtocol", (_BoundedProtocol,), {"opening_max_s": opening_max_s, "of_address": {}})


def _certificate_uris(certificate: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The URIs of a verified certificate, as gRPC's auth_context has them."""
    return tuple(value.encode() for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")
