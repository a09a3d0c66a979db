"""Base class of proxies in front of a server."""

from __future__ import annotations

from abc import abstractmethod
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio


class PassingOn(grpc.GenericRpcHandler):
    """A gRPC proxy at `address` for the server at `target`.

    `service` decides how a call is forwarded. Every method looks the same on the wire: a stream of messages each way.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = self._bound(self._server)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def _bound(self, server: grpc.aio.Server) -> str:
        """Bind a port; returns the address that clients connect to."""
        return f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"

    @abstractmethod
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of a call."""
