"""Turns on the event loop: which caller computes next, by what each has cost so far.

Rule 1. Each step of a task, from one await to the next, is a turn of the account in its context: of a principal, and
within it of a namespace. A step without an account (gRPC's accept loop, the order of receipt) never waits.
Rule 2. Turns are in the order of FairQueue, by measured CPU: a step also waits for the interpreter while threads of
others have it, and for a core, which is not to be charged to it.
Rule 3. A step is never interrupted. A long computation calls `pause_if_due` in its loop, which ends the step after
SLICE_S. What cannot be divided is charged all the same.
Rule 4. Turns are granted only while the event loop has nothing else to do, and one at a time, or several that take
BUDGET_S together. A new call takes six iterations of the loop before its first step (gRPC's own callbacks), and a small
call some more: with a turn of another caller in each, it waited for ten. A step of a caller that owes a slice does not
overtake a granted turn that has not begun.
Rule 5. While a thread works for a small request, large requests of other principals get no turn, for THREAD_S at most,
unless another small one waits, which may be behind them. The thread gives the interpreter up at each row that it reads
or writes, and waits for it at each: during the steps of a large request 1.3 ms of work took 48.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from time import perf_counter, thread_time
from typing import Any, TypeVar, cast

from memstream_server.engine.runtime.call_context import ACCOUNT, PAYER, REQUEST, SMALL_S, Account, FairQueue

T = TypeVar("T")

SLICE_S = 0.001
"""Length of a step after which a long computation pauses."""
BUDGET_S = 0.0002
"""Steps that take this long together share an iteration of the event loop; each iteration has a cost. A recall takes
five iterations: with 500 observations per second its latency was 6.5 ms with 1 ms and 3.8 ms with this.
"""
COST_MAX_S = 0.02
"""Longest step that counts in the average by which turns share an iteration."""
AHEAD_S = 0.0002
"""How long turns are held back after the arrival of a call, and after a step of a caller that owes nothing: gRPC passes
calls on one by one, each by way of a thread, and so comes the next step of a call."""
SEVERAL_S = 1.0
"""Turns are held back only if two principals had steps in this time."""
DEFERRED_MAX_S = 0.005
"""How long turns may be deferred for whatever else the event loop has to do."""
LOOKED_S = 0.0001
"""A turn is granted only if the event loop has looked for events since."""
THREAD_S = 0.002
"""How long large requests get no turn after a thread began to work for a small one."""


class ThreadWork:
    """Work of a thread for a small request."""

    __slots__ = ("principal", "until_s")

    def __init__(self, principal: str) -> None:
        self.principal = principal
        self.until_s = perf_counter() + THREAD_S
        """Until when large requests of others get no turn."""

    def begin(self) -> None:
        """In the thread, once it begins after other work."""
        self.until_s = perf_counter() + THREAD_S


class Turns:
    """Gives turns to the tasks of an event loop, as its task factory. Made by `install_turns`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._used_s = 0.0
        """Duration of the steps of this iteration of the loop."""
        self._granting = False
        """Whether `_grant` is scheduled."""
        self._granted = 0
        """Turns that are granted and have not begun."""
        self._others: deque[Any] = getattr(loop, "_ready", deque())
        """The callbacks that the event loop will run in this iteration or the next one: an attribute of asyncio's own
        loops that is not public."""
        self._scheduled_s = self._deferred_s = self._ahead_s = self._several_s = 0.0
        """When `_grant` was scheduled, since when it grants nothing (0: it does), when a step ran ahead of those that
        wait, and when the principal of the latest step was another one than before."""
        self._is_ahead = False
        """Whether the present step is of a caller that owes nothing."""
        self._principal = ""
        """Of the latest step."""
        self._threads: list[ThreadWork] = []
        """Of small requests."""
        self._resuming: asyncio.TimerHandle | None = None
        """Grants turns after the last of them."""
        self._each_s = BUDGET_S
        """Moving average of the duration of a step that waited."""
        self.began_s = self.began_cpu_s = 0.0
        """When the present step began, and the CPU of the thread by then."""
        self.on_cost: Callable[[str, float], None] | None = None
        """Called with each principal and cost."""
        self.on_turn: Callable[[Account | None], None] | None = None
        """Called with the account of each step before it runs."""

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        """A task whose steps take turns."""
        return asyncio.Task(_InTurns(self, coroutine), loop=loop, **options)

    def may_run(self, account: Account) -> bool:
        """Whether a step of this account may run now."""
        if not self._queue.waiting and not self._granted:
            # Alone in this iteration and the next one, a step delays no other.
            may = (self._used_s < BUDGET_S or not self._others) and not self._queue.owes(account, SLICE_S / 2)
        else:
            may = self._queue.precedes(account)
            if self._granted and self._queue.owes(account, SLICE_S):
                may = False  # a turn of another caller is granted, and begins in this iteration or the next
        if may and self._threads and (request := REQUEST.get()) is not None and request.cost_s > SMALL_S:
            may = perf_counter() >= self._threads_until_s(account[0])
        self._is_ahead = may
        return may

    def begin_thread(self) -> ThreadWork | None:
        """A thread will work for the present request. The result is for `end_thread`."""
        account, request = ACCOUNT.get() or PAYER.get(), REQUEST.get()
        if account is None or (request is not None and request.cost_s > SMALL_S):
            return None
        work = ThreadWork(account[0])
        self._threads.append(work)
        return work

    def end_thread(self, work: ThreadWork | None) -> None:
        """The thread has ended its work."""
        if work is not None:
            self._threads.remove(work)
            self._ahead_s = perf_counter()  # the next step of the call follows
            if self._queue.waiting:
                self._schedule_grant()

    def _threads_until_s(self, principal: str) -> float:
        """Until when large requests of a principal get no turn."""
        return max((work.until_s for work in self._threads if work.principal != principal), default=0.0)

    def note_arrival(self) -> None:
        """A call has arrived: others may have, too."""
        self._ahead_s = perf_counter()

    def wait(self, account: Account) -> asyncio.Future[None]:
        """A future that is done when a turn is granted; the step must then call `begin_granted` or `give_up`."""
        turn: asyncio.Future[None] = self._loop.create_future()
        self._queue.push(account, turn, REQUEST.get())
        self._schedule_grant()
        return turn

    def begin_granted(self, account: Account) -> None:
        """A granted turn begins: its expected cost was charged, and the measured one will be."""
        self._granted -= 1
        self._queue.refund(account, self._each_s)

    def give_up(self, turn: asyncio.Future[None]) -> None:
        """The step that waited for a turn does not need it."""
        if turn.done() and not turn.cancelled():
            self._granted -= 1

    def end_step(self, account: Account | None, waited: bool) -> None:
        """Charge the present step."""
        now_s, cost_s = perf_counter(), thread_time() - self.began_cpu_s
        took_s = now_s - self.began_s
        self._used_s += took_s
        if not self._granting:
            if not self._others:
                self._used_s = 0.0  # the iteration ends with this step
            elif self._used_s > BUDGET_S / 2:
                self._schedule_grant()
        if waited:
            self._each_s += (min(took_s, COST_MAX_S) - self._each_s) / 16
        if account is None:
            return
        if (request := REQUEST.get()) is not None:
            request.cost_s += cost_s
        self.charge(account, cost_s)
        if self._is_ahead:
            self._is_ahead, self._ahead_s = False, now_s
        if account[0] != self._principal:
            self._principal, self._several_s = account[0], now_s

    def charge(self, account: Account, cost_s: float) -> None:
        """Add a cost to an account, also of work in other threads."""
        self._queue.charge(account, cost_s)
        if self.on_cost is not None:
            self.on_cost(account[0], cost_s)

    def has_several(self) -> bool:
        """Whether several principals have had steps of late."""
        return perf_counter() - self._several_s < SEVERAL_S

    def is_due(self) -> bool:
        """Whether the present step has taken SLICE_S."""
        return perf_counter() - self.began_s > SLICE_S

    def _schedule_grant(self) -> None:
        if not self._granting:
            self._granting, self._scheduled_s = True, perf_counter()
            self._loop.call_soon(self._grant)

    def _grant(self) -> None:
        """Runs once in an iteration of the loop while turns are waited for."""
        self._granting = False
        self._used_s = 0.0
        if not self._queue.waiting:
            return
        now_s = perf_counter()
        if self._threads and (principal := self._queue.next_large()) is not None:
            until_s = self._threads_until_s(principal)
            if now_s < until_s:  # leaves the interpreter to the thread
                if self._resuming is not None:
                    self._resuming.cancel()
                self._resuming = self._loop.call_later(until_s - now_s, self._schedule_grant)
                return
        if self._is_deferred(now_s):
            self._schedule_grant()
            return
        self._deferred_s = expected_s = 0.0
        # One at least: while steps take longer than the budget, none would run.
        while self._queue.waiting and (not expected_s or expected_s + self._each_s <= BUDGET_S):
            _, turn = self._queue.pop(self._each_s)
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._granted += 1
                expected_s += self._each_s
        if self._queue.waiting:
            self._schedule_grant()

    def _is_deferred(self, now_s: float) -> bool:
        """Whether the event loop has, or soon may have, something to do before the next turn."""
        if not self._deferred_s:
            self._deferred_s = now_s
        elif now_s - self._deferred_s > DEFERRED_MAX_S:
            return False
        if self._others or now_s - self._scheduled_s > LOOKED_S:
            return True
        return now_s - self._ahead_s < AHEAD_S and now_s - self._several_s < SEVERAL_S


class _InTurns(Coroutine[Any, Any, T]):
    """A coroutine of which each step is a turn."""

    __slots__ = ("_coroutine", "_turn", "_turns")

    def __init__(self, turns: Turns, coroutine: Coroutine[Any, Any, T]) -> None:
        self._turns = turns
        self._coroutine = coroutine
        self._turn: asyncio.Future[None] | None = None
        """The turn that the coroutine waits for, or was granted."""

    def send(self, value: Any, /) -> Any:
        """Run a step, or return the future of a turn."""
        turns = self._turns
        account = ACCOUNT.get()
        waited = self._turn is not None
        if account is not None:
            if waited:
                self._turn = None
                turns.begin_granted(account)
            elif not turns.may_run(account):
                self._turn = turns.wait(account)
                return next(self._turn.__await__())
        if turns.on_turn is not None:
            turns.on_turn(account)
        turns.began_s, turns.began_cpu_s = perf_counter(), thread_time()
        try:
            return self._coroutine.send(value)
        finally:
            turns.end_step(account or ACCOUNT.get(), waited)

    def throw(self, *error: Any) -> Any:
        """Run a step that begins with an error: an end is not delayed."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._turns.give_up(turn)
        self._turns.began_s, self._turns.began_cpu_s = perf_counter(), thread_time()
        try:
            return self._coroutine.throw(*error)
        finally:
            del error  # else the error and this frame of its traceback refer to each other
            self._turns.end_step(ACCOUNT.get(), False)

    def close(self) -> None:
        """See Coroutine."""
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        """The frame and the name of the coroutine, for those who print a task."""
        if name in self.__slots__:
            raise AttributeError(name)
        return getattr(self._coroutine, name)


def install_turns() -> Turns:
    """The turns of the running event loop, which later tasks take."""
    loop = asyncio.get_running_loop()
    turns = find_turns() or Turns(loop)
    loop.set_task_factory(cast("Any", turns))  # the stub's protocol is of any kind of task
    return turns


def find_turns() -> Turns | None:
    """The turns of the running event loop; None without any."""
    turns: object = asyncio.get_running_loop().get_task_factory()
    return turns if isinstance(turns, Turns) else None


def charge_callback(began_s: float) -> None:
    """Charge the account of the present callback, which is no step of a task, with its time since then."""
    turns, account = find_turns(), ACCOUNT.get()
    if turns is not None and account is not None:
        turns.charge(account, perf_counter() - began_s)


async def take_turn() -> None:
    """End the present step if its account, which was unknown when it began, would have to wait for its turn."""
    turns, account = find_turns(), ACCOUNT.get()
    if turns is not None and account is not None and not turns.may_run(account):
        await asyncio.sleep(0)


async def pause_if_due() -> None:
    """End the present step if it has taken SLICE_S: the next one waits for a turn."""
    turns = find_turns()
    if turns is not None and turns.is_due():
        await asyncio.sleep(0)


async def in_slices(values: Sequence[T], count: int) -> AsyncIterator[Sequence[T]]:
    """The values, `count` at a time, with a pause in between where one is due."""
    for start in range(0, len(values), count):
        if start:
            await pause_if_due()
        yield values[start : start + count]


async def run_in_slices(parts: Generator[None, None, T]) -> T:
    """The result of a generator that pauses between its parts: each pause ends the step where that is due."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return cast("T", end.value)
        await pause_if_due()
