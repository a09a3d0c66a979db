"""Runs conformance cases over the HTTP port: Connect with JSON, Connect with protobuf, and gRPC-Web."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import unquote

import grpc
import grpc.aio
import httpx2
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from tests.conformance import run
from tests.conformance.golden import message_of
from tests.support.local_http import NO_TLS

ENCODINGS = ("connect+json", "connect+proto", "grpc-web+proto")
_END, _TRAILERS = 0b10, 0x80


def is_runnable(case: Mapping[str, Any]) -> bool:
    """Whether every step is a call, or a stream from the server alone."""
    for step in case["steps"]:
        if "client" in step or "ask" in step or "unknown" in step:
            return False
        named = step.get("call", step.get("stream", ""))
        if named and run.method_of(named).client_streaming:
            return False
    return True


class HttpCase(run.Case):
    """A case whose calls go to the HTTP port."""

    def __init__(self, address: str, encoding: str) -> None:
        super().__init__(address)
        self._http = httpx2.AsyncClient(base_url=f"http://{address}", timeout=run.READ_S, verify=NO_TLS)
        self._web = encoding.startswith("grpc-web")
        self._json = encoding.endswith("json")

    async def __aenter__(self) -> HttpCase:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()

    def _begin(self, _channel: Any, name: str, step: run.Step) -> Any:
        method = run.method_of(name)
        path = f"/{method.containing_service.full_name}/{method.name}"
        reply = method.output_type.full_name
        given = dict(step.get("metadata", {}))
        if method.server_streaming:
            return lambda request: _Reading(self._stream(path, reply, request, given))
        if self._web:
            return lambda request, timeout=None: self._call_web(path, reply, request, given)
        return lambda request, timeout=None: self._call_connect(path, reply, request, given, timeout)

    async def _call_connect(
        self, path: str, reply: str, request: Message, given: dict[str, str], timeout_s: float | None
    ) -> Message:
        headers = given | {"content-type": "application/json" if self._json else "application/proto"}
        if timeout_s is not None:
            headers["connect-timeout-ms"] = str(round(timeout_s * 1_000))
        answer = await self._http.post(path, content=self._encode(request), headers=headers)
        if answer.status_code != httpx2.codes.OK:
            raise _rpc_error(answer.json())
        return self._decode(reply, answer.content)

    async def _call_web(self, path: str, reply: str, request: Message, given: dict[str, str]) -> Message:
        (message,) = [each async for each in self._stream(path, reply, request, given)]
        return message

    async def _stream(self, path: str, reply: str, request: Message, given: dict[str, str]) -> AsyncIterator[Message]:
        kind = "application/grpc-web" if self._web else "application/connect"
        headers = given | {"content-type": f"{kind}+{'json' if self._json else 'proto'}"}
        data = self._encode(request)
        body = struct.pack(">BI", 0, len(data)) + data
        async with self._http.stream("POST", path, content=body, headers=headers) as answer:
            if answer.headers.get("grpc-status", "0") != "0":  # without a body
                raise _web_error(answer.headers)
            assert answer.status_code == httpx2.codes.OK, await answer.aread()
            rest = b""
            async for chunk in answer.aiter_bytes():
                rest += chunk
                while len(rest) >= 5 and len(rest) >= 5 + struct.unpack(">I", rest[1:5])[0]:
                    flag, size = struct.unpack(">BI", rest[:5])
                    frame, rest = rest[5 : 5 + size], rest[5 + size :]
                    if flag & _TRAILERS:
                        lines = [line.partition(":") for line in frame.decode().split("\r\n") if line]
                        trailers = {name.strip().lower(): value.strip() for name, _, value in lines}
                        if trailers["grpc-status"] != "0":
                            raise _web_error(trailers)
                    elif flag & _END:
                        if error := json.loads(frame).get("error"):
                            raise _rpc_error(error)
                    else:
                        yield self._decode(reply, frame)

    def _encode(self, request: Message) -> bytes:
        return json_format.MessageToJson(request).encode() if self._json else request.SerializeToString()

    def _decode(self, reply: str, data: bytes) -> Message:
        message = message_of(reply)
        if self._json:
            return json_format.Parse(data, message)
        message.ParseFromString(data)
        return message


class _Reading:
    """Like grpc.aio's call of a server stream, as far as the cases use it."""

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        self._messages = messages

    async def read(self) -> Any:
        return await anext(self._messages, grpc.aio.EOF)

    def cancel(self) -> None:
        """The client of the case closes the connection."""


def _rpc_error(error: Mapping[str, Any]) -> grpc.aio.AioRpcError:
    code = grpc.StatusCode[error["code"].upper().replace("CANCELED", "CANCELLED")]
    status = Status(code=code.value[0], message=error.get("message", ""))
    for each in error.get("details", ()):
        value = base64.b64decode(each["value"] + "==")
        status.details.add(type_url=f"type.googleapis.com/{each['type']}", value=value)
    return _aio_error(code, status)


def _web_error(trailers: Mapping[str, str]) -> grpc.aio.AioRpcError:
    code = next(each for each in grpc.StatusCode if each.value[0] == int(trailers["grpc-status"]))
    status = Status(code=code.value[0], message=unquote(trailers.get("grpc-message", "")))
    if packed := trailers.get("grpc-status-details-bin"):
        status = Status.FromString(base64.b64decode(packed + "=="))
    return _aio_error(code, status)


def _aio_error(code: grpc.StatusCode, status: Status) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, status.message)
