"""What a journal keeps of a memory beside its fragments, and of what is still to be done for it."""

from __future__ import annotations

from dataclasses import dataclass

from memstream_server.core.events import Event
from memstream_server.core.policy import Policy
from memstream_server.core.values import MemoryKind


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """One memory as the journal knows it."""

    uid: str
    """Identity; a memory made anew under the same name has another one, and so has one restored from a backup."""
    namespace: str
    name: str
    kind: MemoryKind
    policy: Policy
    seed: bytes
    labels: tuple[tuple[str, str], ...] = ()
    epoch: int = 0
    """Raised whenever a process takes ownership."""
    revision: int = 0
    create_time_us: int = 0
    update_time_us: int = 0
    reflection_aggregate: float = 0.0


@dataclass(frozen=True, slots=True)
class Producer:
    """Where one producer of a memory stands."""

    name: str
    epoch: int
    received: int = 0
    """Last sequence number received; the next expected is one more."""
    stored: int = 0
    """Last sequence number up to which every item is stored or rejected."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A committed transition as the event log has it."""

    revision: int
    time_us: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """Statistics of a memory, forgotten fragments apart."""

    sensory: int = 0
    short_term: int = 0
    long_term: int = 0
    insights: int = 0
    forgotten: int = 0
    pending: int = 0
    unindexed: int = 0


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """Work for the vector index: a row of the outbox. `id` is the outbox row's own, 0 until the journal gives one."""

    memory: str
    fragment: str
    delete: bool = False
    id: int = 0


@dataclass(frozen=True, slots=True)
class Indexable:
    """What of a live fragment goes into the vector index."""

    model: str
    """The space of `vector`: the one in force; empty without a vector."""
    vector: bytes | None
    """float32 little-endian."""


@dataclass(frozen=True, slots=True)
class Job:
    """Background work, created in the transaction that causes it. Leaves by `finish_jobs` of a later commit."""

    id: str
    memory: str
    type: str
    """reflection, insight, backfill, forgetting, erase, reindex."""
    payload: str
    """JSON of ids and numbers."""
    create_time_us: int = 0
    attempts: int = 0


ANSWER_KEPT_S = 24 * 3600
"""How long the answer to a `request_id` is kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The stored answer to a `request_id`, served again to a repeat for ANSWER_KEPT_S."""

    request: str
    """namespace, method and request_id, joined by newlines; that of an ObserveBatch is `batch_request`."""
    digest: bytes
    """Hash of the request: the same id with another request is a conflict."""
    response: bytes
    time_us: int


def batch_request(namespace: str, uid: str = "", request_id: str = "") -> str:
    """`Answer.request` of an ObserveBatch. Those of a namespace, and those of a memory, have a beginning of their own.

    Their responses hold ids and numbers alone: unlike those of other calls an erasure leaves them, without the digest.
    """
    return "\n".join((namespace, "ObserveBatchRequest", uid, request_id)).rstrip("\n")
