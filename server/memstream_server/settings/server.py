"""Settings of addresses, files, traces and log lines, and of what a server stores: journal, index, images."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_data_path
from pydantic import BaseModel, Field, SecretStr

from memstream_server.settings.values import (
    JournalUrl,
    Listen,
    LogFormat,
    LogLevel,
    MetricsListen,
    MilvusUri,
    OtlpEndpoint,
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
        10.0,
        "how long this server owns its memories without renewing its lease",
        "seconds",
        0.5,
        600,
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
