"""Threads that work for callers: whose work is next, by what each caller has cost so far.

Rule 1. A principal has at most `each_max` pieces of work under way, and the threads are one more: the work of one
caller never keeps all threads, and that of another caller starts at once. While several principals compute, each has
a piece under way for every second core, at least one, in all threads of the loop: each is one more that takes the
interpreter from a small call. The server has more: its look at the journal does not wait for the load of a memory.
Rule 2. Work that waits for a thread takes turns like steps of the event loop (engine/runtime/turns.py), and its CPU is
charged to its caller there, too: threads and the event loop share the interpreter.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from memstream_server.engine.runtime.call_context import ACCOUNT, REQUEST, Account, FairQueue, Request
from memstream_server.engine.runtime.turns import ThreadWork, Turns, find_turns

T = TypeVar("T")
SERVER: Account = ("", "")
"""Who pays for work that no call asked for."""
_Turn = asyncio.Future[None]
_COMPUTING: WeakKeyDictionary[Turns, Threads] = WeakKeyDictionary()
"""The threads of an event loop, once it needs some."""
_ALL: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakSet[Threads]] = WeakKeyDictionary()


async def run_in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, computed in one of the event loop's threads, in turns.

    For what takes milliseconds and cannot be divided: a thread hands the interpreter over within a switch interval, or
    does not need it.
    """
    turns = find_turns()
    if turns is None:
        return await asyncio.to_thread(work)
    threads = _COMPUTING.get(turns)
    if threads is None:
        threads = _COMPUTING[turns] = Threads(max(2, os.cpu_count() or 1), "computing")
    return await threads.run(work)


class Threads:
    """Runs work in threads, in turns."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = threads
        self._each_max = max(1, min(threads - 1, max(2, (os.cpu_count() or 1) - 1)))
        self._shared_max = max(1, (os.cpu_count() or 1) // 2)
        self._under_way: Counter[str] = Counter()
        """Pieces of work of a principal that run, or wait in `_queue`."""
        self._queue: FairQueue[_Turn] = FairQueue()
        self._parked: dict[str, FairQueue[_Turn]] = {}
        """Further work of a principal, each piece of an account (namespace, "")."""
        self._all = _ALL.setdefault(asyncio.get_running_loop(), WeakSet())
        self._all.add(self)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. A cancelled caller leaves running work to its end."""
        account, request = ACCOUNT.get() or SERVER, REQUEST.get()
        if not self._free or not self._may_begin(account[0]):
            await self._wait(account, request)
        else:
            self._under_way[account[0]] += 1
            self._free -= 1
        turns = find_turns()
        ahead = None if turns is None else turns.begin_thread()
        timed = _Timed(work, ahead)
        running = asyncio.get_running_loop().run_in_executor(self._executor, timed.run)
        running.add_done_callback(lambda done: self._end(account, request, timed, done))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Returns once all work has ended."""
        self._executor.shutdown()

    def _may_begin(self, principal: str) -> bool:
        turns = find_turns()
        shares = principal != SERVER[0] and turns is not None and turns.has_several()
        if shares and sum(each._under_way[principal] for each in self._all) >= self._shared_max:
            return False
        return self._under_way[principal] < self._each_max

    async def _wait(self, account: Account, request: Request | None) -> None:
        """Returns once the account has a thread."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        principal, namespace = account
        if not self._may_begin(principal):
            self._parked.setdefault(principal, FairQueue()).push((namespace, ""), turn, request)
        else:
            self._under_way[principal] += 1
            self._queue.push(account, turn, request)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self._pass_on(account)
            raise

    def _end(self, account: Account, request: Request | None, work: _Timed[T], done: asyncio.Future[T]) -> None:
        cost_s = work.cost_s
        if request is not None:
            request.cost_s += cost_s
        if not done.cancelled():
            done.exception()  # marks it as retrieved: the caller may have left
        self._queue.charge(account, cost_s)
        if (turns := find_turns()) is not None:
            turns.end_thread(work.ahead)
            if account != SERVER:
                turns.charge(account, cost_s)
        if (parked := self._parked.get(account[0])) is not None:
            parked.charge((account[1], ""), cost_s)
        self._pass_on(account)

    def _pass_on(self, account: Account) -> None:
        """A thread of the account is free."""
        self._free += 1
        self._leave(account[0])

    def _leave(self, principal: str) -> None:
        """One piece of work of the principal less is under way."""
        self._under_way[principal] -= 1
        if not self._under_way[principal]:
            del self._under_way[principal]
        for each in sorted(self._all, key=lambda one: one is self):  # threads of both kinds in turn
            each._unpark(principal)
            each._begin_next()

    def _begin_next(self) -> None:
        while self._free and self._queue.waiting:
            next_account, turn = self._queue.pop()
            if turn.done():  # its caller was cancelled
                asyncio.get_running_loop().call_soon(self._leave, next_account[0])
            else:
                self._free -= 1
                turn.set_result(None)

    def _unpark(self, principal: str) -> None:
        parked = self._parked.get(principal)
        while parked is not None and parked.waiting and self._may_begin(principal):
            (namespace, _), turn = parked.pop()
            if not turn.done():
                self._under_way[principal] += 1
                self._queue.push((principal, namespace), turn)
        if parked is not None and not parked.waiting:
            del self._parked[principal]


class _Timed(Generic[T]):
    """One piece of work, and the CPU that it took."""

    __slots__ = ("_work", "ahead", "cost_s")

    def __init__(self, work: Callable[[], T], ahead: ThreadWork | None) -> None:
        self._work = work
        self.ahead = ahead
        """Set for the work of a small request."""
        self.cost_s = 0.0

    def run(self) -> T:
        """In a thread."""
        began_s = time.thread_time()
        try:
            return self._work()
        finally:
            self.cost_s = time.thread_time() - began_s
