"""A proxy as in a mesh: it terminates mutual TLS, requires a token, and forwards every call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from tests.support.certificates import Authority
from tests.support.passing import PassingOn

TOKEN = "token-of-ann"
_DETAILS = "grpc-status-details-bin"


def write_certificates(folder: Path) -> None:
    """Writes ca.pem, server.pem and client.pem with their keys (.key) for localhost, and the token."""
    (folder / "token").write_text(TOKEN, "utf-8")
    authority = Authority(folder, "ca")
    for name in ("server", "client"):
        authority.issue(name)


class Front(PassingOn):
    """Accepts only TLS; `routes` has the values of the header `memstream-memory`, by method."""

    def __init__(self, target: str, folder: Path) -> None:
        super().__init__(target)
        self.routes: list[tuple[str, str]] = []
        self._folder = folder

    def _bound(self, server: grpc.aio.Server) -> str:
        read = {name: (self._folder / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem")}
        credentials = grpc.ssl_server_credentials(
            [(read["server.key"], read["server.pem"])], read["ca.pem"], require_client_auth=True
        )
        return f"localhost:{server.add_secure_port('localhost:0', credentials)}"

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Forwards calls with the right token, and rejects others."""
        method = details.method

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            given = dict(context.invocation_metadata())
            if given.get("authorization") != f"Bearer {TOKEN}":
                await context.abort_with_status(_Unauthenticated())
            if "memstream-memory" in given:
                self.routes.append((method.rpartition("/")[2], given["memstream-memory"]))
            async for response in self._channel.stream_stream(method)(requests):
                yield response

        return grpc.stream_stream_rpc_method_handler(forward)


class _Unauthenticated(grpc.Status):
    """A server's status for a token that it does not accept."""

    code = grpc.StatusCode.UNAUTHENTICATED
    details = "the token is not accepted"

    def __init__(self) -> None:
        info = AnyMessage()
        info.Pack(ErrorInfo(reason="UNAUTHENTICATED", domain="memstream.dev"))
        said = Status(code=self.code.value[0], message=self.details, details=[info])
        self.trailing_metadata = ((_DETAILS, said.SerializeToString()),)
