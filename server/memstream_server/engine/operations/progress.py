"""The progress of an operation: its work reports here, and learns here that it is cancelled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.ports.operations import Operation, OperationFailure

SAVE_INTERVAL_S = 1.0
"""Shortest interval between two writes of the progress."""


class OperationCancelled(Exception):
    """Ends the work; what it has done stays."""


class Progress:
    """The work reports its progress here and is notified of a cancellation."""

    def __init__(self, operation: Operation, save: Callable[[Operation], Awaitable[bool]], clock: Clock) -> None:
        self.operation = operation
        self._save = save
        self._clock = clock
        self._saved_s = clock.monotonic_s()
        self.advanced = False
        """Whether the work went beyond earlier attempts since this was set to False."""
        self._most = operation.done

    async def report_wait(self, why: OperationFailure | None) -> None:
        """Report what the work waits for (None: nothing), shown as the `error` of the running operation."""
        if self.operation.error != why:
            self.operation = replace(self.operation, error=why)
            await self._save(self.operation)

    async def report_done(self, done: int, total: int) -> None:
        """Report `done` of `total` (0: unknown). Raises OperationCancelled."""
        self.advanced = self.advanced or done > self._most
        self._most = max(self._most, done)
        self.operation = replace(self.operation, done=done, total=total)
        if self._clock.monotonic_s() - self._saved_s >= SAVE_INTERVAL_S:
            self._saved_s = self._clock.monotonic_s()
            if await self._save(self.operation):
                self.operation = replace(self.operation, cancel_asked=True)
        if self.operation.cancel_asked:
            raise OperationCancelled

    async def check_cancelled(self) -> None:
        """Report no progress. Raises OperationCancelled."""
        await self.report_done(self.operation.done, self.operation.total)
