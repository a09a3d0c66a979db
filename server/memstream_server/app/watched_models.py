"""The models that the engine uses: every call is recorded, and a check runs at start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from memstream_server.app.model_status import (
    RecordedConflictJudge,
    RecordedEmbedder,
    RecordedInsights,
    RecordedReranker,
    RecordedScorer,
    Recorder,
)
from memstream_server.app.models import Models
from memstream_server.observability import Metrics
from memstream_server.ports.models import EmbeddingModel, ModelStatus


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
