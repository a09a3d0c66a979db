"""The socket of the HTTP port: uvicorn in the server's event loop.

At the end open requests may finish within the grace period; the interceptors refuse new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from memstream_server.rpc.connections import BoundedListener, ConnectionBounds, Exempt
from memstream_server.rpc.http.connection import protocol_class
from memstream_server.rpc.http.port import Asgi

log = structlog.get_logger(__name__)

_HEAD_BYTES_MAX = 32_768
_KEEP_ALIVE_S = 75
_TLS_POLL_INTERVAL_S = 2.0
_BACKLOG = 128
"""asyncio accepts up to this many connections before it closes one."""


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
