"""From the settings to credentials, identities and policy; checked before anything is opened, so that a mistake stops
the start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from memstream_server.rpc.access.admission import Admission
from memstream_server.rpc.access.authorization import Authorization, Identities, OperationOf, RecordOf
from memstream_server.rpc.access.files import AccessError, Watched
from memstream_server.rpc.access.keys import parse_keys
from memstream_server.rpc.access.peers import Peers, TlsError, TlsFiles, TrustedProxies, server_credentials
from memstream_server.rpc.access.policy import AccessPolicy, parse_policy

if TYPE_CHECKING:
    from memstream_server.rpc.access.tokens import JwtIdentities
    from memstream_server.settings import Settings


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """How callers reach the server, and which callers it accepts."""

    peers: Peers
    credentials: grpc.ServerCredentials | None = None
    """TLS credentials of the port; None: no TLS."""
    identities: Identities | None = None
    policy: Watched[AccessPolicy] | None = None
    admission: Admission = field(default_factory=Admission)

    def is_proxy(self, peer: str) -> bool:
        """Whether the peer, in gRPC's form, is one of `trusted_proxies`."""
        return self.identities is not None and peer in self.identities.proxies

    def create_authorization(self, operation_of: OperationOf, record_of: RecordOf) -> Authorization | None:
        """None if the server has no authentication."""
        if self.identities is None or self.policy is None:
            return None
        return Authorization(self.identities, self.policy, operation_of, record_of, self.admission)


def open_access(settings: Settings) -> AccessOptions:
    """Reads the files that the settings name. Raises AccessError."""
    files = _tls_files(settings)
    try:
        credentials = server_credentials(files) if files is not None else None
    except TlsError as error:
        raise AccessError(str(error)) from error
    peers = Peers(files, settings.peer_secret.get_secret_value())
    if settings.access_policy_file is None:
        return AccessOptions(peers, credentials)
    keys, jwks = settings.api_keys_file, settings.jwt_jwks
    identities = Identities(
        keys=Watched(keys, parse_keys) if keys is not None else None,
        tokens=_open_tokens(jwks, settings) if jwks else None,
        proxies=TrustedProxies(settings.trusted_proxies),
        peers=peers,
    )
    policy = Watched(settings.access_policy_file, parse_policy)
    admission = Admission(
        settings.caller_streams_max,
        settings.caller_calls_max,
        settings.caller_requests_per_s,
        settings.caller_observations_per_s,
        settings.caller_bytes_per_s,
        settings.caller_cpu_s_per_s,
    )
    return AccessOptions(peers, credentials, identities, policy, admission)


def _open_tokens(jwks: str, settings: Settings) -> JwtIdentities:
    from memstream_server.rpc.access.tokens import JwtIdentities  # here, because PyJWT imports all of cryptography

    return JwtIdentities(jwks, settings.jwt_issuer, settings.jwt_audience)


def _tls_files(settings: Settings) -> TlsFiles | None:
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return TlsFiles(
        settings.tls_cert_file,
        settings.tls_key_file,
        settings.tls_client_ca_file,
        settings.tls_peer_ca_file,
        settings.tls_peer_name,
    )
