"""Folding: what says the same takes one place, what differs in a number, a name or a negation never does."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from memstream_server.core.identity import fold_key, fold_places
from memstream_server.core.ranking import NearMiss, Stage
from memstream_server.core.values import Fragment, Structured
from tests.core_recall.test_ranking import EMBEDDER, memory_of

ALIKE = (
    ("Bob likes tea", "bob likes tea", "Bob likes tea.", "  Bob  likes\ttea!", "Bob\nlikes tea", '"Bob likes tea"'),
    ("Yes, Bob likes tea", "Yes Bob likes tea"),
    ("Straße", "STRASSE", "strasse."),
    ("Bob likes café", "Bob likes cafe\u0301"),
    ("小明喜欢茶", "小明喜欢茶。"),
    ("\uff37\uff29\uff26\uff29", "wifi"),
)
APART = (
    ("Bob paid 100 euros for the bicycle on Monday", "Bob paid 1000 euros for the bicycle on Monday"),
    ("Bob paid 10.5", "Bob paid 105"),
    ("Bob paid 1,5", "Bob paid 15"),
    ("the train leaves at 9:45", "the train leaves at 945"),
    ("it is -5 degrees", "it is 5 degrees"),
    ("Bob paid Alice for the concert tickets", "Alice paid Bob for the concert tickets"),
    ("Bob likes tea more than anything", "Rob likes tea more than anything"),
    ("Bob likes tea", "Bob does not like tea"),
    ("Bob does like tea", "Bob doesn't like tea"),
    ("Bob lives in Berlin", "Bob lived in Berlin"),
    ("the train from Berlin", "the train to Berlin"),
    ("turn left at the corner", "turn right at the corner"),
    ("Bob likes tea?", "Bob likes tea."),
    ("she writes C", "she writes C++"),
    ("a part of it", "apart of it"),
    ("小明喜欢茶", "小明不喜欢茶"),
)


@pytest.mark.parametrize("texts", ALIKE)
def test_same_words_fold(texts: tuple[str, ...]) -> None:
    assert len({fold_key(Fragment(id="f", content=text, speaker="bob")) for text in texts}) == 1


@pytest.mark.parametrize(("one", "other"), [*APART, *combinations([texts[0] for texts in ALIKE], 2)])
def test_different_words_stay_apart(one: str, other: str) -> None:
    assert fold_key(Fragment(id="f", content=one)) != fold_key(Fragment(id="f", content=other))


@pytest.mark.parametrize(
    "one", ["Bob does like tea", "the train from Berlin", "it is -5 degrees", "Bob lives in Berlin"]
)
def test_no_bound_of_cosine_tells_them_apart(one: str) -> None:
    other = dict(APART)[one]
    vectors = EMBEDDER.vectors([one, other])
    assert float(vectors[0] @ vectors[1]) > 0.95


def test_speakers_and_parts_stay_apart() -> None:
    said = Fragment(id="f", content="tea", speaker="bob")
    keys = {
        fold_key(said),
        fold_key(said.but(speaker="joy")),
        fold_key(said.but(structured=Structured(thought="tea"))),
        fold_key(said.but(structured=Structured(action="tea"))),
    }
    assert len(keys) == 4
    assert fold_key(said.but(session="t", observe_time_us=9, metadata=(("n", 1),))) == fold_key(said)


def test_preferred_places_stand_for_their_keys() -> None:
    keys = [7, 8, 7, 9, 7, 8]
    assert fold_places(keys) == ([0, 1, 3], {0: [2, 4], 1: [5]})
    assert fold_places(keys, {4}) == ([1, 3, 4], {4: [0, 2], 1: [5]})
    assert fold_places([]) == ([], {})


def _heron(count: int, others: int) -> list[Fragment]:
    """A sentence said in `count` sessions, and `others` that say something of their own."""
    texts = ["the heron stands by the canal"] * count + [f"the heron number {n} flies" for n in range(others)]
    return [Fragment(f"f{place:04}", text, session=f"s{place}") for place, text in enumerate(texts)]


@pytest.mark.parametrize("count", [1, 30, 400])
def test_answer_fills_with_distinct_ones(count: int) -> None:
    memory = memory_of(*_heron(count, 12))
    answer = memory.ask("heron by the canal", limit=10, per_leg=20, fold=True)
    ids = [one.id for one in answer.results]
    assert len(ids) == 10
    assert len([id_ for id_ in ids if int(id_[1:]) < count]) == 1
    assert set(answer.folded) == ({ids[0]} if count > 1 else set())
    assert answer.considered.candidates >= 12
    plain = memory.ask("heron by the canal", limit=10, per_leg=20)
    assert plain.folded == {}
    assert len([one for one in plain.results if int(one.id[1:]) < count]) == min(count, 10)


def test_best_one_stands_unless_another_was_told() -> None:
    memory = memory_of(*_heron(3, 1))
    answer = memory.ask("heron by the canal", fold=True)
    best, told = answer.results[0].id, "f0000"
    assert set(answer.folded[best]) == {f"f000{n}" for n in range(3)} - {best}
    assert best != told
    again = memory.ask("heron by the canal", fold=True, preferred=frozenset({told}))
    assert set(again.folded[told]) == {f"f000{n}" for n in range(3)} - {told}
    assert best not in [one.id for one in again.results]


def test_near_misses_name_what_was_folded() -> None:
    memory = memory_of(*_heron(3, 1))
    answer = memory.ask("heron by the canal", fold=True, near_misses=10)
    folded = answer.folded[answer.results[0].id]
    assert {missed.scored.id: missed.stage for missed in answer.near_misses} == dict.fromkeys(folded, Stage.FOLDED)
    limited = memory.ask("heron by the canal", fold=True, near_misses=10, limit=1)
    assert sorted(missed.stage for missed in limited.near_misses) == [Stage.FOLDED, Stage.FOLDED, Stage.LIMIT]
    assert all(isinstance(missed, NearMiss) for missed in limited.near_misses)


def test_scores_are_those_without_folding() -> None:
    memory = memory_of(*_heron(5, 5))
    plain = {one.id: one for one in memory.ask("heron by the canal", limit=100).results}
    folded = memory.ask("heron by the canal", limit=100, fold=True)
    assert all(np.isclose(one.score, plain[one.id].score) for one in folded.results)
