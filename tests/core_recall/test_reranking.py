"""A reranker's closeness is one more part of the score."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memstream_server.core.scores import Scored
from memstream_server.core.values import Fragment
from memstream_server.engine.recall.answers import NOTHING, PartialAnswer, with_scores
from memstream_server.engine.recall.reranking import PART, add_closeness
from memstream_server.engine.requests import Recollection


def scored(slot: int, score: float) -> Scored:
    return Scored(
        slot=slot,
        id=f"f{slot}",
        score=score,
        relevance=score,
        cosine=None,
        names=("lexical",),
        values=(score,),
        weights=(1.0,),
    )


def reranked(results: list[Scored], closeness: list[float], weight: float) -> list[Scored]:
    held = [Recollection(Fragment(id=one.id, content="tea", position=one.slot), one) for one in results]
    part = PartialAnswer(replace(NOTHING, recollections=tuple(held)), ())
    pairs = zip(results, closeness, strict=True)
    scores = {one.id: add_closeness(one, value, weight) for one, value in pairs}
    return [one.scored for one in with_scores(part, scores, "").answer.recollections]


def test_closeness_is_added_and_orders() -> None:
    first, second = reranked([scored(1, 0.9), scored(2, 0.5)], [0.0, 1.0], 2.0)
    assert [first.slot, second.slot] == [2, 1]
    assert first.score == pytest.approx(2.5)
    assert (first.names[-1], first.values[-1], first.weights[-1]) == (PART, 1.0, 2.0)
    assert first.relevance == 0.5


def test_equal_scores_go_newest_first() -> None:
    assert [each.slot for each in reranked([scored(1, 0.5), scored(2, 0.5)], [0.3, 0.3], 1.0)] == [2, 1]
