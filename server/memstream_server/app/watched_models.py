"""The models as the engine gets them: every call recorded, and asked something harmless at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

from memstream_server.app.model_status import (
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
    """Ask every endpoint at once. What is wrong is logged and is in the statuses; the server serves meanwhile."""
    await asyncio.gather(*(check() for check in models.checks))


def watched(models: Models, embedding: EmbeddingModel, metrics: Metrics) -> Models:
    """The same models, with the status of each in `statuses`. `embedding` is the space of the data."""
    watching = _Watching(metrics)
    recorder = watching.recorder("embedder", embedding.name)
    embedder = RecordedEmbedder(models.embedder, recorder, metrics, embedding.dimension)
    watching.checks.append(partial(recorder.check, embedder.model))
    following = models.next
    if following is not None:
        recorder = watching.recorder("next_embedder", following.name)
        following = replace(following, embedder=RecordedEmbedder(following.embedder, recorder, metrics))
        watching.checks.append(partial(recorder.check, following.embedder.model))
    reranker, scorer, insights = models.reranker, models.scorer, models.insights
    if reranker is not None:
        reranker = RecordedReranker(reranker, watching.recorder("reranker", reranker.name))
    recorders: list[Recorder] = []
    if scorer is not None:
        recorders.append(watching.recorder("scorer", models.scorer_name))
        scorer = RecordedScorer(scorer, recorders[-1])
    if insights is not None:
        recorders.append(watching.recorder("insights", models.insight_name))
        insights = RecordedInsights(insights, recorders[-1])
    if models.check_llm is not None:
        watching.checks += [partial(one.check, models.check_llm) for one in recorders]
    return replace(
        models,
        embedder=embedder,
        next=following,
        reranker=reranker,
        scorer=scorer,
        insights=insights,
        statuses=tuple(one.status for one in watching.recorders),
        checks=tuple(watching.checks),
    )


@dataclass(slots=True)
class _Watching:
    """What `watched` has made so far."""

    metrics: Metrics
    recorders: list[Recorder] = field(default_factory=list)
    checks: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def recorder(self, role: str, model: str) -> Recorder:
        self.recorders.append(Recorder(ModelStatus(role, model), self.metrics))
        return self.recorders[-1]
