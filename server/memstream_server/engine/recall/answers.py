"""Builds the answer of a recall from its ranking and the fragments, within the budget of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec import structs

from memstream_server.core.budget import Item, fit
from memstream_server.core.filters import EVERYTHING, passes
from memstream_server.core.policy import Truth
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.retention import is_expired
from memstream_server.core.suspicions import KnownPairs
from memstream_server.core.twins import put_later_first
from memstream_server.core.values import Fragment, TruthStatus
from memstream_server.engine.memory.related import read_words
from memstream_server.engine.recall.rank_memory import Found, truth_of
from memstream_server.engine.recall.reranking import Ranked
from memstream_server.engine.requests import ChainLink, Query, RecallAnswer, Recollection

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.ports.models import Analyzer


def with_truth(answer: RecallAnswer, working: WorkingSet, now_us: int) -> RecallAnswer:
    """The answer with the status and chain of each recollection. Costs nothing in a memory without either."""
    columns, links = working.columns, working.links
    change_us = columns.next_validity_us(now_us)
    if not links and columns.is_current(now_us) is None:
        return structs.replace(answer, validity_change_us=change_us)

    def links_of(id_: str) -> tuple[ChainLink, ...]:
        ids = [each for each in links.chain(id_) if each in columns] if links.is_linked(id_) else []
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


def arrange_twins(
    working: WorkingSet, ranked: Ranked, folded: Mapping[str, Sequence[str]], analyzer: Analyzer
) -> tuple[Ranked, Mapping[str, str]]:
    """The results with the later one of twins first, and the id of the latest twin by that of an earlier one."""
    found = [fragment for _, fragment in ranked]
    scores = [scored.score for scored, _ in ranked]

    def last_observed(one: Fragment) -> tuple[int, int]:
        time_us, position = one.last_observed
        if one.id in folded:  # the same words
            times_us = working.columns.last_us[working.columns.slots(folded[one.id])]
            time_us = max(time_us, int(times_us.max(initial=time_us)))
        return time_us, position

    order, later = put_later_first(
        found,
        scores,
        last_observed,
        read_words(working.record, analyzer, working.words),
        working.suspicions.are_apart,
    )
    return [ranked[place] for place in order], {found[place].id: found[last].id for place, last in later.items()}


def _budget_item(fragment: Fragment) -> Item:
    return Item(fragment.id, fragment.content, fragment.token_count or None)


def build_answer(
    found: Found,
    ranked: Ranked,
    known: Mapping[str, Fragment],
    short_term: Sequence[Fragment],
    query: Query,
    suspicions: KnownPairs,
    later: Mapping[str, str],
) -> RecallAnswer:
    """The answer of a ranking. known: the fragments of its results and companions by id. later: by id of a result, the
    id of its latest twin."""
    beside = {
        id_: Recollection(known[reply.id], reply, suspicions=suspicions.of(reply.id))
        for id_, reply in found.companions.items()
        if reply.id in known
    }
    suspected = {scored.id: suspicions.of(scored.id) for scored, _ in ranked} if suspicions else {}
    recollections = [
        Recollection(
            fragment,
            scored,
            folded=found.folded.get(scored.id, ()),
            suspicions=suspected.get(scored.id, ()),
            later_id=later.get(scored.id, ""),
            companion=beside.get(scored.id),
        )
        for scored, fragment in ranked
    ]
    kept = _list_shown(recollections)
    return RecallAnswer(
        revision=found.revision,
        recollections=tuple(recollections),
        working_ids=tuple([one.id for one in short_term]),
        working=tuple([one for one in short_term if one.id not in kept]),
        eligible=found.eligible,
        considered=found.considered.candidates,
        best_relevance=found.considered.best_relevance,
        degraded=found.degraded,
        near_misses=found.near_misses[: query.near_misses],
        timings_s={},
        tokens=0,
        formula=found.formula,
        interpreted=found.interpreted,
    )


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
