"""Which memories this process may answer for: its lease, and the epochs it took them at.

Rule 1. Where the journal is this process's alone (SQLite) its lock is the lease: all that follows costs nothing, and a
memory that is read writes nothing, unless writes of its own past may still be on their way (`distrust`).
Rule 2. The lease counts from before its renewal was asked for, by the local monotonic clock and less a margin, and
only while the connection it was asked over is there: nobody else can own what this process believes it owns.
Rule 3. A lease that was lost stays lost. The process drops what it has in RAM, takes a new number and begins with
empty hands.
Rule 4. Only what nobody living owns is taken. A request never moves a memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.errors import JournalUnavailable, LeaseLost, OwnedElsewhere
from memstream_server.engine.settings import LeaseTimes
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.processes import Owner

if TYPE_CHECKING:
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.processes import Processes

log = structlog.get_logger(__name__)

MARGIN = 0.1
"""Part of a lease that is not counted on: clocks run at different speeds."""
LOOKS = 6
"""How often in the time between two renewals the process looks whether it still has its lease."""
RETRY_AFTER_S = 0.2


class Ownership:
    """Of one process. The engine starts and stops it."""

    def __init__(self, processes: Processes | None, journal: Journal, clock: Clock, lease: LeaseTimes) -> None:
        self._processes = processes
        self._journal = journal
        self._times = lease
        self._lost: list[Callable[[], None]] = []
        self._now = clock.monotonic_s
        self._epochs: dict[str, int] = {}
        self._distrusted: set[str] = set()
        self._number = 0
        self._until_s = 0.0
        self._renewed_s = 0.0
        self._leads = self._processes is None
        self._address = ""
        self._renewing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        """This process's among those that share the journal; 0 where it is alone."""
        return self._number

    @property
    def shared(self) -> bool:
        """Whether there may be other processes."""
        return self._processes is not None

    @property
    def taken(self) -> int:
        """How many memories this process has taken from those that share the journal."""
        return len(self._epochs) if self.valid() else 0

    @property
    def leads(self) -> bool:
        """Whether this process does what only one may do: bring vectors into the index, tend what nobody owns."""
        return self._leads and self.valid()

    def valid(self) -> bool:
        """Whether what RAM has of the memories taken is what the journal has."""
        if self._processes is None:
            return True
        return bool(self._number) and self._now() < self._until_s and self._processes.is_connected()

    def check(self) -> None:
        """Call before and after an answer is read from the working set of a memory. Raises LeaseLost."""
        if not self.valid():
            raise _lease_lost()

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the lease is lost, in the order of registration."""
        self._lost.append(callback)

    # ---- the lease
    async def start(self) -> None:
        """Get a lease and keep it. Raises JournalError."""
        if self._processes is not None:
            await self._join(self._processes)
            self._task = asyncio.create_task(self._keep(self._processes))

    async def announce(self, address: str) -> None:
        """From now on other processes pass calls on to here."""
        self._address = address
        if self._processes is not None and self._number:
            await self._renew(self._processes, self._number)

    async def stop(self) -> None:
        """Give everything up. The actors have ended."""
        for task in (self._task, self._renewing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        number, self._number = self._number, 0
        if self._processes is not None and number:
            try:
                await self._processes.leave(number)
            except JournalError as error:  # the lease runs out by itself, the lock goes with the connection
                log.warning("not_left", error=error)

    async def _keep(self, processes: Processes) -> None:
        while True:
            await asyncio.sleep(self._times.renew_s / LOOKS)
            try:
                await self._look(processes)
            except Exception:  # a mistake in here must not leave the process without a lease for ever
                log.exception("lease_not_looked_after")

    async def _look(self, processes: Processes) -> None:
        if not self.valid():
            self._lose()
            await self._join_again(processes)
        elif self._renewing is None and self._now() - self._renewed_s >= self._times.renew_s:
            # Beside the loop: however long it takes, the end of the lease is noticed.
            self._renewing = asyncio.create_task(self._renew_again(processes, self._number))

    async def _join(self, processes: Processes) -> None:
        asked_s = self._now()
        number = await processes.join(self._address, self._times.lease_s)
        self._number = number
        self._extend(asked_s)
        await self._renew(processes, number)

    async def _join_again(self, processes: Processes) -> None:
        try:
            await self._join(processes)
        except JournalError as error:
            log.warning("no_lease_yet", error=error)
        else:
            log.info("lease_taken", process=self._number)

    async def _renew_again(self, processes: Processes, number: int) -> None:
        try:
            await self._renew(processes, number)
        except JournalError as error:
            log.warning("lease_not_renewed", error=error)
        finally:
            self._renewing = None

    async def _renew(self, processes: Processes, number: int) -> None:
        asked_s = self._now()
        renewal = await processes.renew(number, self._address, self._times.lease_s)
        if number != self._number or not self.valid():
            return
        if renewal is None:
            self._until_s = 0.0
            return
        self._extend(asked_s)
        self._leads = renewal.leads

    def _extend(self, asked_s: float) -> None:
        self._renewed_s = asked_s
        self._until_s = asked_s + self._times.lease_s * (1 - MARGIN)

    def _lose(self) -> None:
        if not self._number:
            return
        log.warning("lease_lost", process=self._number, memories=len(self._epochs))
        self._number, self._leads = 0, False
        self._epochs.clear()
        for callback in self._lost:
            callback()

    # ---- memories
    async def take(self, uid: str) -> int | None:
        """The epoch this process has the memory at, now its own; None: the one it is read at, for nobody raises it.

        Raises OwnedElsewhere, LeaseLost, JournalError.
        """
        if self._processes is None:
            if uid in self._distrusted:
                self._epochs[uid] = (await self._journal.own_memory(uid)).epoch
                self._distrusted.discard(uid)
            return self._epochs.get(uid)
        number = self._number
        if not self.valid():
            raise _lease_lost()
        if uid in self._epochs:
            return self._epochs[uid]
        taken = await self._processes.take_memory(uid, number)
        if number != self._number or not self.valid():
            raise _lease_lost()
        if isinstance(taken, Owner):
            raise OwnedElsewhere("another server owns the memory", retry_after_s=RETRY_AFTER_S)
        if taken is None:
            raise OwnedElsewhere("another server is just taking or leaving the memory", retry_after_s=RETRY_AFTER_S)
        self._epochs[uid] = taken
        return taken

    def confirm(self, uid: str, epoch: int | None, read: int) -> None:
        """That the memory, read at epoch `read`, is still this process's. Raises OwnedElsewhere, LeaseLost."""
        if epoch is None:
            return
        if self._epochs.get(uid) != epoch:
            raise _lease_lost()
        if read != epoch:
            self.forget(uid)
            raise OwnedElsewhere("another server has taken the memory", retry_after_s=RETRY_AFTER_S)

    def distrust(self, uid: str) -> None:
        """The memory is to be taken anew before it is read again: that waits for what is written at its epoch, and
        refuses what comes after."""
        self._epochs.pop(uid, None)
        if self._processes is None:
            self._distrusted.add(uid)

    def forget(self, uid: str) -> None:
        """The memory is gone, or another process's."""
        self._epochs.pop(uid, None)
        self._distrusted.discard(uid)

    async def release(self, uid: str) -> None:
        """Others may have it. A process that has the journal for itself keeps what it took."""
        if self._processes is None or self._epochs.pop(uid, None) is None:
            return
        try:
            await self._processes.release_memory(uid, self._number)
        except JournalError as error:
            log.info("not_released", memory=uid, error=error)

    async def release_all(self) -> None:
        """Others may have everything; the lease stays, for what is not a memory's."""
        await asyncio.gather(*(self.release(uid) for uid in [*self._epochs]))

    # ---- other processes
    async def owner(self, namespace: str, name: str) -> Owner | None:
        """The other living process that owns the memory; None: this one may. Raises LeaseLost, JournalUnavailable."""
        if self._processes is None:
            return None
        if not self.valid():
            raise _lease_lost()
        with _answered():
            return await self._processes.find_owner(namespace, name, self._number)

    async def living(self) -> frozenset[int]:
        """Numbers of the other processes that live. Raises JournalUnavailable."""
        if self._processes is None:
            return frozenset()
        with _answered():
            return await self._processes.list_living(self._number)

    async def tended(self) -> Callable[[str], bool]:
        """Which memories' background work is this process's, now. Raises JournalError."""
        if self._processes is None:
            return lambda _: True
        others = await self._processes.owned_by_others(self._number) if self.leads else None
        return lambda uid: uid in self._epochs or (others is not None and uid not in others)

    async def abandoned(self) -> list[str]:
        """Memories in which observations wait and that nobody tends; empty unless this process leads."""
        if self._processes is None or not self.leads:
            return []
        return await self._processes.list_abandoned(self._number)


def _lease_lost() -> LeaseLost:
    return LeaseLost("this server has no lease on the memory; reconnect", retry_after_s=RETRY_AFTER_S)


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except JournalError as error:
        raise JournalUnavailable("the memory's owner could not be looked up: try again", retry_after_s=0.5) from error
