"""Which memories this process may serve: its lease, and the epoch of each memory that it owns.

Rule 1. With a journal of its own (SQLite) the process holds the file lock, which is the lease. Ownership then costs
nothing: loading a memory writes nothing, unless earlier writes of this process may still be in flight
(`distrust_epoch`).
Rule 2. A lease runs from the time of the renewal request, on the local monotonic clock, minus a safety margin, and only
while the connection of that request is open. So no other process can own a memory that this process believes it owns.
Rule 3. A lost lease stays lost. The process drops its working sets, takes a new process number and starts without
memories.
Rule 4. A process takes only memories without a living owner. A request never moves a memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.errors import JournalUnavailable, LeaseLost, OwnedElsewhere
from memstream_server.engine.settings import LeaseTimes
from memstream_server.ports.journal.errors import JournalError, WriteRefused
from memstream_server.ports.processes import Owner

if TYPE_CHECKING:
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.processes import Processes

log = structlog.get_logger(__name__)

MARGIN = 0.1
"""Safety margin as a share of the lease: clocks run at different speeds."""
CHECKS_PER_RENEWAL = 6
"""Lease checks per renewal interval."""
RETRY_AFTER_S = 0.2


class Ownership:
    """The lease and the epochs of one process. The engine starts and stops it."""

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
        """This process's number among those that share the journal; 0 if it is alone."""
        return self._number

    @property
    def shared(self) -> bool:
        """Whether other processes may use the same journal."""
        return self._processes is not None

    @property
    def taken(self) -> int:
        """How many memories this process has taken. Only counted if the journal is shared."""
        return len(self._epochs) if self.is_valid() else 0

    @property
    def leads(self) -> bool:
        """Whether this process is the leader: it writes the vector index and maintains memories without an owner."""
        return self._leads and self.is_valid()

    def is_valid(self) -> bool:
        """Whether the working sets of the owned memories equal the journal."""
        if self._processes is None:
            return True
        return bool(self._number) and self._now() < self._until_s and self._processes.is_connected()

    def check_lease(self) -> None:
        """Call before and after an answer is read from the working set of a memory. Raises LeaseLost."""
        if not self.is_valid():
            raise _lease_lost()

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the lease is lost, in the order of registration."""
        self._lost.append(callback)

    # ---- the lease
    async def start(self) -> None:
        """Take a lease and keep renewing it. Raises JournalError."""
        if self._processes is not None:
            await self._join_processes(self._processes)
            self._task = asyncio.create_task(self._lease_loop(self._processes))

    async def announce_address(self, address: str) -> None:
        """From now on other processes forward calls to `address`."""
        self._address = address
        if self._processes is not None and self._number:
            await self._renew_lease(self._processes, self._number)

    async def stop(self) -> None:
        """Give up the lease. Call after the actors have ended."""
        for task in (self._task, self._renewing):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        number, self._number = self._number, 0
        if self._processes is not None and number:
            try:
                await self._processes.leave(number)
            except JournalError as error:  # the lease expires, and closing the connection frees the lock
                log.warning("lease_release_failed", error=error)

    async def _lease_loop(self, processes: Processes) -> None:
        while True:
            await asyncio.sleep(self._times.renew_s / CHECKS_PER_RENEWAL)
            try:
                await self._renew_if_due(processes)
            except Exception:  # an unexpected error must not leave the process without a lease
                log.exception("lease_check_failed")

    async def _renew_if_due(self, processes: Processes) -> None:
        if not self.is_valid():
            self._lose_lease()
            await self._join_again(processes)
        elif self._renewing is None and self._now() - self._renewed_s >= self._times.renew_s:
            # A separate task: the loop notices the end of the lease however long the renewal takes.
            self._renewing = asyncio.create_task(self._renew_again(processes, self._number))

    async def _join_processes(self, processes: Processes) -> None:
        asked_s = self._now()
        number = await processes.join(self._address, self._times.lease_s)
        self._number = number
        self._extend_lease(asked_s)
        await self._renew_lease(processes, number)

    async def _join_again(self, processes: Processes) -> None:
        try:
            await self._join_processes(processes)
        except JournalError as error:
            log.warning("lease_not_taken", error=error)
        else:
            log.info("lease_taken", process=self._number)

    async def _renew_again(self, processes: Processes, number: int) -> None:
        try:
            await self._renew_lease(processes, number)
        except JournalError as error:
            log.warning("lease_not_renewed", error=error)
        finally:
            self._renewing = None

    async def _renew_lease(self, processes: Processes, number: int) -> None:
        asked_s = self._now()
        renewal = await processes.renew(number, self._address, self._times.lease_s)
        if number != self._number or not self.is_valid():
            return
        if renewal is None:
            self._until_s = 0.0
            return
        self._extend_lease(asked_s)
        self._leads = renewal.leads

    def _extend_lease(self, asked_s: float) -> None:
        self._renewed_s = asked_s
        self._until_s = asked_s + self._times.lease_s * (1 - MARGIN)

    def _lose_lease(self) -> None:
        if not self._number:
            return
        log.warning("lease_lost", process=self._number, memories=len(self._epochs))
        self._number, self._leads = 0, False
        self._epochs.clear()
        for callback in self._lost:
            callback()

    # ---- memories
    async def take_memory(self, uid: str) -> int | None:
        """The epoch at which this process owns the memory. None: use the epoch that is loaded, because no process
        raises it.

        Raises OwnedElsewhere, LeaseLost, JournalError.
        """
        if self._processes is None:
            if uid in self._distrusted:
                # Refused: the memory is read at its old epoch. Writes at it that were in flight are over, because the
                # journal writes in order; and each commit compares the revision.
                with contextlib.suppress(WriteRefused):
                    self._epochs[uid] = (await self._journal.own_memory(uid)).epoch
                    self._distrusted.discard(uid)
            return self._epochs.get(uid)
        number = self._number
        if not self.is_valid():
            raise _lease_lost()
        if uid in self._epochs:
            return self._epochs[uid]
        taken = await self._processes.take_memory(uid, number)
        if number != self._number or not self.is_valid():
            raise _lease_lost()
        if isinstance(taken, Owner):
            raise OwnedElsewhere("another server owns the memory", retry_after_s=RETRY_AFTER_S)
        if taken is None:
            raise OwnedElsewhere("another server is taking or releasing the memory", retry_after_s=RETRY_AFTER_S)
        self._epochs[uid] = taken
        return taken

    def confirm_memory(self, uid: str, epoch: int | None, read: int) -> None:
        """Check that this process still owns the memory, which was loaded at epoch `read`. Raises OwnedElsewhere,
        LeaseLost.
        """
        if epoch is None:
            return
        if self._epochs.get(uid) != epoch:
            raise _lease_lost()
        if read != epoch:
            self.forget_memory(uid)
            raise OwnedElsewhere("another server has taken the memory", retry_after_s=RETRY_AFTER_S)

    def distrust_epoch(self, uid: str) -> None:
        """Raise the memory's epoch before the next load. Taking it waits for writes at the old epoch in flight; the
        journal refuses later ones.
        """
        self._epochs.pop(uid, None)
        if self._processes is None:
            self._distrusted.add(uid)

    def forget_memory(self, uid: str) -> None:
        """The memory was deleted, or belongs to another process."""
        self._epochs.pop(uid, None)
        self._distrusted.discard(uid)

    async def release_memory(self, uid: str) -> None:
        """Let other processes take the memory. A process with a journal of its own keeps what it took."""
        if self._processes is None or self._epochs.pop(uid, None) is None:
            return
        try:
            await self._processes.release_memory(uid, self._number)
        except JournalError as error:
            log.info("memory_not_released", memory=uid, error=error)

    async def release_all(self) -> None:
        """Let other processes take all memories. The lease stays: it also covers work that belongs to no memory."""
        await asyncio.gather(*(self.release_memory(uid) for uid in [*self._epochs]))

    # ---- other processes
    async def find_owner(self, namespace: str, name: str) -> Owner | None:
        """The living process that owns the memory; None if this one may serve it. Raises LeaseLost,
        JournalUnavailable.
        """
        if self._processes is None:
            return None
        if not self.is_valid():
            raise _lease_lost()
        with _map_errors():
            return await self._processes.find_owner(namespace, name, self._number)

    async def list_living(self) -> frozenset[int]:
        """Numbers of the other living processes. Raises JournalUnavailable."""
        if self._processes is None:
            return frozenset()
        with _map_errors():
            return await self._processes.list_living(self._number)

    async def select_tended(self) -> Callable[[str], bool]:
        """A predicate: whether this process does the background work of a memory, as of now. Raises JournalError."""
        if self._processes is None:
            return lambda _: True
        others = await self._processes.owned_by_others(self._number) if self.leads else None
        return lambda uid: uid in self._epochs or (others is not None and uid not in others)

    async def list_abandoned(self) -> list[str]:
        """Memories without an owner in which observations wait to be stored; empty unless this process leads."""
        if self._processes is None or not self.leads:
            return []
        return await self._processes.list_abandoned(self._number)


def _lease_lost() -> LeaseLost:
    return LeaseLost("this server has no lease on the memory; reconnect", retry_after_s=RETRY_AFTER_S)


@contextlib.contextmanager
def _map_errors() -> Iterator[None]:
    try:
        yield
    except JournalError as error:
        raise JournalUnavailable("the memory's owner could not be read: try again", retry_after_s=0.5) from error
