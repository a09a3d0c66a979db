"""How far another process has indexed this process's memories, derived from the rows in the outbox.

Only the owner of a memory adds its rows, in order. When the last row that one check has seen is gone, everything that
was stored before that check is in the index.
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
    return [(state, state.stored) for state in actor.ingest.list_producers()]


def _is_behind(actor: Actor) -> bool:
    return bool(actor.working.list_unsettled()) or any(
        state.indexed < state.stored for state in actor.ingest.list_producers()
    )


def mark_indexed(reached: Sequence[tuple[ProducerState, int]]) -> None:
    """The outbox was empty after these numbers were stored: they are indexed, or need no index."""
    for state, stored in reached:
        if stored > state.indexed:
            state.indexed = stored
            state.notify_session()
