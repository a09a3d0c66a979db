"""Composes the parts of the engine: stores and models behind their ports, measured and traced."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from memstream_server.app.models import Models
from memstream_server.core.events import EventType
from memstream_server.engine.memory.enrich import Embedding, Embeddings, Enricher
from memstream_server.engine.recall.reranking import Reranking
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.engine.runtime.dependencies import EngineModels, EngineParts, Runtime, Storage
from memstream_server.engine.runtime.turns import install_turns
from memstream_server.engine.settings import EngineLimits, LeaseTimes, TransferSettings
from memstream_server.observability import Metrics
from memstream_server.ports.images import NO_IMAGES, Images
from memstream_server.ports.index import VectorIndex
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.models import EmbeddingModel, Reranker
from memstream_server.settings import Settings

if TYPE_CHECKING:
    from memstream_server.adapters.journal.store import SqlJournal
    from memstream_server.tracing import OpenTelemetry

NEWEST_VECTORS = 4_096
"""Of 384 numbers: 6 MB, which a recall copies and multiplies in 3 ms."""
SPACE_NOTICE_S = 30.0
"""What is no longer used of an embedding space is kept so long where several servers may share the store."""


def engine_parts(
    settings: Settings,
    journal: SqlJournal,
    index: VectorIndex,
    models: Models,
    embedding: EmbeddingModel,
    metrics: Metrics,
    clock: Clock,
    tracing: OpenTelemetry | None = None,
    images: Images = NO_IMAGES,
) -> EngineParts:
    """The parts of an engine; with `tracing`, calls to stores and models are traced."""
    from memstream_server.adapters.models.analyzer import SnowballAnalyzer
    from memstream_server.rpc.errors import failure_of
    from memstream_server.rpc.info import server_version

    limits, analyzer = build_limits(settings), SnowballAnalyzer()
    seen, stored = models, cast("Journal", journal)
    if tracing is not None:
        stored, index = tracing.wrap_part(stored, "journal", always=False), tracing.wrap_part(index, "index")
        seen = replace(
            models,
            embedder=tracing.wrap_part(models.embedder, "embedder"),
            scorer=models.scorer and tracing.wrap_part(models.scorer, "scorer"),
            insights=models.insights and tracing.wrap_part(models.insights, "insights"),
            judge=models.judge and tracing.wrap_part(models.judge, "conflicts"),
            reranker=models.reranker and tracing.wrap_part(models.reranker, "reranker"),
        )
    install_turns()
    embeddings = Embeddings(Embedding(embedding, seen.embedder), candidate=seen.next)
    return EngineParts(
        Storage(stored, index, journal.operations, journal.conversations, journal.blocks, journal.processes, images),
        EngineModels(
            analyzer,
            embeddings,
            Enricher(analyzer, embeddings, seen.scorer, limits),
            insights=seen.insights,
            judge=seen.judge,
            reranking=_build_reranking(seen.reranker, settings),
            statuses=seen.statuses,
        ),
        Runtime(clock, Ids(clock), limits, EngineMetrics(metrics), failure_of),
        TransferSettings(
            directory=settings.data_dir / "transfers",
            disk_free_min_bytes=settings.disk_free_min_bytes,
            server=server_version(),
            import_bytes_max=settings.import_max_bytes,
            name_bytes_max=settings.id_max_chars,
        ),
        LeaseTimes(settings.lease_s, settings.lease_renew_s),
    )


def _build_reranking(reranker: Reranker | None, settings: Settings) -> Reranking | None:
    if reranker is None:
        return None
    return Reranking(
        reranker,
        candidates=settings.reranker_candidates,
        weight=settings.reranker_weight,
        timeout_s=settings.reranker_timeout_s,
    )


def build_limits(settings: Settings) -> EngineLimits:
    """The engine's limits: each setting fills the field of its name, those of other names are here."""
    named = {each.name for each in fields(EngineLimits)} & type(settings).model_fields.keys()
    given: dict[str, Any] = {name: getattr(settings, name) for name in named}
    return EngineLimits(
        **given,
        newest_vectors=NEWEST_VECTORS if settings.is_without_index else 0,
        flush_interval_s=settings.index_flush_interval_s,
        flush_rows=settings.index_flush_rows,
        fresh_s=settings.index_overlay_s,
        access_interval_s=settings.access_flush_interval_s,
        vector_retry_s=settings.embedding_missing_interval_s,
        block_bytes_max=settings.content_max_bytes,
        standing_max=settings.standing_queries_max,
        memory_standing_max=settings.memory_standing_queries_max,
        caller_standing_max=settings.caller_standing_queries_max if settings.authenticates else 0,
        space_notice_s=SPACE_NOTICE_S if settings.journal_url.get_secret_value() else 0.0,
    )


# The engine's metrics, for Prometheus.


class EngineMetrics:
    """Counts what the engine does."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recalls = {False: metrics.recalls.labels("ok"), True: metrics.recalls.labels("degraded")}
        self._transitions = {each: metrics.transitions.labels(each.value) for each in EventType}

    def count_received(self, observations: int, rejected: int, seconds: float) -> None:
        self._metrics.observations_received.inc(observations)
        self._metrics.received_seconds.observe(seconds)
        if rejected:
            self._metrics.observations_rejected.labels("INVALID_FIELD").inc(rejected)

    def count_stored(self, observations: int, seconds: float | None) -> None:
        self._metrics.observations_stored.inc(observations)
        if seconds is not None:
            self._metrics.stored_seconds.observe(seconds)

    def count_commit(self, seconds: float) -> None:
        self._metrics.commit_seconds.observe(seconds)

    def count_events(self, recorded: Recorded) -> None:
        for type_, times in Counter([event.type for event in recorded.events]).items():
            self._transitions[type_].inc(times)

    def count_recall(self, seconds: float, degraded: bool) -> None:
        self._metrics.recall_seconds.observe(seconds)
        self._recalls[degraded].inc()

    def count_indexed(self, seconds: float) -> None:
        self._metrics.indexed_seconds.observe(seconds)

    def set_outbox(self, depth: int) -> None:
        self._metrics.outbox_depth.set(depth)
