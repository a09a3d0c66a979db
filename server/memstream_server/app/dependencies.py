"""What the engine is given: every part behind its port, measured and traced."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from memstream_server.app.measuring import EngineMetrics
from memstream_server.app.models import Models
from memstream_server.engine.clock import Clock, Ids
from memstream_server.engine.dependencies import Dependencies
from memstream_server.engine.embeddings import Embedding, Embeddings
from memstream_server.engine.gather import Gatherer
from memstream_server.engine.ownership import LeaseTimes
from memstream_server.engine.reranking import Reranking
from memstream_server.engine.settings import Limits
from memstream_server.engine.transfer.disk import Disk
from memstream_server.engine.transfer.transfers import TransferSettings
from memstream_server.engine.turns import Turns
from memstream_server.observability import Metrics
from memstream_server.ports.index import VectorIndex
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import EmbeddingModel
from memstream_server.settings import Settings

if TYPE_CHECKING:
    from memstream_server.adapters.journal import SqlJournal
    from memstream_server.engine.actor import Actor
    from memstream_server.tracing import OpenTelemetry

SPACE_NOTICE_S = 30.0
"""What is no longer used of an embedding space is kept so long where several servers may share the store."""


def dependencies(
    settings: Settings,
    journal: SqlJournal,
    index: VectorIndex,
    models: Models,
    embedding: EmbeddingModel,
    metrics: Metrics,
    clock: Clock,
    tracing: OpenTelemetry | None = None,
) -> Dependencies:
    """All that an engine stands on. The three callbacks raise until the engine has put its own in their place."""
    from memstream_server.adapters.models.analyzer import SnowballAnalyzer
    from memstream_server.rpc.errors import failure_of
    from memstream_server.rpc.info import server_version

    limits, analyzer = _limits(settings), SnowballAnalyzer()
    seen, stored = models, cast("Journal", journal)
    if tracing is not None:
        stored, index = tracing.traced(stored, "journal", always=False), tracing.traced(index, "index")
        seen = replace(
            models,
            embedder=tracing.traced(models.embedder, "embedder"),
            scorer=models.scorer and tracing.traced(models.scorer, "scorer"),
            insights=models.insights and tracing.traced(models.insights, "insights"),
            reranker=models.reranker and tracing.traced(models.reranker, "reranker"),
        )
    turns = Turns()
    embeddings = Embeddings(Embedding(embedding, seen.embedder), candidate=seen.next)
    return Dependencies(
        journal=stored,
        index=index,
        analyzer=analyzer,
        embeddings=embeddings,
        gatherer=Gatherer(analyzer, embeddings, seen.scorer, limits, turns),
        insights=seen.insights,
        reranking=None
        if seen.reranker is None
        else Reranking(
            seen.reranker,
            candidates=settings.reranker_candidates,
            weight=settings.reranker_weight,
            timeout_s=settings.reranker_timeout_s,
        ),
        clock=clock,
        ids=Ids(clock),
        limits=limits,
        turns=turns,
        metrics=EngineMetrics(metrics),
        committed=_nobody_committed,
        models=seen.statuses,
        index_lost=_nobody_searched,
        lost=_nobody_lost,
        processes=journal.processes,
        lease=LeaseTimes(settings.lease_s, settings.lease_renew_s),
        operations=journal.operations,
        failure_of=failure_of,
        transfers=TransferSettings(
            conversations=journal.conversations,
            disk=Disk(settings.data_dir / "transfers", settings.disk_free_min_bytes),
            server=server_version(),
            import_bytes_max=settings.import_max_bytes,
            name_bytes_max=settings.id_max_chars,
        ),
    )


def _limits(settings: Settings) -> Limits:
    return Limits(
        active_memories_max=settings.active_memories_max,
        active_bytes_max=settings.active_bytes_max,
        dense_in_memory_max=settings.dense_in_memory_max,
        flush_interval_s=settings.index_flush_interval_s,
        flush_rows=settings.index_flush_rows,
        fresh_s=settings.index_overlay_s,
        access_interval_s=settings.access_flush_interval_s,
        maintenance_interval_s=settings.maintenance_interval_s,
        namespace_memories_max=settings.namespace_memories_max,
        memory_fragments_max=settings.memory_fragments_max,
        space_notice_s=SPACE_NOTICE_S if settings.journal_url.get_secret_value() else 0.0,
    )


def _nobody_committed(_uid: str, _recorded: Recorded, _commit: Commit) -> None:
    raise RuntimeError("a commit before the engine was made")


def _nobody_searched() -> None:
    raise RuntimeError("a search before the engine was made")


def _nobody_lost(_actor: Actor) -> None:
    raise RuntimeError("an actor before the engine was made")
