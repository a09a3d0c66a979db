"""The models of a server: embedder, reranker, and the LLM that scores and derives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from memstream_server.app.errors import StartError
from memstream_server.endpoint_values import headers_of, query_of
from memstream_server.engine.embeddings import Candidate
from memstream_server.observability import Metrics
from memstream_server.ports.models import Embedder, Insights, ModelStatus, Reranker, Scorer, Spent
from memstream_server.settings import EmbeddingKind, Settings

if TYPE_CHECKING:
    from memstream_server.adapters.models.openai_chat import ChatModel

OPENAI_URL = "https://api.openai.com/v1"
"""Where models are asked if no other base URL is set."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server; tests give scripted ones. `close_llm` closes what scorer and insights share."""

    embedder: Embedder
    scorer: Scorer | None = None
    insights: Insights | None = None
    scorer_name: str = ""
    insight_name: str = ""
    close_llm: Callable[[], Awaitable[None]] | None = None
    spent: Sequence[Spent] = ()
    next: Candidate | None = None
    """What everything is to be embedded anew by."""
    reranker: Reranker | None = None
    check_llm: Callable[[], Awaitable[None]] | None = None
    """Asks the LLM's endpoint something harmless. Raises ModelUnavailable."""
    statuses: Sequence[ModelStatus] = ()
    """How the calls of each go, once they are watched."""
    checks: Sequence[Callable[[], Awaitable[None]]] = ()
    """Ask each something harmless; none raises."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An embedding model's endpoint as the settings name it."""

    model: str
    base_url: str
    api_key: SecretStr
    headers: SecretStr
    query: SecretStr


def endpoint_of(settings: Settings) -> Endpoint:
    """That of the model in use."""
    return Endpoint(
        settings.embedding_model,
        settings.embedding_base_url,
        settings.embedding_api_key,
        settings.embedding_headers,
        settings.embedding_query,
    )


def models_of(settings: Settings, metrics: Metrics) -> Models:
    """As the settings name them; nothing is asked yet. Raises StartError for files that are no model, or no prompt."""
    return _with_llm(embedding_models(settings, metrics), settings, metrics)


def embedding_models(settings: Settings, metrics: Metrics) -> Models:
    """The embedder, the next one, and the reranker."""
    spent = metrics.model_tokens.labels("embedder", "prompt").inc
    embedder = _embedder(settings, settings.embedding, settings.embedding_model_dir, endpoint_of(settings), spent)
    reranker = _reranker(settings.reranker_model_dir)
    if settings.next_embedding is None:
        return Models(embedder, reranker=reranker)
    endpoint = Endpoint(
        settings.next_embedding_model,
        settings.next_embedding_base_url,
        settings.next_embedding_api_key,
        settings.next_embedding_headers,
        settings.next_embedding_query,
    )
    following = _embedder(settings, settings.next_embedding, settings.next_embedding_model_dir, endpoint, spent)
    asked = settings.next_embedding is EmbeddingKind.OPENAI
    following_name = settings.next_embedding_model if asked else ""
    return Models(embedder, next=Candidate(following, following_name), reranker=reranker)


def _reranker(directory: Path | None) -> Reranker | None:
    if directory is None:
        return None
    from memstream_server.adapters.models.onnx_files import OnnxModelError
    from memstream_server.adapters.models.onnx_reranker import OnnxReranker

    try:
        return OnnxReranker(directory)
    except OnnxModelError as error:
        raise StartError(str(error)) from error


def _embedder(
    settings: Settings,
    kind: EmbeddingKind,
    directory: Path | None,
    endpoint: Endpoint,
    spent: Callable[[float], None],
) -> Embedder:
    from memstream_server.adapters.models.hashing import HashingEmbedder

    if kind is EmbeddingKind.HASHING:
        return HashingEmbedder()
    if kind is EmbeddingKind.ONNX and directory is not None:
        from memstream_server.adapters.models.onnx_embedder import OnnxEmbedder
        from memstream_server.adapters.models.onnx_files import OnnxModelError

        try:
            return OnnxEmbedder(directory)
        except OnnxModelError as error:
            raise StartError(str(error)) from error
    from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding
    from memstream_server.adapters.models.resilience import Resilience

    return OpenAIEmbedder(
        OpenAIEmbedding(
            model=endpoint.model,
            base_url=endpoint.base_url or OPENAI_URL,
            api_key=endpoint.api_key.get_secret_value(),
            headers=headers_of(endpoint.headers),
            query=query_of(endpoint.query),
            batch_texts=settings.embedding_batch_max,
            input_characters=settings.embedding_input_max_chars,
            concurrency=settings.embedding_concurrency,
            timeout_s=settings.embedding_timeout_s,
            resilience=Resilience(
                attempts=settings.embedding_retries + 1,
                deadline_s=settings.embedding_timeout_s * (settings.embedding_retries + 1),
            ),
        ),
        spent=spent,
    )


def _with_llm(models: Models, settings: Settings, metrics: Metrics) -> Models:
    """The same with the LLM's scorer and insights, where the settings name one."""
    if not settings.llm_model or not (settings.llm_scoring or settings.llm_insights):
        return models
    from memstream_server.adapters.models.insights import ChatInsights
    from memstream_server.adapters.models.prompts import PromptError, load_prompts
    from memstream_server.adapters.models.scoring import ChatScorer

    try:
        prompts = load_prompts(settings.llm_prompts_dir)
    except PromptError as error:
        raise StartError(str(error)) from error
    chat = chat_of(settings, metrics)
    scores, derives = settings.llm_scoring, settings.llm_insights
    return replace(
        models,
        scorer=ChatScorer(chat, prompts.importance, settings.llm_batch_max) if scores else None,
        scorer_name=settings.llm_model if scores else "",
        insights=ChatInsights(chat, prompts) if derives else None,
        insight_name=settings.llm_model if derives else "",
        close_llm=chat.close,
        check_llm=chat.check,
        spent=tuple(chat.spent.values()),
    )


def chat_of(settings: Settings, metrics: Metrics) -> ChatModel:
    """The LLM as the settings name it; nothing is asked yet."""
    from memstream_server.adapters.models.budget import Budget, Rates
    from memstream_server.adapters.models.openai_chat import ChatModel, OpenAIChat, Role, StructuredOutput
    from memstream_server.adapters.models.replies import Usage
    from memstream_server.adapters.models.resilience import Resilience

    def count(role: Role, outcome: str, usage: Usage) -> None:
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
        Budget(
            Rates(settings.llm_requests_per_minute, settings.llm_tokens_per_minute),
            Rates(settings.llm_namespace_requests_per_minute, settings.llm_namespace_tokens_per_minute),
        ),
        count,
    )
