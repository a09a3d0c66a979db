"""Settings of the embedding models, the reranker and the LLM."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_data_path
from pydantic import BaseModel, Field, SecretStr

from memstream_server.settings.values import BaseUrl, EmbeddingKind, Headers, Query, StructuredReplies, setting


class EmbeddingSettings(BaseModel):
    """The embedding model."""

    embedding: EmbeddingKind = setting(
        EmbeddingKind.HASHING,
        "embedding: no model (hashing), an OpenAI-compatible endpoint (openai), or a local model (onnx)",
    )
    models_dir: Path = Field(
        default_factory=lambda: user_data_path("memstream-models", appauthor=False),
        description="directory of the local models that `memstream models` installs",
        json_schema_extra={"unit": "", "default": "the user's data directory, in `memstream-models`"},
    )
    embedding_model_dir: Path | None = setting(
        None,
        "sentence-transformers directory with model.onnx, for embedding = onnx (pip install '.[onnx]'); unset is "
        "the model `embedding_model` of `models_dir`",
    )
    embedding_model: str = setting(
        "",
        "openai: model to request from the endpoint, empty is text-embedding-3-small; onnx: installed model, NAME or "
        "NAME/float32, empty is the one that was installed first",
    )
    embedding_base_url: BaseUrl = setting(
        "", "base URL of the endpoint; empty is OpenAI's own; if nothing answers there, /v1 is appended"
    )
    embedding_api_key: SecretStr = setting(
        SecretStr(""), "key of the endpoint, sent as a bearer token; empty if it needs none"
    )
    embedding_headers: Headers = setting(
        SecretStr(""), "more headers for the endpoint, name=value,name=value; a comma in a value is %2C"
    )
    embedding_query: Query = setting(
        SecretStr(""), "query parameters for the endpoint, name=value&name=value, for instance api-version for Azure"
    )
    embedding_timeout_s: float = setting(15.0, "deadline of one request to the endpoint", "seconds", 0.1, 600)
    embedding_concurrency: int = setting(4, "requests in flight at once", "requests", 1, 256)
    embedding_batch_max: int = setting(128, "texts in one request", "texts", 1, 2_048)
    embedding_input_max_chars: int = setting(
        8_000, "length at which a text sent to the model is truncated", "characters", 100, 1_000_000
    )
    embedding_retries: int = setting(3, "retries of a failed request, with growing jittered waits", "retries", 0, 20)
    embedding_missing_interval_s: float = setting(
        600.0,
        "how soon texts without a vector are sent to the model again; doubles up to 36 times that while none gets one",
        "seconds",
        1,
        86_400,
    )


class TokenizerSettings(BaseModel):
    """The tokenizers of contexts."""

    tokenizers_dir: Path | None = setting(
        None,
        "directory of tokenizers that contexts may count by: NAME.json, of the form of Hugging Face's tokenizer.json, "
        "is the tokenizer NAME (pip install '.[onnx]'); unset: only bytes/4",
    )


class RerankerSettings(BaseModel):
    """The reranker."""

    reranker_model_dir: Path | None = setting(
        None, "directory of a cross-encoder with model.onnx (pip install '.[onnx]'); unset disables the reranker"
    )
    reranker_candidates: int = setting(20, "number of best candidates that it scores", "fragments", 1, 200)
    reranker_weight: float = setting(1.0, "weight of its score in relation to relevance, times beta", "weight", 0, 10)
    reranker_timeout_s: float = setting(
        1.0, "how long a recall waits for it before it answers without it", "seconds", 0.01, 60
    )


class NextEmbeddingSettings(BaseModel):
    """The next embedding model."""

    next_embedding: EmbeddingKind | None = setting(
        None, "embedding that `memstream reindex --embed` switches to; in use once the data is in its space"
    )
    next_embedding_model_dir: Path | None = setting(
        None, "its directory, for next_embedding = onnx, as embedding_model_dir"
    )
    next_embedding_model: str = setting("", "its model, as embedding_model")
    next_embedding_base_url: BaseUrl = setting("", "base URL of its endpoint; empty is OpenAI's own")
    next_embedding_api_key: SecretStr = setting(SecretStr(""), "key of its endpoint; empty if it needs none")
    next_embedding_headers: Headers = setting(SecretStr(""), "more headers for its endpoint, as embedding_headers")
    next_embedding_query: Query = setting(SecretStr(""), "query parameters for its endpoint, as embedding_query")


class LlmSettings(BaseModel):
    """The LLM that rates importance, derives insights and decides conflicts."""

    llm_model: str = setting("", "chat model for importance, insights and conflicts; empty is no LLM")
    llm_base_url: BaseUrl = setting(
        "",
        "base URL of its OpenAI-compatible endpoint; empty is OpenAI's own; if nothing answers there, /v1 is appended",
    )
    llm_api_key: SecretStr = setting(
        SecretStr(""), "key of that endpoint, sent as a bearer token; empty if it needs none"
    )
    llm_headers: Headers = setting(
        SecretStr(""), "more headers for that endpoint, name=value,name=value; a comma in a value is %2C"
    )
    llm_query: Query = setting(SecretStr(""), "query parameters for that endpoint, name=value&name=value")
    llm_scoring: bool = setting(True, "whether the LLM rates observations without an importance")
    llm_insights: bool = setting(True, "whether the LLM derives insights, on promotion and by reflection")
    llm_conflicts: bool = setting(
        True, "whether the LLM decides the suspicions of memories whose policy has `conflicts.ask_llm`"
    )
    llm_temperature: float | None = setting(
        None, "sampling temperature; unset, or refused by the endpoint, it is not sent", "", 0, 2
    )
    llm_structured: StructuredReplies = setting(
        StructuredReplies.AUTO, "ask the endpoint to enforce a JSON schema; auto does so unless the endpoint refuses"
    )
    llm_prompts_dir: Path | None = setting(
        None,
        "directory whose importance.txt, insight.txt, questions.txt, reflection.txt and conflict.txt replace the "
        "built-in prompts",
    )
    llm_timeout_s: float = setting(30.0, "deadline of one request to the LLM", "seconds", 0.1, 600)
    llm_deadline_s: float = setting(60.0, "deadline of a question with its retries and waits", "seconds", 0.1, 3_600)
    llm_retries: int = setting(3, "retries of a failed request or a malformed reply, with jitter", "retries", 0, 20)
    llm_batch_max: int = setting(20, "texts rated in one request", "texts", 1, 200)
    llm_concurrency: int = setting(4, "requests to the LLM in flight at once", "requests", 1, 256)
    llm_requests_per_minute: int = setting(
        0, "requests to the LLM per minute, further ones wait; 0 is no limit", "requests", 0, 1_000_000
    )
    llm_tokens_per_minute: int = setting(
        0,
        "tokens of the LLM per minute, prompts and replies, further requests wait; 0 is no limit",
        "tokens",
        0,
        1_000_000_000,
    )
    llm_namespace_requests_per_minute: int = setting(
        0, "the same for each namespace, so that none uses up the total", "requests", 0, 1_000_000
    )
    llm_namespace_tokens_per_minute: int = setting(
        0, "the same for each namespace, so that none uses up the total", "tokens", 0, 1_000_000_000
    )

    model_check: bool = setting(
        True, "probe every model's endpoint with a harmless request at the start, and log the result"
    )
