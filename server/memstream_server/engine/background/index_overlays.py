"""When the overlays of large memories may drop a vector: some time after its flush, when the index shows it.

A memory that is too large for RAM searches the index. Its overlay has the vectors that the index may not show yet.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import Runtime
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import IndexEntry


class IndexOverlays:
    """Recently flushed fragments of all memories, oldest flush first."""

    def __init__(self, journal: Journal, runtime: Runtime, registry: Registry) -> None:
        self._journal = journal
        self._runtime = runtime
        self._registry = registry
        self._flushed: deque[tuple[float, dict[str, list[str]]]] = deque()
        """(when it may be dropped, fragments by memory)"""

    def list_unsettled(self, uid: str) -> list[str]:
        """Fragments of a memory that were flushed so recently that the index may not show them yet."""
        return [id_ for _, flushed in self._flushed for id_ in flushed.get(uid, ())]

    def next_due_s(self) -> float | None:
        """Seconds until the next vectors may be dropped; None if there are none."""
        return max(0.0, self._flushed[0][0] - self._now_s()) if self._flushed else None

    def add_flushed(self, entries: Sequence[IndexEntry]) -> None:
        """Start the time of fragments that were flushed just now."""
        by_memory: dict[str, list[str]] = defaultdict(list)
        for entry in entries:
            by_memory[entry.memory].append(entry.fragment)
        self._add(by_memory)

    def add_indexed(self, there: Mapping[str, Sequence[str]]) -> None:
        """Start the time of fragments that another process has indexed; each counts from its first sighting."""
        new = {uid: set(ids).difference(self.list_unsettled(uid)) for uid, ids in there.items()}
        self._add({uid: sorted(ids) for uid, ids in new.items() if ids})

    def _add(self, flushed: Mapping[str, list[str]]) -> None:
        if flushed:
            self._flushed.append((self._now_s() + self._runtime.limits.fresh_s, dict(flushed)))

    async def drop_settled(self) -> None:
        """Drop vectors from the overlays after `fresh_s`, except those of fragments that changed since."""
        while self._flushed and self._flushed[0][0] <= self._now_s():
            flushed = self._flushed[0][1]
            for memory in list(flushed):
                actor, again = self._registry.peek(memory), set[str]()
                if actor is not None and actor.working.fresh:
                    again = await self._journal.outbox_fragments(memory)
                ids = flushed.pop(memory)
                if actor is not None:
                    actor.working.drop_flushed(set(ids) - again - set(self.list_unsettled(memory)))
            self._flushed.popleft()

    def _now_s(self) -> float:
        return self._runtime.clock.monotonic_s()
