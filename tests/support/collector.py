"""An OTLP trace receiver: the spans that a server and its clients export."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass
class Received:
    """A span and its service's name."""

    service: str
    span: Any

    @property
    def id(self) -> bytes:
        return bytes(self.span.span_id)

    @property
    def parent(self) -> bytes:
        return bytes(self.span.parent_span_id)

    @property
    def trace(self) -> bytes:
        return bytes(self.span.trace_id)

    @property
    def name(self) -> str:
        return str(self.span.name)

    @property
    def attributes(self) -> dict[str, Any]:
        return {
            each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
            for each in self.span.attributes
        }


@dataclass
class Collector(TraceServiceServicer):  # type: ignore[misc]  # untyped base class
    """Listens at `address` while it is entered."""

    spans: list[Received] = field(default_factory=list)
    address: str = ""

    async def __aenter__(self) -> Collector:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._server.stop(0)

    async def Export(  # noqa: N802  # the protocol's name
        self, request: pb.ExportTraceServiceRequest, _context: object
    ) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Received(named["service.name"], span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def find_spans(self, name: str) -> list[Received]:
        """The spans with a name."""
        return [one for one in self.spans if one.name == name]

    def list_ancestors(self, one: Received) -> list[str]:
        """Names of its ancestors, nearest first."""
        by_id, names = {each.id: each for each in self.spans}, []
        while (parent := by_id.get(one.parent)) is not None:
            names.append(parent.name)
            one = parent
        return names
