"""Ranking: a sum of parts on an absolute scale; every part of a score is reported.

    relevance = dense + lexical + context + reply parts + speaker_bonus, the latter if the query names exactly the
                fragment's speaker, + time, if the query has a phrase of time
                + chain, if a superseded fragment lends its match
    score     = alpha x recency + beta x (relevance + answer) + gamma x importance
    recency   = (1 - decay_per_hour) ^ max(0, hours since the fragment's observation time)
    answer    = ANSWER_WEIGHT x the dense, lexical, context and reply parts of the reply to a message (dialogue.py)
    reply     = mean of the dense and lexical legs of the fragment before it in the session, if that ends in a question
                mark; the lexical leg alone if the cosine is unknown or the dense weight is 0

    time      = how near the fragment's observation time is to the windows of the phrases, in [0, 1]
    context   counts as much as dialogue.py says; the rest of its weight goes to the other two legs
    chain     = what a superseded fragment lends (signals.py): its dense, lexical, context and reply parts of relevance,
                so far as they exceed the fragment's own, and a share of the lesser of the two

The reply part's weight is the context leg's, times the fitted factor of core/fitted_weights.py.

Rule 1. Candidates are the union of each leg's best; every candidate is scored on every leg. Scoring a leg only for
its own candidates costs 4 points of recall.
Rule 2. Leg values are absolute (share of the attainable maximum, 0 to 1), never scaled over the candidates: a score
means the same with one candidate as with a thousand.
Rule 3. If the query or the fragment has no vector, the lexical legs take over the dense leg's weight in proportion,
so the score stays comparable with min_relevance and with other scores.
Rule 4. A score is the correctly rounded sum (math.fsum) of value x weight over its parts.
Rule 5. Ties are ordered newest first (the higher slot); a reload keeps that order.
Rule 6. The order is that of the scores. What changes it afterwards changes no score: reranking.py, twins.py.
Rule 7. A phrase of time adds candidates and a part, and removes nothing. Without one the time part does not exist, and
the ranking is the same to the last bit as if times were not interpreted.
Rule 8. Without superseded fragments, or with truth ALL, the chain part does not exist, and nothing is computed for it.
Rule 9. A reply has no place of its own if its message may be returned: it is the message's companion. The message's
relevance is then the greater one of the two, so it means the same for both, and min_relevance passes both or neither.
Rule 10. A ranking is a generator that pauses between parts of its results. It reads the memory before the first pause.
Rule 11. Where cosines are estimates, a ranking must read the vectors of all candidates, and of those that may be among
them. It collects in `Unread.wanted` the slots whose exact cosines it needs. The caller resolves them and ranks
again until nothing is wanted: the result is that of exact cosines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import TypeVar

import numpy as np

from memstream_server.core.arrays import sort_distinct
from memstream_server.core.columns import Columns, Mask, Slots
from memstream_server.core.dense import Cosines
from memstream_server.core.identity import find_crowded, fold_places
from memstream_server.core.lexical import Floats, Legs, WordStatistics
from memstream_server.core.postings import Hashes
from memstream_server.core.scores import (
    ANSWER_WEIGHT,
    CHAIN_PART,
    PARTS,
    Assessed,
    Scored,
    Weights,
    limit_context,
    mean_with_dense,
    recency,
    scale_cosines,
    share_out,
    without_dense,
)
from memstream_server.core.signals import Lent, Signals, Superseded, find_borrowers, lend_matches
from memstream_server.core.speakers import named_speaker
from memstream_server.core.time_phrases.calendar import Window, is_near, time_closeness
from memstream_server.core.values import Vector


class Unread:
    """Cosines by slot and the bounds on their errors, 0 where a cosine is exact. For rankings of one revision."""

    def __init__(self, cosines: Cosines, errors: Cosines) -> None:
        """The arrays are changed by `resolve`."""
        self.cosines = cosines
        self.errors = errors
        self.wanted: set[int] = set()
        """Slots whose vectors the ranking needs."""
        self._near: list[tuple[Mask, Slots]] = []
        """What the rankings so far found: the allowed slots, and those of them that can be among the best."""
        self._most = float(errors.max(initial=0.0))

    def resolve(self, exact: Mapping[int, float]) -> None:
        """Put in exact cosines by slot, except where a slot has become exact in the meantime."""
        known = [slot for slot in exact if self.errors[slot] > 0]
        self.cosines[known], self.errors[known] = [exact[slot] for slot in known], 0.0
        self.wanted = set()

    def want(self, *groups: Slots) -> None:
        """The ranking uses the cosines of these slots."""
        for slots in groups:
            self.wanted.update(slots[self.errors[slots] > 0].tolist())

    def best(self, cosines: Cosines, allowed: Mask, count: int) -> Slots:
        """As candidates.best of `self.cosines`; wants all slots that the bounds neither rule in nor rule out."""
        near = self._find_near(cosines, allowed, count)
        if len(near) > count:
            errors, place = self.errors[near], len(near) - count
            low, high = cosines[near] - errors, cosines[near] + errors
            in_any = np.partition(low, place)[place]
            in_none = np.partition(high, place - 1)[place - 1]  # a slot that is surely above it is among the best
            self.want(near[(high >= in_any) & (low <= in_none)])
        return best_of(cosines, near, count)

    def _find_near(self, cosines: Cosines, allowed: Mask, count: int) -> Slots:
        """All slots that can be among the best. The next ranking asks again: it takes no further pass over all."""
        for mask, near in self._near:
            if np.array_equal(mask, allowed) and not np.isnan(cosines[near]).any():
                return near
        near = best(cosines, allowed, count)
        if len(near) == count:
            # The last of them may be too high by `_most`, and another too low by as much; the rest is for rounding.
            least = cosines[near].min() - np.float32(2.001 * self._most)
            near = np.flatnonzero((cosines >= least) & allowed)
        self._near.append((allowed, near))
        return near


FindBest = Callable[[Floats, Mask, int], Slots]
"""`best`, or one that notes what it is uncertain of (`Unread`)."""


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


def widen_candidates(
    columns: Columns,
    lexical: Floats,
    context: Floats,
    cosines: Floats,
    chosen: Slots,
    allowed: Mask,
    *,
    results_max: int,
    per_leg: int,
    find_best: FindBest = best,
) -> Slots:
    """The candidates `chosen`, with more added if fragments with the same words crowd a leg's list.

    Returns `chosen` unchanged if no two of them have the same words.
    """
    for _ in range(results_max):
        keys = columns.words[chosen].tolist()
        distinct = len(set(keys))
        if distinct == len(keys) or distinct >= per_leg:
            break
        repeated = find_crowded(keys)
        free = allowed.copy()
        free[chosen] = False
        for key in repeated:
            free &= columns.words != key
        more = candidates(lexical, context, find_best(cosines, free, per_leg), free, per_leg)
        if not len(more):
            break
        chosen = sort_distinct(chosen, more)
    return chosen


FORMULA = "absolute/7"
"""Version of the formula, returned with an explanation; raised when equal inputs get other scores."""
_ROUNDING = 1e-6
"""Allowance for the rounding of scores where bounds on cosines decide."""


@dataclass(frozen=True, slots=True, eq=False)
class RankingQuery:
    """A query as ranking reads it. `terms` distinct; `vector` of unit length, None if no model answered."""

    text: str
    terms: Hashes
    vector: Vector | None
    now_us: int
    limit: int = 10
    per_leg: int = 50
    """Candidates per leg."""
    min_relevance: float = 0.0
    near_misses: int = 0
    """Number of near misses to report."""
    fold: bool = False
    """Whether to fold fragments with the same words and speaker."""
    preferred: frozenset[str] = frozenset()
    """Ids that represent their fold: those in a standing query's last answer."""
    outdated: Mask | None = None
    """Slots that pass the filter and are not allowed because they are not current; None if there are none."""
    superseded: Superseded | None = None
    """Superseded fragments that lend their match; None if none does."""
    windows: tuple[Window, ...] = ()
    """The windows of its phrases of time."""
    only_time: bool = False
    """Whether it names nothing else: a fragment of the time then matches it fully."""
    of_several: WordStatistics | None = None
    """Of a query over several memories: how often its words occur in all of them."""


@dataclass(frozen=True, slots=True)
class Considered:
    """Width of the search: candidates scored, and the best relevance among them (0 if none).

    best_match: the best relevance without the speaker bonus and the time part, which say nothing about what was said.
    """

    candidates: int = 0
    best_relevance: float = 0.0
    best_match: float = 0.0


class Stage(StrEnum):
    """The stage that removed a fragment from an answer."""

    FILTER = "filter"
    SUPERSEDED = "superseded"
    VALIDITY = "validity"  # its validity has not begun or has ended
    CANDIDATES = "candidates"  # not among the best of any leg
    MIN_RELEVANCE = "min_relevance"
    LIMIT = "limit"
    FOLDED = "folded"  # folded into a better fragment
    BUDGET = "budget"  # set by the caller for what core/budget.py removed
    OTHER = "other"  # one of a newer server that owns the memory


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A fragment that was not returned, and the first stage that removed it."""

    scored: Scored
    stage: Stage
    superseded_by: str = ""
    """Set by the caller for the stage SUPERSEDED."""
    memory: str = ""
    """Set by the caller in an answer of several memories: "namespace/name"."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Results best first, with what an explanation needs."""

    results: tuple[Scored, ...] = ()
    considered: Considered = Considered()
    near_misses: tuple[NearMiss, ...] = ()
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the candidates folded into a result, by the result's id."""
    companions: Mapping[str, Scored] = field(default_factory=dict)
    """The reply to a result, by the result's id."""


Rankings = Generator[None, None, Ranking]
"""A ranking with pauses."""
T = TypeVar("T")


def add_timely(
    columns: Columns, words: Floats, around: Floats, chosen: Slots, question: RankingQuery, allowed: Mask
) -> Slots:
    """The candidates `chosen` with those of the question's windows: first from inside, then whose words match best."""
    if not question.windows:
        return chosen
    slots = np.flatnonzero(allowed & is_near(columns.observe_us, question.windows, question.now_us))
    near = time_closeness(columns.observe_us[slots], question.windows, question.now_us)
    order = np.zeros(len(allowed), np.float32)
    order[slots] = 4 * (near >= 1) + near + words[slots] + around[slots]
    return sort_distinct(chosen, best_of(order, slots, question.per_leg))


def find_lent(
    columns: Columns, legs: Legs, cosines: Floats, question: RankingQuery, allowed: Mask, find_best: FindBest = best
) -> Lent | None:
    """What superseded fragments lend to allowed ones; None if there are none."""
    if question.superseded is None:
        return None
    mask, per_leg = question.superseded.mask, question.per_leg
    lenders = candidates(legs.alone.shares, legs.around.shares, find_best(cosines, mask, per_leg), mask, per_leg)
    lenders, borrowers = find_borrowers(columns, lenders, question.superseded, allowed)
    return Lent(Signals.of(columns, legs, cosines, lenders), borrowers) if len(lenders) else None


def rank_candidates(
    columns: Columns,
    signals: Signals,
    question: RankingQuery,
    weights: Weights,
    allowed: Mask,
    lent: Lent | None = None,
) -> Rankings:
    """Rank fragments with known signals; those not `allowed` can only be near misses.

    For a memory whose vectors are not in RAM: search the index, compute `candidates`, fetch their vectors, and pass
    the cosines.
    """
    assessed = assess_candidates(columns, signals, question, weights, lent)
    return (yield from _choose_results(columns, assessed, question, allowed, allowed))


def find_candidates(
    columns: Columns, legs: Legs, cosines: Floats, question: RankingQuery, allowed: Mask, find_best: FindBest = best
) -> tuple[Signals, Lent | None]:
    """The candidates, and what superseded fragments lend them."""
    words, around, per_leg, dialogue = legs.alone.shares, legs.around.shares, question.per_leg, legs.dialogue
    chosen = candidates(words, around, find_best(cosines, allowed, per_leg), allowed, per_leg)
    chosen = add_timely(columns, words, around, chosen, question, allowed)
    if question.fold:
        chosen = widen_candidates(
            columns,
            words,
            around,
            cosines,
            chosen,
            allowed,
            results_max=question.limit,
            per_leg=per_leg,
            find_best=find_best,
        )
    lent = find_lent(columns, legs, cosines, question, allowed, find_best)
    if lent is not None:
        chosen = sort_distinct(chosen, lent.borrowers)
    if dialogue is not None:
        chosen = dialogue.complete(chosen, allowed)
    return Signals.of(columns, legs, cosines, chosen, allowed), lent


def rank(
    columns: Columns,
    legs: Legs,
    cosines: Floats,
    question: RankingQuery,
    weights: Weights,
    allowed: Mask,
    unread: Unread | None = None,
) -> Rankings:
    """Rank a memory that is entirely in RAM. The result of an empty memory is empty.

    `legs`: the lexical legs of the question's terms. `cosines`: float32[n] by slot, NaN if query or fragment has no
    vector. `allowed`: from `filters.mask`. `unread`: if some cosines are estimates; while it wants any, the result is
    not to be used.
    """
    find_best = best if unread is None else unread.best
    signals, lent = find_candidates(columns, legs, cosines, question, allowed, find_best)
    if unread is not None:
        unread.want(signals.slots, signals.asked_slots)
        if lent is not None:
            unread.want(lent.signals.slots, lent.signals.asked_slots)
        if unread.wanted:
            return Ranking()
    considered = np.zeros(len(columns), np.bool_)
    considered[signals.slots] = True
    if question.near_misses:
        signals = Signals.of(columns, legs, cosines, np.flatnonzero(columns.alive), allowed)
    assessed = assess_candidates(columns, signals, question, weights, lent)
    if question.near_misses and unread is not None:
        _want_near_misses(signals, assessed, question, weights, unread)
        if unread.wanted:
            return Ranking()
    return (yield from _choose_results(columns, assessed, question, allowed, considered))


def _want_near_misses(signals: Signals, assessed: Assessed, question: RankingQuery, w: Weights, unread: Unread) -> None:
    """Want the vectors of all that can be among the results and near misses: bounds on cosines bound the scores."""
    count, weights = question.limit + question.near_misses, np.abs(assessed.weights)
    dense, reply = (np.broadcast_to(weights[PARTS.index(part)], len(signals.slots)) for part in ("dense", "reply"))
    errors = dense * unread.errors[signals.slots]
    errors[signals.following] += reply[signals.following] * unread.errors[signals.asked_slots] / 2
    if signals.answered is not None:
        errors[signals.answered] += ANSWER_WEIGHT * errors[signals.replies]
    errors = errors / max(w.cosine_high - w.cosine_low, 1e-6) + _ROUNDING
    low, high = assessed.scores - errors, assessed.scores + errors
    needed = high >= (np.partition(low, len(low) - count)[len(low) - count] if len(low) > count else -math.inf)
    if signals.answered is not None:
        needed[signals.replies] |= needed[signals.answered]
    unread.want(signals.slots[needed], signals.asked_slots[needed[signals.following]])


def assess_candidates(
    columns: Columns, signals: Signals, question: RankingQuery, w: Weights, lent: Lent | None = None
) -> Assessed:
    """The values and weights of every part of every score."""
    assessed = _assess_parts(columns, signals, question, w)
    if lent is not None:
        lenders = _assess_parts(columns, lent.signals, question, w)
        gains = lend_matches(signals.slots, assessed.matches, lent.borrowers, lenders.matches)
        if gains.any():
            assessed = assessed.add_relevance(CHAIN_PART, gains, 1.0, w)
            assessed = replace(assessed, matches=assessed.matches + gains)
    matches = assessed.matches
    if question.windows:
        near = time_closeness(columns.observe_us[signals.slots], question.windows, question.now_us)
        assessed = assessed.add_relevance("time", near, w.time, w)
        if question.only_time:
            matches = np.where(near >= 1, 1.0, matches)
    if signals.answered is not None and signals.replies is not None:
        assessed = assessed.add_answers(w, signals.answered, signals.replies)
    return assessed if matches is assessed.matches else replace(assessed, matches=matches)


def _assess_parts(columns: Columns, signals: Signals, question: RankingQuery, w: Weights) -> Assessed:
    """The PARTS of every score."""
    slots, unknown = signals.slots, np.isnan(signals.cosines)
    values = np.empty((len(PARTS), len(slots)))
    fresh, closeness, words, around, reply, theirs, important = values
    fresh[:] = recency(columns, slots, question.now_us, w.decay_per_hour)
    closeness[:], words[:], around[:] = scale_cosines(signals.cosines, w), signals.lexical, signals.context
    reply[:] = 0.0
    if len(signals.following):
        reply[signals.following] = mean_with_dense(signals.asked, signals.asked_cosines, w)
    speaker = named_speaker(question.text, columns.speakers.names)
    theirs[:] = 0.0 if speaker is None else columns.speaker[slots] == speaker
    important[:] = columns.importance[slots]
    legs = share_out(w, w.dense, w.lexical, w.context)[:, None]
    if unknown.any():
        closeness[unknown] = 0.0
        legs = np.where(unknown, without_dense(w)[:, None], legs)
    if signals.context_share is not None:
        legs = limit_context(legs, signals.context_share)
    weights = np.empty((len(PARTS), legs.shape[1]))
    weights[0], weights[1:6], weights[6] = w.alpha, w.beta * legs, w.gamma
    matches = (values[1:5] * legs[:4]).sum(axis=0)
    relevance = matches + w.speaker_bonus * theirs
    scores = (values * weights).sum(axis=0)
    return Assessed(slots, signals.cosines, values, weights, scores, relevance, matches)


_read_order = attrgetter("score", "slot")


def _choose_results(
    columns: Columns, assessed: Assessed, question: RankingQuery, allowed: Mask, considered: Mask
) -> Rankings:
    order = assessed.best_first()
    slots = assessed.slots
    inside = considered[slots] & allowed[slots]
    enough = inside & (assessed.relevance >= question.min_relevance)
    replies = _list_replies(assessed)
    is_reply = np.zeros(len(slots), np.bool_)
    is_reply[list(replies.values())] = True
    passed = order[(enough & ~is_reply)[order]]
    distinct, folded = _fold_slots(columns, slots[passed], question)
    kept = passed[distinct][: question.limit]
    found = assessed.relevance[inside]
    shown = {columns.ids[slots[place]]: replies[place] for place in kept.tolist() if place in replies}
    into = {columns.ids[slots[passed[place]]]: [passed[other] for other in others] for place, others in folded.items()}
    merged = {id_: tuple(columns.ids[slots[at]] for at in others) for id_, others in into.items()}
    places: Slots = np.empty(0, np.int64)
    stages: list[Stage] = []
    if question.near_misses:
        double = np.zeros(len(slots), np.bool_)
        double[[other for others in into.values() for other in others]] = True
        taken = np.zeros(len(slots), np.bool_)
        taken[[*kept, *shown.values()]] = True
        left = order[~taken[order]]
        places = left[: question.near_misses]
        of = _Stages(slots, allowed, considered, enough, double, columns, question.outdated).of
        stages = list(map(of, places.tolist()))
    companions = np.array(list(shown.values()), np.int64)
    scored = yield from assessed.scored(np.concatenate([kept, companions, places]), columns.ids)
    results, missed = scored[: len(kept)], scored[len(kept) + len(companions) :]
    results.sort(key=_read_order, reverse=True)
    return Ranking(
        tuple(results),
        Considered(len(found), float(found.max()), float(assessed.matches[inside].max()))
        if len(found)
        else Considered(),
        tuple(map(NearMiss, missed, stages)),
        {one.id: merged[one.id] for one in results if one.id in merged},
        dict(zip(shown, scored[len(kept) : len(kept) + len(companions)], strict=True)),
    )


def _list_replies(assessed: Assessed) -> dict[int, int]:
    """The index of the reply, by that of its message."""
    if assessed.answered is None or assessed.replies is None:
        return {}
    return dict(zip(assessed.answered.tolist(), assessed.replies.tolist(), strict=True))


def _fold_slots(columns: Columns, slots: Slots, question: RankingQuery) -> tuple[Slots, dict[int, list[int]]]:
    """Fold slots, best first: indices of the representatives, and of those folded into each."""
    keys: list[int] = columns.words[slots].tolist() if question.fold else []
    if len(set(keys)) == len(keys):
        return np.arange(len(slots)), {}
    preferred = {place for place, slot in enumerate(slots.tolist()) if columns.ids[slot] in question.preferred}
    places, folded = fold_places(keys, preferred)
    return np.array(places, np.int64), folded


@dataclass(frozen=True, slots=True, eq=False)
class _Stages:
    slots: Slots
    allowed: Mask
    considered: Mask
    enough: Mask
    double: Mask
    """Like `enough`, by index: folded into another."""
    columns: Columns
    outdated: Mask | None

    def of(self, place: int) -> Stage:
        """The stage that removed the fragment at an index."""
        slot = self.slots[place]
        if not self.allowed[slot]:
            return stage_of_denied(self.columns, int(slot), self.outdated)
        if not self.considered[slot]:
            return Stage.CANDIDATES
        if not self.enough[place]:
            return Stage.MIN_RELEVANCE
        return Stage.FOLDED if self.double[place] else Stage.LIMIT


def stage_of_denied(columns: Columns, slot: int, outdated: Mask | None) -> Stage:
    """The stage that removed a fragment that is not allowed."""
    if outdated is None or not outdated[slot]:
        return Stage.FILTER
    return Stage.SUPERSEDED if columns.is_superseded(slot) else Stage.VALIDITY
