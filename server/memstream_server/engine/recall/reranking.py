"""Reranking: the last step of a ranking, if the server has a reranker. A cross-encoder scores the best candidates.

    score = score before + weight x closeness

Rule 1. If the reranker is late or fails, the ranking stays as it was, and `degraded` says so.
Rule 2. It runs outside of locks, after the fragments are read: only this answer waits for it.
Rule 3. Closeness is 0 to 1, so reranking only adds, to the best of an answer; the others stay behind them.
Rule 4. `relevance` stays that of the legs, so min_relevance means the same with and without a reranker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from msgspec.structs import replace

from memstream_server.core.rendering import lexical_text
from memstream_server.core.scores import Scored
from memstream_server.engine.requests import Recollection
from memstream_server.ports.models import ModelError, Reranker

VERSION = "rerank/1"
"""Appended to the formula's version if a reranker took part."""
PART = "rerank"


@dataclass(frozen=True, slots=True, eq=False)
class Reranking:
    """The server's reranker and its parameters."""

    reranker: Reranker
    candidates: int = 20
    """How many of the best candidates it scores."""
    weight: float = 1.0
    """Weight of its score relative to the legs, multiplied by beta."""
    timeout_s: float = 1.0

    async def rerank(self, question: str, best: Sequence[tuple[Recollection, float]]) -> tuple[dict[str, Scored], str]:
        """The new scores by id, and why there are none (empty if there are). best: each with its beta."""
        if not best:
            return {}, ""
        try:
            async with asyncio.timeout(self.timeout_s):
                texts = [lexical_text(one.fragment) for one, _ in best]
                closeness = await self.reranker.closeness(question, texts)
        except (ModelError, TimeoutError) as error:
            text = error.summary if isinstance(error, ModelError) else "no answer in time"
            return {}, f"not reranked: {text}"
        return {
            one.scored.id: add_closeness(one.scored, value, beta * self.weight)
            for (one, beta), value in zip(best, closeness.tolist(), strict=True)
        }, ""


def add_closeness(scored: Scored, value: float, weight: float) -> Scored:
    """The result with the added part. `value`: in [0, 1]."""
    values, weights = (*scored.values, value), (*scored.weights, weight)
    score = math.fsum(map(mul, values, weights))
    return replace(scored, score=score, names=(*scored.names, PART), values=values, weights=weights)
