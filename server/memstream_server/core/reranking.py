"""Reranking: a cross-encoder's closeness as an additional part of the best scores.

    score = score before + weight x closeness

Rule 1. Closeness is 0 to 1, so reranking only adds, to the best of a ranking; the others stay behind them.
Rule 2. `relevance` stays that of the legs, so min_relevance means the same with and without a reranker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

from msgspec.structs import replace

from memstream_server.core.scores import Scored

VERSION = "rerank/1"
"""Appended to the formula's version if a reranker took part."""
PART = "rerank"


def reranked(results: Sequence[Scored], closeness: Sequence[float], weight: float) -> tuple[Scored, ...]:
    """The results with the added part, by score, then newest. `closeness`: parallel to `results`, each in [0, 1]."""
    told = [_with_part(scored, value, weight) for scored, value in zip(results, closeness, strict=True)]
    return tuple(sorted(told, key=lambda each: (-each.score, -each.slot)))


def _with_part(scored: Scored, value: float, weight: float) -> Scored:
    values, weights = (*scored.values, value), (*scored.weights, weight)
    score = math.fsum(map(mul, values, weights))
    return replace(scored, score=score, names=(*scored.names, PART), values=values, weights=weights)
