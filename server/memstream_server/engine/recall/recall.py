"""Recall: what a memory knows about a query, ranked over its RAM, read once, and offered to short-term afterwards.

Rule 1. Ranking reads the working set between two awaits: the answer is of one revision.
Rule 2. The answer goes out before anything is reinforced.
Rule 3. A leg that is missing (model down, index down) is said in `degraded`; the others answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import structlog

from memstream_server.core import ranking, ranking_dbgpt
from memstream_server.core.budget import Fit, Item, fit
from memstream_server.core.columns import Mask
from memstream_server.core.dense import Cosines, DenseMatrix
from memstream_server.core.filters import Filter, mask, passes
from memstream_server.core.lexical import Legs, query_terms
from memstream_server.core.policy import Policy, RankingRule
from memstream_server.core.ranking import NearMiss, Question, Scored, Stage, Weights
from memstream_server.core.retention import is_expired
from memstream_server.core.values import Fragment, MemoryKind, Tier, Vector
from memstream_server.engine.errors import RevisionNotReached
from memstream_server.engine.recall.reranking import Ranked, Reranking
from memstream_server.engine.requests import Query, RecallAnswer, Recollection
from memstream_server.engine.runtime.fair_scheduler import Lane
from memstream_server.ports.index import IndexLost, IndexUnavailable
from memstream_server.ports.models import EmbeddingModel, ModelError

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.engine.runtime.dependencies import EngineModels, IndexHealth, Runtime, Storage
    from memstream_server.engine.runtime.embedding_spaces import Embedding

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A ranking, of one revision."""

    revision: int
    eligible: int
    results: tuple[Scored, ...]
    considered: ranking.Considered
    near_misses: tuple[NearMiss, ...]
    folded: Mapping[str, tuple[str, ...]]
    formula: str
    limit: int | None = None
    """How many are answered once they are reranked; None: they are as they shall be."""
    beta: float = 0.0
    degraded: str = ""
    """Why it was not reranked."""


class _Watch:
    """Seconds each step of a recall took."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.monotonic_s
        self._last = self._began = self._now()
        self.steps: dict[str, float] = {}

    def step(self, name: str) -> None:
        now = self._now()
        self.steps[name] = self.steps.get(name, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        return sum(self.steps.values())

    def left_s(self, query: Query) -> float | None:
        """Of the time that whoever asks will wait."""
        return None if query.time_s is None else max(0.0, query.time_s - (self._now() - self._began))


class Recaller:
    """Answers queries."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime, index_health: IndexHealth) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._index_health = index_health

    async def recall(self, actor: Actor, query: Query, vectors: dict[str, Vector] | None = None) -> RecallAnswer:
        """Answer one query. Cancellable at any time; nothing is changed before the answer.

        `vectors` are the question's by space, where it was asked before; a new one is put there.
        """
        vectors = {} if vectors is None else vectors
        watch = _Watch(self._runtime.clock)
        await _visible(actor, query)
        watch.step("wait")
        while True:
            space, namespace = actor.working.embedding, actor.working.record.namespace
            asked = None if space.model.instant else await self._query_vector(space, query, namespace, vectors)
            watch.step("embed")
            async with self._turn(actor.working):
                watch.step("wait")
                vector, degraded = asked or await self._query_vector(space, query, namespace, vectors)
                watch.step("embed")
                if actor.working.embedding is not space:
                    continue  # the memory is in another space by now, in which this vector means nothing
                found, more = await self._search(actor.working, query, vector, watch)
                if actor.working.embedding is not space:
                    continue
                known = await self._known(actor.working, found)
            break
        answer = await self._read(actor, query, found, known, watch)
        watch.step("read")
        degraded = "; ".join(filter(None, (degraded or more, answer.degraded, self._unrated(actor.working, query))))
        self._runtime.metrics.time_recall(watch.total(), bool(degraded))
        return replace(answer, degraded=degraded, timings_s=watch.steps)

    async def _query_vector(
        self, space: Embedding, query: Query, namespace: str, vectors: dict[str, Vector]
    ) -> tuple[Vector | None, str]:
        if query.vector is not None and len(query.vector) == space.model.dimension:
            return query.vector, ""
        if (known := vectors.get(space.name)) is not None:
            return known, ""
        try:
            async with asyncio.timeout(self._runtime.limits.embed_deadline_s):
                vectors[space.name] = (await space.embedder.embed([query.text], namespace))[0]
            return vectors[space.name], ""
        except (ModelError, TimeoutError) as error:
            text = error.summary if isinstance(error, ModelError) else "no answer in time"
            return None, f"no query vector, lexical legs only: {text}"

    async def _search(
        self, working: WorkingSet, query: Query, vector: Vector | None, watch: _Watch
    ) -> tuple[_Found, str]:
        question = self._question(working, query, vector)
        if working.dense is not None:
            cosines, legs = await _heard(working, working.dense, question)
        if working.dense is None:  # perhaps only now: it has outgrown RAM
            return await self._search_index(working, query, question, watch)
        found = self._rank(working, query, question, cosines, legs)
        watch.step("score")
        return found, ""

    async def _search_index(
        self, working: WorkingSet, query: Query, question: Question, watch: _Watch
    ) -> tuple[_Found, str]:
        """A memory too large for RAM: candidates from the index and the overlay, their vectors from the journal."""
        if question.vector is None:
            found = self._rank(working, query, question, _no_cosines(len(working.columns)))
            watch.step("score")
            return found, ""
        degraded = self._index_health.degraded
        ids: list[str] = []
        # Copied before the search: a row flushed during it may be missing from both the answer and the overlay.
        fresh = dict(working.fresh)
        try:
            # More than a leg's share: some of them may be filtered, forgotten or gone by now.
            ids, _ = await self._storage.index.search(
                working.record.uid, question.vector, question.per_leg * 4, working.embedding.name, watch.left_s(query)
            )
        except IndexUnavailable as error:
            if isinstance(error, IndexLost):
                self._index_health.lost()
            degraded = f"vector index unavailable, dense leg covers recent fragments only: {error}"
        allowed = _allowed(working, query.filter, self._runtime.clock.now_us())
        words, around = (leg.shares for leg in working.lexical.legs(question.terms))
        none = np.empty(0, np.int64)
        lexical = ranking.candidates(words, around, none, allowed, question.per_leg)
        if question.fold:  # their vectors are read as well
            unseen = _no_cosines(len(words))
            lexical = ranking.widen_candidates(working.columns, words, around, unseen, lexical, question, allowed)
        wanted = {working.columns.ids[slot] for slot in lexical} | {id_ for id_ in ids if id_ in working.columns}
        missing = [id_ for id_ in wanted if id_ not in fresh and id_ not in working.fresh]
        packed = await self._storage.journal.get_vectors(working.record.uid, working.embedding.name, missing)
        watch.step("search")
        vectors = {id_: np.frombuffer(raw, dtype="<f4") for id_, raw in packed.items()} | fresh | working.fresh
        cosines = _no_cosines(len(working.columns))
        held = [(slot, vector) for id_, vector in vectors.items() if (slot := working.columns.slot(id_)) is not None]
        if held:
            matrix = np.stack([vector for _, vector in held])
            cosines[[slot for slot, _ in held]] = matrix @ question.vector
        found = self._rank(working, query, question, cosines)
        watch.step("score")
        return found, degraded

    def _question(self, working: WorkingSet, query: Query, vector: Vector | None) -> Question:
        policy = working.record.policy
        terms = self._models.analyzer.terms(query.text, policy.language, working.record.namespace)
        given = policy.recall
        limit, reranking = _limit(policy, query), self._reranking(working)
        ranked = limit if reranking is None else max(limit, reranking.candidates)
        return Question(
            text=query.text,
            terms=query_terms(terms.hashes),
            vector=vector,
            now_us=self._runtime.clock.now_us() if query.now_us is None else query.now_us,
            limit=ranked,
            per_leg=max(given.candidates, ranked),
            min_relevance=given.min_relevance if query.min_relevance is None else query.min_relevance,
            near_misses=query.near_misses,
            fold=given.fold if query.fold is None else query.fold,
            preferred=query.preferred,
        )

    def _rank(
        self,
        working: WorkingSet,
        query: Query,
        question: Question,
        cosines: Cosines,
        legs: Legs | None = None,
    ) -> _Found:
        """Rank over RAM.

        cosines: by slot; if the vectors are not in RAM, those of the candidates, else NaN. legs: the lexical ones, if
        they are known.
        """
        allowed = _allowed(working, query.filter, self._runtime.clock.now_us())
        policy, columns = working.record.policy, working.columns
        if working.record.kind in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM):
            return _whole(working, query, question, allowed, cosines)
        if policy.recall.ranking is RankingRule.DBGPT:
            return _rank_dbgpt(working, query, question, allowed, cosines)
        legs = legs or working.lexical.legs(question.terms)
        weights = weights_of(policy, query, working.embedding.model)
        if working.dense is not None:
            ranked = ranking.rank(columns, legs, cosines, question, weights, allowed)
        else:
            words, around = (leg.shares for leg in legs)
            dense = ranking.best(cosines, allowed, question.per_leg)
            chosen = ranking.candidates(words, around, dense, allowed, question.per_leg)
            if question.fold:
                chosen = ranking.widen_candidates(columns, words, around, cosines, chosen, question, allowed)
            signals = ranking.Signals(chosen, cosines[chosen], words[chosen], around[chosen])
            ranked = ranking.rank_candidates(columns, signals, question, weights, allowed)
        return _Found(
            working.record.revision,
            int(allowed.sum()),
            ranked.results,
            ranked.considered,
            ranked.near_misses,
            ranked.folded,
            ranking.FORMULA,
            None if self._reranking(working) is None else _limit(policy, query),
            weights.beta,
        )

    def _reranking(self, working: WorkingSet) -> Reranking | None:
        """None without a reranker, for a memory that is answered in its own order, and with DB-GPT's ranking."""
        whole = working.record.kind in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM)
        absolute = working.record.policy.recall.ranking is RankingRule.ABSOLUTE
        return self._models.reranking if absolute and not whole else None

    def _unrated(self, working: WorkingSet, query: Query) -> str:
        """Why importances that the scores count may be defaults."""
        policy = working.record.policy
        gamma = policy.recall.gamma if query.gamma is None else query.gamma
        error = self._models.error_of("scorer") if policy.score_importance and gamma else ""
        return f"importance of what is new is the default, the scorer fails: {error}" if error else ""

    def _turn(self, working: WorkingSet) -> AbstractAsyncContextManager[None]:
        """One turn from the query vector to the fragments.

        No turn for a large memory, which awaits its scan, nor for one that is too large for RAM, which awaits the
        index.
        """
        if working.dense is None or working.dense.large:
            return contextlib.nullcontext()
        return self._runtime.turns.of(working.record.namespace, Lane.READ)

    async def _known(self, working: WorkingSet, found: _Found) -> dict[str, Fragment]:
        """The fragments that were ranked, by id, as far as they are still in the memory."""
        held = {one.fragment.id: one.fragment for one in (*working.state.sensory, *working.state.short_term)}
        return held | await self._contents(working, [one.id for one in found.results if one.id not in held])

    async def _contents(self, working: WorkingSet, ids: Sequence[str]) -> dict[str, Fragment]:
        """The fragments of those ids that are not forgotten, from RAM or from the journal."""
        known = working.contents.found(ids)
        missing = [id_ for id_ in ids if id_ not in known]
        if missing:
            left = working.contents.left
            read = await self._storage.journal.get_fragments(working.record.uid, missing)
            working.contents.read(read, left)
            known |= {fragment.id: fragment for fragment in read}
        return {id_: fragment for id_, fragment in known.items() if fragment.forget_time_us is None}

    async def _read(
        self, actor: Actor, query: Query, found: _Found, known: dict[str, Fragment], watch: _Watch
    ) -> RecallAnswer:
        """What is answered of what was ranked; what left the memory meanwhile is left out."""
        working = actor.working
        wants_working = query.working_memory and working.record.kind is not MemoryKind.LONG_TERM
        short_term = _working_memory(working, query, self._runtime.clock.now_us()) if wants_working else []
        ranked: Ranked = [(scored, known[scored.id]) for scored in found.results if scored.id in known]
        if self._models.reranking is not None and found.limit is not None:
            watch.step("read")
            ranked, formula, late = await self._models.reranking.rerank(query.text, ranked, found.formula, found.beta)
            watch.step("rerank")
            missed = tuple(NearMiss(scored, Stage.LIMIT) for scored, _ in ranked[found.limit :])
            found = replace(found, formula=formula, near_misses=missed + found.near_misses, degraded=late)
            ranked = ranked[: found.limit]
        fitted = fit(
            [_item(fragment) for _, fragment in ranked], [_item(one) for one in short_term], query.token_budget
        )
        return _answer(found, ranked, short_term, fitted, query)


async def _visible(actor: Actor, query: Query) -> None:
    """Waits until the memory is at the query's revision. Raises RevisionNotReached, saying how far behind it is."""
    if query.min_revision <= actor.revision:
        return
    try:
        async with asyncio.timeout(query.wait_s):
            await actor.revision_reached(query.min_revision)
    except TimeoutError:
        raise RevisionNotReached(
            f"the memory is at revision {actor.revision}, {query.min_revision - actor.revision} behind the "
            f"{query.min_revision} asked for",
            revision=actor.revision,
        ) from None


async def _heard(working: WorkingSet, dense: DenseMatrix, question: Question) -> tuple[Cosines, Legs | None]:
    """What the legs say of the fragments that are there when it returns; the lexical ones where there was time.

    The cosines of a large memory come from a thread, so that nobody waits for them but whoever asks.
    """
    vector = question.vector
    if vector is None or not dense.large:
        cosines = _no_cosines(len(dense)) if vector is None else dense.cosines(vector)
        return cosines, None
    with dense.scan(vector) as scan:
        scanning = asyncio.get_running_loop().run_in_executor(None, scan.compute)
        revision, legs = working.record.revision, working.lexical.legs(question.terms)
        await scanning
        working.show()  # the scan is of what was searched when it began
        return scan.cosines(), legs if working.record.revision == revision else None


def _no_cosines(count: int) -> Cosines:
    return np.full(count, np.nan, np.float32)


def _limit(policy: Policy, query: Query) -> int:
    return policy.recall.limit if query.limit is None else query.limit


def weights_of(policy: Policy, query: Query, embedding: EmbeddingModel) -> Weights:
    """The formula's weights: the query's, else the policy's, else the embedding model's."""
    given = policy.recall
    return Weights(
        alpha=given.alpha if query.alpha is None else query.alpha,
        beta=given.beta if query.beta is None else query.beta,
        gamma=given.gamma if query.gamma is None else query.gamma,
        decay_per_hour=given.decay_per_hour,
        dense=embedding.dense_weight if given.dense_weight is None else given.dense_weight,
        lexical=embedding.lexical_weight if given.lexical_weight is None else given.lexical_weight,
        context=embedding.context_weight if given.context_weight is None else given.context_weight,
        speaker_bonus=given.speaker_bonus,
        cosine_low=embedding.cosine_low,
        cosine_high=embedding.cosine_high,
    )


def _allowed(working: WorkingSet, chosen: Filter, now_us: int) -> Mask:
    """The filter's mask. Expiry is by the server's clock; a query's own `now` is for recency alone."""
    recalls_sensory = working.record.policy.recall.sensory or working.record.kind is MemoryKind.SENSORY
    if not chosen.tiers and not recalls_sensory:
        chosen = replace(chosen, tiers=(Tier.SHORT_TERM, Tier.LONG_TERM))
    return mask(working.columns, chosen, now_us, working.record.policy.retention.ttl_s)


def _whole(
    working: WorkingSet,
    query: Query,
    question: Question,
    allowed: Mask,
    cosines: Cosines,
) -> _Found:
    """A sensory or FIFO memory is read whole, in order; a query's own limit takes the latest of it."""
    slots = allowed.nonzero()[0]
    words, around = (leg.shares for leg in working.lexical.legs(question.terms))
    signals = ranking.Signals(slots, cosines[slots], words[slots], around[slots])
    everything = replace(question, limit=max(1, len(slots)), fold=False)
    weights = weights_of(working.record.policy, query, working.embedding.model)
    ranked = ranking.rank_candidates(working.columns, signals, everything, weights, allowed)
    in_order = sorted(ranked.results, key=lambda scored: scored.slot)
    latest = in_order if query.limit is None else in_order[-query.limit :]
    return _Found(
        working.record.revision,
        len(slots),
        tuple(latest),
        ranked.considered,
        ranked.near_misses,
        ranked.folded,
        ranking.FORMULA,
    )


def _rank_dbgpt(
    working: WorkingSet,
    query: Query,
    question: Question,
    allowed: Mask,
    cosines: Cosines,
) -> _Found:
    """DB-GPT's ranking of long-term by closeness, then all of short-term."""
    columns = working.columns
    by_words = question.vector is None
    closeness = working.lexical.bm25(question.terms).shares if by_words else cosines
    ranked_tier = columns.tier_is((Tier.LONG_TERM,)) if working.record.kind is MemoryKind.HYBRID else allowed
    chosen = ranking.best(closeness, allowed & ranked_tier, question.per_leg)
    alone = working.record.kind is MemoryKind.LONG_TERM
    usual = ranking_dbgpt.LONG_TERM_WEIGHTS if alone else ranking_dbgpt.HYBRID_WEIGHTS
    weights = ranking_dbgpt.DbgptWeights(
        alpha=usual.alpha if query.alpha is None else query.alpha,
        beta=usual.beta if query.beta is None else query.beta,
        gamma=usual.gamma if query.gamma is None else query.gamma,
    )
    short_term = columns.slots([held.fragment.id for held in working.state.short_term]).tolist()
    ranked = ranking_dbgpt.rank_dbgpt(
        columns, chosen, closeness[chosen], question, weights, allowed, short_term, by_words
    )
    return _Found(
        working.record.revision,
        int(allowed.sum()),
        ranked.results + ranked.appended,
        ranked.considered,
        ranked.near_misses,
        ranked.folded,
        ranking_dbgpt.FORMULA,
    )


def _working_memory(working: WorkingSet, query: Query, now_us: int) -> list[Fragment]:
    """Short-term in order, as far as the query's filter lets it pass: it binds the whole answer."""
    retention = working.record.policy.retention
    held = (one.fragment for one in working.state.short_term)
    return [one for one in held if passes(one, query.filter) and not is_expired(one, now_us, retention)]


def _item(fragment: Fragment) -> Item:
    return Item(fragment.id, fragment.content, fragment.token_count or None)


def _answer(
    found: _Found,
    ranked: Ranked,
    short_term: Sequence[Fragment],
    fitted: Fit,
    query: Query,
) -> RecallAnswer:
    kept = {item.id for item in fitted.ranked}
    recollections = [
        Recollection(fragment, scored, folded=found.folded.get(scored.id, ()))
        for scored, fragment in ranked
        if scored.id in kept
    ]
    if fitted.top_cut:
        first = recollections[0]
        cut = first.fragment.but(content=fitted.ranked[0].text, structured=None)
        recollections[0] = Recollection(cut, first.scored, truncated=True, folded=first.folded)
    working_ids = tuple(item.id for item in fitted.working)
    removed = set(fitted.removed)
    by_budget = tuple(NearMiss(scored, Stage.BUDGET) for scored, _ in ranked if scored.id in removed)
    return RecallAnswer(
        revision=found.revision,
        recollections=tuple(recollections),
        working_ids=working_ids,
        working=tuple(one for one in short_term if one.id in set(working_ids) and one.id not in kept),
        eligible=found.eligible,
        considered=found.considered.candidates,
        best_relevance=found.considered.best_relevance,
        degraded=found.degraded,
        near_misses=(by_budget + found.near_misses)[: query.near_misses],
        timings_s={},
        tokens=fitted.tokens if query.token_budget > 0 else 0,
        formula=found.formula,
    )
