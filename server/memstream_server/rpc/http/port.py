"""What the HTTP port shares with the gRPC server, and the types of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor
    from prometheus_client import CollectorRegistry

    from memstream_server.rpc.access.caller import Verb
    from memstream_server.rpc.connections import ConnectionBounds, Exempt
    from memstream_server.rpc.pipeline import Handlers
    from memstream_server.rpc.request_reader import RequestReader

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]

RightsOf = Callable[[str, Any, str], Awaitable[tuple[str, "list[Verb]"]]]
"""Path, context and namespace to the principal (empty without authentication) and its rights. Raises
Unauthenticated."""

PEER_URIS = "peer_uri"
"""The key of a connection's client certificate URIs, a tuple of bytes, in the state of a request."""


@dataclass(frozen=True, slots=True)
class HttpPort:
    """Services and handlers of the gRPC server. `wrap_handler` puts the handler of a path into its pipeline, `identify`
    gives the holder of a request's bytes, `rights_of` what the caller may do in a namespace."""

    services: tuple[ServiceDescriptor, ...]
    handlers: Handlers
    wrap_handler: Callable[[str, Any], Any]
    identify: Callable[[str, Any], Awaitable[str]]
    rights_of: RightsOf
    reader: RequestReader
    connections: ConnectionBounds
    exempt: Exempt
    """Whether a peer is a proxy, whose address has no bound of its own."""
    registry: CollectorRegistry | None
    """The metrics of the server."""
