"""The settings of the process: each with meaning, unit, bounds and default, from flags, environment and a file.

The tunables of a memory are its policy (core/policy.py); settings apply to the whole server. Precedence: a command-line
flag, then the environment (MEMSTREAM_ and the name in capitals), then the TOML file, then the default. docs/settings.md
is generated from this class.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from platformdirs import user_data_path
from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from memstream_server.endpoint_values import BaseUrl, Headers, Query

ENV_PREFIX = "MEMSTREAM_"
PEER_SECRET_CHARS_MIN = 32
CONFIG_VARIABLE = "MEMSTREAM_CONFIG"


class SettingsError(ValueError):
    """A setting is unknown, malformed or out of bounds; the text names each. The operator must correct it."""


class EmbeddingKind(StrEnum):
    """Where embeddings come from."""

    HASHING = "hashing"
    OPENAI = "openai"
    ONNX = "onnx"


class StructuredReplies(StrEnum):
    """Whether an LLM's endpoint is asked to hold its replies to a JSON schema."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """The least severe log line written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log lines are written."""

    CONSOLE = "console"
    JSON = "json"


def parse_listen(address: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[IPv6]:port"; port 0 lets the system choose. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"must be host:port with a port of 0 to 65535, is {address!r}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ip_address(host)
    elif ":" in host:
        raise ValueError(f"an IPv6 host goes in brackets, as in [::1]:7700; is {address!r}")
    return host, int(port)


def _checked_listen(address: str) -> str:
    if address and not address.startswith("unix:"):
        parse_listen(address)
    return address


def _checked_metrics_listen(address: str) -> str:
    if address:
        parse_listen(address)
    return address


Listen = Annotated[str, AfterValidator(_checked_listen)]
MetricsListen = Annotated[str, AfterValidator(_checked_metrics_listen)]


def _checked_journal_url(url: SecretStr) -> SecretStr:
    if url.get_secret_value() and not url.get_secret_value().startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    return url


JournalUrl = Annotated[SecretStr, AfterValidator(_checked_journal_url)]


def _checked_otlp_endpoint(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return url


OtlpEndpoint = Annotated[str, AfterValidator(_checked_otlp_endpoint)]


def _setting(default: Any, meaning: str, unit: str = "", low: float | None = None, high: float | None = None) -> Any:
    return Field(default, description=meaning, ge=low, le=high, json_schema_extra={"unit": unit}, validate_default=True)


def is_loopback(host: str) -> bool:
    """Whether the name or address is loopback, which only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Settings(BaseSettings):
    """All settings of a server process. Immutable; create one with `load`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    # ---- data and addresses
    listen: Listen = _setting(
        "127.0.0.1:7700", "address of the gRPC server: host:port (port 0 takes any free port) or unix:/path"
    )
    port_file: Path | None = _setting(
        None, "file to which the server writes its bound address when it is ready; unset is none"
    )
    data_dir: Path = Field(
        default_factory=lambda: user_data_path("memstream", appauthor=False),
        description="directory of the journal and the embedded index; one server at a time uses it",
        json_schema_extra={"unit": "", "default": "the user's data directory, in `memstream`"},
    )
    http_listen: MetricsListen = _setting(
        "127.0.0.1:7701",
        "address of the HTTP port (Connect, gRPC-Web, JSON), host:port; empty is off; "
        "if the default port is in use the server runs without it",
    )
    http_hosts: str = _setting(
        "", "more names that HTTP requests may have as their host, with commas: the public name behind a proxy"
    )
    http_cors_origins: str = _setting(
        "", "origins whose pages may call the HTTP port, with commas, such as https://app.example.org; empty is none"
    )
    users_file: Path | None = _setting(
        None,
        "file on which every user of this server holds a shared lock (flock): the server stops when nobody holds one; "
        "unset runs until a signal",
    )
    advertise: Listen = _setting(
        "", "address at which other servers of the same database reach this one, host:port; empty is the bound address"
    )
    metrics_listen: MetricsListen = _setting("", "address of the Prometheus endpoint, host:port; empty is off")
    otlp_endpoint: OtlpEndpoint = _setting(
        "", "OTLP/gRPC receiver of traces, http://host:port or https:// (pip install memstream[otel]); empty is off"
    )
    trace_ratio: float = _setting(1.0, "share of the traces started here that is kept", "share", 0, 1)
    log_level: LogLevel = _setting(LogLevel.INFO, "least severe log line written")
    log_format: LogFormat = _setting(LogFormat.CONSOLE, "log lines for people or for machines")

    # ---- authentication and authorization (docs/security.md)
    tls_cert_file: Path | None = _setting(
        None, "PEM certificate of the server with its chain; you can replace this and the other TLS files while it runs"
    )
    tls_key_file: Path | None = _setting(None, "its key, PEM, not encrypted")
    tls_client_ca_file: Path | None = _setting(
        None, "CA of client certificates, PEM; every client must then present a certificate, whose URI is its principal"
    )
    tls_peer_ca_file: Path | None = _setting(
        None, "CA of the certificates of other servers of the same database; unset is the system's"
    )
    tls_peer_name: str = _setting(
        "",
        "DNS name in the certificates of other servers of the same database; empty is the host of their `advertise`",
    )
    insecure_listen: bool = _setting(
        False, "listen beyond loopback without TLS or authentication; for a network that provides both"
    )
    api_keys_file: Path | None = _setting(
        None, "API keys, written by `memstream keys`; read again when the file changes"
    )
    jwt_jwks: str = _setting("", "keys that verify JWTs: the issuer's JWKS, as an https URL or a file")
    jwt_issuer: str = _setting("", "`iss` of accepted JWTs")
    jwt_audience: str = _setting(
        "", "`aud` of accepted JWTs: this service, so that tokens for other services are refused"
    )
    trusted_proxies: str = _setting(
        "",
        "proxies whose x-forwarded-client-cert is trusted: networks such as 127.0.0.0/8, and `unix`, with commas",
    )
    access_policy_file: Path | None = _setting(
        None, "TOML file of grants: principals, namespaces and verbs; read again when it changes"
    )
    peer_secret: SecretStr = _setting(
        SecretStr(""),
        "secret of all servers of one database, which signs the principal of a forwarded call; at least 32 characters",
    )

    caller_streams_max: int = _setting(
        192, "streams that one principal may have open; 0 is no limit", "streams", 0, 1_000_000
    )
    caller_calls_max: int = _setting(
        256, "unary calls that one principal may have in flight; 0 is no limit", "calls", 0, 1_000_000
    )
    caller_requests_per_s: float = _setting(
        0.0,
        "calls, opened streams and queries of Recall streams that one principal may send per second; 0 is no limit",
        "requests/s",
        0,
        1e9,
    )
    caller_observations_per_s: float = _setting(
        0.0, "observations that one principal may send per second; 0 is no limit", "observations/s", 0, 1e9
    )
    caller_bytes_per_s: float = _setting(
        0.0, "bytes of requests that one principal may send per second; 0 is no limit", "bytes/s", 0, 1e12
    )
    caller_request_bytes_max: int = _setting(
        67_108_864,
        "bytes of one principal's requests that are being received or processed; its further calls wait",
        "bytes",
        1_048_576,
        17_179_869_184,
    )

    namespace_memories_max: int = _setting(
        0, "memories of one namespace, created by any caller; 0 is no limit", "memories", 0, 1_000_000_000
    )
    memory_fragments_max: int = _setting(
        0,
        "fragments at which a memory takes no more observations, including forgotten ones until they are erased; "
        "0 is no limit",
        "fragments",
        0,
        1_000_000_000,
    )

    # ---- the vector index
    milvus_uri: str = _setting("", "URI of a Milvus server or Zilliz; empty runs Milvus Lite in the data directory")
    milvus_token: SecretStr = _setting(SecretStr(""), "token of that Milvus, as user:password or an API key")
    milvus_timeout_s: float = _setting(10.0, "deadline of connecting to Milvus and of one search", "seconds", 0.1, 600)
    index_partitions: int = _setting(
        64, "hash partitions of a new embedded collection; fixed at its creation", "partitions", 1, 4_096
    )
    index_flush_interval_s: float = _setting(
        15.0, "longest time that a vector waits for the index", "seconds", 0.05, 3_600
    )
    index_flush_rows: int = _setting(8_192, "number of waiting rows that starts a flush at once", "rows", 1, 100_000)
    index_overlay_s: float = _setting(
        30.0, "how long the server still searches flushed rows in RAM, because Milvus' reads lag", "seconds", 0, 3_600
    )

    # ---- the embedding model
    embedding: EmbeddingKind = _setting(
        EmbeddingKind.HASHING,
        "embedding: no model (hashing), an OpenAI-compatible endpoint (openai), or a local model (onnx)",
    )
    models_dir: Path = Field(
        default_factory=lambda: user_data_path("memstream-models", appauthor=False),
        description="directory of the local models that `memstream models` installs",
        json_schema_extra={"unit": "", "default": "the user's data directory, in `memstream-models`"},
    )
    embedding_model_dir: Path | None = _setting(
        None,
        "sentence-transformers directory with model.onnx, for embedding = onnx (pip install memstream[onnx]); unset is "
        "the installed model of `models_dir`",
    )
    embedding_model: str = _setting("text-embedding-3-small", "model to request from the endpoint")
    embedding_base_url: BaseUrl = _setting(
        "", "base URL of the endpoint; empty is OpenAI's own; if nothing answers there, /v1 is appended"
    )
    embedding_api_key: SecretStr = _setting(
        SecretStr(""), "key of the endpoint, sent as a bearer token; empty if it needs none"
    )
    embedding_headers: Headers = _setting(
        SecretStr(""), "more headers for the endpoint, name=value,name=value; a comma in a value is %2C"
    )
    embedding_query: Query = _setting(
        SecretStr(""), "query parameters for the endpoint, name=value&name=value, for instance api-version for Azure"
    )
    embedding_timeout_s: float = _setting(15.0, "deadline of one request to the endpoint", "seconds", 0.1, 600)
    embedding_concurrency: int = _setting(4, "requests in flight at once", "requests", 1, 256)
    embedding_batch_max: int = _setting(128, "texts in one request", "texts", 1, 2_048)
    embedding_input_max_chars: int = _setting(
        8_000, "length at which a text sent to the model is truncated", "characters", 100, 1_000_000
    )
    embedding_retries: int = _setting(3, "retries of a failed request, with growing jittered waits", "retries", 0, 20)

    # ---- the reranker
    reranker_model_dir: Path | None = _setting(
        None, "directory of a cross-encoder with model.onnx (pip install memstream[onnx]); unset disables the reranker"
    )
    reranker_candidates: int = _setting(20, "number of best candidates that it scores", "fragments", 1, 200)
    reranker_weight: float = _setting(1.0, "weight of its score in relation to relevance, times beta", "weight", 0, 10)
    reranker_timeout_s: float = _setting(
        1.0, "how long a recall waits for it before it answers without it", "seconds", 0.01, 60
    )

    # ---- the next embedding model
    next_embedding: EmbeddingKind | None = _setting(
        None, "embedding that `memstream reindex --embed` switches to; in use once the data is in its space"
    )
    next_embedding_model_dir: Path | None = _setting(
        None, "its directory, for next_embedding = onnx, as embedding_model_dir"
    )
    next_embedding_model: str = _setting("text-embedding-3-small", "model to request from its endpoint")
    next_embedding_base_url: BaseUrl = _setting("", "base URL of its endpoint; empty is OpenAI's own")
    next_embedding_api_key: SecretStr = _setting(SecretStr(""), "key of its endpoint; empty if it needs none")
    next_embedding_headers: Headers = _setting(SecretStr(""), "more headers for its endpoint, as embedding_headers")
    next_embedding_query: Query = _setting(SecretStr(""), "query parameters for its endpoint, as embedding_query")

    # ---- the LLM that rates importance and derives insights
    llm_model: str = _setting("", "chat model for importance and insights; empty is no LLM")
    llm_base_url: BaseUrl = _setting(
        "",
        "base URL of its OpenAI-compatible endpoint; empty is OpenAI's own; if nothing answers there, /v1 is appended",
    )
    llm_api_key: SecretStr = _setting(
        SecretStr(""), "key of that endpoint, sent as a bearer token; empty if it needs none"
    )
    llm_headers: Headers = _setting(
        SecretStr(""), "more headers for that endpoint, name=value,name=value; a comma in a value is %2C"
    )
    llm_query: Query = _setting(SecretStr(""), "query parameters for that endpoint, name=value&name=value")
    llm_scoring: bool = _setting(True, "whether the LLM rates observations without an importance")
    llm_insights: bool = _setting(True, "whether the LLM derives insights, on promotion and by reflection")
    llm_temperature: float | None = _setting(
        None, "sampling temperature; unset, or refused by the endpoint, it is not sent", "", 0, 2
    )
    llm_structured: StructuredReplies = _setting(
        StructuredReplies.AUTO, "ask the endpoint to enforce a JSON schema; auto does so unless the endpoint refuses"
    )
    llm_prompts_dir: Path | None = _setting(
        None,
        "directory whose importance.txt, insight.txt, questions.txt and reflection.txt replace the built-in prompts",
    )
    llm_timeout_s: float = _setting(30.0, "deadline of one request to the LLM", "seconds", 0.1, 600)
    llm_deadline_s: float = _setting(60.0, "deadline of a question with its retries and waits", "seconds", 0.1, 3_600)
    llm_retries: int = _setting(3, "retries of a failed request or a malformed reply, with jitter", "retries", 0, 20)
    llm_batch_max: int = _setting(20, "texts rated in one request", "texts", 1, 200)
    llm_concurrency: int = _setting(4, "requests to the LLM in flight at once", "requests", 1, 256)
    llm_requests_per_minute: int = _setting(
        0, "requests to the LLM per minute, further ones wait; 0 is no limit", "requests", 0, 1_000_000
    )
    llm_tokens_per_minute: int = _setting(
        0,
        "tokens of the LLM per minute, prompts and replies, further requests wait; 0 is no limit",
        "tokens",
        0,
        1_000_000_000,
    )
    llm_namespace_requests_per_minute: int = _setting(
        0, "the same for each namespace, so that none uses up the total", "requests", 0, 1_000_000
    )
    llm_namespace_tokens_per_minute: int = _setting(
        0, "the same for each namespace, so that none uses up the total", "tokens", 0, 1_000_000_000
    )

    model_check: bool = _setting(
        True, "probe every model's endpoint with a harmless request at the start, and log the result"
    )

    # ---- limits of requests
    content_max_bytes: int = _setting(
        65_536, "longest content of an observation, in bytes of UTF-8", "bytes", 1, 4_194_304
    )
    batch_max: int = _setting(1_024, "observations in one batch", "observations", 1, 100_000)
    message_max_bytes: int = _setting(
        4_194_304,
        "largest gRPC message of Observe, ObserveBatch, ImportMemories and SavePlans; other rpcs have at most 262,144 "
        "bytes, or four times content_max_bytes",
        "bytes",
        65_536,
        268_435_456,
    )
    message_fields_max: int = _setting(
        131_072,
        "fields of a gRPC message of those rpcs, including its sub-messages; other rpcs have at most an eighth; a "
        "field costs up to 150 bytes of RAM",
        "fields",
        1_024,
        16_777_216,
    )
    id_max_chars: int = _setting(
        128, "longest namespace, memory, producer, session or external id", "characters", 8, 1_024
    )
    metadata_entries_max: int = _setting(64, "metadata entries of an observation", "entries", 0, 1_024)
    metadata_max_bytes: int = _setting(
        16_384, "metadata of an observation, keys and values in UTF-8", "bytes", 0, 1_048_576
    )
    page_size_max: int = _setting(1_000, "items of one page; a larger page_size is reduced to this", "items", 1, 10_000)
    recall_limit_max: int = _setting(1_000, "recollections of one answer", "fragments", 1, 10_000)

    import_max_bytes: int = _setting(
        17_179_869_184, "size of one import, which the server stores on disk first", "bytes", 1, 1_099_511_627_776
    )

    # ---- streams
    window_observations: int = _setting(
        4_096, "observations that a stream may have in flight before *received*", "observations", 1, 1_000_000
    )
    window_bytes: int = _setting(
        16_777_216,
        "bytes of content that a stream may have in flight before *received*",
        "bytes",
        65_536,
        1_073_741_824,
    )
    connection_streams_max: int = _setting(
        256,
        "calls and streams that one connection may have open (HTTP/2); a client holds back the excess",
        "streams",
        1,
        1_000_000,
    )
    streams_max: int = _setting(4_096, "streams open at once", "streams", 1, 1_000_000)
    recall_in_flight_max: int = _setting(64, "queries in flight on one Recall stream", "queries", 1, 10_000)
    calls_in_flight_max: int = _setting(1_024, "unary calls in flight, of all clients together", "calls", 1, 1_000_000)
    opening_max_s: float = _setting(
        20.0,
        "how long a connection may take for its HTTP/2 (and TLS) handshake, and a stream until its first message",
        "seconds",
        0.1,
        3_600,
    )
    connection_idle_max_s: float = _setting(
        1_800.0,
        "how long a connection without a call stays open; clients reconnect automatically",
        "seconds",
        0.1,
        86_400,
    )
    watch_stalled_max_s: float = _setting(
        600.0,
        "how long a watcher may leave events unread before its stream ends; it can resume",
        "seconds",
        0.1,
        86_400,
    )
    drain_grace_s: float = _setting(10.0, "how long streams may finish after SIGTERM", "seconds", 0, 600)

    # ---- memory of the process
    active_memories_max: int = _setting(
        1_000, "memories in RAM; the least recently used leave first", "memories", 1, 1_000_000
    )
    active_bytes_max: int = _setting(
        1_073_741_824, "estimated bytes of the memories in RAM", "bytes", 1_048_576, 1_099_511_627_776
    )
    dense_in_memory_max: int = _setting(
        200_000,
        "fragments up to which an active memory keeps its vectors in RAM, if they take less than a quarter of "
        "active_bytes_max, for an exact search",
        "fragments",
        0,
        10_000_000,
    )

    # ---- the journal
    journal_url: JournalUrl = _setting(
        SecretStr(""),
        "PostgreSQL database of the journal, postgresql://user:password@host/database; empty keeps it in data_dir",
    )
    lease_s: float = _setting(
        10.0,
        "how long this server owns its memories without renewing its lease",
        "seconds",
        0.5,
        600,
    )
    lease_renew_s: float = _setting(3.0, "how often it renews its lease", "seconds", 0.1, 200)
    disk_free_min_bytes: int = _setting(
        268_435_456, "free disk space below which the server refuses writes", "bytes", 0, 1_099_511_627_776
    )
    access_flush_interval_s: float = _setting(
        15.0, "how often the server writes access times and counts", "seconds", 0.05, 3_600
    )
    maintenance_interval_s: float = _setting(
        60.0, "how often the server looks for expired fragments and old answers", "seconds", 0.05, 86_400
    )

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.content_max_bytes > self.message_max_bytes // 2:
            raise ValueError("content_max_bytes must be at most half of message_max_bytes")
        if self.content_max_bytes > self.window_bytes:
            raise ValueError("window_bytes must hold at least one content of content_max_bytes")
        if self.lease_renew_s > self.lease_s / 2:
            raise ValueError("lease_renew_s must be at most half of lease_s")
        self._check_access()
        return self

    def _check_access(self) -> None:
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
        if self.authenticates and self.journal_url.get_secret_value() and not self.peer_secret.get_secret_value():
            raise ValueError("servers of one database that ask who calls need a peer_secret")
        if 0 < len(self.peer_secret.get_secret_value()) < PEER_SECRET_CHARS_MIN:
            raise ValueError(f"peer_secret must have at least {PEER_SECRET_CHARS_MIN} characters")
        for name, address in (("listen", self.listen), ("http_listen", self.http_listen)):
            if missing := self._lacking_protection(address):
                raise ValueError(
                    f"{name} is {address}, beyond loopback, without {missing}: see docs/security.md; "
                    "insecure_listen listens there all the same"
                )

    @property
    def authenticates(self) -> bool:
        """Whether the server authenticates callers."""
        return bool(self.api_keys_file or self.jwt_jwks or self.tls_client_ca_file or self.trusted_proxies)

    def secrets(self) -> list[str]:
        """Values that must not be shown anywhere."""
        values = (getattr(self, name) for name in type(self).model_fields)
        return [text for value in values if isinstance(value, SecretStr) and (text := value.get_secret_value())]

    def unprotected(self, allowed: bool = False) -> str:
        """What a port beyond loopback lacks: "TLS", "authentication", or both joined by "and"; empty if nothing.

        `allowed`: whether to return it even if insecure_listen allows it.
        """
        return self._lacking_protection(self.listen, allowed) or self._lacking_protection(self.http_listen, allowed)

    def _lacking_protection(self, address: str, allowed: bool = False) -> str:
        if not address or address.startswith("unix:") or is_loopback(parse_listen(address)[0]):
            return ""
        if self.insecure_listen and not allowed:
            return ""
        lacks = {"TLS": self.tls_cert_file is None, "authentication": not self.authenticates}
        return " and ".join(name for name, lacking in lacks.items() if lacking)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then environment, then file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(config: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The current settings. `config` (else $MEMSTREAM_CONFIG) is a TOML file of names and values.

    `flags` are settings by name; None means not given. Raises SettingsError.
    """
    path = config or (Path(named) if (named := os.environ.get(CONFIG_VARIABLE)) else None)
    if path is not None and not path.is_file():
        raise SettingsError(f"there is no settings file {path}")
    given = {name: value for name, value in (flags or {}).items() if value is not None}

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    try:
        return FromFile(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_problem(item) for item in error.errors(include_url=False))) from None
    except ValueError as error:  # invalid TOML
        raise SettingsError(f"{path}: {error}") from None


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """MEMSTREAM_ variables that name no setting: misspelt ones, for a warning at start."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields} | {CONFIG_VARIABLE}
    return sorted(name for name in environment if name.upper().startswith(ENV_PREFIX) and name.upper() not in known)


def _problem(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    return f"{name}: {item['msg']}" if name else str(item["msg"])
