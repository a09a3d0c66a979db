"""Which vectors a ranking must read: where cosines are estimates, those of all candidates, and those that may be among
them.

A ranking of estimates collects in `Unread.wanted` the slots whose exact cosines it needs. The caller reads and resolves
them, and ranks again, until nothing is wanted: the result is that of exact cosines.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memstream_server.core.candidates import best, best_of
from memstream_server.core.columns import Mask, Slots
from memstream_server.core.dense import Cosines


class Unread:
    """Cosines by slot and the bounds on their errors, 0 where a cosine is exact. For rankings of one revision."""

    def __init__(self, cosines: Cosines, errors: Cosines) -> None:
        """The arrays are changed by `resolve`."""
        self.cosines = cosines
        self.errors = errors
        self.wanted: set[int] = set()
        """Slots whose vectors the ranking needs."""
        self._near: list[tuple[Mask, Slots]] = []
        """What the rankings so far found: the allowed slots, and those of them that can be among the best."""
        self._most = float(errors.max(initial=0.0))

    def resolve(self, exact: Mapping[int, float]) -> None:
        """Put in exact cosines by slot, except where a slot has become exact in the meantime."""
        known = [slot for slot in exact if self.errors[slot] > 0]
        self.cosines[known], self.errors[known] = [exact[slot] for slot in known], 0.0
        self.wanted = set()

    def want(self, *groups: Slots) -> None:
        """The ranking uses the cosines of these slots."""
        for slots in groups:
            self.wanted.update(slots[self.errors[slots] > 0].tolist())

    def best(self, cosines: Cosines, allowed: Mask, count: int) -> Slots:
        """As candidates.best of `self.cosines`; wants all slots that the bounds neither rule in nor rule out."""
        near = self._find_near(cosines, allowed, count)
        if len(near) > count:
            errors, place = self.errors[near], len(near) - count
            low, high = cosines[near] - errors, cosines[near] + errors
            in_any = np.partition(low, place)[place]
            in_none = np.partition(high, place - 1)[place - 1]  # a slot that is surely above it is among the best
            self.want(near[(high >= in_any) & (low <= in_none)])
        return best_of(cosines, near, count)

    def _find_near(self, cosines: Cosines, allowed: Mask, count: int) -> Slots:
        """All slots that can be among the best. The next ranking asks again: it takes no further pass over all."""
        for mask, near in self._near:
            if np.array_equal(mask, allowed) and not np.isnan(cosines[near]).any():
                return near
        near = best(cosines, allowed, count)
        if len(near) == count:
            least = cosines[near].min() - np.float32(2.001 * self._most)
            near = np.flatnonzero((cosines >= least) & allowed)
        self._near.append((allowed, near))
        return near
