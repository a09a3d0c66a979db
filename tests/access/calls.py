"""Every rpc of the contract, called by its descriptor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

_ANSWERS_MAX = 20
_PATIENCE_S = 60.0


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def request_of(method: MethodDescriptor) -> Message:
    return GetMessageClass(method.input_type)()


def namespace_paths(message: Descriptor, prefix: str = "", outer: tuple[Descriptor, ...] = ()) -> Iterator[str]:
    """Paths of all text fields in a message that name a namespace."""
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_STRING and "namespace" in field.name:
            yield prefix + field.name
        elif (
            field.message_type is not None
            and field.message_type not in (*outer, message)  # filters are inside of filters
            and field.name != "scopes"  # rpc/scopes.py checks each memory: tests/access/test_scopes.py
            and field.name != "writes"  # another namespace than the request's is refused: conversations/test_records.py
            and field.message_type.full_name.startswith("memstream.")
        ):
            yield from namespace_paths(field.message_type, f"{prefix}{field.name}.", (*outer, message))


def put(request: Message, path: str, value: str) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        request = getattr(request, parent)
    setattr(request, name, value)


@dataclass(frozen=True)
class Outcome:
    """The end of a call. A stream that stays open is OK."""

    code: grpc.StatusCode
    reason: str
    answers: tuple[bytes, ...]

    @property
    def refused(self) -> bool:
        return self.code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


async def called(channel: grpc.aio.Channel, *given: Any, **named: Any) -> Outcome:
    """Like `_called`, but repeats a call whose status grpc lost because the server refused it during a write."""
    outcome = await _called(channel, *given, **named)
    while outcome.code is grpc.StatusCode.INTERNAL and not outcome.reason:
        outcome = await _called(channel, *given, **named)
    return outcome


async def _called(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    requests: Sequence[Message],
    token: str | None = None,
    *,
    headers: Sequence[tuple[str, str]] = (),
    quiet_s: float = _PATIENCE_S,
) -> Outcome:
    """Sends all requests; takes responses until the end, or until a streamed response is quiet for `quiet_s`."""
    metadata = [*headers, *([("authorization", f"Bearer {token}")] if token is not None else [])]
    serialize = type(requests[0]).SerializeToString

    async def sent() -> AsyncIterator[Message]:
        for request in requests:
            yield request

    make = channel.stream_stream if method.client_streaming else channel.unary_stream
    call = make(path_of(method), request_serializer=serialize)(
        sent() if method.client_streaming else requests[0], metadata=metadata, timeout=_PATIENCE_S
    )
    answers: list[bytes] = []
    try:
        while len(answers) < _ANSWERS_MAX:
            reading = asyncio.ensure_future(call.read())
            wait_s = quiet_s if method.server_streaming else _PATIENCE_S
            await asyncio.wait({reading}, timeout=wait_s)
            if not reading.done():
                break
            answer = reading.result()
            if answer is grpc.aio.EOF:
                break
            answers.append(answer)
    except grpc.aio.AioRpcError as error:
        return Outcome(error.code(), _reason(error), tuple(answers))
    finally:
        call.cancel()
    return Outcome(grpc.StatusCode.OK, "", tuple(answers))


def _reason(error: grpc.aio.AioRpcError) -> str:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info):
                    return info.reason
    return ""
