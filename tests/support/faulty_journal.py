"""A journal that fails its n-th write (refused before it is done, or done (or not) with nobody told which) or read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from memstream_server.ports.journal.errors import Conflict, JournalError, OutcomeUnknown, StorageFull

WRITES = frozenset(
    {
        "create_memory",
        "delete_memory",
        "own",
        "open_producer",
        "receive",
        "commit",
        "touch",
        "outbox_done",
        "outbox_enter",
        "outbox_refill",
        "prune_events",
        "scrub",
        "prune_answers",
        "put_answer",
    }
)
"""The port's writes, `set_space` excepted: it is done before there is an engine."""
READS = frozenset(
    {
        "all_memories",
        "answer",
        "counts",
        "events",
        "expiring",
        "fragments",
        "get_memory",
        "indexable",
        "jobs",
        "kept_receipts",
        "last_without_outcomes",
        "list_fragments",
        "list_memories",
        "load",
        "oldest_forgotten",
        "outbox",
        "outbox_fragments",
        "outbox_rows",
        "outbox_size",
        "pending_memories",
        "purgeable",
        "received_hashes",
        "vectors",
    }
)
"""The port's reads that are made while there is an engine."""
COMPARING = frozenset({"open_producer", "receive", "commit"})
"""Those whose Conflict may come of something else than the memory's end."""


class Fault(Enum):
    """How a write fails."""

    FULL = "full"  # refused, no room
    CONFLICT = "conflict"  # refused, the owner is stale
    LOST = "lost"  # not done, and nobody knows
    DONE = "done"  # done, and nobody knows


class FaultyJournal:
    """Passes everything on to the journal it wraps; `fail_at` arms it for one failure. A failing read is LOST."""

    def __init__(self, journal: object) -> None:
        self._journal: Any = journal
        self._left = 0
        self._fault = Fault.FULL
        self._write = ""
        self.failed = ""
        """The call that failed since it was armed last; empty when none has yet."""
        self.written: list[str] = []
        """Every write asked for since then."""
        self._before: dict[str, asyncio.Event] = {}
        self._after: dict[str, asyncio.Event] = {}

    def fail_at(self, number: int, fault: Fault, write: str = "") -> None:
        """The `number`-th write from now (the first is 1), or call of that name, fails that way, once."""
        self._left, self._fault, self._write = number, fault, write
        self.failed, self.written = "", []

    def hold(self, name: str, *, done: bool = False) -> Callable[[], None]:
        """Writes of that name wait (`done`: after they were done, before they return) until the result is called."""
        gate = asyncio.Event()
        (self._after if done else self._before)[name] = gate
        return gate.set

    def disarm(self) -> None:
        self._left = 0
        for gate in (*self._before.values(), *self._after.values()):
            gate.set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._journal, name)
        if name in READS:
            return self._reading(name, method)
        return self._writing(name, method) if name in WRITES else method

    def _reading(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def read(*arguments: Any, **named: Any) -> Any:
            if self._write == name and self._counts(name):
                raise self._error(name)
            return await method(*arguments, **named)

        return read

    def _writing(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def write(*arguments: Any, **named: Any) -> Any:
            self.written.append(name)
            if name in self._before:
                await self._before[name].wait()
            failing = self._counts(name)
            if failing and self._fault is not Fault.DONE:
                raise self._error(name)
            answer = await method(*arguments, **named)
            if failing:
                raise self._error(name)
            if name in self._after:
                await self._after[name].wait()
            return answer

        return write

    def _counts(self, name: str) -> bool:
        if self._left == 0 or self._write not in ("", name):
            return False
        self._left -= 1
        if self._left == 0:
            self.failed = name
        return self._left == 0

    def _error(self, name: str) -> JournalError:
        match self._fault:
            case Fault.FULL:
                return StorageFull(f"scripted: no room for {name}")
            case Fault.CONFLICT:
                return Conflict(f"scripted: {name} by a stale owner")
            case _:
                return OutcomeUnknown(f"scripted: {name} may have happened")
