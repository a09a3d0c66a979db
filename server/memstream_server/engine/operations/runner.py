"""Long-running operations: started by a call, run in the background, cancellable, resumed after a restart.

Rule 1. An operation is a row of the journal before its work begins. After a restart an unfinished one runs again from
its payload, so every `Work` is idempotent and finds out what is left.
Rule 2. Operations of one type run one after another for each memory (or namespace, or the whole store), and in parallel
for different ones: at most AT_ONCE of a type for memories, and as many others.
Rule 3. With a shared journal one process runs an operation: it claims the row. A memory's operation belongs to the
owner of the memory, any other to the leader. A process gives away operations that it does not own.
Rule 4. Failures that may pass (a model or the journal is down) are retried. TRIES failures in a row without progress,
or any other failure, end the operation. A client reads a `OperationFailure`, never the text of an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import structlog

from memstream_server.engine.errors import (
    AlreadyAnswered,
    CapabilityMissing,
    EngineError,
    JournalUnavailable,
    LeaseLost,
    OperationNotFound,
    OwnedElsewhere,
    QuotaExceeded,
    ShuttingDown,
    write_error,
)
from memstream_server.engine.runtime.call_context import complete
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Operation, OperationFailure, Operations, OperationState

if TYPE_CHECKING:
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.engine.runtime.ownership import Ownership
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


log = structlog.get_logger(__name__)

AT_ONCE = 2
KEPT_US = 7 * 24 * 3600 * 1_000_000
"""How long an ended operation can be read."""
TIDY_INTERVAL_S = 3600.0
RETRY_S = 1.0
RETRY_MAX_S = 30.0
TRIES = 10
POLL_INTERVAL_S = 0.25
"""Poll interval for an operation of another process."""

T = TypeVar("T")


Work: TypeAlias = Callable[[Operation, Progress], Awaitable[None]]
AnswerOf: TypeAlias = Callable[[Operation], Answer] | None
"""Makes the stored answer to a request_id from the started operation."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    unit: str
    work: Work
    stays: bool
    """Whether only the process that started it can run it."""
    undoes: bool
    """Whether the work rolls back when it is cancelled. If it had begun and does not run at that time, it runs once
    more to do so.
    """
    places: asyncio.Semaphore
    """Slots for operations of memories."""
    wide: asyncio.Semaphore
    """Places for the others. They may wait for operations of memories, so with shared places they could deadlock."""
    lanes: WeakValueDictionary[tuple[str, str], asyncio.Lock] | None
    """None if operations of one memory may run in parallel."""


@dataclass(slots=True, eq=False)
class _Live:
    """An operation that this process must run."""

    progress: Progress
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    """Whether the work itself handles a cancellation."""
    task: asyncio.Task[None] | None = None


class OperationRunner:
    """All operations. Register types before `resume`. Methods raise StorageIsFull, JournalUnavailable."""

    def __init__(
        self,
        store: Operations,
        clock: Clock,
        ids: Ids,
        failure_of: Callable[[Exception], OperationFailure],
        ownership: Ownership,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._clock = clock
        self._ids = ids
        self._failure_of = failure_of
        self._kinds: dict[str, _Kind] = {}
        self._live: dict[str, _Live] = {}
        self._tidying: asyncio.Task[None] | None = None

    def register_type(
        self,
        type: str,
        unit: str,
        work: Work,
        *,
        at_once: int = AT_ONCE,
        in_turn: bool = True,
        stays: bool = False,
        undoes: bool = False,
    ) -> None:
        """Register a type of operation; `in_turn=False` lets those of one memory run in parallel."""
        lanes: WeakValueDictionary[tuple[str, str], asyncio.Lock] | None = WeakValueDictionary() if in_turn else None
        places, wide = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)
        self._kinds[type] = _Kind(unit, work, stays, undoes, places, wide, lanes)

    async def resume(self) -> None:
        """Resume operations of an earlier process, and claim those without a process. Call every few seconds if the
        journal is shared. Raises JournalError, JournalUnavailable.
        """
        if self._tidying is None:
            self._tidying = asyncio.create_task(self._tidy_loop())
            self._ownership.on_loss(self._leave_all)
        waiting = [one for one in await self._store.list_unfinished() if one.id not in self._live]
        if self._ownership.shared:  # this process is about to start its own, or to give them away
            waiting = [one for one in waiting if one.process != self._ownership.number]
        others = await self._ownership.list_living() if waiting else frozenset()
        for operation in waiting:
            process = self._ownership.number
            if (
                operation.process not in others
                and await self._is_ours(operation)
                and await self._store.claim(operation.id, process, operation.process)
                and process == self._ownership.number
            ):
                self._begin_task(replace(operation, process=process))

    async def _is_ours(self, operation: Operation) -> bool:
        if operation.memory:
            return await self._ownership.find_owner(operation.namespace, operation.memory) is None
        return self._ownership.leads

    async def stop(self) -> None:
        """Stop running operations; the next start resumes them."""
        tasks = [live.task for live in self._live.values() if live.task is not None]
        tasks += [self._tidying] if self._tidying is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- called by the rpcs
    async def start(self, type: str, namespace: str, memory: str, payload: str, answer: AnswerOf = None) -> Operation:
        """A new, durable operation. Raises AlreadyAnswered if a concurrent call has answered the request_id."""
        operation = Operation(
            id=self._ids.next_id(),
            type=type,
            namespace=namespace,
            memory=memory,
            payload=payload,
            unit=self._kinds[type].unit,
            create_time_us=self._clock.now_us(),
        )
        if memory or self._ownership.leads or self._kinds[type].stays:
            operation = replace(operation, process=self._ownership.number)
        # Shielded: if a cancelled caller left an operation written but not begun, it would wait for a restart.
        await complete(
            asyncio.create_task(self._create_operation(operation, None if answer is None else answer(operation)))
        )
        return operation

    async def _create_operation(self, operation: Operation, answer: Answer | None) -> None:
        try:
            await _map_errors(self._store.create(operation, answer))
        except JournalUnavailable:  # the row may exist, and a repeat would get it as its answer
            if await _map_errors(self._store.get(operation.id)) is None:
                raise
        # Not after the lease was lost: another process may claim it.
        if operation.process == self._ownership.number and self._ownership.is_valid():
            self._begin_task(operation)

    async def get(self, id: str) -> Operation:
        """The current state. Raises OperationNotFound."""
        if id in self._live:
            return self._live[id].progress.operation
        operation = await _map_errors(self._store.get(id))
        if operation is None:
            raise OperationNotFound(f"there is no operation {id!r}; it may have ended over 7 days ago", id=id)
        return operation

    async def list_page(self, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
        """The newest first, with ids below `before`; an empty string matches all."""
        rows = await _map_errors(self._store.list_page(namespace, memory, before, limit))
        return [self._live[row.id].progress.operation if row.id in self._live else row for row in rows]

    async def cancel(self, id: str) -> Operation:
        """Cancel it: at once if it waits, soon if it runs. Returns its state. Raises OperationNotFound."""
        await self.get(id)
        asked = await _map_errors(self._store.ask_cancel(id))
        live = self._live.get(id)
        if live is not None:
            live.progress.operation = replace(live.progress.operation, cancel_asked=True)
            await asyncio.sleep(0)  # a task cancelled before its first step would not record its end
            if not live.begun and live.task is not None:
                live.task.cancel()
                await live.ended.wait()
        return await self.get(id) if asked is None or not asked.ended else asked

    async def wait_for_end(self, id: str) -> Operation:
        """Wait for its end. Raises OperationNotFound."""
        while not (operation := await self.get(id)).ended:
            live = self._live.get(id)
            if live is not None:
                await live.ended.wait()
            else:
                await asyncio.sleep(POLL_INTERVAL_S)
        return operation

    def _leave_all(self) -> None:
        """The lease is lost: another process resumes the running operations."""
        for live in self._live.values():
            if live.task is not None:
                live.task.cancel()

    # ---- running
    def _begin_task(self, operation: Operation) -> None:
        kind, progress = self._kinds.get(operation.type), Progress(operation, self._store.save, self._clock)
        undoes = kind is not None and kind.undoes and operation.state is OperationState.RUNNING
        live = self._live[operation.id] = _Live(progress, begun=undoes)
        live.task = asyncio.create_task(self._run(live), name=f"operation {operation.type}")

    async def _run(self, live: _Live) -> None:
        operation = live.progress.operation
        kind = self._kinds.get(operation.type)
        try:
            if kind is None:
                text = f"this server does not support {operation.type!r}; a newer one may have started it"
                failed = CapabilityMissing(text, capability=operation.type)
                await self._end_operation(live, OperationState.FAILED, self._failure_of(failed))
            elif operation.cancel_asked and not live.begun:
                await self._end_operation(live, OperationState.CANCELLED)
            else:
                await self._in_turn(live, kind)
        except asyncio.CancelledError:
            if live.begun or not live.progress.operation.cancel_asked or not self._ownership.is_valid():
                raise  # the process stops, or may no longer run it
            await self._end_operation(live, OperationState.CANCELLED)
        except Exception:  # the row is unfinished: the next start resumes it
            log.exception("operation_interrupted", operation=operation.id, type=operation.type)
        finally:
            del self._live[operation.id]
            live.ended.set()

    async def _in_turn(self, live: _Live, kind: _Kind) -> None:
        where = live.progress.operation.namespace, live.progress.operation.memory
        lane = asyncio.Lock() if kind.lanes is None else kind.lanes.setdefault(where, asyncio.Lock())
        async with lane, kind.places if live.progress.operation.memory else kind.wide:
            await self._run_work(live, kind)

    async def _run_work(self, live: _Live, kind: _Kind) -> None:
        live.begun = True
        progress = live.progress
        progress.operation = replace(progress.operation, state=OperationState.RUNNING)
        log.info("operation_begins", operation=progress.operation.id, type=progress.operation.type)
        try:
            await self._save_until_written(progress.operation)
            await self._retry_work(progress, kind)
        except OperationCancelled:
            await self._end_operation(live, OperationState.CANCELLED)
        except (OwnedElsewhere, LeaseLost):
            await self._give_away(progress.operation)
        except Exception as error:  # any error ends the operation with a Failure
            await self._end_operation(live, OperationState.FAILED, self._failure_of(error))
        else:
            await self._end_operation(live, OperationState.SUCCEEDED)

    async def _retry_work(self, progress: Progress, kind: _Kind) -> None:
        """Run the work; retry it after failures that may pass."""
        failures = 0
        while True:
            progress.advanced = False
            try:
                return await kind.work(progress.operation, progress)
            except (EngineError, JournalError) as error:
                if isinstance(error, OwnedElsewhere | LeaseLost):
                    raise
                failures = 0 if progress.advanced else failures + 1
                if isinstance(error, ShuttingDown):
                    await asyncio.Event().wait()  # until `stop` cancels it; the next start resumes
                refusal = _map_error(error) if isinstance(error, JournalError) else error
                final = refusal.retry_after_s is None or isinstance(refusal, QuotaExceeded)
                if failures >= TRIES or final:
                    raise refusal from error
                pause = min(RETRY_S * 2**failures, RETRY_MAX_S)
                log.warning("operation_waits", operation=progress.operation.id, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
            if progress.operation.cancel_asked and not kind.undoes:
                raise OperationCancelled

    async def _end_operation(self, live: _Live, state: OperationState, error: OperationFailure | None = None) -> None:
        now_us = self._clock.now_us()
        operation = replace(live.progress.operation, state=state, end_time_us=now_us, error=error)
        log.info("operation_ended", operation=operation.id, type=operation.type, state=state.value)
        await self._save_until_written(operation)
        live.progress.operation = operation

    async def _save_until_written(self, operation: Operation) -> None:
        """Write the row, and retry while the journal is down: an unwritten end would be lost."""
        pause = RETRY_S
        while True:
            try:
                await self._store.save(operation)
            except JournalError as error:
                log.warning("operation_not_saved", operation=operation.id, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                return

    async def _give_away(self, operation: Operation) -> None:
        """Give up the claim, and retry while the journal is down: no other process runs a claimed operation."""
        pause = RETRY_S
        while True:
            try:
                await self._store.claim(operation.id, None, operation.process)
            except JournalError as error:
                log.warning("operation_claim_not_released", operation=operation.id, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                return

    async def _tidy_loop(self) -> None:
        while True:
            try:
                await self._store.remove_ended(self._clock.now_us() - KEPT_US)
            except JournalError as error:
                log.warning("operations_cleanup_failed", reason=error)
            await asyncio.sleep(TIDY_INTERVAL_S)


def _map_error(error: JournalError) -> EngineError:
    """The store's error as an engine error."""
    if isinstance(error, StaleWrite):
        return AlreadyAnswered(
            "a concurrent repeat of this request was answered; repeat it to get that answer", retry_after_s=0.1
        )
    return write_error(error)


async def _map_errors(work: Awaitable[T]) -> T:
    try:
        return await work
    except JournalError as error:
        raise _map_error(error) from error
