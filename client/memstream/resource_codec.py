"""Converts memories, operations and server information from the wire."""

from __future__ import annotations

from dataclasses import fields

from memstream.codec import fragment_from_wire
from memstream.policy_codec import policy_from_wire
from memstream.resources import (
    EmbeddingModel,
    Limits,
    MemoryInfo,
    MemoryStats,
    ModelStatus,
    ModelUsage,
    Namespace,
    Operation,
    Put,
    RpcFigures,
    ServerClient,
    ServerInfo,
    ServerSetting,
    ServerStatus,
    StoredBytes,
)
from memstream.status import error_from_status
from memstream.v1 import memory_pb2, memory_service_pb2, operation_pb2, server_service_pb2
from memstream.values import Capability, MemoryKind, ModelState, OperationState
from memstream.wiretypes import duration_from_wire, members_by_number, optional_timestamp_from_wire, timestamp_from_wire

_MEMORY_KINDS = members_by_number(MemoryKind, memory_pb2.MemoryKind.DESCRIPTOR)
_CAPABILITIES = members_by_number(Capability, server_service_pb2.Capability.DESCRIPTOR)
_MODEL_STATES = members_by_number(ModelState, server_service_pb2.ModelState.DESCRIPTOR)
_STATES = members_by_number(OperationState, operation_pb2.OperationState.DESCRIPTOR)


def namespace_from_wire(wire: memory_service_pb2.Namespace) -> Namespace:
    """Converts a namespace."""
    counts = {each.name: getattr(wire.stored, each.name) for each in fields(StoredBytes)}
    return Namespace(wire.name, wire.memories, StoredBytes(**counts), wire.bytes_max, wire.receipts_bytes_max)


def memory_from_wire(wire: memory_pb2.Memory) -> MemoryInfo:
    """Converts a memory."""
    return MemoryInfo(
        namespace=wire.namespace,
        name=wire.name,
        uid=wire.uid,
        kind=_MEMORY_KINDS.get(wire.kind, MemoryKind.HYBRID),
        policy=policy_from_wire(wire.policy),
        labels=dict(wire.labels),
        revision=wire.revision,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        update_time=optional_timestamp_from_wire(wire.update_time, wire.HasField("update_time")),
        etag=wire.etag,
        fragments=wire.fragments,
        change_time=optional_timestamp_from_wire(wire.change_time, wire.HasField("change_time")),
    )


def stats_from_wire(wire: memory_pb2.MemoryStats) -> MemoryStats:
    """Converts the counts of a memory."""
    return MemoryStats(**{each.name: getattr(wire, each.name) for each in fields(MemoryStats)})


def operation_from_wire(wire: operation_pb2.Operation) -> Operation:
    """Converts an operation."""
    return Operation(
        id=wire.id,
        namespace=wire.namespace,
        memory=wire.memory,
        type=wire.type,
        state=_STATES.get(wire.state, OperationState.UNKNOWN),
        done=wire.done,
        total=wire.total,
        unit=wire.unit,
        create_time=optional_timestamp_from_wire(wire.create_time, wire.HasField("create_time")),
        end_time=optional_timestamp_from_wire(wire.end_time, wire.HasField("end_time")),
        error=error_from_status(wire.error) if wire.HasField("error") else None,
    )


def limits_from_wire(wire: server_service_pb2.Limits) -> Limits:
    """Converts the limits of a server."""
    names = (each.name for each in fields(Limits) if each.name != "request_id_retention")
    return Limits(
        **{name: getattr(wire, name) for name in names},
        request_id_retention=duration_from_wire(wire.request_id_retention),
    )


def model_status_from_wire(wire: server_service_pb2.ModelStatus) -> ModelStatus:
    """Converts the status of a model."""
    return ModelStatus(
        role=wire.role,
        model=wire.model,
        state=_MODEL_STATES.get(wire.state, ModelState.UNKNOWN),
        last_success_time=optional_timestamp_from_wire(wire.last_success_time, wire.HasField("last_success_time")),
        last_failure_time=optional_timestamp_from_wire(wire.last_failure_time, wire.HasField("last_failure_time")),
        consecutive_failures=wire.consecutive_failures,
        last_error=wire.last_error,
    )


def server_info_from_wire(wire: server_service_pb2.GetServerInfoResponse) -> ServerInfo:
    """Converts the information about a server."""
    return ServerInfo(
        version=wire.version,
        start_time=optional_timestamp_from_wire(wire.start_time, wire.HasField("start_time")),
        capabilities=frozenset(_CAPABILITIES.get(each, Capability.UNKNOWN) for each in wire.capabilities),
        limits=limits_from_wire(wire.limits),
        embedding=EmbeddingModel(**{each.name: getattr(wire.embedding, each.name) for each in fields(EmbeddingModel)}),
        scorer_model=wire.scorer_model,
        insight_model=wire.insight_model,
        index=wire.index,
        journal=wire.journal,
        degraded=wire.degraded,
        model_usage=tuple(
            ModelUsage(**{each.name: getattr(one, each.name) for each in fields(ModelUsage)})
            for one in wire.model_usage
        ),
        models=tuple(model_status_from_wire(one) for one in wire.models),
    )


def server_status_from_wire(wire: server_service_pb2.GetServerStatusResponse) -> ServerStatus:
    """Converts the status of a server."""
    converted = ("start_time", "read_time", "streams", "rpcs", "settings", "clients")
    return ServerStatus(
        **{each.name: getattr(wire, each.name) for each in fields(ServerStatus) if each.name not in converted},
        start_time=timestamp_from_wire(wire.start_time),
        read_time=timestamp_from_wire(wire.read_time),
        streams={one.rpc: one.streams for one in wire.streams},
        rpcs=tuple(
            RpcFigures(
                one.rpc,
                one.calls,
                one.failed,
                duration_from_wire(one.median) if one.HasField("median") else None,
                duration_from_wire(one.p99) if one.HasField("p99") else None,
            )
            for one in wire.rpcs
        ),
        settings=tuple(ServerSetting(one.name, one.value, one.given) for one in wire.settings),
        clients=tuple(
            ServerClient(
                one.name,
                one.principal,
                one.address,
                timestamp_from_wire(one.first_call_time),
                timestamp_from_wire(one.last_call_time),
                one.calls,
                one.streams,
            )
            for one in wire.clients
        ),
    )


def put_from_wire(wire: memory_service_pb2.PutFragmentResponse) -> Put:
    """Converts the result of a put."""
    fragment = fragment_from_wire(wire.fragment) if wire.HasField("fragment") else None
    return Put(fragment, wire.created, wire.revision)
