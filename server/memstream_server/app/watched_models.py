"""The models that the engine uses: every call is recorded, and a check runs at start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.app.models import Models
from memstream_server.observability import Metrics
from memstream_server.ports.models import (
    Account,
    BudgetExhausted,
    ConflictJudge,
    Embedder,
    EmbeddingModel,
    Insights,
    Judgement,
    ModelRefused,
    ModelStatus,
    ModelUnavailable,
    Reranker,
    Scorer,
    Statement,
)


async def check_models(models: Models) -> None:
    """Check all endpoints concurrently. Failures are logged and set in the statuses; they do not stop the server."""
    await asyncio.gather(*(check() for check in models.checks))


def record_models(models: Models, embedding: EmbeddingModel, metrics: Metrics) -> Models:
    """The models with recorded calls, and their statuses in `statuses`. `embedding` is the space of the stored data."""
    watching = _Watching(metrics)
    recorder = watching.add_recorder("embedder", embedding.name)
    embedder = RecordedEmbedder(models.embedder, recorder, metrics, embedding.dimension)
    watching.checks.append(partial(recorder.check_model, embedder.model))
    following = models.next
    if following is not None:
        recorder = watching.add_recorder("next_embedder", following.name)
        following = replace(following, embedder=RecordedEmbedder(following.embedder, recorder, metrics))
        watching.checks.append(partial(recorder.check_model, following.embedder.model))
    reranker, scorer, insights, judge = models.reranker, models.scorer, models.insights, models.judge
    if reranker is not None:
        reranker = RecordedReranker(reranker, watching.add_recorder("reranker", reranker.name))
    recorders: list[Recorder] = []
    if scorer is not None:
        recorders.append(watching.add_recorder("scorer", models.scorer_name))
        scorer = RecordedScorer(scorer, recorders[-1])
    if insights is not None:
        recorders.append(watching.add_recorder("insights", models.insight_name))
        insights = RecordedInsights(insights, recorders[-1])
    if judge is not None:
        recorders.append(watching.add_recorder("conflicts", models.judge_name))
        judge = RecordedConflictJudge(judge, recorders[-1])
    if models.check_llm is not None:
        watching.checks += [partial(one.check_model, models.check_llm) for one in recorders]
    return replace(
        models,
        embedder=embedder,
        next=following,
        reranker=reranker,
        scorer=scorer,
        insights=insights,
        judge=judge,
        statuses=tuple(one.status for one in watching.recorders),
        checks=tuple(watching.checks),
    )


@dataclass(slots=True)
class _Watching:
    """The recorders and checks that `watched` collects."""

    metrics: Metrics
    recorders: list[Recorder] = field(default_factory=list)
    checks: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def add_recorder(self, role: str, model: str) -> Recorder:
        self.recorders.append(Recorder(ModelStatus(role, model), self.metrics))
        return self.recorders[-1]


# Records the outcome of model calls: a status per model, and metrics by role.


log = structlog.get_logger(__name__)


class Recorder:
    """Updates the status and the metrics of one model. `with recorder:` around each call."""

    def __init__(self, status: ModelStatus, metrics: Metrics) -> None:
        self.status = status
        self._failures = metrics.model_failures.labels(status.role)
        self._in_a_row = metrics.model_consecutive_failures.labels(status.role)
        self._success_s = metrics.model_last_success_seconds.labels(status.role)
        self._up = metrics.model_up.labels(status.role)
        self._up.set(1)

    def __enter__(self) -> None:
        """Begin a call; the end of the block records its outcome."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """A refused input is a success; an exhausted budget is ignored."""
        if error is None or isinstance(error, ModelRefused):
            self._record_success()
        elif isinstance(error, ModelUnavailable) and not isinstance(error, BudgetExhausted):
            self._record_failure(error.summary)

    async def check_model(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Send a harmless request; log a failure."""
        try:
            with self:
                await ask()
        except ModelUnavailable as error:
            log.warning("model_check_failed", role=self.status.role, model=self.status.model, error=error)

    def _record_success(self) -> None:
        if self.status.failures:
            self.status.failures, self.status.error = 0, ""
            self._in_a_row.set(0)
            self._up.set(1)
        self.status.succeeded_us = time.time_ns() // 1_000
        self._success_s.set(self.status.succeeded_us / 1e6)

    def _record_failure(self, summary: str) -> None:
        self.status.failures += 1
        self.status.failed_us = time.time_ns() // 1_000
        self.status.error = summary
        self._failures.inc()
        self._in_a_row.set(self.status.failures)
        self._up.set(0)


class RecordedEmbedder:
    """An embedder with timed and recorded calls.

    `dimension` is the stored data's: vectors of another dimension mean that the endpoint's model was replaced.
    """

    def __init__(self, embedder: Embedder, recorder: Recorder, metrics: Metrics, dimension: int | None = None) -> None:
        self._embedder = embedder
        self._recorder = recorder
        self._metrics = metrics
        self._dimension = dimension

    async def model(self) -> EmbeddingModel:
        """The model; not recorded, because later calls send no request."""
        model = await self._embedder.model()
        self._check_dimension(model.dimension)
        return model

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        if not texts:
            return await self._embedder.embed(texts, namespace)
        with self._recorder, self._metrics.model_seconds.time():
            vectors = await self._embedder.embed(texts, namespace)
            self._check_dimension(vectors.shape[1])
            return vectors

    async def close(self) -> None:
        await self._embedder.close()

    def _check_dimension(self, dimension: int) -> None:
        if self._dimension is not None and dimension != self._dimension:
            raise ModelUnavailable(
                f"the model's vectors have {dimension} numbers, those of the data {self._dimension}: "
                "another model answers under its name"
            )


class RecordedScorer:
    """A scorer with recorded calls."""

    def __init__(self, scorer: Scorer, recorder: Recorder) -> None:
        self._scorer = scorer
        self._recorder = recorder

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        if not texts:
            return []
        with self._recorder:
            return await self._scorer.score(texts, account)


class RecordedInsights:
    """Insights with recorded calls."""

    def __init__(self, insights: Insights, recorder: Recorder) -> None:
        self._insights = insights
        self._recorder = recorder

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.promotion_insights(texts, account)

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.derive_questions(texts, count, account)

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.reflect(question, texts, count, account)

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.answer(question, instructions, texts, tokens, account)


class RecordedConflictJudge:
    """A judge of conflicts with recorded calls. An unclear answer is a success."""

    def __init__(self, judge: ConflictJudge, recorder: Recorder) -> None:
        self._judge = judge
        self._recorder = recorder

    async def judge(self, newer: Statement, older: Statement, account: Account | None = None) -> Judgement | None:
        with self._recorder:
            return await self._judge.judge(newer, older, account)


class RecordedReranker:
    """A reranker with recorded calls."""

    def __init__(self, reranker: Reranker, recorder: Recorder) -> None:
        self._reranker = reranker
        self._recorder = recorder
        self.name = reranker.name

    async def closeness(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        with self._recorder:
            return await self._reranker.closeness(question, texts)

    async def close(self) -> None:
        await self._reranker.close()
