"""The exception tree: every failure of a call or a stream is a MemstreamError.

    MemstreamError                     everything below; `reason`, `details`, `violations`, `retry_after`, `code`
    ├── Refused                        the caller is at fault; repeating the call does not help
    │   ├── InvalidRequest             also a ValueError; `violations` names the fields
    │   │   ├── InvalidArgument        also a TypeError; the SDK rejected `argument` before sending anything
    │   │   ├── RoutingMismatch        the routing metadata names another memory (a proxy rewrote it?)
    │   │   ├── PageTokenInvalid       a page token of another listing; start the listing over
    │   │   └── QueryIdInUse           another query in flight has this query id
    │   ├── NotFound                   also a LookupError
    │   │   ├── MemoryNotFound         create it
    │   │   │   └── MemoryDeleted      it was deleted while the call ran
    │   │   ├── FragmentNotFound       it never existed, or it left (Watch has the event)
    │   │   ├── OperationNotFound      it never existed, or it ended long ago
    │   │   ├── BlockNotFound          put it first; an earlier version is no longer kept
    │   │   └── ConversationNotFound   append a message first
    │   ├── AlreadyExists
    │   │   ├── MemoryExists           pass exist_ok, or choose another name
    │   │   └── RequestIdConflict      a request_id was used for two different requests
    │   ├── Conflict
    │   │   ├── EtagMismatch           read it again, then retry with the new etag
    │   │   └── ProducerSuperseded     another process opened a stream under this producer's name
    │   ├── PreconditionFailed
    │   │   ├── ProtocolViolation      stream messages in an order the contract does not allow
    │   │   ├── SequenceGap            a number is missing; the stream reconnects and continues
    │   │   ├── SequenceConflict       two processes share a producer name; give each its own
    │   │   ├── ModelMismatch          the operator: run `memstream reindex`
    │   │   ├── KindMismatch           this kind of memory lacks the tier or operation
    │   │   └── SettingsMismatch       memstream.local: the directory's server runs with other settings
    │   ├── OutOfRange
    │   │   ├── CursorCompacted        events that old are deleted; list the fragments and watch from there
    │   │   └── CursorVoid             the memory was recreated or restored; list it and watch from there
    │   ├── CapabilityMissing          the server lacks a capability; see `server_info().capabilities`
    │   ├── WindowExceeded             more in flight than granted; the stream reconnects
    │   ├── Unauthenticated            pass a valid token
    │   ├── PermissionDenied           ask for the right, or use another namespace
    │   ├── EventLoopMismatch          a client or stream was used outside of its event loop
    │   ├── QueryCancelled             the query was cancelled
    │   └── StreamClosed               the stream or client was used after it was closed
    ├── Transient                      temporary; wait `retry_after` and try again
    │   ├── Unavailable
    │   │   ├── ShuttingDown           the server is shutting down
    │   │   ├── ModelUnavailable       a model does not respond
    │   │   ├── JournalUnavailable     the journal is temporarily unavailable
    │   │   └── OwnerUnavailable       the server that owns the memory is unreachable
    │   ├── Exhausted
    │   │   ├── BacklogFull            observations arrive faster than the memory stores them
    │   │   ├── StorageFull            the operator: free space on the journal's disk
    │   │   └── QuotaExceeded          a quota is exhausted
    │   └── DeadlineExceeded           also a TimeoutError; the caller's timeout expired
    │       ├── RevisionNotReached     `min_revision` did not become visible in time
    │       └── QueryTimeout           the query exceeded its timeout on the server
    ├── ServerDefect                   the server is at fault; report `details["incident"]`
    ├── LocalServerFailed              memstream.local: the server cannot start or ended; the message quotes its log
    └── ServerBehind                   the operator restored an older backup: acknowledged observations are lost

Streams handle Transient errors themselves: they reconnect until `Retry.later_s` has passed without progress, then raise
the error. Calls are retried while the server is Unavailable, for at most `Retry.calls_s`; other errors are raised at
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class Violation:
    """An invalid field of a request, and why it is invalid."""

    field: str
    description: str


class MemstreamError(Exception):
    """Base class of all errors.

    `reason` is the name of a memstream.v1.ErrorReason, empty when the failure did not come from a memstream server;
    `details` are the server's details of that reason (see the enum); `retry_after` is the delay in seconds that the
    server asks for, or None.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        details: Mapping[str, str] | None = None,
        violations: tuple[Violation, ...] = (),
        retry_after: float | None = None,
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.details = dict(details or {})
        self.violations = violations
        self.retry_after = retry_after
        if code is not None:
            self.code = code

    def summary(self) -> str:
        """The message, followed by the violations that it does not already name."""
        unnamed = [each for each in self.violations if f"{each.field}: " not in self.message]
        named = "; ".join(f"{each.field}: {each.description}" for each in unnamed)
        return f"{self.message} ({named})" if named else self.message

    def __str__(self) -> str:
        return f"{self.reason}: {self.summary()}" if self.reason else self.summary()


class Refused(MemstreamError):
    """The caller is at fault: change the call."""


class InvalidRequest(Refused, ValueError):
    """A field is missing, malformed or out of bounds; `violations` names it."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidArgument(InvalidRequest, TypeError):
    """The SDK rejected an argument before sending anything; `argument` names it, for instance "filter.speakers"."""

    def __init__(self, argument: str, description: str) -> None:
        super().__init__(f"{argument}: {description}", violations=(Violation(argument, description),))
        self.argument = argument


class RoutingMismatch(InvalidRequest):
    """The routing metadata `memstream-memory` differs from the memory in the request."""


class PageTokenInvalid(InvalidRequest):
    """The page token belongs to another listing."""


class QueryIdInUse(InvalidRequest):
    """Another query in flight on the stream has the same id: report it, the SDK generates unique ids."""


class NotFound(Refused, LookupError):
    """A named resource does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class MemoryNotFound(NotFound):
    """No memory has that name: create it."""


class MemoryDeleted(MemoryNotFound):
    """The memory was deleted while the call ran."""


class FragmentNotFound(NotFound):
    """No fragment has that id or external_id."""


class OperationNotFound(NotFound):
    """No operation has that id, or it ended long ago."""


class BlockNotFound(NotFound):
    """The memory has no such block, or no longer that version of it."""


class ConversationNotFound(NotFound):
    """No such conversation, message, plan or state document."""


class AlreadyExists(Refused):
    """The resource to create already exists."""

    code = grpc.StatusCode.ALREADY_EXISTS


class MemoryExists(AlreadyExists):
    """A memory with that name exists: pass exist_ok, or choose another name."""


class RequestIdConflict(AlreadyExists):
    """A request_id was reused for a different request: use a new one per request."""


class Conflict(Refused):
    """A concurrent change came first."""

    code = grpc.StatusCode.ABORTED


class EtagMismatch(Conflict):
    """The etag passed is outdated: read again, then retry with the new etag."""


class ProducerSuperseded(Conflict):
    """Another process opened a stream under this producer's name: end this one, or give each its own name."""


class PreconditionFailed(Refused):
    """The state of the memory or the server does not allow the call."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ProtocolViolation(PreconditionFailed):
    """Stream messages arrived in an order that the contract forbids: report it as a defect of the SDK."""


class SequenceGap(PreconditionFailed):
    """A batch did not start at the expected number. Streams recover automatically; renumber an observe_batch."""


class SequenceConflict(PreconditionFailed):
    """A number was reused with other content: two processes share a producer name; give each its own."""


class ModelMismatch(PreconditionFailed):
    """The memory's vectors are from another model than the server's: the operator runs `memstream reindex`."""


class KindMismatch(PreconditionFailed):
    """The memory's kind lacks the tier or operation."""


class SettingsMismatch(PreconditionFailed):
    """memstream.local: the server of the directory runs with other settings than the call asks for."""


class OutOfRange(Refused):
    """The request is outside of the range that the server keeps."""

    code = grpc.StatusCode.OUT_OF_RANGE


class CursorCompacted(OutOfRange):
    """Events, or what fragments said, are no longer kept for that revision; `details["oldest_revision"]` is the oldest.

    List the fragments and watch from there, or read a later `as_of`.
    """


class CursorVoid(OutOfRange):
    """The cursor is from an earlier memory of that name, or from before a restore: start from the fragment listing. Or
    `as_of` is in the future."""


class CapabilityMissing(Refused):
    """The server lacks `details["capability"]`."""

    code = grpc.StatusCode.UNIMPLEMENTED


class WindowExceeded(Refused):
    """More was sent than the window allows. Streams reconnect automatically, with an empty window."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unauthenticated(Refused):
    """The credentials are missing or not accepted: pass a valid token."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(Refused):
    """The identity lacks the permission for this in that namespace."""

    code = grpc.StatusCode.PERMISSION_DENIED


class EventLoopMismatch(Refused):
    """A client or stream was used outside of its event loop, or without a running event loop."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class QueryCancelled(Refused):
    """The query was cancelled before it was answered."""

    code = grpc.StatusCode.CANCELLED


class StreamClosed(Refused):
    """The stream or the client was used after it was closed or abandoned."""

    code = grpc.StatusCode.CANCELLED


class Transient(MemstreamError):
    """A temporary failure: wait `retry_after` (if set) and try again."""


class Unavailable(Transient):
    """The server is unreachable, or temporarily cannot answer."""

    code = grpc.StatusCode.UNAVAILABLE


class ShuttingDown(Unavailable):
    """The server is shutting down: reconnect."""


class ModelUnavailable(Unavailable):
    """A model that this call needs does not respond."""


class JournalUnavailable(Unavailable):
    """The journal is temporarily unavailable, or the outcome of a write is unknown."""


class OwnerUnavailable(Unavailable):
    """Another server owns the memory and is unreachable."""


class Exhausted(Transient):
    """A resource is temporarily exhausted."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class BacklogFull(Exhausted):
    """Too many observations of this memory are received but not yet stored."""


class StorageFull(Exhausted):
    """The journal's disk is nearly full; reads still work. The operator frees space."""


class QuotaExceeded(Exhausted):
    """A quota of the caller or its namespace is exhausted."""


class DeadlineExceeded(Transient, TimeoutError):
    """The caller's timeout expired."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RevisionNotReached(DeadlineExceeded):
    """`min_revision` did not become visible in time; `details["revision"]` is the visible revision."""


class QueryTimeout(DeadlineExceeded):
    """The query exceeded its timeout on the server."""


class ServerDefect(MemstreamError):
    """The server is at fault: search its log for `details["incident"]`."""

    code = grpc.StatusCode.INTERNAL


class LocalServerFailed(MemstreamError):
    """memstream.local: the server of the directory cannot be started, or ended and was not started again.

    The message names the server's log, and quotes its last lines.
    """

    code = grpc.StatusCode.FAILED_PRECONDITION


class ServerBehind(MemstreamError):
    """The server expects a number below the ones it had acknowledged, and the stream cannot resend them.

    The server was restored from an older backup, or the memory was recreated. The stream ends, so that no loss goes
    unnoticed. Call `observe` again: the new stream continues from `expected_sequence`. The caller sends the
    observations from there up to `acknowledged`, and those this stream had not sent yet, again from its own source.
    """

    code = grpc.StatusCode.DATA_LOSS

    def __init__(self, expected_sequence: int, acknowledged: int) -> None:
        super().__init__(
            f"the server expects observation {expected_sequence} although it had acknowledged {acknowledged}: "
            "it was restored from an older backup, or the memory was recreated. Open a new stream of this producer and "
            f"send the observations from {expected_sequence} on again"
        )
        self.expected_sequence = expected_sequence
        self.acknowledged = acknowledged
