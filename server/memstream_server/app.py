"""The composition root: settings in, a running server out. The only place that knows every part by name."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import structlog
from pydantic import SecretStr

from memstream_server.engine.clock import Clock, Ids
from memstream_server.engine.conversations import Conversations
from memstream_server.engine.dependencies import Dependencies
from memstream_server.engine.embeddings import Candidate, Embedding, Embeddings
from memstream_server.engine.engine import Engine
from memstream_server.engine.gather import Gatherer
from memstream_server.engine.ownership import LeaseTimes
from memstream_server.engine.reranking import Reranking
from memstream_server.engine.settings import Limits
from memstream_server.engine.transfer.disk import Disk
from memstream_server.engine.transfer.transfers import TransferSettings
from memstream_server.engine.turns import Turns
from memstream_server.observability import Metrics, serve_metrics, watch_loop
from memstream_server.ports.index import VectorIndex
from memstream_server.ports.journal.errors import Conflict, JournalError
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.spaces import Space
from memstream_server.ports.journal.writing import Commit
from memstream_server.ports.models import (
    Embedder,
    EmbeddingModel,
    Insights,
    ModelUnavailable,
    Reranker,
    Scorer,
    Spent,
)
from memstream_server.settings import EmbeddingKind, Settings

if TYPE_CHECKING:
    from memstream_server.adapters.journal import SqlJournal
    from memstream_server.engine.actor import Actor
    from memstream_server.tracing import OpenTelemetry

log = structlog.get_logger(__name__)

INDEX_GRACE_S = 5.0
"""How long a stop may spend on bringing waiting rows into the index; what is left stays in the outbox."""

OUTBOX_LOOK_S = 10.0
"""How often the rows waiting for the index are counted."""
OPENAI_URL = "https://api.openai.com/v1"
"""Where models are asked if no other base URL is set."""
SPACE_NOTICE_S = 30.0
"""What is no longer used of an embedding space is kept so long where several servers may share the store."""
SWITCH_INTERVAL_S = 0.0005
M_ARENA_MAX = -8
"""The parameter's number in malloc.h."""
MALLOC_ARENAS = 2


class StartError(Exception):
    """The server cannot start; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server; tests give scripted ones. `close_llm` closes what scorer and insights share."""

    embedder: Embedder
    scorer: Scorer | None = None
    insights: Insights | None = None
    scorer_name: str = ""
    insight_name: str = ""
    close_llm: Callable[[], Awaitable[None]] | None = None
    spent: Sequence[Spent] = ()
    next: Candidate | None = None
    """What everything is to be embedded anew by."""
    reranker: Reranker | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that serves."""

    address: str
    """host:port as bound, or unix:/path."""
    engine: Engine
    metrics: Metrics


async def serve(settings: Settings, *, announce: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT, then drain. Raises StartError, or Unreadable for the data directory."""
    # sqlite3 gives the interpreter lock away at every row it steps over. With the default of 5 ms its threads win it
    # back too late beside a busy event loop: commits of 574 to 4,012 observations a second became 4,700.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _tame_allocator()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with running(settings) as server:
        # What was imported lives as long as the process: the collector need not look at its 120,000 objects. It did so
        # every second while observations came in, and held everything up for 60 to 280 ms each time. No collection
        # before: it finds 80 objects, 1,300 at a first start, and takes a tenth of the start. Not frozen again later:
        # an evicted memory is a cycle that must be found.
        gc.freeze()
        info = server.engine.info()
        announce(f"memstream listens on {server.address}")
        announce(f"  data       {settings.data_dir}")
        announce(f"  journal    {info.journal}")
        announce(f"  embedding  {info.embedding.name}, {info.embedding.dimension} dimensions")
        announce(f"  importance {info.scorer_model or 'constant 0.5 (no LLM rates it)'}")
        announce(f"  insights   {info.insight_model or 'none (no LLM derives them)'}")
        announce(f"  index      {info.index}")
        if settings.reranker_model_dir is not None:
            announce(f"  reranker   {settings.reranker_model_dir.resolve().name}")
        await stop.wait()
        announce("memstream drains and stops")


def _tame_allocator() -> None:
    """Two heaps for all threads instead of eight a core: what one thread frees, another one's heap cannot use.

    Mixed load on two cores had 15 of them, a fifth of the process, half empty and never given back.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(M_ARENA_MAX, MALLOC_ARENAS)


@contextlib.asynccontextmanager
async def running(settings: Settings, models: Models | None = None) -> AsyncIterator[Running]:
    """A server from start to drained end. Parts are closed in reverse order, also when a later one fails to start."""
    from memstream_server.adapters.journal import open_journal
    from memstream_server.rpc.access.files import AccessError
    from memstream_server.rpc.access.opening import open_access
    from memstream_server.rpc.server import create_server

    try:
        access = open_access(settings)
    except AccessError as error:
        raise StartError(str(error)) from error
    if lacking := settings.unprotected(allowed=True):
        log.warning("insecure_listen", listen=settings.listen, without=lacking, remedy="see docs/security.md")
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics()
        endpoint = serve_metrics(metrics, settings.metrics_listen)
        if endpoint is not None:
            stack.callback(endpoint.close)
        clock = Clock()
        journal = await open_journal(
            settings.data_dir,
            url=settings.journal_url.get_secret_value(),
            shared=bool(settings.milvus_uri),
            lease_s=settings.lease_s,
            clock_us=clock.now_us,
            reserve_bytes=settings.disk_free_min_bytes,
        )
        stack.push_async_callback(journal.close)
        tracing = _tracing(settings)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        used = models or _with_llm(_models(settings, metrics), settings, metrics)
        stack.push_async_callback(used.embedder.close)
        if used.next is not None:
            stack.push_async_callback(used.next.embedder.close)
        if used.reranker is not None:
            stack.push_async_callback(used.reranker.close)
        if used.close_llm is not None:
            stack.push_async_callback(used.close_llm)
        used, space, embedding = await _in_force(journal, used, settings)
        index = await _index(settings)
        stack.push_async_callback(index.close)
        dependencies = _dependencies(settings, journal, index, used, embedding, metrics, clock, tracing)
        engine = Engine(
            dependencies,
            space,
            journal_name=journal.description,
            scorer_model=used.scorer_name,
            insight_model=used.insight_name,
            spent=used.spent,
        )
        await engine.start()
        stack.push_async_callback(engine.stop, INDEX_GRACE_S)
        conversations = Conversations(journal.conversations, journal, clock, dependencies.quiet_s)
        server = create_server(engine, conversations, settings, metrics, access, tracing)
        address = await server.start(settings.listen, access.credentials)
        await engine.ownership.announce(settings.advertise or address)
        if settings.milvus_uri and not settings.advertise and address.startswith(("0.0.0.0:", "[::]:")):
            log.warning("not_reachable_by_other_servers", address=address, remedy="set advertise")
        stack.push_async_callback(server.stop, settings.drain_grace_s)
        for watching in (watch_loop(metrics), _watch_engine(engine, metrics), _watch_outbox(journal, metrics)):
            stack.callback(asyncio.create_task(watching).cancel)
        if settings.port_file is not None:
            await asyncio.to_thread(_write_port, settings.port_file, address)
            stack.callback(settings.port_file.unlink, missing_ok=True)
        yield Running(address, engine, metrics)


async def _watch_engine(engine: Engine, metrics: Metrics) -> None:
    """What the engine holds, sampled once a second."""
    while True:
        held = engine.held()
        metrics.backlog.set(held.backlog)
        metrics.sessions.set(held.sessions)
        metrics.producers.set(held.producers)
        metrics.watchers.set(held.watchers)
        metrics.active_memories.set(held.memories)
        metrics.active_bytes.set(held.size_bytes)
        metrics.owned_memories.set(held.owned)
        metrics.index_up.set(not engine.info().degraded)
        await asyncio.sleep(1.0)


async def _watch_outbox(journal: SqlJournal, metrics: Metrics) -> None:
    """What waits for the index, also while nobody brings it there."""
    while True:
        with contextlib.suppress(JournalError):  # health says that it does not answer
            metrics.outbox_depth.set(await journal.outbox_size())
        await asyncio.sleep(OUTBOX_LOOK_S)


def _tracing(settings: Settings) -> OpenTelemetry | None:
    if not settings.otlp_endpoint:
        return None
    try:
        from memstream_server.tracing import OpenTelemetry
    except ImportError as error:
        raise StartError(f"otlp_endpoint is set: pip install 'memstream[otel]' ({error})") from error
    from memstream_server.rpc.info import server_version

    return OpenTelemetry(settings.otlp_endpoint, settings.trace_ratio, server_version())


def _write_port(file: Path, address: str) -> None:
    """Whole or not at all: whoever waits for the file reads a complete address."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(f"{address}\n", encoding="utf-8")
    part.replace(file)


def _models(settings: Settings, metrics: Metrics | None = None) -> Models:
    spent = None if metrics is None else metrics.model_tokens.labels("embedder", "prompt").inc
    embedder = _embedder(
        settings,
        settings.embedding,
        settings.embedding_model_dir,
        settings.embedding_model,
        settings.embedding_base_url,
        settings.embedding_api_key,
        spent,
    )
    reranker = _reranker(settings.reranker_model_dir)
    if settings.next_embedding is None:
        return Models(embedder, reranker=reranker)
    following = _embedder(
        settings,
        settings.next_embedding,
        settings.next_embedding_model_dir,
        settings.next_embedding_model,
        settings.next_embedding_base_url,
        settings.next_embedding_api_key,
        spent,
    )
    asked = settings.next_embedding is EmbeddingKind.OPENAI
    following_name = settings.next_embedding_model if asked else ""
    return Models(embedder, next=Candidate(following, following_name), reranker=reranker)


def _reranker(directory: Path | None) -> Reranker | None:
    if directory is None:
        return None
    from memstream_server.adapters.models.onnx_files import OnnxModelError
    from memstream_server.adapters.models.onnx_reranker import OnnxReranker

    try:
        return OnnxReranker(directory)
    except OnnxModelError as error:
        raise StartError(str(error)) from error


def _embedder(
    settings: Settings,
    kind: EmbeddingKind,
    directory: Path | None,
    model: str,
    base_url: str,
    api_key: SecretStr,
    spent: Callable[[float], None] | None,
) -> Embedder:
    from memstream_server.adapters.models.hashing import HashingEmbedder

    if kind is EmbeddingKind.HASHING:
        return HashingEmbedder()
    if kind is EmbeddingKind.ONNX and directory is not None:
        from memstream_server.adapters.models.onnx_embedder import OnnxEmbedder
        from memstream_server.adapters.models.onnx_files import OnnxModelError

        try:
            return OnnxEmbedder(directory)
        except OnnxModelError as error:
            raise StartError(str(error)) from error
    from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding
    from memstream_server.adapters.models.resilience import Resilience

    return OpenAIEmbedder(
        OpenAIEmbedding(
            model=model,
            base_url=base_url or OPENAI_URL,
            api_key=api_key.get_secret_value(),
            batch_texts=settings.embedding_batch_max,
            input_characters=settings.embedding_input_max_chars,
            concurrency=settings.embedding_concurrency,
            timeout_s=settings.embedding_timeout_s,
            resilience=Resilience(
                attempts=settings.embedding_retries + 1,
                deadline_s=settings.embedding_timeout_s * (settings.embedding_retries + 1),
            ),
        ),
        spent=spent,
    )


def _with_llm(models: Models, settings: Settings, metrics: Metrics) -> Models:
    """The same with the LLM's scorer and insights, where the settings name one."""
    if not settings.llm_model or not (settings.llm_scoring or settings.llm_insights):
        return models
    from memstream_server.adapters.models.budget import Budget, Rates
    from memstream_server.adapters.models.insights import ChatInsights
    from memstream_server.adapters.models.openai_chat import ChatModel, OpenAIChat, Role, StructuredOutput, Usage
    from memstream_server.adapters.models.prompts import PromptError, load_prompts
    from memstream_server.adapters.models.resilience import Resilience
    from memstream_server.adapters.models.scoring import ChatScorer

    def counted(role: Role, outcome: str, usage: Usage) -> None:
        metrics.model_calls.labels(role.value, outcome).inc()
        metrics.model_tokens.labels(role.value, "prompt").inc(usage.prompt)
        metrics.model_tokens.labels(role.value, "completion").inc(usage.completion)

    try:
        prompts = load_prompts(settings.llm_prompts_dir)
    except PromptError as error:
        raise StartError(str(error)) from error
    chat = ChatModel(
        OpenAIChat(
            model=settings.llm_model,
            base_url=settings.llm_base_url or OPENAI_URL,
            api_key=settings.llm_api_key.get_secret_value(),
            temperature=settings.llm_temperature,
            structured=StructuredOutput(settings.llm_structured.value),
            concurrency=settings.llm_concurrency,
            timeout_s=settings.llm_timeout_s,
            resilience=Resilience(
                attempts=settings.llm_retries + 1, deadline_s=settings.llm_deadline_s, backoff_max_s=30.0
            ),
        ),
        Budget(
            Rates(settings.llm_requests_per_minute, settings.llm_tokens_per_minute),
            Rates(settings.llm_namespace_requests_per_minute, settings.llm_namespace_tokens_per_minute),
        ),
        counted,
    )
    scores, derives = settings.llm_scoring, settings.llm_insights
    return replace(
        models,
        scorer=ChatScorer(chat, prompts.importance, settings.llm_batch_max) if scores else None,
        scorer_name=settings.llm_model if scores else "",
        insights=ChatInsights(chat, prompts) if derives else None,
        insight_name=settings.llm_model if derives else "",
        close_llm=chat.close,
        spent=tuple(chat.spent.values()),
    )


async def _in_force(journal: SqlJournal, models: Models, settings: Settings) -> tuple[Models, Space, EmbeddingModel]:
    """The models with that in front whose space is in force: the next one's once everything is embedded by it."""
    recorded = await journal.space()
    if recorded is not None and models.next is not None and await models.next.named() == recorded.model:
        embedding = (await models.next.embedding(recorded)).model
        return replace(models, embedder=models.next.embedder, next=None), recorded, embedding
    return models, *await _space(journal, models.embedder, settings)


async def _space(journal: SqlJournal, embedder: Embedder, settings: Settings) -> tuple[Space, EmbeddingModel]:
    """The embedding space in force, recorded at the first start; the model's endpoint is asked only then."""
    recorded = await journal.space()
    if recorded is not None and settings.embedding is EmbeddingKind.OPENAI:
        return recorded, EmbeddingModel(name=settings.embedding_model, dimension=recorded.dimension)
    try:
        model = await embedder.model()
    except ModelUnavailable as error:
        raise StartError(
            f"the embedding endpoint does not say what dimension its vectors have: {error}. "
            "It is asked once, at the first start; make it reachable and start again"
        ) from error
    if recorded is None:
        recorded = Space(model.name, model.dimension, settings.index_partitions)
        try:
            await journal.set_space(recorded)
        except Conflict:  # another server that starts for the first time was quicker
            recorded = await journal.space() or recorded
    return recorded, model


async def _index(settings: Settings) -> VectorIndex:
    from memstream_server.adapters.milvus.collection import Timeouts
    from memstream_server.adapters.milvus.index import connect_milvus, open_lite

    timeouts = Timeouts(connect_s=settings.milvus_timeout_s, search_s=settings.milvus_timeout_s)
    if settings.milvus_uri:
        return connect_milvus(settings.milvus_uri, settings.milvus_token.get_secret_value(), timeouts=timeouts)
    return await open_lite(settings.data_dir, timeouts=timeouts)


def _dependencies(
    settings: Settings,
    journal: SqlJournal,
    index: VectorIndex,
    models: Models,
    embedding: EmbeddingModel,
    metrics: Metrics,
    clock: Clock,
    tracing: OpenTelemetry | None = None,
) -> Dependencies:
    from memstream_server.adapters.models.analyzer import SnowballAnalyzer
    from memstream_server.rpc.errors import failure_of
    from memstream_server.rpc.info import server_version

    limits = Limits(
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
    analyzer, counted = SnowballAnalyzer(), EngineMetrics(metrics)
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
    embedder, turns = MeasuredEmbedder(seen.embedder, metrics), Turns()
    following = models.next and replace(models.next, embedder=MeasuredEmbedder(models.next.embedder, metrics))
    embeddings = Embeddings(Embedding(embedding, embedder), candidate=following)
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
        metrics=counted,
        committed=_nobody_committed,
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


def _nobody_committed(_uid: str, _recorded: Recorded, _commit: Commit) -> None:
    raise RuntimeError("a commit before the engine was made")


def _nobody_searched() -> None:
    raise RuntimeError("a search before the engine was made")


def _nobody_lost(_actor: Actor) -> None:
    raise RuntimeError("an actor before the engine was made")


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


__all__ = ["Models", "Running", "StartError", "running", "serve"]
