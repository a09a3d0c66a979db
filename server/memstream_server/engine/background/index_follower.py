"""How far another process has brought this one's memories into the vector index, told by the outbox's rows.

A memory's rows are entered in order, by its one owner: once the last of those there at one look is gone, everything
that was stored before that look is in the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memstream_server.engine.memory.producers import ProducerState

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.port import Journal


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """What was stored at a look, and the memory's last row of the outbox then."""

    reached: list[tuple[ProducerState, int]]
    fresh: list[str]
    last: int


class Following:
    """Of the memories active here."""

    def __init__(self, journal: Journal, registry: Registry) -> None:
        self._journal = journal
        self._registry = registry
        self._marks: dict[Actor, _Mark] = {}

    async def look(self) -> dict[str, list[str]]:
        """Tells producers what is indexed. Returns, by memory, fragments that are in the index since."""
        waiting = [actor for actor in self._registry.actors() if actor in self._marks or _behind(actor)]
        seen = {actor: _Mark(_reached(actor), actor.working.unsettled(), 0) for actor in waiting}
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
                indexed(mark.reached)
                flushed[actor.uid] = mark.fresh
        self._marks = marks
        return flushed


def _reached(actor: Actor) -> list[tuple[ProducerState, int]]:
    return [(state, state.stored) for state in actor.receiving.producers()]


def _behind(actor: Actor) -> bool:
    return bool(actor.working.unsettled()) or any(state.indexed < state.stored for state in actor.receiving.producers())


def indexed(reached: Sequence[tuple[ProducerState, int]]) -> None:
    """The outbox was empty after these numbers were stored: they are indexed, or need no index."""
    for state, stored in reached:
        if stored > state.indexed:
            state.indexed = stored
            state.tell()
