"""The operation "reflect": a memory reflects now, whatever its aggregate says.

The insights and the mark that they are there are one commit, so an operation that is run again after a crash asks the
LLM again at most, and keeps its result once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstream_server.core.events import Purpose
from memstream_server.core.values import MemoryKind
from memstream_server.engine.errors import CapabilityMissing, KindMismatch, ModelDown
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.operations.runner import AnswerOf, OperationRunner, Progress
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.models import ModelRefused, ModelUnavailable
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.jobs import Jobs
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

TYPE = "reflect"
UNIT = "reflections"
_WITH_LONG_TERM = (MemoryKind.HYBRID, MemoryKind.LONG_TERM)


class Reflecting:
    """Starts and does it."""

    def __init__(
        self,
        runner: OperationRunner,
        jobs: Jobs,
        registry: Registry,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
    ) -> None:
        self._runner = runner
        self._jobs = jobs
        self._registry = registry
        self._storage = storage
        self._models = models
        self._runtime = runtime
        runner.register(TYPE, UNIT, self._work)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Raises MemoryNotFound, KindMismatch without a long-term tier, CapabilityMissing without an LLM."""
        record = await self._registry.record(namespace, memory)
        if record.kind not in _WITH_LONG_TERM:
            raise KindMismatch(f"a memory of kind {record.kind.name} has no long-term tier to reflect on")
        self._check_model()
        return await self._runner.start(TYPE, namespace, memory, "{}", answer)

    async def _work(self, operation: Operation, progress: Progress) -> None:
        self._check_model()
        mark = f"operation\n{operation.id}"
        if await self._storage.journal.get_answer(mark) is None:
            async with self._registry.use(operation.namespace, operation.memory) as actor:
                account = account_of(actor.working.record)
                done = Answer(mark, b"", b"", self._runtime.clock.now_us())
                since = actor.revision
                try:
                    found = await self._jobs.reflections(actor, account)
                except ModelUnavailable as error:
                    raise ModelDown(f"the LLM does not answer: {error.summary}", retry_after_s=5.0) from error
                except ModelRefused:  # for good: there is nothing to reflect on that it would take
                    found = []
                await self._jobs.keep(actor, found, Decision(answer=done), account, Purpose.REFLECTION, since)
        await progress.at(1, 1)

    def _check_model(self) -> None:
        if self._models.insights is None:
            raise CapabilityMissing(
                "no LLM derives insights on this server: set llm_model (and llm_insights), and restart it",
                capability="REFLECTION",
            )
