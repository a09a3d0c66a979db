"""OpenTelemetry for clients: `memstream.connect(..., tracing=Tracing())`; pip install '.[otel]'.

Each unary call is a span. Each connection of a stream is a span too, a child of the span that was current when the
stream was opened and the parent of the server's spans. A query on a Recall stream is a span (RecallQuery) below its
caller's. No attribute contains the name of a memory or an id.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from memstream.channel import Metadata


class Tracing:
    """Creates spans with `provider`; None takes the global one."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("memstream", tracer_provider=provider)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A span around a call with its retries, a connection, or a query across reconnections."""
        with self._tracer.start_as_current_span(
            f"memstream.v1/{name}",
            kind=SpanKind.CLIENT,
            attributes={"rpc.system": "grpc", "rpc.method": name},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def carried(self) -> Metadata:
        """Metadata that propagates the current span (W3C traceparent)."""
        carrier: dict[str, str] = {}
        inject(carrier)
        return tuple(carrier.items())
