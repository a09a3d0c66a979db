"""The values of some fragments on each leg."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
