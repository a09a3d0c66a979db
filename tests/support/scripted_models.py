"""Scripted models for tests: an embedder with given vectors, a scorer, a reranker and insights, each with outages.

Every call goes through `Outages`: `fail(error, times)` makes the next calls raise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models.hashing import DIMENSION, HashingEmbedder
from memstream_server.ports.models import Account, EmbeddingModel, ModelError, ModelUnavailable

VECTOR_BYTES = 4 * DIMENSION
"""Of a vector of the hashing model in RAM."""


class Outages:
    """Errors for the next calls, and the number of calls including failed ones."""

    def __init__(self) -> None:
        self.calls = 0
        self._errors: deque[ModelError] = deque()

    def fail(self, error: ModelError | None = None, times: int = 1) -> None:
        """Make the next `times` calls raise `error`, by default ModelUnavailable."""
        self._errors.extend([error or ModelUnavailable("scripted outage")] * times)

    def heal(self) -> None:
        """Make later calls succeed."""
        self._errors.clear()

    def _called(self) -> None:
        self.calls += 1
        if self._errors:
            raise self._errors.popleft()


class ScriptedEmbedder(Outages):
    """Given vectors by text (scaled to unit length); other texts get the hashing model's vectors."""

    def __init__(self, vectors: Mapping[str, Sequence[float]] | None = None, dimension: int | None = None) -> None:
        """`dimension` with `vectors` makes a small space; an unknown text is then an error of the test."""
        super().__init__()
        self._hashing = HashingEmbedder()
        self._vectors = dict(vectors or {})
        self._dimension = dimension
        self.texts: list[str] = []

    async def model(self) -> EmbeddingModel:
        model = await self._hashing.model()
        if self._dimension is not None:
            return EmbeddingModel("scripted", self._dimension)
        return replace(model, computed=not self._vectors)

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        self._called()
        self.texts += texts
        if self._dimension is None and not self._vectors:
            return self._hashing.vectors(texts)
        return np.stack([self._vector(text) for text in texts])

    async def close(self) -> None:
        pass

    def _vector(self, text: str) -> npt.NDArray[np.float32]:
        if text not in self._vectors and self._dimension is None:
            hashed: npt.NDArray[np.float32] = self._hashing.vectors([text])[0]
            return hashed
        vector = np.asarray(self._vectors[text], np.float32)
        unit: npt.NDArray[np.float32] = vector / np.linalg.norm(vector)
        return unit


class ScriptedScorer(Outages):
    """Importances by text; other texts get `default`."""

    def __init__(self, scores: Mapping[str, float] | None = None, default: float = 0.5) -> None:
        super().__init__()
        self.scores = dict(scores or {})
        self.default = default

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        self._called()
        _charge_account(account, len(texts))
        return [self.scores.get(text, self.default) for text in texts]


class ScriptedReranker(Outages):
    """Closeness by a word of the text; `late` makes it wait until it is cancelled."""

    name = "scripted"

    def __init__(self, closeness: Mapping[str, float]) -> None:
        super().__init__()
        self._closeness = dict(closeness)
        self.late = False
        self.shown: list[tuple[str, tuple[str, ...]]] = []
        """Question and texts of each call."""

    async def closeness(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self._called()
        self.shown.append((question, tuple(texts)))
        if self.late:
            await asyncio.Event().wait()
        known = self._closeness.items()
        return np.array([next((each for word, each in known if word in text), 0) for text in texts], np.float32)

    async def close(self) -> None:
        pass


class ScriptedInsights(Outages):
    """Fixed insights and questions; without a script, an insight quotes its first source."""

    def __init__(
        self,
        promotion: Sequence[str] | None = None,
        questions: Sequence[str] = ("What matters?", "Who is involved?", "What changed?"),
        reflections: Sequence[tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__()
        self._promotion = promotion
        self._questions = tuple(questions)
        self._reflections = reflections
        self.shown: list[tuple[str, ...]] = []
        """The texts of each call, in order."""

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        self._called()
        _charge_account(account, len(texts))
        self.shown.append(tuple(texts))
        return [f"insight of {len(texts)}: {texts[0]}"] if self._promotion is None else list(self._promotion)

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        self._called()
        _charge_account(account, len(texts))
        self.shown.append(tuple(texts))
        return [(text, (place,)) for place, text in enumerate(texts)]

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        self._called()
        _charge_account(account, len(texts))
        self.shown.append(tuple(texts))
        return list(self._questions[:count])

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        self._called()
        _charge_account(account, len(texts))
        self.shown.append(tuple(texts))
        if self._reflections is None:
            return [(f"{question} {text}", (place,)) for place, text in enumerate(texts[:count])]
        return list(self._reflections[:count])


def _charge_account(account: Account | None, texts: int) -> None:
    """Charge a request of ten tokens per text, with a reply of one token per text."""
    if account is not None:
        account.model = "scripted"
        account.requests += 1
        account.prompt_tokens += 10 * texts
        account.completion_tokens += texts
