"""Candidates of a query: the best slots of each leg."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.folding import find_crowded
from memstream_server.core.lexical import Floats

FindBest = Callable[[Floats, Mask, int], Slots]
"""`best`, or one that notes what it is uncertain of (unread.py)."""


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
        chosen = np.union1d(chosen, more)
    return chosen
