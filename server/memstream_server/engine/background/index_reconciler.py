"""Reconciliation: enters differences between the index and the journal into the outbox.

Runs once after each opening of the index. An index may have lost acknowledged writes (power loss), and it may contain
fragments that the journal lacks (a restored backup).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from memstream_server.ports.journal.records import IndexEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from memstream_server.engine.runtime.dependencies import EngineModels, Storage

log = structlog.get_logger(__name__)

PAGE = 1_000
"""Memories read at once."""


class IndexReconciler:
    """Compares all memories, one after another. Only the process that writes the index uses it, between its writes."""

    def __init__(self, storage: Storage, models: EngineModels) -> None:
        self.done = False
        self._storage = storage
        self._models = models
        self._uids: AsyncIterator[str] | None = None
        self._made = 0

    async def reconcile_next(self) -> int:
        """Compare the next memory; returns how many entries it needed. An idle index is not compared.

        After IndexUnavailable or JournalError the next call starts with the first memory.
        """
        if self._storage.index.is_idle:
            self.done = True
            return 0
        uids, self._uids = self._uids or _list_uids(self._storage), None
        uid = await anext(uids, None)
        if uid is None:
            self.done = True
            if self._made:
                log.warning("index_reconciled", entries=self._made)
            return 0
        entries = await _find_differences(uid, self._storage, self._models)
        if entries:
            await self._storage.journal.outbox_enter(entries)
            self._made += len(entries)
        self._uids = uids
        return len(entries)


async def differs_from_journal(storage: Storage, models: EngineModels) -> bool:
    """Whether the index of some memory lacks fragments, or has others. Changes nothing; any process may call it."""
    async for uid in _list_uids(storage):
        if await _find_differences(uid, storage, models):
            return True
    return False


async def _find_differences(uid: str, storage: Storage, models: EngineModels) -> list[IndexEntry]:
    journal = storage.journal
    there = set(await storage.index.list_ids(uid, models.embedding_model.name))
    wanted = set(await journal.list_indexable(uid))  # after the index, so that new fragments do not appear orphaned
    different = there ^ wanted
    if different:  # some may be in the outbox
        different -= await journal.outbox_fragments(uid)
    # the indexer finds out whether each is missing or orphaned
    return [IndexEntry(uid, id_) for id_ in sorted(different)]


async def _list_uids(storage: Storage) -> AsyncIterator[str]:
    after_namespace = ""
    while namespaces := await storage.journal.list_namespaces(after_namespace, PAGE):
        for namespace, _ in namespaces:
            after = ""
            while records := await storage.journal.list_memories(namespace, after, PAGE):
                for record in records:
                    yield record.uid
                after = records[-1].name
        after_namespace = namespaces[-1][0]
