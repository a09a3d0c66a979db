"""What the index shows of this process's memories: how far it is, and when their overlays may drop a vector.

Another process may write the index. Only the owner of a memory adds its rows to the outbox, in order. When the last row
that one check has seen is gone, everything that was stored before that check is in the index.

A memory that is too large for RAM searches the index. Its overlay has the vectors that the index may not show yet; they
leave it some time after their flush, when the index shows them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memstream_server.engine.memory.producers import ProducerState

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.records import IndexEntry


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """The stored numbers at one check, and the memory's last outbox row then."""

    reached: list[tuple[ProducerState, int]]
    fresh: list[str]
    last: int


class IndexFollower:
    """Follows the index for the memories active in this process."""

    def __init__(self, journal: Journal, registry: Registry) -> None:
        self._journal = journal
        self._registry = registry
        self._marks: dict[Actor, _Mark] = {}

    async def check_outbox(self) -> dict[str, list[str]]:
        """Mark what is indexed. Returns the newly indexed fragments by memory."""
        waiting = [actor for actor in self._registry.list_actors() if actor in self._marks or _is_behind(actor)]
        seen = {actor: _Mark(_stored_numbers(actor), actor.working.list_unsettled(), 0) for actor in waiting}
        rows = await self._journal.outbox_rows([actor.uid for actor in waiting]) if waiting else {}
        flushed: dict[str, list[str]] = {}
        marks: dict[Actor, _Mark] = {}
        for actor in waiting:
            mark, (first, last) = self._marks.get(actor), rows.get(actor.uid, (0, 0))
            if not last:
                mark = seen[actor]
            elif mark is None or first > mark.last:
                marks[actor] = _Mark(seen[actor].reached, seen[actor].fresh, last)
            else:
                marks[actor], mark = mark, None
            if mark is not None:
                mark_indexed(mark.reached)
                flushed[actor.uid] = mark.fresh
        self._marks = marks
        return flushed


def _stored_numbers(actor: Actor) -> list[tuple[ProducerState, int]]:
    return [(state, state.stored) for state in actor.producers.list_all()]


def _is_behind(actor: Actor) -> bool:
    return bool(actor.working.list_unsettled()) or any(
        state.indexed < state.stored for state in actor.producers.list_all()
    )


def mark_indexed(reached: Sequence[tuple[ProducerState, int]]) -> None:
    """The outbox was empty after these numbers were stored: they are indexed, or need no index."""
    for state, stored in reached:
        if stored > state.indexed:
            state.indexed = stored
            state.notify_session()


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
