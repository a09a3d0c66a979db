"""What the engine refuses, each with the name of its memstream.v1.ErrorReason; rpc/errors.py maps them to statuses."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from memstream_server.ports.journal.errors import AlreadyExists, Conflict, JournalError, NamespaceFull, StorageFull

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field and what is wrong with it."""

    field: str
    description: str


class EngineError(Exception):
    """Base. `reason` is a name of memstream.v1.ErrorReason, `details` goes into ErrorInfo.metadata.

    The details of an error have all of `keys`, perhaps some of `optional_keys`, and no others: error.proto documents
    them and a test compares. The message goes to the caller: it repeats nothing that a database or an endpoint said.
    """

    reason = "INTERNAL"
    keys: ClassVar[tuple[str, ...]] = ()
    optional_keys: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: tuple[FieldViolation, ...] = (),
        **details: str | int,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = violations
        self.details = {key: str(value) for key, value in details.items()}


class InvalidField(EngineError):
    """A field is missing, malformed or out of bounds."""

    reason = "INVALID_FIELD"
    optional_keys = ("line",)


class ProtocolViolation(EngineError):
    """Stream messages came in an order the contract does not allow."""

    reason = "PROTOCOL_VIOLATION"


class SequenceGap(EngineError):
    """A batch does not start at the expected number."""

    reason = "SEQUENCE_GAP"
    keys = ("expected_sequence",)


class SequenceConflict(EngineError):
    """A number came again with other content."""

    reason = "SEQUENCE_CONFLICT"
    keys = ("sequence",)


class MemoryNotFound(EngineError):
    """No memory of that name."""

    reason = "MEMORY_NOT_FOUND"
    keys: ClassVar[tuple[str, ...]] = ("namespace", "memory")


class MemoryDeleted(MemoryNotFound):
    """The memory was deleted while the call ran."""

    reason = "MEMORY_DELETED"
    keys = ()


class MemoryExists(EngineError):
    """A memory of that name exists; to an import also a conversation."""

    reason = "MEMORY_EXISTS"
    keys = ("namespace",)
    optional_keys = ("memory", "conversation", "differs")


class FragmentNotFound(EngineError):
    """No fragment of that id or key."""

    reason = "FRAGMENT_NOT_FOUND"
    keys = ("id",)


class ConversationNotFound(EngineError):
    """No such conversation, message or plan."""

    reason = "CONVERSATION_NOT_FOUND"
    keys = ("conversation",)


class OperationNotFound(EngineError):
    """No operation of that id, or it ended long ago."""

    reason = "OPERATION_NOT_FOUND"
    keys = ("id",)


class RequestIdConflict(EngineError):
    """A request_id came again with another request."""

    reason = "REQUEST_ID_CONFLICT"


class QueryIdInUse(EngineError):
    """A query of that id is in flight on the stream."""

    reason = "QUERY_ID_IN_USE"
    keys = ("query_id",)


class QueryTimeout(EngineError):
    """A query's own time passed before its answer was there."""

    reason = "QUERY_TIMEOUT"


class QueryCancelled(EngineError):
    """The client gave the query up."""

    reason = "QUERY_CANCELLED"


class AlreadyAnswered(EngineError):
    """A repeat overtook the call it repeats, which was answered meanwhile: its answer is there to be served."""

    reason = "JOURNAL_UNAVAILABLE"


class EtagMismatch(EngineError):
    """The etag given is not the current one."""

    reason = "ETAG_MISMATCH"
    keys = ("etag",)


class ProducerSuperseded(EngineError):
    """A newer stream of the same producer was opened."""

    reason = "PRODUCER_SUPERSEDED"


class BacklogFull(EngineError):
    """Too many observations received and not yet stored."""

    reason = "BACKLOG_FULL"


class WindowExceeded(EngineError):
    """More was sent than the window granted allows."""

    reason = "WINDOW_EXCEEDED"


class QuotaExceeded(EngineError):
    """A quota is used up. `quota` and `limit` among the details name it and tell how much it is."""

    reason = "QUOTA_EXCEEDED"
    keys = ("quota", "limit")
    told_in_s = 0.0
    """How long the caller is to wait for the refusal itself."""


class StorageIsFull(EngineError):
    """The journal's disk is nearly full."""

    reason = "STORAGE_FULL"


class JournalUnavailable(EngineError):
    """The journal cannot be written now, or a write's outcome is unknown."""

    reason = "JOURNAL_UNAVAILABLE"
    optional_keys = ("incident",)


class ModelDown(EngineError):
    """A model this call needs does not answer."""

    reason = "MODEL_UNAVAILABLE"


class ModelMismatch(EngineError):
    """The store's vectors are of another model than the server's."""

    reason = "MODEL_MISMATCH"


class KindMismatch(EngineError):
    """The memory's kind has not the tier asked for."""

    reason = "KIND_MISMATCH"


class ShuttingDown(EngineError):
    """The server is going away."""

    reason = "SHUTTING_DOWN"


# The three that follow have the detail `begun` where what was asked may have been done.


class OwnedElsewhere(EngineError):
    """Another server owns the memory."""

    reason = "OWNER_UNAVAILABLE"
    optional_keys = ("begun",)


class LeaseLost(EngineError):
    """This server may not answer for the memories it had: its lease ran out, or its connection was lost."""

    reason = "OWNER_UNAVAILABLE"
    optional_keys = ("begun",)


class OwnerUnreachable(EngineError):
    """The server that owns the memory cannot be reached, or ended while it was asked."""

    reason = "OWNER_UNAVAILABLE"
    optional_keys = ("begun",)


class RevisionNotReached(EngineError):
    """min_revision was not reached in time."""

    reason = "REVISION_NOT_REACHED"
    keys = ("revision",)


class CursorVoid(EngineError):
    """The cursor is of an earlier memory of that name."""

    reason = "CURSOR_VOID"


class CursorCompacted(EngineError):
    """Events that old are no longer kept."""

    reason = "CURSOR_COMPACTED"
    keys = ("oldest_revision",)


class CapabilityMissing(EngineError):
    """This server does not have that capability."""

    reason = "CAPABILITY_MISSING"
    keys = ("capability",)


QUOTA_RETRY_S = 60.0
"""When to ask again whether something was deleted: a quota of what is kept is not given back by waiting."""


DISK_FULL = "the journal's disk is nearly full: reads go on, writes are refused until there is room"
NOT_WRITTEN = "the journal cannot be written now: try again"
NOT_READ = "the journal cannot be read now: try again"


def namespace_full(error: NamespaceFull) -> QuotaExceeded:
    """What a caller is told who would make one memory too many."""
    return QuotaExceeded(
        f"{error}: delete one, or use another namespace",
        retry_after_s=QUOTA_RETRY_S,
        quota="namespace_memories_max",
        limit=error.limit,
    )


async def written(writing: Awaitable[T]) -> T:
    """A journal write with its refusals as the engine's."""
    try:
        return await writing
    except StorageFull as error:
        raise StorageIsFull(DISK_FULL, retry_after_s=5.0) from error
    except AlreadyExists:
        raise
    except NamespaceFull as error:
        raise namespace_full(error) from error
    except Conflict as error:
        raise MemoryDeleted("the memory was deleted meanwhile") from error
    except JournalError as error:
        raise JournalUnavailable(NOT_WRITTEN, retry_after_s=0.5) from error
