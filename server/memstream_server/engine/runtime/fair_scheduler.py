"""Slots for computations on the event loop: one slot at a time, a few tenths of a millisecond long, fair between
namespaces.

The event loop runs one iteration after each slot. Without slots, eight busy memories put eight computations into one
loop iteration, and a small call, which needs several iterations, waits for all of them each time. Namespaces are
tenants: a busy namespace delays itself, not the others. Within a namespace, reads and writes alternate.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto

SLOT_S = 0.0002
"""Target length of a slot, in one computation or several; each loop iteration has a cost. A recall takes five
iterations: with 500 observations per second its latency was 6.5 ms with slots of 1 ms and 3.8 ms with these.
"""
SLOT_MAX_S = 0.02
"""How long a slot may block the others if its holder itself waits, e.g. for a disk or a remote database."""


class Lane(Enum):
    """The kind of work that a slot is for."""

    WRITE = auto()
    READ = auto()


class FairScheduler:
    """`async with scheduler.slot(namespace):` around each computation.

    Namespaces are served round-robin, then the lanes of a namespace, then first come, first served. Computations that
    fit into SLOT_S together share a slot, and a task that requests a slot again soon stays in the current one. A short
    read of the journal may be part of a slot: its thread needs the interpreter too and is fast while no other task
    computes. If a slot exceeds SLOT_MAX_S, the next one starts in parallel.
    """

    def __init__(self) -> None:
        """Call it on the event loop, which it keeps: asking asyncio for the running one is a system call each time."""
        self._loop = asyncio.get_running_loop()
        self._number = 0
        """Number of the latest slot."""
        self._taken = False
        self._began_s = 0.0
        self._computing = 0
        """How many tasks compute in the current slot; 0 if all have finished."""
        self._each_s = SLOT_S
        """Moving average of the duration of one computation."""
        self._overrun_timer: asyncio.TimerHandle | None = None
        """Timer for the next overrun check; one timer serves many slots."""
        self.tasks_inside: set[asyncio.Task[object] | None] = set()
        """Tasks that hold a slot."""
        self._waiting: OrderedDict[str, OrderedDict[Lane, deque[asyncio.Future[int]]]] = OrderedDict()

    def slot(self, namespace: str, lane: Lane = Lane.WRITE) -> AbstractAsyncContextManager[None]:
        """Wait for a slot and hold it during the block. Within a slot of the same task, it does nothing."""
        task = asyncio.current_task(self._loop)
        return _INSIDE if task in self.tasks_inside else _Computing(self, namespace, lane, task)

    async def take_slot(self, namespace: str, lane: Lane) -> int:
        """Number of the slot, once it starts."""
        if not self._taken:
            self._begin_slot(1)
            return self._number
        if not self._waiting and time.monotonic() - self._began_s + self._each_s < SLOT_S:
            self._computing += 1
            return self._number
        mine: asyncio.Future[int] = self._loop.create_future()
        self._waiting.setdefault(namespace, OrderedDict()).setdefault(lane, deque()).append(mine)
        try:
            return await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the slot was granted after the cancellation
                self.finish_slot(mine.result())
            raise

    def finish_slot(self, number: int, took_s: float | None = None) -> None:
        """One task of the slot has finished."""
        if took_s is not None:
            self._each_s += (min(took_s, SLOT_MAX_S) - self._each_s) / 16
        if number == self._number and self._taken:  # else the slot overran, and the next one has started
            self._computing -= 1
            if not self._computing:
                self._loop.call_soon(self._end_slot, number)  # other tasks run before the next slot

    def _begin_slot(self, computing: int) -> None:
        self._number += 1
        self._taken = True
        self._computing = computing
        self._began_s = time.monotonic()
        if self._overrun_timer is None:
            self._overrun_timer = self._loop.call_later(SLOT_MAX_S, self._check_overrun)

    def _check_overrun(self) -> None:
        self._overrun_timer = None
        if self._taken:
            left_s = self._began_s + SLOT_MAX_S - time.monotonic()
            if left_s > 0:
                self._overrun_timer = self._loop.call_later(left_s, self._check_overrun)
            else:
                self._pass_on(self._number)

    def _end_slot(self, number: int) -> None:
        if not self._computing:  # no task has joined since
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if number != self._number or not self._taken:
            return
        self._taken = False
        given: list[asyncio.Future[int]] = []
        while self._waiting and (not given or len(given) * self._each_s < SLOT_S):
            mine = self._next_waiter()
            if not mine.done():
                given.append(mine)
        if given:
            self._begin_slot(len(given))
            for mine in given:
                mine.set_result(self._number)

    def _next_waiter(self) -> asyncio.Future[int]:
        namespace, lanes = self._waiting.popitem(last=False)
        lane, waiting = lanes.popitem(last=False)
        mine = waiting.popleft()
        if waiting:
            lanes[lane] = waiting  # behind the other one
        if lanes:
            self._waiting[namespace] = lanes  # behind the others
        return mine


class _Computing:
    """Context manager of one computation. A class, because a generator costs 1 µs more."""

    __slots__ = ("_began_s", "_lane", "_namespace", "_number", "_scheduler", "_task")

    def __init__(self, scheduler: FairScheduler, namespace: str, lane: Lane, task: asyncio.Task[object] | None) -> None:
        self._scheduler = scheduler
        self._namespace = namespace
        self._lane = lane
        self._task = task

    async def __aenter__(self) -> None:
        self._number = await self._scheduler.take_slot(self._namespace, self._lane)
        self._began_s = time.monotonic()
        self._scheduler.tasks_inside.add(self._task)

    async def __aexit__(self, *error: object) -> None:
        self._scheduler.tasks_inside.remove(self._task)
        self._scheduler.finish_slot(self._number, time.monotonic() - self._began_s)


class _Inside:
    """Context manager of a computation in a slot that its task already holds."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *error: object) -> None:
        pass


_INSIDE = _Inside()
