"""ServerService: version, capabilities, limits and models of the server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import server_service_pb2 as pb
from memstream_server.ports.models import ModelState, ModelStatus
from memstream_server.rpc.access.caller import Verb, caller_may
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.server_status import read_status
from memstream_server.rpc.wire.scalars import timestamp_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.observability import Metrics
    from memstream_server.settings import Settings

_STATES = {
    ModelState.UNKNOWN: pb.ModelState.MODEL_STATE_UNKNOWN,
    ModelState.SERVING: pb.ModelState.MODEL_STATE_SERVING,
    ModelState.FAILING: pb.ModelState.MODEL_STATE_FAILING,
}
_REFLECTION = pb.Capability.CAPABILITY_REFLECTION


class ServerService:
    """The servicer."""

    def __init__(
        self, engine: Engine, limits: Limits, metrics: Metrics | None = None, settings: Settings | None = None
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._metrics = metrics
        self._settings = settings
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
                cosine_low=info.embedding.cosine_low,
                cosine_high=info.embedding.cosine_high,
                similarity_min=info.embedding.similarity_min,
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
        answer = await read_status(self._engine, self._metrics, self._settings)
        answer.start_time.CopyFrom(timestamp_message(self._started_us))
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
