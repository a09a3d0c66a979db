"""The settings by subject: the server and what it stores, access (docs/security.md), models, limits of requests."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_data_path
from pydantic import BaseModel, Field, SecretStr

from memstream_server.settings.values import (
    BaseUrl,
    EmbeddingKind,
    Headers,
    JournalUrl,
    Listen,
    LogFormat,
    LogLevel,
    MetricsListen,
    MilvusUri,
    OtlpEndpoint,
    Query,
    StructuredReplies,
    setting,
)


class ServerSettings(BaseModel):
    """Data and addresses."""

    listen: Listen = setting(
        "127.0.0.1:7700", "address of the gRPC server: host:port (port 0 takes any free port) or unix:/path"
    )
    port_file: Path | None = setting(
        None, "file to which the server writes its bound address when it is ready; unset is none"
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("memstream", appauthor=False),
        description="directory of the journal and the embedded index; one server at a time uses it",
        json_schema_extra={"unit": "", "default": "the user's data directory, in `memstream`"},
    )
    http_listen: MetricsListen = setting(
        "127.0.0.1:7701",
        "address of the HTTP port (Connect, gRPC-Web, JSON), host:port; empty is off; "
        "if the default port is in use the server takes a free one",
    )
    http_hosts: str = setting(
        "", "more names that HTTP requests may have as their host, with commas: the public name behind a proxy"
    )
    http_cors_origins: str = setting(
        "", "origins whose pages may call the HTTP port, with commas, such as https://app.example.org; empty is none"
    )
    console: bool = setting(True, "serve the console, a page for people, at / of the HTTP port")
    http_metrics: bool = setting(
        False,
        "serve the Prometheus metrics at /metrics of the HTTP port; with authentication the caller needs the right "
        'admin in the namespace "*"',
    )
    users_file: Path | None = setting(
        None,
        "file on which every user of this server holds a shared lock (flock): the server stops when nobody holds one; "
        "unset runs until a signal",
    )
    advertise: Listen = setting(
        "", "address at which other servers of the same database reach this one, host:port; empty is the bound address"
    )
    metrics_listen: MetricsListen = setting("", "address of the Prometheus endpoint, host:port; empty is off")
    otlp_endpoint: OtlpEndpoint = setting(
        "", "OTLP/gRPC receiver of traces, http://host:port or https:// (pip install '.[otel]'); empty is off"
    )
    trace_ratio: float = setting(1.0, "share of the traces started here that is kept", "share", 0, 1)
    log_level: LogLevel = setting(LogLevel.INFO, "least severe log line written")
    log_format: LogFormat = setting(LogFormat.CONSOLE, "log lines for people or for machines")


class IndexSettings(BaseModel):
    """The vector index."""

    milvus_uri: MilvusUri = setting(
        "",
        "URI of a Milvus server or Zilliz; empty runs Milvus Lite in the data directory, or, with journal_url, none: a "
        "memory whose vectors do not fit in RAM is then searched by its words",
    )
    milvus_token: SecretStr = setting(SecretStr(""), "token of that Milvus, as user:password or an API key")
    milvus_timeout_s: float = setting(10.0, "deadline of connecting to Milvus and of one search", "seconds", 0.1, 600)
    index_partitions: int = setting(
        64, "hash partitions of a new embedded collection; fixed at its creation", "partitions", 1, 4_096
    )
    index_from_fragments: int = setting(
        10_000_000,
        "fragments of one memory from which Milvus Lite is started and filled; at most three quarters of those whose "
        "vectors a memory keeps in RAM. 0: with the first fragment",
        "fragments",
        0,
        10_000_000,
    )
    index_flush_interval_s: float = setting(
        15.0, "longest time that a vector waits for the index", "seconds", 0.05, 3_600
    )
    index_flush_rows: int = setting(8_192, "number of waiting rows that starts a flush at once", "rows", 1, 100_000)
    index_overlay_s: float = setting(
        30.0, "how long the server still searches flushed rows in RAM, because Milvus' reads lag", "seconds", 0, 3_600
    )


class WorkingMemorySettings(BaseModel):
    """Memory of the process."""

    active_memories_max: int = setting(
        1_000, "memories in RAM; the least recently used leave first", "memories", 1, 1_000_000
    )
    active_bytes_max: int = setting(
        1_073_741_824, "estimated bytes of the memories in RAM", "bytes", 1_048_576, 1_099_511_627_776
    )
    dense_bytes_max: int = setting(
        1_099_511_627_776,
        "bytes up to which an active memory keeps its vectors in RAM, for an exact search, and at most a quarter of "
        "active_bytes_max: 4 bytes a number, or 1 and 12 a vector if they are more than 64 MiB; beyond it the memory "
        "searches the vector index",
        "bytes",
        0,
        1_099_511_627_776,
    )


class ImageSettings(BaseModel):
    """Images of memories that are not in RAM."""

    images_bytes_max: int = setting(
        1_073_741_824,
        "disk space for images, which spare the activation of a memory of 1,000 or more fragments most of its reads; 0 "
        "keeps none, and the least recently written leave first",
        "bytes",
        0,
        1_099_511_627_776,
    )


class JournalSettings(BaseModel):
    """The journal."""

    journal_url: JournalUrl = setting(
        SecretStr(""),
        "PostgreSQL database of the journal, postgresql://user:password@host/database; empty keeps it in data_dir",
    )
    lease_s: float = setting(
        10.0, "how long this server owns its memories without renewing its lease", "seconds", 0.5, 600
    )
    lease_renew_s: float = setting(3.0, "how often it renews its lease", "seconds", 0.1, 200)
    disk_free_min_bytes: int = setting(
        268_435_456, "free disk space below which the server refuses writes", "bytes", 0, 1_099_511_627_776
    )
    migration_backups: int = setting(
        2,
        "copies of the journal in data_dir/backups: the server makes one before it migrates the tables of an older "
        "version; 0 makes none. With PostgreSQL there are none: dump the database before an upgrade",
        "copies",
        0,
        100,
    )
    access_flush_interval_s: float = setting(
        15.0, "how often the server writes access times and counts", "seconds", 0.05, 3_600
    )
    maintenance_interval_s: float = setting(
        60.0, "how often the server looks for expired fragments and old answers", "seconds", 0.05, 86_400
    )


PEER_SECRET_CHARS_MIN = 32


class AccessSettings(BaseModel):
    """Authentication and authorization, limits of callers, namespaces and memories."""

    tls_cert_file: Path | None = setting(
        None, "PEM certificate of the server with its chain; you can replace this and the other TLS files while it runs"
    )
    tls_key_file: Path | None = setting(None, "its key, PEM, not encrypted")
    tls_client_ca_file: Path | None = setting(
        None, "CA of client certificates, PEM; every client must then present a certificate, whose URI is its principal"
    )
    tls_peer_ca_file: Path | None = setting(
        None, "CA of the certificates of other servers of the same database; unset is the system's"
    )
    tls_peer_name: str = setting(
        "", "DNS name in the certificates of other servers of the same database; empty is the host of their `advertise`"
    )
    insecure_listen: bool = setting(
        False, "listen beyond loopback without TLS or authentication; for a network that provides both"
    )
    api_keys_file: Path | None = setting(
        None, "API keys, written by `memstream keys`; read again when the file changes"
    )
    jwt_jwks: str = setting("", "keys that verify JWTs: the issuer's JWKS, as an https URL or a file")
    jwt_issuer: str = setting("", "`iss` of accepted JWTs")
    jwt_audience: str = setting(
        "", "`aud` of accepted JWTs: this service, so that tokens for other services are refused"
    )
    trusted_proxies: str = setting(
        "", "proxies whose x-forwarded-client-cert is trusted: networks such as 127.0.0.0/8, and `unix`, with commas"
    )
    access_policy_file: Path | None = setting(
        None, "TOML file of grants: principals, namespaces and verbs; read again when it changes"
    )
    peer_secret: SecretStr = setting(
        SecretStr(""),
        "secret of all servers of one database, which signs the principal of a forwarded call; at least 32 characters",
    )

    caller_streams_max: int = setting(
        192, "streams that one principal may have open; 0 is no limit", "streams", 0, 1_000_000
    )
    caller_calls_max: int = setting(
        256, "unary calls that one principal may have in flight; 0 is no limit", "calls", 0, 1_000_000
    )
    caller_standing_queries_max: int = setting(
        128, "standing queries that one principal may have open; 0 is no limit", "queries", 0, 1_000_000
    )
    caller_requests_per_s: float = setting(
        0.0,
        "calls, opened streams and queries of Recall streams that one principal may send per second; 0 is no limit",
        "requests/s",
        0,
        1e9,
    )
    caller_observations_per_s: float = setting(
        0.0, "observations that one principal may send per second; 0 is no limit", "observations/s", 0, 1e9
    )
    caller_bytes_per_s: float = setting(
        0.0, "bytes of requests that one principal may send per second; 0 is no limit", "bytes/s", 0, 1e12
    )
    caller_cpu_s_per_s: float = setting(
        0.0,
        "seconds that the server may compute for one principal per second, on the event loop and in the journal's "
        "readers; 0 is no limit",
        "s/s",
        0,
        1_000,
    )
    caller_request_bytes_max: int = setting(
        67_108_864,
        "bytes of one principal's requests that are being received or processed; its further calls wait",
        "bytes",
        1_048_576,
        17_179_869_184,
    )

    namespace_memories_max: int = setting(
        0, "memories of one namespace, created by any caller; 0 is no limit", "memories", 0, 1_000_000_000
    )
    namespace_bytes_max: int = setting(
        0,
        "bytes at which a namespace stores no more content: fragments, versions, events, receipts, conversations, "
        "answers to request ids; 0 is no limit",
        "bytes",
        0,
        1_000_000_000_000_000,
    )
    namespace_receipts_bytes_max: int = setting(
        1_073_741_824,
        "bytes of receipts of recalls at which a namespace keeps no more; recalls are then answered without; "
        "0 is no limit",
        "bytes",
        0,
        1_000_000_000_000_000,
    )
    memory_fragments_max: int = setting(
        0,
        "fragments at which a memory takes no more observations, including forgotten ones until they are erased; "
        "0 is no limit",
        "fragments",
        0,
        1_000_000_000,
    )

    memory_blocks_max: int = setting(64, "blocks of one memory", "blocks", 1, 1_024)
    block_versions_max: int = setting(
        32, "versions of a block that are kept, the present one included", "versions", 1, 1_024
    )

    @property
    def authenticates(self) -> bool:
        """Whether the server authenticates callers."""
        return bool(self.api_keys_file or self.jwt_jwks or self.tls_client_ca_file or self.trusted_proxies)

    def check_access(self, shared: bool) -> None:
        """Raises ValueError if these settings contradict each other. `shared`: several servers may use the journal."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if self.tls_cert_file is None and (self.tls_client_ca_file or self.tls_peer_ca_file or self.tls_peer_name):
            raise ValueError(
                "tls_client_ca_file, tls_peer_ca_file and tls_peer_name need tls_cert_file and tls_key_file"
            )
        if bool(self.jwt_jwks) != bool(self.jwt_issuer) or bool(self.jwt_jwks) != bool(self.jwt_audience):
            raise ValueError("jwt_jwks, jwt_issuer and jwt_audience go together")
        if self.authenticates != (self.access_policy_file is not None):
            raise ValueError(
                "access_policy_file goes with what says who calls: "
                "api_keys_file, jwt_jwks, tls_client_ca_file or trusted_proxies"
            )
        if self.authenticates and shared and not self.peer_secret.get_secret_value():
            raise ValueError("servers of one database that ask who calls need a peer_secret")
        if 0 < len(self.peer_secret.get_secret_value()) < PEER_SECRET_CHARS_MIN:
            raise ValueError(f"peer_secret must have at least {PEER_SECRET_CHARS_MIN} characters")


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


class RequestSettings(BaseModel):
    """Limits of requests."""

    content_max_bytes: int = setting(
        65_536, "longest content of an observation, in bytes of UTF-8", "bytes", 1, 4_194_304
    )
    batch_max: int = setting(1_024, "observations in one batch", "observations", 1, 100_000)
    message_max_bytes: int = setting(
        4_194_304,
        "largest gRPC message of Observe, ObserveBatch, ImportMemories and SavePlans, and body of a conversation's "
        "message; other rpcs have at most 262,144 bytes, or four times content_max_bytes",
        "bytes",
        65_536,
        268_435_456,
    )
    message_fields_max: int = setting(
        131_072,
        "fields of a gRPC message of those rpcs, including its sub-messages; other rpcs have at most an eighth; a "
        "field costs up to 150 bytes of RAM",
        "fields",
        1_024,
        16_777_216,
    )
    id_max_chars: int = setting(
        128, "longest namespace, memory, producer, session or external id", "characters", 8, 1_024
    )
    metadata_entries_max: int = setting(64, "metadata entries of an observation", "entries", 0, 1_024)
    metadata_max_bytes: int = setting(
        16_384, "metadata of an observation, keys and values in UTF-8", "bytes", 0, 1_048_576
    )
    page_size_max: int = setting(1_000, "items of one page; a larger page_size is reduced to this", "items", 1, 10_000)
    recall_limit_max: int = setting(1_000, "recollections of one answer", "fragments", 1, 10_000)

    import_max_bytes: int = setting(
        17_179_869_184, "size of one import, which the server stores on disk first", "bytes", 1, 1_099_511_627_776
    )


class StreamSettings(BaseModel):
    """Limits of streams and connections."""

    window_observations: int = setting(
        4_096, "observations that a stream may have in flight before *received*", "observations", 1, 1_000_000
    )
    window_bytes: int = setting(
        16_777_216,
        "bytes of content that a stream may have in flight before *received*",
        "bytes",
        65_536,
        1_073_741_824,
    )
    connection_streams_max: int = setting(
        256,
        "calls and streams that one connection may have open (HTTP/2); a client holds back the excess",
        "streams",
        1,
        1_000_000,
    )
    port_connections_max: int = setting(
        4_096,
        "connections of the gRPC port, and of the HTTP port; fewer if the limit of open files (ulimit -n) allows less",
        "connections",
        1,
        1_000_000,
    )
    address_connections_max: int = setting(
        1_024,
        "connections of one address on one port, at most half of the port's; `trusted_proxies` have no such bound",
        "connections",
        1,
        1_000_000,
    )
    streams_max: int = setting(4_096, "streams open at once", "streams", 1, 1_000_000)
    recall_in_flight_max: int = setting(64, "queries in flight on one Recall stream", "queries", 1, 10_000)
    standing_queries_max: int = setting(
        1_024, "standing queries open at once; each is ranked again after commits", "queries", 1, 1_000_000
    )
    memory_standing_queries_max: int = setting(
        512, "standing queries open at once on one memory", "queries", 1, 1_000_000
    )
    calls_in_flight_max: int = setting(1_024, "unary calls in flight, of all clients together", "calls", 1, 1_000_000)
    opening_max_s: float = setting(
        20.0,
        "how long a connection may take for its HTTP/2 (and TLS) handshake, and a stream until its first message",
        "seconds",
        0.1,
        3_600,
    )
    connection_idle_max_s: float = setting(
        1_800.0,
        "how long a connection without a call stays open; clients reconnect automatically",
        "seconds",
        0.1,
        86_400,
    )
    watch_stalled_max_s: float = setting(
        600.0,
        "how long a watcher may leave events unread before its stream ends; it can resume",
        "seconds",
        0.1,
        86_400,
    )
    drain_grace_s: float = setting(
        10.0, "how long streams may finish after SIGTERM, and then the index's backlog", "seconds", 0, 600
    )
