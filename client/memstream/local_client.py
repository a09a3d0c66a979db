"""A client of a server that it finds or starts itself: `memstream.local`."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from memstream.argument_types import LocalSetting, Seconds
from memstream.backoff import Retry
from memstream.channel import CLIENT_NAME, ChannelSettings, Tracing
from memstream.client import Client
from memstream.errors import InvalidArgument, LocalServerFailed
from memstream.kinds import kind_of

if TYPE_CHECKING:  # imported on first use: it needs Unix, and most programs connect to a server that runs
    from memstream.local_server import LocalServer


def local(
    path: str | Path,
    *,
    timeout_s: Seconds = 30.0,
    retry: Retry | None = None,
    tracing: Tracing | None = None,
    start_timeout_s: Seconds = 30.0,
    **settings: LocalSetting,
) -> Opening:
    """A client of the server of the data directory `path`, which is found or started.

    Use it with `async with`, or `await` it and call `close()`. All processes that use the same directory share one
    server; it ends with the last of them. `start_timeout_s` limits the start; `timeout_s`, `retry` and `tracing` are
    those of `connect`. `settings` are settings of the server by name (docs/settings.md), for instance
    `embedding="onnx", embedding_model_dir=...`; a running server with other settings is refused (SettingsMismatch).
    The server listens on a unix socket that only this user can access, unless `listen` is given.

    Raises LocalServerFailed with the end of the server's log if it cannot start. A server that crashes is started again
    by the next call.
    """
    return Opening(local_server(path, start_timeout_s, settings), timeout_s, retry, tracing)


def local_server(path: str | Path, start_timeout_s: float, settings: Mapping[str, LocalSetting]) -> LocalServer:
    """The use of a directory's server, not opened yet. Raises InvalidArgument."""
    kind_of(str | Path).check("path", path)
    kind_of(Seconds).check("start_timeout_s", start_timeout_s)
    if not str(path):
        raise InvalidArgument("path", "is empty: name a directory")
    if sys.platform == "win32":
        raise LocalServerFailed("memstream.local needs Unix: run `memstream serve` and use memstream.connect")
    from memstream.local_server import LocalServer

    return LocalServer(Path(path).expanduser().resolve(), settings, start_timeout_s)


def client_of(server: LocalServer, timeout_s: float, retry: Retry | None, tracing: Tracing | None) -> Client:
    """A client of an opened server; closing it ends the use of the server."""
    return Client(
        ChannelSettings(
            target=server.address,
            token=None,
            tls=None,
            timeout_s=timeout_s,
            retry=retry or Retry(),
            keepalive_s=60.0,
            receive_bytes_max=64 << 20,
            client_name=CLIENT_NAME,
            options=(),
            tracing=tracing,
            server=server,
        )
    )


class Opening:
    """A local client that is not started yet, made by `local`: `async with` it, or `await` it for the Client."""

    def __init__(self, server: LocalServer, timeout_s: float, retry: Retry | None, tracing: Tracing | None) -> None:
        kind_of(Seconds).check("timeout_s", timeout_s)
        self._server, self._timeout_s, self._retry, self._tracing = server, timeout_s, retry, tracing
        self._client: Client | None = None

    @property
    def address(self) -> str:
        """The address of the server, for other clients; empty before the start."""
        return self._server.address

    def __await__(self) -> Generator[Any, None, Client]:
        return self._open().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def _open(self) -> Client:
        await self._server.start()
        return client_of(self._server, self._timeout_s, self._retry, self._tracing)
