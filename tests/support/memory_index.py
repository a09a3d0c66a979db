"""A vector index in memory, to the letter of the port's contract: a failure loses what was not flushed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexUnavailable, Point
from memstream_server.ports.journal import Space


class MemoryIndex:
    """`fail_at` makes a later call raise; whatever was written since the last flush is then gone, as it may be."""

    def __init__(self) -> None:
        self.flushed: dict[tuple[str, str], Vector] = {}
        """What a restart would find, by (memory, fragment)."""
        self._now: dict[tuple[str, str], Vector] = {}
        self._left = 0
        self._call = ""
        self._error: type[IndexUnavailable] = IndexUnavailable
        self.failed = ""
        """The call that failed since it was armed last."""

    def fail_at(self, number: int, error: type[IndexUnavailable], call: str) -> None:
        """The `number`-th `call` from now (the first is 1) raises `error`, once. IndexLost loses everything."""
        self._left, self._error, self._call, self.failed = number, error, call, ""

    def disarm(self) -> None:
        self._left = 0

    def _called(self, name: str) -> None:
        if self._left == 0 or name != self._call:
            return
        self._left -= 1
        if self._left == 0:
            self.failed = name
            if self._error is not IndexUnavailable:
                self.flushed = {}
            self._now = dict(self.flushed)
            raise self._error(f"scripted: {name}")

    @property
    def description(self) -> str:
        return "memory"

    async def open(self, space: Space) -> bool:
        self._called("open")
        return not self.flushed

    async def upsert(self, points: Sequence[Point]) -> None:
        self._called("upsert")
        self._now |= {(point.memory, point.fragment): point.vector for point in points}

    async def delete(self, memory: str, fragments: Sequence[str]) -> None:
        self._called("delete")
        for fragment in fragments:
            self._now.pop((memory, fragment), None)

    async def flush(self) -> None:
        self._called("flush")
        self.flushed = dict(self._now)

    async def drop(self) -> None:
        self._called("drop")
        self.flushed, self._now = {}, {}

    async def search(self, memory: str, vector: Vector, limit: int) -> tuple[list[str], npt.NDArray[np.float32]]:
        self._called("search")
        found = {fragment: float(held @ vector) for (uid, fragment), held in self._now.items() if uid == memory}
        best = sorted(found, key=lambda fragment: -found[fragment])[:limit]
        return best, np.array([found[fragment] for fragment in best], np.float32)

    async def count(self, memory: str) -> int:
        return len(self.stored(memory))

    async def ids(self, memory: str, after: str, limit: int) -> list[str]:
        self._called("ids")
        return sorted(fragment for fragment in self.stored(memory) if fragment > after)[:limit]

    def stored(self, memory: str) -> set[str]:
        """What a restart would find."""
        return {fragment for uid, fragment in self.flushed if uid == memory}

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass
