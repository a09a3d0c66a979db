"""What the engine and the models do, as Prometheus metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.observability import Metrics
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.models import Embedder, EmbeddingModel


class MeasuredEmbedder:
    """An embedder whose calls are timed."""

    def __init__(self, embedder: Embedder, metrics: Metrics) -> None:
        self._embedder = embedder
        self._metrics = metrics

    async def model(self) -> EmbeddingModel:
        return await self._embedder.model()

    async def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        with self._metrics.model_seconds.time():
            return await self._embedder.embed(texts)

    async def close(self) -> None:
        await self._embedder.close()


class EngineMetrics:
    """The engine's counts as Prometheus metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def received(self, observations: int, rejected: int, seconds: float) -> None:
        self._metrics.observations_received.inc(observations)
        self._metrics.received_seconds.observe(seconds)
        if rejected:
            self._metrics.observations_rejected.labels("INVALID_FIELD").inc(rejected)

    def stored(self, observations: int, seconds: float | None) -> None:
        self._metrics.observations_stored.inc(observations)
        if seconds is not None:
            self._metrics.stored_seconds.observe(seconds)

    def committed(self, seconds: float) -> None:
        self._metrics.commit_seconds.observe(seconds)

    def events(self, recorded: Recorded) -> None:
        for type_, times in Counter(event.type for event in recorded.events).items():
            self._metrics.transitions.labels(type_.value).inc(times)

    def recalled(self, seconds: float, degraded: bool) -> None:
        self._metrics.recall_seconds.observe(seconds)
        self._metrics.recalls.labels("degraded" if degraded else "ok").inc()

    def indexed(self, seconds: float) -> None:
        self._metrics.indexed_seconds.observe(seconds)

    def outbox(self, depth: int) -> None:
        self._metrics.outbox_depth.set(depth)
