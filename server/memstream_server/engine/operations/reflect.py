"""The operation "reflect": a memory reflects now, whatever its aggregate.

The insights and a mark of their completion are one commit. A repeat after a crash may call the LLM again, but keeps its
result only once.
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
    """Starts and runs reflections."""

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
        runner.register_type(TYPE, UNIT, self._run_reflect)

    async def start(self, namespace: str, memory: str, answer: AnswerOf = None) -> Operation:
        """Raises MemoryNotFound, KindMismatch without a long-term tier, CapabilityMissing without an LLM."""
        record = await self._registry.read_record(namespace, memory)
        if record.kind not in _WITH_LONG_TERM:
            raise KindMismatch(f"a memory of kind {record.kind.name} has no long-term tier to reflect on")
        self._check_model()
        return await self._runner.start(TYPE, namespace, memory, "{}", answer)

    async def _run_reflect(self, operation: Operation, progress: Progress) -> None:
        self._check_model()
        mark = f"operation\n{operation.id}"
        if await self._storage.journal.get_answer(mark) is None:
            async with self._registry.use(operation.namespace, operation.memory) as actor:
                account = account_of(actor.working.record)
                done = Answer(mark, b"", b"", self._runtime.clock.now_us())
                since = actor.revision
                try:
                    found = await self._jobs.derive_reflections(actor, account)
                except ModelUnavailable as error:
                    raise ModelDown(f"the LLM does not answer: {error.summary}", retry_after_s=5.0) from error
                except ModelRefused:  # a permanent refusal: no insight can be derived
                    found = []
                await self._jobs.store_insights(actor, found, Decision(answer=done), account, Purpose.REFLECTION, since)
        await progress.report_done(1, 1)

    def _check_model(self) -> None:
        if self._models.insights is None:
            raise CapabilityMissing(
                "this server has no LLM for insights: set llm_model (and llm_insights), and restart it",
                capability="REFLECTION",
            )
