"""OpenTelemetry for clients: `memstream.connect(..., tracing=Tracing())`; pip install '.[otel]'.

Each unary call is a span. Each connection of a stream is a span too, a child of the span that was current when the
stream was opened and the parent of the server's spans. A query on a Recall stream is a span (RecallQuery) below its
caller's, and the parent of the server's span of that query.

What a call does to a memory is a span above it, by OpenTelemetry's conventions for generative AI (in development):
`search_memory`, `create_memory` and so on, with `gen_ai.memory.store.id` (NAMESPACE/MEMORY), the number of records, and
`gen_ai.conversation.id` (the session or conversation). It has texts only if
OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is true. No other span has the name of a memory, or an id.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider

from memstream.channel import MemoryPath, Metadata

OPERATIONS = {
    "ClearMemory": "delete_memory",
    "CloneMemory": "create_memory_store",
    "Context": "search_memory",
    "ContextQuery": "search_memory",
    "CreateMemory": "create_memory_store",
    "DeleteBlock": "delete_memory",
    "DeleteMemory": "delete_memory_store",
    "EditBlock": "update_memory",
    "EraseFragments": "delete_memory",
    "ForgetFragments": "delete_memory",
    "Observation": "create_memory",
    "ObserveBatch": "create_memory",
    "PutBlock": "upsert_memory",
    "PutFragment": "upsert_memory",
    "RecallOnce": "search_memory",
    "RecallQuery": "search_memory",
    "RestoreFragmentVersion": "update_memory",
    "RestoreFragments": "update_memory",
    "SupersedeFragments": "update_memory",
    "UpdateFragment": "update_memory",
}
"""The operation of the conventions by the message that asks for it, without "Request"."""
_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


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

    @contextmanager
    def memory(
        self, request: Any, memory: MemoryPath | None = None, session: str = ""
    ) -> Iterator[Callable[[Any], None]]:
        """A span around what a message does to a memory; none for a message that does nothing to one.

        `memory`, `session`: those of the stream that it is sent on. The span's value takes the answer.
        """
        operation = OPERATIONS.get(type(request).__name__.removesuffix("Request"))
        if operation is None:
            yield _ignore
            return
        written = _list_written(request)
        if operation == "create_memory" and any(one.external_id for one in written):
            operation = "upsert_memory"  # an existing external_id is replaced
        attributes = _describe(request, memory, session, written) | {"gen_ai.operation.name": operation}
        with self._tracer.start_as_current_span(
            operation,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield lambda answer: _describe_answer(span, answer)
            except Exception as error:
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise

    def carried(self) -> Metadata:
        """Metadata that propagates the current span (W3C traceparent)."""
        carrier: dict[str, str] = {}
        inject(carrier)
        return tuple(carrier.items())


def _ignore(_answer: object) -> None:
    return None


def captures_content() -> bool:
    """Whether spans may have texts: by default they have none."""
    return os.environ.get(_CONTENT, "").lower() in ("true", "1", "span_only", "span_and_event")


def _list_written(request: Any) -> Sequence[Any]:
    """The observations of a message."""
    if type(request).__name__ == "Observation":
        return (request,)
    one = getattr(request, "observation", None)
    return (one,) if one is not None else getattr(request, "observations", ())


def _describe(request: Any, memory: MemoryPath | None, session: str, written: Sequence[Any]) -> dict[str, Any]:
    request = getattr(request, "request", request)  # a ContextQuery has a ContextRequest
    ids = [one for one in (*getattr(request, "ids", ()), *getattr(request, "external_ids", ())) if one]
    ids = ids or [one for one in (getattr(request, "id", ""), getattr(request, "block", "")) if one]
    if not ids and hasattr(request, "fragment"):
        ids = [request.fragment.id]
    count = len(written) or len(ids)
    found = {
        "gen_ai.provider.name": "memstream",
        "gen_ai.memory.store.id": _store_of(request, memory),
        "gen_ai.conversation.id": getattr(request, "conversation", "") or getattr(request, "session", "") or session,
        "gen_ai.memory.record.id": ids[0] if len(ids) == 1 else "",
        "gen_ai.memory.record.count": count,
    }
    if captures_content():
        query = getattr(request, "query", request)
        found["gen_ai.memory.query.text"] = getattr(query, "text", "") or getattr(request, "question", "")
        found["gen_ai.memory.records"] = _encode_records([(one.external_id, _text_of(one), None) for one in written])
    return {key: value for key, value in found.items() if value}


def _store_of(request: Any, memory: MemoryPath | None) -> str:
    """NAMESPACE/MEMORY; empty if the message asks several memories."""
    query = getattr(request, "query", request)
    scopes = [one.memory for one in getattr(query, "scopes", ())]
    if scopes:
        return scopes[0] if len(scopes) == 1 else ""
    if memory is not None and memory.name:
        return str(memory)
    named = (getattr(request, "namespace", ""), getattr(request, "memory", ""))
    return "/".join(named) if all(named) else ""


def _describe_answer(span: trace.Span, answer: Any) -> None:
    """The number of records of a search, and their texts if they are captured."""
    if hasattr(answer, "parts"):  # of a context
        span.set_attribute("gen_ai.memory.record.count", sum(len(part.fragment_ids) for part in answer.parts))
        return
    found = getattr(answer, "recollections", None)
    if found is None:
        return
    hits = getattr(found, "recollections", found)
    span.set_attribute("gen_ai.memory.record.count", len(hits))
    if hits and captures_content():
        records = [(one.fragment.id, _text_of(one.fragment), one.score) for one in hits]
        span.set_attribute("gen_ai.memory.records", _encode_records(records))


def _text_of(record: Any) -> str:
    """The content of an observation or fragment; the parts of a structured one by name."""
    return record.content or str(record.structured)


def _encode_records(records: Sequence[tuple[str, str, float | None]]) -> str:
    """JSON by the conventions' schema of memory records; empty for none."""
    rows = [
        {"content": content} | ({"id": id} if id else {}) | ({} if score is None else {"score": score})
        for id, content, score in records
    ]
    return json.dumps(rows, ensure_ascii=False) if rows else ""
