"""grpc.health.v1: which services serve, for probes (Check) and load balancers (Watch).

| service | SERVING while |
|---|---|
| `memstream.v1.ServerService` | the process runs and is not draining |
| the other services of the contract | the journal answers reads too; without the index, answers may be incomplete |
| `memstream.journal`, `memstream.index` | this part answers reads; an index that is being rebuilt does not |
| `memstream.journal.write` | the journal can be written: not on a disk that is full, read-only, failing or slow |
| `memstream.model.embedder`, `.scorer`, `.insights`, ... | the last call of this model succeeded, or there was none |
| the empty name: the server as a whole | journal and index serve, whatever the state of the models |

It replaces grpcio-health-checking, in which every other watcher of a service stops getting updates when one leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from memstream_server.engine.status import Serving

SERVICE = "grpc.health.v1.Health"
JOURNAL, WRITING, INDEX, WHOLE = "memstream.journal", "memstream.journal.write", "memstream.index", ""
MODEL = "memstream.model."
"""Prefix of a model's role."""
POLL_INTERVAL_S = 1.0
_ALIVE = "memstream.v1.ServerService"
_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """The servicer. `read_serving` returns what serves; without it everything serves until `end`."""

    def __init__(self, services: Sequence[str], read_serving: Callable[[], Awaitable[Serving]] | None = None) -> None:
        self._services = tuple(services)
        self._read_serving = read_serving
        self._serving = dict.fromkeys((*services, JOURNAL, WRITING, INDEX, WHOLE), False)
        self._changed = asyncio.Event()
        self._ended = self._closed = False
        self._poll_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Reads the state now and every second from then on."""
        if self._read_serving is None:
            self._set_serving(True, True, True, {})
            return
        seen = await self._read_serving()
        self._set_serving(seen.journal, seen.writing, seen.index, seen.models)
        self._poll_task = asyncio.create_task(self._poll_serving(self._read_serving))

    def end(self) -> None:
        """The server drains: no service serves any more."""
        models = {name.removeprefix(MODEL): False for name in self._serving if name.startswith(MODEL)}
        self._set_serving(False, False, False, models, alive=False)
        self._ended = True

    async def close(self) -> None:
        """Stops polling and ends all watches."""
        self._closed = True
        self._changed.set()
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.gather(self._poll_task, return_exceptions=True)

    def is_serving(self, service: str) -> bool:
        """Whether a service serves now; False for an unknown name."""
        return self._serving.get(service, False)

    # ---- rpcs
    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> _Status:  # noqa: N802  # grpc's
        """Whether a service serves now. NOT_FOUND for an unknown name."""
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return self._status_of(request.service)

    async def List(self, _request: Any, _context: _Context) -> Any:  # noqa: N802
        """What every service says now. Older packages of grpc_health neither have its messages nor register it."""
        messages: Any = health_pb2
        return messages.HealthListResponse(statuses={service: self._status_of(service) for service in self._serving})

    async def Watch(self, request: health_pb2.HealthCheckRequest, _context: _Context) -> AsyncIterator[_Status]:  # noqa: N802
        """The state now and after every change."""
        said: _Status | None = None
        while True:
            changed, status = self._changed, self._status_of(request.service)
            if status != said:
                said = status
                yield status
            elif self._closed:
                return  # otherwise the server, which waits for calls, could not stop
            else:
                await changed.wait()

    def _status_of(self, service: str) -> _Status:
        if service not in self._serving:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._serving[service] else _Status.NOT_SERVING)

    async def _poll_serving(self, read_serving: Callable[[], Awaitable[Serving]]) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            seen = await read_serving()
            self._set_serving(seen.journal, seen.writing, seen.index, seen.models)

    def _set_serving(
        self, journal: bool, writing: bool, index: bool, models: Mapping[str, bool], *, alive: bool = True
    ) -> None:
        if self._ended:
            return
        now = dict.fromkeys(self._services, journal) | {_ALIVE: alive, JOURNAL: journal, INDEX: index}
        now[WRITING] = journal and writing
        now |= {f"{MODEL}{role}": serves for role, serves in models.items()}
        now[WHOLE] = journal and index
        if now != self._serving:
            self._serving = now
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
