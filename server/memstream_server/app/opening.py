"""What a start opens: tracing, the images of memories, the vector index, and the current embedding space.

A new index is a folder in adapters and a branch in `choose_index`.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import structlog

from memstream_server.adapters.images import FolderImages
from memstream_server.app.embedders import EMBEDDERS, current_embedder
from memstream_server.app.errors import StartError, StartStopped
from memstream_server.app.models import Models
from memstream_server.observability import Metrics
from memstream_server.ports.images import IMAGE_FOLDER, NO_IMAGES, Images
from memstream_server.ports.index import INDEX_FOLDER, NoIndex, VectorIndex
from memstream_server.ports.journal.errors import StaleWrite
from memstream_server.ports.journal.records import Space
from memstream_server.ports.models import Embedder, EmbeddingModel, ModelUnavailable
from memstream_server.settings import Settings

if TYPE_CHECKING:
    from memstream_server.adapters.journal import SqlJournal
    from memstream_server.tracing import OpenTelemetry


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
    from memstream_server.adapters.milvus.on_demand import OnDemandIndex

    timeouts = Timeouts(connect_s=settings.milvus_timeout_s, search_s=settings.milvus_timeout_s)
    index = await open_lite(settings.data_dir, timeouts=timeouts)
    needed_from = min(settings.index_from_fragments, fragments_max)
    return OnDemandIndex(index, settings.data_dir / INDEX_FOLDER, count_largest, needed_from)


log = structlog.get_logger(__name__)

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
