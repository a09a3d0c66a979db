"""Vectors that are not as they should be: missing ones, whose text the model refused, are embedded again in the
background and by an operation; those of an earlier server are brought into smaller forms, once per store.

Rule 1. What is missing is read from the journal, so that a new process continues. Each memory that lacks vectors gets a
backfill job, which its owner runs (jobs.py).
Rule 2. One process enters the jobs, the leader. The pause between two rounds doubles while no vector comes of them,
because each attempt may have a price.
Rule 3. Both forms of a vector are readable at any time. The journal has the last memory that is done, so that a restart
continues.
Rule 4. Rounding moves a cosine by less than 0.0005. The memory is loaded again after it, and its image is removed, so
that RAM has what the journal has.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.background.jobs import BACKFILL
from memstream_server.engine.background.task import BackgroundTask
from memstream_server.engine.errors import EngineError, ModelDown
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Job
from memstream_server.ports.models import ModelState

if TYPE_CHECKING:
    from memstream_server.engine.background.jobs import Jobs
    from memstream_server.engine.operations.runner import Progress
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.ownership import Ownership
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.operations import OperationFailure

log = structlog.get_logger(__name__)

PAUSES_MAX = 36
"""The longest pause, in intervals: six hours of the default."""
POLL_INTERVAL_S = 0.25


class MissingVectors(BackgroundTask):
    """The rounds, and the work of `memstream reindex --missing`. The engine starts and stops it."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, ownership: Ownership, jobs: Jobs
    ) -> None:
        self._journal = storage.journal
        self._models = models
        self._runtime = runtime
        self._ownership = ownership
        self._jobs = jobs

    async def embed_all(self, progress: Progress) -> None:
        """Embed what is missing, and wait until every text was tried; `progress` counts those that have a vector now.
        Raises OperationCancelled; entered jobs are done nevertheless.
        """
        total = max(progress.operation.total, await self._journal.count_unvectored())
        await self._enter_jobs()
        while await self._journal.count_jobs(BACKFILL):
            await progress.report_wait(self._explain_wait())
            await progress.report_done(max(total - await self._journal.count_unvectored(), 0), total)
            await asyncio.sleep(POLL_INTERVAL_S)
        await progress.report_wait(None)
        await progress.report_done(max(total - await self._journal.count_unvectored(), 0), total)

    def _explain_wait(self) -> OperationFailure | None:
        failing = [one for one in self._models.statuses if one.role == "embedder" and one.state is ModelState.FAILING]
        if not failing:
            return None
        return self._runtime.failure_of(
            ModelDown(f"the embedding model does not answer, retrying: {failing[0].error}", retry_after_s=1.0)
        )

    async def _run(self) -> None:
        interval_s = self._runtime.limits.vector_retry_s
        pause_s, before = interval_s, 0
        while True:
            await asyncio.sleep(pause_s)
            if not self._ownership.leads:
                continue
            try:
                count = await self._journal.count_unvectored()
                if count:
                    await self._enter_jobs()
            except JournalError as error:
                log.warning("missing_vectors_not_read", error=error)
                continue
            pause_s = min(2 * pause_s, PAUSES_MAX * interval_s) if count and count == before else interval_s
            before = count

    async def _enter_jobs(self) -> None:
        memories = await self._journal.list_unvectored_memories()
        now_us = self._runtime.clock.now_us()
        entered = [Job(self._runtime.ids.next_id(), uid, BACKFILL, "{}", now_us) for uid, _ in memories]
        await self._journal.enter_jobs(BACKFILL, entered)
        self._jobs.notify_jobs()
        if memories:
            log.info("missing_vectors", memories=len(memories), fragments=sum(count for _, count in memories))


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
