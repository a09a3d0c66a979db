"""Server processes on one database, and the memories that each of them owns.

Contract
- A process has a number, assigned by `join` and never reused, and a lease by the database's clock. It also holds a lock
  that lasts as long as its writing connection; `connected` tells whether that connection exists.
- A memory has at most one owner. An owner is dead when its lease has expired, it has left, or its lock is gone.
- `take` takes a memory only if its owner released it or is dead, and raises its epoch: the journal rejects later writes
  of the former owner (StaleWrite). It never waits for another process.
- Methods raise the journal's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Owner:
    """Another, living process that owns a memory."""

    number: int
    address: str
    """Its address; empty if it has not published one yet."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of a successful renewal."""

    leads: bool
    """Whether this process is the leader, which does the work of the whole database."""


class Processes(Protocol):
    """See the module's contract."""

    def is_connected(self) -> bool:
        """Whether the connection of the latest `join` still exists, as far as this host knows. Does not block."""
        ...

    async def join(self, address: str, lease_s: float) -> int:
        """Register with a new number and lease; releases the memories of the previous number."""
        ...

    async def renew(self, number: int, address: str, lease_s: float) -> Renewal | None:
        """Extend the lease from now on, by the database's clock; None if it has expired."""
        ...

    async def leave(self, number: int) -> None:
        """End the lease and release all memories."""
        ...

    async def take_memory(self, uid: str, number: int) -> int | Owner | None:
        """The memory's new epoch; its living owner; or None if its row is locked. Raises StaleWrite if it is gone."""
        ...

    async def release_memory(self, uid: str, number: int) -> None:
        """Release a memory; does nothing if another process owns it by now."""
        ...

    async def find_owner(self, namespace: str, name: str, number: int) -> Owner | None:
        """The living process other than `number` that owns the memory, if any."""
        ...

    async def list_living(self, number: int) -> frozenset[int]:
        """Numbers of all other living processes."""
        ...

    async def owned_by_others(self, number: int) -> frozenset[str]:
        """Uids of memories that other living processes own."""
        ...

    async def list_abandoned(self, number: int) -> list[str]:
        """Uids of memories with received, unstored observations that no living process owns."""
        ...
