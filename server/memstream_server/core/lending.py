"""Superseded fragments lend their match to the current end of their chain: a correction answers the questions that the
corrected words match.

"Ann lives in Paris" matches "where does Ann live" better than its correction "Ann moved to Berlin" does. It is left out
of the answer, so without lending a statement about another person comes first.

Rule 1. Only fragments that pass the filter lend, and only to one that may be returned. With truth ALL nothing is lent:
every state has a place of its own.
Rule 2. The lenders are the best superseded fragments of each leg, at most as many as a leg has candidates.
Rule 3. A fragment borrows from its best lender: what that matches better than it does itself, and BOTH_SHARE of the
lesser of the two matches, because a question that matches both states is more probably about their subject. No other
part of the score changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.signals import Signals

BOTH_SHARE = 0.2
"""Share of the lesser of the two matches. Figures of 0 to 1 are in docs/decisions.md."""
Matches = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Superseded:
    """The superseded fragments of a memory as ranking reads them."""

    mask: Mask
    """Slots that are superseded and pass the filter."""
    newer: Callable[[str], str]
    """From a fragment's id to that of the fragment that supersedes it; empty if none does."""


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """What superseded fragments lend."""

    signals: Signals
    """Of the lenders."""
    borrowers: Slots
    """Parallel to them, the slots of the current ends of their chains."""


def find_borrowers(columns: Columns, lenders: Slots, superseded: Superseded, allowed: Mask) -> tuple[Slots, Slots]:
    """(the lenders whose chain has an allowed current end, parallel to them the slots of these ends)."""
    ends: dict[str, str] = {}
    pairs: list[tuple[int, int]] = []
    for lender in lenders.tolist():
        # Members of one chain share its end: each link is followed once, however many of a chain lend.
        passed, at = [], columns.ids[lender]
        while at not in ends and (further := superseded.newer(at)):
            passed.append(at)
            at = further
        end = ends.get(at, at)
        ends |= dict.fromkeys(passed, end)
        slot = columns.slot(end)
        if slot is not None and allowed[slot]:
            pairs.append((lender, slot))
    found = np.array(pairs, np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def lend_matches(slots: Slots, matches: Matches, borrowers: Slots, lent: Matches) -> Matches:
    """What the fragments at `slots`, which are distinct, borrow; 0 for one that is no borrower.

    matches: parallel to `slots`. borrowers, lent: parallel; the matches of the lenders, and whom they lend to.
    """
    best = np.full(len(slots), -np.inf)
    order = np.argsort(slots)
    places = np.searchsorted(slots, borrowers, sorter=order)
    known = places < len(slots)  # an end that is no candidate borrows nothing
    places = order[places[known]]
    here = slots[places] == borrowers[known]
    np.maximum.at(best, places[here], lent[known][here])
    borrowed = np.maximum(0.0, best - matches) + BOTH_SHARE * np.minimum(best, matches)
    return np.where(np.isneginf(best), 0.0, borrowed)
