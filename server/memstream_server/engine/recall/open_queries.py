"""The standing queries that are open in this process: their number is bounded, and clients list them.

A list has what the query's client sent, and what was sent to it. It is in RAM: a query ends with its stream.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memstream_server.engine.errors import QuotaExceeded
from memstream_server.engine.runtime.call_context import PRINCIPAL

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import Runtime
    from memstream_server.engine.runtime.registry import Registry


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
