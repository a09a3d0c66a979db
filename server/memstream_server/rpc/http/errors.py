"""Statuses as errors of Connect: the same code, text and details as in gRPC."""

from __future__ import annotations

import grpc
from connectrpc.code import Code
from connectrpc.errors import ConnectError, ErrorDetail
from google.rpc import status_pb2
from protobuf.wkt import Any

from memstream_server.rpc.errors import status_of_any

_CODES = {
    code.value[0]: Code(code.name.lower().replace("cancelled", "canceled"))
    for code in grpc.StatusCode
    if code is not grpc.StatusCode.OK
}


def connect_error_of(status: status_pb2.Status) -> ConnectError:
    """The error of a status."""
    details = [ErrorDetail(Any(type_url=each.type_url, value=each.value)) for each in status.details]
    return ConnectError(_CODES.get(status.code, Code.UNKNOWN), status.message, details)


def connect_error(error: BaseException) -> ConnectError:
    """The error of an exception; a defect is logged, and its text stays here."""
    return connect_error_of(status_of_any(error))
