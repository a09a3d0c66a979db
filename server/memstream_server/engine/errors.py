"""The engine's errors, each with the name of its memstream.v1.ErrorReason; rpc/errors.py maps them to statuses."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from memstream_server.ports.journal.errors import (
    AlreadyExists,
    AnswerExists,
    JournalError,
    NamespaceFull,
    StaleWrite,
    StorageFull,
    WriteRefused,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A request field and what is wrong with it."""

    field: str
    description: str


class EngineError(Exception):
    """Base class. `reason` is a name of memstream.v1.ErrorReason; `details` becomes ErrorInfo.metadata.

    The keys of the details are those that the reason's ErrorRule in error.proto names; a test compares. The caller sees
    the message, so it never quotes a database or an endpoint.
    """

    reason = "INTERNAL"

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


class ProtocolViolation(EngineError):
    """Stream messages came in an order that the contract does not allow."""

    reason = "PROTOCOL_VIOLATION"


class SequenceGap(EngineError):
    """A batch does not start at the expected number."""

    reason = "SEQUENCE_GAP"


class SequenceConflict(EngineError):
    """A number was reused with other content."""

    reason = "SEQUENCE_CONFLICT"


class MemoryNotFound(EngineError):
    """There is no memory of that name."""

    reason = "MEMORY_NOT_FOUND"


class MemoryDeleted(MemoryNotFound):
    """The memory was deleted while the call ran."""

    reason = "MEMORY_DELETED"


class MemoryExists(EngineError):
    """A memory of that name exists; for an import also a conversation."""

    reason = "MEMORY_EXISTS"


class FragmentNotFound(EngineError):
    """There is no fragment with that id or external id."""

    reason = "FRAGMENT_NOT_FOUND"


class ConversationNotFound(EngineError):
    """There is no such conversation, message, plan or state document."""

    reason = "CONVERSATION_NOT_FOUND"


class BlockNotFound(EngineError):
    """The memory has no such block, or no longer that version of it."""

    reason = "BLOCK_NOT_FOUND"


class OperationNotFound(EngineError):
    """There is no operation with that id, or its record has expired."""

    reason = "OPERATION_NOT_FOUND"


class RequestIdConflict(EngineError):
    """A request_id was reused with another request."""

    reason = "REQUEST_ID_CONFLICT"


class QueryIdInUse(EngineError):
    """A query with that id is in flight on the stream."""

    reason = "QUERY_ID_IN_USE"


class QueryTimeout(EngineError):
    """The query's timeout passed before its answer."""

    reason = "QUERY_TIMEOUT"


class QueryCancelled(EngineError):
    """The client cancelled the query."""

    reason = "QUERY_CANCELLED"


class AlreadyAnswered(EngineError):
    """A concurrent repeat of the request has stored an answer; the caller gets that answer."""

    reason = "JOURNAL_UNAVAILABLE"


class EtagMismatch(EngineError):
    """The etag is not the current one."""

    reason = "ETAG_MISMATCH"


class ProducerSuperseded(EngineError):
    """A newer stream of the same producer was opened."""

    reason = "PRODUCER_SUPERSEDED"


class BacklogFull(EngineError):
    """Too many observations received and not yet stored."""

    reason = "BACKLOG_FULL"


class WindowExceeded(EngineError):
    """The client sent more than its flow-control window allows."""

    reason = "WINDOW_EXCEEDED"


class QuotaExceeded(EngineError):
    """A quota is exhausted. The details `quota` and `limit` give its name and value."""

    reason = "QUOTA_EXCEEDED"
    refusal_delay_s = 0.0
    """How long the server delays the refusal."""


class StorageIsFull(EngineError):
    """The journal's disk is nearly full."""

    reason = "STORAGE_FULL"


class JournalUnavailable(EngineError):
    """The journal cannot be written now, or the outcome of a write is unknown."""

    reason = "JOURNAL_UNAVAILABLE"


class ModelDown(EngineError):
    """A model that the call needs does not answer."""

    reason = "MODEL_UNAVAILABLE"


class ModelMismatch(EngineError):
    """The stored vectors belong to another model than the server's."""

    reason = "MODEL_MISMATCH"


class KindMismatch(EngineError):
    """The memory's kind lacks the requested tier."""

    reason = "KIND_MISMATCH"


class ShuttingDown(EngineError):
    """The server is shutting down."""

    reason = "SHUTTING_DOWN"


# The next three have the detail `begun` if the call may have had an effect.


class OwnedElsewhere(EngineError):
    """Another server owns the memory."""

    reason = "OWNER_UNAVAILABLE"


class LeaseLost(EngineError):
    """This server no longer owns its memories: the lease expired, or its connection was lost."""

    reason = "OWNER_UNAVAILABLE"


class OwnerUnreachable(EngineError):
    """The owner of the memory cannot be reached, or ended during the call."""

    reason = "OWNER_UNAVAILABLE"


class RevisionNotReached(EngineError):
    """min_revision was not reached in time."""

    reason = "REVISION_NOT_REACHED"


class CursorVoid(EngineError):
    """The cursor belongs to an earlier memory of that name."""

    reason = "CURSOR_VOID"


class CursorCompacted(EngineError):
    """Events that old have been pruned."""

    reason = "CURSOR_COMPACTED"


class CapabilityMissing(EngineError):
    """This server does not have that capability."""

    reason = "CAPABILITY_MISSING"


REFUSED_RETRY_S = 5.0
"""Retry delay while the disk takes no write."""
QUOTA_RETRY_S = 60.0
"""Retry delay for quotas of stored data: waiting frees nothing, only a deletion does."""


DISK_FULL = "the journal's disk has no space left: reads work, writes are refused until space is freed"
NOT_WRITTEN = "the journal cannot be written now: try again"
NOT_READ = "the journal cannot be read now: try again"


def namespace_full(error: NamespaceFull) -> QuotaExceeded:
    """The error for a caller that would create one memory too many."""
    return QuotaExceeded(
        f"{error}: delete one, or use another namespace",
        retry_after_s=QUOTA_RETRY_S,
        quota="namespace_memories_max",
        limit=error.limit,
    )


def answered_error(error: AnswerExists) -> AlreadyAnswered:
    """The error for the caller of a write whose request has an answer, should that be gone when it is read."""
    return AlreadyAnswered(f"{error}: try again", retry_after_s=0.1)


def write_error(error: JournalError) -> StorageIsFull | JournalUnavailable:
    """The error for the caller of a write that the journal did not take."""
    if isinstance(error, StorageFull):
        return StorageIsFull(DISK_FULL, retry_after_s=REFUSED_RETRY_S)
    if isinstance(error, WriteRefused):
        text = f"the journal cannot be written ({error.cause}): reads work, writes are refused until it can"
        return JournalUnavailable(text, retry_after_s=REFUSED_RETRY_S)
    return JournalUnavailable(NOT_WRITTEN, retry_after_s=0.5)


async def map_write_errors(writing: Awaitable[T]) -> T:
    """Await a journal write and raise its errors as engine errors."""
    try:
        return await writing
    except AlreadyExists:
        raise
    except NamespaceFull as error:
        raise namespace_full(error) from error
    except AnswerExists as error:
        raise answered_error(error) from error
    except StaleWrite as error:
        raise MemoryDeleted("the memory was deleted") from error
    except JournalError as error:
        raise write_error(error) from error
