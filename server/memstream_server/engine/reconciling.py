"""Reconciliation: what the index has and should not, or lacks and should have, becomes work of the outbox.

Run once whenever the index was opened. An index may have lost what it had acknowledged (power loss) and may hold what
the journal no longer knows (a restored backup).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memstream_server.ports.journal.records import IndexEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from memstream_server.engine.dependencies import Dependencies

PAGE = 1_000
"""Memories, or ids of the index, read at once."""


async def reconcile(dependencies: Dependencies) -> int:
    """Compare every memory; returns how many entries were made. Raises IndexUnavailable or JournalError."""
    made = 0
    async for uid in _memories(dependencies):
        entries = await _differences(uid, dependencies)
        if entries:
            await dependencies.journal.outbox_enter(entries)
            made += len(entries)
    return made


async def _differences(uid: str, dependencies: Dependencies) -> list[IndexEntry]:
    there = await _indexed(uid, dependencies)
    wanted = set(await dependencies.journal.indexable(uid))  # read after the index, so that nothing new looks orphaned
    missing = [IndexEntry(uid, id_) for id_ in sorted(wanted - there)]
    return missing + [IndexEntry(uid, id_, delete=True) for id_ in sorted(there - wanted)]


async def _indexed(uid: str, dependencies: Dependencies) -> set[str]:
    found: set[str] = set()
    after = ""
    while page := await dependencies.index.ids(uid, after, PAGE, dependencies.embedding.name):
        found.update(page)
        after = page[-1]
    return found


async def _memories(dependencies: Dependencies) -> AsyncIterator[str]:
    after_namespace = ""
    while namespaces := await dependencies.journal.list_namespaces(after_namespace, PAGE):
        for namespace, _ in namespaces:
            after = ""
            while records := await dependencies.journal.list_memories(namespace, after, PAGE):
                for record in records:
                    yield record.uid
                after = records[-1].name
        after_namespace = namespaces[-1][0]
