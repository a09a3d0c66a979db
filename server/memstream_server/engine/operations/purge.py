"""The operation "purge": what was forgotten and whose grace has passed is erased now instead of in time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from memstream_server.engine.errors import MemoryNotFound, OwnedElsewhere
from memstream_server.engine.operations.runner import LOOK_S, AnswerOf, OperationRunner, Progress
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.retention import Forgetting
    from memstream_server.engine.runtime.registry import Registry

TYPE = "purge"
UNIT = "fragments"


class Purging:
    """Starts and does it."""

    def __init__(self, runner: OperationRunner, forgetting: Forgetting, registry: Registry) -> None:
        self._runner = runner
        self._forgetting = forgetting
        self._registry = registry
        runner.register(TYPE, UNIT, self._work)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Of a memory, a namespace, or everything. Raises MemoryNotFound."""
        if memory:
            await self._registry.record(namespace, memory)
        return await self._runner.start(TYPE, namespace, memory, "{}", answer)

    async def _work(self, operation: Operation, progress: Progress) -> None:
        done = operation.done
        elsewhere: list[str] = []
        async for record in self._forgetting.memories(operation.namespace, operation.memory):
            try:
                async for erased in self._forgetting.purge(record):
                    done += erased
                    await progress.at(done, 0)
            except MemoryNotFound:  # deleted meanwhile, and all it held with it
                continue
            except OwnedElsewhere:
                if operation.memory:
                    raise
                elsewhere.append((await self._runner.start(TYPE, record.namespace, record.name, "{}")).id)
        for id in elsewhere:  # their owners' to do
            while not (part := await self._runner.get(id)).ended:
                await asyncio.sleep(LOOK_S)
                await progress.at(done, 0)
            done += part.done
            await progress.at(done, 0)
        await progress.at(done, done)
