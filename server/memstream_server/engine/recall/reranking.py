"""The last step of a ranking, where the server has a reranker: it reads the question beside the best of it.

Rule 1. A reranker that is late or fails leaves the ranking as it was, and the answer says so in `degraded`.
Rule 2. It is asked about what was ranked and read, outside of any lock: what it takes, only this answer waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memstream_server.core.ranking import Scored
from memstream_server.core.rendering import lexical_text
from memstream_server.core.reranking import VERSION, reranked
from memstream_server.core.values import Fragment
from memstream_server.ports.models import ModelError, Reranker

Ranked = Sequence[tuple[Scored, Fragment]]


@dataclass(frozen=True, slots=True, eq=False)
class Reranking:
    """The server's reranker, and how it is used."""

    reranker: Reranker
    candidates: int = 20
    """The best so many are shown to it."""
    weight: float = 1.0
    """Of its part beside the legs', times beta."""
    timeout_s: float = 1.0

    async def rerank(self, question: str, ranked: Ranked, formula: str, beta: float) -> tuple[Ranked, str, str]:
        """The ranking, its formula's version, and why it is not reranked (empty when it is)."""
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
