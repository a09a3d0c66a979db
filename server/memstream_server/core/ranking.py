"""Ranking: three legs on an absolute scale, recency and importance, with every part of every score.

    relevance = dense + lexical + context parts, + speaker_bonus when the query names exactly the fragment's speaker
    score     = alpha x recency + beta x relevance + gamma x importance
    recency   = (1 - decay_per_hour) ^ max(0, hours since the fragment's own time)

Rule 1. Candidates are the union of each leg's best; every candidate is then scored on every leg. A leg that
counts only for its own list costs 4 points of recall.
Rule 2. Leg values are absolute (0 to 1 of what the query could attain), never scaled over the candidates: a
score means the same with one candidate or a thousand.
Rule 3. Where query or fragment has no vector, the lexical legs share the dense leg's weight in proportion, so
that such a score stays comparable with min_relevance and with the others.
Rule 4. A score is the correctly rounded sum (math.fsum) of its parts' contributions, value x weight each.
Rule 5. Equal scores go newest first (the higher slot), which a reload does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memstream_server.core.columns import Columns, Mask
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.lexical import Floats, LexicalIndex
from memstream_server.core.postings import Hashes
from memstream_server.core.speakers import named_speaker
from memstream_server.core.values import Vector

FORMULA = "absolute/1"
"""Version of this formula, given with an explanation; raised when the same inputs score otherwise."""
Slots = npt.NDArray[np.int64]
_HOUR_US = 3_600_000_000.0


@dataclass(frozen=True, slots=True)
class Weights:
    """The formula's tunables, from policy, embedding model and query. The three legs' weights are used as given."""

    alpha: float = 0.05
    beta: float = 1.0
    gamma: float = 0.1
    decay_per_hour: float = 0.01
    dense: float = 0.4
    lexical: float = 0.3
    context: float = 0.3
    speaker_bonus: float = 0.1
    cosine_low: float = 0.0
    cosine_high: float = 1.0
    """Cosines that map to 0 and to 1 of the dense leg; clipped outside."""


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A query as ranking sees it. `terms` distinct; `vector` of unit length, None when no model answered."""

    text: str
    terms: Hashes
    vector: Vector | None
    now_us: int
    limit: int = 10
    per_leg: int = 50
    """Candidates taken from each leg."""
    min_relevance: float = 0.0
    near_misses: int = 0
    """How many fragments that just missed to explain."""


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """What the legs say of the fragments at `slots`: parallel arrays. NaN cosine: query or fragment has no vector."""

    slots: Slots
    cosines: Floats
    lexical: Floats
    context: Floats
    """The lexical legs on the absolute scale, [0, 1]."""


@dataclass(frozen=True, slots=True)
class Part:
    """One term of a score: contribution = value x weight."""

    name: str
    value: float
    weight: float
    contribution: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A fragment with its score and, in `parts`, all that makes it up."""

    slot: int
    id: str
    score: float
    relevance: float
    cosine: float | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Considered:
    """How wide the search was: candidates scored, and the best relevance among them (0 when there were none)."""

    candidates: int = 0
    best_relevance: float = 0.0


class Stage(StrEnum):
    """What kept a fragment out of an answer."""

    FILTER = "filter"
    CANDIDATES = "candidates"  # in no leg's best
    MIN_RELEVANCE = "min_relevance"
    LIMIT = "limit"
    BUDGET = "budget"  # given by the caller for what core/budget.py removed


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A fragment that was not returned, and the first stage that removed it."""

    scored: Scored
    stage: Stage


@dataclass(frozen=True, slots=True)
class Ranking:
    """Results best first, and what happened on the way."""

    results: tuple[Scored, ...] = ()
    considered: Considered = Considered()
    near_misses: tuple[NearMiss, ...] = ()


PARTS = ("recency", "dense", "lexical", "context", "speaker", "importance")


@dataclass(frozen=True, slots=True, eq=False)
class _Assessed:
    slots: Slots
    cosines: Floats
    values: npt.NDArray[np.float64]
    """(fragments, parts)"""
    weights: npt.NDArray[np.float64]
    scores: npt.NDArray[np.float64]
    """To order by; exact to the last bits only in `scored`."""
    relevance: npt.NDArray[np.float64]

    def best_first(self) -> Slots:
        """Places in these arrays, by score, then newest."""
        return np.lexsort((-self.slots, -self.scores))

    def scored(self, place: int, ids: Sequence[str]) -> Scored:
        values, weights = self.values[place].tolist(), self.weights[place].tolist()
        parts = (Part(n, v, w, v * w) for n, v, w in zip(PARTS, values, weights, strict=True))
        slot, cosine = int(self.slots[place]), float(self.cosines[place])
        known = None if math.isnan(cosine) else cosine
        score = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
        return Scored(slot, ids[slot], score, float(self.relevance[place]), known, tuple(parts))


def recency(columns: Columns, slots: Slots, now_us: int, decay_per_hour: float) -> npt.NDArray[np.float64]:
    """(1 - decay)^hours since each fragment's own time; 1 for times to come."""
    hours = np.maximum(0.0, (now_us - columns.observe_us[slots]) / _HOUR_US)
    return np.power(1.0 - decay_per_hour, hours)


def best(values: Floats, allowed: Mask, count: int) -> Slots:
    """Slots of the `count` largest allowed values, NaN never among them; of equal ones the newest."""
    slots = np.flatnonzero(allowed & ~np.isnan(values))
    if len(slots) <= count:
        return slots
    chosen = values[slots]
    edge = np.partition(chosen, len(chosen) - count)[len(chosen) - count]
    above = slots[chosen > edge]
    return np.concatenate([above, slots[chosen == edge][len(above) - count :]])


def candidates(lexical: Floats, context: Floats, dense: Slots, allowed: Mask, per_leg: int) -> Slots:
    """Slots ascending: the best allowed of both lexical legs, and those of `dense` that are allowed.

    `dense` comes from `best(cosines, allowed, per_leg)`, or from an index's search where vectors are not in RAM.
    """
    legs = [best(leg, allowed & (leg > 0), per_leg) for leg in (lexical, context)]
    return np.unique(np.concatenate([*legs, dense[allowed[dense]]]))


def rank_candidates(columns: Columns, signals: Signals, question: Question, weights: Weights, allowed: Mask) -> Ranking:
    """Rank fragments whose signals are known; those not `allowed` can only be near misses.

    For a memory whose vectors are not in RAM: search the index, take `candidates`, fetch the vectors of all of
    them, and pass their cosines here.
    """
    return _choose(columns, _assess(columns, signals, question, weights), question, allowed, allowed)


def rank(
    columns: Columns, lexical: LexicalIndex, dense: DenseMatrix, question: Question, weights: Weights, allowed: Mask
) -> Ranking:
    """Rank a memory that is in RAM whole. `allowed` is `filters.mask`. An empty memory gives an empty answer."""
    words, around = lexical.bm25(question.terms).absolute(), lexical.bm25_context(question.terms).absolute()
    cosines = np.full(len(columns), np.nan, np.float32) if question.vector is None else dense.cosines(question.vector)
    chosen = candidates(words, around, best(cosines, allowed, question.per_leg), allowed, question.per_leg)
    considered = np.zeros(len(columns), np.bool_)
    considered[chosen] = True
    slots = np.flatnonzero(columns.alive) if question.near_misses else chosen
    signals = Signals(slots, cosines[slots], words[slots], around[slots])
    return _choose(columns, _assess(columns, signals, question, weights), question, allowed, considered)


def _assess(columns: Columns, signals: Signals, question: Question, w: Weights) -> _Assessed:
    slots, known = signals.slots, ~np.isnan(signals.cosines)
    span = max(w.cosine_high - w.cosine_low, 1e-6)
    closeness = np.clip((np.where(known, signals.cosines, w.cosine_low).astype(np.float64) - w.cosine_low) / span, 0, 1)
    speaker = named_speaker(question.text, columns.speakers.names)
    theirs = np.zeros(len(slots)) if speaker is None else columns.speaker[slots] == speaker
    fresh = recency(columns, slots, question.now_us, w.decay_per_hour)
    values = np.stack([fresh, closeness, signals.lexical, signals.context, theirs, columns.importance[slots]], axis=1)
    legs = _leg_weights(known, w)
    beta_legs = np.column_stack([w.beta * legs, np.full(len(slots), w.beta * w.speaker_bonus)])
    ends = np.full((len(slots), 1), w.alpha), np.full((len(slots), 1), w.gamma)
    weights = np.hstack([ends[0], beta_legs, ends[1]])
    relevance = (values[:, 1:4] * legs).sum(axis=1) + values[:, 4] * w.speaker_bonus
    return _Assessed(slots, signals.cosines, values, weights, (values * weights).sum(axis=1), relevance)


def _leg_weights(known: Mask, w: Weights) -> npt.NDArray[np.float64]:
    """(fragments, 3) weights of dense, lexical, context; without a cosine the lexical legs take over its weight."""
    both = w.lexical + w.context
    share = (both + w.dense) / both if both else 0.0
    without = np.array([0.0, w.lexical * share, w.context * share])
    return np.where(known[:, None], np.array([w.dense, w.lexical, w.context]), without)


def _choose(columns: Columns, assessed: _Assessed, question: Question, allowed: Mask, considered: Mask) -> Ranking:
    order = assessed.best_first()
    ids, slots = columns.ids, assessed.slots
    inside = considered[slots] & allowed[slots]
    enough = inside & (assessed.relevance >= question.min_relevance)
    kept = order[enough[order]]
    found = assessed.relevance[inside]
    missed: list[NearMiss] = []
    if question.near_misses:
        returned = set(kept[: question.limit].tolist())
        out = [int(place) for place in order if int(place) not in returned][: question.near_misses]
        missed = [NearMiss(assessed.scored(p, ids), _stage(p, slots, allowed, considered, enough)) for p in out]
    results = [assessed.scored(int(place), ids) for place in kept[: question.limit]]
    return Ranking(
        tuple(sorted(results, key=lambda each: (-each.score, -each.slot))),
        Considered(len(found), float(found.max()) if len(found) else 0.0),
        tuple(missed),
    )


def _stage(place: int, slots: Slots, allowed: Mask, considered: Mask, enough: Mask) -> Stage:
    slot = slots[place]
    if not allowed[slot]:
        return Stage.FILTER
    if not considered[slot]:
        return Stage.CANDIDATES
    return Stage.LIMIT if enough[place] else Stage.MIN_RELEVANCE
