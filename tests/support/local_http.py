"""An aiohttp application on a free loopback port, as an asynchronous context: what scripted endpoints are made of."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from aiohttp import web

REQUEST_BYTES_MAX = 64 << 20
Handler = Callable[[web.Request], Any]
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify` of a client that uses http:// alone: by default each client loads all authorities, 30 ms of CPU."""


class LocalHttp:
    """Serves `routes` (handlers of POST by path) while the context is open; `address` is http://host:port."""

    def __init__(self) -> None:
        self.address = ""
        self._runner: web.AppRunner | None = None

    def routes(self) -> Mapping[str, Handler]:
        """Handlers by path. A path in braces takes any, as aiohttp writes it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=REQUEST_BYTES_MAX)
        for path, handler in self.routes().items():
            app.router.add_route("*", path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
