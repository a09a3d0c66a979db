"""The vector index of long-term fragments: candidates only, never the truth.

Contract
- `upsert` and `delete` are idempotent; an acknowledged write is durable only after the next `flush` returned.
- A search may lag behind writes and may return ids that are gone: the caller checks ids against the journal.
- `IndexUnavailable` means the index is down or being rebuilt; nothing about the journal. After it, writes since
  the last flush may be lost: the caller sends them again from the outbox.
- `IndexLost` is raised once for each loss, by whichever call comes next, a search too: whoever gets it sees to it
  that the index is filled again from the journal. Lost with it are the writes since the last flush.
- One writer at a time calls `upsert`, `delete`, `flush`; searches run beside it.
- None of the methods blocks the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.journal.spaces import Space


class IndexUnavailable(Exception):
    """The index cannot answer now; the text says why. Recall goes on without it and says `degraded`."""

    log_text = True
    """An index holds ids and vectors, so no error of it repeats content."""


class IndexLost(IndexUnavailable):
    """The index came back empty (corrupt directory dropped, collection missing): refill it from the journal."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One long-term fragment in the index. The partition is derived from `memory` by the index."""

    memory: str
    fragment: str
    vector: Vector


class VectorIndex(Protocol):
    """See the module's contract."""

    @property
    def description(self) -> str:
        """Engine and version for people, for instance "milvus-lite 3.2.2" or "milvus 2.3.5"."""
        ...

    @property
    def keeps_deleted(self) -> bool:
        """Whether what is deleted stays in files that are ours until `drop`."""
        ...

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """Connect and make the collection of `space`, and of another one beside it; True when they must be refilled:
        one was made anew, or holds nothing (a crash may have come between its making and its refilling). Raises
        IndexUnavailable and is then called again; once it returned, the adapter recovers by itself."""
        ...

    async def add(self, space: Space) -> bool:
        """Make the collection of another space, while the index is open; True when it must be filled."""
        ...

    async def remove(self, space: Space) -> None:
        """Drop the collection of a space that is no longer used. Again is no error."""
        ...

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        """Into the collection of the space of that name; of the space opened first when empty, here as below."""
        ...

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None: ...

    async def flush(self) -> None:
        """Of all collections."""
        ...

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Fragment ids of `memory` and their cosines, best first. With `timeout_s` it is given up after that, too."""
        ...

    async def count(self, memory: str, model: str = "") -> int: ...

    async def ids(self, memory: str, model: str = "") -> list[str]:
        """All fragment ids of `memory`, ascending: for reconciliation."""
        ...

    async def drop(self) -> None:
        """Remove all that the index holds, for every memory, and the files of an embedded one: what was deleted before
        may still be in them. The index is closed by it, and `open` finds it empty. Raises IndexUnavailable."""
        ...

    async def healthy(self) -> bool: ...

    async def close(self) -> None: ...
