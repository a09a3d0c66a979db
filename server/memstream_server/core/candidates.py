"""Candidates of a query: the best slots of each leg, and the vectors that are read for them.

Where cosines are estimates, a ranking must read the vectors of all candidates, and of those that may be among them. It
collects in `Unread.wanted` the slots whose exact cosines it needs. The caller reads and resolves them, and ranks again,
until nothing is wanted: the result is that of exact cosines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from memstream_server.core.arrays import sort_distinct
from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.dense import Cosines
from memstream_server.core.folding import find_crowded
from memstream_server.core.lexical import Floats


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
            # The last of them may be too high by `_most`, and another too low by as much; the rest is for rounding.
            least = cosines[near].min() - np.float32(2.001 * self._most)
            near = np.flatnonzero((cosines >= least) & allowed)
        self._near.append((allowed, near))
        return near


FindBest = Callable[[Floats, Mask, int], Slots]
"""`best`, or one that notes what it is uncertain of (`Unread`)."""


def best(values: Floats, allowed: Mask, count: int) -> Slots:
    """Slots of the `count` largest allowed values, never NaN; ties go to the newest."""
    return best_of(values, np.flatnonzero(allowed & ~np.isnan(values)), count)


def best_of(values: Floats, slots: Slots, count: int) -> Slots:
    """The same among `slots`, ascending."""
    if len(slots) <= count:
        return slots
    chosen = values[slots]
    edge = np.partition(chosen, len(chosen) - count)[len(chosen) - count]
    above = slots[chosen > edge]
    return np.concatenate([above, slots[chosen == edge][len(above) - count :]])


def candidates(lexical: Floats, context: Floats, dense: Slots, allowed: Mask, per_leg: int) -> Slots:
    """Slots, ascending: the best allowed of both lexical legs, and the allowed ones of `dense`.

    `dense` comes from `best(cosines, allowed, per_leg)`, or from an index search if vectors are not in RAM.
    """
    chosen = np.zeros(len(allowed), np.bool_)
    chosen[dense] = True
    chosen &= allowed
    for leg in (lexical, context):
        chosen[best_of(leg, np.flatnonzero(allowed & (leg > 0)), per_leg)] = True
    return np.flatnonzero(chosen)


def widen_candidates(
    columns: Columns,
    lexical: Floats,
    context: Floats,
    cosines: Floats,
    chosen: Slots,
    allowed: Mask,
    *,
    results_max: int,
    per_leg: int,
    find_best: FindBest = best,
) -> Slots:
    """The candidates `chosen`, with more added if fragments with the same words crowd a leg's list.

    Returns `chosen` unchanged if no two of them have the same words.
    """
    for _ in range(results_max):
        keys = columns.words[chosen].tolist()
        distinct = len(set(keys))
        if distinct == len(keys) or distinct >= per_leg:
            break
        repeated = find_crowded(keys)
        free = allowed.copy()
        free[chosen] = False
        for key in repeated:
            free &= columns.words != key
        more = candidates(lexical, context, find_best(cosines, free, per_leg), free, per_leg)
        if not len(more):
            break
        chosen = sort_distinct(chosen, more)
    return chosen
