"""From the settings to a listening HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from memstream_server.rpc.http.listener import HttpListener
from memstream_server.rpc.http.port import Asgi, Receive, Scope, Send
from memstream_server.settings import parse_listen

if TYPE_CHECKING:
    from memstream_server.rpc.http.application import Page
    from memstream_server.rpc.http.port import HttpPort
    from memstream_server.settings import Settings


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
