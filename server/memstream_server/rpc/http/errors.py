"""Statuses as errors of Connect: the same code, text and details as in gRPC."""

from __future__ import annotations

import math

import grpc
from connectrpc.code import Code
from connectrpc.errors import ConnectError, ErrorDetail
from connectrpc.request import Headers
from google.protobuf import any_pb2, descriptor_pool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from protobuf import Message, message_from_json_value
from protobuf.wkt import Any, Struct

from memstream_server.rpc.errors import status_of_any

_CODES = {
    code.value[0]: Code(code.name.lower().replace("cancelled", "canceled"))
    for code in grpc.StatusCode
    if code is not grpc.StatusCode.OK
}
_RETRY_INFO = error_details_pb2.RetryInfo.DESCRIPTOR.full_name


class _ReadableDetail(ErrorDetail):
    """A detail that also appears as JSON, under the key `debug` of Connect, for clients without protobuf."""

    def __init__(self, detail: any_pb2.Any) -> None:
        super().__init__(Any(type_url=detail.type_url, value=detail.value))
        message = GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(detail.TypeName()))()
        detail.Unpack(message)
        self._readable = message_from_json_value(Struct, MessageToDict(message))

    def value(self, *_: object) -> Message:  # type: ignore[override]  # ConnectRPC writes JSON only of its own messages
        """The message as a JSON object."""
        return self._readable


def connect_error_of(status: status_pb2.Status) -> ConnectError:
    """The error of a status."""
    return ConnectError(_CODES.get(status.code, Code.UNKNOWN), status.message, map(_ReadableDetail, status.details))


def connect_error(error: BaseException) -> ConnectError:
    """The error of an exception; a defect is logged, and its text stays here."""
    return connect_error_of(status_of_any(error))


def set_error_headers(error: ConnectError, headers: Headers) -> None:
    """Sets what HTTP clients know: Retry-After, in whole seconds, and WWW-Authenticate."""
    for each in error.details:
        if each.type_name == _RETRY_INFO:
            delay = error_details_pb2.RetryInfo.FromString(each.message_bytes).retry_delay
            headers["retry-after"] = str(math.ceil(delay.ToTimedelta().total_seconds()))
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
