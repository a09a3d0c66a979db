"""Brings the vectors of an earlier server into the forms that take less space, in the background, once per store.

Rule 1. Both forms are readable at any time. The journal has the last memory that is done, so that a restart continues.
Rule 2. Rounding moves a cosine by less than 0.0005. The memory is loaded again after it, and its image is removed, so
that RAM has what the journal has.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.background.task import BackgroundTask
from memstream_server.engine.errors import EngineError
from memstream_server.ports.journal.errors import JournalError

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

SLICE = 256
"""Vectors converted per write, some 10 ms of it."""
PAUSE_S = 0.05
"""Between slices: a fifth of the writer's time at most."""
MEMORIES = 200
"""Memories listed, and done before the journal says so."""
RETRY_S = 30.0


class Compaction(BackgroundTask):
    """One background task. The engine starts and stops it."""

    def __init__(self, storage: Storage, registry: Registry) -> None:
        self._storage = storage
        self._journal = storage.journal
        self._registry = registry

    async def wait(self) -> None:
        """Until everything is converted."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while True:
            try:
                if self._registry.ownership.leads:
                    await self._convert_all()
                    return
            except (JournalError, EngineError) as error:
                log.warning("compaction_failed", error=error, retry_in_s=RETRY_S)
            await asyncio.sleep(RETRY_S)

    async def _convert_all(self) -> None:
        after = await self._journal.compacted_up_to()
        while after is not None:
            page = await self._journal.all_memories(after, MEMORIES)
            for record in page:
                await self._convert_memory(record.uid)
            after = page[-1].uid if page else None
            await self._journal.set_compacted(after)

    async def _convert_memory(self, uid: str) -> None:
        position: int | None = -1
        is_rounded = False
        while position is not None:
            position, written, rounded = await self._journal.compact_vectors(uid, position, SLICE)
            is_rounded = is_rounded or rounded
            if written:
                await asyncio.sleep(PAUSE_S)
        if is_rounded:
            self._storage.images.drop(uid)
            with contextlib.suppress(EngineError):
                await self._registry.load_again(uid)
