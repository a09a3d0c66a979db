"""A connection to one start of Milvus, be it a child process or a server, with its open collections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memstream_server.adapters.milvus.collection import MilvusCollection, Timeouts
from memstream_server.ports.index import IndexUnavailable
from memstream_server.ports.journal.spaces import Space


class RunningMilvus(Protocol):
    """A Milvus that accepts connections."""

    uri: str
    token: str
    supervised: bool
    """Whether this process started it and may kill and restart it."""

    async def wait_for_end(self) -> str:
        """Wait until it ends; the reason, for display. Never returns for a server."""
        ...

    async def kill(self) -> None: ...

    async def stop(self) -> None: ...


Start = Callable[[Sequence[str]], Awaitable[RunningMilvus]]
"""Start a Milvus that serves the collections of these names. Raises IndexUnavailable."""


class RemoteMilvus:
    """A Milvus server that this process does not manage. gRPC's channel reconnects."""

    supervised = False

    def __init__(self, uri: str, token: str) -> None:
        self.uri = uri
        self.token = token

    async def wait_for_end(self) -> str:
        """Never returns."""
        await asyncio.Event().wait()
        return ""

    async def kill(self) -> None:
        """Does nothing."""

    async def stop(self) -> None:
        """Does nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """One connection to one start of Milvus."""

    running: RunningMilvus
    collections: dict[str, MilvusCollection]
    """By model of their space, in the order of opening."""
    generation: int
    begun_s: float
    """Time of the start, by the event loop's clock."""

    def get_collection(self, model: str) -> MilvusCollection:
        """The collection of a space; the first opened if `model` is empty. Raises IndexUnavailable."""
        if model and model not in self.collections:
            raise IndexUnavailable(f"the index of {model} is not open")
        return self.collections[model] if model else next(iter(self.collections.values()))


def connect_collection(
    running: RunningMilvus, name: str, space: Space, timeouts: Timeouts, consistency: str
) -> tuple[MilvusCollection, bool]:
    """Connect and make the collection ready; also whether it is empty: new, or not filled before a crash. Blocking."""
    collection = MilvusCollection.connect(running.uri, running.token, name, space, timeouts, consistency)
    try:
        return collection, collection.ensure_ready() or collection.is_empty()
    except BaseException:
        collection.close()
        raise
