"""The one exception tree: whatever goes wrong, in a call or on a stream, is a MemstreamError.

    MemstreamError                     everything below; `reason`, `details`, `violations`, `retry_after`, `code`
    ├── Refused                        the caller is at fault; the same call again gets the same answer
    │   ├── InvalidRequest             also a ValueError; `violations` names the fields
    │   │   ├── InvalidArgument        also a TypeError; the SDK refused `argument` before it sent anything
    │   │   ├── RoutingMismatch        the routing metadata names another memory (a proxy rewrote it?)
    │   │   ├── PageTokenInvalid       a page token of another listing; start the listing anew
    │   │   └── QueryIdInUse           a query's id is that of a query in flight
    │   ├── NotFound                   also a LookupError
    │   │   ├── MemoryNotFound         create it
    │   │   │   └── MemoryDeleted      it was deleted while the call ran
    │   │   ├── FragmentNotFound       it was never there, or it left by an event that Watch shows
    │   │   ├── OperationNotFound      it ended long ago
    │   │   └── ConversationNotFound   append a message first
    │   ├── AlreadyExists
    │   │   ├── MemoryExists           pass exist_ok, or take another name
    │   │   └── RequestIdConflict      a request_id was used for two different requests
    │   ├── Conflict
    │   │   ├── EtagMismatch           read again and decide anew
    │   │   └── ProducerSuperseded     another process opened a stream under this producer's name
    │   ├── PreconditionFailed
    │   │   ├── ProtocolViolation      stream messages in an order the contract does not allow
    │   │   ├── SequenceGap            a number was left out; the stream continues from `opened` by itself
    │   │   ├── SequenceConflict       two processes number as one producer; give each its own name
    │   │   ├── ModelMismatch          the operator: run `memstream reindex`
    │   │   └── KindMismatch           this kind of memory has not the tier or operation asked for
    │   ├── OutOfRange
    │   │   ├── CursorCompacted        events that old are gone; list the fragments and watch from there
    │   │   └── CursorVoid             the memory was made anew or restored; list it and watch from there
    │   ├── CapabilityMissing          this server cannot do that; see `server_info().capabilities`
    │   ├── WindowExceeded             more in flight than granted; the stream opens again by itself
    │   ├── Unauthenticated            pass a token that is accepted
    │   ├── PermissionDenied           ask for the right, or use another namespace
    │   ├── EventLoopMismatch          a client or stream was used in another event loop than its own
    │   ├── QueryCancelled             the query was given up
    │   └── StreamClosed               the stream or client was used after it was closed
    ├── Transient                      nobody is at fault, or the operator; wait `retry_after` and try again
    │   ├── Unavailable
    │   │   ├── ShuttingDown           the server is going away
    │   │   ├── ModelUnavailable       a model does not answer
    │   │   ├── JournalUnavailable     the journal cannot be used now
    │   │   └── OwnerUnavailable       the server that owns the memory cannot be reached
    │   ├── Exhausted
    │   │   ├── BacklogFull            the memory stores more slowly than it is told
    │   │   ├── StorageFull            the operator: free space on the journal's disk
    │   │   └── QuotaExceeded          a quota is used up
    │   └── DeadlineExceeded           also a TimeoutError; it took longer than the caller would wait
    │       ├── RevisionNotReached     `min_revision` was not visible in time
    │       └── QueryTimeout           the server worked on the query for longer than its timeout
    ├── ServerDefect                   the server is at fault; report `details["incident"]`
    └── ServerBehind                   the operator restored an older backup: acknowledged observations are gone

Streams deal with Transient by themselves (they reconnect until `Retry.later_s` has passed without progress) and raise
it only when they give up; calls are repeated while the server is Unavailable, for `Retry.calls_s` at most, and raise
everything else at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import grpc


@dataclass(frozen=True, slots=True)
class Violation:
    """A field of a request and what is wrong with it."""

    field: str
    description: str


class MemstreamError(Exception):
    """Anything that went wrong.

    `reason` is the name of a memstream.v1.ErrorReason, empty when the failure did not come from a memstream server;
    `details` what the server says beside it (see the enum); `retry_after` seconds to wait, None when no wait was named.
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
        """The message, with those of the violations that it does not name itself."""
        unnamed = [each for each in self.violations if f"{each.field}: " not in self.message]
        named = "; ".join(f"{each.field}: {each.description}" for each in unnamed)
        return f"{self.message} ({named})" if named else self.message

    def __str__(self) -> str:
        return f"{self.reason}: {self.summary()}" if self.reason else self.summary()


class Refused(MemstreamError):
    """The caller's fault: change the call."""


class InvalidRequest(Refused, ValueError):
    """A field is missing, malformed or out of bounds; `violations` says which."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidArgument(InvalidRequest, TypeError):
    """The SDK refused an argument before it sent anything; `argument` names it, for instance "filter.speakers"."""

    def __init__(self, argument: str, description: str) -> None:
        super().__init__(f"{argument}: {description}", violations=(Violation(argument, description),))
        self.argument = argument


class RoutingMismatch(InvalidRequest):
    """The metadata `memstream-memory` names another memory than the request."""


class PageTokenInvalid(InvalidRequest):
    """A page token was not made by this listing."""


class QueryIdInUse(InvalidRequest):
    """A query's id is that of a query in flight on its stream: report it, the SDK gives each its own."""


class NotFound(Refused, LookupError):
    """What was named is not there."""

    code = grpc.StatusCode.NOT_FOUND


class MemoryNotFound(NotFound):
    """No memory of that name: create it."""


class MemoryDeleted(MemoryNotFound):
    """The memory was deleted while the call ran."""


class FragmentNotFound(NotFound):
    """No fragment of that id or external_id."""


class OperationNotFound(NotFound):
    """No operation of that id, or it ended long ago."""


class ConversationNotFound(NotFound):
    """No such conversation, message or plan."""


class AlreadyExists(Refused):
    """What was to be made is there."""

    code = grpc.StatusCode.ALREADY_EXISTS


class MemoryExists(AlreadyExists):
    """A memory of that name exists: pass exist_ok, or take another name."""


class RequestIdConflict(AlreadyExists):
    """A request_id came again with another request: use a new one per request."""


class Conflict(Refused):
    """Somebody else was faster."""

    code = grpc.StatusCode.ABORTED


class EtagMismatch(Conflict):
    """The etag given is not the current one: read again and decide anew."""


class ProducerSuperseded(Conflict):
    """Another process opened a stream under this producer's name: end this one, or give each its own name."""


class PreconditionFailed(Refused):
    """The memory or the server is not in a state that allows it."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ProtocolViolation(PreconditionFailed):
    """Stream messages came in an order the contract does not allow: report it, the SDK should not send such."""


class SequenceGap(PreconditionFailed):
    """A batch did not start at the number expected. Streams reopen by themselves; observe_batch: ask and renumber."""


class SequenceConflict(PreconditionFailed):
    """A number came again with other content: two processes share a producer name, give each its own."""


class ModelMismatch(PreconditionFailed):
    """The memory's vectors are of another model than the server's: the operator runs `memstream reindex`."""


class KindMismatch(PreconditionFailed):
    """The memory's kind has not the tier or operation asked for."""


class OutOfRange(Refused):
    """What was asked for lies outside of what is kept."""

    code = grpc.StatusCode.OUT_OF_RANGE


class CursorCompacted(OutOfRange):
    """Events that old are no longer kept; `details["oldest_revision"]`. List the fragments and watch from there."""


class CursorVoid(OutOfRange):
    """The cursor is of an earlier memory of that name, or from before a restore: start from the fragment listing."""


class CapabilityMissing(Refused):
    """This server does not have `details["capability"]`."""

    code = grpc.StatusCode.UNIMPLEMENTED


class WindowExceeded(Refused):
    """More was sent than the window granted. Streams reopen by themselves, with an empty window."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unauthenticated(Refused):
    """No identity, or one that is not accepted: pass another token."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(Refused):
    """The identity may not do this in that namespace."""

    code = grpc.StatusCode.PERMISSION_DENIED


class EventLoopMismatch(Refused):
    """A client or stream was used in another event loop than its own, or where none runs."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class QueryCancelled(Refused):
    """The query was given up before its answer was there."""

    code = grpc.StatusCode.CANCELLED


class StreamClosed(Refused):
    """The stream or the client was used after it was closed or abandoned."""

    code = grpc.StatusCode.CANCELLED


class Transient(MemstreamError):
    """Nobody's fault, or the operator's: wait `retry_after` (if it says so) and try again."""


class Unavailable(Transient):
    """The server cannot be reached, or cannot answer now."""

    code = grpc.StatusCode.UNAVAILABLE


class ShuttingDown(Unavailable):
    """The server is going away: reconnect."""


class ModelUnavailable(Unavailable):
    """A model this call needs does not answer."""


class JournalUnavailable(Unavailable):
    """The journal cannot be written or read now, or a write's outcome is unknown."""


class OwnerUnavailable(Unavailable):
    """Another server owns the memory and cannot be reached."""


class Exhausted(Transient):
    """There is no room for it now."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class BacklogFull(Exhausted):
    """Too many observations of this memory are received and not yet stored."""


class StorageFull(Exhausted):
    """The journal's disk is nearly full; reads go on. The operator frees space."""


class QuotaExceeded(Exhausted):
    """A quota of the caller or its namespace is used up."""


class DeadlineExceeded(Transient, TimeoutError):
    """It took longer than the caller would wait."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RevisionNotReached(DeadlineExceeded):
    """`min_revision` was not visible in time; `details["revision"]` is what was."""


class QueryTimeout(DeadlineExceeded):
    """The server worked on the query for longer than its timeout, and gave up."""


class ServerDefect(MemstreamError):
    """The server's fault: look `details["incident"]` up in its log."""

    code = grpc.StatusCode.INTERNAL


class ServerBehind(MemstreamError):
    """The server expects a lower number than it had acknowledged, and what lies between is no longer held here.

    It was restored from an older backup, or the memory was made anew. The stream ends, so that nothing is left out
    unnoticed; `observe` again: a new stream goes on from `expected_sequence`. What was numbered from there up to
    `acknowledged`, and what this stream had not sent yet, is the caller's to send again from its own source.
    """

    code = grpc.StatusCode.DATA_LOSS

    def __init__(self, expected_sequence: int, acknowledged: int) -> None:
        super().__init__(
            f"the server expects observation {expected_sequence} although it had acknowledged {acknowledged}: "
            "it was restored from an older backup, or the memory was made anew. A new stream of this producer goes on "
            f"from {expected_sequence}; send again what it lacks"
        )
        self.expected_sequence = expected_sequence
        self.acknowledged = acknowledged
