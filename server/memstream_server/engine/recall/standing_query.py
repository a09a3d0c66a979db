"""Standing queries: the answer to a query, then its changes.

Rule 1. The query is ranked again after a commit, at most once every PAUSE_S; when a fragment of the answer expires;
when a validity in the memory begins or ends; and when another process has changed the memory, which is polled as
watches do.
Rule 2. The first change is the whole answer. A later change has the new and changed recollections, the ids that left,
and the order. A client that applies all changes has the current answer.
Rule 3. Of fragments with the same meaning, the one in the last answer is kept while it is found, so that the answer
does not alternate.
Rule 4. It reinforces nothing and is no access; if it names a session, sent fragments can be echoed in that session.
Answers have no working memory.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace

from memstream_server.core.retention import expiry_us
from memstream_server.core.suspicions import Suspicion
from memstream_server.core.values import TruthStatus, Vector
from memstream_server.engine.requests import Change, Query, RecallAnswer

if TYPE_CHECKING:
    from memstream_server.engine.recall.watch import Waiter, Watchers
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.ports.journal.records import MemoryRecord

PAUSE_S = 1.0
"""Pause between two rankings: one change covers a burst of commits."""

_Held: TypeAlias = dict[
    str, tuple[int, bool, tuple[str, ...], TruthStatus, tuple[Suspicion, ...], str, tuple[str, int] | None]
]
"""By id, best first: version, whether the budget cut it, the ids folded into it, whether it is current, the open
suspicions about it, its latest twin, and id and version of its companion."""


def as_standing(query: Query) -> Query:
    """The query with the fixed values of a standing one."""
    return replace(query, reinforce=False, working_memory=False)


class StandingQuery:
    """The last answer of one standing query, and the time of its next ranking."""

    def __init__(self, watchers: Watchers, record: MemoryRecord, waiting: Waiter, clock: Clock) -> None:
        self.vectors: dict[str, Vector] = {}
        """The query's vectors by embedding space: each is made once."""
        self.retention = record.policy.retention
        """The memory's retention policy, for the expiry of the answer; the caller keeps it current."""
        self._watchers = watchers
        self._record = record
        self._waiting = waiting
        self._clock = clock
        self._last_answer: _Held | None = None
        self._revision = 0
        self._degraded = False
        self._due_us: int | None = None
        """When a fragment of the answer expires, or a validity in the memory begins or ends."""

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the last answer."""
        return frozenset(self._last_answer or ())

    def next_change(self, answer: RecallAnswer) -> Change | None:
        """The difference from the last answer; None if there is none."""
        found, degraded = answer.recollections, bool(answer.degraded)
        held: _Held = {
            one.fragment.id: (
                one.fragment.version,
                one.truncated,
                tuple(sorted(one.folded)),
                one.status,
                one.suspicions,
                one.later_id,
                None if one.companion is None else (one.companion.fragment.id, one.companion.fragment.version),
            )
            for one in found
        }
        before = self._last_answer or {}
        same = (
            self._last_answer is not None and list(held.items()) == list(before.items()) and degraded is self._degraded
        )
        shown = [*found, *(one.companion for one in found if one.companion is not None)]
        expiring = [at_us for one in shown if (at_us := expiry_us(one.fragment, self.retention)) is not None]
        self._last_answer, self._revision, self._degraded = held, answer.revision, degraded
        if answer.validity_change_us is not None:
            expiring.append(answer.validity_change_us)
        self._due_us = min(expiring, default=None)
        if same:
            return None
        new = [number for number, (id_, state) in enumerate(held.items()) if before.get(id_) != state]
        return Change(
            answer=replace(answer, recollections=tuple(found[number] for number in new)),
            ranks=tuple(number + 1 for number in new),
            ids=tuple(held),
            retracted=tuple(id_ for id_ in before if id_ not in held),
        )

    async def wait_until_due(self) -> None:
        """Wait until the query must be ranked again. Raises MemoryNotFound."""
        await asyncio.sleep(PAUSE_S)
        while not self._waiting.news.is_set():
            quiet_s = self._watchers.quiet_s
            due_s = None if self._due_us is None else (self._due_us - self._clock.now_us()) / 1e6
            if due_s is not None and due_s <= 0:
                return
            if await self._waiting.wait_for_commit(quiet_s if due_s is None else min(quiet_s, due_s)):
                return
            record = await self._watchers.read_current(self._record)
            if record.revision > self._revision or self._degraded:
                return
