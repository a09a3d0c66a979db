"""Reranking: the last step of a ranking, if the server has a reranker. A cross-encoder scores the best candidates.

    score = score before + weight x closeness

Rule 1. If the reranker is late or fails, the ranking stays as it was, and `degraded` says so.
Rule 2. It runs outside of locks, after the fragments are read: only this answer waits for it.
Rule 3. Closeness is 0 to 1, so reranking only adds, to the best of a ranking; the others stay behind them.
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
from memstream_server.core.values import Fragment
from memstream_server.ports.models import ModelError, Reranker

Ranked = Sequence[tuple[Scored, Fragment]]
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

    async def rerank(self, question: str, ranked: Ranked, formula: str, beta: float) -> tuple[Ranked, str, str]:
        """The ranking, the version of its formula, and why it was not reranked (empty if it was)."""
        best, rest = ranked[: self.candidates], ranked[self.candidates :]
        if not (best and beta):
            return ranked, formula, ""
        try:
            async with asyncio.timeout(self.timeout_s):
                closeness = await self.reranker.closeness(question, [lexical_text(fragment) for _, fragment in best])
        except (ModelError, TimeoutError) as error:
            text = error.summary if isinstance(error, ModelError) else "no answer in time"
            return ranked, formula, f"not reranked: {text}"
        fragments = {scored.id: fragment for scored, fragment in best}
        first = reranked([scored for scored, _ in best], closeness.tolist(), beta * self.weight)
        return [*((scored, fragments[scored.id]) for scored in first), *rest], f"{formula}+{VERSION}", ""


def reranked(results: Sequence[Scored], closeness: Sequence[float], weight: float) -> tuple[Scored, ...]:
    """The results with the added part, by score, then newest. `closeness`: parallel to `results`, each in [0, 1]."""
    told = [_with_part(scored, value, weight) for scored, value in zip(results, closeness, strict=True)]
    return tuple(sorted(told, key=lambda each: (-each.score, -each.slot)))


def _with_part(scored: Scored, value: float, weight: float) -> Scored:
    values, weights = (*scored.values, value), (*scored.weights, weight)
    score = math.fsum(map(mul, values, weights))
    return replace(scored, score=score, names=(*scored.names, PART), values=values, weights=weights)
