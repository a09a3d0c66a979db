"""The vector index of long-term fragments: a source of candidates, never of truth.

Contract
- `upsert` and `delete` are idempotent; an acknowledged write is durable only after the next `flush` has returned.
- A search may lag behind writes and may return ids that no longer exist: the caller checks ids against the journal.
- `IndexUnavailable`: the index is down or being rebuilt. Writes since the last flush may be lost: the caller sends them
  again from the outbox. It says nothing about the journal.
- `IndexLost` is raised once for each loss, by the next call of any kind, including a search: the caller that gets it
  has the index filled again from the journal. Writes since the last flush are lost, too.
- One writer at a time calls `upsert`, `delete`, `flush`; searches may run concurrently.
- No method blocks the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.journal.records import Space

INDEX_FOLDER = "milvus"
"""Folder of an embedded index in the data directory; derived from the journal, so a restore may delete it."""

NO_INDEX = "the vectors of this memory do not fit in RAM, and this server has no Milvus (milvus_uri)"


class IndexUnavailable(Exception):
    """The index cannot answer now; the text says why. Recall continues without it and reports `degraded`."""

    log_text = True
    """An index holds ids and vectors, so its errors contain no content."""


class IndexLost(IndexUnavailable):
    """The index is empty after a loss (damaged directory, missing collection): fill it again from the journal."""


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One long-term fragment in the index. The index derives its partition from `memory`."""

    memory: str
    fragment: str
    vector: Vector


class VectorIndex(Protocol):
    """See the module's contract."""

    @property
    def description(self) -> str:
        """Engine and version for display, for instance "milvus-lite 3.2.2" or "milvus 2.3.5"."""
        ...

    @property
    def keeps_deleted(self) -> bool:
        """Whether deleted rows stay in this process's files until `drop`."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether it keeps no rows, because no memory needs it: its emptiness is not a difference from the journal. It
        accepts and drops rows. When a memory needs it, it raises IndexLost."""
        ...

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """Connect and create the collections of `space` and, if given, of a second space. True if they must be filled:
        one is new or empty (a crash may have prevented its filling). Raises IndexUnavailable; the caller then calls it
        again. After a success the adapter reconnects itself."""
        ...

    async def add_space(self, space: Space) -> bool:
        """Create the collection of another space while the index is open. True if it must be filled."""
        ...

    async def remove_space(self, space: Space) -> None:
        """Drop the collection of a space that is no longer used. Idempotent."""
        ...

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        """Upsert into the collection of the space `model`; here and below, empty means the space opened first."""
        ...

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None: ...

    async def flush(self) -> None:
        """Flush all collections."""
        ...

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Fragment ids of `memory` and their cosines, best first. `timeout_s` shortens the index's own timeout."""
        ...

    async def count(self, memory: str, model: str = "") -> int: ...

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        """All fragment ids of `memory`, ascending; for reconciliation."""
        ...

    async def erase_deleted(self) -> bool:
        """Remove deleted and replaced rows, as of the last flush, from this process's files, at the cost of the files
        that hold any. False if it cannot: `drop_all` does."""
        ...

    async def drop_all(self) -> None:
        """Remove everything in the index, for every memory, and the files of an embedded one, in which deleted rows may
        remain. Closes the index; the next `open` finds it empty. Raises IndexUnavailable."""
        ...

    async def is_healthy(self) -> bool: ...

    async def close(self) -> None: ...


class NoIndex:
    """A VectorIndex for servers that share a database and have no Milvus: it keeps no row and refuses every search."""

    description = "none: milvus_uri is empty"
    keeps_deleted = False
    is_idle = True

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        return False

    async def add_space(self, space: Space) -> bool:
        return False

    async def remove_space(self, space: Space) -> None: ...

    async def upsert(self, points: Sequence[Point], model: str = "") -> None: ...

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None: ...

    async def flush(self) -> None: ...

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        raise IndexUnavailable(NO_INDEX)

    async def count(self, memory: str, model: str = "") -> int:
        return 0

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        return []

    async def drop_all(self) -> None: ...

    async def erase_deleted(self) -> bool:
        return True

    async def is_healthy(self) -> bool:
        return True

    async def close(self) -> None: ...
