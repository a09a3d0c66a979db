"""Translates a gRPC status, or what grpc.aio raises for a broken call, into the exceptions of errors.py."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

import memstream.errors as e

_DOMAIN = "memstream.dev"
_STATUS_KEY = "grpc-status-details-bin"

_BY_REASON: dict[str, type[e.MemstreamError]] = {
    "INVALID_FIELD": e.InvalidRequest,
    "PROTOCOL_VIOLATION": e.ProtocolViolation,
    "SEQUENCE_GAP": e.SequenceGap,
    "SEQUENCE_CONFLICT": e.SequenceConflict,
    "ROUTING_MISMATCH": e.RoutingMismatch,
    "MEMORY_NOT_FOUND": e.MemoryNotFound,
    "FRAGMENT_NOT_FOUND": e.FragmentNotFound,
    "OPERATION_NOT_FOUND": e.OperationNotFound,
    "BLOCK_NOT_FOUND": e.BlockNotFound,
    "CONVERSATION_NOT_FOUND": e.ConversationNotFound,
    "MEMORY_EXISTS": e.MemoryExists,
    "REQUEST_ID_CONFLICT": e.RequestIdConflict,
    "ETAG_MISMATCH": e.EtagMismatch,
    "PRODUCER_SUPERSEDED": e.ProducerSuperseded,
    "BACKLOG_FULL": e.BacklogFull,
    "STORAGE_FULL": e.StorageFull,
    "WINDOW_EXCEEDED": e.WindowExceeded,
    "QUOTA_EXCEEDED": e.QuotaExceeded,
    "MODEL_UNAVAILABLE": e.ModelUnavailable,
    "JOURNAL_UNAVAILABLE": e.JournalUnavailable,
    "SHUTTING_DOWN": e.ShuttingDown,
    "OWNER_UNAVAILABLE": e.OwnerUnavailable,
    "MODEL_MISMATCH": e.ModelMismatch,
    "KIND_MISMATCH": e.KindMismatch,
    "CURSOR_COMPACTED": e.CursorCompacted,
    "CURSOR_VOID": e.CursorVoid,
    "REVISION_NOT_REACHED": e.RevisionNotReached,
    "CAPABILITY_MISSING": e.CapabilityMissing,
    "UNAUTHENTICATED": e.Unauthenticated,
    "PERMISSION_DENIED": e.PermissionDenied,
    "INTERNAL": e.ServerDefect,
    "MEMORY_DELETED": e.MemoryDeleted,
    "PAGE_TOKEN_INVALID": e.PageTokenInvalid,
    "QUERY_ID_IN_USE": e.QueryIdInUse,
    "QUERY_TIMEOUT": e.QueryTimeout,
    "QUERY_CANCELLED": e.QueryCancelled,
}

# For a status without ErrorInfo: from a proxy, the transport, or gRPC itself.
_BY_CODE: dict[grpc.StatusCode, type[e.MemstreamError]] = {
    grpc.StatusCode.CANCELLED: e.Unavailable,
    grpc.StatusCode.INVALID_ARGUMENT: e.InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: e.DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: e.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: e.AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: e.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: e.Exhausted,
    grpc.StatusCode.FAILED_PRECONDITION: e.PreconditionFailed,
    grpc.StatusCode.ABORTED: e.Conflict,
    grpc.StatusCode.OUT_OF_RANGE: e.OutOfRange,
    grpc.StatusCode.UNIMPLEMENTED: e.CapabilityMissing,
    grpc.StatusCode.UNAVAILABLE: e.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: e.Unauthenticated,
}

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Codes of a stream that broke between client and server: RST_STREAM is INTERNAL, CANCELLED or UNKNOWN, a proxy's
# # timeout DEADLINE_EXCEEDED (the SDK never sets a deadline on a stream).
_CUT = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def error_from_status(status: Status) -> e.MemstreamError:
    """The exception for a google.rpc.Status with its ErrorInfo, BadRequest and RetryInfo."""
    info = ErrorInfo()
    bad = BadRequest()
    retry = RetryInfo()
    retry_given = False
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
        retry_given = detail.Unpack(retry) or retry_given
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason = info.reason if info.domain == _DOMAIN else ""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, e.ServerDefect)
    return kind(
        status.message or code.name,
        reason=reason,
        details=info.metadata,
        violations=tuple(e.Violation(each.field, each.description) for each in bad.field_violations),
        retry_after=retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if retry_given else None,
        code=code,
    )


def error_from_rpc(error: grpc.aio.AioRpcError) -> e.MemstreamError:
    """The exception for a failed call."""
    return error_from_status(_status_of(error))


def _status_of(error: grpc.aio.AioRpcError) -> Status:
    plain = Status(code=error.code().value[0], message=error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_KEY and isinstance(value, bytes):
            try:
                rich = Status.FromString(value)
            except DecodeError:
                return plain  # malformed details: the code and message of the call are still valid
            return rich if rich.code == plain.code else plain
    return plain


_REASON_LOST = "Internal error from Core"
"""grpc.aio's status of a call that ended during a write; it hides the server's status."""


def translate_error(error: BaseException) -> e.MemstreamError:
    """The exception for an error that a call raised. grpc.aio reports a broken stream in three ways.

    AioRpcError from a read, asyncio.InvalidStateError from a write on an ended call, and CancelledError when the call
    (not the caller's task) was cancelled, for instance by a closed channel. Anything else is a defect.
    """
    if isinstance(error, e.MemstreamError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        if error.details() == _REASON_LOST:
            return e.Unavailable(
                "the call ended while it was written to, and its reason was lost: repeat it", code=error.code()
            )
        return error_from_rpc(error)
    if isinstance(error, asyncio.InvalidStateError | asyncio.CancelledError | grpc.aio.UsageError):
        return e.Unavailable("the call has ended", code=grpc.StatusCode.CANCELLED)
    return e.MemstreamError(f"unexpected {type(error).__name__}: {error}", code=grpc.StatusCode.UNKNOWN)


def task_is_cancelled() -> bool:
    """Whether the CancelledError being handled cancels the running task, not only its call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_cut(error: e.MemstreamError) -> bool:
    """Whether to reopen a stream after this error.

    True for transport failures, transient errors, and errors about numbers and flow control, which the next `opened`
    resolves.
    """
    if isinstance(error, e.SequenceGap | e.WindowExceeded):
        return True
    if isinstance(error, e.Refused | e.ServerBehind):
        return False
    if error.reason:
        return isinstance(error, e.Transient)
    return error.code is grpc.StatusCode.UNAVAILABLE or error.code in _CUT
