"""Operations: long-running work that outlives a process, one row each.

Contract
- Writes return only after they are durable, and a write that raises leaves nothing, as in the journal
  (ports/journal/port.py), whose errors they raise; `create` raises StaleWrite if the request_id of `answer` has been
  answered meanwhile.
- Ids ascend in the order of creation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from memstream_server.ports.journal.records import Answer


class OperationState(StrEnum):
    """State of an operation; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


UNFINISHED = (OperationState.QUEUED, OperationState.RUNNING)


@dataclass(frozen=True, slots=True)
class OperationFailure:
    """Why an operation failed, for clients."""

    code: int
    """Value of google.rpc.Code."""
    reason: str
    """Name of a memstream.v1.ErrorReason."""
    message: str
    details: Mapping[str, str] = field(default_factory=dict)
    """As in the error of a call."""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One long-running operation."""

    id: str
    type: str
    namespace: str
    """Empty for the whole store."""
    memory: str
    """Name of a memory; empty for the whole namespace."""
    payload: str
    """JSON with all arguments of the work, enough to resume it. Ids and numbers, no content. Empty in a page."""
    state: OperationState = OperationState.QUEUED
    done: int = 0
    total: int = 0
    """0 while unknown."""
    unit: str = ""
    create_time_us: int = 0
    end_time_us: int = 0
    """0 until it has ended."""
    error: OperationFailure | None = None
    cancel_asked: bool = False
    process: int | None = None
    """The process that runs it, on a shared database; None if there is none."""

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.state not in UNFINISHED


class Operations(Protocol):
    """See the module's contract. Methods may be called concurrently from one event loop; none blocks it."""

    async def create(self, operation: Operation, answer: Answer | None = None) -> None: ...

    async def get(self, id: str) -> Operation | None: ...

    async def list_page(self, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
        """Newest first, without payloads, with ids less than `before`; empty arguments do not restrict."""
        ...

    async def save(self, operation: Operation) -> bool:
        """Save state, progress, end and error; returns whether cancellation was requested. Never inserts a row."""
        ...

    async def ask_cancel(self, id: str) -> Operation | None:
        """Request the cancellation of an unfinished operation; returns the operation."""
        ...

    async def claim(self, id: str, process: int | None, former: int | None) -> bool:
        """Move it from `former` (None: nobody) to `process`. False if `former` did not run it, or it has ended."""
        ...

    async def list_unfinished(self) -> list[Operation]:
        """Oldest first."""
        ...

    async def remove_ended(self, before_us: int) -> int:
        """Delete operations that ended before that time; returns their number."""
        ...
