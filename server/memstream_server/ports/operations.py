"""Operations: long work that outlives the process that does it. One row each.

Contract
- Writes return only after they are durable, and leave nothing behind when they raise, as those of the journal
  (ports/journal/port.py), whose errors they raise; `create` raises Conflict when the request_id of `answer` was
  answered meanwhile.
- Ids ascend in the order of creation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from memstream_server.ports.journal.records import Answer


class OperationState(StrEnum):
    """Where an operation stands; the last three are its end."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNFINISHED = (OperationState.QUEUED, OperationState.RUNNING)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation failed, as a client may read it."""

    code: int
    """A google.rpc.Code."""
    reason: str
    """A name of memstream.v1.ErrorReason."""
    message: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of long work."""

    id: str
    type: str
    namespace: str
    """Empty for the whole store."""
    memory: str
    """A name; empty for all of the namespace."""
    payload: str
    """JSON: all that the work needs to know, now and when it is run again. Ids and numbers, no content."""
    state: OperationState = OperationState.QUEUED
    done: int = 0
    total: int = 0
    """0 while unknown."""
    unit: str = ""
    create_time_us: int = 0
    end_time_us: int = 0
    """0 while it has not ended."""
    error: Failure | None = None
    cancel_asked: bool = False
    process: int | None = None
    """The process that does it, where there are several; None while nobody does."""

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state not in UNFINISHED


class Operations(Protocol):
    """See the module's contract. Methods may be called concurrently from one event loop; none blocks it."""

    async def create(self, operation: Operation, answer: Answer | None = None) -> None: ...

    async def get(self, id: str) -> Operation | None: ...

    async def page(self, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
        """The newest first, of ids less than `before`; empty strings do not restrict."""
        ...

    async def save(self, operation: Operation) -> bool:
        """State, progress, end and error; whether it was asked to end. One that is not there stays away."""
        ...

    async def ask_cancel(self, id: str) -> Operation | None:
        """An unfinished one is to end; as it is then."""
        ...

    async def claim(self, id: str, process: int | None, former: int | None) -> bool:
        """From `former` (None: nobody) to `process`. False when it was not `former`'s to do, or has ended."""
        ...

    async def unfinished(self) -> list[Operation]:
        """The oldest first."""
        ...

    async def remove_ended(self, before_us: int) -> int:
        """Those that ended before that time go; returns how many."""
        ...
