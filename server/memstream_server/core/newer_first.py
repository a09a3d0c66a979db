"""The newer of two suspected fragments among the candidates, and before the older one in the order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.suspicions import arrange


@dataclass(frozen=True, slots=True)
class Suspected:
    """The open suspicions of a memory as ranking reads them."""

    newer_of: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ids of the newer fragments, by the id of the older one."""
    margin: float = 0.0
    """How far the newer of two may score below the older one and still come first."""
    fold: bool = False
    """Whether the older one is folded under the newer one."""


NOTHING_SUSPECTED = Suspected()


def add_newer(columns: Columns, chosen: Slots, suspected: Suspected, allowed: Mask) -> Slots:
    """The candidates, with the allowed newer fragments of those that may be outdated."""
    if not suspected.newer_of:
        return chosen
    newer = [id_ for slot in chosen.tolist() for id_ in suspected.newer_of.get(columns.ids[slot], ())]
    slots = columns.slots(newer)
    return np.union1d(chosen, slots[allowed[slots]]) if len(slots) else chosen


def put_newer_first(
    columns: Columns, slots: Slots, scores: npt.NDArray[np.float64], passed: Slots, suspected: Suspected
) -> tuple[Slots, dict[str, list[int]]]:
    """(the indices `passed` into `slots`, best first, rearranged; those folded under each, by its id).

    Returns `passed` itself if no suspicion changes it.
    """
    ids = [columns.ids[slot] for slot in slots[passed].tolist()] if suspected.newer_of else []
    if suspected.newer_of.keys().isdisjoint(ids):
        return passed, {}
    arranged = arrange(ids, scores[passed].tolist(), suspected.newer_of, suspected.margin, suspected.fold)
    if arranged.order == tuple(range(len(ids))):
        return passed, {}
    under = {ids[place]: [int(passed[other]) for other in others] for place, others in arranged.under.items()}
    return passed[list(arranged.order)], under
