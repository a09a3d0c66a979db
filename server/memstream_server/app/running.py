"""Runs a server: opens its parts in order and closes them in reverse order.

A new index is a folder in adapters and a branch in `choose_index`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import structlog
from prometheus_client import Gauge

from memstream_server.adapters.images import FolderImages
from memstream_server.app.dependencies import build_limits, engine_parts
from memstream_server.app.embedders import EMBEDDERS, current_embedder
from memstream_server.app.errors import StartError, StartStopped
from memstream_server.app.models import Models, check_models, load_tokenizers, models_of, record_models
from memstream_server.engine.conversations import Conversations
from memstream_server.engine.engine import Engine
from memstream_server.engine.runtime.clock import Clock
from memstream_server.engine.runtime.dependencies import EngineParts
from memstream_server.observability import Metrics, serve_metrics, watch_loop
from memstream_server.ports.images import IMAGE_FOLDER, NO_IMAGES, Images
from memstream_server.ports.index import INDEX_FOLDER, NoIndex, VectorIndex
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.journal.records import Space
from memstream_server.ports.models import Embedder, EmbeddingModel, ModelUnavailable
from memstream_server.settings import Settings, parse_listen

if TYPE_CHECKING:
    from memstream_server.adapters.journal.store import SqlJournal
    from memstream_server.rpc.access.opening import AccessOptions
    from memstream_server.rpc.server import RpcServer
    from memstream_server.tracing import OpenTelemetry

log = structlog.get_logger(__name__)

ADDRESS_FILE = "address"
"""In the data directory, for memstream.local. A killed server leaves it behind; the directory's lock says which."""
OUTBOX_LOOK_S = 10.0
"""Interval at which pending rows of the index are counted."""
QUOTAS_LOOK_S = 60.0
"""Interval at which the fullest namespace is looked for, which reads a row of each."""
UNVECTORED_LOOK_S = 60.0
"""Interval at which fragments without a vector are counted, which takes longer the more there are."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that serves."""

    address: str
    """host:port as bound, or unix:/path."""
    engine: Engine
    metrics: Metrics
    http_url: str
    """Empty without an HTTP port."""


@contextlib.asynccontextmanager
async def run_server(
    settings: Settings, models: Models | None = None, stop: asyncio.Event | None = None
) -> AsyncIterator[Running]:
    """A server from start to drained end. Parts are closed in reverse order, even if a later one fails to start.

    Raises StartError, and StartStopped if `stop` is set while the start waits for an endpoint that loads its model.
    """
    from memstream_server.rpc.server import create_server

    access = _open_access(settings)
    async with contextlib.AsyncExitStack() as stack:
        metrics = Metrics()
        endpoint = serve_metrics(metrics, settings.metrics_listen)
        if endpoint is not None:
            stack.callback(endpoint.close)
        clock, chosen = Clock(), choose_index(settings)
        journal = await _open_journal(stack, settings, chosen, clock)
        for file in _address_files(settings):
            await asyncio.to_thread(file.unlink, missing_ok=True)  # of a killed server
        tracing = open_tracing(settings)
        if tracing is not None:
            stack.push_async_callback(asyncio.to_thread, tracing.close)
        used = models or models_of(settings, metrics)
        _close_models_with(stack, used)
        used, space, embedding = await choose_space(journal, used, settings, stop)
        used = record_models(used, embedding, metrics)
        most = build_limits(settings).dense_max(embedding.dimension) * 3 // 4  # filled before a memory searches it
        index = await chosen.open(journal.count_largest_memory, most)
        stack.push_async_callback(index.close)
        images = await stack.enter_async_context(open_images(settings, metrics))
        parts = engine_parts(settings, journal, index, used, embedding, metrics, clock, tracing, images)
        engine = await _start_engine(stack, parts, space, journal, used, settings)
        poll_s = parts.storage.poll_interval_s
        conversations = Conversations(
            journal.conversations, journal, clock, poll_s, parts.runtime.limits, engine.fragments, engine.feeds
        )
        server = create_server(
            engine, conversations, settings, metrics, access, tracing, load_tokenizers(settings.tokenizers_dir)
        )
        address = await server.start(settings.listen, access.credentials)
        stack.push_async_callback(server.stop, settings.drain_grace_s)
        if endpoint is not None:
            endpoint.answer_probes(server.is_serving)
        http_url = await _start_http(server, settings)
        await engine.ownership.announce_address(settings.advertise or address)
        if chosen.shared and not settings.advertise and address.startswith(("0.0.0.0:", "[::]:")):
            log.warning("not_reachable_by_other_servers", address=address, remedy="set advertise")
        if settings.model_check:
            stack.callback(asyncio.create_task(check_models(used)).cancel)
        for watching in (
            watch_loop(metrics),
            _watch_engine(engine, metrics),
            _watch_count(journal.outbox_size, metrics.outbox_depth, OUTBOX_LOOK_S),
            _watch_count(journal.count_unvectored, metrics.unvectored, UNVECTORED_LOOK_S),
            _watch_quotas(journal, metrics, settings),
        ):
            stack.callback(asyncio.create_task(watching).cancel)
        yield Running(address, engine, metrics, http_url)


@contextlib.contextmanager
def address_written(settings: Settings, address: str) -> Iterator[None]:
    """Keeps `address` in the data directory and in `port_file`. Enter it last: a waiting process takes the file for
    the end of the start, and may read the log then.
    """
    with contextlib.ExitStack() as stack:
        for file in _address_files(settings):
            _write_address(file, address)
            stack.callback(file.unlink, missing_ok=True)
        yield


def _open_access(settings: Settings) -> AccessOptions:
    """Raises StartError for files of keys, grants or certificates that cannot be used."""
    from memstream_server.rpc.access.files import AccessError
    from memstream_server.rpc.access.opening import open_access

    try:
        access = open_access(settings)
    except AccessError as error:
        raise StartError(str(error)) from error
    if lacking := settings.unprotected(allowed=True):
        log.warning("insecure_listen", listen=settings.listen, without=lacking, remedy="see docs/security.md")
    return access


async def _open_journal(
    stack: contextlib.AsyncExitStack, settings: Settings, index: IndexChoice, clock: Clock
) -> SqlJournal:
    from memstream_server.adapters.journal.store import open_journal
    from memstream_server.adapters.models.hashing import computed_spaces

    journal = await open_journal(
        settings.data_dir,
        url=settings.journal_url.get_secret_value(),
        shared=index.shared,
        lease_s=settings.lease_s,
        clock_us=clock.now_us,
        reserve_bytes=settings.disk_free_min_bytes,
        computed=computed_spaces(),
        backups_kept=settings.migration_backups,
    )
    stack.push_async_callback(journal.close)
    return journal


def _close_models_with(stack: contextlib.AsyncExitStack, models: Models) -> None:
    stack.push_async_callback(models.embedder.close)
    if models.next is not None:
        stack.push_async_callback(models.next.embedder.close)
    if models.reranker is not None:
        stack.push_async_callback(models.reranker.close)
    if models.close_llm is not None:
        stack.push_async_callback(models.close_llm)


async def _start_engine(
    stack: contextlib.AsyncExitStack,
    parts: EngineParts,
    space: Space,
    journal: SqlJournal,
    models: Models,
    settings: Settings,
) -> Engine:
    engine = Engine(
        parts,
        space,
        journal_name=journal.description,
        scorer_model=models.scorer_name,
        insight_model=models.insight_name,
        spent=models.spent,
    )
    await engine.start()
    stack.push_async_callback(engine.stop, settings.drain_grace_s)
    return engine


async def _start_http(server: RpcServer, settings: Settings) -> str:
    """Starts the HTTP port, and returns its URL; empty without one. Another server may have the default port: then this
    one takes a free one. A port that was set must be free. Raises OSError."""
    if not settings.http_listen:
        return ""
    try:
        address = await server.start_http(settings)
    except OSError as error:
        if "http_listen" in settings.model_fields_set:
            raise
        host, _ = parse_listen(settings.http_listen)
        address = await server.start_http(settings.model_copy(update={"http_listen": f"{host}:0"}))
        log.warning("http_port_in_use", reason=error, address=address, remedy="http_listen chooses a port")
    log.info("http_listening", address=address)
    return f"http{'' if settings.tls_cert_file is None else 's'}://{address}/"


async def _watch_engine(engine: Engine, metrics: Metrics) -> None:
    """Samples the engine's gauges once a second."""
    while True:
        held = engine.memory_stats()
        metrics.backlog.set(held.backlog)
        metrics.sessions.set(held.sessions)
        metrics.producers.set(held.producers)
        metrics.watchers.set(held.watchers)
        metrics.active_memories.set(held.memories)
        metrics.active_bytes.set(held.size_bytes)
        metrics.owned_memories.set(held.owned)
        metrics.index_up.set(not engine.index_degraded)
        metrics.journal_writable.set(not engine.writing.problem)
        await asyncio.sleep(1.0)


async def _watch_count(count: Callable[[], Awaitable[int]], gauge: Gauge, interval_s: float) -> None:
    """Samples a count of the journal, whichever process changes it."""
    while True:
        with contextlib.suppress(JournalError):  # the health service reports that the journal does not answer
            gauge.set(await count())
        await asyncio.sleep(interval_s)


async def _watch_quotas(journal: SqlJournal, metrics: Metrics, settings: Settings) -> None:
    """Samples how full the fullest namespace is, for each quota of bytes that is set."""
    quotas = settings.namespace_bytes_max, settings.namespace_receipts_bytes_max
    while any(quotas):
        with contextlib.suppress(JournalError):
            sizes = await journal.largest_bytes()
            for name, most, size in zip(
                ("namespace_bytes_max", "namespace_receipts_bytes_max"), quotas, sizes, strict=True
            ):
                if most:
                    metrics.quota_used.labels(name).set(size / most)
        await asyncio.sleep(QUOTAS_LOOK_S)


def _address_files(settings: Settings) -> list[Path]:
    """Files that hold the bound address while the server serves: the one in its data directory, and `port_file`."""
    files = [] if settings.journal_url.get_secret_value() else [settings.data_dir / ADDRESS_FILE]
    return files if settings.port_file is None else [*files, settings.port_file]


def _write_address(file: Path, address: str) -> None:
    """Writes the file atomically, so that a waiting process reads a complete address."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(f"{address}\n", encoding="utf-8")
    part.replace(file)


CountLargest: TypeAlias = Callable[[], Awaitable[int]]
"""Counts the fragments of the largest memory of the journal."""


@dataclass(frozen=True, slots=True)
class IndexChoice:
    """An index that the settings choose, not open yet."""

    open: Callable[[CountLargest, int], Awaitable[VectorIndex]]
    """Make the index; its own `open` connects. An embedded one stays idle until the largest memory of the journal has
    the given number of fragments, or `index_from_fragments` if that is less.
    """
    shared: bool
    """Whether several servers can use it at once. Otherwise a server holds its journal alone."""
    layout: int
    """`Space.index_layout` of a new embedding space."""


def choose_index(settings: Settings) -> IndexChoice:
    """A Milvus server if a URI is set. Otherwise none for a journal on PostgreSQL, which several servers may share, and
    Milvus Lite in the data directory for one on SQLite, started when a memory needs it.

    Raises StartError if Milvus Lite is needed and not installed.
    """
    if settings.milvus_uri:
        return IndexChoice(partial(_connect_milvus, settings), shared=True, layout=settings.index_partitions)
    if settings.is_without_index:
        return IndexChoice(_open_none, shared=True, layout=settings.index_partitions)
    if find_spec("milvus_lite") is None:
        raise StartError("Milvus Lite is not installed: pip install '.[server]', or set milvus_uri")
    return IndexChoice(partial(_open_lite, settings), shared=False, layout=settings.index_partitions)


async def _connect_milvus(settings: Settings, _count: CountLargest, _fragments_max: int) -> VectorIndex:
    from memstream_server.adapters.milvus.collection import Timeouts
    from memstream_server.adapters.milvus.index import connect_milvus

    timeouts = Timeouts(connect_s=settings.milvus_timeout_s, search_s=settings.milvus_timeout_s)
    return connect_milvus(settings.milvus_uri, settings.milvus_token.get_secret_value(), timeouts=timeouts)


async def _open_none(_count: CountLargest, _fragments_max: int) -> VectorIndex:
    return NoIndex()


async def _open_lite(settings: Settings, count_largest: CountLargest, fragments_max: int) -> VectorIndex:
    from memstream_server.adapters.milvus.collection import Timeouts
    from memstream_server.adapters.milvus.index import open_lite
    from memstream_server.adapters.milvus.lite import OnDemandIndex

    timeouts = Timeouts(connect_s=settings.milvus_timeout_s, search_s=settings.milvus_timeout_s)
    index = await open_lite(settings.data_dir, timeouts=timeouts)
    needed_from = min(settings.index_from_fragments, fragments_max)
    return OnDemandIndex(index, settings.data_dir / INDEX_FOLDER, count_largest, needed_from)


LOADING_PAUSE_MAX_S = 10.0
"""Longest pause between two requests to an endpoint that loads its model."""


def open_tracing(settings: Settings) -> OpenTelemetry | None:
    """None without an endpoint. Raises StartError if an endpoint is set and its packages are not installed."""
    if not settings.otlp_endpoint:
        return None
    try:
        from memstream_server.tracing import OpenTelemetry
    except ImportError as error:
        raise StartError(f"otlp_endpoint is set: pip install '.[otel]' ({error})") from error
    from memstream_server.rpc.info import server_version

    return OpenTelemetry(settings.otlp_endpoint, settings.trace_ratio, server_version())


async def choose_space(
    journal: SqlJournal, models: Models, settings: Settings, stop: asyncio.Event | None = None
) -> tuple[Models, Space, EmbeddingModel]:
    """The models, with the model of the current space first: the next model once it has embedded everything. Raises
    StartError, and StartStopped if `stop` is set while an endpoint loads its model.
    """
    recorded = await journal.get_space()
    if recorded is not None and models.next is not None and await models.next.find_name() == recorded.model:
        embedding = (await models.next.make_embedding(recorded)).model
        return replace(models, embedder=models.next.embedder, next=None), recorded, embedding
    return models, *await record_space(journal, models.embedder, settings, stop)


async def record_space(
    journal: SqlJournal, embedder: Embedder, settings: Settings, stop: asyncio.Event | None = None
) -> tuple[Space, EmbeddingModel]:
    """The current embedding space, which the first start records; only that start asks the model's endpoint."""
    recorded = await journal.get_space()
    if recorded is not None and EMBEDDERS[settings.embedding].remote:
        return recorded, EmbeddingModel(name=current_embedder(settings).endpoint_model, dimension=recorded.dimension)
    try:
        model = await _wait_for_model(embedder, stop or asyncio.Event())
    except ModelUnavailable as error:
        raise StartError(
            f"the embedding endpoint does not say what dimension its vectors have: {error}. "
            "It is asked once, at the first start; make it reachable and start again"
        ) from error
    if recorded is None:
        recorded = Space(model.name, model.dimension, choose_index(settings).layout)
        try:
            await journal.set_space(recorded)
        except StaleWrite:  # another server has recorded it first
            recorded = await journal.get_space() or recorded
    return recorded, model


async def _wait_for_model(embedder: Embedder, stop: asyncio.Event) -> EmbeddingModel:
    """The model, as soon as its endpoint has loaded it. Raises ModelUnavailable, StartStopped."""
    loop = asyncio.get_running_loop()
    since_s, pause_s = loop.time(), 1.0
    while True:
        try:
            return await embedder.model()
        except ModelUnavailable as error:
            if not error.loading:
                raise
            waited_s = round(loop.time() - since_s)
            log.info("embedding_model_loading", reason=error.summary, waited_s=waited_s, retry_in_s=pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await stop.wait()
            raise StartStopped("stopped while the embedding endpoint loaded its model")
        pause_s = min(2 * pause_s, LOADING_PAUSE_MAX_S)


@contextlib.asynccontextmanager
async def open_images(settings: Settings, metrics: Metrics) -> AsyncIterator[Images]:
    """Those in the data directory; none if the settings allow none or another server has the folder."""
    from memstream_server.rpc.info import server_version

    folder = settings.data_dir / IMAGE_FOLDER
    if not settings.images_bytes_max:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        yield NO_IMAGES
        return
    images = FolderImages(
        folder,
        f"memstream {server_version()} on Python {platform.python_version()}",
        settings.images_bytes_max,
        settings.disk_free_min_bytes,
        lambda outcome: metrics.image_reads.labels(outcome).inc(),
    )
    try:
        try:
            await images.open()
        except OSError as error:  # a cache keeps no server from starting
            log.warning("images_not_usable", folder=folder, error=error)
            yield NO_IMAGES
            return
        metrics.image_bytes.set_function(lambda: images.size_bytes)
        yield images
    finally:
        await images.close()
