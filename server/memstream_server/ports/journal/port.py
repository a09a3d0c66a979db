"""The journal as the engine sees it.

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

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from memstream_server.core.events import Event
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.reading import FragmentQuery, Gathering, Image, KeptReceipt, MemoryScan
from memstream_server.ports.journal.records import (
    Answer,
    Counts,
    Indexable,
    IndexEntry,
    Job,
    MemoryRecord,
    Producer,
    Recorded,
)
from memstream_server.ports.journal.spaces import Made, Space, Spaces
from memstream_server.ports.journal.writing import Accesses, Commit, Receipt, Rejection

T = TypeVar("T")


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
    async def open_producer(self, uid: str, epoch: int, name: str) -> Producer:
        """Raise the producer's epoch (creating it) and return where it stands."""
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

    async def kept_receipts(self, uid: str, producer: str, after: int, limit: int) -> list[KeptReceipt]:
        """Receipts with a number above `after`, ascending, `limit` at most; there is no gap between them."""
        ...

    async def last_without_outcomes(self, uid: str, producer: str, after: int, upto: int) -> int:
        """The last number of the last receipt that ends in that range and has no outcomes; 0 where all have."""
        ...

    async def commit(self, commit: Commit) -> None: ...

    async def touch(self, accesses: Accesses) -> None:
        """Add access statistics. Raises Conflict when the memory is gone, or is at another epoch."""
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

    async def counts(self, uid: str, now_us: int | None = None) -> Counts:
        """Without those whose own expiry has come at `now_us`, though they are not forgotten yet."""
        ...

    async def events(self, uid: str, after_revision: int, limit: int) -> list[Recorded]:
        """Committed transitions with a revision above `after_revision`, ascending; fewer than `limit` when they are
        large, but one if there is any."""
        ...

    async def answer(self, request: str) -> Answer | None: ...

    async def put_answer(self, answer: Answer) -> None:
        """Keep the answer to a request, in place of an older one."""
        ...

    async def prune_answers(self, limit: int) -> int:
        """Drop the oldest answers that are not served any more, `limit` at most; returns how many went."""
        ...

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

    async def outbox_fragments(self, uid: str) -> set[str]:
        """Ids of the memory's fragments that have an entry."""
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
