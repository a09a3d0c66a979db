"""Memories, their history, operations and server information as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from memstream.answer_values import Unmatched
from memstream.argument_types import Count, Position
from memstream.arguments import check_fields
from memstream.errors import MemstreamError
from memstream.policy import Policy
from memstream.values import (
    Capability,
    EventReason,
    EventType,
    Fragment,
    FragmentKind,
    MemoryKind,
    ModelState,
    OperationState,
    Tier,
)


@check_fields
@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in a memory's history: after `revision` and the first `ordinal` events of the next revision."""

    memory_uid: str
    revision: Position
    ordinal: Count = 0


@dataclass(frozen=True, slots=True)
class ImportedFragment:
    """The history of an imported fragment from before its memory's event log."""

    kind: FragmentKind | None
    enhancers: tuple[str, ...]
    enhancement_count: int
    duplicate_count: int
    forgotten: bool


@dataclass(frozen=True, slots=True)
class ModelUse:
    """LLM usage on behalf of a memory; `purpose` is "importance", "insight", "reflection", "conflict" or "answer"."""

    purpose: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one fragment; fields that do not apply to `type` are empty or None.

    `fragment` is the fragment when the event was sent, if the watch includes fragments and it still exists.
    """

    cursor: Cursor
    time: datetime | None
    type: EventType
    fragment_id: str
    other_id: str
    from_tier: Tier | None
    to_tier: Tier | None
    reason: EventReason | None
    cosine: float | None
    draw: float | None
    importance: float | None
    sources: tuple[str, ...]
    fragment: Fragment | None = None
    model_use: ModelUse | None = None
    imported: ImportedFragment | None = None
    conflict_reason: str = ""
    conflict_decision: str = ""
    version: int = 0
    receipt_id: str = ""


@dataclass(frozen=True, slots=True)
class Put:
    """Result of `put_fragment`: `fragment` is None if the policy dropped it; `created` is False for a replacement."""

    fragment: Fragment | None
    created: bool
    revision: int


@dataclass(frozen=True, slots=True)
class FragmentVersion:
    """What a fragment was until a change replaced it. `version` names it: the revision of that change.

    `replaced_by` is UPDATED, or PROMOTED where the policy merges contents. `principal`: who replaced it; empty on a
    server without authentication, and for a change that the server made.
    """

    version: int
    fragment: Fragment
    replace_time: datetime | None
    replaced_by: EventType
    principal: str


@dataclass(frozen=True, slots=True)
class FragmentHistory:
    """A fragment as it is, and its earlier versions, the latest first."""

    fragment: Fragment
    versions: tuple[FragmentVersion, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """One agent's memory with its complete policy."""

    namespace: str
    name: str
    uid: str
    kind: MemoryKind
    policy: Policy
    labels: Mapping[str, str]
    revision: int
    create_time: datetime | None
    update_time: datetime | None
    etag: str
    fragments: int
    """Those that are not forgotten; from a server that does not count them 0."""
    change_time: datetime | None
    """When the last transition was committed."""

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Counts of a memory's fragments at one revision."""

    revision: int
    sensory: int
    short_term: int
    long_term: int
    insights: int
    forgotten: int
    backlog: int
    unindexed: int
    active: bool
    active_bytes: int
    unvectored: int = 0
    """Fragments without a vector: recall finds them by their words."""


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes that a namespace stores: values and 64 bytes for each row, without the database's own overhead."""

    total: int = 0
    fragments: int = 0
    history: int = 0
    """Versions of fragments, events, and conflicts."""
    receipts: int = 0
    """Receipts of recalls."""
    conversations: int = 0
    requests: int = 0
    """Answers to request ids, producers with the hashes of their batches, and operations."""
    memories: int = 0
    """Records of memories: labels and policies."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace: its number of memories, what it stores, and its quotas of that (0: none)."""

    name: str
    memories: int
    stored: StoredBytes = StoredBytes()
    bytes_max: int = 0
    receipts_bytes_max: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """A long-running operation: `done` of `total` `unit`s (total 0 while unknown).

    `error` says why it failed, or what it waits for while it runs.
    """

    id: str
    namespace: str
    memory: str
    type: str
    state: OperationState
    done: int
    total: int
    unit: str
    create_time: datetime | None
    end_time: datetime | None
    error: MemstreamError | None
    unmatched: tuple[Unmatched, ...] = ()
    """In the answer that starts an erasure by filter: what the memory lacks of the filter."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server; 0 if it did not announce one."""

    content_bytes_max: int
    batch_max: int
    window_observations: int
    window_bytes: int
    message_bytes_max: int
    name_bytes_max: int
    metadata_bytes_max: int
    recall_limit_max: int
    queries_in_flight_max: int
    request_id_retention: timedelta
    message_fields_max: int
    connection_streams_max: int
    caller_streams_max: int
    caller_calls_max: int


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """An embedding space: cosines from `cosine_low` (unrelated) to `cosine_high` (identical)."""

    name: str
    dimension: int
    cosine_low: float
    cosine_high: float
    similarity_min: float


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """Usage of one role since the server was started: "scorer", "insights", "conflicts", "check", "embedder" or
    "next_embedder"."""

    role: str
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Health of one model. Times and failures cover all namespaces, and are only shown to callers with access to
    all."""

    role: str
    model: str
    state: ModelState
    last_success_time: datetime | None = None
    last_failure_time: datetime | None = None
    consecutive_failures: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's version, models, capabilities and limits; `degraded` is empty unless answers are incomplete."""

    version: str
    start_time: datetime | None
    capabilities: frozenset[Capability]
    limits: Limits
    embedding: EmbeddingModel
    scorer_model: str
    insight_model: str
    index: str
    journal: str
    degraded: str
    model_usage: tuple[ModelUsage, ...] = ()
    models: tuple[ModelStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class RpcFigures:
    """The ended calls of one rpc since the server's start. `median` and `p99`: of their times, to the bound of a
    bucket; None without calls. The time of a stream is its whole life."""

    rpc: str
    calls: int
    failed: int
    median: timedelta | None
    p99: timedelta | None


@dataclass(frozen=True, slots=True)
class ServerSetting:
    """A setting. `given`: whether the operator set it; the value of a secret is never here."""

    name: str
    value: str
    given: bool


@dataclass(frozen=True, slots=True)
class ServerClient:
    """A program that calls the server. `name`: what it says it is, which nobody has checked; `principal`: its identity,
    empty without authentication; `address`: of its machine or proxy. `calls` and `streams` that it began; `streams` are
    open now."""

    name: str
    principal: str
    address: str
    first_call_time: datetime
    last_call_time: datetime
    calls: int
    streams: int


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server uses and does. Counts are those since its start; the difference of two answers is a rate.

    `resident_bytes`, `machine_bytes`: RAM of the process, and of the machine. `data_bytes`: the files of the data
    directory. `active_memories`, `active_bytes`: what is in RAM. `outbox`: rows that wait for the vector index.
    `streams`: the open ones by rpc.
    """

    start_time: datetime
    read_time: datetime
    resident_bytes: int
    machine_bytes: int
    cpu_seconds: float
    data_bytes: int
    disk_free_bytes: int
    disk_total_bytes: int
    active_memories: int
    active_bytes: int
    backlog: int
    outbox: int
    producers: int
    watchers: int
    observations: int
    recalls: int
    streams: Mapping[str, int]
    rpcs: tuple[RpcFigures, ...]
    settings: tuple[ServerSetting, ...]
    clients: tuple[ServerClient, ...] = ()
