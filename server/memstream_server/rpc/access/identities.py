"""From a call's credentials to a principal: a header of another server, a token, a header of a proxy, or a client
certificate.

The first of these that is present decides. If it is invalid the call is refused: the next one is not tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream_server.rpc.access.files import Watched
from memstream_server.rpc.access.keys import PREFIX, ApiKey, name_of
from memstream_server.rpc.access.peers import CALLER_HEADER, Peers
from memstream_server.rpc.access.xfcc import HEADER, TrustedProxies, forwarded_uri
from memstream_server.rpc.errors import Unauthenticated

if TYPE_CHECKING:
    from memstream_server.rpc.access.tokens import JwtIdentities

Metadata = Sequence[tuple[str, str | bytes]]
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Identities:
    """The accepted credentials; None or empty if one was not configured."""

    keys: Watched[Mapping[str, ApiKey]] | None = None
    tokens: JwtIdentities | None = None
    proxies: TrustedProxies = field(default_factory=lambda: TrustedProxies(""))
    peers: Peers = field(default_factory=Peers)

    async def identify_principal(self, metadata: Metadata, context: _Context, path: str) -> str:
        """Raises Unauthenticated."""
        if said := _metadata_values(metadata, CALLER_HEADER):
            return self.peers.verify_principal(_single_value(CALLER_HEADER, said), path)
        if said := _metadata_values(metadata, "authorization"):
            return await self._verify_bearer(_single_value("authorization", said))
        if (said := _metadata_values(metadata, HEADER)) and context.peer() in self.proxies:
            return f"uri:{forwarded_uri(','.join(said))}"
        uris = [*context.auth_context().get("peer_uri", ())]
        if len(uris) == 1:
            return f"uri:{uris[0].decode(errors='replace')}"
        raise Unauthenticated("say who calls: a bearer token in `authorization`, or a client certificate with one URI")

    async def _verify_bearer(self, given: str) -> str:
        scheme, _, token = given.strip().partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated("`authorization` must be: Bearer TOKEN")
        if token.startswith(PREFIX):
            name = name_of(self.keys.read_current(), token) if self.keys is not None else None
            if name is None:
                raise Unauthenticated("there is no such API key, or it was revoked")
            return f"key:{name}"
        if self.tokens is None:
            raise Unauthenticated("the bearer token is none that this server accepts")
        return f"jwt:{await self.tokens.verify_subject(token)}"


def _metadata_values(metadata: Metadata, key: str) -> list[str]:
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def _single_value(key: str, values: Sequence[str]) -> str:
    if len(values) != 1:
        raise Unauthenticated(f"`{key}` was given more than once")
    return values[0]
