"""The actor as its ingest and sessions see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from memstream_server.engine.errors import EngineError
    from memstream_server.engine.memory.receipts import Batch
    from memstream_server.engine.memory.working_set import WorkingSet


class Decider(Protocol):
    """Decides and commits the batches of a memory."""

    @property
    def working(self) -> WorkingSet: ...

    @property
    def uid(self) -> str: ...

    @property
    def revision(self) -> int: ...

    def raise_if_failed(self) -> None: ...

    def fail(self, error: EngineError) -> EngineError: ...

    def queue_batch(self, batch: Batch) -> None: ...

    async def store_at_once(self, batches: tuple[Batch, ...]) -> None: ...
