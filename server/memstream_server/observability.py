"""Structured logs and Prometheus metrics of a server process.

Rules. No secret, content or vector is logged: see log_lines.py. No label holds a memory, a session or an id: the number
of series is fixed by this file.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from memstream_server.log_lines import LogHandler, hiding, make_safe
from memstream_server.settings import LogFormat, LogLevel, parse_listen

SECRET_KEYS = ("token", "api_key", "apikey", "password", "secret", "authorization", "credential")
"""A value whose key contains one of these is never written."""
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def configure_logging(
    level: LogLevel, form: LogFormat, stream: TextIO | None = None, secrets: Sequence[str] = ()
) -> None:
    """Send every log line, the libraries' included, to `stream` (standard error) in one form, without `secrets`."""
    target = stream or sys.stderr
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    handler = LogHandler(target)
    handler.addFilter(_is_news)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:2], structlog.stdlib.add_logger_name, *shared[2:]],
            processors=[make_safe, _rendering(form, target), hiding(secrets)],
            pass_foreign_args=True,
            use_get_message=False,  # it would put values into the text
        )
    )
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers = [handler]
    sys.unraisablehook = lambda failed: _log_unhandled("unraisable", failed.exc_value)
    threading.excepthook = lambda failed: _log_unhandled("thread_failed", failed.exc_value)
    root.setLevel(level.value.upper())
    for chatty in ("httpx", "httpcore", "openai", "grpc", "pymilvus", "alembic", "sqlalchemy.engine"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # the tests configure more than once
    )


def _is_news(record: logging.LogRecord) -> bool:
    """grpc calls it an error when a client goes away while a message waits for it to read on."""
    return not (record.name == "grpc._cython.cygrpc" and record.getMessage().startswith("ExecuteBatchError raised"))


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the values of secret keys; a processor of structlog."""
    for key, value in event.items():
        if value and any(secret in key.lower() for secret in SECRET_KEYS):
            event[key] = "**********"
    return event


def _log_unhandled(event: str, error: BaseException | None) -> None:
    """In place of Python's own report, which shows the exception's text."""
    structlog.get_logger(__name__).error(event, exc_info=error)


def _rendering(form: LogFormat, target: TextIO) -> structlog.typing.Processor:
    if form is LogFormat.JSON:
        return structlog.processors.JSONRenderer(sort_keys=True)
    return structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)


class Metrics:
    """The process's metrics in a registry of their own. Passed to the engine and the handlers; tests make their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = self._counter("calls", "Calls that have ended, by rpc and status.", "rpc", "code")
        self.call_seconds = self._histogram(
            "call_seconds", "From a call's arrival to its end, by rpc; a stream's is its whole life.", "rpc"
        )
        self.observations_received = self._counter("observations_received", "Observations made durable.")
        self.observations_stored = self._counter(
            "observations_stored", "Observations whose tier decision is committed."
        )
        self.observations_rejected = self._counter(
            "observations_rejected", "Observations refused before they were received, by reason.", "reason"
        )
        self.transitions = self._counter("transitions", "Steps of fragments between tiers, by type of event.", "event")
        self.recalls = self._counter(
            "recalls", "Recalls answered, by outcome: ok, degraded, cancelled, error.", "outcome"
        )
        self.received_seconds = self._histogram("received_seconds", "From an observation's arrival to received.")
        self.stored_seconds = self._histogram("stored_seconds", "From an observation's arrival to stored.")
        self.indexed_seconds = self._histogram(
            "indexed_seconds", "From stored to indexed: of each round into the vector index, what waited longest."
        )
        self.recall_seconds = self._histogram("recall_seconds", "From a query's arrival to its answer.")
        self.commit_seconds = self._histogram("commit_seconds", "One transaction of the journal, its group included.")
        self.model_seconds = self._histogram("model_seconds", "One call of the embedding model.")
        self.model_calls = self._counter(
            "model_calls",
            "Requests to the LLM, by role (scorer, insights) and outcome (ok, malformed, refused, failed).",
            "role",
            "outcome",
        )
        self.model_tokens = self._counter(
            "model_tokens",
            "Tokens an endpoint says it took, by role (scorer, insights, embedder) and kind: prompt, completion.",
            "role",
            "kind",
        )
        self.streams = self._gauge("streams", "Streams open, by rpc.", "rpc")
        self.sessions = self._gauge("sessions", "Observe streams and batches whose producer is held open.")
        self.producers = self._gauge("producers", "Producers held in RAM.")
        self.watchers = self._gauge("watchers", "Watches of memories, and standing queries.")
        self.tasks = self._gauge("tasks", "Tasks of the event loop.")
        self.active_memories = self._gauge("active_memories", "Memories held in RAM.")
        self.owned_memories = self._gauge(
            "owned_memories",
            "Memories this server owns: taken, where several share a database; else those in RAM.",
        )
        self.active_bytes = self._gauge("active_bytes", "Estimated bytes of the memories held in RAM.")
        self.backlog = self._gauge("backlog", "Observations received and not yet stored.")
        self.outbox_depth = self._gauge("outbox_depth", "Rows waiting for the vector index.")
        self.index_up = self._gauge("index_up", "1 while the vector index answers, else 0.")
        self.loop_lag_seconds = self._histogram("loop_lag_seconds", "How late the event loop woke, once a second.")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"memstream_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"memstream_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, *labels: str) -> Histogram:
        return Histogram(f"memstream_{name}", meaning, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)


class MetricsEndpoint:
    """The Prometheus endpoint, in a thread of its own. `port` is the one bound."""

    def __init__(self, metrics: Metrics, listen: str) -> None:
        host, port = parse_listen(listen)
        self._server, self._thread = start_http_server(port, host, metrics.registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def serve_metrics(metrics: Metrics, listen: str) -> MetricsEndpoint | None:
    """Serve `metrics` at host:port; None when `listen` is empty. Raises OSError when the address is taken."""
    return MetricsEndpoint(metrics, listen) if listen else None


async def watch_loop(metrics: Metrics, interval_s: float = 1.0) -> None:
    """Measure the event loop's lag and count its tasks until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.loop_lag_seconds.observe(max(0.0, loop.time() - due))
        metrics.tasks.set(len(asyncio.all_tasks(loop)))
