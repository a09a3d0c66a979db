"""The socket of the HTTP port: uvicorn in the server's event loop.

Rule 1. A connection that sends no complete head of a request within `opening_max_s` is closed.
Rule 2. At the end open requests may finish within the grace period; the interceptors refuse new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from memstream_server.rpc.http.application import Asgi

log = structlog.get_logger(__name__)

_HEAD_BYTES_MAX = 32_768
_KEEP_ALIVE_S = 75
_TLS_POLL_INTERVAL_S = 2.0


class HttpListener:
    """Call `start` once and `stop` once."""

    def __init__(
        self,
        application: Asgi,
        *,
        opening_max_s: float,
        connections_max: int,
        tls: tuple[Path, Path, Path | None] | None = None,
    ) -> None:
        """`tls`: certificate, key and client CA, PEM."""
        self._application = application
        self._opening_max_s = opening_max_s
        self._connections_max = connections_max
        self._tls = tls
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._loaded: tuple[bytes, ...] = ()

    async def start(self, host: str, port: int) -> str:
        """Listens. Returns host:port as bound. Raises OSError."""
        bound = _bind(host, port)
        certificate, key, client_ca = self._tls or (None, None, None)
        config = uvicorn.Config(
            self._application,
            http=_protocol_class(self._opening_max_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=self._connections_max,
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
        return tuple(path.read_bytes() for path in self._tls[:2])

    async def _reload_tls(self, context: ssl.SSLContext) -> None:
        """Loads a renewed certificate; an invalid one leaves the last valid one in force."""
        assert self._tls is not None
        while True:
            await asyncio.sleep(_TLS_POLL_INTERVAL_S)
            try:
                files = await asyncio.to_thread(self._read_tls)
                if files != self._loaded:
                    context.load_cert_chain(*self._tls[:2])
                    self._loaded = files
                    log.info("tls_files_reloaded", port="http")
            except (OSError, ssl.SSLError) as error:
                log.error("tls_files_not_in_order", reason=error, remedy="the former ones stay in force")


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol_class(opening_max_s: float) -> Any:
    class BoundedProtocol(H11Protocol):
        """Closes a connection whose first request head does not arrive in time."""

        _opening: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._opening = self.loop.call_later(opening_max_s, self._close_if_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._opening is not None:
                self._opening.cancel()
            super().connection_lost(exc)

        def _close_if_silent(self) -> None:
            cycle: object = self.cycle  # None until the first head is complete
            if cycle is None:
                self.transport.close()

    return BoundedProtocol


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}") from error
    return bound
