"""From the engine's errors to gRPC statuses by the rules of error.proto, and the google.rpc details of a status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Never

import grpc
import grpc.aio
import structlog
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from memstream.v1.error_pb2 import ErrorReason, ErrorRule, rule
from memstream_server.core.printable import escape_unprintable
from memstream_server.engine.errors import EngineError, FieldViolation, JournalUnavailable, OwnerUnreachable
from memstream_server.log_lines import site_of
from memstream_server.ports.journal.errors import OutcomeUnknown, WriteRefused
from memstream_server.ports.journal.writing import Rejection
from memstream_server.ports.models import ModelError
from memstream_server.ports.operations import OperationFailure

log = structlog.get_logger(__name__)

DOMAIN = "memstream.dev"
STATUS_KEY = "grpc-status-details-bin"
_MESSAGE_BYTES_MAX = 600
_VIOLATIONS_MAX = 10
_TOLD_MAX = 5
"""Violations that a message lists."""
_DESCRIPTION_BYTES_MAX = 200
"""Details travel as trailing metadata, of which clients accept 8 KB."""

_Code = grpc.StatusCode

PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Controls the built-in retries of gRPC clients (gRFC A6): milliseconds to wait; negative: do not retry."""
NOT_GIVEN_BACK = (
    "namespace_memories_max",
    "memory_fragments_max",
    "memory_blocks_max",
    "namespace_bytes_max",
    "namespace_receipts_bytes_max",
)
"""Quotas of stored data: waiting does not free them, so clients must not retry automatically."""
_ASKED_AGAIN = (_Code.RESOURCE_EXHAUSTED, _Code.ABORTED)
"""Codes that retry policies commonly name although some of their reasons do not pass with time."""

_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

RULES: dict[str, ErrorRule] = {
    value.name.removeprefix("ERROR_REASON_"): value.GetOptions().Extensions[rule]
    for value in ErrorReason.DESCRIPTOR.values[1:]
}
"""The rule of every reason, from the contract."""
CODES = {reason: grpc.StatusCode[found.code] for reason, found in RULES.items()}
RETRY_S = {
    reason: found.retry_delay.ToTimedelta().total_seconds()
    for reason, found in RULES.items()
    if found.HasField("retry_delay")
}
"""Reasons that always have RetryInfo, with the delay in seconds if the engine sets none."""


class RoutingMismatch(EngineError):
    """The metadata `memstream-memory` names another memory than the request."""

    reason = "ROUTING_MISMATCH"


class PageTokenInvalid(EngineError):
    """Another rpc, or the same one with other arguments, created the page token."""

    reason = "PAGE_TOKEN_INVALID"


class WatcherStalled(EngineError):
    """A watcher left events unread for too long."""

    reason = "QUOTA_EXCEEDED"


class Unauthenticated(EngineError):
    """No identity, or an invalid one. Its text never repeats a credential."""

    reason = "UNAUTHENTICATED"


class OwnerUntrusted(OwnerUnreachable):
    """The certificate of the server that owns the memory is not trusted; its operator must act."""


class PermissionDenied(EngineError):
    """The identity does not have this right in the namespace."""

    reason = "PERMISSION_DENIED"


def status_of(error: EngineError) -> status_pb2.Status:
    """The google.rpc.Status of an error: its code, ErrorInfo, and BadRequest and RetryInfo where they apply."""
    retry_s = error.retry_after_s if error.retry_after_s is not None else RETRY_S.get(error.reason)
    return _make_status(
        CODES.get(error.reason, _Code.INTERNAL), error.reason, error.message, error.details, error.violations, retry_s
    )


def status_of_rejection(refused: Rejection | OperationFailure) -> status_pb2.Status:
    """The status of a rejected item, or of the error that ended an operation.

    Its field violations are parsed from its message.
    """
    violations = violations_in(refused.message) if refused.reason == "INVALID_FIELD" else ()
    retry_s = refused.retry_after_s if isinstance(refused, OperationFailure) else None
    code = _BY_NUMBER.get(refused.code, _Code.UNKNOWN)
    return _make_status(code, refused.reason, refused.message, refused.details, violations, retry_s)


def status_of_any(error: BaseException) -> status_pb2.Status:
    """Like `status_of`. Any other exception is a defect: it is logged under an incident id, and the client gets only
    the id.

    The id depends on the place and the type: the log writes equal failures once, and counts the others.
    """
    if isinstance(error, EngineError):
        if isinstance(error.__cause__, OutcomeUnknown | WriteRefused | ModelError):
            log.warning("call_failed", reason=error.reason, error=error.__cause__)
        return status_of(error)
    if isinstance(error, grpc.aio.InternalError):  # the call is over: nobody reads this status
        return status_pb2.Status(code=_Code.CANCELLED.value[0], message="the client went away")
    incident = site_of(error)
    if isinstance(error, OutcomeUnknown | WriteRefused):  # a read; the text names hosts and paths
        log.warning("journal_unavailable", incident=incident, error=error)
        text = f"the journal cannot be read now; incident {incident} in the server's log"
        return status_of(JournalUnavailable(text, retry_after_s=0.5, incident=incident))
    log.error("defect", incident=incident, exc_info=error)
    text = f"a defect of the server; incident {incident} in its log"
    return _make_status(_Code.INTERNAL, "INTERNAL", text, {"incident": incident}, (), None)


def failure_of(error: Exception) -> OperationFailure:
    """The stored failure of an operation."""
    status = status_of_any(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    waits = False
    for detail in status.details:
        waits = detail.Unpack(retry) or waits
        detail.Unpack(info)
    retry_s = retry.retry_delay.ToMilliseconds() / 1_000 if waits else None
    return OperationFailure(status.code, info.reason, status.message, dict(info.metadata), retry_s)


async def abort_call(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> Never:
    """Ends the call with `status`; raises grpc.aio.AbortError."""
    given = context.trailing_metadata() or ()
    trailing = (*given, *pushback_metadata(status), (STATUS_KEY, status.SerializeToString()))
    await context.abort(_BY_NUMBER[status.code], status.message, trailing_metadata=trailing)


def pushback_metadata(status: status_pb2.Status) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that gives gRPC's built-in retry the same delay as RetryInfo gives a program."""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    waits = False
    for detail in status.details:
        waits = detail.Unpack(retry) or waits
        detail.Unpack(info)
    if waits and info.metadata.get("quota") not in NOT_GIVEN_BACK:
        return ((PUSHBACK_KEY, str(max(1, retry.retry_delay.ToMilliseconds()))),)
    return ((PUSHBACK_KEY, "-1"),) if waits or _BY_NUMBER[status.code] in _ASKED_AGAIN else ()


def violation_text(violations: Iterable[FieldViolation]) -> str:
    """The text "field: what is wrong; field: ...": the whole message of an InvalidField.

    A client may show it alone, because the violations contain nothing more. `violations_in` parses it.
    """
    given = list(violations)
    said = [f"{each.field}: {each.description.replace('; ', ', ')}" for each in given[:_TOLD_MAX]]
    return "; ".join([*said, *([f"and {len(given) - _TOLD_MAX} more"] if len(given) > _TOLD_MAX else [])])


def violations_in(message: str) -> tuple[FieldViolation, ...]:
    """Parses the violations of a text of `violation_text`."""
    parts = (part.partition(": ") for part in message.split("; "))
    return tuple(FieldViolation(name, description) for name, colon, description in parts if colon)


def _make_status(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    details: Mapping[str, str],
    violations: Iterable[FieldViolation],
    retry_s: float | None,
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_clip_text(message, _MESSAGE_BYTES_MAX))
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
    for key, value in details.items():
        info.metadata[key] = _clip_text(value, _DESCRIPTION_BYTES_MAX)
    status.details.add().Pack(info)
    shown = list(violations)[:_VIOLATIONS_MAX]
    if shown:
        bad = error_details_pb2.BadRequest()
        for each in shown:
            description = _clip_text(each.description, _DESCRIPTION_BYTES_MAX)
            bad.field_violations.add(field=_clip_text(each.field, _DESCRIPTION_BYTES_MAX), description=description)
        status.details.add().Pack(bad)
    if retry_s is not None:
        delay = Duration(seconds=int(retry_s), nanos=round(retry_s % 1 * 1e9) % 1_000_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def _clip_text(text: str, bytes_max: int) -> str:
    data = escape_unprintable(text).encode()
    return data.decode() if len(data) <= bytes_max else data[: bytes_max - 3].decode(errors="ignore") + "…"
