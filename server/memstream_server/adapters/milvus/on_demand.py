"""Starts an embedded index when a memory needs it: when the vectors of the largest one may soon not fit in RAM.

A smaller memory is searched in RAM, exactly, so its rows in the index would never be read. A Milvus Lite child process
takes 1 s of CPU to start, 330 MB of memory with 10,000 rows, and as much CPU for a row as its observation does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexLost, IndexUnavailable, Point, VectorIndex
from memstream_server.ports.journal.records import Space

_CHECKS = 8
"""The largest memory is counted again after as many rows as this share of `needed_from`."""


class OnDemandIndex:
    """`ports.index.VectorIndex` that opens `index` at `open` if `directory` exists, otherwise when it is needed.

    It is needed when a memory has `needed_from` fragments, which `count_largest` counts, or is searched here. Until
    then it is idle: upserts are dropped, deletes and flushes have nothing to do. An upsert or a search that finds the
    need raises IndexLost, and the next upsert starts it. A start that fails raises IndexUnavailable from `upsert`, and
    the next upsert tries again.
    """

    def __init__(
        self, index: VectorIndex, directory: Path, count_largest: Callable[[], Awaitable[int]], needed_from: int
    ) -> None:
        self._index = index
        self._directory = directory
        self._count_largest = count_largest
        self._needed_from = needed_from
        self._needed = False
        self._unchecked = 0
        """Rows dropped since the largest memory was counted."""
        self._spaces: list[Space] = []
        """Spaces to open with the first row, the default first; empty unless the index is open and not started."""
        self._start_failed = False

    @property
    def description(self) -> str:
        return self._index.description

    @property
    def keeps_deleted(self) -> bool:
        return self._index.keeps_deleted

    @property
    def is_idle(self) -> bool:
        return bool(self._spaces) and not self._needed

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        """See the port. Without a directory it starts nothing; all rows are to be filled in if it is needed."""
        self._spaces = []
        if self._directory.exists():
            return await self._index.open(space, beside)
        self._spaces = [each for each in (space, beside) if each is not None]
        await self._check_need()
        return self._needed

    async def add_space(self, space: Space) -> bool:
        if not self._spaces:
            return await self._index.add_space(space)
        if space not in self._spaces:
            self._spaces.append(space)
        return self._needed

    async def remove_space(self, space: Space) -> None:
        if not self._spaces:
            await self._index.remove_space(space)
        elif self._spaces == [space]:
            raise IndexUnavailable(f"the index of {space.model} is the only one")
        elif space in self._spaces:
            self._spaces.remove(space)

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        if self.is_idle:
            self._unchecked += len(points)
            if self._unchecked * _CHECKS >= self._needed_from:
                await self._check_need()
            if self._needed:
                raise IndexLost("a memory has grown so large that it needs the index")
            return
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
        if self.is_idle:
            self._needed = True
            raise IndexLost("a memory is searched that does not fit in RAM")
        if self._spaces:
            return [], np.empty(0, np.float32)
        return await self._index.search(memory, vector, limit, model, timeout_s)

    async def count(self, memory: str, model: str = "") -> int:
        return 0 if self._spaces else await self._index.count(memory, model)

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        return [] if self._spaces else await self._index.list_ids(memory, model)

    async def erase_deleted(self) -> bool:
        return True if self._spaces else await self._index.erase_deleted()

    async def drop_all(self) -> None:
        self._spaces = []
        await self._index.drop_all()

    async def is_healthy(self) -> bool:
        return not self._start_failed if self._spaces else await self._index.is_healthy()

    async def close(self) -> None:
        await self._index.close()

    async def _check_need(self) -> None:
        self._unchecked = 0
        self._needed = self._needed_from == 0 or await self._count_largest() >= self._needed_from

    async def _start(self) -> None:
        """Open the index with all spaces. It stays an empty index until then, so a failure changes no answer."""
        default, *others = self._spaces
        self._start_failed = True
        await self._index.open(default, *others[:1])  # whether it is empty is known
        for space in others[1:]:
            await self._index.add_space(space)
        self._spaces, self._start_failed = [], False
