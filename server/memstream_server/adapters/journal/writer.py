"""The writer thread: commits all waiting writes in one transaction; a failed write is undone alone.

Invariants: a future resolves only after COMMIT has returned, or the write certainly left nothing. Writes of one caller,
and those of one memory, are applied in the order of `submit`; callers take turns (engine/runtime/turns.py), and each is
charged with its rows. A lone write is committed at once, without waiting for others.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog
from msgspec import Struct
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from memstream_server.adapters.journal.database.database import Database
from memstream_server.adapters.journal.sql import bulk
from memstream_server.engine.runtime.call_context import ACCOUNT, PAYER, Account, FairQueue
from memstream_server.engine.runtime.threads import SERVER
from memstream_server.engine.runtime.turns import ThreadWork, find_turns
from memstream_server.ports.journal.errors import JournalError, NotWritable, OutcomeUnknown, StorageFull, WriteRefused

log = structlog.get_logger(__name__)

GROUP_S = 0.03
"""Expected work after which a group is committed even if more writes wait,"""
SHARED_S = 0.003
"""and while several principals write: each waits for all of a group, also of one that it is not in."""
EACH_S = 0.001
"""Expected work of one of several principals in a group, unless a commit takes longer or its first write does."""
SEVERAL_S = 1.0
"""Several principals write if a write of another one than before came in this time."""
ROW_COST_S, WRITE_COST_S = 15e-6, 200e-6
"""What each row and each write is expected to cost, times the caller's pace, which is measured."""
PACE_MAX = 50.0
PACES = 1_000
"""Callers whose paces are kept."""

SLOW_S = 5.0
"""Seconds after which a transaction that has not returned counts as a problem."""

T = TypeVar("T")
Work = Callable[[Connection], Any]


class JointWork(Struct, Generic[T], frozen=True, eq=False):
    """Work that one call can do for several writes to different memories."""

    work: Callable[[Connection, Sequence[T]], None]
    item: T
    memory: str

    def __call__(self, connection: Connection) -> None:
        self.work(connection, [self.item])


class _Write(Struct, frozen=True, eq=False):
    work: Work
    cost_s: float
    """What it is expected to take, at the pace 1."""
    adds: bool
    """Whether it adds data, and is rejected when free space is low."""
    future: asyncio.Future[Any]
    memory: str
    """The uid of the memory that it writes, whose writes keep their order; empty: none."""
    ahead: ThreadWork | None
    """Set for a write of a small request."""
    account: Account
    """Who pays."""

    def expected_s(self, paces: Mapping[Account, float]) -> float:
        """What it is expected to take, at the pace of its caller."""
        return self.cost_s * paces.get(self.account, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _ExclusiveWork:
    work: Callable[[], Any]
    future: asyncio.Future[Any]


class _WriteQueue:
    """The writes that wait."""

    def __init__(self) -> None:
        self.queue: FairQueue[_Write] = FairQueue()
        self._accounts: dict[str, tuple[Account, int]] = {}
        """The account in whose turns the writes of a memory are, and how many wait: they keep their order."""

    def push(self, account: Account, write: _Write) -> None:
        """Add a write behind those of its caller, or of its memory if some wait."""
        if write.memory:
            # In the queue of its own caller it could overtake a write that another one made to the memory before.
            account, count = self._accounts.get(write.memory, (account, 0))
            self._accounts[write.memory] = account, count + 1
        self.queue.push(account, write)

    def pop(self, paces: Mapping[Account, float]) -> _Write:
        """Remove and return the next write; its caller is charged with what it is expected to take."""
        account, write = self.queue.pop()
        self.queue.charge(account, write.expected_s(paces))
        if write.memory:
            count = self._accounts[write.memory][1]
            if count > 1:
                self._accounts[write.memory] = account, count - 1
            else:
                del self._accounts[write.memory]
        return write


class _Outcome(Struct, frozen=True, eq=False):
    write: _Write | _ExclusiveWork
    value: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        if self.write.future.cancelled():  # the caller is gone; the write remains committed
            return
        if self.error is None:
            self.write.future.set_result(self.value)
        else:
            self.write.future.set_exception(self.error)


class Writer:
    """Group commit on one connection."""

    def __init__(self, database: Database, loop: asyncio.AbstractEventLoop) -> None:
        self._database = database
        self._loop = loop
        self._changed = threading.Condition()
        """Guards what follows."""
        self._writes = _WriteQueue()
        self._exclusive: deque[_ExclusiveWork] = deque()
        self._paces: dict[Account, float] = {}
        """What the writes of each caller take, as a multiple of what they are expected to take: a moving average."""
        self._principal = ""
        self._several_until_s = 0.0
        """The principal of the latest write, and until when several write."""
        self._closed = False
        self._commit_s = 0.0
        """What a commit takes: a moving average."""
        self._connection: Connection | None = None
        self._busy_since_s: float | None = None
        self._failing: JournalError | None = None
        self._thread = threading.Thread(target=self._run_thread, name="journal-writer", daemon=True)
        self._thread.start()

    async def submit(self, work: Callable[[Connection], T], rows: int, adds: bool, memory: str = "") -> T:
        """Run `work` in a transaction; returns its result once durable. Call on the event loop only.

        `memory`: the uid of the memory that it writes: its writes are applied in order, for all callers.
        """
        memory = memory or (work.memory if isinstance(work, JointWork) else "")
        if self._closed:
            raise JournalError("the journal is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        turns = find_turns()
        ahead = None if turns is None else turns.begin_thread()
        account = ACCOUNT.get() or PAYER.get() or SERVER
        write = _Write(work, WRITE_COST_S + rows * ROW_COST_S, adds, future, memory, ahead, account)
        with self._changed:
            self._note_principal(account)
            self._writes.push(account, write)
            self._changed.notify()
        try:
            return await future
        finally:
            if turns is not None:
                turns.end_thread(ahead)

    def _note_principal(self, account: Account) -> None:
        if account != SERVER and account[0] != self._principal:
            if self._principal:
                self._several_until_s = time.monotonic() + SEVERAL_S
            self._principal = account[0]

    async def run_exclusively(self, work: Callable[[], T]) -> T:
        """Run `work` on the writer's thread before the next group, while the writer has no open connection. After all
        waiting writes, others would wait for those of one caller."""
        if self._closed:
            raise JournalError("the journal is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        with self._changed:
            self._exclusive.append(_ExclusiveWork(work, future))
            self._changed.notify()
        return await future

    @property
    def waiting(self) -> int:
        """Number of writes that wait."""
        with self._changed:
            return self._writes.queue.waiting

    @property
    def problem(self) -> WriteRefused | None:
        """Why nothing can be written now: the last writes failed, or the present ones take long."""
        since_s, failing = self._busy_since_s, self._failing
        if isinstance(failing, WriteRefused):
            return failing
        if failing is not None:
            return NotWritable(str(failing))
        if since_s is not None and time.monotonic() - since_s > SLOW_S:
            return NotWritable("a commit takes long", f"a write has taken more than {SLOW_S:.0f} s so far")
        return None

    def note_problem(self, problem: WriteRefused) -> None:
        """The storage takes no write, as someone else found."""
        self._failing = self._failing if isinstance(self._failing, WriteRefused) else problem

    async def close(self) -> None:
        """Commit what was submitted, then end the thread."""
        if not self._closed:
            with self._changed:
                self._closed = True
                self._changed.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- on the thread

    def _run_thread(self) -> None:
        going = True
        while going:
            alone, group, going = self._take_work()
            if alone is not None:
                self._loop.call_soon_threadsafe(_deliver_all, [self._run_exclusive(alone)], {})
            if group:
                self._busy_since_s = time.monotonic()
                for write in group:
                    if write.ahead is not None:
                        write.ahead.begin()
                began_s = time.thread_time()
                outcomes = self._commit_group_guarded(group)
                costs = self._split_cost(group, time.thread_time() - began_s)
                self._busy_since_s, self._failing = None, _failure_of(outcomes, self._failing)
                self._loop.call_soon_threadsafe(_deliver_all, outcomes, costs)
                self._tend_log()
        self._disconnect()

    def _tend_log(self) -> None:
        """After the answers: it may take as long as some groups."""
        try:
            self._database.tend_log()
        except Exception as error:  # tried again after the next group, which fails itself if the disk does
            log.warning("checkpoint_failed", error=error)

    def _take_work(self) -> tuple[_ExclusiveWork | None, list[_Write], bool]:
        """An exclusive work, else waiting writes up to a bound; False if nothing is left and nothing will come."""
        group: list[_Write] = []
        with self._changed:
            waiting = self._writes.queue
            while not (waiting.waiting or self._exclusive or self._closed):
                self._changed.wait()
            if self._exclusive:
                return self._exclusive.popleft(), group, True
            all_max_s, each_max_s, paces = GROUP_S, GROUP_S, {}
            if time.monotonic() < self._several_until_s:
                all_max_s, each_max_s, paces = max(SHARED_S, self._commit_s), max(EACH_S, self._commit_s), self._paces
            all_s, each_s = 0.0, dict[str, float]()
            while waiting.waiting:
                write = waiting.peek()
                principal, expected_s = write.account[0], write.expected_s(paces)
                all_s += expected_s
                each_s[principal] = each_s.get(principal, 0.0) + expected_s
                if group and (all_s > all_max_s or each_s[principal] > each_max_s):
                    break
                group.append(self._writes.pop(paces))
            return None, group, bool(waiting.waiting or not self._closed)

    def _run_exclusive(self, alone: _ExclusiveWork) -> _Outcome:
        self._disconnect()
        try:
            return _Outcome(alone, alone.work())
        except Exception as error:  # delivered to the caller
            return _Outcome(alone, error=error)

    def _commit_group_guarded(self, group: Sequence[_Write]) -> list[_Outcome]:
        """Resolve every future and keep the thread alive, whatever fails."""
        try:
            return self._reject_if_full(group)
        except Exception as error:
            self._disconnect()
            return [
                _Outcome(write, error=_chain_error(OutcomeUnknown(f"writing failed ({error})"), error))
                for write in group
            ]

    def _reject_if_full(self, group: Sequence[_Write]) -> list[_Outcome]:
        why = self._database.why_full() if any(write.adds for write in group) else None
        if why is None:
            return self._commit_group(group)
        refused = [_Outcome(write, error=StorageFull(why)) for write in group if write.adds]
        rest = [write for write in group if not write.adds]
        return refused + (self._commit_group(rest) if rest else [])

    def _commit_group(self, group: Sequence[_Write]) -> list[_Outcome]:
        """One transaction for the group. If it fails before COMMIT, one for each write, to isolate the failing one.

        If the connection broke since the previous group, the group is repeated on a new one.
        """
        before = self._connection
        try:
            connection = self._connect()
            connection.begin()  # only commit, rollback or close ends it
            outcomes = self._run_all(connection, group) or [
                self._run_in_savepoint(connection, write) for write in group
            ]
        except (DBAPIError, JournalError) as error:
            connected = self._connection is not None
            self._disconnect()  # rolls back
            if before is not None and isinstance(error, DBAPIError) and error.connection_invalidated:
                # At most once: the next attempt begins without a connection.
                return self._commit_group(group)
            if connected and len(group) > 1:
                return [outcome for write in group for outcome in self._commit_group([write])]
            return [_Outcome(write, error=self._error_for_caller(error)) for write in group]
        return self._commit_transaction(connection, outcomes)

    def _run_all(self, connection: Connection, group: Sequence[_Write]) -> list[_Outcome]:
        """Run all without savepoints, which are a sixth of a small write's statements. If one fails, roll back and
        return an empty list: the caller repeats them one by one to find the failing write."""
        spent_s: list[float] = []
        try:
            values = _run_works(connection, [write.work for write in group], spent_s)
        except Exception as error:
            if isinstance(error, DBAPIError) and not self._database.is_statement_error(error):
                raise
            connection.rollback()
            connection.begin()
            return []
        self._note_paces(group, spent_s)
        return [_Outcome(write, value) for write, value in zip(group, values, strict=True)]

    def _note_paces(self, group: Sequence[_Write], spent_s: Sequence[float]) -> None:
        if len(self._paces) > PACES:
            self._paces.clear()
        for write, took_s in zip(group, spent_s, strict=True):
            pace = self._paces.get(write.account, 1.0)
            self._paces[write.account] = pace + (min(took_s / write.cost_s, PACE_MAX) - pace) / 8

    def _split_cost(self, group: Sequence[_Write], cpu_s: float) -> dict[Account, float]:
        """The CPU of a group by account, in proportion to what its writes were expected to take."""
        costs: dict[Account, float] = {}
        for write in group:
            costs[write.account] = costs.get(write.account, 0.0) + write.expected_s(self._paces)
        each = cpu_s / sum(costs.values())
        return {account: cost_s * each for account, cost_s in costs.items() if account != SERVER}

    def _run_in_savepoint(self, connection: Connection, write: _Write) -> _Outcome:
        """Run one write in a savepoint: an error undoes only this write. A broken transaction raises."""
        connection.exec_driver_sql("SAVEPOINT one")
        try:
            value = write.work(connection)
        except DBAPIError as error:
            if not self._database.is_statement_error(error):
                raise
            outcome = _Outcome(write, error=self._error_for_caller(error))
        except Exception as error:  # a port error or a value that cannot be written: delivered to the caller
            outcome = _Outcome(write, error=error)
        else:
            connection.exec_driver_sql("RELEASE SAVEPOINT one")
            return _Outcome(write, value)
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT one")
        connection.exec_driver_sql("RELEASE SAVEPOINT one")
        return outcome

    def _error_for_caller(self, error: DBAPIError | JournalError) -> JournalError:
        """The error for the caller of a write that left nothing; a new instance for each caller."""
        if isinstance(error, DBAPIError):
            return _chain_error(self._database.translate_error(error), error)
        return _chain_error(_copy_error(error), error)

    def _commit_transaction(self, connection: Connection, outcomes: list[_Outcome]) -> list[_Outcome]:
        began_s = time.perf_counter()
        try:
            self._database.commit(connection)
        except Exception as error:
            self._disconnect()
            refused = self._database.why_uncommitted(error)
            unknown = OutcomeUnknown(f"the commit failed ({type(error).__name__}): read again")
            return [
                outcome
                if outcome.error
                else _Outcome(outcome.write, error=_chain_error(_copy_error(refused or unknown), error))
                for outcome in outcomes
            ]
        took_s = min(time.perf_counter() - began_s, GROUP_S)
        self._commit_s += (took_s - self._commit_s) / 8
        return outcomes

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._database.writer.connect()
        return self._connection

    def _disconnect(self) -> None:
        """Drop a connection, which may be in any state after a failure; the next group opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


def _run_works(connection: Connection, works: Sequence[Work], spent_s: list[float]) -> list[Any]:
    """The results, in order; `spent_s` gets how long each took. Joint work runs in rounds with at most one write per
    memory; other work runs alone, after everything before it."""
    values: list[Any] = []
    joint: list[JointWork[Any]] = []

    def finish() -> None:
        began_s = time.perf_counter()
        for one_round in bulk.split_rounds(joint, lambda one: one.memory):
            together: dict[Callable[..., None], list[Any]] = {}
            for one in one_round:
                together.setdefault(one.work, []).append(one.item)
            for work, items in together.items():
                work(connection, items)
        spent_s.extend([(time.perf_counter() - began_s) / max(1, len(joint))] * len(joint))
        joint.clear()

    for work in works:
        if isinstance(work, JointWork):
            joint.append(work)
            values.append(None)
        else:
            finish()
            began_s = time.perf_counter()
            values.append(work(connection))
            spent_s.append(time.perf_counter() - began_s)
    finish()
    return values


def _failure_of(outcomes: Sequence[_Outcome], before: JournalError | None) -> JournalError | None:
    """Why the storage took no write of a group; None once it took one that adds rows. What adds none may have written
    nothing: below the reserve of space such writes are taken, and in a read-only database those that only read."""
    taken = False
    for outcome in outcomes:
        if isinstance(outcome.error, WriteRefused):
            return outcome.error
        if isinstance(outcome.error, OutcomeUnknown):
            return before if isinstance(before, WriteRefused) else outcome.error
        taken |= outcome.error is None and isinstance(outcome.write, _Write) and outcome.write.adds
    return None if taken else before


def _copy_error(error: JournalError) -> JournalError:
    return copy.copy(error).with_traceback(None)


def _chain_error(error: JournalError, cause: BaseException) -> JournalError:
    error.__cause__ = cause
    return error


def _deliver_all(outcomes: Sequence[_Outcome], costs: Mapping[Account, float]) -> None:
    if (turns := find_turns()) is not None:
        for account, cost_s in costs.items():
            turns.charge(account, cost_s)  # this thread and the event loop share the interpreter
    for outcome in outcomes:
        outcome.deliver()
