"""Long work: started by a call, done in the background, followed, cancelled, and gone on with after a restart.

Rule 1. An operation is a row before anything of it is done. What is unfinished at a start is run again from its
payload, so every `Work` is idempotent and finds out by itself what is left.
Rule 2. Operations of one type run one after the other for each memory (or namespace, or the store as a whole), side by
side for different ones, AT_ONCE of a type at most, and as many more that are not of one memory.
Rule 3. Of several processes that share the journal one does an operation: it claims the row. That of a memory belongs
to the process that owns the memory, any other to the one that leads; what is not its own a process gives away.
Rule 4. What may pass by itself (a model or the journal is away) is waited for; TRIES times in a row without progress,
or any other failure, end the operation. A client reads a `Failure`, never an exception's text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import structlog

from memstream_server.engine.errors import (
    DISK_FULL,
    NOT_WRITTEN,
    AlreadyAnswered,
    CapabilityMissing,
    EngineError,
    JournalUnavailable,
    LeaseLost,
    OperationNotFound,
    OwnedElsewhere,
    QuotaExceeded,
    ShuttingDown,
    StorageIsFull,
)
from memstream_server.engine.runtime.clock import Clock, Ids
from memstream_server.ports.journal.errors import Conflict, JournalError, StorageFull
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.operations import Failure, Operation, Operations, OperationState

if TYPE_CHECKING:
    from memstream_server.engine.runtime.ownership import Ownership

log = structlog.get_logger(__name__)

AT_ONCE = 2
SAVE_INTERVAL_S = 1.0
"""Progress is written no more often."""
KEPT_US = 7 * 24 * 3600 * 1_000_000
"""How long an operation can be read after its end."""
TIDY_INTERVAL_S = 3600.0
RETRY_S = 1.0
RETRY_MAX_S = 30.0
TRIES = 10
LOOK_S = 0.25
"""How often an operation of another process is looked at."""

T = TypeVar("T")


class OperationCancelled(Exception):
    """The work is to end here; what it has done stays done."""


class Progress:
    """What a work reports to, and by which it hears that it is to end."""

    def __init__(self, operation: Operation, save: Callable[[Operation], Awaitable[bool]], clock: Clock) -> None:
        self.operation = operation
        self._save = save
        self._clock = clock
        self._saved_s = clock.monotonic_s()
        self.advanced = False
        """Whether anything was done since this was last set to False: beyond what any try before has done."""
        self._most = operation.done

    async def waits(self, why: Failure | None) -> None:
        """What the work waits for (None: nothing any more), shown as the `error` of an operation that is at work."""
        if self.operation.error != why:
            self.operation = replace(self.operation, error=why)
            await self._save(self.operation)

    async def at(self, done: int, total: int) -> None:
        """So much is done of so much (0: not known). Raises OperationCancelled."""
        self.advanced = self.advanced or done > self._most
        self._most = max(self._most, done)
        self.operation = replace(self.operation, done=done, total=total)
        if self._clock.monotonic_s() - self._saved_s >= SAVE_INTERVAL_S:
            self._saved_s = self._clock.monotonic_s()
            if await self._save(self.operation):
                self.operation = replace(self.operation, cancel_asked=True)
        if self.operation.cancel_asked:
            raise OperationCancelled

    async def still(self) -> None:
        """Nothing more is done than was. Raises OperationCancelled."""
        await self.at(self.operation.done, self.operation.total)


Work: TypeAlias = Callable[[Operation, Progress], Awaitable[None]]
AnswerOf: TypeAlias = Callable[[Operation], Answer] | None
"""Makes the stored answer to a request_id from the operation started."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    unit: str
    work: Work
    stays: bool
    """Whether only the process that started it can do it."""
    undoes: bool
    """Whether the work takes back what it has begun when it is cancelled: one that had begun is run once more to hear
    of it, where it was not at work then."""
    slots: asyncio.Semaphore
    """Of a memory's operations."""
    wide: asyncio.Semaphore
    """Of the others, which may wait for those of memories: where they shared these they could wait for ever."""
    lanes: WeakValueDictionary[tuple[str, str], asyncio.Lock] | None
    """None where operations of one memory may run side by side, too."""


@dataclass(slots=True, eq=False)
class _Live:
    """An operation that this process is to do."""

    progress: Progress
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: bool = False
    """Whether it is its work that hears that it is to end."""
    task: asyncio.Task[None] | None = None


class OperationRunner:
    """All operations. Works are registered before `resume`. Methods raise StorageIsFull, JournalUnavailable."""

    def __init__(
        self,
        store: Operations,
        clock: Clock,
        ids: Ids,
        failure_of: Callable[[Exception], Failure],
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

    def register(
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
        """How operations of this type are done; `in_turn` off lets those of one memory run side by side."""
        lanes: WeakValueDictionary[tuple[str, str], asyncio.Lock] | None = WeakValueDictionary() if in_turn else None
        slots, wide = asyncio.Semaphore(at_once), asyncio.Semaphore(at_once)
        self._kinds[type] = _Kind(unit, work, stays, undoes, slots, wide, lanes)

    async def resume(self) -> None:
        """Go on with what an earlier process left, and with what no other one does: to be called every few seconds
        where there are several. Raises JournalError, JournalUnavailable."""
        if self._tidying is None:
            self._tidying = asyncio.create_task(self._tidy())
            self._ownership.on_loss(self._leave_all)
        waiting = [one for one in await self._store.list_unfinished() if one.id not in self._live]
        if self._ownership.shared:  # this process's own are just being started, or given away
            waiting = [one for one in waiting if one.process != self._ownership.number]
        others = await self._ownership.living() if waiting else frozenset()
        for operation in waiting:
            process = self._ownership.number
            if (
                operation.process not in others
                and await self._is_ours(operation)
                and await self._store.claim(operation.id, process, operation.process)
                and process == self._ownership.number
            ):
                self._begin(replace(operation, process=process))

    async def _is_ours(self, operation: Operation) -> bool:
        if operation.memory:
            return await self._ownership.owner(operation.namespace, operation.memory) is None
        return self._ownership.leads

    async def stop(self) -> None:
        """What is under way is gone on with after the next start."""
        tasks = [live.task for live in self._live.values() if live.task is not None]
        tasks += [self._tidying] if self._tidying is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what the wire asks
    async def start(self, type: str, namespace: str, memory: str, payload: str, answer: AnswerOf = None) -> Operation:
        """A new operation, durable. Raises AlreadyAnswered when the request_id was answered meanwhile."""
        operation = Operation(
            id=self._ids.next(),
            type=type,
            namespace=namespace,
            memory=memory,
            payload=payload,
            unit=self._kinds[type].unit,
            create_time_us=self._clock.now_us(),
        )
        if memory or self._ownership.leads or self._kinds[type].stays:
            operation = replace(operation, process=self._ownership.number)
        # Once asked for it is made and begun, whoever waits for it: one that is written and not begun would wait for a
        # restart.
        await asyncio.shield(asyncio.create_task(self._made(operation, None if answer is None else answer(operation))))
        return operation

    async def _made(self, operation: Operation, answer: Answer | None) -> None:
        try:
            await _told(self._store.create(operation, answer))
        except JournalUnavailable:  # perhaps it is there, and whoever asks again would get it as the answer
            if await _told(self._store.get(operation.id)) is None:
                raise
        # Not where the lease went meanwhile: whoever claims it does it, and that may be another process.
        if operation.process == self._ownership.number and self._ownership.valid():
            self._begin(operation)

    async def get(self, id: str) -> Operation:
        """As it is now. Raises OperationNotFound."""
        if id in self._live:
            return self._live[id].progress.operation
        operation = await _told(self._store.get(id))
        if operation is None:
            raise OperationNotFound(f"there is no operation {id!r}; it may have ended over 7 days ago", id=id)
        return operation

    async def page(self, namespace: str, memory: str, before: str, limit: int) -> list[Operation]:
        """The newest first, of ids less than `before`; empty strings do not restrict."""
        rows = await _told(self._store.list_page(namespace, memory, before, limit))
        return [self._live[row.id].progress.operation if row.id in self._live else row for row in rows]

    async def cancel(self, id: str) -> Operation:
        """Ask it to end: one that waits ends at once, one at work soon. As it is then. Raises OperationNotFound."""
        await self.get(id)
        asked = await _told(self._store.ask_cancel(id))
        live = self._live.get(id)
        if live is not None:
            live.progress.operation = replace(live.progress.operation, cancel_asked=True)
            await asyncio.sleep(0)  # a task that is cancelled before its first step never comes to say that it ended
            if not live.begun and live.task is not None:
                live.task.cancel()
                await live.ended.wait()
        return await self.get(id) if asked is None or not asked.ended else asked

    async def finished(self, id: str) -> Operation:
        """Waits for its end. Raises OperationNotFound."""
        while not (operation := await self.get(id)).ended:
            live = self._live.get(id)
            if live is not None:
                await live.ended.wait()
            else:
                await asyncio.sleep(LOOK_S)
        return operation

    def _leave_all(self) -> None:
        """The lease is lost: whoever has one goes on with what is under way."""
        for live in self._live.values():
            if live.task is not None:
                live.task.cancel()

    # ---- doing it
    def _begin(self, operation: Operation) -> None:
        kind, progress = self._kinds.get(operation.type), Progress(operation, self._store.save, self._clock)
        undoes = kind is not None and kind.undoes and operation.state is OperationState.RUNNING
        live = self._live[operation.id] = _Live(progress, begun=undoes)
        live.task = asyncio.create_task(self._run(live), name=f"operation {operation.type}")

    async def _run(self, live: _Live) -> None:
        operation = live.progress.operation
        kind = self._kinds.get(operation.type)
        try:
            if kind is None:
                text = f"this server knows no {operation.type!r}; a newer one may have started it"
                failed = CapabilityMissing(text, capability=operation.type)
                await self._end(live, OperationState.FAILED, self._failure_of(failed))
            elif operation.cancel_asked and not live.begun:
                await self._end(live, OperationState.CANCELLED)
            else:
                await self._in_turn(live, kind)
        except asyncio.CancelledError:
            if live.begun or not live.progress.operation.cancel_asked or not self._ownership.valid():
                raise  # the process stops, or is no longer the one to do it
            await self._end(live, OperationState.CANCELLED)
        except Exception:  # the row says that it is unfinished: it is gone on with after the next start
            log.exception("operation_left", operation=operation.id, type=operation.type)
        finally:
            del self._live[operation.id]
            live.ended.set()

    async def _in_turn(self, live: _Live, kind: _Kind) -> None:
        where = live.progress.operation.namespace, live.progress.operation.memory
        lane = asyncio.Lock() if kind.lanes is None else kind.lanes.setdefault(where, asyncio.Lock())
        async with lane, kind.slots if live.progress.operation.memory else kind.wide:
            await self._do(live, kind)

    async def _do(self, live: _Live, kind: _Kind) -> None:
        live.begun = True
        progress = live.progress
        progress.operation = replace(progress.operation, state=OperationState.RUNNING)
        log.info("operation_begins", operation=progress.operation.id, type=progress.operation.type)
        try:
            await self._saved(progress.operation)
            await self._tried(progress, kind)
        except OperationCancelled:
            await self._end(live, OperationState.CANCELLED)
        except (OwnedElsewhere, LeaseLost):
            await self._given_away(progress.operation)
        except Exception as error:  # whatever it is, the operation ends and says so
            await self._end(live, OperationState.FAILED, self._failure_of(error))
        else:
            await self._end(live, OperationState.SUCCEEDED)

    async def _tried(self, progress: Progress, kind: _Kind) -> None:
        """The work, again after what may pass by itself."""
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
                    await asyncio.Event().wait()  # until `stop` cancels; the next start goes on
                refusal = _refusal(error) if isinstance(error, JournalError) else error
                final = refusal.retry_after_s is None or isinstance(refusal, QuotaExceeded)
                if failures >= TRIES or final:
                    raise refusal from error
                pause = min(RETRY_S * 2**failures, RETRY_MAX_S)
                log.warning("operation_waits", operation=progress.operation.id, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
            if progress.operation.cancel_asked and not kind.undoes:
                raise OperationCancelled

    async def _end(self, live: _Live, state: OperationState, error: Failure | None = None) -> None:
        now_us = self._clock.now_us()
        operation = replace(live.progress.operation, state=state, end_time_us=now_us, error=error)
        log.info("operation_ended", operation=operation.id, type=operation.type, state=state.value)
        await self._saved(operation)
        live.progress.operation = operation

    async def _saved(self, operation: Operation) -> None:
        """An end that is not written would be forgotten: the journal is waited for."""
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

    async def _given_away(self, operation: Operation) -> None:
        """One that stays this process's is looked at by nobody: the journal is waited for."""
        pause = RETRY_S
        while True:
            try:
                await self._store.claim(operation.id, None, operation.process)
            except JournalError as error:
                log.warning("operation_not_given_away", operation=operation.id, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                return

    async def _tidy(self) -> None:
        while True:
            try:
                await self._store.remove_ended(self._clock.now_us() - KEPT_US)
            except JournalError as error:
                log.warning("operations_not_tidied", reason=error)
            await asyncio.sleep(TIDY_INTERVAL_S)


def _refusal(error: JournalError) -> EngineError:
    """The store's refusals as the engine's."""
    if isinstance(error, StorageFull):
        return StorageIsFull(DISK_FULL, retry_after_s=5.0)
    if isinstance(error, Conflict):
        return AlreadyAnswered("this request was answered meanwhile; ask again for its answer", retry_after_s=0.1)
    return JournalUnavailable(NOT_WRITTEN, retry_after_s=0.5)


async def _told(work: Awaitable[T]) -> T:
    try:
        return await work
    except JournalError as error:
        raise _refusal(error) from error
