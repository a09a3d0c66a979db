"""The vector indexes that a server can use, and which one its settings choose.

A new index is a folder in adapters and a line in `choose_index`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TypeAlias

from memstream_server.app.errors import StartError
from memstream_server.ports.index import INDEX_FOLDER, NoIndex, VectorIndex
from memstream_server.settings import Settings

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
