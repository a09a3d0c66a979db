"""A journal whose n-th write or read fails: rejected, not done with unknown outcome, or done with unknown outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from memstream_server.ports.journal.errors import JournalError, OutcomeUnknown, StaleWrite, StorageFull

WRITES = frozenset(
    {
        "create_memory",
        "delete_memory",
        "own_memory",
        "open_producer",
        "receive",
        "commit",
        "add_accesses",
        "outbox_done",
        "outbox_enter",
        "outbox_refill",
        "prune_events",
        "prune_versions",
        "prune_recall_receipts",
        "scrub_files",
        "prune_answers",
        "put_answer",
    }
)
"""The port's writes except `set_space`, which runs before an engine exists."""
READS = frozenset(
    {
        "all_memories",
        "get_answer",
        "count_fragments",
        "list_events",
        "list_fragment_events",
        "list_expired",
        "get_fragments",
        "get_memory",
        "list_indexable",
        "list_jobs",
        "kept_receipts",
        "last_without_outcomes",
        "list_fragments",
        "list_memories",
        "load_memory",
        "oldest_forgotten",
        "read_epochs",
        "read_outbox",
        "outbox_fragments",
        "outbox_rows",
        "outbox_size",
        "pending_memories",
        "list_purgeable",
        "received_hashes",
        "get_vectors",
        "list_versions",
        "version_keys",
        "get_versions",
        "find_revision",
        "list_citing",
        "list_recall_receipts",
        "get_recall_receipt",
    }
)
"""The port's reads that an engine makes."""
COMPARING = frozenset({"open_producer", "receive", "commit"})
"""Writes whose StaleWrite may have other causes than the end of the memory."""


class Fault(Enum):
    """How a write fails."""

    FULL = "full"  # rejected: no space
    CONFLICT = "conflict"  # rejected: stale owner
    LOST = "lost"  # not done, outcome unknown
    DONE = "done"  # done, outcome unknown


class FaultyJournal:
    """Forwards every call to the wrapped journal; `fail_at` arms one failure. A failing read is LOST."""

    def __init__(self, journal: object) -> None:
        self._journal: Any = journal
        self._left = 0
        self._fault = Fault.FULL
        self._write = ""
        self.failed = ""
        """The call that failed since the last `fail_at`; empty if none yet."""
        self.written: list[str] = []
        """Every write requested since then."""
        self._before: dict[str, asyncio.Event] = {}
        self._after: dict[str, asyncio.Event] = {}

    def fail_at(self, number: int, fault: Fault, write: str = "") -> None:
        """Make the `number`-th write from now (the first is 1), or the `number`-th call of that name, fail once."""
        self._left, self._fault, self._write = number, fault, write
        self.failed, self.written = "", []

    def hold(self, name: str, *, done: bool = False) -> Callable[[], None]:
        """Block writes of that name until the returned function is called; `done`: after the write, before return."""
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
            return self._wrap_read(name, method)
        return self._wrap_write(name, method) if name in WRITES else method

    def _wrap_read(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def read(*arguments: Any, **named: Any) -> Any:
            if self._write == name and self._count_down(name):
                raise self._make_error(name)
            return await method(*arguments, **named)

        return read

    def _wrap_write(self, name: str, method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        async def write(*arguments: Any, **named: Any) -> Any:
            self.written.append(name)
            if name in self._before:
                await self._before[name].wait()
            failing = self._count_down(name)
            if failing and self._fault is not Fault.DONE:
                raise self._make_error(name)
            answer = await method(*arguments, **named)
            if failing:
                raise self._make_error(name)
            if name in self._after:
                await self._after[name].wait()
            return answer

        return write

    def _count_down(self, name: str) -> bool:
        if self._left == 0 or self._write not in ("", name):
            return False
        self._left -= 1
        if self._left == 0:
            self.failed = name
        return self._left == 0

    def _make_error(self, name: str) -> JournalError:
        match self._fault:
            case Fault.FULL:
                return StorageFull(f"scripted: no room for {name}")
            case Fault.CONFLICT:
                return StaleWrite(f"scripted: {name} by a stale owner")
            case _:
                return OutcomeUnknown(f"scripted: {name} may have happened")
