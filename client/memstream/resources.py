"""Memories, their history and the server that keeps them, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

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
    """A place in a memory's history: everything up to `revision` was seen, and `ordinal` events of the next one."""

    memory_uid: str
    revision: Position
    ordinal: Count = 0


@dataclass(frozen=True, slots=True)
class ImportedFragment:
    """What an imported fragment had been through before its memory's log began."""

    kind: FragmentKind | None
    enhancers: tuple[str, ...]
    enhancement_count: int
    duplicate_count: int
    forgotten: bool


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What asking an LLM on behalf of a memory took: for "importance", "insight" or "reflection"."""

    purpose: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one fragment; fields that do not apply to `type` are empty or None.

    `fragment` is the fragment concerned as it was when the event was sent, if the watch asked for fragments and it is
    still there.
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


@dataclass(frozen=True, slots=True)
class Put:
    """A fragment as put: None when its memory's policy did not keep it; `created` when it was not there before."""

    fragment: Fragment | None
    created: bool
    revision: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """One agent's memory as the server describes it, with its complete policy."""

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

    @property
    def path(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """How many fragments a memory holds, at one revision."""

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


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace and how many memories it has."""

    name: str
    memories: int


@dataclass(frozen=True, slots=True)
class Operation:
    """A piece of long work: `done` of `total` `unit`s (total 0 while unknown); `error` says why it failed, or
    what it waits for while it is at work.
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server accepts; 0 where it did not say."""

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
    """An embedding space: `cosine_low` counts as nothing in common, `cosine_high` as the same."""

    name: str
    dimension: int
    cosine_low: float
    cosine_high: float
    similarity_min: float


@dataclass(frozen=True, slots=True)
class ModelUsage:
    """What one use of the LLM (as "scorer", "insights" or "check") took since the server was started."""

    role: str
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How the calls of one model go. Times and failures are those of all namespaces, for callers who may read them."""

    role: str
    model: str
    state: ModelState
    last_success_time: datetime | None = None
    last_failure_time: datetime | None = None
    consecutive_failures: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server answering is and can do; `degraded` is empty unless answers lack something now."""

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
