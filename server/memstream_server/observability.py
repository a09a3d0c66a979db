"""Structured logs and Prometheus metrics of a server process.

Rules. No secret, content or vector is logged: see log_lines.py. No label holds a memory, a session or an id: this file
fixes the number of series.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from concurrent.futures import CancelledError
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, TextIO
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

from memstream_server.log_lines import STDERR, LogHandler, make_hiding_processor, make_safe
from memstream_server.settings import LogFormat, LogLevel, parse_listen

SECRET_KEYS = ("token", "api_key", "apikey", "password", "secret", "authorization", "credential")
"""A value whose key contains one of these is never written."""
PROBES = {
    "/livez": "memstream.v1.ServerService",
    "/readyz": "memstream.v1.StreamService",
    "/writez": "memstream.journal.write",
}
"""The grpc.health.v1 service that an HTTP probe asks for."""
_STDERR_END_S = 5.0
PROBE_S = 2.0
"""How long the event loop may take to answer a probe."""
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def configure_logging(
    level: LogLevel, form: LogFormat, stream: TextIO | None = None, secrets: Sequence[str] = ()
) -> None:
    """Sends every log line, the libraries' included, to `stream` (standard error) in one form, without `secrets`."""
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
            processors=[make_safe, _choose_renderer(form, target), make_hiding_processor(secrets)],
            pass_foreign_args=True,
            use_get_message=False,  # it would insert values into the text
        )
    )
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers = [handler]
    sys.unraisablehook = lambda failed: _log_unhandled("unraisable", failed.exc_value)
    threading.excepthook = lambda failed: _log_unhandled("thread_failed", failed.exc_value)
    root.setLevel(level.value.upper())
    for chatty in ("httpx2", "httpcore2", "openai", "grpc", "pymilvus", "alembic", "sqlalchemy.engine"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # the tests configure more than once
    )


_CORE_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ +\d+ ([\w.]+:\d+)\] (.*)")
"""A line of gRPC core: level, date, time, thread, source, text."""
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


@contextlib.contextmanager
def stderr_as_log_lines() -> Iterator[TextIO]:
    """Yields the process's standard error for the log's own lines; what else is written to it becomes log lines.

    gRPC core and child processes write to descriptor 2. A thread reads what they write; nobody waits for it: what does
    not fit into the pipe is lost. A fatal error of gRPC core ends the process at once: its last line may be lost, the
    stack is written.
    """
    own = os.dup(2)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # a thread that holds the interpreter lock may write
    os.dup2(writing, 2)
    os.close(writing)
    reader = Thread(target=_read_lines, args=(reading,), name="memstream stderr", daemon=True)
    reader.start()
    with open(own, "w", encoding="utf-8", buffering=1) as stream:
        faulthandler.enable(stream)
        try:
            yield stream
        finally:
            faulthandler.disable()
            os.dup2(own, 2)  # closes the pipe, unless a child process has it
            reader.join(_STDERR_END_S)
            for handler in logging.getLogger().handlers:
                if isinstance(handler, LogHandler) and handler.stream is stream:
                    handler.write_counts()
                    handler.setStream(sys.stderr)


def _read_lines(descriptor: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _CORE_LINE.match(line)
            level, source, text = found.groups() if found else ("W", "", line.strip())
            if not text:
                continue
            structlog.get_logger(STDERR).log(_LEVELS[level], text, source=source or "stderr")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of grpc is worth logging: grpc logs an error when a client leaves while a message waits for it to
    read."""
    return not (record.name == "grpc._cython.cygrpc" and record.getMessage().startswith("ExecuteBatchError raised"))


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replaces the values of secret keys; a processor of structlog."""
    for key, value in event.items():
        if value and any(secret in key.lower() for secret in SECRET_KEYS):
            event[key] = "**********"
    return event


def _log_unhandled(event: str, error: BaseException | None) -> None:
    """Replaces Python's own report, which shows the exception's text."""
    structlog.get_logger(__name__).error(event, exc_info=error)


def _choose_renderer(form: LogFormat, target: TextIO) -> structlog.typing.Processor:
    if form is LogFormat.JSON:
        return structlog.processors.JSONRenderer(sort_keys=True)
    return structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)


class Metrics:
    """The process's metrics, in a registry of their own. The engine and the handlers get an instance."""

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
        self.recalls = self._counter("recalls", "Recalls, by outcome: ok, degraded, cancelled, error.", "outcome")
        self.received_seconds = self._histogram("received_seconds", "From an observation's arrival to received.")
        self.stored_seconds = self._histogram("stored_seconds", "From an observation's arrival to stored.")
        self.indexed_seconds = self._histogram(
            "indexed_seconds", "From stored to indexed: of each round into the vector index, what waited longest."
        )
        self.recall_seconds = self._histogram("recall_seconds", "From a query's arrival to its answer.")
        self.commit_seconds = self._histogram("commit_seconds", "One transaction of the journal, its group included.")
        self._add_models()
        self.streams = self._gauge("streams", "Streams open, by rpc.", "rpc")
        self.sessions = self._gauge("sessions", "Observe streams and batches whose producer is held open.")
        self.producers = self._gauge("producers", "Producers held in RAM.")
        self.watchers = self._gauge("watchers", "Watches of memories, and standing queries.")
        self.tasks = self._gauge("tasks", "Tasks of the event loop.")
        self.active_memories = self._gauge("active_memories", "Memories held in RAM.")
        self.owned_memories = self._gauge(
            "owned_memories", "Memories this server owns: taken, where several share a database; else those in RAM."
        )
        self.image_reads = self._counter(
            "image_reads", "Activations that looked for an image, by outcome: hit, miss, damaged.", "outcome"
        )
        self.image_bytes = self._gauge("image_bytes", "Bytes of the images on disk.")
        self.active_bytes = self._gauge("active_bytes", "Estimated bytes of the memories held in RAM.")
        self.backlog = self._gauge("backlog", "Observations received and not yet stored.")
        self.unvectored = self._gauge("unvectored_fragments", "Fragments without a vector, which words alone find.")
        self.quota_used = self._gauge(
            "quota_used_ratio", "Of a quota of stored bytes, the part that the fullest namespace uses.", "quota"
        )
        self.outbox_depth = self._gauge("outbox_depth", "Rows waiting for the vector index.")
        self.journal_writable = self._gauge("journal_writable", "1 while the journal can be written, else 0.")
        self.index_up = self._gauge("index_up", "1 while the vector index answers, else 0.")
        self.loop_lag_seconds = self._histogram("loop_lag_seconds", "How late the event loop woke, once a second.")

    def _add_models(self) -> None:
        self.model_seconds = self._histogram("model_seconds", "One call of the embedding model.")
        self.model_calls = self._counter(
            "model_calls",
            "Requests to the LLM, by role (scorer, insights, conflicts) and outcome (ok, malformed, refused, failed).",
            "role",
            "outcome",
        )
        self.model_tokens = self._counter(
            "model_tokens",
            "Tokens an endpoint says it took, by role (scorer, insights, conflicts, embedder) and kind: prompt, "
            "completion.",
            "role",
            "kind",
        )
        self.model_failures = self._counter(
            "model_failures", "Calls of a model that failed after all their retries, by role.", "role"
        )
        self.model_consecutive_failures = self._gauge(
            "model_consecutive_failures", "Calls that failed since the last one that succeeded, by role.", "role"
        )
        self.model_last_success_seconds = self._gauge(
            "model_last_success_timestamp_seconds",
            "When a call last succeeded, Unix time, by role; 0 is never.",
            "role",
        )
        self.model_up = self._gauge(
            "model_up", "0 while a model's last call failed, else 1, by role (embedder, scorer, insights, ...).", "role"
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"memstream_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"memstream_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, *labels: str) -> Histogram:
        return Histogram(f"memstream_{name}", meaning, labels, registry=self.registry, buckets=LATENCY_BUCKETS_S)


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """One thread for each request, so that a slow client does not block others."""

    daemon_threads = True


class _ThreadingServer6(_ThreadingServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


class MetricsEndpoint:
    """Prometheus metrics and HTTP probes, in threads of their own. `port` is the bound one.

    GET /livez, /readyz and /writez answer 200 or 503, like grpc.health.v1 for the services of PROBES: Kubernetes probes
    need neither TLS nor a client certificate here. Each probe asks the event loop, so a loop that hangs is not alive.
    """

    def __init__(self, metrics: Metrics, listen: str) -> None:
        host, port = parse_listen(listen)
        self._metrics = make_wsgi_app(metrics.registry)
        self._serves: Callable[[str], bool] = lambda _service: False
        self._loop: asyncio.AbstractEventLoop | None = None
        made = _ThreadingServer6 if ":" in host else _ThreadingServer
        self._server = make_server(host, port, self._answer, made, _SilentHandler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port: int = self._server.server_port

    def answer_probes(self, serves: Callable[[str], bool]) -> None:
        """From now on probes call `serves` in the running event loop; before, nothing serves."""
        self._serves, self._loop = serves, asyncio.get_running_loop()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        service = PROBES.get(environ["PATH_INFO"])
        if service is None:
            answer: Iterable[bytes] = self._metrics(environ, start_response)
            return answer
        status = "200 OK" if self._probe(service) else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain"), ("Cache-Control", "no-store")])
        return [status[4:].encode() + b"\n"]

    def _probe(self, service: str) -> bool:
        async def ask_state() -> bool:
            return self._serves(service)

        if self._loop is None or self._loop.is_closed():
            return False
        answer = asyncio.run_coroutine_threadsafe(ask_state(), self._loop)
        try:
            return answer.result(PROBE_S)
        except (TimeoutError, CancelledError):  # the event loop hangs, or has ended
            answer.cancel()
            return False


def serve_metrics(metrics: Metrics, listen: str) -> MetricsEndpoint | None:
    """Serves `metrics` at host:port; None when `listen` is empty. Raises OSError when the address is in use."""
    if not listen:
        return None
    try:
        return MetricsEndpoint(metrics, listen)
    except OSError as error:
        raise OSError(f"cannot listen at {listen} (metrics_listen): {error.strerror}") from error


async def watch_loop(metrics: Metrics, interval_s: float = 1.0) -> None:
    """Measures the event loop's lag and counts its tasks until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.loop_lag_seconds.observe(max(0.0, loop.time() - due))
        metrics.tasks.set(len(asyncio.all_tasks(loop)))
