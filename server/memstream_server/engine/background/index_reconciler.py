"""Reconciliation: what the index has and should not, or lacks and should have, becomes work of the outbox.

Done once whenever the index was opened. An index may have lost what it had acknowledged (power loss) and may hold what
the journal no longer knows (a restored backup).
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


class Reconciliation:
    """All memories once, a memory at a time. Of use to whoever writes the index, and not while they do."""

    def __init__(self, storage: Storage, models: EngineModels) -> None:
        self.done = False
        self._storage = storage
        self._models = models
        self._uids: AsyncIterator[str] | None = None
        self._made = 0

    async def step(self) -> int:
        """Compare the next memory; returns how many entries were made of it.

        Raises IndexUnavailable or JournalError, and begins anew with the next step.
        """
        uids, self._uids = self._uids or _memories(self._storage), None
        uid = await anext(uids, None)
        if uid is None:
            self.done = True
            if self._made:
                log.warning("index_reconciled", entries=self._made)
            return 0
        entries = await _differences(uid, self._storage, self._models)
        if entries:
            await self._storage.journal.outbox_enter(entries)
            self._made += len(entries)
        self._uids = uids
        return len(entries)


async def _differences(uid: str, storage: Storage, models: EngineModels) -> list[IndexEntry]:
    journal = storage.journal
    there = set(await storage.index.list_ids(uid, models.embedding.name))
    wanted = set(await journal.list_indexable(uid))  # read after the index, so that nothing new looks orphaned
    different = there ^ wanted
    if different:  # some may be on their way
        different -= await journal.outbox_fragments(uid)
    return [IndexEntry(uid, id_) for id_ in sorted(different)]  # the outbox looks again which way each differs


async def _memories(storage: Storage) -> AsyncIterator[str]:
    after_namespace = ""
    while namespaces := await storage.journal.list_namespaces(after_namespace, PAGE):
        for namespace, _ in namespaces:
            after = ""
            while records := await storage.journal.list_memories(namespace, after, PAGE):
                for record in records:
                    yield record.uid
                after = records[-1].name
        after_namespace = namespaces[-1][0]
