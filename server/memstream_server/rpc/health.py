"""grpc.health.v1: what serves, by service, for probes and balancers that ask (Check) or are told (Watch).

| service | SERVING while |
|---|---|
| `memstream.v1.ServerService` | the process runs and is not draining |
| the other services of the contract | the journal serves, too: without the index they answer correctly, if with less |
| `memstream.journal`, `memstream.index` | this part serves; an index that is being filled does not yet |
| `memstream.model.embedder`, `.scorer`, `.insights`, ... | the last call of this model succeeded, or none was made |
| the empty name: the server as a whole | journal and index serve, whatever the models do |

Ours and not grpcio-health-checking's: there every other watcher of a service goes deaf when one leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from memstream_server.engine.engine import Serving

SERVICE = "grpc.health.v1.Health"
JOURNAL, INDEX, WHOLE = "memstream.journal", "memstream.index", ""
MODEL = "memstream.model."
"""Before the role of a model."""
POLL_INTERVAL_S = 1.0
_ALIVE = "memstream.v1.ServerService"
_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """The servicer. `read_serving` says what serves; without it everything does until `end`."""

    def __init__(self, services: Sequence[str], read_serving: Callable[[], Awaitable[Serving]] | None = None) -> None:
        self._services = tuple(services)
        self._read_serving = read_serving
        self._serving = dict.fromkeys((*services, JOURNAL, INDEX, WHOLE), False)
        self._changed = asyncio.Event()
        self._ended = self._closed = False
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """From here on what `read_serving` says is told; every second it is asked again."""
        if self._read_serving is None:
            self._set_serving(True, True, {})
            return
        seen = await self._read_serving()
        self._set_serving(seen.journal, seen.index, seen.models)
        self._poll_task = asyncio.create_task(self._poll_serving(self._read_serving))

    def end(self) -> None:
        """The server drains: nothing serves, and nothing will again."""
        models = {name.removeprefix(MODEL): False for name in self._serving if name.startswith(MODEL)}
        self._set_serving(False, False, models, alive=False)
        self._ended = True

    async def close(self) -> None:
        """No more looking, and no more telling: watches end."""
        self._closed = True
        self._changed.set()
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.gather(self._poll_task, return_exceptions=True)

    def serves(self, service: str) -> bool:
        """Whether a service serves now; a name that there is not does not."""
        return self._serving.get(service, False)

    # ---- the rpcs
    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> _Status:  # noqa: N802  # grpc's
        """Whether a service serves now. NOT_FOUND for a name there is not."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return self._status(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, _context: _Context) -> AsyncIterator[_Status]:  # noqa: N802
        """The same now and after every change."""
        said: _Status | None = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != said:
                said = status
                yield status
            elif self._closed:
                return  # else it would hold up the end of the server, which waits for calls
            else:
                await changed.wait()

    # ---- inside
    def _status(self, service: str) -> _Status:
        if service not in self._serving:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._serving[service] else _Status.NOT_SERVING)

    async def _poll_serving(self, read_serving: Callable[[], Awaitable[Serving]]) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            seen = await read_serving()
            self._set_serving(seen.journal, seen.index, seen.models)

    def _set_serving(self, journal: bool, index: bool, models: Mapping[str, bool], *, alive: bool = True) -> None:
        if self._ended:
            return
        now = dict.fromkeys(self._services, journal) | {_ALIVE: alive, JOURNAL: journal, INDEX: index}
        now |= {f"{MODEL}{role}": serves for role, serves in models.items()}
        now[WHOLE] = journal and index
        if now != self._serving:
            self._serving = now
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
