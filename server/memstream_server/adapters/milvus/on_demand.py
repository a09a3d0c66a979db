"""Starts an embedded index with its first row: until then, an index without a directory is known to be empty.

A Milvus Lite child process and its client take about 1 s of CPU to start and 200 MB of memory. A server whose memories
have no long-term fragment yet needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexUnavailable, Point, VectorIndex
from memstream_server.ports.journal.spaces import Space


class OnDemandIndex:
    """`ports.index.VectorIndex` that opens `index` at `open` if `directory` exists, otherwise with the first upsert.

    Before that start every read finds nothing, and deletes and flushes have nothing to do. A start that fails raises
    IndexUnavailable from `upsert`, and the next upsert tries again.
    """

    def __init__(self, index: VectorIndex, directory: Path) -> None:
        self._index = index
        self._directory = directory
        self._spaces: list[Space] = []
        """Spaces to open with the first row, the default first; empty unless the index is open and not started."""
        self._start_failed = False

    @property
    def description(self) -> str:
        return self._index.description

    @property
    def keeps_deleted(self) -> bool:
        return self._index.keeps_deleted

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """See the port. Without a directory it starts nothing and returns True: all rows are to be filled in."""
        self._spaces = []
        if self._directory.exists():
            return await self._index.open(space, beside)
        self._spaces = [each for each in (space, beside) if each is not None]
        return True

    async def add_space(self, space: Space) -> bool:
        if not self._spaces:
            return await self._index.add_space(space)
        if space not in self._spaces:
            self._spaces.append(space)
        return True

    async def remove_space(self, space: Space) -> None:
        if not self._spaces:
            await self._index.remove_space(space)
        elif self._spaces == [space]:
            raise IndexUnavailable(f"the index of {space.model} is the only one")
        elif space in self._spaces:
            self._spaces.remove(space)

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        if self._spaces and points:
            await self._start()
        if not self._spaces:
            await self._index.upsert(points, model)

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None:
        if not self._spaces:
            await self._index.delete(memory, fragments, model)

    async def flush(self) -> None:
        if not self._spaces:
            await self._index.flush()

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        if self._spaces:
            return [], np.empty(0, np.float32)
        return await self._index.search(memory, vector, limit, model, timeout_s)

    async def count(self, memory: str, model: str = "") -> int:
        return 0 if self._spaces else await self._index.count(memory, model)

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        return [] if self._spaces else await self._index.list_ids(memory, model)

    async def drop_all(self) -> None:
        self._spaces = []
        await self._index.drop_all()

    async def is_healthy(self) -> bool:
        return not self._start_failed if self._spaces else await self._index.is_healthy()

    async def close(self) -> None:
        await self._index.close()

    async def _start(self) -> None:
        """Open the index with all spaces. It stays an empty index until then, so a failure changes no answer."""
        default, *others = self._spaces
        self._start_failed = True
        await self._index.open(default, *others[:1])  # whether it is empty is known
        for space in others[1:]:
            await self._index.add_space(space)
        self._spaces, self._start_failed = [], False
