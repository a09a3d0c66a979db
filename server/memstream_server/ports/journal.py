"""The journal: the only truth. Everything else (RAM, Milvus) can be rebuilt from it.

Contract
- Every write method returns only after its transaction is durable (power loss included). Writes are committed
  in groups by one writer, in the order they were submitted; a refused one fails alone.
- A write that raises `Conflict`, `AlreadyExists`, `NamespaceFull` or `StorageFull` left nothing behind. One that raises
  `OutcomeUnknown` may or may not have been committed: the caller drops its RAM state and reads again.
- Memory writes are a compare-and-set on (epoch, revision); nobody else may own the memory at that epoch.
- Reads see every write that returned before they began. They never wait for the writer.
- Methods may be called concurrently from one event loop; none blocks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from memstream_server.core.events import Event
from memstream_server.core.policy import Policy
from memstream_server.core.values import Enhancement, Fragment, Held, MemoryKind, Tier

T = TypeVar("T")


class JournalError(Exception):
    """Base of what a journal raises."""


class Conflict(JournalError):
    """The memory is at another (epoch, revision), or was deleted: somebody else wrote, or the RAM state is stale."""


class AlreadyExists(JournalError):
    """A memory of that name, or a fragment of that external id, exists."""


class NamespaceFull(JournalError):
    """The namespace holds as many memories as it may."""

    def __init__(self, namespace: str, limit: int) -> None:
        super().__init__(f"namespace {namespace} holds {limit} memories, the most that are allowed")
        self.limit = limit


class StorageFull(JournalError):
    """The disk is (nearly) full; writes are refused while reads go on. Free space and retry."""


class OutcomeUnknown(JournalError):
    """The commit may or may not have happened. Read again before deciding anything."""


class Unreadable(JournalError):
    """The data directory is corrupt, of another format version, or held by another server. The text says what to do."""


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
class Rejection:
    """An item refused before *received*; it keeps its sequence number and its answer."""

    sequence: int
    code: int
    """A google.rpc.Code."""
    reason: str
    """A name of memstream.v1.ErrorReason."""
    message: str
    details: Mapping[str, str] = field(default_factory=dict)
    """For ErrorInfo.metadata."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A batch of one producer's observations, made durable together: what *received* means.

    `fragments` are the accepted items with id, position and times given; `vectors` holds a client's own
    vector for a fragment id. Sequence numbers of the batch are first_sequence .. first_sequence + count - 1;
    `hashes` has one 16-byte content hash each, rejected ones included.
    """

    memory: str
    epoch: int
    producer: str
    """Empty for unsequenced writes (`ObserveBatch` without a producer, Put): nothing to repeat, no sequence kept."""
    producer_epoch: int
    first_sequence: int
    hashes: tuple[bytes, ...]
    fragments: tuple[Fragment, ...]
    sequences: tuple[int, ...]
    """The sequence number of each of `fragments`."""
    importances: tuple[float | None, ...] = ()
    """The client's own importance of each of `fragments`; None asks the scorer or the default."""
    vectors: dict[str, bytes] = field(default_factory=dict)
    rejections: tuple[Rejection, ...] = ()
    model: str = ""
    """The space of `vectors`; empty is the one in force."""
    position: int = 0
    """Position of the first fragment (the next one when all were rejected): the batch's place in the order."""

    @property
    def last_sequence(self) -> int:
        return self.first_sequence + len(self.hashes) - 1


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
class Terms:
    """A text's lexical terms: parallel little-endian arrays, packed. hashes u64 ascending, counts u16."""

    hashes: bytes
    counts: bytes


_NO_TERMS = Terms(b"", b"")


@dataclass(frozen=True, slots=True)
class Row:
    """A fragment with what recall needs beside it."""

    fragment: Fragment
    terms: Terms | None = None
    """None leaves the terms already stored for this id as they are."""
    vector: bytes | None = None
    """float32 little-endian in the space named by fragment.model; None leaves what is stored."""
    beside: tuple[str, bytes] | None = None
    """(space, vector): its vector in another space than fragment.model's."""
    replaces: bool = False
    """It says something else than before: whatever vector it had goes first."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Fragments with what recall needs beside them, by column: a memory has too many for several objects each."""

    fragments: Sequence[Fragment]
    hashes: npt.NDArray[np.uint64]
    """The terms of all, one fragment's after another's, as in Terms."""
    counts: npt.NDArray[np.uint16]
    """Beside `hashes`."""
    sizes: npt.NDArray[np.int64]
    """How many terms each fragment has."""
    vectored: npt.NDArray[np.bool_]
    """Which fragments have a vector here."""
    vectors: npt.NDArray[np.float32]
    """Those of these fragments, (count, dimension)."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Block:
        """The same by column; missing terms as none."""
        terms = [row.terms or _NO_TERMS for row in rows]
        packed = [row.vector for row in rows if row.vector is not None]
        return cls(
            fragments=[row.fragment for row in rows],
            hashes=np.frombuffer(b"".join([each.hashes for each in terms]), "<u8"),
            counts=np.frombuffer(b"".join([each.counts for each in terms]), "<u2"),
            sizes=np.array([len(each.counts) // 2 for each in terms], np.int64),
            vectored=np.array([row.vector is not None for row in rows], np.bool_),
            vectors=np.frombuffer(b"".join(packed), "<f4").reshape(len(packed), -1 if packed else 0),
        )

    def rows(self) -> Iterator[Row]:
        """One by one; no terms as None."""
        ends, vectors = np.cumsum(self.sizes).tolist(), iter(self.vectors)
        for fragment, end, size, vectored in zip(self.fragments, ends, self.sizes, self.vectored, strict=True):
            hashes, counts = self.hashes[end - size : end], self.counts[end - size : end]
            terms = Terms(hashes.tobytes(), counts.tobytes()) if size else None
            yield Row(fragment, terms, next(vectors).tobytes() if vectored else None)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The short-term side of a held fragment: replaces what was stored for it."""

    id: str
    vector: bytes | None
    enhancements: tuple[Enhancement, ...]
    model: str = ""
    """The space of `vector`."""
    beside: tuple[str, bytes | None] | None = None
    """(space, vector of the same content in another space); None keeps what is stored."""


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
"""How long the answer to a `request_id`, and the producer of one call, are kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The stored answer to a `request_id`, served again to a repeat for ANSWER_KEPT_S."""

    request: str
    """namespace, method and request_id, joined by newlines."""
    digest: bytes
    """Hash of the request: the same id with another request is a conflict."""
    response: bytes
    time_us: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One transition of one memory. All of it or nothing; raises its revision by exactly one."""

    memory: str
    epoch: int
    revision: int
    """Expected before; revision + 1 after."""
    time_us: int
    events: tuple[Event, ...] = ()
    rows: tuple[Row, ...] = ()
    """Fragments that are new or changed, whole, in their final form. Of one that exists, the access statistics are
    left to `touch`, so that none is lost or counted twice."""
    removed: tuple[str, ...] = ()
    """Ids that left for good: fragment, vectors, terms, anchor and lineage rows go."""
    anchors: tuple[Anchor, ...] = ()
    released: tuple[str, ...] = ()
    """Ids whose anchor rows go: they left short-term."""
    stored_positions: tuple[int, ...] = ()
    """Positions of the receipts consumed: their payloads go."""
    producers: tuple[tuple[str, int], ...] = ()
    """(producer, stored) to set."""
    index: tuple[IndexEntry, ...] = ()
    jobs: tuple[Job, ...] = ()
    finish_jobs: tuple[str, ...] = ()
    reflection_aggregate: float | None = None
    policy: Policy | None = None
    labels: tuple[tuple[str, str], ...] | None = None
    name: tuple[str, str] | None = None
    """(namespace, name) to go by from now on. Raises AlreadyExists when another memory has it."""
    namespace_max: int = 0
    """Memories that namespace may hold with it, 0: no limit. Raises NamespaceFull."""
    answer: Answer | None = None
    erased: tuple[str, ...] = ()
    """Ids of which nothing they said before is to be kept: stored answers that name them are emptied (a repeat finds a
    digest that is nobody's), and the hashes of what the memory's producers have stored go."""


@dataclass(frozen=True, slots=True)
class Access:
    """Access statistics of one fragment, written in batches without a revision. Counts add, times take the later."""

    fragment: str
    count: int
    time_us: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """A committed transition as the event log has it."""

    revision: int
    time_us: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """All that an active memory needs in RAM, read at one revision.

    `blocks` are every fragment in order of position (forgotten ones included) with terms, and vectors of the space
    asked for: all of them up to `vectors_max`, beyond it only those the index cannot have yet (fragments before
    long-term, and fragments in the outbox). None are here where they were given to a Gathering.
    `sensory` and `short_term` are the held ones in order, with content vectors and enhancements.
    `producers` are those that last, and those of one call of which something is pending.
    `pending` are receipts not yet stored, in order of position; one whose items were all rejected is never pending.
    A producer's `stored` covers what was rejected behind its last stored item.
    """

    record: MemoryRecord
    blocks: tuple[Block, ...]
    sensory: tuple[Held, ...]
    short_term: tuple[Held, ...]
    pending: tuple[Receipt, ...]
    producers: tuple[Producer, ...]
    next_position: int

    @property
    def rows(self) -> tuple[Row, ...]:
        """What the blocks hold, one by one."""
        return tuple(row for block in self.blocks for row in block.rows())


class Gathering(Protocol):
    """Takes what a memory holds while it is read, a block at a time and in a thread of the journal's.

    Not all at once: what lives no longer than a block costs neither room nor the garbage collector's time.
    """

    def begin(self, vectors: int | None) -> None:
        """Called first, and once more where the reading begins anew: so many vectors come; None if not all of them."""
        ...

    def add(self, block: Block) -> None:
        """The next ones in order of position."""
        ...

    def end(self) -> None:
        """That was all."""
        ...


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
class FragmentQuery:
    """What `list_fragments` selects, ascending by position after `after`. Empty tuples select all."""

    tiers: tuple[Tier, ...] = ()
    sessions: tuple[str, ...] = ()
    speakers: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    forgotten: bool = False
    """True selects forgotten fragments instead of live ones."""
    after: int = -1
    limit: int = 100


@dataclass(frozen=True, slots=True)
class MemoryScan:
    """All of a memory at one revision, for as long as the scan lasts."""

    record: MemoryRecord
    total: int
    """Fragments, forgotten ones included."""
    next_position: int
    first_pending: int | None
    """Least position received and not stored."""
    anchors: Mapping[str, Anchor]
    pages: Callable[[], Iterator[list[tuple[Fragment, bytes | None]]]]
    """Fragments in order of position, each with its vector where that was asked for."""


@dataclass(frozen=True, slots=True)
class Space:
    """The embedding space in force: its model's name and dimension, and the Milvus collection's partitions."""

    model: str
    dimension: int
    partitions: int


@dataclass(frozen=True, slots=True)
class Spaces:
    """The embedding spaces a store knows: recalls use the one in force alone."""

    in_force: Space | None = None
    """None in a new store."""
    next: Space | None = None
    """Being filled, to be put in force."""
    old: Space | None = None
    """No longer used: its vectors and its collection are being removed."""


@dataclass(frozen=True, slots=True)
class Made:
    """Vectors of a stored fragment in another space, made of what it said at `version`."""

    fragment: str
    version: int
    vector: bytes | None
    content_vector: bytes | None = None
    """Of the content alone, for one that is held and compared."""


class Journal(Protocol):
    """Durable storage of everything. See the module's contract."""

    async def close(self) -> None:
        """Finish the writes submitted, then release files and the directory's lock."""
        ...

    # ---- the store itself
    async def space(self) -> Space | None:
        """The embedding space in force; None in a new store."""
        ...

    async def set_space(self, space: Space) -> None: ...

    async def spaces(self) -> Spaces: ...

    async def set_spaces(self, spaces: Spaces) -> None:
        """All three at once. From here on a fragment read names the space in force, if it has a vector of that."""
        ...

    # ---- another space
    async def lacking(self, uid: str, model: str, compared: bool, after: int, limit: int) -> list[Fragment]:
        """Fragments (forgotten ones included) without a vector in that space, ascending by position after `after`.

        `compared` adds held ones without a vector of their content in it.
        """
        ...

    async def add_vectors(self, uid: str, model: str, made: Sequence[Made]) -> int:
        """Keep these beside what there is, and enter them for the index; returns for how many fragments.

        Those that have changed since are passed over. No part of any revision.
        """
        ...

    async def vectored(self, model: str) -> tuple[int, int]:
        """(vectors in that space, fragments), of all memories."""
        ...

    async def drop_vectors(self, model: str, after: int, limit: int) -> int | None:
        """Remove a slice of that space's vectors, `limit` at most; where to go on, or None when none is left."""
        ...

    async def scrub(self) -> None:
        """Rewrite the journal's own files, so that nothing deleted before is left in them. Writes wait meanwhile.

        A database that keeps its own log (PostgreSQL) sees to that by itself, in its own time.
        """
        ...

    async def backup(self, path: str) -> None:
        """Write a consistent copy of the whole journal to a new file at `path`, while the server runs."""
        ...

    # ---- memories
    async def create_memory(
        self, record: MemoryRecord, events: tuple[Event, ...], answer: Answer | None = None, namespace_max: int = 0
    ) -> None:
        """At revision 1, with `events` as that revision. Raises AlreadyExists when the name is taken, NamespaceFull
        when the namespace holds `namespace_max` memories (0: no limit), however many are made at once."""
        ...

    async def delete_memory(self, uid: str, answer: Answer | None = None, epoch: int | None = None) -> None:
        """Everything of it goes, its Milvus rows by outbox entries that survive it.

        Raises Conflict when the memory is gone, or is at another epoch than the one given.
        """
        ...

    async def get_memory(self, namespace: str, name: str) -> MemoryRecord | None: ...

    async def list_memories(self, namespace: str, after: str, limit: int, prefix: str = "") -> list[MemoryRecord]:
        """Ascending by name, names greater than `after` that begin with `prefix`."""
        ...

    async def all_memories(self, after: str, limit: int) -> list[MemoryRecord]:
        """Of every namespace, ascending by uid, uids greater than `after`."""
        ...

    async def list_namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        """(namespace, number of memories), ascending."""
        ...

    async def own(self, uid: str) -> MemoryRecord:
        """Take ownership: raises and returns the epoch. Raises Conflict when the memory is gone."""
        ...

    async def load(self, uid: str, model: str, vectors_max: int, into: Gathering | None = None) -> Image:
        """Read an active memory's image at one revision, its blocks `into` that. Raises Conflict when the memory is
        gone."""
        ...

    async def scan(self, uid: str, all_vectors: bool, visit: Callable[[MemoryScan], T]) -> T:
        """Read all of a memory in one snapshot: `visit` runs in a thread, perhaps twice. Raises Conflict when the
        memory is gone. Without `all_vectors` only those that clients gave come along."""
        ...

    async def fragment_total(self, namespace: str, name: str) -> int:
        """Fragments of a memory, or (name empty) of a namespace, forgotten ones included."""
        ...

    # ---- the way in
    async def open_producer(self, uid: str, epoch: int, name: str, *, one_call: bool = False) -> Producer:
        """Raise the producer's epoch (creating it) and return where it stands.

        One made for `one_call`, to tell its repeats, is kept as long as a stored answer.
        """
        ...

    async def prune_producers(self, limit: int) -> int:
        """Drop the oldest producers of one call that are older than that, `limit` at most; returns how many went."""
        ...

    async def receive(self, receipt: Receipt) -> None:
        """Make a batch durable. Raises Conflict when the memory's epoch or the producer's epoch is another,
        or first_sequence is not the producer's received + 1."""
        ...

    async def received_hashes(
        self, uid: str, producer: str, first: int, last: int
    ) -> list[tuple[int, bytes, Rejection | None]]:
        """(sequence, content hash, rejection) received in that range, ascending; what was compacted is absent."""
        ...

    async def commit(self, commit: Commit) -> None: ...

    async def touch(self, uid: str, accesses: Sequence[Access], epoch: int | None = None) -> None:
        """Add access statistics. Not part of any revision; lost ones are not an error.

        Raises Conflict when the memory is gone, or is at another epoch than the one given.
        """
        ...

    # ---- reads
    async def fragments(self, uid: str, ids: Sequence[str]) -> list[Fragment]:
        """Those of `ids` that exist, in the order given."""
        ...

    async def vectors(self, uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]: ...

    async def list_fragments(self, uid: str, query: FragmentQuery) -> list[Fragment]: ...

    async def expiring(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        """(memory uid, fragment id) of live, unpinned fragments whose own expiry has come, the most overdue first."""
        ...

    async def oldest_forgotten(self) -> list[tuple[str, int]]:
        """(memory uid, least forget time) of every memory that has forgotten fragments."""
        ...

    async def purgeable(self, uid: str, before_us: int, limit: int) -> list[str]:
        """Ids of fragments forgotten at or before that time, the oldest first."""
        ...

    async def prune_events(self, uid: str, before_us: int, limit: int) -> int:
        """Drop the oldest transitions older than that time, `limit` at most; returns how many went.

        What is left has no gap. Raises Conflict when the memory is gone.
        """
        ...

    async def counts(self, uid: str) -> Counts: ...

    async def events(self, uid: str, after_revision: int, limit: int) -> list[Recorded]:
        """Committed transitions with a revision above `after_revision`, ascending; fewer than `limit` when they are
        large, but one if there is any."""
        ...

    async def answer(self, request: str) -> Answer | None: ...

    # ---- the index's outbox and jobs
    async def outbox(self, limit: int) -> list[tuple[IndexEntry, Indexable | None]]:
        """Oldest entries with what to upsert; None when it is to be deleted or is gone."""
        ...

    async def outbox_size(self) -> int: ...

    async def outbox_last(self) -> int:
        """Id of the newest entry; 0 when there is none."""
        ...

    async def outbox_rows(self, memories: Sequence[str]) -> dict[str, tuple[int, int]]:
        """(first, last) id of the entries of each of these memories that has any."""
        ...

    async def outbox_done(self, ids: Sequence[int]) -> None:
        """These entries are durable in the index. By id, never by a high-water mark."""
        ...

    async def outbox_enter(self, entries: Sequence[IndexEntry]) -> None:
        """Work for the index that no transition caused: what a reconciliation found."""
        ...

    async def indexable(self, uid: str) -> list[str]:
        """Ids that belong in the index: the memory's live long-term fragments with a vector. Empty when it is gone."""
        ...

    async def outbox_refill(self) -> int:
        """Enter every live long-term fragment with a vector again: the index is rebuilt. Returns how many."""
        ...

    async def jobs(self, limit: int) -> list[Job]: ...

    async def pending_memories(self) -> list[str]:
        """Uids with receipts not yet stored: to be activated at start."""
        ...
