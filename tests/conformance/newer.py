"""A server with a later contract: a proxy that adds unknown elements to the answers of a real server.

Every message gets an extra field, every enum an unknown value (except OBSERVED), streams get messages of an unknown
kind, and errors an unknown reason and detail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from memstream.v1 import event_pb2
from tests.support.contract import FILES
from tests.support.passing import PassingOn

UNKNOWN_FIELD = bytes([0xC2, 0x3E, 3]) + b"new"
"""Field 1000, of 3 bytes."""
UNKNOWN_VALUE = 99
_DETAILS = "grpc-status-details-bin"
_METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in FILES
    for service in file.services_by_name.values()
    for method in service.methods
}


class Newer(PassingOn):
    """The later server, a proxy of a current one."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        """Forwards a call and extends its answers."""
        method = _METHODS[details.method]
        answers = message_factory.GetMessageClass(method.output_type)

        async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            call = self._channel.stream_stream(details.method)(requests)
            try:
                async for answer in call:
                    message = answers.FromString(answer)
                    renew(message)
                    yield message.SerializeToString()
                    if method.server_streaming:
                        yield UNKNOWN_FIELD
            except grpc.aio.AioRpcError as error:
                await context.abort_with_status(_Renewed(error))

        return grpc.stream_stream_rpc_method_handler(forward)


def renew(message: Message) -> None:
    """Adds an unknown field to a message and every message in it, and sets every enum to an unknown value."""
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None and field.message_type.file.package == "memstream.v1":
            for each in value if field.is_repeated else [value]:
                renew(each)
        elif field.type == FieldDescriptor.TYPE_ENUM and field.is_repeated:
            value.append(UNKNOWN_VALUE)
        elif field.type == FieldDescriptor.TYPE_ENUM and value != event_pb2.EVENT_TYPE_OBSERVED:
            setattr(message, field.name, UNKNOWN_VALUE)
    message.MergeFromString(UNKNOWN_FIELD)


class _Renewed(grpc.Status):
    """The same status with an unknown reason, and a detail of an unknown type."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code, self.details = error.code(), error.details() or ""
        said = Status(code=error.code().value[0], message=error.details() or "")
        info = AnyMessage()
        info.Pack(ErrorInfo(reason="NEWER_REASON", domain="memstream.dev", metadata={"newer": "yes"}))
        said.details.extend([AnyMessage(type_url="type.googleapis.com/memstream.v1.Newer", value=b"new"), info])
        self.trailing_metadata = ((_DETAILS, said.SerializeToString()),)
