"""Candidates of a query: the best slots of each leg."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memstream_server.core.columns import Mask
from memstream_server.core.lexical import Floats

Slots = npt.NDArray[np.int64]


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
