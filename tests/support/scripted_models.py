"""Scripted models for tests: an embedder with given vectors, a scorer, and insights, each with outages on request.

Every call goes through `Outages`: `fail(error, times)` makes the next calls raise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.ports.models import Account, EmbeddingModel, ModelError, ModelUnavailable


class Outages:
    """Errors the next calls raise, and how many calls there were, failed ones included."""

    def __init__(self) -> None:
        self.calls = 0
        self._errors: deque[ModelError] = deque()

    def fail(self, error: ModelError | None = None, times: int = 1) -> None:
        """The next `times` calls raise `error`, ModelUnavailable unless given."""
        self._errors.extend([error or ModelUnavailable("scripted outage")] * times)

    def heal(self) -> None:
        """Later calls succeed."""
        self._errors.clear()

    def _called(self) -> None:
        self.calls += 1
        if self._errors:
            raise self._errors.popleft()


class ScriptedEmbedder(Outages):
    """Vectors by text where given (brought to unit length), those of the hashing model otherwise."""

    def __init__(self, vectors: Mapping[str, Sequence[float]] | None = None, dimension: int | None = None) -> None:
        """`dimension` with `vectors` makes a small space; unknown texts are then an error of the test."""
        super().__init__()
        self._hashing = HashingEmbedder()
        self._vectors = dict(vectors or {})
        self._dimension = dimension
        self.texts: list[str] = []

    async def model(self) -> EmbeddingModel:
        model = await self._hashing.model()
        return model if self._dimension is None else EmbeddingModel("scripted", self._dimension)

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
    """Importances by text, `default` for others."""

    def __init__(self, scores: Mapping[str, float] | None = None, default: float = 0.5) -> None:
        super().__init__()
        self.scores = dict(scores or {})
        self.default = default

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        self._called()
        _charge(account, len(texts))
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
    """Fixed insights and questions; without a script an insight names what it was derived from."""

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
        _charge(account, len(texts))
        self.shown.append(tuple(texts))
        return [f"insight of {len(texts)}: {texts[0]}"] if self._promotion is None else list(self._promotion)

    async def questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        self._called()
        _charge(account, len(texts))
        self.shown.append(tuple(texts))
        return list(self._questions[:count])

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        self._called()
        _charge(account, len(texts))
        self.shown.append(tuple(texts))
        if self._reflections is None:
            return [(f"{question} {text}", (place,)) for place, text in enumerate(texts[:count])]
        return list(self._reflections[:count])


def _charge(account: Account | None, texts: int) -> None:
    """A request of ten tokens a text, answered in one a text."""
    if account is not None:
        account.model = "scripted"
        account.requests += 1
        account.prompt_tokens += 10 * texts
        account.completion_tokens += texts
