"""The ranking of DB-GPT's hybrid memory, for the `dbgpt` profile.

    score = alpha x 0.99 ^ (hours since last access) + beta x cosine + gamma x importance

over the best long-term candidates by cosine; all of short-term follows, in order, regardless of its scores. The
weights are DB-GPT's 1, 1 and 9 unless the query gives others (DB-GPT ignores those).
As in DB-GPT, and unlike in core/ranking.py, a read resets recency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

import numpy as np

from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.identity import fold_places
from memstream_server.core.lexical import Floats
from memstream_server.core.ranking import Considered, NearMiss, RankingQuery, Stage, stage_of_denied
from memstream_server.core.scores import Scored

FORMULA = "dbgpt/1"
DECAY_PER_HOUR = 0.01
_HOUR_US = 3_600_000_000.0


@dataclass(frozen=True, slots=True)
class DbgptWeights:
    """Weights of recency, closeness and importance; the defaults are for a hybrid memory."""

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 9.0


HYBRID_WEIGHTS = DbgptWeights()
LONG_TERM_WEIGHTS = DbgptWeights(gamma=1.0)
"""For a memory of kind LONG_TERM."""


@dataclass(frozen=True, slots=True)
class DbgptRanking:
    """`results` best first, then `appended`: short-term in the order given, without those in `results`."""

    results: tuple[Scored, ...]
    appended: tuple[Scored, ...]
    considered: Considered
    near_misses: tuple[NearMiss, ...] = ()
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids folded into a result, by the result's id."""


def rank_dbgpt(
    columns: Columns,
    slots: Slots,
    closeness: Floats,
    question: RankingQuery,
    weights: DbgptWeights,
    allowed: Mask,
    short_term: Sequence[int] = (),
    by_words: bool = False,
) -> DbgptRanking:
    """Rank the candidates at `slots` by `closeness` (their cosines; NaN counts as 0).

    `allowed`: the filter's mask. `by_words`: there is no query vector; closeness is the absolute lexical leg, and the
    part is named accordingly. min_relevance applies to closeness. `short_term`: slots in order; those not allowed are
    left out.
    """
    near = np.nan_to_num(closeness.astype(np.float64), nan=0.0)
    scored = [
        _score_slots(columns, int(slot), value, question.now_us, weights, by_words)
        for slot, value in zip(slots, near.tolist(), strict=True)
    ]
    scored.sort(key=lambda each: (-each.score, -each.slot))
    inside = [each for each in scored if allowed[each.slot]]
    enough = [each for each in inside if each.relevance >= question.min_relevance or question.min_relevance == 0]
    best, folded = _fold_scored(columns, enough, question)
    results = best[: question.limit]
    returned = {each.slot for each in results}
    values = dict(zip(slots.tolist(), near.tolist(), strict=True))
    appended = [
        _score_slots(columns, slot, values.get(slot, 0.0), question.now_us, weights, by_words)
        for slot in short_term
        if slot not in returned and allowed[slot]
    ]
    answered, more = _fold_scored(columns, [*results, *appended], question)
    ranked_ids = {each.id for each in results}
    results = [each for each in answered if each.id in ranked_ids]
    appended = [each for each in answered if each.id not in ranked_ids]
    returned = {each.slot for each in results}
    best_relevance = max((each.relevance for each in inside), default=0.0)
    double = {id_ for ids in (*folded.values(), *more.values()) for id_ in ids}
    left = [each for each in scored if each.slot not in returned][: question.near_misses]
    passed = {each.slot for each in enough}
    return DbgptRanking(
        tuple(results),
        tuple(appended),
        Considered(len(inside), best_relevance, best_relevance),
        tuple(
            NearMiss(
                each,
                Stage.FOLDED if each.id in double else _removal_stage(columns, each.slot, allowed, passed, question),
            )
            for each in left
        ),
        {
            one.id: tuple(dict.fromkeys((*folded.get(one.id, ()), *more.get(one.id, ()))))
            for one in answered
            if one.id in folded or one.id in more
        },
    )


def _fold_scored(
    columns: Columns, ranked: Sequence[Scored], question: RankingQuery
) -> tuple[list[Scored], dict[str, tuple[str, ...]]]:
    """The representatives, and the ids folded into each, by its id."""
    if not question.fold:
        return list(ranked), {}
    preferred = {place for place, each in enumerate(ranked) if each.id in question.preferred}
    places, folded = fold_places(columns.words[[each.slot for each in ranked]].tolist() if ranked else [], preferred)
    into = {ranked[place].id: tuple(ranked[other].id for other in others) for place, others in folded.items()}
    return [ranked[place] for place in places], into


def _score_slots(
    columns: Columns, slot: int, closeness: float, now_us: int, weights: DbgptWeights, by_words: bool
) -> Scored:
    hours = max(0.0, (now_us - int(columns.access_us[slot])) / _HOUR_US)
    values = (closeness, (1.0 - DECAY_PER_HOUR) ** hours, float(columns.importance[slot]))
    factors = (weights.beta, weights.alpha, weights.gamma)
    score = math.fsum(map(mul, values, factors))
    names = ("lexical" if by_words else "dense", "recency", "importance")
    known = None if by_words else closeness
    return Scored(slot, columns.ids[slot], score, closeness, known, names, values, factors)


def _removal_stage(columns: Columns, slot: int, allowed: Mask, passed: set[int], question: RankingQuery) -> Stage:
    if not allowed[slot]:
        return stage_of_denied(columns, slot, question.outdated)
    return Stage.LIMIT if slot in passed else Stage.MIN_RELEVANCE
