"""Settings of addresses, files, traces and log lines."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_data_path
from pydantic import BaseModel, Field

from memstream_server.settings.values import Listen, LogFormat, LogLevel, MetricsListen, OtlpEndpoint, setting


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
