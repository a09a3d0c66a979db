"""Makes one answer of what memories rank: merged, reranked, the later one of twins first, within limits and budget.

Rule 1. Recollections are in the order of score times weight of the scope; those of each memory are in its own order.
Rule 2. Of twins only those of one memory are compared, among the best of the whole answer.
Rule 3. The answer of one memory takes the same steps, and is the memory's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import structs

from memstream_server.core.budget import Item, fit
from memstream_server.core.filters import EVERYTHING, Unmatched, find_unmatched, passes
from memstream_server.core.policy import Truth
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.retention import is_expired
from memstream_server.core.scores import Scored
from memstream_server.core.twins import AMONG, Words, put_later_first
from memstream_server.core.values import Fragment, MemoryKind, TruthStatus
from memstream_server.engine.errors import EngineError
from memstream_server.engine.recall.rank_memory import Found, truth_of
from memstream_server.engine.requests import ChainLink, MemoryAnswer, Query, RecallAnswer, Recollection

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.memory.working_set import WorkingSet

NOTHING = RecallAnswer(0, (), (), (), 0, 0, 0.0, "", (), {}, 0, "")
"""An answer without anything."""
Ranked = list[tuple[int, Recollection]]
"""Recollections, best first, each with the number of the memory that holds it."""
_PARTS_AT_ONCE = 16
_MERGED_AT_ONCE = 256
"""Recollections between two pauses, a fifth of a millisecond."""


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """What decides which recollections of a memory are twins."""

    words_of: Callable[[Fragment], Words]
    are_apart: Callable[[str, str], bool]
    """Whether two ids are no twins by decision."""
    last_us: Mapping[str, int]
    """When the same words were said last, by the id of a recollection into which others are folded."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialAnswer:
    """What one memory ranks for an answer, or why it ranks nothing."""

    answer: RecallAnswer
    """Its recollections are all that may be in the answer."""
    short_term: Sequence[Fragment]
    memory: str = ""
    """"namespace/name" in an answer of several."""
    weight: float = 1.0
    limit: int | None = None
    """The most of its recollections in the answer; None: all, and no reranker or twins rearrange them."""
    beta: float = 0.0
    """Weight of the reranker; 0: it has no say."""
    twins: Twins | None = None
    """None: their order is not changed."""
    actor: Actor | None = None
    """Counts accesses; None: another process does, or nobody."""
    own: RecallAnswer | None = None
    """The answer of the memory alone, of which a receipt was kept."""
    error: EngineError | None = None

    @property
    def degraded(self) -> str:
        """What the answer lacks."""
        return self.answer.degraded if self.error is None else self.error.message


def with_truth(answer: RecallAnswer, working: WorkingSet, now_us: int) -> RecallAnswer:
    """The answer with the status and chain of each recollection. Costs nothing in a memory without either."""
    columns, links = working.columns, working.links
    change_us = columns.next_validity_us(now_us)
    if not links and columns.is_current(now_us) is None:
        return structs.replace(answer, validity_change_us=change_us)

    def links_of(id_: str) -> tuple[ChainLink, ...]:
        if not links.is_linked(id_):
            return ()
        ids = [each for each in links.chain(id_) if each in columns]
        slots = columns.slots(ids)
        return tuple(
            ChainLink(each, time_us, TruthStatus.SUPERSEDED if links.newer(each) else columns.status_at(slot, now_us))
            for each, slot, time_us in zip(ids, slots.tolist(), columns.observe_us[slots].tolist(), strict=True)
        )

    def with_status(one: Recollection) -> Recollection:
        beside = None if one.companion is None else with_status(one.companion)
        status, chain = one.fragment.status_at(now_us), links_of(one.fragment.id)
        return structs.replace(one, status=status, chain=chain, companion=beside)

    found = tuple(map(with_status, answer.recollections))
    missed = tuple(
        replace(miss, superseded_by=links.newer(miss.scored.id)) if miss.stage is Stage.SUPERSEDED else miss
        for miss in answer.near_misses
    )
    return structs.replace(answer, recollections=found, near_misses=missed, validity_change_us=change_us)


def list_working_memory(working: WorkingSet, query: Query, now_us: int) -> list[Fragment]:
    """Short-term in order, restricted by the query's filter, which applies to the whole answer."""
    retention, chosen = working.record.policy.retention, None if query.filter == EVERYTHING else query.filter
    current = truth_of(working.record.policy, query) is Truth.CURRENT
    return [
        one
        for one in [held.fragment for held in working.state.short_term]
        if not (current and one.status_at(now_us) is not TruthStatus.CURRENT)
        and (chosen is None or passes(one, chosen))
        and not is_expired(one, now_us, retention)
    ]


def merge_rankings(parts: Sequence[PartialAnswer]) -> Generator[None, None, Ranked]:
    """All recollections, best first; of a fragment that several memories hold, the first. Pauses between its steps."""
    runs: list[list[tuple[float, int, int, Recollection]]] = []
    for number, part in enumerate(parts):
        found = part.answer.recollections
        # A recollection goes before its own next one even with a smaller score: it takes the place of the greater.
        best = [*accumulate([one.scored.score for one in reversed(found)], max)][::-1]
        runs.append([(-score * part.weight, number, place, found[place]) for place, score in enumerate(best)])
        if number % _PARTS_AT_ONCE == _PARTS_AT_ONCE - 1:
            yield
    seen: dict[str, tuple[int, Recollection]] = {}
    for count, (_, number, _, one) in enumerate(merge(*runs)):
        seen.setdefault(one.fragment.id, (number, one))
        if count % _MERGED_AT_ONCE == _MERGED_AT_ONCE - 1:
            yield
    return list(seen.values())


def with_scores(part: PartialAnswer, scores: Mapping[str, Scored], formula: str) -> PartialAnswer:
    """The part with the reranker's scores: these by score, then newest, the others behind them."""
    found = part.answer.recollections
    again = [structs.replace(one, scored=scores[one.scored.id]) for one in found if one.scored.id in scores]
    if not again:
        return part
    again.sort(key=lambda one: (-one.scored.score, -one.scored.slot))
    rest = [one for one in found if one.scored.id not in scores]
    return replace(part, answer=structs.replace(part.answer, recollections=(*again, *rest), formula=formula))


def arrange_twins(parts: Sequence[PartialAnswer], ranked: Ranked) -> Ranked:
    """The recollections with the later one of twins first; an earlier one names it."""
    best = ranked[:AMONG]
    twins = {one.fragment.id: (number, parts[number].twins) for number, one in best}
    if all(known is None for _, known in twins.values()):
        return ranked

    def last_observed(one: Fragment) -> tuple[int, int]:
        time_us, position = one.last_observed
        _, known = twins[one.id]
        return time_us if known is None else max(time_us, known.last_us.get(one.id, time_us)), position

    def words_of(one: Fragment) -> Words:
        _, known = twins[one.id]
        return frozenset() if known is None else known.words_of(one)

    def are_apart(one: str, other: str) -> bool:
        number, known = twins[one]
        return number != twins[other][0] or known is None or known.are_apart(one, other)

    found = [one.fragment for _, one in best]
    scores = [one.scored.score for _, one in best]
    order, later = put_later_first(found, scores, last_observed, words_of, are_apart)
    for place, last in later.items():
        number, one = best[place]
        best[place] = number, structs.replace(one, later_id=found[last].id)
    return [*[best[place] for place in order], *ranked[AMONG:]]


def complete_answer(parts: Sequence[PartialAnswer], ranked: Ranked, query: Query, limit: int | None) -> RecallAnswer:
    """The answer: what of the ranking is within the limits and the budget of tokens, and what the memories say of it.

    limit: of several memories together; None: the only one's.
    """
    shown: list[Recollection] = []
    missed: list[NearMiss] = []
    counts = [0] * len(parts)
    for number, one in ranked:
        part = parts[number]
        if (limit is None or len(shown) < limit) and (part.limit is None or counts[number] < part.limit):
            counts[number] += 1
            shown.append(structs.replace(one, memory=part.memory) if part.memory else one)
        elif len(missed) < query.near_misses:
            missed.append(NearMiss(one.scored, Stage.LIMIT, memory=part.memory))
    several = limit is not None
    others = [
        replace(miss, memory=part.memory) if part.memory else miss for part in parts for miss in part.answer.near_misses
    ]
    if several:
        others.sort(key=lambda miss: -miss.scored.score)
    held: dict[str, Fragment] = {}
    for part in parts:
        for fragment in part.short_term:
            held.setdefault(fragment.id, fragment)
    short_term = list(held.values())
    kept = _list_shown(shown)
    answer = structs.replace(
        _sum_up(parts) if several else parts[0].answer,
        recollections=tuple(shown),
        working_ids=tuple([one.id for one in short_term]),
        working=tuple([one for one in short_term if one.id not in kept]),
        near_misses=tuple((missed + others)[: query.near_misses]),
    )
    if query.token_budget > 0:
        answer = fit_answer(answer, short_term, query)
    return structs.replace(answer, memories=tuple(_describe_parts(parts, answer))) if several else answer


def _sum_up(parts: Sequence[PartialAnswer]) -> RecallAnswer:
    """What several memories say together, without recollections."""
    answers = [part.answer for part in parts]
    answering = [part.answer for part in parts if part.error is None]
    return structs.replace(
        NOTHING,
        eligible=sum(each.eligible for each in answers),
        considered=sum(each.considered for each in answers),
        best_relevance=max((each.best_relevance for each in answers), default=0.0),
        degraded="; ".join(f"{part.memory}: {text}" for part in parts if (text := part.degraded)),
        timings_s=sum_timings(each.timings_s for each in answers),
        formula=", ".join(dict.fromkeys(filter(None, (each.formula for each in answers)))),
        weak=all(each.weak for each in answering),
        validity_change_us=min((at for each in answers if (at := each.validity_change_us) is not None), default=None),
        interpreted=next((each.interpreted for each in answers if each.interpreted), ()),
        unmatched=_find_unmatched(answering),
    )


def sum_timings(timings_s: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Seconds by step."""
    found: dict[str, float] = {}
    for each in timings_s:
        for step, took_s in each.items():
            found[step] = found.get(step, 0.0) + took_s
    return found


def _find_unmatched(answers: Sequence[RecallAnswer]) -> tuple[Unmatched, ...]:
    """What of the filter nothing in any memory can match."""
    first = answers[0].unmatched if answers else ()
    return tuple([one for one in first if all(one in each.unmatched for each in answers)])


def _describe_parts(parts: Sequence[PartialAnswer], answer: RecallAnswer) -> Iterable[MemoryAnswer]:
    counts, kept = Counter([one.memory for one in answer.recollections]), set(answer.working_ids)
    for part in parts:
        own = structs.replace(part.answer, degraded=part.degraded)
        working_ids = tuple([one.id for one in part.short_term if one.id in kept])
        yield MemoryAnswer(part.memory, own, counts[part.memory], working_ids)


def _budget_item(fragment: Fragment) -> Item:
    return Item(fragment.id, fragment.content, fragment.token_count or None)


def make_part(
    working: WorkingSet,
    query: Query,
    found: Found,
    known: Mapping[str, Fragment],
    now_us: int,
    words_of: Callable[[Fragment], Words] | None,
) -> PartialAnswer:
    """All that a ranking found. known: the fragments of its results and companions by id, without those that have left
    the memory since. now_us: the time for expiry. words_of: of statements that may be twins; None: none may."""
    suspicions, record = working.suspicions, working.record
    beside = {
        id_: Recollection(known[reply.id], reply, suspicions=suspicions.of(reply.id))
        for id_, reply in found.companions.items()
        if reply.id in known
    }
    doubted = {one.id: suspicions.of(one.id) for one in found.results} if suspicions else {}
    recollections = [
        Recollection(
            known[scored.id],
            scored,
            folded=found.folded.get(scored.id, ()),
            suspicions=doubted.get(scored.id, ()),
            companion=beside.get(scored.id),
        )
        for scored in found.results
        if scored.id in known
    ]
    answer = structs.replace(
        NOTHING,
        revision=found.revision,
        recollections=tuple(recollections),
        eligible=found.eligible,
        considered=found.considered.candidates,
        best_relevance=found.considered.best_relevance,
        near_misses=found.near_misses,
        formula=found.formula,
        interpreted=found.interpreted,
        unmatched=find_unmatched(working.columns, query.filter, now_us, record.policy.retention.ttl_s),
    )
    last_us = working.columns.last_us
    folded_us = {id_: int(last_us[working.columns.slots(ids)].max(initial=0)) for id_, ids in found.folded.items()}
    wants_working = query.working_memory and record.kind is not MemoryKind.LONG_TERM
    return PartialAnswer(
        with_truth(answer, working, now_us),
        list_working_memory(working, query, now_us) if wants_working else (),
        limit=found.limit,
        beta=found.beta,
        twins=None if words_of is None else Twins(words_of, suspicions.are_apart, folded_us),
    )


def list_fragments(one: Recollection) -> list[Fragment]:
    """The recollection's and its companion's."""
    return [one.fragment] if one.companion is None else [one.fragment, one.companion.fragment]


def _list_shown(recollections: Sequence[Recollection]) -> set[str]:
    """Ids of the recollections and their companions."""
    beside = [one.companion.fragment.id for one in recollections if one.companion is not None]
    return {*[one.fragment.id for one in recollections], *beside}


def fit_answer(answer: RecallAnswer, short_term: Sequence[Fragment], query: Query) -> RecallAnswer:
    """What of the answer fits into the query's budget of tokens."""
    hits = [_budget_item(one.fragment) for one in answer.recollections]
    beside = [one.companion for one in answer.recollections if one.companion is not None]
    replies = [_budget_item(one.fragment) for one in beside]
    fitted = fit(hits, [_budget_item(one) for one in short_term], query.token_budget, replies)
    ranked, removed = {item.id for item in fitted.ranked}, set(fitted.removed)
    recollections = [
        one
        if one.companion is None or one.companion.fragment.id in fitted.companions
        else structs.replace(one, companion=None)
        for one in answer.recollections
        if one.fragment.id in ranked
    ]
    kept = _list_shown(recollections)
    if fitted.top_cut:
        first = recollections[0]
        cut = first.fragment.but(content=fitted.ranked[0].text, structured=None)
        recollections[0] = structs.replace(first, fragment=cut, truncated=True)
    working_ids = tuple(item.id for item in fitted.working)
    by_budget = tuple(
        NearMiss(one.scored, Stage.BUDGET) for one in (*answer.recollections, *beside) if one.scored.id in removed
    )
    return structs.replace(
        answer,
        recollections=tuple(recollections),
        working_ids=working_ids,
        working=tuple(one for one in short_term if one.id in set(working_ids) and one.id not in kept),
        near_misses=(by_budget + answer.near_misses)[: query.near_misses],
        tokens=fitted.tokens,
    )
