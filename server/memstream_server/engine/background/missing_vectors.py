"""Fragments without a vector, whose text the model refused: embedded again in the background and by an operation.

Rule 1. What is missing is read from the journal, so that a new process continues. Each memory that lacks vectors gets a
backfill job, which its owner runs (jobs.py).
Rule 2. One process enters the jobs, the leader. The pause between two rounds doubles while no vector comes of them,
because each attempt may have a price.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.background.jobs import BACKFILL
from memstream_server.engine.background.task import BackgroundTask
from memstream_server.engine.errors import ModelDown
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Job
from memstream_server.ports.models import ModelState

if TYPE_CHECKING:
    from memstream_server.engine.background.jobs import Jobs
    from memstream_server.engine.operations.runner import Progress
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.ownership import Ownership
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
