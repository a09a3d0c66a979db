"""TLS of the server's port, whose files may be replaced while the server runs; calls between servers of one database:
the same TLS, and the identity of the original caller.

The server that forwards a call has authenticated the caller. Instead of forwarding the credential it sends a header of
its own: HMAC-SHA256, under a secret that the servers share, of the principal, the rpc and the time. The memory's owner
checks its own policy again.

A proxy such as Envoy passes on the client certificate that it verified in x-forwarded-client-cert. The server accepts
the header from trusted peers only. Each proxy appends an element; the server reads only the last one, from the nearest
proxy, because a client may have forged the earlier ones.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import re
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import unquote

import grpc
import grpc.aio
import structlog
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from memstream_server.rpc.access.caller import CALLER
from memstream_server.rpc.access.files import AccessError
from memstream_server.rpc.errors import Unauthenticated

log = structlog.get_logger(__name__)

PROXY_HEADER = "x-forwarded-client-cert"
CALLER_HEADER = "memstream-caller"
CREDENTIALS = frozenset({"authorization", PROXY_HEADER, CALLER_HEADER})
"""Headers with credentials: none of them is forwarded."""
UNIX = "unix"
VALID_S = 300.0
"""Maximum difference between the clocks of two servers, and how long a stolen header can be replayed."""
_Options = Sequence[tuple[str, int | str]]
_REASON_S = 2.0
_WRONG_NAME, _WRONG_CA = "Hostname Verification Check failed", "CERTIFICATE_VERIFY_FAILED"
"""What gRPC says of a certificate that it refuses."""


class Peers:
    """The other servers. Without `tls` calls are not encrypted, without `secret` they carry no identity."""

    def __init__(self, tls: TlsFiles | None = None, secret: str = "") -> None:
        self._tls = tls
        self._secret = secret.encode()
        self._problems: dict[str, str] = {}
        """The last problem with a server's certificate, by address."""

    def open_channel(self, address: str, options: _Options) -> grpc.aio.Channel:
        """A new channel; TLS files are read for each, so that a new connection uses the current certificate."""
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        name = self._tls.peer_name
        named = [*options, ("grpc.ssl_target_name_override", name)] if name else options
        return grpc.aio.secure_channel(address, self._tls.as_client(), options=named)

    async def certificate_problem(self, channel: grpc.aio.Channel, address: str) -> str:
        """Why this server refuses another server's certificate; empty if the certificate is not the problem.

        It is logged once until it changes: an operator must correct it.
        """
        problem = await self._certificate_problem(channel, address)
        if not problem:
            self._problems.pop(address, None)
        elif problem != self._problems.get(address):
            self._problems[address] = problem
            log.error("server_not_trusted", address=address, problem=problem)
        return problem

    async def _certificate_problem(self, channel: grpc.aio.Channel, address: str) -> str:
        """A channel's state has no reason; the error of a call that fails on the channel has one."""
        if self._tls is None or channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return ""
        try:
            await HealthStub(channel).Check(  # type: ignore[attr-defined]  # typed for threads
                HealthCheckRequest(), timeout=_REASON_S
            )
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return ""  # another call has closed the channel
        else:
            return ""
        if _WRONG_NAME in details:
            name = self._tls.peer_name or address.rpartition(":")[0]
            return f"its certificate is not valid for {name}: see tls_peer_name"
        return "its certificate is not signed by a CA of tls_peer_ca_file" if _WRONG_CA in details else ""

    def forwarded_metadata(self, given: Iterable[tuple[str, str | bytes]], path: str) -> list[tuple[str, str | bytes]]:
        """Metadata of a call that is forwarded to `path`: the client's, without credentials."""
        kept = [(key, value) for key, value in given if key not in CREDENTIALS]
        caller = CALLER.get()
        return kept if caller is None else [*kept, (CALLER_HEADER, self._sign_principal(caller.principal, path))]

    def verify_principal(self, header: str, path: str) -> str:
        """The principal that another server forwards the call for. Raises Unauthenticated."""
        try:
            said, mac = (base64.urlsafe_b64decode(part) for part in header.split("."))
            if self._secret and hmac.compare_digest(mac, self._compute_mac(said)):
                principal, signed_path, time_s = json.loads(said)
                if signed_path == path and abs(time.time() - time_s) <= VALID_S:
                    return str(principal)
        except ValueError:
            pass  # refused below
        raise Unauthenticated(f"{CALLER_HEADER} is no other server's: they need one peer_secret, and clocks that agree")

    def _sign_principal(self, principal: str, path: str) -> str:
        said = json.dumps([principal, path, int(time.time())]).encode()
        return ".".join(base64.urlsafe_b64encode(part).decode() for part in (said, self._compute_mac(said)))

    def _compute_mac(self, said: bytes) -> bytes:
        return hmac.new(self._secret, b"memstream caller\n" + said, hashlib.sha256).digest()


class TrustedProxies:
    """Peers whose header is trusted: networks as in 10.0.0.0/8, addresses, `unix` for unix sockets."""

    def __init__(self, listed: str) -> None:
        """`listed` is comma-separated. Raises AccessError."""
        names = [name.strip() for name in listed.split(",") if name.strip()]
        self._unix = UNIX in names
        try:
            self._networks = [ip_network(name) for name in names if name != UNIX]
        except ValueError as error:
            raise AccessError(f"trusted_proxies: {error}") from error

    def __bool__(self) -> bool:
        return self._unix or bool(self._networks)

    def __contains__(self, peer: str) -> bool:
        """`peer` in gRPC's form: ipv4:1.2.3.4:5, ipv6:[::1]:5, unix:."""
        kind, _, rest = unquote(peer).partition(":")
        if kind == "unix":
            return self._unix
        try:
            address = ip_address(rest.rpartition(":")[0].strip("[]").partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


def forwarded_uri(header: str) -> str:
    """The URI of the certificate that the nearest proxy has verified. Raises Unauthenticated without exactly one."""
    uris = []
    for pair in _split_unquoted(_split_unquoted(header, ",")[-1], ";"):
        name, _, value = pair.strip().partition("=")
        if name.lower() == "uri":
            uris.append(re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value)
    if len(uris) != 1 or not uris[0]:
        raise Unauthenticated(f"the proxy's {PROXY_HEADER} must name one URI")
    return uris[0]


def _split_unquoted(text: str, separator: str) -> list[str]:
    """Splits at separators outside of quotes; a backslash in quotes escapes the next character."""
    parts, begin, quoted, at = [], 0, False, 0
    while at < len(text):
        if quoted and text[at] == "\\":
            at += 1
        elif text[at] == '"':
            quoted = not quoted
        elif text[at] == separator and not quoted:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    if quoted:
        raise Unauthenticated(f"the proxy's {PROXY_HEADER} is malformed")
    return [*parts, text[begin:]]


class TlsError(ValueError):
    """A TLS file is missing or not PEM, or the key does not belong to the certificate."""

    log_text = True


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` every client must present a certificate that it signed."""

    certificate: Path
    """The server's certificate, and the chain to its CA."""
    key: Path
    client_ca: Path | None = None
    peer_ca: Path | None = None
    """CA of other servers' certificates; None: the system's CAs."""
    peer_name: str = ""
    """DNS name that other servers' certificates must contain; empty: the host of their address."""

    def as_client(self) -> grpc.ChannelCredentials:
        """Credentials for connections to another server, with this server's certificate. Raises OSError."""
        roots = self.peer_ca.read_bytes() if self.peer_ca is not None else None
        return grpc.ssl_channel_credentials(roots, self.key.read_bytes(), self.certificate.read_bytes())


@dataclass(slots=True)
class _Material:
    """The last valid contents of the files."""

    seen: tuple[bytes, ...] = field(repr=False)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, *client_ca = self.seen
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that reload changed files for every new connection. Raises TlsError.

    Invalid files, as between the replacement of a certificate and of its key, leave the last valid ones in force.
    """
    material = _Material(_read_files(files))
    refused: list[str] = []

    def read_if_changed() -> grpc.ServerCertificateConfiguration | None:  # runs in a thread of grpc
        try:
            now = _read_files(files)
        except TlsError as error:
            if refused != [str(error)]:
                refused[:] = [str(error)]
                log.error("tls_files_not_in_order", reason=error, remedy="the former ones stay in force")
            return None
        refused.clear()
        if now == material.seen:
            return None
        material.seen = now
        log.info("tls_files_reloaded")
        return material.configuration()

    return grpc.dynamic_ssl_server_credentials(
        material.configuration(),
        read_if_changed,  # type: ignore[arg-type]  # None means unchanged, which the stubs lack
        require_client_authentication=files.client_ca is not None,
    )


def _read_files(files: TlsFiles) -> tuple[bytes, ...]:
    """Key, certificate, and the client CA if there is one; checks that they belong together."""
    paths = [files.key, files.certificate, *([files.client_ca] if files.client_ca is not None else [])]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        said = tuple(path.read_bytes() for path in paths)
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
        if files.client_ca is not None:
            context.load_verify_locations(files.client_ca)
        # The checked files are the ones that were read, unless a file was replaced in between.
        if said != tuple(path.read_bytes() for path in paths):
            raise TlsError("a TLS file is being replaced")
    except ssl.SSLError as error:
        names = ", ".join(str(path) for path in paths)
        why = error.reason or "no PEM"
        raise TlsError(f"the TLS files {names} are not in order: {why.lower().replace('_', ' ')}") from error
    except OSError as error:
        raise TlsError(f"cannot read {error.filename}: {error.strerror}") from error
    return said


def _no_password() -> str:
    raise TlsError("the TLS key is encrypted: give one that is not")
