"""The account, log and trace context of work: an actor serves many calls, and does each piece of work under the call
that asked for it. And the queue in which accounts wait for their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
from collections.abc import Coroutine, Iterator
from itertools import count
from typing import Any, Generic, TypeVar, cast

PRINCIPAL: contextvars.ContextVar[str] = contextvars.ContextVar("memstream_principal", default="")
"""Who called; empty without authentication, and for the server's own work."""
Account = tuple[str, str]
"""(principal, namespace) that pays for work. Without authentication the connection is the principal."""
ACCOUNT: contextvars.ContextVar[Account | None] = contextvars.ContextVar("memstream_account", default=None)
"""None for work of the server that no call asked for."""
PAYER: contextvars.ContextVar[Account | None] = contextvars.ContextVar("memstream_payer", default=None)
"""Who pays for the writes of steps without an account."""
_numbers = count(1)


class Request:
    """A call, or one message of a stream: what the server has computed for it so far."""

    __slots__ = ("cost_s", "number")

    def __init__(self) -> None:
        self.cost_s = 0.0
        self.number = next(_numbers)
        """In order of arrival."""


REQUEST: contextvars.ContextVar[Request | None] = contextvars.ContextVar("memstream_request", default=None)
"""None for work of the server that no call asked for."""
Origin = contextvars.Context
"""The context variables at the time when the work was requested."""
capture_origin = contextvars.copy_context
"""Captures the origin of the current call."""
empty_origin = contextvars.Context
"""The origin of work that no call requested."""


async def complete(work: asyncio.Future[T]) -> T:
    """The result of `work`, which a cancelled caller leaves to its end. An error after that has no reader."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        work.add_done_callback(retrieve_error)  # a cancelled shield no longer does, and asyncio would log a warning
        raise


async def complete_task(work: Coroutine[Any, Any, T], running: set[asyncio.Task[Any]]) -> T:
    """The result of `work`, as a task of its own in `running`, which a cancelled caller leaves to its end."""
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)
    return await complete(task)


def close_result(opened: asyncio.Future[Any]) -> None:
    """Close what was opened for a caller that was cancelled meanwhile, if it was opened."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close()


def retrieve_error(work: asyncio.Future[T]) -> None:
    """Marks the error of `work` as read: its caller may have left."""
    if not work.cancelled():
        work.exception()


def without_account() -> Origin:
    """The current context without its account, for a task whose steps must run in the order of their creation."""
    context = contextvars.copy_context()
    context.run(PAYER.set, ACCOUNT.get())
    context.run(ACCOUNT.set, None)
    return context


@contextlib.contextmanager
def paid_by(origin: Origin) -> Iterator[None]:
    """Set the account of `origin` for the duration of the block."""
    token = ACCOUNT.set(origin.get(ACCOUNT))
    try:
        yield
    finally:
        ACCOUNT.reset(token)


@contextlib.contextmanager
def working_for(origin: Origin) -> Iterator[None]:
    """Set the context variables of `origin` for the duration of the block. The task that enters the block must leave
    it.
    """
    tokens = [(variable, variable.set(value)) for variable, value in origin.items()]
    try:
        yield
    finally:
        for variable, token in tokens:
            variable.reset(token)


T = TypeVar("T")

SMALL_S = 0.003
"""Cost of a request up to which it counts as small."""
LARGE_EACH = 4
"""Of so many turns of an account, one is of a large request."""
CREDIT_S = 0.005
"""Virtual time that an entrant keeps, if it has used less than the others."""
ACCOUNTS_MAX = 4_096
"""Accounts that are kept; beyond this, idle ones without debt are dropped."""


class _Entrant:
    """One of several that share: a principal, or a namespace of one."""

    __slots__ = ("is_queued", "virtual_s")

    def __init__(self) -> None:
        self.virtual_s = 0.0
        self.is_queued = False


class _Principal(_Entrant):
    __slots__ = ("name", "namespaces")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.namespaces = _Order()


class _Line(Generic[T]):
    """Items of one account, in order of their requests."""

    __slots__ = ("_entries", "_large", "_popped", "_small", "count")

    def __init__(self) -> None:
        self._small: list[tuple[int, int, T]] = []
        """Heaps of (number of the request, order of entry, item)."""
        self._large: list[tuple[int, int, T]] = []
        self._entries = self._popped = 0
        self.count = 0
        """Items that wait."""

    def push(self, request: Request | None, item: T) -> bool:
        """Add an item. Returns whether it is of a small request."""
        self._entries += 1
        self.count += 1
        large = request is not None and request.cost_s > SMALL_S
        entry = (0 if request is None else request.number, self._entries, item)
        heapq.heappush(self._large if large else self._small, entry)
        return not large

    def _next(self) -> list[tuple[int, int, T]]:
        """The heap whose first item is next."""
        large = self._large and (not self._small or (self._popped + 1) % LARGE_EACH == 0)
        return self._large if large else self._small

    def peek(self) -> T:
        """The next item. There must be one."""
        return self._next()[0][2]

    def pop(self) -> tuple[T, bool]:
        """Remove and return the next item, and whether it is of a small request. There must be one."""
        heap = self._next()
        self._popped += 1
        self.count -= 1
        return heapq.heappop(heap)[2], heap is self._small


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

    __slots__ = ("_entries", "heap", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        """Virtual time at which the latest turn started."""
        self.heap: list[tuple[float, int, Any]] = []
        self._entries = 0

    def enter(self, entrant: _Entrant) -> None:
        """Queue an entrant, if it is not queued."""
        if not entrant.is_queued:
            entrant.is_queued = True
            entrant.virtual_s = max(entrant.virtual_s, self.now_s - CREDIT_S)
            self._entries += 1
            heapq.heappush(self.heap, (entrant.virtual_s, self._entries, entrant))

    def peek(self) -> Any:
        """The next entrant; None if there is none."""
        heap = self.heap
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
        return bool(max(entrant.virtual_s, self.now_s - CREDIT_S) <= first.virtual_s)

    def pop(self) -> Any:
        """Remove and return the next entrant. There must be one."""
        entrant = self.heap[0][2]
        if self.heap[0][0] < entrant.virtual_s:
            entrant = self.peek()
        heapq.heappop(self.heap)
        entrant.is_queued = False
        self.now_s = max(self.now_s, entrant.virtual_s)
        return entrant


class FairQueue(Generic[T]):
    """Items that wait, each of an account, in order of start-time fair queueing (Goyal, Vin, Cheng 1996).

    Each account has a virtual time, which its costs raise, and the one with the least is next; first among principals,
    then among the namespaces of one. An account that was idle has saved up CREDIT_S at most: a small call is idle
    while it waits for threads, and would else lose its lead at each of its steps. Within an account small requests
    precede large ones, and older ones younger ones: large ones end one after the other, instead of all late and all in
    RAM.
    """

    def __init__(self) -> None:
        self._principals = _Order()
        self._by_name: dict[str, _Principal] = {}
        self._shares: dict[Account, _Share[T]] = {}
        self.waiting = self._small = 0
        """Number of items, and of those of small requests."""

    def push(self, account: Account, item: T, request: Request | None = None) -> None:
        """Queue an item behind those of the same account whose requests precede this one."""
        share = self._shares.get(account) or self._add_share(account)
        self._small += share.waiting.push(request, item)
        share.principal.namespaces.enter(share)
        self._principals.enter(share.principal)
        self.waiting += 1

    def pop(self, expected_s: float = 0.0) -> tuple[Account, T]:
        """Remove and return the next item with its account, which is charged with `expected_s`. There must be one."""
        principal: _Principal = self._principals.pop()
        share: _Share[T] = principal.namespaces.pop()
        item, is_small = share.waiting.pop()
        self.waiting -= 1
        self._small -= is_small
        share.virtual_s += expected_s
        principal.virtual_s += expected_s
        if share.waiting.count:
            principal.namespaces.enter(share)
        if principal.namespaces.heap:
            self._principals.enter(principal)
        return share.account, item

    def peek(self) -> T:
        """The next item. There must be one."""
        share: _Share[T] = self._principals.peek().namespaces.peek()
        return share.waiting.peek()

    def next_large(self) -> str | None:
        """The principal of the next item, if only items of large requests wait."""
        first = None if self._small else self._principals.peek()
        return None if first is None else cast("str", first.name)

    def precedes(self, account: Account) -> bool:
        """Whether an item of this account would be next, before all that wait."""
        share = self._shares.get(account) or self._add_share(account)
        principal, first = share.principal, self._principals.peek()
        if first is principal:
            return not share.is_queued and principal.namespaces.precedes(share)
        return not principal.is_queued and self._principals.precedes(principal)

    def owes(self, account: Account, slice_s: float) -> bool:
        """Whether the principal owes more than a slice."""
        share = self._shares.get(account) or self._add_share(account)
        return share.principal.virtual_s - self._principals.now_s > slice_s

    def charge(self, account: Account, cost_s: float) -> None:
        """Add the cost of a turn, or of a part of one."""
        share = self._shares.get(account) or self._add_share(account)
        principal = share.principal
        shared: tuple[tuple[_Order, _Entrant], ...] = (self._principals, principal), (principal.namespaces, share)
        for order, entrant in shared:
            started_s = max(entrant.virtual_s, order.now_s - CREDIT_S)
            order.now_s = max(order.now_s, min(started_s, order.heap[0][0]) if order.heap else started_s)
            entrant.virtual_s = started_s + cost_s

    def refund(self, account: Account, cost_s: float) -> None:
        """Take back an expected cost."""
        share = self._shares.get(account) or self._add_share(account)
        share.principal.virtual_s -= cost_s
        share.virtual_s -= cost_s

    def _add_share(self, account: Account) -> _Share[T]:
        if len(self._shares) >= ACCOUNTS_MAX:
            self._drop_idle()
        principal = self._by_name.setdefault(account[0], _Principal(account[0]))
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
