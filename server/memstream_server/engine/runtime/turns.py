"""Turns on the event loop: which caller computes next, by what each has cost so far.

Rule 1. Each step of a task, from one await to the next, is a turn of the account in its context: of a principal, and
within it of a namespace. A step without an account (gRPC's accept loop, the order of receipt) never waits.
Rule 2. Turns are ordered by start-time fair queueing (Goyal, Vin, Cheng 1996): each account has a virtual time, which
its measured costs raise, and the waiting one with the least is next. One that was idle starts at the present minimum:
it has neither saved up nor is it punished. Within an account small requests precede large ones, and older ones younger
ones: large ones end one after the other, instead of all late and all in RAM.
Rule 3. A step is never interrupted. A long computation calls `pause_if_due` in its loop, which ends the step after
SLICE_S. What cannot be divided is charged all the same.
Rule 4. Turns are granted only while the event loop has nothing else to do, and one at a time, or several that take
BUDGET_S together. A new call takes six iterations of the loop before its first step (gRPC's own callbacks), and a small
call some more: with a turn of another caller in each, it waited for ten.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, Generic, TypeVar, cast

from memstream_server.engine.runtime.call_context import ACCOUNT, REQUEST, Account, Request

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
SMALL_S = 0.003
"""Cost of a request up to which it counts as small."""
LARGE_EACH = 4
"""Of so many turns of an account, one is of a large request."""
ACCOUNTS_MAX = 4_096
"""Accounts that are kept; beyond this, idle ones without debt are dropped."""


class _Entrant:
    """One of several that share: a principal, or a namespace of one."""

    __slots__ = ("is_queued", "virtual_s")

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.is_queued = False


class _Principal(_Entrant):
    __slots__ = ("namespaces",)

    def __init__(self) -> None:
        super().__init__()
        self.namespaces = _Order()


class _Line(Generic[T]):
    """Items of one account, in order of their requests."""

    __slots__ = ("_entries", "_large", "_popped", "_small")

    def __init__(self) -> None:
        self._small: list[tuple[int, int, T]] = []
        """Heaps of (number of the request, order of entry, item)."""
        self._large: list[tuple[int, int, T]] = []
        self._entries = self._popped = 0

    def __bool__(self) -> bool:
        return bool(self._small or self._large)

    def push(self, request: Request | None, item: T) -> None:
        """Add an item."""
        self._entries += 1
        large = request is not None and request.cost_s > SMALL_S
        entry = (0 if request is None else request.number, self._entries, item)
        heapq.heappush(self._large if large else self._small, entry)

    def pop(self) -> T:
        """Remove and return the next item. There must be one."""
        self._popped += 1
        large = self._large and (not self._small or self._popped % LARGE_EACH == 0)
        return heapq.heappop(self._large if large else self._small)[2]


class _Share(_Entrant, Generic[T]):
    """A namespace of a principal."""

    __slots__ = ("account", "principal", "waiting")

    def __init__(self, account: Account, principal: _Principal) -> None:
        super().__init__()
        self.account = account
        self.principal = principal
        self.waiting: _Line[T] = _Line()


class _Order:
    """Queued entrants, the least virtual time first, equal ones in order of their entry."""

    __slots__ = ("_entries", "_heap", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        """Virtual time at which the latest turn started."""
        self._heap: list[tuple[float, int, Any]] = []
        self._entries = 0

    def enter(self, entrant: _Entrant) -> None:
        """Queue an entrant, if it is not queued."""
        if not entrant.is_queued:
            entrant.is_queued = True
            entrant.virtual_s = max(entrant.virtual_s, self.now_s)
            self._entries += 1
            heapq.heappush(self._heap, (entrant.virtual_s, self._entries, entrant))

    def peek(self) -> Any:
        """The next entrant; None if there is none."""
        heap = self._heap
        while heap:
            virtual_s, _, entrant = heap[0]
            if virtual_s >= entrant.virtual_s:
                return entrant
            self._entries += 1  # it was charged since it entered
            heapq.heapreplace(heap, (entrant.virtual_s, self._entries, entrant))
        return None

    def precedes(self, entrant: _Entrant) -> bool:
        """Whether an entrant that is not queued would be next."""
        first = self.peek()
        if first is None:
            return entrant.virtual_s <= self.now_s
        return bool(max(entrant.virtual_s, self.now_s) <= first.virtual_s)

    def pop(self) -> Any:
        """Remove and return the next entrant. There must be one."""
        entrant = self.peek()
        heapq.heappop(self._heap)
        entrant.is_queued = False
        self.now_s = max(self.now_s, entrant.virtual_s)
        return entrant

    def charge(self, entrant: _Entrant, cost_s: float) -> None:
        """Add the cost of a turn, or of a part of one, to an entrant."""
        started_s = max(entrant.virtual_s, self.now_s)
        self.now_s = max(self.now_s, min(started_s, self._heap[0][0]) if self._heap else started_s)
        entrant.virtual_s = started_s + cost_s


class FairQueue(Generic[T]):
    """Items that wait, each of an account; see Rule 2."""

    def __init__(self) -> None:
        self._principals = _Order()
        self._by_name: dict[str, _Principal] = {}
        self._shares: dict[Account, _Share[T]] = {}
        self.waiting = 0
        """Number of items."""

    def push(self, account: Account, item: T, request: Request | None = None) -> None:
        """Queue an item behind those of the same account whose requests precede this one."""
        share = self._share_of(account)
        share.waiting.push(request, item)
        share.principal.namespaces.enter(share)
        self._principals.enter(share.principal)
        self.waiting += 1

    def pop(self, expected_s: float = 0.0) -> T:
        """Remove and return the next item; its account is charged with `expected_s`. There must be one."""
        return self.pop_of(expected_s)[1]

    def pop_of(self, expected_s: float = 0.0) -> tuple[Account, T]:
        """As `pop`, with the account."""
        principal: _Principal = self._principals.pop()
        share: _Share[T] = principal.namespaces.pop()
        item = share.waiting.pop()
        self.waiting -= 1
        share.virtual_s += expected_s
        principal.virtual_s += expected_s
        if share.waiting:
            principal.namespaces.enter(share)
        if principal.namespaces.peek() is not None:
            self._principals.enter(principal)
        return share.account, item

    def precedes(self, account: Account) -> bool:
        """Whether an item of this account would be next, before all that wait."""
        share = self._share_of(account)
        principal, first = share.principal, self._principals.peek()
        if first is principal:
            return not share.is_queued and principal.namespaces.precedes(share)
        return not principal.is_queued and self._principals.precedes(principal)

    def owes(self, account: Account) -> bool:
        """Whether the principal owes more than a slice."""
        return self._share_of(account).principal.virtual_s - self._principals.now_s > SLICE_S

    def charge(self, account: Account, cost_s: float) -> None:
        """Add a cost."""
        share = self._share_of(account)
        self._principals.charge(share.principal, cost_s)
        share.principal.namespaces.charge(share, cost_s)

    def refund(self, account: Account, cost_s: float) -> None:
        """Take back an expected cost."""
        share = self._share_of(account)
        share.principal.virtual_s -= cost_s
        share.virtual_s -= cost_s

    def _share_of(self, account: Account) -> _Share[T]:
        share = self._shares.get(account)
        if share is None:
            if len(self._shares) >= ACCOUNTS_MAX:
                self._drop_idle()
            principal = self._by_name.setdefault(account[0], _Principal())
            share = self._shares[account] = _Share(account, principal)
        return share

    def _drop_idle(self) -> None:
        now_s = self._principals.now_s
        self._shares = {
            account: share
            for account, share in self._shares.items()
            if share.is_queued or share.principal.is_queued or share.principal.virtual_s > now_s
        }
        kept = {account[0] for account in self._shares}
        self._by_name = {name: principal for name, principal in self._by_name.items() if name in kept}


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
        self._each_s = BUDGET_S
        """Moving average of the duration of a step that waited."""
        self.began_s = 0.0
        """When the present step began."""
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
            may = self._used_s < BUDGET_S and not self._queue.owes(account)
        else:
            may = self._queue.precedes(account)
        self._is_ahead = may
        return may

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
        now_s = perf_counter()
        took_s = now_s - self.began_s
        self._used_s += took_s
        if self._used_s > BUDGET_S / 2:
            self._schedule_grant()
        if waited:
            self._each_s += (min(took_s, COST_MAX_S) - self._each_s) / 16
        if account is None:
            return
        if (request := REQUEST.get()) is not None:
            request.cost_s += took_s
        self.charge(account, took_s)
        if self._is_ahead:
            self._is_ahead, self._ahead_s = False, now_s
        if account[0] != self._principal:
            self._principal, self._several_s = account[0], now_s

    def charge(self, account: Account, cost_s: float) -> None:
        """Add a cost to an account, also of work in other threads."""
        self._queue.charge(account, cost_s)
        if self.on_cost is not None:
            self.on_cost(account[0], cost_s)

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
        if self._is_deferred(perf_counter()):
            self._schedule_grant()
            return
        self._deferred_s = expected_s = 0.0
        while self._queue.waiting and (not expected_s or expected_s + self._each_s <= BUDGET_S):
            turn = self._queue.pop(self._each_s)
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
        turns.began_s = perf_counter()
        try:
            return self._coroutine.send(value)
        finally:
            turns.end_step(account or ACCOUNT.get(), waited)

    def throw(self, *error: Any) -> Any:
        """Run a step that begins with an error: an end is not delayed."""
        turn, self._turn = self._turn, None
        if turn is not None:
            self._turns.give_up(turn)
        self._turns.began_s = perf_counter()
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
