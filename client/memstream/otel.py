"""OpenTelemetry for clients: `memstream.connect(..., tracing=Tracing())`; pip install memstream[otel].

A unary call is a span of its own, and so is each connection of a stream, as long as it lasts: below the span that was
current when the stream was opened, above what the server does for it. A query on a Recall stream is a span as well
(RecallQuery), below whoever asks. No attribute names a memory or holds an id.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from memstream.channel import Metadata


class Tracing:
    """Spans of `provider`; None takes the one that the program has set for all."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("memstream", tracer_provider=provider)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call around all of its tries by gRPC, a connection, or a query over all of its connections."""
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
        """What takes the current span along with a call, as W3C's traceparent has it."""
        carrier: dict[str, str] = {}
        inject(carrier)
        return tuple(carrier.items())
