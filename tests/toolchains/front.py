"""What stands before a server in a mesh: it ends mutual TLS, asks for a token, and passes every call on."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

TOKEN = "a token of ann's"
_DETAILS = "grpc-status-details-bin"


def certificates(folder: Path) -> None:
    """ca.pem, and server.pem and client.pem with their keys (.key), for localhost; and the token."""
    (folder / "token").write_text(TOKEN, "utf-8")
    (folder / "san").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1", "utf-8")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl(folder, "req", "-x509", *key, "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        _openssl(folder, "req", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "san"]
        _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


class Front(grpc.GenericRpcHandler):
    """At localhost:`port`; `routes` is what the header `memstream-memory` said, by method."""

    def __init__(self, target: str, folder: Path) -> None:
        self.port = 0
        self.routes: list[tuple[str, str]] = []
        self._target = target
        self._folder = folder

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        read = {name: (self._folder / name).read_bytes() for name in ("ca.pem", "server.key", "server.pem")}
        credentials = grpc.ssl_server_credentials(
            [(read["server.key"], read["server.pem"])], read["ca.pem"], require_client_auth=True
        )
        self.port = self._server.add_secure_port("localhost:0", credentials)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Every method is the same on the wire: messages there and messages back."""
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
    """What a server says of a token it does not accept."""

    code = grpc.StatusCode.UNAUTHENTICATED
    details = "the token is not accepted"

    def __init__(self) -> None:
        info = AnyMessage()
        info.Pack(ErrorInfo(reason="UNAUTHENTICATED", domain="memstream.dev"))
        said = Status(code=self.code.value[0], message=self.details, details=[info])
        self.trailing_metadata = ((_DETAILS, said.SerializeToString()),)
