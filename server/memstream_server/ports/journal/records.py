"""What a journal keeps besides fragments: memories, receipts of recalls, waiting work, and the embedding spaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import Policy
from memstream_server.core.suspicions import Suspicion
from memstream_server.core.values import Fragment, MemoryKind
from memstream_server.ports.journal.rows import Terms

ComputeVectors: TypeAlias = Callable[[Sequence[str], str], npt.NDArray[np.float32]]
"""The vectors of some texts, for a namespace, in a space that needs no model: float32[texts, dimension]. The same bits
every time, whatever the other texts are; any thread may call it."""


@dataclass(frozen=True, slots=True)
class Space:
    """An embedding space."""

    model: str
    dimension: int
    index_layout: int
    """A number that the first start takes from the index's settings; only the index gives it a meaning. Stored, because
    the layout of an index is fixed when it is created."""


@dataclass(frozen=True, slots=True)
class Spaces:
    """The embedding spaces of a store. Recall uses only the one in force."""

    in_force: Space | None = None
    """None in a new store."""
    next: Space | None = None
    """Being filled; will be put in force."""
    old: Space | None = None
    """No longer used; its vectors and its collection are being removed."""


@dataclass(frozen=True, slots=True)
class Made:
    """Vectors of a stored fragment in another space, computed from its content at `version`."""

    fragment: str
    version: int
    vector: bytes | None
    content_vector: bytes | None = None
    """Vector of the content alone, for a held fragment that is compared."""
    computed: bool = False
    """Both follow from the text: the journal need not store them."""


Labels = tuple[tuple[str, str], ...]
"""(key, value) pairs, sorted by key."""


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A memory's record."""

    uid: str
    """Identity; a memory recreated under the same name, or restored from a backup, gets a new one."""
    namespace: str
    name: str
    kind: MemoryKind
    policy: Policy
    seed: bytes
    labels: Labels = ()
    epoch: int = 0
    """Raised at every change of ownership."""
    revision: int = 0
    create_time_us: int = 0
    update_time_us: int = 0
    reflection_aggregate: float = 0.0
    fragments: int = 0
    """Those that are not forgotten, expired ones included until the next maintenance."""
    change_time_us: int = 0
    """Time of the last commit."""


@dataclass(frozen=True, slots=True)
class Producer:
    """State of a memory's producer."""

    name: str
    epoch: int
    received: int = 0
    """Last sequence number received; the next must be one more."""
    stored: int = 0
    """Last sequence number up to which every item is stored or rejected."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A committed transition in the event log."""

    revision: int
    time_us: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class FragmentVersion:
    """What a fragment was before a commit that replaced its content or attributes."""

    fragment: Fragment
    """As it was written last before; tier and counts are those of that write."""
    replaced: int
    """Revision of the commit: names the version."""
    time_us: int
    """Time of the commit."""
    event: EventType
    principal: str
    """See Replaced."""
    terms: Terms | None = None
    vector: bytes | None = None
    """float32 little-endian in the space `model`."""
    model: str = ""


class RankedFragment(Struct, frozen=True, gc=False, array_like=True):
    """A recollection in a receipt. Encoded as an array of its fields: append new ones at the end."""

    id: str
    score: float
    relevance: float
    names: int
    """Index in RecallReceipt.names of the names of its parts."""
    weights: int
    """Index in RecallReceipt.weights."""
    values: tuple[float, ...]
    companion: bool = False
    """Whether it is the companion of the one before it."""


class RecallReceipt(Struct, frozen=True, gc=False, omit_defaults=True):
    """What is kept of a recall, complete enough to rank the same again; without content of fragments."""

    id: str
    revision: int
    """The revision that was ranked; the commit that writes the receipt is a later one."""
    time_us: int
    """When it was ranked: expiry counted at this time."""
    now_us: int
    """The time that recency counted from."""
    formula: str
    space: str
    """Name of the embedding space."""
    policy: Policy
    query: bytes = b""
    """As the client sent it; opaque to engine and journal. Empty: erased."""
    vector: bytes | None = None
    """The query's vector, float32 little-endian, if the embedder need not give the same again; None: embed, see
    `embedded`."""
    embedded: bool = True
    """Whether there was a query vector; without one the lexical legs answered."""
    terms: bytes = b""
    """Hashes of the query's words, 8 bytes each as in Terms: an erasure finds the queries that share a word."""
    analyzer: int = 1
    """Version of the analyzer of `terms`."""
    ranking: tuple[RankedFragment, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()
    weights: tuple[tuple[float, ...], ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    """The open suspicions about candidates."""
    accesses: tuple[tuple[str, int], ...] = ()
    """(id, time of its last access) of the candidates, if the formula counts accesses."""
    indexed: bool = False
    """Whether the vector index chose the candidates, because the memory was larger than RAM."""
    principal: str = ""
    """Who recalled; empty without authentication."""
    degraded: str = ""
    erased: tuple[str, ...] = ()
    """Ids of the ranking whose content has left for good since."""

    @property
    def is_query_erased(self) -> bool:
        """Whether the query is gone."""
        return not self.query


@dataclass(frozen=True, slots=True)
class Counts:
    """Statistics of a memory; `forgotten` is not part of the other counts."""

    sensory: int = 0
    short_term: int = 0
    long_term: int = 0
    insights: int = 0
    forgotten: int = 0
    pending: int = 0
    unindexed: int = 0
    unvectored: int = 0
    """Fragments of any tier without a vector in the space in force."""


@dataclass(frozen=True, slots=True)
class NamespaceBytes:
    """Bytes that a namespace stores, by kind: of rows, without the database's own overhead."""

    fragments: int = 0
    """Fragments with their vectors, forgotten and received ones included."""
    history: int = 0
    """Versions, events and conflicts."""
    receipts: int = 0
    """Receipts of recalls."""
    conversations: int = 0
    requests: int = 0
    """Answers to request ids, producers with the hashes of their batches, and operations."""
    memories: int = 0
    """Records of memories: labels and policy."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(astuple(self))


def staged_name(name: str) -> str:
    """The name under which the bytes of an unpublished memory or conversation count, which has no namespace yet."""
    return f"\n{name}"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """An outbox row: work for the vector index. `id` is 0 until the journal assigns one."""

    memory: str
    fragment: str
    delete: bool = False
    id: int = 0


@dataclass(frozen=True, slots=True)
class Indexable:
    """A live fragment's data for the vector index."""

    model: str
    """The space of `vector`, which is the one in force; empty if there is no vector."""
    vector: bytes | None
    """float32 little-endian."""


@dataclass(frozen=True, slots=True)
class Job:
    """Background work, created by the transaction that causes it and removed by a later commit's `finish_jobs`."""

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
    """The stored answer to a `request_id`, returned to repeats for ANSWER_KEPT_S."""

    request: str
    """namespace, method and request_id, joined by newlines; for ObserveBatch see `batch_request`."""
    digest: bytes
    """Hash of the request: another request with the same id is a conflict."""
    response: bytes
    time_us: int


def batch_request(namespace: str, uid: str = "", request_id: str = "") -> str:
    """`Answer.request` of an ObserveBatch. Those of a namespace, or of a memory, share a prefix.

    Their responses hold only ids and numbers, so an erasure keeps the responses and clears the digests.
    """
    return "\n".join((namespace, "ObserveBatchRequest", uid, request_id)).rstrip("\n")
