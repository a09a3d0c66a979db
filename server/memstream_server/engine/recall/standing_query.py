"""Standing queries: the answer to a query, and then what changes in it while its memory does.

Rule 1. It is ranked anew after a commit, at most once every PAUSE_S; when something it holds expires; and when the
memory has changed without this process being told, which is looked for as watches do.
Rule 2. The first change is the whole answer. A later one has what came in or is of another version, what is among the
best no more, and the order: who applies each in turn holds the answer as it is.
Rule 3. Of fragments that say the same, the one in the last answer is kept while it is found: the ranking does not
flicker between them.
Rule 4. Nothing is offered to short-term; what is told counts as recalled. No working memory comes along.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from memstream_server.core.retention import expiry_us
from memstream_server.core.values import Vector
from memstream_server.engine.requests import Change, Query, RecallAnswer

if TYPE_CHECKING:
    from memstream_server.engine.recall.watch import Waiting, Watchers
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.ports.journal.records import MemoryRecord

PAUSE_S = 1.0
"""Between two rankings: what a burst of commits changes is told together."""

_Held: TypeAlias = dict[str, tuple[int, bool, tuple[str, ...]]]
"""Version, whether it was cut to the budget, and what is folded into it, of each of the best, in their order."""


def standing(query: Query) -> Query:
    """The query as it is asked again and again."""
    return replace(query, reinforce=False, working_memory=False)


class Standing:
    """What one standing query has told, and when it is to be asked again."""

    def __init__(self, watchers: Watchers, record: MemoryRecord, waiting: Waiting, clock: Clock) -> None:
        self.vectors: dict[str, Vector] = {}
        """The question's, by embedding space: a model is asked for each once."""
        self.retention = record.policy.retention
        """The memory's retention policy, for the expiry of the answer; the caller keeps it current."""
        self._watchers = watchers
        self._record = record
        self._waiting = waiting
        self._clock = clock
        self._held: _Held | None = None
        self._revision = 0
        self._degraded = False
        self._expire_time_us: int | None = None

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the last answer."""
        return frozenset(self._held or ())

    def change(self, answer: RecallAnswer) -> Change | None:
        """What is new in an answer; None where nothing is."""
        found, degraded = answer.recollections, bool(answer.degraded)
        held: _Held = {
            one.fragment.id: (one.fragment.version, one.truncated, tuple(sorted(one.folded))) for one in found
        }
        before = self._held or {}
        same = self._held is not None and list(held.items()) == list(before.items()) and degraded is self._degraded
        expiring = [at_us for one in found if (at_us := expiry_us(one.fragment, self.retention)) is not None]
        self._held, self._revision, self._degraded = held, answer.revision, degraded
        self._expire_time_us = min(expiring, default=None)
        if same:
            return None
        new = [number for number, (id_, state) in enumerate(held.items()) if before.get(id_) != state]
        return Change(
            answer=replace(answer, recollections=tuple(found[number] for number in new)),
            ranks=tuple(number + 1 for number in new),
            ids=tuple(held),
            retracted=tuple(id_ for id_ in before if id_ not in held),
        )

    async def due(self) -> None:
        """Waits until it is to be asked again. Raises MemoryNotFound."""
        await asyncio.sleep(PAUSE_S)
        while not self._waiting.news.is_set():
            quiet_s = self._watchers.quiet_s
            expires_s = None if self._expire_time_us is None else (self._expire_time_us - self._clock.now_us()) / 1e6
            if expires_s is not None and expires_s <= 0:
                return
            if await self._waiting.woken(quiet_s if expires_s is None else min(quiet_s, expires_s)):
                return
            record = await self._watchers.current(self._record)
            if record.revision > self._revision or self._degraded:
                return
