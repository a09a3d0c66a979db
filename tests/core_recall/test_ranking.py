"""Ranking: parts that sum to the score, the absolute scale, ties, filters, missing vectors and near misses."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.adapters.models.analyzer import SnowballAnalyzer
from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.dense import DenseMatrix
from memstream_server.core.dialogue import find_dialogue
from memstream_server.core.filters import Filter, mask
from memstream_server.core.fitted_weights import FittedWeights
from memstream_server.core.lexical import LexicalIndex, query_terms
from memstream_server.core.ranking import (
    Ranking,
    RankingQuery,
    Stage,
    Weights,
    best,
    candidates,
    rank,
    rank_candidates,
)
from memstream_server.core.rendering import indexed_text
from memstream_server.core.signals import Signals
from memstream_server.core.speakers import named_speaker
from memstream_server.core.values import Fragment

ANALYZER, EMBEDDER = SnowballAnalyzer(), HashingEmbedder()
HOUR_US = 3_600_000_000
AGO_US = 90 * HOUR_US
WORDS = ("kitten", "moved", "sweden", "piano", "rain", "bread", "Ann", "Bob")


@dataclass
class Memory:
    columns: Columns
    lexical: LexicalIndex
    dense: DenseMatrix

    def ask(self, text: str, weights: Weights | None = None, chosen: Filter | None = None, **fields: object) -> Ranking:
        question = replace(asking(text), **fields)  # type: ignore[arg-type]  # any field of Question
        allowed = mask(self.columns, chosen or Filter(), question.now_us)
        cosines = np.full(len(self.columns), np.nan, np.float32)
        if question.vector is not None:
            cosines = self.dense.cosines(question.vector)
        legs = self.lexical.legs(question.terms, find_dialogue(self.columns, self.lexical.neighbours))
        return finish(rank(self.columns, legs, cosines, question, weights or Weights(), allowed))


def asking(text: str) -> RankingQuery:
    terms = query_terms(ANALYZER.terms(text).hashes)
    return RankingQuery(text, terms, EMBEDDER.vectors([text])[0], now_us=100 * HOUR_US)


def memory_of(*fragments: Fragment, vectors: bool = True) -> Memory:
    memory = Memory(Columns(), LexicalIndex(), DenseMatrix(384))
    for fragment in fragments:
        slot = memory.columns.append(fragment)
        terms, text = ANALYZER.terms(indexed_text(fragment)), indexed_text(fragment)
        memory.lexical.append(
            terms.hashes, terms.counts, int(memory.columns.linked_sessions(slot)[0]), characters=len(fragment.content)
        )
        memory.dense.append(EMBEDDER.vectors([text])[0] if vectors else None)
    return memory


def said(*contents: str, speaker: str = "") -> list[Fragment]:
    return [Fragment(f"f{place}", text, speaker=speaker, session=f"s{place}") for place, text in enumerate(contents)]


TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
WEIGHTS = st.builds(
    Weights,
    alpha=st.floats(0, 100),
    beta=st.floats(0, 100),
    gamma=st.floats(0, 100),
    decay_per_hour=st.floats(0, 1),
    dense=st.floats(0, 1),
    lexical=st.floats(0, 1),
    context=st.floats(0, 1),
    reply=st.floats(0, 1),
    speaker_bonus=st.floats(0, 1),
    cosine_low=st.floats(-1, 0.5),
)
FRAGMENTS = st.lists(
    st.tuples(TEXTS, st.sampled_from(["Ann", "Bob"]), st.floats(0, 1), st.integers(-(10**6), 10**9)), max_size=8
)


@given(FRAGMENTS, TEXTS, WEIGHTS, st.booleans(), st.integers(0, 9), st.floats(0, 1))
def test_parts_sum_to_the_score_exactly(
    rows: list[tuple[str, str, float, int]], text: str, weights: Weights, vector: bool, misses: int, least: float
) -> None:
    memory = memory_of(
        *(
            Fragment(str(place), content, speaker=speaker, importance=importance, observe_time_us=minutes * 60_000_000)
            for place, (content, speaker, importance, minutes) in enumerate(rows)
        )
    )
    fields = {} if vector else {"vector": None}
    answer = memory.ask(text, weights, limit=4, near_misses=misses, min_relevance=least, **fields)
    for scored in (*answer.results, *(miss.scored for miss in answer.near_misses)):
        assert scored.score == math.fsum(part.contribution for part in scored.parts)
        assert all(part.contribution == part.value * part.weight for part in scored.parts)
        assert {part.name for part in scored.parts} == {
            "recency",
            "dense",
            "lexical",
            "context",
            "reply",
            "speaker",
            "importance",
        }
        assert all(0 <= part.value <= 1.000001 for part in scored.parts)
    order = [(-scored.score, -scored.slot) for scored in answer.results]
    assert order == sorted(order)
    assert len(order) <= 4
    assert all(scored.relevance >= least for scored in answer.results)
    returned = {scored.id for scored in answer.results}
    assert not returned & {miss.scored.id for miss in answer.near_misses}
    assert len(returned) + len(answer.near_misses) == min(len(rows), len(returned) + misses)


def test_every_fitted_weight_reaches_the_formula() -> None:
    fitted = FittedWeights(*(number / 16 for number in range(1, len(fields(FittedWeights)) + 1)))
    given = {each.name: getattr(fitted, each.name) for each in fields(FittedWeights)}
    for about_cosines in ("similarity_min", "related_min"):
        del given[about_cosines]
    made = Weights.of_fitted(fitted)
    assert {name: getattr(made, name) for name in given} == given


def test_the_default_formula() -> None:
    memory = memory_of(
        Fragment("old", "Ann adopted a kitten", session="s", speaker="Ann", importance=0.8, observe_time_us=AGO_US),
        Fragment("new", "it rains", speaker="Bob", observe_time_us=101 * HOUR_US),
    )
    top, other = memory.ask("What did Ann adopt?").results
    parts = {part.name: part for part in top.parts}
    assert top.id == "old"
    assert parts["recency"].value == pytest.approx(0.99**10)
    usual = Weights()
    assert usual.dense + usual.lexical + usual.context == pytest.approx(1)
    assert [parts[name].weight for name in parts] == pytest.approx(
        [0.005, usual.dense, usual.lexical, usual.context, usual.context * usual.reply, 0.1, 0.1]
    )
    assert (parts["speaker"].value, parts["importance"].value) == (1.0, 0.8)
    assert top.relevance == pytest.approx(
        sum(parts[n].contribution for n in ("dense", "lexical", "context", "reply", "speaker"))
    )
    assert parts["dense"].value == pytest.approx(top.cosine)
    recency = next(part for part in other.parts if part.name == "recency")
    assert recency.value == 1.0  # a time to come is now


def test_an_empty_memory_gives_an_empty_answer() -> None:
    answer = memory_of().ask("anything", near_misses=3)
    assert answer == Ranking()


def test_score_does_not_depend_on_candidates() -> None:
    memory = memory_of(*said(*(f"{word} {number}" for number in range(20) for word in WORDS)))
    wide = {scored.id: scored for scored in memory.ask("kitten piano", limit=500, per_leg=500).results}
    for scored in memory.ask("kitten piano", limit=3, per_leg=2).results:
        assert scored == wide[scored.id]


def test_every_candidate_is_scored_on_every_leg() -> None:
    memory = memory_of(*said("kitten", "rain and a kitten in the rain with bread", "piano"))
    answer = memory.ask("kitten", per_leg=1, limit=10, near_misses=3)
    assert answer.considered.candidates < 3
    for scored in answer.results:
        assert scored.cosine is not None
    assert answer.near_misses[0].stage is Stage.CANDIDATES


def test_equal_scores_go_newest_first() -> None:
    memory = memory_of(*said("same words", "same words", "same words"))
    assert [scored.id for scored in memory.ask("other").results] == ["f2", "f1", "f0"]
    assert [scored.id for scored in memory.ask("same words", limit=1, per_leg=1).results] == ["f2"]


def test_lexical_legs_take_over_dense_weight() -> None:
    memory = memory_of(*said("a kitten", "rain", "bread"))
    answer = memory.ask("kitten", vector=None)
    assert [scored.id for scored in answer.results] == ["f0"]
    weights = {part.name: part.weight for part in answer.results[0].parts}
    assert weights["dense"] == 0.0
    usual = Weights()
    both = usual.lexical + usual.context
    assert weights["lexical"] == pytest.approx(usual.lexical / both)
    assert weights["context"] == pytest.approx(usual.context / both)
    assert answer.results[0].cosine is None


def test_reply_counts_the_question_before_it() -> None:
    memory = memory_of(
        Fragment("asked", "Where did the kitten come from?", session="s"),
        Fragment("answer", "A farm, on Sunday.", session="s"),
        Fragment("stated", "The kitten came today.", session="t"),
        Fragment("other", "A farm, on Sunday.", session="t"),
    )
    parts = {
        scored.id: {part.name: part for part in scored.parts} for scored in memory.ask("kitten", vector=None).results
    }
    assert parts["answer"]["reply"].value == pytest.approx(parts["asked"]["lexical"].value)
    assert {id_ for id_, each in parts.items() if each["reply"].value} == {"answer"}
    weights = Weights()
    share = weights.context + weights.dense * weights.context / (weights.lexical + weights.context)
    assert parts["answer"]["reply"].weight == pytest.approx(share * weights.reply)


def test_reply_is_the_mean_of_both_legs() -> None:
    memory = memory_of(
        Fragment("asked", "Where did the kitten come from?", session="s"),
        Fragment("answer", "A farm, on Sunday.", session="s"),
    )
    answers = {scored.id: scored for scored in memory.ask("kitten").results}
    parts = {id_: {part.name: part.value for part in each.parts} for id_, each in answers.items()}
    asked, answer = parts["asked"], parts["answer"]
    assert answer["reply"] == pytest.approx((asked["lexical"] + asked["dense"]) / 2)


def test_dense_weight_0_removes_vectors_from_every_part() -> None:
    memory = memory_of(
        Fragment("asked", "Where did the kitten come from?", session="s"),
        Fragment("answer", "A farm, on Sunday.", session="s"),
    )
    with_vectors = memory.ask("kitten", Weights(dense=0.0)).results
    without = memory.ask("kitten", Weights(dense=0.0), vector=None).results
    assert {each.id: each.score for each in without} == {
        each.id: pytest.approx(each.score) for each in with_vectors if each.id in {one.id for one in without}
    }


def test_removed_question_has_no_reply() -> None:
    memory = memory_of(
        Fragment("asked", "Where did the kitten come from?", session="s"),
        Fragment("answer", "A farm, on Sunday.", session="s"),
    )
    memory.columns.update(Fragment("asked", "Where did the kitten come from?", session="s", forget_time_us=1))
    memory.lexical.remove(0)
    (answer,) = memory.ask("kitten").results
    assert {part.name: part.value for part in answer.parts}["reply"] == 0.0


def test_changed_text_changes_whether_it_asks() -> None:
    memory = memory_of(Fragment("f0", "Where is it?"))
    assert memory.columns.asks.tolist() == [True]
    memory.columns.update(Fragment("f0", "It is here."))
    assert memory.columns.asks.tolist() == [False]


def test_score_without_vector_is_comparable() -> None:
    memory = memory_of(*said("a kitten", "rain", "bread"))
    memory.dense.set(0, None)
    top, second = memory.ask("kitten").results[:2]
    assert (top.id, top.cosine) == ("f0", None)
    assert {part.name: part.weight for part in second.parts}["dense"] == Weights().dense


def test_filters_apply_before_candidates_are_taken() -> None:
    memory = memory_of(*said("kitten", "kitten", "kitten rain"))
    answer = memory.ask("kitten", chosen=Filter(sessions=("s1",)), per_leg=1)
    assert [scored.id for scored in answer.results] == ["f1"]


def test_near_misses_name_the_first_stage_that_removed_them() -> None:
    memory = memory_of(*said("kitten", "kitten moved", "kitten piano", "bread"))
    answer = memory.ask(
        "kitten", chosen=Filter(excluded=("f0",)), limit=1, near_misses=10, min_relevance=0.2, per_leg=50
    )
    stages = {miss.scored.id: miss.stage for miss in answer.near_misses}
    assert stages["f0"] is Stage.FILTER
    assert stages["f3"] is Stage.MIN_RELEVANCE
    assert sorted(stages.values()) == ["filter", "limit", "min_relevance"]
    assert answer.considered.candidates == 3
    assert answer.considered.best_relevance == answer.results[0].relevance


def test_forgotten_fragments_are_not_even_near_misses() -> None:
    memory = memory_of(*said("kitten", "kitten"))
    memory.columns.update(Fragment("f0", "kitten", forget_time_us=1))
    memory.lexical.remove(0)
    answer = memory.ask("kitten", near_misses=5)
    assert [scored.id for scored in answer.results] == ["f1"]
    assert answer.near_misses == ()


def test_candidates_from_an_index_rank_as_those_from_ram() -> None:
    memory = memory_of(*said(*(f"{word} {number}" for number in range(9) for word in WORDS)))
    question = replace(asking("kitten piano"), per_leg=5)
    allowed = mask(memory.columns, Filter(), question.now_us)
    assert question.vector is not None
    cosines = memory.dense.cosines(question.vector)
    legs = memory.lexical.legs(question.terms)
    searched = best(cosines, allowed, 5)
    slots = candidates(legs.alone.shares, legs.around.shares, searched, allowed, 5)
    signals = Signals.of(memory.columns, legs, cosines, slots)
    outside = finish(rank_candidates(memory.columns, signals, question, Weights(), allowed))
    assert outside == memory.ask("kitten piano", per_leg=5)


def test_best_takes_the_newest_of_equals_and_no_nan() -> None:
    values = np.array([1, 2, np.nan, 2, 2, 3], np.float32)
    allowed = np.array([True, True, True, True, True, False])
    assert sorted(best(values, allowed, 2).tolist()) == [3, 4]
    assert sorted(best(values, allowed, 9).tolist()) == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("What did Caroline buy?", 0),
        ("what did CAROLINE's brother buy", 0),
        ("Bob", 1),
        ("Did Bob Smith call?", 1),
        ("smith?", 1),
        ("Caroline and Bob", None),
        ("Bobby", None),
        ("scaroline", None),
        ("nobody", None),
        ("", None),
        ("小明喜欢什么", 3),
        ("Did Ann Lee call?", 4),
        ("what about Lee", None),
        ("in 1 day", None),
        ("what did the agent do", 6),
        ("Did ann\n lee call?", 4),
        ("What did \uff22\uff4f\uff42 buy?", 1),
    ],
)
def test_the_one_speaker_a_query_names(text: str, code: int | None) -> None:
    assert named_speaker(text, ["Caroline", "Bob Smith", "", "小明", "Ann Lee", "Joe Lee", "Agent 1"]) == code
