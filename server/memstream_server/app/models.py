"""The models of a server, from its settings: embedder, reranker, and the LLM in its roles: it scores, derives insights
and decides conflicts. The engine gets them with every call recorded, and a check runs at start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from memstream_server.app.embedders import EMBEDDERS, OPENAI_URL, Spending, current_embedder, next_embedder
from memstream_server.app.errors import StartError
from memstream_server.engine.context import TOKENIZERS, Tokenizers
from memstream_server.engine.memory.enrich import Candidate
from memstream_server.observability import Metrics
from memstream_server.ports.models import (
    Account,
    BudgetExhausted,
    ConflictJudge,
    Embedder,
    EmbeddingModel,
    Insights,
    Judgement,
    ModelRefused,
    ModelStatus,
    ModelUnavailable,
    Reranker,
    Scorer,
    Spent,
    Statement,
)
from memstream_server.settings import Settings
from memstream_server.settings.values import headers_of, query_of

if TYPE_CHECKING:
    from memstream_server.adapters.models.openai_chat import ChatModel


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server; tests pass scripted ones. `close_llm` closes the client of the LLM."""

    embedder: Embedder
    scorer: Scorer | None = None
    insights: Insights | None = None
    judge: ConflictJudge | None = None
    scorer_name: str = ""
    insight_name: str = ""
    judge_name: str = ""
    close_llm: Callable[[], Awaitable[None]] | None = None
    spent: Sequence[Spent] = ()
    next: Candidate | None = None
    """The embedder to change to by re-embedding."""
    reranker: Reranker | None = None
    check_llm: Callable[[], Awaitable[None]] | None = None
    """Sends a harmless request to the LLM. Raises ModelUnavailable."""
    statuses: Sequence[ModelStatus] = ()
    """Status per model; empty before `watched`."""
    checks: Sequence[Callable[[], Awaitable[None]]] = ()
    """Send a harmless request to each model; they do not raise."""


def models_of(settings: Settings, metrics: Metrics) -> Models:
    """The models that the settings name; sends no request. Raises StartError for an invalid model or prompt file."""
    return _with_llm(embedding_models(settings, metrics), settings, metrics)


def embedding_models(settings: Settings, metrics: Metrics) -> Models:
    """The embedder, the one to change to, and the reranker."""
    count = metrics.model_tokens.labels("embedder", "prompt").inc
    kind, chosen = EMBEDDERS[settings.embedding], current_embedder(settings)
    usage = Spent("embedder", chosen.model)
    embedder = kind.build(chosen, settings, Spending(usage, count))
    spent = (usage,) if kind.remote else ()
    reranker = _build_reranker(settings.reranker_model_dir)
    if settings.next_embedding is None:
        return Models(embedder, reranker=reranker, spent=spent)
    kind, chosen = EMBEDDERS[settings.next_embedding], next_embedder(settings)
    usage = Spent("next_embedder", chosen.model)
    following = Candidate(kind.build(chosen, settings, Spending(usage, count)), chosen.model if kind.remote else "")
    spent = (*spent, usage) if kind.remote else spent
    return Models(embedder, next=following, reranker=reranker, spent=spent)


def _build_reranker(directory: Path | None) -> Reranker | None:
    if directory is None:
        return None
    from memstream_server.adapters.models.onnx_models import OnnxModelError, OnnxReranker

    try:
        return OnnxReranker(directory)
    except OnnxModelError as error:
        raise StartError(str(error)) from error


def load_tokenizers(directory: Path | None) -> Tokenizers:
    """The tokenizers of contexts. Raises StartError."""
    if directory is None:
        return TOKENIZERS
    from memstream_server.adapters.models.onnx_models import OnnxModelError, load_counters

    try:
        return {**load_counters(directory), **TOKENIZERS}
    except OnnxModelError as error:
        raise StartError(f"tokenizers_dir: {error}") from error


def _with_llm(models: Models, settings: Settings, metrics: Metrics) -> Models:
    """The models with the LLM's scorer, insights and judge, if the settings name an LLM."""
    scores, derives, decides = settings.llm_scoring, settings.llm_insights, settings.llm_conflicts
    if not settings.llm_model or not (scores or derives or decides):
        return models
    from memstream_server.adapters.models.llm_questions import ChatConflictJudge, ChatInsights, ChatScorer
    from memstream_server.adapters.models.prompts import PromptError, load_prompts

    try:
        prompts = load_prompts(settings.llm_prompts_dir)
    except PromptError as error:
        raise StartError(str(error)) from error
    chat = chat_of(settings, metrics)
    return replace(
        models,
        scorer=ChatScorer(chat, prompts.importance, settings.llm_batch_max) if scores else None,
        scorer_name=settings.llm_model if scores else "",
        insights=ChatInsights(chat, prompts) if derives else None,
        insight_name=settings.llm_model if derives else "",
        judge=ChatConflictJudge(chat, prompts.conflict) if decides else None,
        judge_name=settings.llm_model if decides else "",
        close_llm=chat.close,
        check_llm=chat.check_endpoint,
        spent=(*chat.spent.values(), *models.spent),
    )


def chat_of(settings: Settings, metrics: Metrics) -> ChatModel:
    """The LLM client that the settings name; sends no request."""
    from memstream_server.adapters.models.budget import ModelBudget, Rates
    from memstream_server.adapters.models.openai_chat import ChatModel, ModelRole, OpenAIChat, StructuredOutput
    from memstream_server.adapters.models.replies import Usage
    from memstream_server.adapters.models.resilience import Resilience

    def count_call(role: ModelRole, outcome: str, usage: Usage) -> None:
        metrics.model_calls.labels(role.value, outcome).inc()
        metrics.model_tokens.labels(role.value, "prompt").inc(usage.prompt)
        metrics.model_tokens.labels(role.value, "completion").inc(usage.completion)

    return ChatModel(
        OpenAIChat(
            model=settings.llm_model,
            base_url=settings.llm_base_url or OPENAI_URL,
            api_key=settings.llm_api_key.get_secret_value(),
            headers=headers_of(settings.llm_headers),
            query=query_of(settings.llm_query),
            temperature=settings.llm_temperature,
            structured=StructuredOutput(settings.llm_structured.value),
            concurrency=settings.llm_concurrency,
            timeout_s=settings.llm_timeout_s,
            resilience=Resilience(
                attempts=settings.llm_retries + 1, deadline_s=settings.llm_deadline_s, backoff_max_s=30.0
            ),
        ),
        ModelBudget(
            Rates(settings.llm_requests_per_minute, settings.llm_tokens_per_minute),
            Rates(settings.llm_namespace_requests_per_minute, settings.llm_namespace_tokens_per_minute),
        ),
        count_call,
    )


async def check_models(models: Models) -> None:
    """Check all endpoints concurrently. Failures are logged and set in the statuses; they do not stop the server."""
    await asyncio.gather(*(check() for check in models.checks))


def record_models(models: Models, embedding: EmbeddingModel, metrics: Metrics) -> Models:
    """The models with recorded calls, and their statuses in `statuses`. `embedding` is the space of the stored data."""
    watching = _Watching(metrics)
    recorder = watching.add_recorder("embedder", embedding.name)
    embedder = RecordedEmbedder(models.embedder, recorder, metrics, embedding.dimension)
    watching.checks.append(partial(recorder.check_model, embedder.model))
    following = models.next
    if following is not None:
        recorder = watching.add_recorder("next_embedder", following.name)
        following = replace(following, embedder=RecordedEmbedder(following.embedder, recorder, metrics))
        watching.checks.append(partial(recorder.check_model, following.embedder.model))
    reranker, scorer, insights, judge = models.reranker, models.scorer, models.insights, models.judge
    if reranker is not None:
        reranker = RecordedReranker(reranker, watching.add_recorder("reranker", reranker.name))
    recorders: list[Recorder] = []
    if scorer is not None:
        recorders.append(watching.add_recorder("scorer", models.scorer_name))
        scorer = RecordedScorer(scorer, recorders[-1])
    if insights is not None:
        recorders.append(watching.add_recorder("insights", models.insight_name))
        insights = RecordedInsights(insights, recorders[-1])
    if judge is not None:
        recorders.append(watching.add_recorder("conflicts", models.judge_name))
        judge = RecordedConflictJudge(judge, recorders[-1])
    if models.check_llm is not None:
        watching.checks += [partial(one.check_model, models.check_llm) for one in recorders]
    return replace(
        models,
        embedder=embedder,
        next=following,
        reranker=reranker,
        scorer=scorer,
        insights=insights,
        judge=judge,
        statuses=tuple(one.status for one in watching.recorders),
        checks=tuple(watching.checks),
    )


@dataclass(slots=True)
class _Watching:
    """The recorders and checks that `watched` collects."""

    metrics: Metrics
    recorders: list[Recorder] = field(default_factory=list)
    checks: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def add_recorder(self, role: str, model: str) -> Recorder:
        self.recorders.append(Recorder(ModelStatus(role, model), self.metrics))
        return self.recorders[-1]


# Records the outcome of model calls: a status per model, and metrics by role.


log = structlog.get_logger(__name__)


class Recorder:
    """Updates the status and the metrics of one model. `with recorder:` around each call."""

    def __init__(self, status: ModelStatus, metrics: Metrics) -> None:
        self.status = status
        self._failures = metrics.model_failures.labels(status.role)
        self._in_a_row = metrics.model_consecutive_failures.labels(status.role)
        self._success_s = metrics.model_last_success_seconds.labels(status.role)
        self._up = metrics.model_up.labels(status.role)
        self._up.set(1)

    def __enter__(self) -> None:
        """Begin a call; the end of the block records its outcome."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """A refused input is a success; an exhausted budget is ignored."""
        if error is None or isinstance(error, ModelRefused):
            self._record_success()
        elif isinstance(error, ModelUnavailable) and not isinstance(error, BudgetExhausted):
            self._record_failure(error.summary)

    async def check_model(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Send a harmless request; log a failure."""
        try:
            with self:
                await ask()
        except ModelUnavailable as error:
            log.warning("model_check_failed", role=self.status.role, model=self.status.model, error=error)

    def _record_success(self) -> None:
        if self.status.failures:
            self.status.failures, self.status.error = 0, ""
            self._in_a_row.set(0)
            self._up.set(1)
        self.status.succeeded_us = time.time_ns() // 1_000
        self._success_s.set(self.status.succeeded_us / 1e6)

    def _record_failure(self, summary: str) -> None:
        self.status.failures += 1
        self.status.failed_us = time.time_ns() // 1_000
        self.status.error = summary
        self._failures.inc()
        self._in_a_row.set(self.status.failures)
        self._up.set(0)


class RecordedEmbedder:
    """An embedder with timed and recorded calls.

    `dimension` is the stored data's: vectors of another dimension mean that the endpoint's model was replaced.
    """

    def __init__(self, embedder: Embedder, recorder: Recorder, metrics: Metrics, dimension: int | None = None) -> None:
        self._embedder = embedder
        self._recorder = recorder
        self._metrics = metrics
        self._dimension = dimension

    async def model(self) -> EmbeddingModel:
        """The model; not recorded, because later calls send no request."""
        model = await self._embedder.model()
        self._check_dimension(model.dimension)
        return model

    async def embed(self, texts: Sequence[str], namespace: str = "") -> npt.NDArray[np.float32]:
        if not texts:
            return await self._embedder.embed(texts, namespace)
        with self._recorder, self._metrics.model_seconds.time():
            vectors = await self._embedder.embed(texts, namespace)
            self._check_dimension(vectors.shape[1])
            return vectors

    async def close(self) -> None:
        await self._embedder.close()

    def _check_dimension(self, dimension: int) -> None:
        if self._dimension is not None and dimension != self._dimension:
            raise ModelUnavailable(
                f"the model's vectors have {dimension} numbers, those of the data {self._dimension}: "
                "another model answers under its name"
            )


class RecordedScorer:
    """A scorer with recorded calls."""

    def __init__(self, scorer: Scorer, recorder: Recorder) -> None:
        self._scorer = scorer
        self._recorder = recorder

    async def score(self, texts: Sequence[str], account: Account | None = None) -> list[float]:
        if not texts:
            return []
        with self._recorder:
            return await self._scorer.score(texts, account)


class RecordedInsights:
    """Insights with recorded calls."""

    def __init__(self, insights: Insights, recorder: Recorder) -> None:
        self._insights = insights
        self._recorder = recorder

    async def promotion_insights(self, texts: Sequence[str], account: Account | None = None) -> list[str]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.promotion_insights(texts, account)

    async def derive_questions(self, texts: Sequence[str], count: int, account: Account | None = None) -> list[str]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.derive_questions(texts, count, account)

    async def reflect(
        self, question: str, texts: Sequence[str], count: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.reflect(question, texts, count, account)

    async def answer(
        self, question: str, instructions: str, texts: Sequence[str], tokens: int, account: Account | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        if not texts:  # no call
            return []
        with self._recorder:
            return await self._insights.answer(question, instructions, texts, tokens, account)


class RecordedConflictJudge:
    """A judge of conflicts with recorded calls. An unclear answer is a success."""

    def __init__(self, judge: ConflictJudge, recorder: Recorder) -> None:
        self._judge = judge
        self._recorder = recorder

    async def judge(self, newer: Statement, older: Statement, account: Account | None = None) -> Judgement | None:
        with self._recorder:
            return await self._judge.judge(newer, older, account)


class RecordedReranker:
    """A reranker with recorded calls."""

    def __init__(self, reranker: Reranker, recorder: Recorder) -> None:
        self._reranker = reranker
        self._recorder = recorder
        self.name = reranker.name

    async def closeness(self, question: str, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        with self._recorder:
            return await self._reranker.closeness(question, texts)

    async def close(self) -> None:
        await self._reranker.close()
