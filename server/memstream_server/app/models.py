"""Builds the models of a server from its settings: embedder, reranker, and the LLM in its roles: it scores, derives
insights and decides conflicts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from memstream_server.app.embedders import EMBEDDERS, OPENAI_URL, Spending, current_embedder, next_embedder
from memstream_server.app.errors import StartError
from memstream_server.engine.context import TOKENIZERS, Tokenizers
from memstream_server.engine.memory.enrich import Candidate
from memstream_server.observability import Metrics
from memstream_server.ports.models import ConflictJudge, Embedder, Insights, ModelStatus, Reranker, Scorer, Spent
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
    from memstream_server.adapters.models.onnx_files import OnnxModelError
    from memstream_server.adapters.models.onnx_models import OnnxReranker

    try:
        return OnnxReranker(directory)
    except OnnxModelError as error:
        raise StartError(str(error)) from error


def load_tokenizers(directory: Path | None) -> Tokenizers:
    """The tokenizers of contexts. Raises StartError."""
    if directory is None:
        return TOKENIZERS
    from memstream_server.adapters.models.onnx_files import OnnxModelError, load_counters

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
