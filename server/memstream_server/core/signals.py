"""The values of some fragments on each leg, and what superseded fragments lend to their correction.

"Ann lives in Paris" matches "where does Ann live" better than its correction "Ann moved to Berlin" does. It is left out
of the answer, so without lending a statement about another person comes first.

Rule 1. Superseded fragments lend their match to the current end of their chain, only if they pass the filter, and only
to one that may be returned. With truth ALL nothing is lent: every state has a place of its own.
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
from memstream_server.core.lexical import Floats, Legs
from memstream_server.core.neighbours import NOBODY


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """Leg values of the fragments at `slots`: parallel arrays. NaN cosine: query or fragment has no vector."""

    slots: Slots
    cosines: Floats
    lexical: Floats
    context: Floats
    """The lexical legs on the absolute scale, [0, 1]."""
    following: Slots
    """Indices of the fragments that follow a question,"""
    asked: Floats
    """the lexical leg of each of these questions,"""
    asked_cosines: Floats
    """its cosine,"""
    asked_slots: Slots
    """and its slot."""
    context_share: Floats | None = None
    """How much of the context counts, of one entry if that is the same for all; None if it counts fully."""
    answered: Slots | None = None
    """Indices of the messages whose reply is among the fragments; None if there are no replies,"""
    replies: Slots | None = None
    """and the indices of these replies."""

    @staticmethod
    def of(columns: Columns, legs: Legs, cosines: Floats, slots: Slots, allowed: Mask | None = None) -> Signals:
        """The signals of `slots`, ascending. `cosines` by slot, of all fragments.

        allowed: only replies in it belong to their message, if that is in it; None: no fragment belongs to another.
        """
        words, around, dialogue = legs.alone.shares, legs.around.shares, legs.dialogue
        following, asked = legs.after_questions(slots, columns.asks)
        share = None if dialogue is None else dialogue.context[slots]
        answered = replies = None
        if dialogue is not None and allowed is not None:
            own = dialogue.replies[slots]
            answered = np.flatnonzero((own != NOBODY) & allowed[own] & allowed[slots])
            replies = np.searchsorted(slots, own[answered])
            known = replies < len(slots)
            known[known] = slots[replies[known]] == own[answered[known]]
            answered, replies = answered[known], replies[known]
        return Signals(
            slots,
            cosines[slots],
            words[slots],
            around[slots],
            following,
            words[asked],
            cosines[asked],
            asked.astype(np.int64),
            _shorten(share),
            answered if answered is not None and len(answered) else None,
            replies,
        )


def _shorten(share: Floats | None) -> Floats | None:
    """None if the context counts fully for all; a single entry if it counts the same for all."""
    if share is None or not len(share) or (low := share.min()) == 1:
        return None
    return share[:1] if low == share.max() else share


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
