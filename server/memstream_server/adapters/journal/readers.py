"""The threads that read: which caller's read is next, by what each has cost so far.

Rule 1. A principal has at most `each_max` reads under way, and the threads are one more: the reads of one caller never
keep all threads, and a read of another caller starts at once.
Rule 2. Reads that wait for a thread take turns like steps of the event loop (engine/runtime/turns.py), and a read's CPU
is charged to its caller there, too: threads and the event loop share the interpreter.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from memstream_server.engine.runtime.call_context import ACCOUNT, Account
from memstream_server.engine.runtime.turns import FairQueue, find_turns

T = TypeVar("T")
SERVER: Account = ("", "")
"""Who reads for work that no call asked for."""
_Turn = asyncio.Future[None]


class Readers:
    """Runs reads in threads, in turns."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="journal-reader")
        self._free = threads
        self._each_max = max(1, threads - 1)
        self._under_way: Counter[str] = Counter()
        """Reads of a principal that run, or wait in `_queue`."""
        self._queue: FairQueue[_Turn] = FairQueue()
        self._parked: dict[str, FairQueue[_Turn]] = {}
        """Further reads of a principal, each of an account (namespace, "")."""

    async def run(self, read: Callable[[], T]) -> T:
        """The result of `read`. A cancelled caller leaves a running read to its end."""
        account = ACCOUNT.get() or SERVER
        if self._under_way[account[0]] >= self._each_max or not self._free:
            await self._wait(account)
        else:
            self._under_way[account[0]] += 1
            self._free -= 1
        work = _Read(read)
        running = asyncio.get_running_loop().run_in_executor(self._executor, work.run)
        running.add_done_callback(lambda done: self._end(account, work, done))
        return await asyncio.shield(running)

    def close(self) -> None:
        """Returns once all reads have ended."""
        self._executor.shutdown()

    async def _wait(self, account: Account) -> None:
        """Returns once the account has a thread."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        principal, namespace = account
        if self._under_way[principal] >= self._each_max:
            self._parked.setdefault(principal, FairQueue()).push((namespace, ""), turn)
        else:
            self._under_way[principal] += 1
            self._queue.push(account, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self._pass_on(account)
            raise

    def _end(self, account: Account, work: _Read[T], done: asyncio.Future[T]) -> None:
        cost_s = work.cost_s
        if not done.cancelled():
            done.exception()  # marks it as retrieved: the caller may have left
        self._queue.charge(account, cost_s)
        if (turns := find_turns()) is not None and account != SERVER:
            turns.charge(account, cost_s)
        if (parked := self._parked.get(account[0])) is not None:
            parked.charge((account[1], ""), cost_s)
        self._pass_on(account)

    def _pass_on(self, account: Account) -> None:
        """A thread of the account is free."""
        principal = account[0]
        self._free += 1
        self._under_way[principal] -= 1
        self._unpark(principal)
        if not self._under_way[principal]:
            del self._under_way[principal]
        while self._free and self._queue.waiting:
            next_account, turn = self._queue.pop_of()
            if turn.done():  # its caller was cancelled
                self._under_way[next_account[0]] -= 1
                self._unpark(next_account[0])
            else:
                self._free -= 1
                turn.set_result(None)

    def _unpark(self, principal: str) -> None:
        parked = self._parked.get(principal)
        while parked is not None and parked.waiting and self._under_way[principal] < self._each_max:
            (namespace, _), turn = parked.pop_of()
            if not turn.done():
                self._under_way[principal] += 1
                self._queue.push((principal, namespace), turn)
        if parked is not None and not parked.waiting:
            del self._parked[principal]


class _Read(Generic[T]):
    """One read, and the CPU that it took."""

    __slots__ = ("_read", "cost_s")

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        self.cost_s = 0.0

    def run(self) -> T:
        """In a thread."""
        began_s = time.thread_time()
        try:
            return self._read()
        finally:
            self.cost_s = time.thread_time() - began_s
