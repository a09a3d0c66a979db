"""The server that a command connects to, and advice for each of its errors."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from memstream import errors
from memstream.backoff import Retry
from memstream.channel import Tls, Token, Tracing
from memstream.client import Client, connect
from memstream.local_client import local
from memstream_server.cli.failures import Failure, Missing, Misuse

DEFAULT_TARGET = "127.0.0.1:7700"
FIRST_CONNECTION_S = 3.0
"""Time limit of the first connection of a stream; an open stream reconnects as in the SDK."""

LOCAL_START_S = 60.0
_DEFAULT = "\0"
"""The value of --local without a directory."""

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# By class, the most specific first. {target} and {wait} are placeholders.
_ADVICE: tuple[tuple[type[errors.MemstreamError], str], ...] = (
    (errors.MemoryNotFound, "`memstream list` shows existing ones, `memstream observe --create` creates one"),
    (errors.ProducerSuperseded, "another process uses this producer's name: give each its own --producer"),
    (errors.ServerBehind, "run the same command again to send what the server has lost"),
    (errors.ModelMismatch, "docs/models.md, Changing the model, has the steps"),
    (errors.CapabilityMissing, "the server lacks this capability: see `memstream info`"),
    (errors.Unauthenticated, "pass --token, or set MEMSTREAM_TOKEN"),
    (errors.PermissionDenied, "ask for the right, or use another namespace"),
    (errors.ShuttingDown, "the server is stopping: try again once it is back"),
    (errors.StorageFull, "free space on the server's disk"),
    (errors.DeadlineExceeded, "try again, or allow more with --timeout"),
    (errors.Transient, "try again{wait}"),
)


# By a part of gRPC's message.
_NO_ANSWER = (
    ("CERTIFICATE_VERIFY_FAILED", "the certificate of {target} is not trusted: name its CA with --tls-ca"),
    ("Hostname Verification", "the certificate of {target} is for another name: use that name in --target"),
    ("WRONG_VERSION_NUMBER", "{target} has no TLS: leave out --tls, --tls-ca, --tls-cert and --tls-key"),
    ("http1.x server", "{target} is not a gRPC port: name that of the server, 7700 by default, not its HTTP port"),
    ("Socket closed", "{target} closed the connection: if the server has TLS, pass --tls or --tls-ca"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Address and credentials of a server."""

    target: str
    token: Token | None = field(repr=False)
    timeout_s: float
    tls: Tls | None = None

    def run_with_client(self, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` with a client in a new event loop; turns its MemstreamErrors into Failures."""

        async def call_connected() -> T:
            retry = Retry(first_s=FIRST_CONNECTION_S, calls_s=FIRST_CONNECTION_S)
            with _export_traces() as tracing:
                given = connect(
                    self.target,
                    token=self.token,
                    tls=self.tls,
                    timeout_s=self.timeout_s,
                    retry=retry,
                    client_name="memstream-cli",
                    tracing=tracing,
                )
                async with given as client:
                    return await work(client)

        try:
            return asyncio.run(call_connected())
        except errors.MemstreamError as error:
            raise to_failure(error, self.target) from error


@contextmanager
def _export_traces() -> Iterator[Tracing | None]:
    """Tracing to the OTLP/gRPC receiver of the standard variables, for the client and for MCP's own spans; None without
    them. Raises Failure if the packages are missing."""
    if not (os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")):
        yield None
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from memstream.otel import Tracing as OpenTelemetry
    except ModuleNotFoundError as error:
        raise Failure(f"OTEL_EXPORTER_OTLP_ENDPOINT is set: pip install '.[otel]' ({error.name} is missing)") from error
    named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "memstream-cli")}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield OpenTelemetry(provider)
    finally:
        provider.shutdown()


def run_with_local(directory: Path, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """The same with a client of the directory's server, which is found or started; its log is in the directory."""

    async def call_local() -> T:
        with _export_traces() as tracing:
            async with local(directory, start_timeout_s=LOCAL_START_S, tracing=tracing) as client:
                return await work(client)

    try:
        return asyncio.run(call_local())
    except errors.MemstreamError as error:
        raise to_failure(error, str(directory)) from error


def default_directory() -> Path:
    """The data directory of `memstream serve`."""
    from platformdirs import user_data_path  # of the extra server, as the server that is started

    return user_data_path("memstream", appauthor=False)


def local_option(command: F) -> F:
    """Adds --local [DIR] to a command, as the argument `local`."""
    return click.option(
        "--local",
        is_flag=False,
        flag_value=_DEFAULT,
        default=None,
        callback=lambda _context, _option, given: default_directory() if given == _DEFAULT else given and Path(given),
        metavar="[DIR]",
        help="Use the server of this data directory, which is started if none runs. Default: that of `serve`.",
    )(command)


def to_failure(error: errors.MemstreamError, target: str) -> Failure:
    """The Failure for an error: message, advice and exit code."""
    if isinstance(error, errors.Unavailable) and not error.reason:
        return Failure(_describe_no_answer(error.message).format(target=target))
    wait = f" in {error.retry_after} s" if error.retry_after else ""
    advice = next((text for kind, text in _ADVICE if isinstance(error, kind)), "").format(wait=wait)
    return _failure_class(error)(
        f"{_format_message(error)}: {advice}" if advice else _format_message(error), error.reason
    )


def _describe_no_answer(message: str) -> str:
    """What to do about a connection that failed with this message of gRPC's; {target} is a placeholder."""
    known = next((text for part, text in _NO_ANSWER if part in message), None)
    if known is not None:
        return known
    why = message.rpartition(": ")[2].rstrip("]").replace("{", "{{").replace("}", "}}")
    return f"no server answers at {{target}} ({why}): start one with `memstream serve`, or name another with --target"


def _failure_class(error: errors.MemstreamError) -> type[Failure]:
    if isinstance(error, errors.NotFound):
        return Missing
    return Misuse if isinstance(error, errors.InvalidRequest) else Failure


def _format_message(error: errors.MemstreamError) -> str:
    return " ".join(error.summary().split())


def server_options(command: F) -> F:
    """Adds --target, --token, --tls and its files, and --timeout to a command, as one argument `server`."""

    @click.option(
        "--target",
        envvar="MEMSTREAM_TARGET",
        default=DEFAULT_TARGET,
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        help="Address of the server, HOST:PORT or unix:/path.",
    )
    @click.option(
        "--token",
        envvar="MEMSTREAM_TOKEN",
        show_envvar=True,
        metavar="TEXT",
        help="API key or JWT. Prefer the variable: other users of the machine can see flags.",
    )
    @click.option(
        "--tls", is_flag=True, envvar="MEMSTREAM_TLS", show_envvar=True, help="Use TLS; implied by the next three."
    )
    @_file_option("--tls-ca", "MEMSTREAM_TLS_CA", "CA of the server's certificate. Default: the system's.")
    @_file_option("--tls-cert", "MEMSTREAM_TLS_CERT", "Client certificate, for a server that requires one.")
    @_file_option("--tls-key", "MEMSTREAM_TLS_KEY", "Its key.")
    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=0, min_open=True),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="Time limit of one call.",
    )
    @functools.wraps(command)
    def wrapper(*args: Any, target: str, token: str | None, timeout_s: float, **kwargs: Any) -> Any:
        tls = _build_tls(*(kwargs.pop(name) for name in ("tls", "tls_ca", "tls_cert", "tls_key")))
        return command(*args, server=Server(target, token or None, timeout_s, tls), **kwargs)

    return cast("F", wrapper)


def _file_option(flag: str, variable: str, meaning: str) -> Callable[[F], F]:
    path = click.Path(path_type=Path, dir_okay=False)
    return click.option(flag, type=path, envvar=variable, show_envvar=True, metavar="FILE", help=f"{meaning} PEM.")


_TLS_FLAGS = {"roots": "--tls-ca", "certificate": "--tls-cert", "key": "--tls-key"}


def _build_tls(wanted: bool, ca: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    if not wanted and not (ca or certificate or key):
        return None
    try:
        return Tls.of_files(ca, certificate, key)
    except errors.InvalidArgument as error:
        raise Misuse(f"{_TLS_FLAGS[error.argument]}: {error.violations[0].description}") from error
