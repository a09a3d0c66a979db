"""The operation "purge": erases forgotten fragments after their grace period now instead of at the next maintenance."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from memstream_server.engine.errors import MemoryNotFound, OwnedElsewhere
from memstream_server.engine.operations.runner import POLL_INTERVAL_S, AnswerOf, OperationRunner, Progress
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.retention import Retention
    from memstream_server.engine.runtime.registry import Registry

TYPE = "purge"
UNIT = "fragments"


class Purging:
    """Starts and runs purges."""

    def __init__(self, runner: OperationRunner, forgetting: Retention, registry: Registry) -> None:
        self._runner = runner
        self._retention = forgetting
        self._registry = registry
        runner.register_type(TYPE, UNIT, self._run_purge)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Purge a memory, a namespace, or everything. Raises MemoryNotFound."""
        if memory:
            await self._registry.read_record(namespace, memory)
        return await self._runner.start(TYPE, namespace, memory, "{}", answer)

    async def _run_purge(self, operation: Operation, progress: Progress) -> None:
        done = operation.done
        elsewhere: list[str] = []
        async for record in self._retention.list_forgetful(operation.namespace, operation.memory):
            try:
                async for erased in self._retention.purge_memory(record):
                    done += erased
                    await progress.report_done(done, 0)
            except MemoryNotFound:  # the memory was deleted with all its content
                continue
            except OwnedElsewhere:
                if operation.memory:
                    raise
                elsewhere.append((await self._runner.start(TYPE, record.namespace, record.name, "{}")).id)
        for id in elsewhere:  # their owners run these
            while not (part := await self._runner.get(id)).ended:
                await asyncio.sleep(POLL_INTERVAL_S)
                await progress.report_done(done, 0)
            done += part.done
            await progress.report_done(done, 0)
        await progress.report_done(done, done)
