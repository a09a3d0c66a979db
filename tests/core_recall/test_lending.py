"""What superseded fragments lend to the current end of their chain, compared with a slow computation of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.arrays import finish
from memstream_server.core.ranking import Ranking, RankingQuery, rank
from memstream_server.core.scores import CHAIN_PART, PARTS, Scored, Weights
from memstream_server.core.signals import BOTH_SHARE, Superseded, find_borrowers, lend_matches
from memstream_server.core.time_phrases.calendar import Window
from memstream_server.core.values import Fragment
from tests.core_recall.test_ranking import Memory, asking, memory_of

MATCHING = ("dense", "lexical", "context", "reply")
WORDS = ("Ann", "lives", "in", "Paris", "Rome", "moved", "tea?", "likes")
TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)


@st.composite
def memories(draw: st.DrawFn) -> tuple[list[Fragment], dict[str, str]]:
    """(fragments, newer ones by the id of the fragment that each supersedes)."""
    texts = draw(st.lists(TEXTS, min_size=1, max_size=10))
    sessions = draw(st.lists(st.sampled_from("ab"), min_size=len(texts), max_size=len(texts)))
    fragments = [
        Fragment(f"f{place}", text, speaker="Ann", session=session)
        for place, (text, session) in enumerate(zip(texts, sessions, strict=True))
    ]
    newer = {}
    for place in range(len(texts) - 1):
        by = draw(st.none() | st.integers(place + 1, len(texts) - 1))
        if by is not None:
            newer[f"f{place}"] = f"f{by}"
    return fragments, newer


def ask(
    memory: Memory, asked: RankingQuery, newer: Mapping[str, str], lends: bool = True, passed: set[str] | None = None
) -> Ranking:
    """The ranking of what is not superseded. passed: the ids that the filter lets pass; None: all."""
    ids = memory.columns.ids
    inside = np.array([passed is None or id_ in passed for id_ in ids], np.bool_)
    outdated = np.array([id_ in newer for id_ in ids], np.bool_)
    if lends:
        asked = replace(asked, superseded=Superseded(inside & outdated, lambda id_: newer.get(id_, "")))
    assert asked.vector is not None
    legs, cosines = memory.lexical.legs(asked.terms), memory.dense.cosines(asked.vector)
    return finish(rank(memory.columns, legs, cosines, asked, Weights(dense=0.2), inside & ~outdated))


def match_of(scored: Scored) -> float:
    return math.fsum(part.contribution for part in scored.parts if part.name in MATCHING)


def end_of(id_: str, newer: Mapping[str, str]) -> str:
    while id_ in newer:
        id_ = newer[id_]
    return id_


@given(memories(), TEXTS)
def test_current_end_borrows_the_best_match_of_its_chain(
    drawn: tuple[list[Fragment], dict[str, str]], text: str
) -> None:
    fragments, newer = drawn
    memory, asked = memory_of(*fragments), replace(asking(text), limit=20)
    plain = {one.id: one for one in ask(memory, asked, {}, lends=False).results}
    answer = ask(memory, asked, newer)
    assert {one.id for one in answer.results} == plain.keys() - newer.keys()
    for one in answer.results:
        own = match_of(plain[one.id])
        lent = [match_of(plain[id_]) for id_ in newer if end_of(id_, newer) == one.id]
        borrowed = max(0.0, max(lent) - own) + BOTH_SHARE * min(own, max(lent)) if lent else 0.0
        parts = {part.name: part for part in one.parts}
        chain = parts.pop(CHAIN_PART, None)
        assert (chain.value if chain else 0.0) == pytest.approx(borrowed, abs=1e-6)
        assert list(parts.values()) == list(plain[one.id].parts)
        assert one.score == math.fsum(part.contribution for part in one.parts)
    scores = [one.score for one in answer.results]
    assert scores == sorted(scores, reverse=True)


@given(memories(), TEXTS)
def test_without_chains_a_ranking_is_the_same_to_the_bit(
    drawn: tuple[list[Fragment], dict[str, str]], text: str
) -> None:
    memory, asked = memory_of(*drawn[0]), replace(asking(text), limit=20)
    lending = ask(memory, asked, {})
    assert lending == ask(memory, asked, {}, lends=False)
    assert {one.names for one in lending.results} == {PARTS}


def said(*contents: str) -> list[Fragment]:
    return [Fragment(f"f{place}", text, session=f"s{place}") for place, text in enumerate(contents)]


def test_lender_brings_its_borrower_among_the_candidates() -> None:
    others = [f"Tom lives in town {place}" for place in range(6)]
    memory = memory_of(*said("Ann lives in Paris", "She moved", *others))
    asked = replace(asking("Where does Ann live? lives"), per_leg=1, limit=3)
    assert "f1" not in {one.id for one in ask(memory, asked, {"f0": "f1"}, lends=False).results}
    assert ask(memory, asked, {"f0": "f1"}).results[0].id == "f1"


def test_fragment_outside_the_filter_lends_nothing() -> None:
    memory = memory_of(*said("Ann lives in Paris", "She moved"))
    asked = asking("Ann lives")
    (one,) = ask(memory, asked, {"f0": "f1"}, passed={"f1"}).results
    assert CHAIN_PART not in one.names
    assert ask(memory, asked, {"f0": "f1"}, passed={"f0"}).results == ()


def test_chain_part_follows_the_time_part_and_counts_as_match() -> None:
    memory = memory_of(*said("Ann lives in Paris", "She moved"))
    asked = replace(asking("Ann lives"), windows=(Window(0, 1),))
    answer = ask(memory, asked, {"f0": "f1"})
    assert answer.results[0].names == (*PARTS, CHAIN_PART, "time")
    without = ask(memory, asked, {"f0": "f1"}, lends=False)
    assert answer.considered.best_match > without.considered.best_match


def test_near_misses_show_what_they_borrow() -> None:
    memory = memory_of(*said("Ann lives in Paris", "She moved", "Ann lives in Rome"))
    asked = replace(asking("Ann lives in Rome"), limit=1, near_misses=2)
    answer = ask(memory, asked, {"f0": "f1"})
    assert [one.id for one in answer.results] == ["f2"]
    values = {miss.scored.id: miss.scored.values[miss.scored.names.index(CHAIN_PART)] for miss in answer.near_misses}
    assert values["f1"] > 0
    assert values["f0"] == 0


def test_long_chain_ends_at_its_current_end() -> None:
    memory = memory_of(*said(*(f"price {place}" for place in range(30))))
    newer = {f"f{place}": f"f{place + 1}" for place in range(29)}
    lenders = np.arange(29)
    superseded = Superseded(np.ones(30, np.bool_), lambda id_: newer.get(id_, ""))
    found, ends = find_borrowers(memory.columns, lenders, superseded, np.ones(30, np.bool_))
    assert found.tolist() == lenders.tolist()
    assert ends.tolist() == [29] * 29


def test_borrower_that_is_not_ranked_is_ignored() -> None:
    slots, own = np.array([7, 3]), np.array([0.5, 0.25])
    borrowed = lend_matches(slots, own, np.array([3, 9, 1, 3]), np.array([0.75, 1.0, 1.0, 0.5]))
    assert borrowed.tolist() == [0.0, pytest.approx(0.5 + BOTH_SHARE * 0.25)]
    assert lend_matches(slots[:0], own[:0], np.array([3]), np.array([1.0])).tolist() == []
