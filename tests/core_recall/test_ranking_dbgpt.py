"""The dbgpt ranking rule."""

from __future__ import annotations

import math

import numpy as np
import pytest

from memstream_server.core.columns import Columns
from memstream_server.core.filters import Filter, mask
from memstream_server.core.ranking import RankingQuery, Stage
from memstream_server.core.ranking_dbgpt import (
    HYBRID_WEIGHTS,
    LONG_TERM_WEIGHTS,
    DbgptRanking,
    DbgptWeights,
    rank_dbgpt,
)
from memstream_server.core.values import Fragment, Tier

HOUR_US = 3_600_000_000
NO_TERMS = np.empty(0, np.uint64)


def memory() -> Columns:
    columns = Columns()
    for fragment in (
        Fragment("near", "", Tier.LONG_TERM, importance=0.1, access_time_us=0),
        Fragment("important", "", Tier.LONG_TERM, importance=0.9, access_time_us=0),
        Fragment("recent", "", Tier.LONG_TERM, importance=0.1, access_time_us=100 * HOUR_US),
        Fragment("held", "", Tier.SHORT_TERM, importance=0.5, access_time_us=100 * HOUR_US),
        Fragment("held later", "", Tier.SHORT_TERM, importance=0.5, access_time_us=100 * HOUR_US),
    ):
        columns.append(fragment)
    return columns


def asked(
    columns: Columns, weights: DbgptWeights = HYBRID_WEIGHTS, limit: int = 4, chosen: Filter | None = None
) -> DbgptRanking:
    question = RankingQuery("", NO_TERMS, None, 100 * HOUR_US, limit=limit, near_misses=5)
    cosines = np.array([0.9, -0.2, np.nan], np.float32)
    allowed = mask(columns, chosen or Filter(), question.now_us)
    return rank_dbgpt(columns, np.array([0, 1, 2]), cosines, question, weights, allowed, short_term=[4, 3])


def test_importance_weighs_nine_and_access_gives_recency() -> None:
    answer = asked(memory())
    assert [each.id for each in answer.results] == ["important", "near", "recent"]
    scores = {each.id: each.score for each in answer.results}
    assert scores["important"] == pytest.approx(-0.2 + 0.99**100 + 8.1)
    assert scores["recent"] == pytest.approx(0 + 1 + 0.9)
    for each in (*answer.results, *answer.appended):
        assert each.score == math.fsum(part.value * part.weight for part in each.parts)


def test_long_term_alone_weighs_importance_once() -> None:
    assert [each.id for each in asked(memory(), LONG_TERM_WEIGHTS).results] == ["near", "recent", "important"]


def test_weights_of_a_query_count() -> None:
    by = {
        "alpha": asked(memory(), DbgptWeights(1, 0, 0)),
        "beta": asked(memory(), DbgptWeights(0, 1, 0)),
        "gamma": asked(memory(), DbgptWeights(0, 0, 1)),
    }
    assert {name: answer.results[0].id for name, answer in by.items()} == {
        "alpha": "recent",
        "beta": "near",
        "gamma": "important",
    }
    for answer in by.values():
        for each in answer.results:
            assert each.score == math.fsum(part.value * part.weight for part in each.parts)


def test_all_of_short_term_follows_in_order() -> None:
    answer = asked(memory(), limit=1)
    assert [each.id for each in answer.results] == ["important"]
    assert [each.id for each in answer.appended] == ["held later", "held"]
    assert [miss.stage for miss in answer.near_misses] == [Stage.LIMIT, Stage.LIMIT]


def test_filters_hold_for_both() -> None:
    answer = asked(memory(), chosen=Filter(excluded=("important", "held")))
    assert [each.id for each in answer.results] == ["near", "recent"]
    assert [each.id for each in answer.appended] == ["held later"]
    assert [(miss.scored.id, miss.stage) for miss in answer.near_misses] == [("important", Stage.FILTER)]
    assert answer.considered.candidates == 2
