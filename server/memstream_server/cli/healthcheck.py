"""`memstream healthcheck`: whether the server with these settings is serving, for containers without gRPC or HTTP
probes.

The server's settings give its address and TLS files. The check trusts exactly the server's certificate, whatever names
it has, and presents it as the client certificate if the server requires one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memstream_server.cli.failures import Failure
from memstream_server.cli.options import json_option
from memstream_server.cli.output import print_json
from memstream_server.settings import Settings, SettingsError, load, parse_listen

READY = "memstream.v1.StreamService"
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses to connect to when the server listens on all addresses."""


@click.command("healthcheck", short_help="Exit with 0 if the server with these settings is serving.")
@click.option(
    "--config", type=click.Path(path_type=Path), help="The server's settings file. Default: $MEMSTREAM_CONFIG."
)
@click.option("--listen", help="The server's --listen, if set by a flag of `serve`.")
@click.option("--service", default=READY, show_default=True, help="The service to check.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=4.0, show_default=True)
@click.option(
    *("--tls-cert", "certificate"),
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="MEMSTREAM_TLS_CERT",
    show_envvar=True,
    help="Client certificate to present instead of the server's own, PEM.",
)
@click.option(
    *("--tls-key", "key"),
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="MEMSTREAM_TLS_KEY",
    show_envvar=True,
    help="Its key.",
)
@json_option
def healthcheck_command(
    config: Path | None,
    listen: str | None,
    service: str,
    timeout_s: float,
    certificate: Path | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """Query the server's health service once: exit code 0 if it is serving, else 1.

    The command reads the same settings as `memstream serve`: MEMSTREAM_ variables and the file of --config. It needs no
    credential except a client certificate.

    \b
      memstream healthcheck
      memstream healthcheck --service memstream.v1.ServerService
    """
    try:
        settings = load(config, {"listen": listen})
        target = _server_target(settings)
        _check_health(target, service, timeout_s, _tls_credentials(settings, certificate, key))
    except SettingsError as error:
        raise Failure(str(error)) from error
    except OSError as error:
        raise Failure(f"cannot read {error.filename}: {error.strerror}") from error
    if as_json:
        print_json({"target": target, "service": service, "serves": True})


def _server_target(settings: Settings) -> str:
    listen = settings.listen
    if settings.port_file is not None and settings.port_file.exists():
        listen = settings.port_file.read_text(encoding="utf-8").strip()
    if listen.startswith("unix:"):
        return listen
    host, port = parse_listen(listen)
    if port == 0:
        raise Failure("listen has the port 0: port_file must say which one was bound")
    host = _ANY.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls_credentials(
    settings: Settings, certificate: Path | None, key: Path | None
) -> tuple[bytes, bytes | None, bytes | None] | None:
    """Trusted certificate, client key and client certificate; None if the server has no TLS. Raises OSError."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    own = settings.tls_cert_file.read_bytes()
    if certificate is not None and key is not None:
        return own, key.read_bytes(), certificate.read_bytes()
    if settings.tls_client_ca_file is not None:
        return own, settings.tls_key_file.read_bytes(), own
    return own, None, None


def _check_health(
    target: str, service: str, timeout_s: float, tls: tuple[bytes, bytes | None, bytes | None] | None
) -> None:
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    if tls is None:
        channel = grpc.insecure_channel(target)
    else:
        named = [("grpc.ssl_target_name_override", _certificate_name(tls[0]))]
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(*tls), options=named)
    with channel:
        try:
            stub: Any = HealthStub(channel)
            answer = stub.Check(HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise Failure(f"{target} has no service {service!r}: docs/operations.md lists them") from error
            raise Failure(
                f"{target} does not answer: {error.code().name}: {error.details()}{_tls_hint(tls)}"
            ) from error
    if answer.status != HealthCheckResponse.SERVING:
        raise Failure(f"{service} at {target} does not serve")


def _tls_hint(tls: tuple[bytes, bytes | None, bytes | None] | None) -> str:
    if tls is None or tls[1] is None:
        return ""
    return " (the client certificate must be signed by tls_client_ca_file: pass another with --tls-cert and --tls-key)"


def _certificate_name(pem: bytes) -> str:
    """A name for which the certificate is valid. Raises Failure."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as error:
        raise Failure(f"the server's certificate has no name that clients can verify: {error}") from error
    dns = [name.replace("*", "any", 1) for name in names.get_values_for_type(x509.DNSName)]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    if not dns + addresses:
        raise Failure("the server's certificate has no DNS name and no address that clients can verify")
    return (dns + addresses)[0]
