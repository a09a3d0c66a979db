"""The models: embedding, importance, insight, and the lexical analyzer.

Contract
- Calls are bounded in number, batched, have deadlines, retries and a circuit breaker inside the adapter; the
  engine never calls one under a memory's lock or inside a transaction.
- `ModelUnavailable` is passing (retry later); `ModelRefused` is final for that input and names it.
- A malformed reply is ModelUnavailable after the adapter's own retries, never a made-up value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memstream_server.ports.journal.rows import Terms


class ModelError(Exception):
    """Base of what a model raises.

    The message is for the operator's log: it may name the address, and never has words of a memory. `summary` is for
    any caller of the server: status and class of the error.
    """

    log_text = True

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


class ModelUnavailable(ModelError):
    """The endpoint is down, slow, throttling, or answers what cannot be parsed."""


class BudgetExhausted(ModelUnavailable):
    """The limits that this server sets leave no room for a request: nothing is known of the endpoint."""


class ModelRefused(ModelError):
    """The model refuses these inputs for good: `inputs` are their places in the call."""

    def __init__(self, message: str, inputs: Sequence[int]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """What an embedding space is and how its cosines are read (design: recall quality).

    cosine_low and cosine_high map a cosine to the dense leg's [0, 1]; similarity_min is what counts as a hit of
    the enhancement rule; the three weights are relevance's defaults and sum to 1.
    """

    name: str
    dimension: int
    cosine_low: float = 0.0
    cosine_high: float = 1.0
    similarity_min: float = 0.75
    dense_weight: float = 0.3
    lexical_weight: float = 0.2
    context_weight: float = 0.5
    instant: bool = False
    """Whether a few texts are embedded within a millisecond, by this process alone, and none is refused."""


@dataclass(slots=True, eq=False)
class Account:
    """On whose behalf an LLM is asked, and what that took so far: adapters add to it, whoever asks reads it."""

    namespace: str = ""
    """Whose budget it is on."""
    memory: str = ""
    """Its unique id: what an adapter keeps of an answer is for this memory alone."""
    model: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True, eq=False)
class Spent:
    """What one use of a model took since the process began: the adapter counts, GetServerInfo tells."""

    role: str
    model: str
    requests: int = 0
    failed: int = 0
    """Of the requests, those that brought no value."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ModelState(StrEnum):
    """Whether a model answers."""

    UNKNOWN = "unknown"
    """It was not asked yet."""
    SERVING = "serving"
    FAILING = "failing"
    """Its last call failed, after all retries."""


@dataclass(slots=True, eq=False)
class ModelStatus:
    """How the calls of one model went since the process began. A call is one of a port: a request with its retries."""

    role: str
    """What it is asked as: embedder, next_embedder, reranker, scorer or insights."""
    model: str
    succeeded_us: int = 0
    """When a call last succeeded; 0 if none did."""
    failed_us: int = 0
    """When a call last failed; 0 if none did."""
    failures: int = 0
    """Calls that failed since the last one that succeeded."""
    error: str = ""
    """Of the last call, if it failed: its summary."""

    @property
    def state(self) -> ModelState:
        """What the last call says."""
        if self.failures:
            return ModelState.FAILING
        return ModelState.SERVING if self.succeeded_us else ModelState.UNKNOWN


class Embedder(Protocol):
    """Text to unit vectors."""

    async def model(self) -> EmbeddingModel:
        """Asks the endpoint for its dimension the first time. Raises ModelUnavailable."""
        ...

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        """(len(texts), dimension), rows of unit length. Long texts are cut to the model's limit.

        What an adapter keeps of words is kept for `namespace` alone.
        """
        ...

    async def close(self) -> None: ...


class Scorer(Protocol):
    """Importance in [0, 1] of each text."""

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]: ...


class Insights(Protocol):
    """Higher-level thoughts derived from texts."""

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        """Insights of an enhanced fragment's merged texts; an empty list is an answer."""
        ...

    async def questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]: ...

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """(insight, places in `texts` of the evidence it cites)."""
        ...


class Analyzer(Protocol):
    """Text to lexical terms. Pure and synchronous: microseconds a text.

    `language` is a Snowball algorithm's name, or core.policy.AUTO_LANGUAGE for that of the text's own language.
    """

    async def prepare(self, language: str) -> None:
        """To be awaited before `terms` is asked in a language. Raises ValueError: it is not to be had here, and why."""
        ...

    def terms(self, text: str, language: str, namespace: str = "") -> Terms:
        """Stemmed words without stop words, CJK as characters and pairs; hashes ascending with counts.

        What is kept of words is kept for `namespace` alone.
        """
        ...


class Reranker(Protocol):
    """How well each text answers a question, by a model that reads the two together (a cross-encoder)."""

    @property
    def name(self) -> str: ...

    async def closeness(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """(len(texts),) in [0, 1]. Long texts are cut to the model's limit. Raises ModelUnavailable."""
        ...

    async def close(self) -> None: ...
