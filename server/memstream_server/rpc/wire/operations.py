"""Converts operations to messages."""

from __future__ import annotations

from google.rpc import status_pb2

from memstream.v1 import operation_pb2 as pb
from memstream_server.ports.operations import Operation, OperationState
from memstream_server.rpc.errors import status_of_rejection
from memstream_server.rpc.wire.scalars import timestamp_message

_STATES = {state: pb.OperationState.Value(f"OPERATION_STATE_{state.name}") for state in OperationState}


def operation_message(operation: Operation) -> pb.Operation:
    """An operation as a client sees it."""
    message = pb.Operation(
        id=operation.id,
        namespace=operation.namespace,
        memory=operation.memory,
        type=operation.type,
        state=_STATES[operation.state],
        done=operation.done,
        total=operation.total,
        unit=operation.unit,
        create_time=timestamp_message(operation.create_time_us),
    )
    if operation.end_time_us:
        message.end_time.CopyFrom(timestamp_message(operation.end_time_us))
    if operation.error is not None:
        message.error.CopyFrom(_error_status(operation))
    return message


def _error_status(operation: Operation) -> status_pb2.Status:
    error = operation.error
    assert error is not None
    return status_of_rejection(error)
