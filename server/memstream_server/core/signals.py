"""The values of some fragments on each leg."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memstream_server.core.columns import Columns, Slots
from memstream_server.core.lexical import Floats, Legs


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """Leg values of the fragments at `slots`: parallel arrays. NaN cosine: query or fragment has no vector."""

    slots: Slots
    cosines: Floats
    lexical: Floats
    context: Floats
    """The lexical legs on the absolute scale, [0, 1]."""
    replies: Slots
    """Indices of the fragments that follow a question,"""
    asked: Floats
    """the lexical leg of each of these questions,"""
    asked_cosines: Floats
    """its cosine,"""
    asked_slots: Slots
    """and its slot."""

    @staticmethod
    def of(columns: Columns, legs: Legs, cosines: Floats, slots: Slots) -> Signals:
        """The signals of `slots`. `cosines` by slot, of all fragments."""
        words, around = legs.alone.shares, legs.around.shares
        replies, asked = legs.replies(slots, columns.asks)
        return Signals(
            slots,
            cosines[slots],
            words[slots],
            around[slots],
            replies,
            words[asked],
            cosines[asked],
            asked.astype(np.int64),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lent:
    """What superseded fragments lend."""

    signals: Signals
    """Of the lenders."""
    borrowers: Slots
    """Parallel to them, the slots of the current ends of their chains."""
