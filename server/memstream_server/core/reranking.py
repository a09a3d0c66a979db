"""Reranking: what a model that read question and content together says of the best, as one more part of their scores.

    score = score before + weight x closeness

Rule 1. It only adds (closeness is 0 to 1), to the best of a ranking: those it was not shown stay behind them.
Rule 2. relevance stays that of the legs, so that min_relevance means the same with a reranker and without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from msgspec.structs import replace

from memstream_server.core.ranking import Scored

VERSION = "rerank/1"
"""Joined to the formula's version where a reranker had its say."""
PART = "rerank"


def reranked(results: Sequence[Scored], closeness: Sequence[float], weight: float) -> tuple[Scored, ...]:
    """The results with their part, by score, then newest. `closeness` in their order, each in [0, 1]."""
    told = [_with_part(scored, value, weight) for scored, value in zip(results, closeness, strict=True)]
    return tuple(sorted(told, key=lambda each: (-each.score, -each.slot)))


def _with_part(scored: Scored, value: float, weight: float) -> Scored:
    values, weights = (*scored.values, value), (*scored.weights, weight)
    score = math.fsum(map(mul, values, weights))
    return replace(scored, score=score, names=(*scored.names, PART), values=values, weights=weights)
