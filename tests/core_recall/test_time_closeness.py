"""How near a fragment is to the windows of a question, and what that does to a ranking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from memstream_server.core.arrays import finish
from memstream_server.core.columns import Columns
from memstream_server.core.filters import Filter, mask
from memstream_server.core.lexical import LexicalIndex, query_terms
from memstream_server.core.ranking import Ranking, RankingQuery, rank
from memstream_server.core.scores import PARTS, TIMED_PARTS, Weights
from memstream_server.core.time_phrases.calendar import Window, is_near, time_closeness
from memstream_server.core.values import Fragment
from tests.core_recall.test_languages import ANALYZER

DAY = 86_400_000_000
WEEK = Window(10 * DAY, 17 * DAY)
NOW_US = 100 * DAY + DAY // 2
COMING = Window(101 * DAY, 108 * DAY)
"""The week after NOW_US."""


@pytest.mark.parametrize(
    ("windows", "at_days", "value"),
    [
        ([WEEK], 10, 1.0),
        ([WEEK], 16.99, 1.0),
        ([WEEK], 9.99, 0.0),
        ([WEEK], 20.5, 0.5),
        ([WEEK], 24.1, 0.0),
        ([Window(DAY, DAY + 1_000_000)], 1.5, 0.5),  # a shorter window reaches a day
        ([Window(0, 365 * DAY)], 380, 0.5),  # a longer one 30 days
        ([Window(None, 10 * DAY)], -4_000, 1.0),
        ([Window(None, 10 * DAY)], 13.5, 0.5),
        ([Window(10 * DAY, None)], 9_000, 1.0),
        ([Window(10 * DAY, None)], 9.9, 0.0),
        ([COMING], 97.5, 0.5),  # of what is to come, people speak before it
        ([COMING], 93.9, 0.0),
        ([Window(100 * DAY, 101 * DAY)], 99.5, 0.0),  # today
        ([WEEK, Window(40 * DAY, 41 * DAY)], 40.5, 1.0),
        ([Window(None, 10 * DAY), WEEK], 12, 1.0),
    ],
)
def test_value_is_one_inside_and_falls_to_zero(windows: list[Window], at_days: float, value: float) -> None:
    found = time_closeness(np.array([int(at_days * DAY)], np.int64), windows, NOW_US)
    assert found.tolist() == pytest.approx([value], abs=1e-4)
    assert is_near(np.array([int(at_days * DAY)], np.int64), windows, NOW_US).tolist() == [value > 0]


def test_extreme_times_stay_within_zero_and_one() -> None:
    times = np.array([-62_135_596_800_000_000, 0, 253_402_300_799_999_999], np.int64)
    values = time_closeness(times, [WEEK, Window(None, -DAY), Window(20 * DAY, None)], NOW_US)
    assert values.tolist() == pytest.approx([1, 6 / 7, 1])


ASKED = RankingQuery("a tea", query_terms(ANALYZER.question_terms("a tea").hashes), None, 100 * DAY, limit=3, per_leg=2)
TIMED = replace(ASKED, windows=(WEEK,))


def rank_diary(question: RankingQuery, chosen: Filter | None = None) -> Ranking:
    """Four cups of tea on days 1 to 4, and three walks on days 12 to 14, without vectors."""
    texts = [("tea and toast", 1), ("tea", 2), ("cold tea", 3), ("green tea", 4)]
    texts += [("a walk", 12), ("a longer walk", 13), ("walked home", 14)]
    columns, lexical = Columns(), LexicalIndex()
    for number, (text, day) in enumerate(texts):
        columns.append(Fragment(f"f{number}", text, session=str(number), observe_time_us=day * DAY))
        terms = ANALYZER.terms(text)
        lexical.append(terms.hashes, terms.counts, number, len(text))
    cosines = np.full(len(texts), np.nan, np.float32)
    allowed = mask(columns, chosen or Filter(), 100 * DAY)
    return finish(rank(columns, lexical.legs(question.terms), cosines, question, Weights(time=0.9), allowed))


def test_windows_add_candidates_and_a_part() -> None:
    plain, timed = rank_diary(ASKED), rank_diary(TIMED)
    assert plain.considered.candidates == 2
    assert {one.names for one in plain.results} == {PARTS}
    assert timed.considered.candidates == 4, "the best two of the legs, and of the window"
    assert {one.names for one in timed.results} == {TIMED_PARTS}
    assert [one.id for one in timed.results[:2]] == ["f6", "f5"]
    assert [one.values[-1] for one in timed.results[:2]] == [1, 1]


def test_a_window_adds_no_fragment_that_the_filter_excludes() -> None:
    late = Filter(observe_from_us=14 * DAY)
    assert [one.id for one in rank_diary(TIMED, late).results] == ["f6"]


def test_near_misses_have_the_time_part() -> None:
    missed = rank_diary(replace(TIMED, near_misses=9)).near_misses
    assert {one.scored.names for one in missed} == {TIMED_PARTS}
    assert {one.scored.id: one.scored.values[-1] for one in missed}["f4"] == 1


def test_time_counts_in_relevance_but_not_for_the_weak_mark() -> None:
    plain, timed = rank_diary(ASKED), rank_diary(TIMED)
    assert timed.considered.best_relevance == pytest.approx(0.9)
    assert timed.considered.best_match == plain.considered.best_match
