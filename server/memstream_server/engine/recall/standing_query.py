"""Standing queries: the answer to a query, then its changes; and the list of those that are open.

Rule 1. The query is ranked again after a commit, at most once every PAUSE_S; when a fragment of the answer expires;
when a validity in the memory begins or ends; and when another process has changed the memory, which is polled as
watches do.
Rule 2. The first change is the whole answer. A later change has the new and changed recollections, the ids that left,
and the order. A client that applies all changes has the current answer.
Rule 3. Of fragments with the same meaning, the one in the last answer is kept while it is found, so that the answer
does not alternate.
Rule 4. It reinforces nothing and is no access; if it names a session, sent fragments can be echoed in that session.
Answers have no working memory.
Rule 5. The number of standing queries that are open in this process is bounded, and clients list them: what each one's
client sent, and what was sent to it. The list is in RAM, because a query ends with its stream.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memstream_server.core.retention import expiry_us
from memstream_server.core.values import Vector
from memstream_server.engine.errors import QuotaExceeded
from memstream_server.engine.recall.watch import Waiter
from memstream_server.engine.requests import Change, Query, RecallAnswer
from memstream_server.engine.runtime.call_context import PRINCIPAL

if TYPE_CHECKING:
    from memstream_server.core.policy import RetentionPolicy
    from memstream_server.engine.recall.watch import Watchers
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.engine.runtime.dependencies import Runtime
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.ports.journal.records import MemoryRecord

PAUSE_S = 1.0
"""Pause between two rankings: one change covers a burst of commits."""


def as_standing(query: Query) -> Query:
    """The query with the fixed values of a standing one."""
    return replace(query, reinforce=False, working_memory=False)


class StandingQuery:
    """The last answer of one standing query, and the time of its next ranking. Its memories are watched in a `with`
    block."""

    def __init__(self, watchers: Watchers, clock: Clock, selects: bool = False) -> None:
        """selects: its memories may be others at every ranking, so that it is ranked after every poll."""
        self.vectors: dict[str, Vector] = {}
        """The query's vectors by embedding space: each is made once."""
        self.waiting = Waiter(0)
        self._selects = selects
        self._watchers = watchers
        self._records: dict[str, MemoryRecord] = {}
        """Of the memories, by uid."""
        self._watches: dict[str, AbstractContextManager[Waiter]] = {}
        self._clock = clock
        self._last_answer: dict[str, tuple[object, ...]] | None = None
        """`Recollection.compared` by id, best first."""
        self._degraded = False
        self._due_us: int | None = None
        """When a fragment of the answer expires, or a validity in the memory begins or ends."""

    def __enter__(self) -> StandingQuery:
        return self

    def __exit__(self, *_error: object) -> None:
        self.watch(())

    def watch(self, records: Sequence[MemoryRecord]) -> None:
        """The memories of the next ranking, as they are now."""
        self._records = {record.uid: record for record in records}
        for uid in self._watches.keys() - self._records.keys():
            self._watches.pop(uid).__exit__(None, None, None)
        for uid in self._records.keys() - self._watches.keys():
            watch = self._watches[uid] = self._watchers.add_waiter(self._records[uid], self.waiting)
            watch.__enter__()

    def _find_retention(self, memory: str) -> RetentionPolicy:
        """Of the memory that holds a recollection; without a name, of the only one."""
        named = (each for each in self._records.values() if not memory or f"{each.namespace}/{each.name}" == memory)
        return next(named).policy.retention

    @property
    def ids(self) -> frozenset[str]:
        """Ids of the last answer."""
        return frozenset(self._last_answer or ())

    def next_change(self, answer: RecallAnswer) -> Change | None:
        """The difference from the last answer; None if there is none."""
        found, degraded = answer.recollections, bool(answer.degraded)
        held = {one.fragment.id: one.compared for one in found}
        before = self._last_answer or {}
        same = (
            self._last_answer is not None and list(held.items()) == list(before.items()) and degraded is self._degraded
        )
        expiring = [
            at_us
            for one in found
            for shown in (one, one.companion)
            if shown is not None and (at_us := expiry_us(shown.fragment, self._find_retention(one.memory))) is not None
        ]
        self._last_answer, self._degraded = held, degraded
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
        while not self.waiting.news.is_set():
            quiet_s = self._watchers.quiet_s
            due_s = None if self._due_us is None else (self._due_us - self._clock.now_us()) / 1e6
            if due_s is not None and due_s <= 0:
                return
            if await self.waiting.wait_for_commit(quiet_s if due_s is None else min(quiet_s, due_s)):
                return
            if self._selects or self._degraded:
                return
            for record in self._records.values():
                if (await self._watchers.read_current(record)).revision > record.revision:
                    return


@dataclass(slots=True, eq=False)
class OpenQuery:
    """One open standing query. The stream that answers it counts its messages."""

    query: bytes = b""
    """The query as the client sent it, without its embedding."""
    session: str = ""
    """The session of its stream."""
    id: str = ""
    open_us: int = 0
    change_us: int | None = None
    """Time of the last change; None before the first answer."""
    messages_sent: int = 0
    recollections: int = 0
    """Number of recollections in the present answer."""
    principal: str = field(default_factory=PRINCIPAL.get)
    """Who opened it; empty without authentication."""


class OpenQueries:
    """All of this process, by memory; a part of the engine."""

    def __init__(self, runtime: Runtime, registry: Registry) -> None:
        self._runtime = runtime
        self._registry = registry
        self._by_memory: dict[str, dict[str, OpenQuery]] = {}
        """By memory uid and id, in the order of opening."""
        self._by_principal: Counter[str] = Counter()

    @contextmanager
    def keep(self, uids: Sequence[str], query: OpenQuery) -> Iterator[None]:
        """List the query of these memories during the block; sets its id and time. Raises QuotaExceeded."""
        for uid in uids or ("",):
            self._check_number(uid, query.principal)
        query.id, query.open_us = self._runtime.ids.next_id(), self._runtime.clock.now_us()
        listed = [(uid, self._by_memory.setdefault(uid, {})) for uid in uids]
        for _, of_memory in listed:
            of_memory[query.id] = query
        self._by_principal[query.principal] += 1
        try:
            yield
        finally:
            self._by_principal[query.principal] -= 1
            if not self._by_principal[query.principal]:
                del self._by_principal[query.principal]
            for uid, of_memory in listed:
                del of_memory[query.id]
                if not of_memory and self._by_memory.get(uid) is of_memory:
                    del self._by_memory[uid]

    def _check_number(self, uid: str, principal: str) -> None:
        limits = self._runtime.limits
        for whose, number, quota, limit in (
            ("you have", self._by_principal[principal], "caller_standing_queries_max", limits.caller_standing_max),
            (
                "the memory has",
                len(self._by_memory.get(uid, ())),
                "memory_standing_queries_max",
                limits.memory_standing_max,
            ),
            ("the server has", self._by_principal.total(), "standing_queries_max", limits.standing_max),
        ):
            if limit and number >= limit:
                raise QuotaExceeded(
                    f"{whose} {number} standing queries open, more are not allowed: cancel one",
                    quota=quota,
                    limit=limit,
                )

    async def list_page(self, namespace: str, name: str, after: str, limit: int) -> tuple[list[OpenQuery], bool]:
        """(queries with ids greater than `after`, the oldest first; whether there are more). Raises MemoryNotFound."""
        record = await self._registry.read_record(namespace, name)
        of_memory = self._by_memory.get(record.uid, {})
        ids = sorted(of_memory)
        start = bisect_right(ids, after)
        page = [of_memory[id_] for id_ in ids[start : start + limit]]
        return page, len(ids) > start + limit
