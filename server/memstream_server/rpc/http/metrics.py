"""`/metrics` on the HTTP port: Prometheus metrics for a caller with the right `admin` in the namespace "*".

They sum up all tenants, so a right in one namespace is not enough. Without authentication every caller has every right,
and the port is reachable from this machine alone.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from memstream_server.rpc.access.caller import Verb
from memstream_server.rpc.http.callers import ask_rights

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from memstream_server.rpc.http.port import RightsOf

METRICS = "/metrics"


class MetricsPage:
    """An ASGI application for `/metrics`."""

    def __init__(self, registry: CollectorRegistry, rights_of: RightsOf) -> None:
        self._registry = registry
        self._rights_of = rights_of

    def serves(self, path: str) -> bool:
        """Whether the path is this page's."""
        return path == METRICS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        respond = await self._answer(scope)
        await respond(scope, receive, send)

    async def _answer(self, scope: Any) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            return JSONResponse({"code": "unimplemented", "message": "the metrics take GET"}, 405)
        asked = await ask_rights(self._rights_of, METRICS, scope, "")
        if isinstance(asked, Response):
            return asked
        principal, verbs = asked
        if Verb.ADMIN not in verbs:
            message = f'{principal} needs the right admin in the namespace "*": metrics sum up all tenants'
            return JSONResponse({"code": "permission_denied", "message": message}, 403)
        accepted = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
        encode, media_type = choose_encoder(accepted)
        body = await asyncio.to_thread(encode, self._registry)  # takes milliseconds, which the event loop does not have
        return Response(body, headers={"content-type": media_type})
