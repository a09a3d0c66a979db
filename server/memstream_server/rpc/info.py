"""What a server says of itself.

ServerService: version, capabilities, limits and models of the server; and what it uses and does.

grpc.health.v1: which services serve, for probes (Check) and load balancers (Watch).

| service | SERVING while |
|---|---|
| `memstream.v1.ServerService` | the process runs and is not draining |
| the other services of the contract | the journal answers reads too; without the index, answers may be incomplete |
| `memstream.journal`, `memstream.index` | this part answers reads; an index that is being rebuilt does not |
| `memstream.journal.write` | the journal can be written: not on a disk that is full, read-only, failing or slow |
| `memstream.model.embedder`, `.scorer`, `.insights`, ... | the last call of this model succeeded, or there was none |
| the empty name: the server as a whole | journal and index serve, whatever the state of the models |
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health_pb2
from pydantic import SecretStr

from memstream.v1 import server_service_pb2 as pb
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.runtime.turns import run_in_slices
from memstream_server.ports.models import ModelState, ModelStatus
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.wire.scalars import duration_message, timestamp_message

if TYPE_CHECKING:
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

    from memstream_server.engine.engine import Engine
    from memstream_server.engine.status import Serving
    from memstream_server.observability import Metrics
    from memstream_server.rpc.access.admission import Clients
    from memstream_server.settings import Settings

_STATES = {
    ModelState.UNKNOWN: pb.ModelState.MODEL_STATE_UNKNOWN,
    ModelState.SERVING: pb.ModelState.MODEL_STATE_SERVING,
    ModelState.FAILING: pb.ModelState.MODEL_STATE_FAILING,
}
_REFLECTION = pb.Capability.CAPABILITY_REFLECTION

_SECRET = "**********"
_NO_FAILURES = ("OK", "CANCELLED")
"""Codes of calls that did not fail: a client ends its streams by cancelling them."""
SERVICE = "grpc.health.v1.Health"
JOURNAL, WRITING, INDEX, WHOLE = "memstream.journal", "memstream.journal.write", "memstream.index", ""
MODEL = "memstream.model."
"""Prefix of a model's role."""
POLL_INTERVAL_S = 1.0
_ALIVE = "memstream.v1.ServerService"
_Status = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class ServerService:
    """The servicer."""

    def __init__(
        self,
        engine: Engine,
        limits: RequestLimits,
        metrics: Metrics | None = None,
        settings: Settings | None = None,
        clients: Clients | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._settings = settings
        self._clients = clients
        self._started_us = time.time_ns() // 1_000
        self.capabilities: Sequence[pb.Capability.ValueType] = ()
        """Set once all services are known."""

    async def get_server_info(
        self, _request: pb.GetServerInfoRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        info, whole = self._engine.info(), caller_may(Verb.READ, "")
        return pb.GetServerInfoResponse(
            version=server_version(),
            start_time=timestamp_message(self._started_us),
            capabilities=[each for each in self.capabilities if each != _REFLECTION or info.insight_model],
            limits=self._limits.to_message(),
            embedding=pb.EmbeddingModel(
                name=info.embedding.name,
                dimension=info.embedding.dimension,
                cosine_low=info.embedding.fitted.cosine_low,
                cosine_high=info.embedding.fitted.cosine_high,
                similarity_min=info.embedding.fitted.similarity_min,
            ),
            scorer_model=info.scorer_model,
            insight_model=info.insight_model,
            index=info.index,
            degraded=info.degraded,
            journal=info.journal,
            model_usage=[
                pb.ModelUsage(
                    role=one.role,
                    model=one.model,
                    requests=one.requests,
                    failed=one.failed,
                    prompt_tokens=one.prompt_tokens,
                    completion_tokens=one.completion_tokens,
                )
                for one in info.spent
                if whole
            ],
            models=[_model_status(one, whole) for one in info.models],
        )

    async def get_server_status(
        self, _request: pb.GetServerStatusRequest, _context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerStatusResponse:
        answer = await _read_status(self._engine, self._metrics, self._settings)
        answer.start_time.CopyFrom(timestamp_message(self._started_us))
        for one in () if self._clients is None else self._clients.list_latest():
            answer.clients.add(
                name=one.name,
                principal=one.principal,
                address=one.address,
                first_call_time=timestamp_message(one.first_us),
                last_call_time=timestamp_message(one.last_us),
                calls=one.calls,
                streams=one.streams,
            )
        return answer


def _model_status(status: ModelStatus, whole: bool) -> pb.ModelStatus:
    """`whole`: whether the caller may see when and how often models are called."""
    shown = pb.ModelStatus(role=status.role, model=status.model, state=_STATES[status.state], last_error=status.error)
    if whole:
        shown.consecutive_failures = status.failures
        if status.succeeded_us:
            shown.last_success_time.CopyFrom(timestamp_message(status.succeeded_us))
        if status.failed_us:
            shown.last_failure_time.CopyFrom(timestamp_message(status.failed_us))
    return shown


@cache
def server_version() -> str:
    """The installed version."""
    try:
        return version("memstream")
    except PackageNotFoundError:  # a source tree without an installed package
        return "unknown"


async def _read_status(
    engine: Engine, metrics: Metrics | None, settings: Settings | None
) -> pb.GetServerStatusResponse:
    """All but the start time; without metrics or settings their parts are empty."""
    held = engine.memory_stats()
    answer = pb.GetServerStatusResponse(
        read_time=timestamp_message(time.time_ns() // 1_000),
        cpu_seconds=time.process_time(),
        active_memories=held.memories,
        active_bytes=held.size_bytes,
        backlog=held.backlog,
        producers=held.producers,
        watchers=held.watchers,
    )
    answer.resident_bytes, answer.machine_bytes = _measure_ram()
    if settings is not None:
        folder = settings.data_dir
        answer.data_bytes, answer.disk_free_bytes, answer.disk_total_bytes = await asyncio.to_thread(_measure, folder)
        await run_in_slices(_add_settings(answer, settings))
    if metrics is not None:
        answer.outbox = round(_sum_samples(metrics.outbox_depth))
        answer.observations = round(_sum_samples(metrics.observations_stored, "_total"))
        answer.recalls = round(_sum_samples(metrics.recalls, "_total"))
        for rpc, streams in sorted(_by_rpc(metrics.streams, "").items()):
            if streams:
                answer.streams.add(rpc=rpc, streams=round(streams))
        # The library reads all buckets of all rpcs at once: ten milliseconds.
        durations = await run_in_thread(partial(_list_samples, metrics.call_seconds, "_bucket"))
        await run_in_slices(_add_rpcs(answer, _list_samples(metrics.calls, "_total"), durations))
    return answer


def _measure_ram() -> tuple[int, int]:
    """(bytes that the process has, bytes of the machine)."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        resident = pages * resource.getpagesize()
    except OSError:  # not on Linux
        resident = 0
    try:
        return resident, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return resident, 0


def _measure(folder: Path) -> tuple[int, int, int]:
    """(bytes of the files below the folder, free bytes of its disk, bytes of the disk)."""
    size = 0
    for place, _, names in os.walk(folder):  # unlike rglob, it passes by a folder that is removed meanwhile
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:  # removed meanwhile
                continue
    disk = shutil.disk_usage(folder)
    return size, disk.free, disk.total


def _add_settings(answer: pb.GetServerStatusResponse, settings: Settings) -> Generator[None, None, None]:
    for name in type(settings).model_fields:
        value = _show_value(getattr(settings, name))
        answer.settings.add(name=name, value=value, given=name in settings.model_fields_set)
        yield


def _show_value(value: object) -> str:
    if isinstance(value, SecretStr):
        return _SECRET if value.get_secret_value() else ""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return ", ".join(_show_value(each) for each in value)
    return str(getattr(value, "value", value))


def _add_rpcs(
    answer: pb.GetServerStatusResponse, counts: Sequence[Sample], durations: Sequence[Sample]
) -> Generator[None, None, None]:
    """Adds the figures of each rpc."""
    calls, failed = defaultdict[str, float](float), defaultdict[str, float](float)
    for sample in counts:
        rpc = sample.labels["rpc"]
        calls[rpc] += sample.value
        failed[rpc] += sample.value if sample.labels["code"] not in _NO_FAILURES else 0
        yield
    buckets = defaultdict[str, list[tuple[float, float]]](list)
    for sample in durations:
        buckets[sample.labels["rpc"]].append((float(sample.labels["le"]), sample.value))
        yield
    for rpc in sorted(calls, key=lambda name: -calls[name]):
        one = answer.rpcs.add(rpc=rpc, calls=round(calls[rpc]), failed=round(failed[rpc]))
        if buckets[rpc]:
            one.median.CopyFrom(duration_message(_find_quantile(buckets[rpc], 0.5)))
            one.p99.CopyFrom(duration_message(_find_quantile(buckets[rpc], 0.99)))
        yield


def _list_samples(metric: Collector, suffix: str) -> list[Sample]:
    """Those whose name ends so."""
    return [each for family in metric.collect() for each in family.samples if each.name == family.name + suffix]


def _find_quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Seconds: the bound of the first bucket with that share of the calls; the last finite bound if none has."""
    wanted = share * buckets[-1][1]
    bounds = [bound for bound, _ in buckets[:-1]]
    return next((bound for bound, count in buckets[:-1] if count >= wanted), bounds[-1])


def _sum_samples(metric: Collector, suffix: str = "") -> float:
    return sum(_by_rpc(metric, suffix).values())


def _by_rpc(metric: Collector, suffix: str) -> Mapping[str, float]:
    """The values of a counter (suffix "_total") or a gauge, summed by the label `rpc`; under "" without one."""
    found = defaultdict[str, float](float)
    for sample in _list_samples(metric, suffix):
        found[sample.labels.get("rpc", "")] += sample.value
    return found


class Health:
    """The servicer of grpc.health.v1. `read_serving` returns what serves; without it everything serves until `end`.

    It replaces grpcio-health-checking, in which every other watcher of a service stops getting updates when one leaves.
    """

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
