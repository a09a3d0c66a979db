"""A vector index in RAM that uses every freedom of the port's contract: a failure loses unflushed writes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.core.values import Vector
from memstream_server.ports.index import IndexUnavailable, Point
from memstream_server.ports.journal.records import Space

_Rows = dict[tuple[str, str], Vector]
"""By (memory, fragment)."""


class MemoryIndex:
    """`fail_at` makes a later call raise; all writes since the last flush are then lost, as the contract allows."""

    def __init__(self) -> None:
        self.kept: dict[str, _Rows] = {}
        """Flushed rows by the name of the space: what a restart would find."""
        self._now: dict[str, _Rows] = {}
        self._first = ""
        self._left = 0
        self._call = ""
        self._error: type[IndexUnavailable] = IndexUnavailable
        self.failed = ""
        """The call that failed since the last `fail_at`; empty if none."""
        self.keeps_deleted = self.is_idle = self.erases = False
        self.erasures = 0
        self.drops = 0
        self.drop_s = 0.0
        """How long a drop takes."""

    def fail_at(self, number: int, error: type[IndexUnavailable], call: str) -> None:
        """Make the `number`-th `call` from now (the first is 1) raise `error`, once. IndexLost loses everything."""
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
                self.kept = {model: {} for model in self.kept}
            self._now = {model: dict(rows) for model, rows in self.kept.items()}
            raise self._error(f"scripted: {name}")

    @property
    def description(self) -> str:
        return "memory"

    @property
    def flushed(self) -> _Rows:
        """Flushed rows of the space that was opened first."""
        return self.kept.get(self._first, {})

    async def open(self, space: Space, beside: Space | None = None) -> bool:
        self._called("open")
        self._first = space.model
        wanted = [each.model for each in (space, beside) if each is not None]
        self._now = {model: dict(self.kept.setdefault(model, {})) for model in wanted}
        return not all(self.kept[model] for model in wanted)

    async def add_space(self, space: Space) -> bool:
        self._called("add_space")
        self._now.setdefault(space.model, {})
        return not self.kept.setdefault(space.model, {})

    async def remove_space(self, space: Space) -> None:
        self._called("remove_space")
        self._now.pop(space.model, None)
        self.kept.pop(space.model, None)
        self._first = next(iter(self._now))

    async def upsert(self, points: Sequence[Point], model: str = "") -> None:
        self._called("upsert")
        self._rows_of(model).update({(point.memory, point.fragment): point.vector for point in points})

    async def delete(self, memory: str, fragments: Sequence[str], model: str = "") -> None:
        self._called("delete")
        for fragment in fragments:
            self._rows_of(model).pop((memory, fragment), None)

    async def flush(self) -> None:
        self._called("flush")
        self.kept |= {model: dict(rows) for model, rows in self._now.items()}

    async def erase_deleted(self) -> bool:
        self._called("erase_deleted")
        self.erasures += 1
        return self.erases

    async def drop_all(self) -> None:
        self._called("drop_all")
        self.drops += 1
        await asyncio.sleep(self.drop_s)
        self.kept, self._now = {}, {}

    async def search(
        self, memory: str, vector: Vector, limit: int, model: str = "", timeout_s: float | None = None
    ) -> tuple[list[str], npt.NDArray[np.float32]]:
        self._called("search")
        rows = self._rows_of(model).items()
        found = {fragment: float(held @ vector) for (uid, fragment), held in rows if uid == memory}
        best = sorted(found, key=lambda fragment: -found[fragment])[:limit]
        return best, np.array([found[fragment] for fragment in best], np.float32)

    async def count(self, memory: str, model: str = "") -> int:
        return len(self.list_stored(memory, model))

    async def list_ids(self, memory: str, model: str = "") -> list[str]:
        self._called("list_ids")
        return sorted(self.list_stored(memory, model))

    def list_stored(self, memory: str, model: str = "") -> set[str]:
        """Flushed fragment ids of a memory."""
        return {fragment for uid, fragment in self.kept.get(model or self._first, {}) if uid == memory}

    def _rows_of(self, model: str) -> _Rows:
        if (model or self._first) not in self._now:
            raise IndexUnavailable(f"the index of {model} is not open")
        return self._now[model or self._first]

    async def is_healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass
