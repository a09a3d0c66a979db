"""Scores as sums of parts: arrays of the parts of many fragments, and one fragment's score with its parts."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from operator import mul

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from memstream_server.core.columns import Columns, Slots
from memstream_server.core.lexical import Floats
from memstream_server.core.weights import Weights

_HOUR_US = 3_600_000_000.0
ANSWER_WEIGHT = 0.8
"""Weight of the reply in the score of the message that it answers."""
PARTS = ("recency", "dense", "lexical", "context", "reply", "speaker", "importance")
TIMED_PARTS = (*PARTS, "time")
"""The parts if the question has a phrase of time."""
SCORED_PER_PART = 256
"""Fragments whose scores are made between two pauses, about half a millisecond."""
CHAIN_PART = "chain"
"""A part if a superseded fragment lends its match to any of the fragments."""
ANSWER_PART = "answer"
"""The last part, if any of the fragments has a reply."""


@dataclass(frozen=True, slots=True)
class ScorePart:
    """One summand of a score: contribution = value x weight."""

    name: str
    value: float
    weight: float
    contribution: float


class Scored(Struct, frozen=True, gc=False):
    """A fragment with its score: parallel names, values and weights of the parts."""

    slot: int
    id: str
    score: float
    relevance: float
    cosine: float | None
    names: tuple[str, ...]
    values: tuple[float, ...]
    weights: tuple[float, ...]

    @property
    def parts(self) -> tuple[ScorePart, ...]:
        """The summands of the score; built on demand, because few recalls need them."""
        named = zip(self.names, self.values, self.weights, strict=True)
        return tuple(ScorePart(name, value, weight, value * weight) for name, value, weight in named)


@dataclass(frozen=True, slots=True, eq=False)
class Assessed:
    """The parts of the scores of the fragments at `slots`."""

    slots: Slots
    cosines: Floats
    values: npt.NDArray[np.float64]
    """(parts, fragments)"""
    weights: npt.NDArray[np.float64]
    """(parts, fragments), or (parts, 1) if all fragments share them."""
    scores: npt.NDArray[np.float64]
    """For ordering; only `scored` computes the correctly rounded sums."""
    relevance: npt.NDArray[np.float64]
    matches: npt.NDArray[np.float64]
    """Relevance without the speaker bonus and the time part, which say nothing about what was said; 1 for a fragment
    of the time if the question names nothing else."""
    names: tuple[str, ...] = PARTS
    answered: Slots | None = None
    """Indices of the messages that have a reply here, None if there is none,"""
    replies: Slots | None = None
    """and of these replies."""

    def best_first(self) -> Slots:
        """Indices into these arrays, by score, then newest."""
        return np.lexsort((-self.slots, -self.scores))

    def add_relevance(self, name: str, values: npt.NDArray[np.floating], weight: float, w: Weights) -> Assessed:
        """The same with one more summand of relevance, which beta weighs like the others."""
        return replace(
            self,
            values=np.vstack([self.values, values]),
            weights=np.vstack([self.weights, np.full(self.weights.shape[1], w.beta * weight)]),
            scores=self.scores + w.beta * weight * values,
            relevance=self.relevance + weight * values,
            names=(*self.names, name),
        )

    def add_answers(self, w: Weights, answered: Slots, replies: Slots) -> Assessed:
        """The same with the matches of replies in the scores of their messages."""
        gains, relevance = np.zeros(len(self.slots)), self.relevance.copy()
        gains[answered] = self.matches[replies]
        relevance[answered] = np.maximum(relevance[answered], relevance[replies])
        added = self.add_relevance(ANSWER_PART, gains, ANSWER_WEIGHT, w)
        return replace(added, relevance=relevance, answered=answered, replies=replies)

    def scored(self, places: Slots, ids: Sequence[str]) -> Generator[None, None, list[Scored]]:
        """The fragments at these indices, in that order. Pauses between parts; reads `ids` before the first pause."""
        found: list[Scored] = []
        named = [ids[slot] for slot in self.slots[places].tolist()]
        shared = self.weights.T.tolist() if self.weights.shape[1] == 1 else None
        for start in range(0, len(places), SCORED_PER_PART):
            if start:
                yield
            part = places[start : start + SCORED_PER_PART]
            slots, relevance, cosines = [each[part].tolist() for each in (self.slots, self.relevance, self.cosines)]
            values = self.values[:, part].T.tolist()
            weights = self.weights[:, part].T.tolist() if shared is None else shared * len(slots)
            found += [
                Scored(
                    slot,
                    id_,
                    math.fsum(map(mul, value, weight)),
                    relevant,
                    None if math.isnan(cosine) else cosine,
                    self.names,
                    tuple(value),
                    tuple(weight),
                )
                for slot, id_, relevant, cosine, value, weight in zip(
                    slots, named[start : start + SCORED_PER_PART], relevance, cosines, values, weights, strict=True
                )
            ]
        return found


def recency(columns: Columns, slots: Slots, now_us: int, decay_per_hour: float) -> npt.NDArray[np.float64]:
    """(1 - decay)^hours since the words of each fragment were observed last; 1 for future times."""
    hours = np.maximum(0.0, (now_us - columns.last_us[slots]) / _HOUR_US)
    return np.power(1.0 - decay_per_hour, hours)
