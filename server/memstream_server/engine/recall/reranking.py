"""Reranking: the last step of a ranking, if the server has a reranker. It scores the best candidates against the
question.

Rule 1. If the reranker is late or fails, the ranking stays as it was, and `degraded` says so.
Rule 2. It runs outside of locks, after the fragments are read: only this answer waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memstream_server.core.rendering import lexical_text
from memstream_server.core.reranking import VERSION, reranked
from memstream_server.core.scores import Scored
from memstream_server.core.values import Fragment
from memstream_server.ports.models import ModelError, Reranker

Ranked = Sequence[tuple[Scored, Fragment]]


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
