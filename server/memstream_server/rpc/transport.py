"""TLS of the server's port; the files may be replaced while the server runs."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog

log = structlog.get_logger(__name__)


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
