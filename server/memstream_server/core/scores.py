"""Weights, and scores as sums of weighted parts: of many fragments in arrays, and of one with its parts."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from operator import mul

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from memstream_server.core.columns import Columns, Slots
from memstream_server.core.fitted_weights import MODEL, FittedWeights
from memstream_server.core.lexical import Floats


@dataclass(frozen=True, slots=True)
class Weights:
    """The formula's tunables, from policy, embedding model and query. Leg weights are not normalised."""

    alpha: float = 0.005
    beta: float = 1.0
    gamma: float = 0.1
    decay_per_hour: float = 0.01
    dense: float = MODEL.dense
    lexical: float = MODEL.lexical
    context: float = MODEL.context
    reply: float = MODEL.reply
    """Weight of the reply part, as a multiple of the context weight."""
    speaker_bonus: float = 0.1
    time: float = MODEL.time
    cosine_low: float = 0.0
    cosine_high: float = 1.0
    """Cosines that map to 0 and 1 on the dense leg; clipped outside."""

    @classmethod
    def of_fitted(cls, fitted: FittedWeights) -> Weights:
        """The formula with the fitted values, each in the field of its name, and the other defaults."""
        return cls(**{name: getattr(fitted, name) for name in FittedWeights.__slots__ if name in cls.__slots__})


def scale_cosines(cosines: Floats, w: Weights) -> Floats:
    """The dense leg, [0, 1]; NaN where the cosine is."""
    scaled: Floats = (cosines - w.cosine_low) / np.float32(max(w.cosine_high - w.cosine_low, 1e-6))
    np.minimum(np.maximum(scaled, 0.0, out=scaled), 1.0, out=scaled)
    return scaled


def mean_with_dense(shares: Floats, cosines: Floats, w: Weights) -> Floats:
    """The mean of the lexical and dense legs; the lexical leg alone where the cosine is unknown or has no weight."""
    if not w.dense:
        return shares
    means: Floats = (shares + scale_cosines(cosines, w)) / np.float32(2)
    unknown = np.isnan(means)
    return np.where(unknown, shares, means) if unknown.any() else means


def share_out(w: Weights, dense: float, lexical: float, context: float) -> npt.NDArray[np.float64]:
    """Weights of the parts of relevance, in the order of PARTS, from the weights of the three legs."""
    return np.array([dense, lexical, context, context * w.reply, w.speaker_bonus])


def limit_context(legs: npt.NDArray[np.float64], context_share: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Weights per fragment, (5, n): of the context only a share counts, the other two legs take the rest in proportion.

    legs: as from `share_out`, (5, 1) or (5, n).
    """
    dense, lexical, context, reply, bonus = legs
    own = dense + lexical
    closeness = dense / np.where(own > 0, own, 1)
    freed = (1 - context_share) * context
    found = np.empty((len(legs), max(len(context_share), legs.shape[1])))
    found[0], found[1] = dense + freed * closeness, lexical + freed * (1 - closeness)
    found[2], found[3], found[4] = context - freed, context_share * reply, bonus
    return found


def without_dense(w: Weights) -> npt.NDArray[np.float64]:
    """The same without a cosine: the lexical legs take over the dense weight in proportion."""
    both = w.lexical + w.context
    # Divide first: (dense + lexical + context) / (lexical + context) overflows for tiny lexical weights.
    words, around = (w.lexical / both, w.context / both) if both else (0.0, 0.0)
    return share_out(w, 0.0, words * (both + w.dense), around * (both + w.dense))


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
