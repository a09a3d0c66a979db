"""Models: embedding, importance, insights, decisions about suspicions, and the lexical analyzer.

Contract
- The adapter limits the number of calls, batches them, and handles deadlines, retries and the circuit breaker; the
  engine never calls a model under a memory's lock or inside a transaction.
- `ModelUnavailable` is temporary (retry soon); `ModelRefused` is about the inputs that it names: other inputs are not
  affected, and a later attempt may succeed (another version of the model, a higher limit).
- A malformed reply raises ModelUnavailable after the adapter's retries; it never becomes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memstream_server.core.fitted_weights import MODEL, FittedWeights
from memstream_server.core.suspicions import ConflictDecision
from memstream_server.ports.journal.rows import Terms


class ModelError(Exception):
    """Base of a model's errors.

    The message is for the operator's log: it may name the address, and never contains content. `summary` is for any
    caller of the server: status and class of the error.
    """

    log_text = True

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


class ModelUnavailable(ModelError):
    """The endpoint is down, slow, throttling, or its reply cannot be parsed. `loading`: it answers that it cannot serve
    yet (503), as model servers do while they load a model.
    """

    def __init__(self, message: str, *, summary: str = "", loading: bool = False) -> None:
        super().__init__(message, summary=summary)
        self.loading = loading


class BudgetExhausted(ModelUnavailable):
    """This server's own limits leave no budget for a request; the endpoint was not called."""


class ModelRefused(ModelError):
    """The model refuses these inputs permanently: `inputs` are their indexes in the call."""

    def __init__(self, message: str, inputs: Sequence[int]) -> None:
        super().__init__(message)
        self.inputs = tuple(inputs)


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """An embedding space, and the weights by which its cosines are read."""

    name: str
    dimension: int
    fitted: FittedWeights = MODEL
    instant: bool = False
    """Whether it embeds a few texts within a millisecond, in this process, and refuses none."""
    computed: bool = False
    """Whether the text alone determines every bit of a vector, at no cost: the journal computes vectors, and stores
    none. A change of the computation needs another name."""


@dataclass(slots=True, eq=False)
class Account:
    """Who an LLM call is for, and what it has used: adapters add to it, the caller reads it."""

    namespace: str = ""
    """The namespace whose budget pays."""
    memory: str = ""
    """The memory's uid: an adapter may reuse a cached answer only for this memory."""
    model: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True, eq=False)
class Spent:
    """Usage of a model in one role since the process started; the adapter counts, GetServerInfo reports."""

    role: str
    model: str
    requests: int = 0
    failed: int = 0
    """Requests that returned no value."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ModelState(StrEnum):
    """Whether a model answers."""

    UNKNOWN = "unknown"
    """Not called yet."""
    SERVING = "serving"
    FAILING = "failing"
    """Its last call failed, after all retries."""


@dataclass(slots=True, eq=False)
class ModelStatus:
    """Success of a model's calls since the process started. A call is one of a port: a request with its retries."""

    role: str
    """The model's role: embedder, next_embedder, reranker, scorer, insights or conflicts."""
    model: str
    succeeded_us: int = 0
    """Time of the last success; 0 if there was none."""
    failed_us: int = 0
    """Time of the last failure; 0 if there was none."""
    failures: int = 0
    """Failed calls since the last success."""
    error: str = ""
    """Summary of the last call's error, if it failed."""

    @property
    def state(self) -> ModelState:
        """The state after the last call."""
        if self.failures:
            return ModelState.FAILING
        return ModelState.SERVING if self.succeeded_us else ModelState.UNKNOWN


class Embedder(Protocol):
    """Text to unit vectors."""

    async def model(self) -> EmbeddingModel:
        """The model; the first call asks the endpoint for its dimension. Raises ModelUnavailable."""
        ...

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        """(len(texts), dimension), rows of unit length. Long texts are truncated to the model's limit.

        An adapter caches per `namespace`.
        """
        ...

    async def close(self) -> None: ...


class Scorer(Protocol):
    """Importance in [0, 1] of each text."""

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]: ...


class Insights(Protocol):
    """Higher-level insights derived from texts."""

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        """Insights of an enhanced fragment's merged texts; the list may be empty."""
        ...

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]: ...

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """(insight, indexes in `texts` of the evidence that it cites)."""
        ...

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        """The answer to a question in about so many tokens: (statement, indexes in `texts` of what it follows from)."""
        ...


@dataclass(frozen=True, slots=True)
class Statement:
    """A suspected fragment as a judge reads it."""

    text: str
    speaker: str
    observe_time_us: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge decides about a suspicion."""

    decision: ConflictDecision
    reason: str
    """One printable line; may be empty."""


class ConflictJudge(Protocol):
    """Which of two statements that may contradict each other holds."""

    async def judge(self, newer: Statement, older: Statement, account: Account | None = None) -> Judgement | None:
        """The decision; None if the answer is unclear. Raises ModelUnavailable or ModelRefused."""
        ...


class Analyzer(Protocol):
    """Text to lexical terms. Pure and synchronous: microseconds per text.

    `language` is the name of a Snowball algorithm, or core.policy.AUTO_LANGUAGE for the text's own language.
    """

    @property
    def version(self) -> int:
        """At least 1; stored with the terms. Terms of another version are not comparable."""
        ...

    async def prepare(self, language: str) -> None:
        """Await this before `terms` in a language. Raises ValueError with the reason if it is not available."""
        ...

    def terms(self, text: str, language: str, namespace: str = "", prefix: str = "") -> Terms:
        """Stemmed words with their spellings, CJK as characters and pairs; hashes ascending with counts.

        Stop words count if they are names, or all there is in the text. `prefix`: the date and speaker of a fragment.
        An analyzer caches per `namespace`.
        """
        ...

    def question_terms(self, text: str, language: str, namespace: str = "") -> Terms:
        """The terms of a question, which are found in those of fragments."""
        ...

    def name_terms(self, text: str, names: Sequence[str], language: str, namespace: str = "") -> Terms:
        """The terms of these names, and of the words of a question that its case shows to be names."""
        ...

    def language_of(self, text: str) -> str:
        """The name of the Snowball algorithm for a text's own language."""
        ...


class Reranker(Protocol):
    """How well each text answers a question, by a model that reads both together (a cross-encoder)."""

    @property
    def name(self) -> str: ...

    async def closeness(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """(len(texts),) in [0, 1]. Long texts are truncated to the model's limit. Raises ModelUnavailable."""
        ...

    async def close(self) -> None: ...
