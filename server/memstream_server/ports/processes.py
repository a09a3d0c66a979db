"""The port to the processes that serve one database, and to which of them owns which memory.

Contract
- A process is a number, given once by `join` and never again, with a lease by the database's clock. Beside the lease
  it holds a lock that goes with the connection it writes over: `connected` says whether that is still there.
- A memory's owner is one process. It is dead once its lease ran out, it left, or its lock is gone.
- `take` gives a memory away only when its owner released it or is dead, and raises the memory's epoch with it: what
  the former owner still writes is refused by the journal (Conflict). It never waits for another process.
- Methods raise the journal's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Owner:
    """Another process that owns a memory and lives."""

    number: int
    address: str
    """Where it serves; empty when it has not said so yet."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """What a process that still has its lease is told."""

    leads: bool
    """Whether it is the one that does what only one may do."""


class Processes(Protocol):
    """See the module's contract."""

    def connected(self) -> bool:
        """Whether the connection of the latest `join` is still there, as far as this machine knows. Does not block."""
        ...

    async def join(self, address: str, lease_s: float) -> int:
        """A new number with a new lease; what the former one owned is free."""
        ...

    async def renew(self, number: int, address: str, lease_s: float) -> Renewal | None:
        """Lengthen the lease from now, by the database's clock; None when it had run out."""
        ...

    async def leave(self, number: int) -> None:
        """Give up the lease and every memory owned."""
        ...

    async def take(self, uid: str, number: int) -> int | Owner | None:
        """The memory's new epoch; or who owns it; or None: somebody is just changing it. Raises Conflict if gone."""
        ...

    async def release(self, uid: str, number: int) -> None:
        """Give up a memory; nothing happens when another process owns it by now."""
        ...

    async def owner(self, namespace: str, name: str, number: int) -> Owner | None:
        """The living process other than `number` that owns the memory of that name, if any."""
        ...

    async def living(self, number: int) -> frozenset[int]:
        """All other processes that live."""
        ...

    async def owned_by_others(self, number: int) -> frozenset[str]:
        """Uids of the memories that other living processes own."""
        ...

    async def abandoned(self, number: int) -> list[str]:
        """Uids of memories in which received observations wait and that no living process owns."""
        ...
