"""The embedders that a server can use, by the setting `embedding`.

A new embedder is a module in adapters/models, a line in `EmbeddingKind`, and a line in `EMBEDDERS`. The start
and `memstream doctor` read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from memstream_server.app.errors import StartError
from memstream_server.ports.models import Embedder, Spent
from memstream_server.settings import EmbeddingKind, Settings
from memstream_server.settings.values import headers_of, query_of

OPENAI_URL = "https://api.openai.com/v1"
"""Default base URL of model endpoints."""
OPENAI_MODEL = "text-embedding-3-small"
"""Default model of an endpoint."""


@dataclass(frozen=True, slots=True)
class Spending:
    """Where an embedder of an endpoint counts: its requests and tokens, and the metric of tokens."""

    usage: Spent
    count_tokens: Callable[[float], None]

    @classmethod
    def nowhere(cls) -> Spending:
        """For an embedder that is asked nothing."""
        return cls(Spent("embedder", ""), lambda _tokens: None)


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """The settings of one embedder: `embedding*`, or `next_embedding*` for the one to change to."""

    model_dir: Path | None
    model: str
    base_url: str
    api_key: SecretStr
    headers: SecretStr
    query: SecretStr

    @property
    def endpoint_model(self) -> str:
        """The model to request from an endpoint."""
        return self.model or OPENAI_MODEL


@dataclass(frozen=True, slots=True)
class EmbedderKind:
    """How to build one kind of embedder, and what a start may ask it."""

    build: Callable[[EmbedderSettings, Settings, Spending], Embedder]
    remote: bool = False
    """It asks an endpoint. The requested model names its space, and only the first start asks for the dimension."""


def current_embedder(settings: Settings) -> EmbedderSettings:
    """The settings `embedding*`."""
    return EmbedderSettings(
        settings.embedding_model_dir,
        settings.embedding_model,
        settings.embedding_base_url,
        settings.embedding_api_key,
        settings.embedding_headers,
        settings.embedding_query,
    )


def next_embedder(settings: Settings) -> EmbedderSettings:
    """The settings `next_embedding*`."""
    return EmbedderSettings(
        settings.next_embedding_model_dir,
        settings.next_embedding_model,
        settings.next_embedding_base_url,
        settings.next_embedding_api_key,
        settings.next_embedding_headers,
        settings.next_embedding_query,
    )


def explain_choice(settings: Settings) -> str:
    """What chose among several installed models, if the settings name none; else empty."""
    if settings.embedding is not EmbeddingKind.ONNX or settings.embedding_model_dir or settings.embedding_model:
        return ""
    from memstream_server.adapters.models.local.store import list_installed

    names = [model.name for model in list_installed(settings.models_dir)]
    return f"; installed first of {', '.join(names)}, embedding_model names another" if len(names) > 1 else ""


def _build_hashing(chosen: EmbedderSettings, settings: Settings, spent: Spending) -> Embedder:
    from memstream_server.adapters.models.hashing import HashingEmbedder

    return HashingEmbedder()


def _build_onnx(chosen: EmbedderSettings, settings: Settings, spent: Spending) -> Embedder:
    from memstream_server.adapters.models.local.store import ModelNotInstalled, choose_installed
    from memstream_server.adapters.models.onnx_models import OnnxEmbedder, OnnxModelError

    try:
        return OnnxEmbedder(chosen.model_dir or choose_installed(settings.models_dir, chosen.model))
    except (ModelNotInstalled, OnnxModelError) as error:
        raise StartError(str(error)) from error


def _build_openai(chosen: EmbedderSettings, settings: Settings, spent: Spending) -> Embedder:
    from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding
    from memstream_server.adapters.models.resilience import Resilience

    return OpenAIEmbedder(
        OpenAIEmbedding(
            model=chosen.endpoint_model,
            base_url=chosen.base_url or OPENAI_URL,
            api_key=chosen.api_key.get_secret_value(),
            headers=headers_of(chosen.headers),
            query=query_of(chosen.query),
            batch_texts=settings.embedding_batch_max,
            input_characters=settings.embedding_input_max_chars,
            concurrency=settings.embedding_concurrency,
            timeout_s=settings.embedding_timeout_s,
            resilience=Resilience(
                attempts=settings.embedding_retries + 1,
                deadline_s=settings.embedding_timeout_s * (settings.embedding_retries + 1),
            ),
        ),
        spent=spent.count_tokens,
        usage=spent.usage,
    )


EMBEDDERS: Mapping[EmbeddingKind, EmbedderKind] = {
    EmbeddingKind.HASHING: EmbedderKind(_build_hashing),
    EmbeddingKind.ONNX: EmbedderKind(_build_onnx),
    EmbeddingKind.OPENAI: EmbedderKind(_build_openai, remote=True),
}
"""All embedders. Builders import their adapters when called: onnxruntime is optional."""
