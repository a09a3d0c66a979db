"""Recall: ranks the working set for a query and reads the fragments of the answer.

Rule 1. Ranking reads the working set between two awaits, so an answer shows one revision.
Rule 2. The answer is sent before its fragments are reinforced.
Rule 3. If a leg is missing (model down, index down), the others answer, and `degraded` says so.
Rule 4. A recall with a receipt has one time for everything and one revision, and notes the values used (`Evidence`).
Rule 5. A recall of one memory and of several takes the same two steps: `rank` for each memory, then `complete` for all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import structlog
from msgspec import structs

from memstream_server.core import ranking
from memstream_server.core.arrays import finish, sort_distinct
from memstream_server.core.dense import Cosines, multiply_rows
from memstream_server.core.filters import EVERYTHING, TestedConditions, search_metadata
from memstream_server.core.lexical import Legs, WordStatistics, query_terms
from memstream_server.core.policy import AUTO_LANGUAGE, RankingRule
from memstream_server.core.ranking import RankingQuery, Unread, candidates, widen_candidates
from memstream_server.core.speakers import list_named
from memstream_server.core.time_phrases.recognition import TimePhrase, asks_only_time, find_times, has_time_words
from memstream_server.core.twins import AMONG, Words
from memstream_server.core.values import Fragment, MemoryKind, Vector
from memstream_server.engine.errors import RevisionNotReached
from memstream_server.engine.memory.related import read_words
from memstream_server.engine.recall.answers import (
    PartialAnswer,
    arrange_twins,
    complete_answer,
    make_part,
    merge_rankings,
    sum_timings,
    with_scores,
)
from memstream_server.engine.recall.past import PastMemory
from memstream_server.engine.recall.rank_memory import (
    Found,
    add_lenders,
    collect_evidence,
    find_masks,
    has_changed,
    limit_of,
    no_cosines,
    pin_times,
    rank_in_ram,
    rank_memory,
    search_count,
    weak_floor,
)
from memstream_server.engine.recall.reranking import VERSION, Reranking
from memstream_server.engine.requests import Query, RecallAnswer, Recollection
from memstream_server.engine.runtime.turns import pause_if_due, run_in_slices
from memstream_server.ports.index import IndexLost, IndexUnavailable
from memstream_server.ports.models import ModelError

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.clock import Clock
    from memstream_server.engine.runtime.dependencies import EngineModels, IndexHealth, Runtime, Storage
    from memstream_server.ports.journal.rows import Terms


log = structlog.get_logger(__name__)

RANKINGS_MAX = 10
"""Rankings of one recall with a receipt, if its results change meanwhile."""


@dataclass(slots=True, eq=False)
class Shared:
    """What the rankings of one query share, over several memories or one after another."""

    vectors: dict[str, Vector] = field(default_factory=dict)
    """The query's, by embedding space."""
    terms: dict[str, Terms] = field(default_factory=dict)
    """Of the query's words, by language."""
    names: dict[tuple[str, ...], Terms] = field(default_factory=dict)
    """Of its names, by language and the speakers that it names."""
    times: dict[tuple[str, int], tuple[TimePhrase, ...]] = field(default_factory=dict)
    """The phrases of time in the query, by language and time."""
    now_us: int = 0
    """The time of all rankings, unless the query has one; 0: not yet known."""


class _Stopwatch:
    """Measures the seconds of each step of a recall."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.monotonic_s
        self._last = self._began = self._now()
        self.steps: dict[str, float] = {}

    def record_step(self, name: str) -> None:
        now = self._now()
        self.steps[name] = self.steps.get(name, 0.0) + now - self._last
        self._last = now

    def left_s(self, query: Query) -> float | None:
        """Rest of the caller's timeout; None without one."""
        return None if query.time_s is None else max(0.0, query.time_s - (self._now() - self._began))


class Recaller:
    """Answers queries."""

    def __init__(self, storage: Storage, models: EngineModels, runtime: Runtime, index_health: IndexHealth) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._index_health = index_health

    async def recall(self, actor: Actor | PastMemory, query: Query) -> RecallAnswer:
        """Answer one query. Cancellable at any time; changes nothing before the answer."""
        return await self.complete([await self.rank(actor, query)], query)

    async def rank(self, actor: Actor | PastMemory, query: Query, shared: Shared | None = None) -> PartialAnswer:
        """What a memory says to a query, for `complete`."""
        shared = Shared() if shared is None else shared
        watch = _Stopwatch(self._runtime.clock)
        if not isinstance(actor, PastMemory):
            await wait_until_visible(actor, query)
        watch.record_step("wait")
        if query.receipt:
            query = pin_times(query, self._runtime.clock.now_us())
        rankings = 0
        while True:
            rankings += 1
            space, namespace = actor.working.embedding, actor.working.record.namespace
            asked = None if space.model.instant else await self._query_vector(space, query, namespace, shared)
            watch.record_step("embed")
            watch.record_step("wait")
            vector, degraded = asked or await self._query_vector(space, query, namespace, shared)
            watch.record_step("embed")
            if actor.working.embedding is not space:
                continue  # the memory has switched to another space, in which this vector is meaningless
            found, more = await self._search_memory(actor.working, query, vector, shared, watch)
            if actor.working.embedding is not space:
                continue
            await pause_if_due()
            known = await self._read_ranked(actor.working, found)
            await pause_if_due()
            if not query.receipt or not has_changed(found, known) or rankings == RANKINGS_MAX:
                break  # a receipt's answer is that of one revision
        words_of = self._find_words(actor.working, query, found)
        part = make_part(actor.working, query, found, known, self._expiry_us(query), words_of)
        watch.record_step("read")
        lacks = degraded or more, self._unrated_reason(actor.working, query)
        answer = structs.replace(
            part.answer,
            degraded="; ".join(filter(None, (*lacks, self._storage.journal.write_problem))),
            timings_s=watch.steps,
            weak=self._is_weak(actor.working, query, found, shared),
        )
        if query.receipt:
            terms = self._read_terms(actor.working, query, shared)
            evidence = collect_evidence(actor.working, query, found, vector, terms)
            answer = structs.replace(answer, evidence=evidence)
        return replace(part, answer=answer)

    async def complete(self, parts: Sequence[PartialAnswer], query: Query, limit: int | None = None) -> RecallAnswer:
        """The answer of these memories: merged, reranked, the later one of twins first, within limits and budget.

        query: what is asked of all together. limit: of all together; None: there is one memory, which has its own.
        """
        if limit is None and parts[0].own is not None:
            return parts[0].own
        watch = _Stopwatch(self._runtime.clock)
        ranked, late = await run_in_slices(merge_rankings(parts)), ""
        if self._models.reranking is not None:
            parts, late = await self._rerank(self._models.reranking, parts, ranked, query)
            ranked = await run_in_slices(merge_rankings(parts))
            watch.record_step("rerank")
        answer = complete_answer(parts, arrange_twins(parts, ranked), query, limit)
        watch.record_step("read")
        timings_s = sum_timings((answer.timings_s, watch.steps))
        degraded = "; ".join(filter(None, (answer.degraded, late)))
        self._runtime.metrics.count_recall(sum(timings_s.values()), bool(degraded))
        return structs.replace(answer, timings_s=timings_s, degraded=degraded)

    async def _rerank(
        self,
        reranking: Reranking,
        parts: Sequence[PartialAnswer],
        ranked: Sequence[tuple[int, Recollection]],
        query: Query,
    ) -> tuple[Sequence[PartialAnswer], str]:
        """The parts with the reranker's scores for the best of the ranking, and why there are none."""
        reranked = [
            (one, part.beta) for number, one in ranked if (part := parts[number]).limit is not None and part.beta
        ]
        scores, late = await reranking.rerank(query.text, reranked[: reranking.candidates])
        return [with_scores(part, scores, f"{part.answer.formula}+{VERSION}") for part in parts], late

    async def count_words(self, actor: Actor, query: Query, shared: Shared) -> WordStatistics:
        """How often the query's words occur in the memory, at its min_revision or later. Raises RevisionNotReached."""
        await wait_until_visible(actor, query)
        return actor.working.count_words(query_terms(self._read_terms(actor.working, query, shared).hashes))

    def _read_terms(self, working: WorkingSet, query: Query, shared: Shared) -> Terms:
        language = working.record.policy.language
        if (terms := shared.terms.get(language)) is None:
            terms = self._models.analyzer.question_terms(query.text, language, working.record.namespace)
            shared.terms[language] = terms
        return terms

    def _is_weak(self, working: WorkingSet, query: Query, found: Found, shared: Shared) -> bool:
        """Whether the best result and its companion share no word with the question other than names, and are not
        related to it by a known model either; or whether the best relevance is below the floor of query or policy.
        """
        record, columns = working.record, working.columns
        floor = weak_floor(record.policy, query)
        if floor is not None:
            return found.considered.best_match < floor
        related_min = working.embedding.model.fitted.related_min
        if related_min is not None and found.nearness >= related_min:
            return False
        if not found.shared:
            best = found.results[0] if found.results else None
            timely = best is not None and ("time", 1.0) in zip(best.names, best.values, strict=True)
            return not (timely and asks_only_time(query.text, found.interpreted))
        named = [name for name in list_named(query.text, columns.speakers.names) if columns.speaks(name)]
        key = record.policy.language, *named
        if (names := shared.names.get(key)) is None:
            names = self._models.analyzer.name_terms(query.text, named, record.policy.language, record.namespace)
            shared.names[key] = names
        return found.shared <= frozenset(query_terms(names.hashes).tolist())

    async def _query_vector(
        self, space: Embedding, query: Query, namespace: str, shared: Shared
    ) -> tuple[Vector | None, str]:
        if query.vector is not None and len(query.vector) == space.model.dimension:
            return query.vector, ""
        if query.unembedded:
            return None, query.unembedded
        if (known := shared.vectors.get(space.name)) is not None:
            return known, ""
        try:
            embedding = space.embedder.embed([query.text], namespace)
            if space.model.instant:
                rows = await embedding
            else:
                async with asyncio.timeout(self._runtime.limits.embed_deadline_s):
                    rows = await embedding
            shared.vectors[space.name] = rows[0]
            return rows[0], ""
        except (ModelError, TimeoutError) as error:
            text = error.summary if isinstance(error, ModelError) else "no answer in time"
            return None, f"no query vector, lexical legs only: {text}"

    async def _search_memory(
        self, working: WorkingSet, query: Query, vector: Vector | None, shared: Shared, watch: _Stopwatch
    ) -> tuple[Found, str]:
        shared.now_us = shared.now_us or self._runtime.clock.now_us()
        now_us = shared.now_us if query.now_us is None else query.now_us
        times = self._find_times(working, query, now_us, shared)
        terms = self._read_terms(working, query, shared)
        question = self._build_question(working, query, vector, now_us, times, terms)
        tested: TestedConditions = {}
        if query.filter != EVERYTHING:
            tested = await run_in_slices(search_metadata(working.columns, query.filter))
        found = None
        if working.dense is not None:
            rank = partial(self._rank, working, query, question, tested)
            found = await rank_in_ram(working, working.dense, question, self._storage.journal, rank)
        if found is None:
            found, degraded = await self._search_index(working, query, question, tested, watch)
            return replace(found, interpreted=times), degraded
        watch.record_step("score")
        return replace(found, interpreted=times) if times else found, ""

    async def _search_index(
        self, working: WorkingSet, query: Query, question: RankingQuery, tested: TestedConditions, watch: _Stopwatch
    ) -> tuple[Found, str]:
        """Search a memory that is too large for RAM: candidates from index and overlay, their vectors from the
        journal.
        """
        if question.vector is None:
            found = await self._rank(working, query, question, tested, no_cosines(len(working.columns)))
            watch.record_step("score")
            return found, ""
        degraded = self._index_health.degraded
        ids: list[str] = []
        # Copied before the search: a row that is flushed meanwhile may be missing in both the result and the overlay.
        fresh = dict(working.fresh)
        try:
            ids, _ = await self._storage.index.search(
                working.record.uid,
                question.vector,
                search_count(working, query, question),
                working.embedding.name,
                watch.left_s(query),
            )
        except IndexUnavailable as error:
            if isinstance(error, IndexLost):
                self._index_health.report_lost()
            degraded = f"vector index unavailable, dense leg covers recent fragments only: {error}"
        masks = find_masks(working, query, self._expiry_us(query), tested)
        allowed = masks.allowed
        legs = working.legs(question.terms, question.of_several)
        words, around = legs.alone.shares, legs.around.shares
        none = np.empty(0, np.int64)
        lexical = candidates(words, around, none, allowed, question.per_leg)
        lexical = ranking.add_timely(working.columns, words, around, lexical, question, allowed)
        if question.fold:  # folding needs their vectors too
            unseen = no_cosines(len(words))
            lexical = widen_candidates(
                working.columns,
                words,
                around,
                unseen,
                lexical,
                allowed,
                results_max=question.limit,
                per_leg=question.per_leg,
            )
        if legs.dialogue is not None:
            lexical = legs.dialogue.complete(sort_distinct(lexical, working.columns.slots([*ids, *fresh])), allowed)
        lexical = np.concatenate([lexical, add_lenders(working, masks, question, legs, [*ids, *fresh])])
        wanted = {working.columns.ids[slot] for slot in lexical} | {id_ for id_ in ids if id_ in working.columns}
        known = fresh.keys() | working.fresh.keys() | working.vectorless
        missing = [id_ for id_ in wanted if id_ not in known]
        packed = await self._storage.journal.get_vectors(working.record.uid, working.embedding.name, missing)
        watch.record_step("search")
        vectors = {id_: np.frombuffer(raw, dtype="<f4") for id_, raw in packed.items()} | fresh | working.fresh
        cosines = no_cosines(len(working.columns))
        held = [(slot, vector) for id_, vector in vectors.items() if (slot := working.columns.slot(id_)) is not None]
        if held:
            matrix = np.stack([vector for _, vector in held])
            cosines[[slot for slot, _ in held]] = multiply_rows(matrix, question.vector)
        found = await self._rank(working, query, question, tested, cosines)
        watch.record_step("score")
        return found, degraded

    def _find_times(self, working: WorkingSet, query: Query, now_us: int, shared: Shared) -> tuple[TimePhrase, ...]:
        """The phrases of time in the query, relative to `now_us`; none with DB-GPT's ranking, which has no such part.

        A standing query is interpreted again with each ranking: "today" is the day of the ranking, unless it has a
        `now` of its own.
        """
        policy = working.record.policy
        if not query.interpret_time or policy.recall.ranking is RankingRule.DBGPT:
            return ()
        language, key = policy.language, (policy.language, now_us)
        if (times := shared.times.get(key)) is None:
            if language != AUTO_LANGUAGE:
                times = find_times(query.text, language, now_us, query.zone)
            elif has_time_words(query.text):
                times = find_times(query.text, self._models.analyzer.language_of(query.text), now_us, query.zone)
            else:
                times = ()
            shared.times[key] = times
        return times

    def _build_question(
        self,
        working: WorkingSet,
        query: Query,
        vector: Vector | None,
        now_us: int,
        times: tuple[TimePhrase, ...],
        terms: Terms,
    ) -> RankingQuery:
        policy = working.record.policy
        given = policy.recall
        reranking = self._find_reranking(working)
        twins = AMONG if _orders_twins(working) else 0
        ranked = max(limit_of(policy, query), twins, 0 if reranking is None else reranking.candidates)
        return RankingQuery(
            text=query.text,
            terms=query_terms(terms.hashes),
            vector=vector,
            now_us=now_us,
            limit=ranked,
            per_leg=max(given.candidates, ranked),
            min_relevance=given.min_relevance if query.min_relevance is None else query.min_relevance,
            near_misses=query.near_misses,
            fold=given.fold if query.fold is None else query.fold,
            preferred=query.preferred,
            windows=tuple(each.window for each in times),
            only_time=asks_only_time(query.text, times),
            of_several=next((each for each in query.words if each.terms == terms.hashes), None),
        )

    async def _rank(
        self,
        working: WorkingSet,
        query: Query,
        question: RankingQuery,
        tested: TestedConditions,
        cosines: Cosines,
        legs: Legs | None = None,
        unread: Unread | None = None,
    ) -> Found:
        wider = _orders_twins(working) or self._find_reranking(working) is not None
        parts = rank_memory(working, query, question, cosines, self._expiry_us(query), wider, legs, unread, tested)
        return finish(parts) if query.receipt else await run_in_slices(parts)  # a receipt is of one revision

    def _expiry_us(self, query: Query) -> int:
        """The time that expiry counts at."""
        return self._runtime.clock.now_us() if query.expiry_us is None else query.expiry_us

    def _find_reranking(self, working: WorkingSet) -> Reranking | None:
        """None without a reranker, for a memory that answers in order of receipt, and with DB-GPT's ranking."""
        return self._models.reranking if _orders_by_score(working) else None

    def _find_words(self, working: WorkingSet, query: Query, found: Found) -> Callable[[Fragment], Words] | None:
        """Reads the words of statements that may be twins; None if their order does not change."""
        if not _orders_twins(working) or _asks_about_the_past(found.interpreted, query, self._runtime.clock):
            return None
        return read_words(working.record, self._models.analyzer, working.words)

    def _unrated_reason(self, working: WorkingSet, query: Query) -> str:
        """Why importances in the scores may be defaults; empty if they are not."""
        policy = working.record.policy
        gamma = policy.recall.gamma if query.gamma is None else query.gamma
        error = self._models.error_of("scorer") if policy.score_importance and gamma else ""
        return f"new fragments have the default importance, the scorer fails: {error}" if error else ""

    async def _read_ranked(self, working: WorkingSet, found: Found) -> dict[str, Fragment]:
        """The ranked fragments by id, held, cached or from the journal; without those that have left the memory."""
        held = {one.fragment.id: one.fragment for one in (*working.state.sensory, *working.state.short_term)}
        ids = [id_ for id_ in found.ids if id_ not in held]
        known = working.fragment_cache.get_many(ids)
        missing = [id_ for id_ in ids if id_ not in known]
        if missing:
            left = working.fragment_cache.removals
            read = await working.read_fragments(self._storage.journal, missing)
            working.fragment_cache.put_read(read, left)
            known |= {fragment.id: fragment for fragment in read}
        return held | {id_: fragment for id_, fragment in known.items() if fragment.forget_time_us is None}


async def wait_until_visible(actor: Actor, query: Query) -> None:
    """Wait until the memory reaches the query's min_revision. Raises RevisionNotReached with the distance."""
    if query.min_revision <= actor.revision:
        return
    try:
        async with asyncio.timeout(query.wait_s):
            await actor.wait_for_revision(query.min_revision)
    except TimeoutError:
        raise RevisionNotReached(
            f"the memory is at revision {actor.revision}, {query.min_revision - actor.revision} behind the "
            f"{query.min_revision} asked for",
            revision=actor.revision,
        ) from None


def _orders_by_score(working: WorkingSet) -> bool:
    """Whether it answers by the absolute formula: neither in order of receipt nor with DB-GPT's ranking."""
    whole = working.record.kind in (MemoryKind.SENSORY, MemoryKind.SHORT_TERM)
    return not whole and working.record.policy.recall.ranking is RankingRule.ABSOLUTE


def _orders_twins(working: WorkingSet) -> bool:
    return working.record.policy.conflicts.suspect and _orders_by_score(working)


def _asks_about_the_past(interpreted: Sequence[TimePhrase], query: Query, clock: Clock) -> bool:
    """Whether a phrase of time in the query names a time that is over: the statement of that time is wanted then."""
    now_us = clock.now_us() if query.now_us is None else query.now_us
    return any(one.window.end_us is not None and one.window.end_us <= now_us for one in interpreted)
