"""OpenTelemetry: spans of calls and of their use of journal, index and models, sent by OTLP. Imported only if enabled.

Rules. A span has a name, a kind, a duration and a status: no content, no error text, no id of a memory or user. The
journal is traced inside of calls, not for the server's own background work.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import grpc
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract, inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from memstream_server.ports.models import Account
from memstream_server.rpc.calls import Metadata
from memstream_server.rpc.errors import CODES

EXPORT_S = 5
"""Deadline of one export. Spans that cannot be sent are dropped, so that nothing waits for them."""
_OURS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that OpenTelemetry's conventions count as errors of the server; the others are errors of the client."""
_OPERATIONS = {
    "search_memory": ("Context", "Recall", "RecallOnce"),
    "create_memory": ("Observe", "ObserveBatch"),
    "upsert_memory": ("PutBlock", "PutFragment"),
    "update_memory": (
        "EditBlock",
        "RestoreFragmentVersion",
        "RestoreFragments",
        "SupersedeFragments",
        "UpdateFragment",
    ),
    "delete_memory": ("ClearMemory", "DeleteBlock", "EraseFragments", "ForgetFragments"),
    "create_memory_store": ("CloneMemory", "CreateMemory"),
    "delete_memory_store": ("DeleteMemory",),
}
"""Rpcs by operation of OpenTelemetry's conventions for generative AI. The ids of memory and conversation are attributes
of the client's span alone: names of memories are often those of users."""
_BY_RPC = {rpc: {"gen_ai.operation.name": operation} for operation, rpcs in _OPERATIONS.items() for rpc in rpcs}
TRACEPARENT_MAX = 128
"""Characters of a `traceparent` in a message. Version 00 has 55; a later version may append to it."""
_W3C = TraceContextTextMapPropagator()
Part = TypeVar("Part")


class CallSpan:
    """See rpc.calls.Span."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def record_end(self, code: grpc.StatusCode) -> None:
        self._span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code in _OURS:
            self._span.set_status(Status(StatusCode.ERROR))


class OpenTelemetry:
    """See rpc.calls.Tracing. `traced` wraps a part so that each of its coroutine methods is a span."""

    def __init__(self, endpoint: str, ratio: float, version: str) -> None:
        """`endpoint` is http://host:port of an OTLP/gRPC receiver, https:// with TLS; `ratio` of the traces are kept.

        A trace that a client began is kept if the client keeps it. OTEL_RESOURCE_ATTRIBUTES and
        OTEL_EXPORTER_OTLP_HEADERS are respected.
        """
        named = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "memstream"),
            "service.version": version,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
        self._provider = TracerProvider(
            resource=Resource.create(named), sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("memstream", version)

    def close(self) -> None:
        """Sends pending spans; blocks for a few seconds at most."""
        self._provider.shutdown()

    @contextmanager
    def trace_call(self, method: str, metadata: Metadata) -> Iterator[CallSpan]:
        given = {key: value for key, value in metadata if isinstance(value, str)}
        service, _, name = method.lstrip("/").partition("/")
        span = self._tracer.start_span(
            f"{service}/{name}",
            extract(given),
            SpanKind.SERVER,
            {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name} | _BY_RPC.get(name, {}),
        )
        # Not detached: a handler's task ends with the call, and another task may close a generator.
        contexts.attach(trace.set_span_in_context(span))
        try:
            yield CallSpan(span)
        finally:
            span.end()

    async def trace_query(self, name: str, traceparent: str, answer: Callable[[], Awaitable[None]]) -> None:
        stream = contexts.get_current()
        given = {"traceparent": traceparent} if len(traceparent) <= TRACEPARENT_MAX else {}
        parent = _W3C.extract(given, stream)  # `stream` itself without a valid one
        links = [] if parent is stream else [trace.Link(trace.get_current_span().get_span_context())]
        with self._tracer.start_as_current_span(
            f"memstream.v1.StreamService/{name}",
            parent,
            SpanKind.SERVER,
            {"rpc.system": "grpc", "gen_ai.operation.name": "search_memory"},
            links,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            code = grpc.StatusCode.OK
            try:
                await answer()
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            except Exception as error:
                code = CODES.get(getattr(error, "reason", ""), grpc.StatusCode.INTERNAL)
                raise
            finally:
                CallSpan(span).record_end(code)

    def current_metadata(self) -> Metadata:
        carrier: dict[str, str] = {}
        inject(carrier)
        return tuple(carrier.items())

    def wrap_part(self, part: Part, name: str, *, always: bool = True) -> Part:
        """`part` with its coroutine methods as spans `name.method`; unless `always`, only inside another span."""
        return cast("Part", _Traced(part, name, self._tracer, always))


class _Traced:
    """A proxy of a part of the server; other attributes than coroutine methods are the part's own."""

    def __init__(self, part: object, name: str, tracer: trace.Tracer, always: bool) -> None:
        self._part = part
        self._name = name
        self._tracer = tracer
        self._always = always

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._part, name)
        if not inspect.iscoroutinefunction(member):
            return member
        traced = self._wrap_method(member, f"{self._name}.{name}")
        setattr(self, name, traced)
        return traced

    def _wrap_method(self, method: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def call_in_span(*arguments: Any, **named: Any) -> Any:
            if not self._always and not trace.get_current_span().get_span_context().is_valid:
                return await method(*arguments, **named)
            with self._tracer.start_as_current_span(
                name, kind=SpanKind.CLIENT, record_exception=False, set_status_on_exception=False
            ) as span:
                account = next((one for one in (*arguments, *named.values()) if isinstance(one, Account)), None)
                before = (0, 0) if account is None else (account.prompt_tokens, account.completion_tokens)
                try:
                    return await method(*arguments, **named)
                except Exception as error:
                    span.set_attribute("error.type", type(error).__name__)
                    span.set_status(Status(StatusCode.ERROR))
                    raise
                finally:
                    if account is not None:  # names of OpenTelemetry's conventions for generative AI
                        span.set_attribute("gen_ai.request.model", account.model)
                        span.set_attribute("gen_ai.usage.input_tokens", account.prompt_tokens - before[0])
                        span.set_attribute("gen_ai.usage.output_tokens", account.completion_tokens - before[1])

        return call_in_span
