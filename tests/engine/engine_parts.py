"""An engine whose parts have public names: a test that controls a part survives a rename in the product."""

from __future__ import annotations

from typing import Any

from memstream_server.engine.background.indexer import Indexer
from memstream_server.engine.background.retention import Retention
from memstream_server.engine.engine import Engine
from memstream_server.engine.recall.recall import Recaller
from memstream_server.engine.recall.reinforcement import Reinforcement
from memstream_server.engine.recall.watch import Watchers
from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
from memstream_server.engine.runtime.registry import Registry


class PartsEngine(Engine):
    """The engine of the product; only the names below are added."""

    @property
    def journal(self) -> Any:
        """Its journal: a SqlJournal, or the FaultyJournal of `assembled`."""
        return self._journal

    @property
    def actors(self) -> Registry:
        """The actors of all active memories."""
        return self._registry

    @property
    def storage(self) -> Storage:
        """Journal, index, images and operations."""
        return self._storage

    @property
    def models(self) -> EngineModels:
        """Embeddings, scorer, insights, analyzer."""
        return self._models

    @property
    def runtime(self) -> Runtime:
        """Clock, ids, turns and bounds."""
        return self._runtime

    @property
    def indexer(self) -> Indexer:
        """The write-behind of the index."""
        return self._indexer

    @property
    def recaller(self) -> Recaller:
        """Ranks the fragments of a memory."""
        return self._recaller

    @property
    def retention(self) -> Retention:
        """Removes what a policy no longer keeps."""
        return self._retention

    @property
    def watchers(self) -> Watchers:
        """The open watches."""
        return self._watchers

    @property
    def reinforcement(self) -> Reinforcement:
        """Collects accesses and writes them."""
        return self._reinforcement

    async def write_accesses(self) -> None:
        """What the background task does every few seconds."""
        await self._reinforcement._write_accesses()

    async def drop_outdated_images(self) -> None:
        """What a start does first."""
        await self._drop_outdated_images()
