"""Ranks the working set of a memory for a query: by the absolute formula, DB-GPT's, or in order of receipt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from memstream_server.core import ranking, ranking_dbgpt
from memstream_server.core.arrays import sort_distinct
from memstream_server.core.columns import Mask, Slots
from memstream_server.core.dense import Cosines, DenseMatrix, multiply_rows
from memstream_server.core.filters import EVERYTHING, Filter, TestedConditions, mask
from memstream_server.core.lexical import Legs
from memstream_server.core.policy import Policy, RankingRule, Truth
from memstream_server.core.ranking import NearMiss, RankingQuery, Unread, best, candidates
from memstream_server.core.scores import Scored, Weights
from memstream_server.core.signals import Signals, Superseded, find_borrowers
from memstream_server.core.suspicions import Suspicion
from memstream_server.core.time_phrases.recognition import TimePhrase
from memstream_server.core.values import Fragment, MemoryKind, Tier, Vector
from memstream_server.engine.requests import Evidence, Query
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.models import EmbeddingModel

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.ports.journal.rows import Terms


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A ranking of one revision."""

    revision: int
    eligible: int
    results: tuple[Scored, ...]
    considered: ranking.Considered
    near_misses: tuple[NearMiss, ...]
    folded: Mapping[str, tuple[str, ...]]
    formula: str
    companions: Mapping[str, Scored] = field(default_factory=dict)
    """The reply to a result, by the result's id."""
    limit: int | None = None
    """Size of the answer after reranking and twins; None: the results are final."""
    beta: float = 0.0
    """Weight of the reranker."""
    shared: frozenset[int] = frozenset()
    """Hashes of the words that the best result, or its companion, shares with the question,"""
    nearness: float = -1.0
    """and the greater cosine of the two; -1 if none is known."""
    interpreted: tuple[TimePhrase, ...] = ()
    """The phrases of time that the ranking considers."""
    suspicions: tuple[Suspicion, ...] = ()
    """The known pairs with a candidate, if the query asks for a receipt."""
    accesses: tuple[tuple[str, int], ...] = ()
    """(id, time of its last access) of the candidates, if the formula counts accesses and the query asks for a receipt.
    """

    @property
    def ids(self) -> list[str]:
        """The fragments of the results and of their companions."""
        return [one.id for one in (*self.results, *self.companions.values())]


_MORE_MAX = 1_000
"""Additional neighbours that the index is asked for at most, in place of superseded ones."""
_USUAL = Filter(tiers=(Tier.SHORT_TERM, Tier.LONG_TERM))
"""What a recall selects without a filter."""
Rank = Callable[[Cosines, Legs | None, Unread | None], Awaitable[Found]]


async def rank_in_ram(
    working: WorkingSet, dense: DenseMatrix, question: RankingQuery, journal: Journal, rank: Rank
) -> Found | None:
    """Rank a memory with vectors in RAM; None if it has outgrown RAM meanwhile.

    The scan of a large memory runs in a thread, so that only its caller waits for it. Vectors that are in RAM as int8
    copies are read from the journal where the ranking needs them.
    """
    vector = question.vector
    if vector is None or not dense.large:
        return await rank(no_cosines(len(dense)) if vector is None else dense.cosines(vector), None, None)
    exact = dict[str, float]()
    with dense.scan(vector) as scan:
        scanning = asyncio.ensure_future(run_in_thread(scan.compute))
        terms = question.terms, question.of_several
        revision, legs = working.record.revision, working.legs(*terms)
        await scanning
        unread: Unread | None = None
        while working.dense is dense:  # brings the search structures up to date: the scan covers what they had
            if working.record.revision != revision:
                revision, legs, unread = working.record.revision, working.legs(*terms), None
            if unread is None:
                cosines, errors = scan.estimate()
                if errors is None:
                    return await rank(cosines, legs, None)
                unread = Unread(cosines, errors)
            columns = working.columns
            unread.resolve({slot: exact[id_] for id_ in exact if (slot := columns.slot(id_)) is not None})
            found = await rank(unread.cosines, legs, unread)
            if not unread.wanted:
                return found
            ids = [columns.ids[slot] for slot in sorted(unread.wanted)]
            exact |= _exact_cosines(ids, await working.read_vectors(journal, ids), vector)
    return None


def _exact_cosines(ids: Sequence[str], packed: Mapping[str, bytes], query: Vector) -> dict[str, float]:
    """NaN for a fragment that has lost its vector."""
    exact = dict.fromkeys(ids, math.nan)
    if packed:
        vectors = np.frombuffer(b"".join(packed.values()), "<f4").reshape(len(packed), -1)
        exact |= zip(packed, multiply_rows(vectors, query).tolist(), strict=True)
    return exact


def no_cosines(count: int) -> Cosines:
    return np.full(count, np.nan, np.float32)


def limit_of(policy: Policy, query: Query) -> int:
    return policy.recall.limit if query.limit is None else query.limit


def weak_floor(policy: Policy, query: Query) -> float | None:
    """The floor of the best relevance: the query's, else the policy's; None: the words decide."""
    given = policy.recall.weak_below if query.weak_below is None else query.weak_below
    return 0.0 if given is None and policy.recall.ranking is RankingRule.DBGPT else given


def weights_of(policy: Policy, query: Query, embedding: EmbeddingModel) -> Weights:
    """The weights of the formula: from the query, else the policy, else the embedding model."""
    given, usual = policy.recall, _usual_weights(embedding.fitted)
    return replace(
        usual,
        alpha=given.alpha if query.alpha is None else query.alpha,
        beta=given.beta if query.beta is None else query.beta,
        gamma=given.gamma if query.gamma is None else query.gamma,
        decay_per_hour=given.decay_per_hour,
        dense=usual.dense if given.dense_weight is None else given.dense_weight,
        lexical=usual.lexical if given.lexical_weight is None else given.lexical_weight,
        context=usual.context if given.context_weight is None else given.context_weight,
        speaker_bonus=given.speaker_bonus,
    )


_usual_weights = lru_cache(8)(Weights.of_fitted)


def truth_of(policy: Policy, query: Query) -> Truth:
    """The query's, else the policy's."""
    return policy.recall.truth if query.truth is None else query.truth


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """What a query may return, by slot."""

    allowed: Mask
    outdated: Mask | None
    """Passes the filter, but is not current; None if there are none, or if the query asks for no near misses."""
    lending: Superseded | None
    """Passes the filter and lends its match; None if nothing is superseded, or if superseded ones are returned too."""


def find_masks(working: WorkingSet, query: Query, now_us: int, tested: TestedConditions | None = None) -> Masks:
    """tested: of the query's filter, at any earlier time."""
    passed = _filter_mask(working, query.filter, now_us, tested)
    columns = working.columns
    current = None if truth_of(working.record.policy, query) is Truth.ALL else columns.is_current(now_us)
    if current is None:
        return Masks(passed, None, None)
    superseded = columns.superseded
    return Masks(
        passed & current,
        passed & ~current if query.near_misses else None,
        None if superseded is None else Superseded(passed & superseded, working.links.newer),
    )


def add_lenders(working: WorkingSet, masks: Masks, question: RankingQuery, legs: Legs, ids: Sequence[str]) -> Slots:
    """Slots whose vectors lending needs in a memory beyond RAM: superseded fragments that may lend, by their words or
    because they are among the index's `ids`, and the fragments that they lend to.
    """
    lending, columns = masks.lending, working.columns
    if lending is None:
        return np.empty(0, np.int64)
    near = columns.slots(ids)
    near = near[lending.mask[near]]
    lenders = candidates(legs.alone.shares, legs.around.shares, near, lending.mask, question.per_leg)
    return np.concatenate(find_borrowers(columns, lenders, lending, masks.allowed))


def search_count(working: WorkingSet, query: Query, question: RankingQuery) -> int:
    """How many neighbours the index is asked for: more than a leg needs, because some may be filtered, forgotten,
    removed or superseded.
    """
    superseded = 0 if truth_of(working.record.policy, query) is Truth.ALL else working.links.superseded_count
    return question.per_leg * 4 + min(superseded, _MORE_MAX)


def _filter_mask(working: WorkingSet, chosen: Filter, now_us: int, tested: TestedConditions | None) -> Mask:
    """The filter's mask. Expiry and validity follow the server's clock; the query's `now` affects only recency."""
    recalls_sensory = working.record.policy.recall.sensory or working.record.kind is MemoryKind.SENSORY
    if not chosen.tiers and not recalls_sensory:
        chosen = _USUAL if chosen == EVERYTHING else replace(chosen, tiers=_USUAL.tiers)
    return mask(working.columns, chosen, now_us, working.record.policy.retention.ttl_s, tested)


def _rank_whole(
    working: WorkingSet,
    query: Query,
    question: RankingQuery,
    allowed: Mask,
    cosines: Cosines,
) -> Generator[None, None, Found]:
    """A sensory or FIFO memory answers with all its fragments in order; a query's limit keeps the latest."""
    revision, slots = working.record.revision, allowed.nonzero()[0]
    legs = working.legs(question.terms, question.of_several)
    signals = Signals.of(working.columns, legs, cosines, slots)
    everything = replace(question, limit=max(1, len(slots)), fold=False)
    weights = weights_of(working.record.policy, query, working.embedding.model)
    ranked = yield from ranking.rank_candidates(working.columns, signals, everything, weights, allowed)
    shared, nearness = _read_shared(legs, question, ranked)
    in_order = sorted(ranked.results, key=lambda scored: scored.slot)
    latest = in_order if query.limit is None else in_order[-query.limit :]
    return Found(
        revision,
        len(slots),
        tuple(latest),
        ranked.considered,
        ranked.near_misses,
        ranked.folded,
        ranking.FORMULA,
        shared=shared,
        nearness=nearness,
        suspicions=_read_suspicions(working, ranked.results) if query.receipt else (),
    )


def _rank_dbgpt(
    working: WorkingSet,
    query: Query,
    question: RankingQuery,
    allowed: Mask,
    cosines: Cosines,
    unread: Unread | None,
) -> Found:
    """DB-GPT's ranking: long-term by closeness, then all of short-term."""
    columns = working.columns
    by_words = question.vector is None
    closeness = working.lexical.bm25(question.terms).shares if by_words else cosines
    ranked_tier = columns.tier_is((Tier.LONG_TERM,)) if working.record.kind is MemoryKind.HYBRID else allowed
    find_best = best if unread is None else unread.best
    chosen = find_best(closeness, allowed & ranked_tier, question.per_leg)
    if unread is not None:
        unread.want(chosen)
    alone = working.record.kind is MemoryKind.LONG_TERM
    usual = ranking_dbgpt.LONG_TERM_WEIGHTS if alone else ranking_dbgpt.HYBRID_WEIGHTS
    weights = ranking_dbgpt.DbgptWeights(
        alpha=usual.alpha if query.alpha is None else query.alpha,
        beta=usual.beta if query.beta is None else query.beta,
        gamma=usual.gamma if query.gamma is None else query.gamma,
    )
    short_term = columns.slots([held.fragment.id for held in working.state.short_term]).tolist()
    scored = sort_distinct(chosen, np.array(short_term, np.int64))
    ranked = ranking_dbgpt.rank_dbgpt(
        columns, chosen, closeness[chosen], question, weights, allowed, short_term, by_words
    )
    return Found(
        working.record.revision,
        int(allowed.sum()),
        ranked.results + ranked.appended,
        ranked.considered,
        ranked.near_misses,
        ranked.folded,
        ranking_dbgpt.FORMULA,
        suspicions=_read_suspicions(working, ranked.results) if query.receipt else (),
        accesses=_read_accesses(working, scored) if query.receipt else (),
    )


def _read_shared(legs: Legs, question: RankingQuery, ranked: ranking.Ranking) -> tuple[frozenset[int], float]:
    """`Found.shared` and `Found.nearness`."""
    if not ranked.results:
        return frozenset(), -1.0
    best = ranked.results[0]
    beside = ranked.companions.get(best.id)
    shown = [best] if beside is None else [best, beside]
    cosines = [one.cosine for one in shown if one.cosine is not None]
    shared = question.terms[legs.terms_of([one.slot for one in shown])]
    return frozenset(shared.tolist()), max(cosines, default=-1.0)


def _read_suspicions(working: WorkingSet, results: Sequence[Scored]) -> tuple[Suspicion, ...]:
    """The known pairs with a result: suspicions are shown, and pairs kept apart are no twins."""
    held = working.suspicions
    return tuple(dict.fromkeys(pair for one in results for pair in held.all_of(one.id))) if held else ()


def _read_accesses(working: WorkingSet, slots: Slots) -> tuple[tuple[str, int], ...]:
    columns = working.columns
    return tuple((columns.ids[slot], int(columns.access_us[slot])) for slot in slots.tolist())


def rank_memory(
    working: WorkingSet,
    query: Query,
    question: RankingQuery,
    cosines: Cosines,
    now_us: int,
    wider: bool,
    legs: Legs | None = None,
    unread: Unread | None = None,
    tested: TestedConditions | None = None,
) -> Generator[None, None, Found]:
    """Rank the working set, with pauses as in core/ranking.py.

    cosines: by slot; NaN where unknown: without vectors in RAM only the candidates have one. now_us: the
    time for expiry. wider: the results are rearranged before they are cut to the limit. legs: the lexical legs, if
    already computed. unread: if some cosines are estimates; while it wants any, the result is not to be used.
    tested: see find_masks.
    """
    masks = find_masks(working, query, now_us, tested)
    allowed = masks.allowed
    if masks.outdated is not None or masks.lending is not None:
        question = replace(question, outdated=masks.outdated, superseded=masks.lending)
    policy, columns = working.record.policy, working.columns
    if working.record.kind in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM):
        return (yield from _rank_whole(working, query, question, allowed, cosines))
    if policy.recall.ranking is RankingRule.DBGPT:
        return _rank_dbgpt(working, query, question, allowed, cosines, unread)
    revision, legs = working.record.revision, legs or working.legs(question.terms, question.of_several)
    weights = weights_of(policy, query, working.embedding.model)
    if working.dense is not None:
        ranked = yield from ranking.rank(columns, legs, cosines, question, weights, allowed, unread)
    else:
        signals, lent = ranking.find_candidates(columns, legs, cosines, question, allowed)
        ranked = yield from ranking.rank_candidates(columns, signals, question, weights, allowed, lent)
    shared, nearness = _read_shared(legs, question, ranked)
    return Found(
        revision,
        int(allowed.sum()),
        ranked.results,
        ranked.considered,
        ranked.near_misses,
        ranked.folded,
        ranking.FORMULA,
        ranked.companions,
        limit_of(policy, query) if wider else None,
        weights.beta,
        shared=shared,
        nearness=nearness,
        suspicions=_read_suspicions(working, ranked.results) if query.receipt else (),
    )


def pin_times(query: Query, now_us: int) -> Query:
    """The query with one time for recency and expiry."""
    return structs.replace(
        query,
        now_us=now_us if query.now_us is None else query.now_us,
        expiry_us=now_us if query.expiry_us is None else query.expiry_us,
    )


def has_changed(found: Found, known: Mapping[str, Fragment]) -> bool:
    """Whether a result has left the memory or was changed since it was ranked: the answer is of no one revision."""
    return any(id_ not in known or known[id_].version > found.revision for id_ in found.ids)


def collect_evidence(working: WorkingSet, query: Query, found: Found, vector: Vector | None, terms: Terms) -> Evidence:
    """What was ranked with. `vector`: of the query, None if it had none; `terms`: of its words."""
    return Evidence(
        policy=working.record.policy,
        now_us=query.now_us or 0,
        expiry_us=query.expiry_us or 0,
        space=working.embedding.name,
        vector=vector,
        embedded=vector is not query.vector,
        terms=terms,
        suspicions=found.suspicions,
        accesses=found.accesses,
        indexed=working.dense is None and vector is not None,
    )
