"""Settings of authentication, authorization and what one caller may use (docs/security.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, SecretStr

from memstream_server.settings.values import setting

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
        "",
        "DNS name in the certificates of other servers of the same database; empty is the host of their `advertise`",
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
        "",
        "proxies whose x-forwarded-client-cert is trusted: networks such as 127.0.0.0/8, and `unix`, with commas",
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
