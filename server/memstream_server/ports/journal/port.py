"""The journal as the engine sees it.

Contract
- A write returns only after its transaction is durable (power loss included). One writer commits writes in groups, in
  the order of submission; a write that fails does not affect the others.
- A write that raises `StaleWrite`, `AlreadyExists`, `NamespaceFull` or `WriteRefused` leaves nothing. A write that
  raises `OutcomeUnknown` may or may not be committed: the caller drops its RAM state and reads again.
- A read needs no write: it works while the disk is full or read-only.
- Memory writes are a compare-and-set on (epoch, revision); no other process may own the memory at that epoch.
- A read sees every write that returned before it began, and never waits for the writer.
- Methods may be called concurrently from one event loop, and none blocks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from memstream_server.core.events import Event
from memstream_server.core.values import Fragment
from memstream_server.ports.journal.reading import (
    FragmentQuery,
    Gathering,
    KeptReceipt,
    LoadedMemory,
    MemoryScan,
    Moment,
    MomentQuery,
    StoredConflict,
)
from memstream_server.ports.journal.records import (
    Answer,
    Counts,
    FragmentVersion,
    Indexable,
    IndexEntry,
    Job,
    Labels,
    Made,
    MemoryRecord,
    NamespaceBytes,
    Producer,
    RecallReceipt,
    Recorded,
    Space,
    Spaces,
)
from memstream_server.ports.journal.writing import Accesses, BatchReceipt, Commit, Rejection

T = TypeVar("T")


class Journal(Protocol):
    """Durable storage. See the module's contract."""

    async def close(self) -> None:
        """Finish submitted writes, then release the files and the directory's lock."""
        ...

    @property
    def write_problem(self) -> str:
        """Why nothing can be written now, in words for a caller; empty if writing works, as far as is known."""
        ...

    async def check_writing(self) -> None:
        """Renew `write_problem`: look at free space, and try a write if the last one failed. Does not wait for it."""
        ...

    # ---- the store itself
    async def get_space(self) -> Space | None:
        """The embedding space in force; None in a new store."""
        ...

    async def set_space(self, space: Space) -> None: ...

    async def get_spaces(self) -> Spaces: ...

    async def set_spaces(self, spaces: Spaces) -> None:
        """Set all three at once. From then on a fragment names the space in force if it has a vector in it."""
        ...

    # ---- vectors in another space
    async def list_unvectored(self, uid: str, model: str, compared: bool, after: int, limit: int) -> list[Fragment]:
        """Fragments (forgotten ones included) without a vector in that space, ascending by position after `after`.

        `compared` adds held fragments whose content has no vector in it.
        """
        ...

    async def count_unvectored(self) -> int:
        """Fragments of all memories, except forgotten ones, without a vector in the space in force."""
        ...

    async def list_unvectored_memories(self) -> list[tuple[str, int]]:
        """(uid, number of those fragments) of each memory that has some."""
        ...

    async def add_vectors(self, uid: str, model: str, made: Sequence[Made]) -> int:
        """Add vectors and enter them for the index; returns the number of fragments. Part of no revision.

        Skips fragments that have changed since. One without a vector, which the model refuses, counts as unvectored
        once that space is in force.
        """
        ...

    async def count_vectors(self, model: str) -> tuple[int, int]:
        """(vectors in that space, fragments) of all memories."""
        ...

    async def drop_vectors(self, model: str, after: int, limit: int) -> int | None:
        """Remove at most `limit` of that space's vectors; returns where to continue, or None if none are left."""
        ...

    async def compact_vectors(self, uid: str, after: int, limit: int) -> tuple[int | None, bool, bool]:
        """Convert up to `limit` vectors of a memory, after a position (-1: from the start), to the forms that take less
        space. Returns (where to continue, or None at the end; whether it wrote; whether a vector was rounded)."""
        ...

    async def compacted_up_to(self) -> str | None:
        """The uid after which `compact_vectors` continues, in order of uids; None: all memories are done."""
        ...

    async def set_compacted(self, after: str | None) -> None:
        """Write what `compacted_up_to` returns."""
        ...

    async def scrub_files(self) -> None:
        """Leave no bytes of deleted rows in the journal's files. Takes as long as the present log, whatever the journal
        holds; writes wait meanwhile. Raises OutcomeUnknown if long reads prevent it.

        A no-op on PostgreSQL, which reclaims space itself.
        """
        ...

    async def backup(self, path: str) -> None:
        """Write a consistent copy of the whole journal to a new file at `path`, while the server runs."""
        ...

    # ---- memories
    async def create_memory(
        self, record: MemoryRecord, events: tuple[Event, ...], answer: Answer | None = None, namespace_max: int = 0
    ) -> None:
        """Create a memory at revision 1 with `events`. Raises AlreadyExists if the name is taken, NamespaceFull if the
        namespace has `namespace_max` memories (0: no limit), also with concurrent creations."""
        ...

    async def delete_memory(self, uid: str, answer: Answer | None = None, epoch: int | None = None) -> None:
        """Delete a memory with all its rows. Outbox entries, which survive it, delete its rows in the vector index.

        Raises StaleWrite if the memory does not exist, or has another epoch than `epoch`.
        """
        ...

    async def get_memory(self, namespace: str, name: str) -> MemoryRecord | None: ...

    async def list_memories(
        self, namespace: str, after: str, limit: int, prefix: str = "", labels: Labels = ()
    ) -> list[MemoryRecord]:
        """Names greater than `after` that start with `prefix`, ascending; only memories with all of `labels`."""
        ...

    async def all_memories(self, after: str, limit: int) -> list[MemoryRecord]:
        """Memories of all namespaces with uids greater than `after`, ascending."""
        ...

    async def get_records(self, uids: Sequence[str]) -> list[MemoryRecord]:
        """The existing ones of at most 500 memories, in order of uid."""
        ...

    async def read_epochs(self, uids: Sequence[str]) -> dict[str, int]:
        """The epochs of those memories that exist."""
        ...

    async def list_namespaces(self, after: str, limit: int) -> list[tuple[str, int]]:
        """(namespace, number of memories) of namespaces that store anything, ascending."""
        ...

    async def read_bytes(self, namespaces: Sequence[str]) -> dict[str, NamespaceBytes]:
        """What those namespaces store now, as of the last commit; a namespace that stores nothing may be missing."""
        ...

    async def largest_bytes(self) -> tuple[int, int]:
        """(the most bytes that a namespace stores, the most bytes of receipts that one stores)."""
        ...

    async def own_memory(self, uid: str) -> MemoryRecord:
        """Take ownership: raises the epoch and returns the record. Raises StaleWrite if the memory does not exist."""
        ...

    async def load_memory(self, uid: str, model: str, vectors_max: int, into: Gathering | None = None) -> LoadedMemory:
        """Read a memory at one revision, to activate it; `into` takes its blocks. Raises StaleWrite if the memory
        does not exist."""
        ...

    async def scan_memory(self, uid: str, all_vectors: bool, visit: Callable[[MemoryScan], T]) -> T:
        """Read a whole memory in one snapshot; `visit` runs in a thread, and may run twice. Raises StaleWrite if the
        memory does not exist. Without `all_vectors` only vectors that clients supplied are read."""
        ...

    async def fragment_total(self, namespace: str, name: str) -> int:
        """Fragments of a memory, or (name empty) of a namespace, forgotten ones included."""
        ...

    # ---- producers, receipts, commits
    async def open_producer(self, uid: str, epoch: int, name: str) -> Producer:
        """Raise the producer's epoch, creating the producer if necessary, and return its state."""
        ...

    async def receive(self, receipt: BatchReceipt) -> None:
        """Make a batch durable. Raises StaleWrite if the memory or the producer has another epoch, or first_sequence is
        not the producer's received + 1; AnswerExists if the request of its answer has one."""
        ...

    async def received_hashes(
        self, uid: str, producer: str, first: int, last: int
    ) -> list[tuple[int, bytes, Rejection | None]]:
        """(sequence, content hash, rejection) received in that range, ascending; pruned ones are absent."""
        ...

    async def kept_receipts(self, uid: str, producer: str, after: int, limit: int) -> list[KeptReceipt]:
        """At most `limit` receipts that end above `after`, ascending, without a gap."""
        ...

    async def last_without_outcomes(self, uid: str, producer: str, after: int, upto: int) -> int:
        """The last number of the last receipt that ends in that range without outcomes; 0 if all have outcomes."""
        ...

    async def commit(self, commit: Commit) -> None:
        """Raises StaleWrite if the memory has another epoch or revision; AnswerExists if the request of `answer`, or
        of a receipt that it brings, has an answer."""
        ...

    async def add_accesses(self, accesses: Accesses) -> None:
        """Add access statistics. Raises StaleWrite if the memory does not exist or has another epoch."""
        ...

    # ---- reads
    async def read_moment(self, wanted: MomentQuery) -> Moment:
        """All of it in one snapshot."""
        ...

    async def get_fragments(self, uid: str, ids: Sequence[str]) -> list[Fragment]:
        """The existing fragments of `ids`, in the order of `ids`."""
        ...

    async def get_vectors(self, uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]: ...

    async def list_fragments(self, uid: str, query: FragmentQuery) -> list[Fragment]: ...

    async def list_citing(self, uid: str) -> dict[str, tuple[str, ...]]:
        """The sources of the fragments that have any, by id, forgotten fragments included."""
        ...

    async def list_conflicts(self, uid: str, decided: bool, after: tuple[str, str], limit: int) -> list[StoredConflict]:
        """Open or decided suspicions with (newer, older) greater than `after`, ascending: by age of the newer."""
        ...

    async def get_conflict(self, uid: str, newer: str, older: str) -> StoredConflict | None:
        """The suspicion of this pair, open or decided."""
        ...

    async def list_expired(self, now_us: int, limit: int) -> list[tuple[str, str]]:
        """(memory uid, fragment id) of live, unpinned fragments whose expiry time has passed, oldest first."""
        ...

    async def oldest_forgotten(self) -> list[tuple[str, int]]:
        """(memory uid, least forget time) of every memory with forgotten fragments."""
        ...

    async def list_purgeable(self, uid: str, before_us: int, limit: int) -> list[str]:
        """Ids of fragments forgotten at or before that time, oldest first."""
        ...

    async def prune_events(self, uid: str, before_us: int, limit: int) -> int:
        """Delete at most `limit` transitions older than that time, oldest first; returns their number.

        The rest has no gap. Raises StaleWrite if the memory does not exist.
        """
        ...

    async def count_fragments(self, uid: str, now_us: int | None = None) -> Counts:
        """Excludes fragments that have expired at `now_us`, even if they are not forgotten yet."""
        ...

    async def list_events(self, uid: str, after_revision: int, limit: int) -> list[Recorded]:
        """Committed transitions after `after_revision`, ascending; fewer than `limit` if they are large, but at least
        one if there is any."""
        ...

    async def list_fragment_events(
        self, uid: str, fragment: str, after_revision: int, limit: int
    ) -> tuple[list[Recorded], bool]:
        """Committed transitions after `after_revision` that concern the fragment, ascending, with these events alone:
        as many as `limit` events need, fewer if the transitions are large, but at least one if there is any. The flag
        says whether there are later ones."""
        ...

    # ---- versions
    async def list_versions(self, uid: str, fragment: str) -> list[FragmentVersion]:
        """All versions of a fragment, the latest first."""
        ...

    async def version_keys(self, uid: str) -> dict[str, list[int]]:
        """The revisions that name the memory's versions, ascending, by fragment id."""
        ...

    async def get_versions(self, uid: str, wanted: Mapping[str, int]) -> dict[str, FragmentVersion]:
        """By fragment id, the existing ones of these versions (fragment id -> revision)."""
        ...

    async def prune_versions(self, uid: str, before_us: int) -> int:
        """Delete the memory's versions that were replaced before that time; returns their number."""
        ...

    async def find_revision(self, uid: str, time_us: int) -> int | None:
        """The last revision that was committed at or before that time; None if none of these is kept."""
        ...

    # ---- receipts of recalls
    async def list_recall_receipts(
        self, uid: str, before: int | None, limit: int
    ) -> tuple[list[tuple[int, RecallReceipt]], bool]:
        """((revision of the commit, receipt) by age, the latest first, and whether there are more); with `before` those
        of earlier commits. A page may be shorter than `limit`, so that it takes a few MB of RAM."""
        ...

    async def get_recall_receipt(self, uid: str, receipt: str) -> RecallReceipt | None: ...

    async def prune_recall_receipts(self, uid: str, before_us: int) -> int:
        """Delete the memory's receipts of recalls before that time; returns their number."""
        ...

    # ---- answers
    async def get_answer(self, request: str) -> Answer | None: ...

    async def put_answer(self, answer: Answer) -> None:
        """Store the answer to a request, replacing an older one."""
        ...

    async def prune_answers(self, limit: int) -> int:
        """Delete at most `limit` expired answers, oldest first; returns their number."""
        ...

    # ---- the index's outbox and jobs
    async def read_outbox(self, limit: int) -> list[tuple[IndexEntry, Indexable | None]]:
        """The oldest entries, each with what to upsert; None if the entry is a deletion or the fragment is gone."""
        ...

    async def outbox_size(self) -> int: ...

    async def outbox_last(self) -> int:
        """Id of the newest entry; 0 if there is none."""
        ...

    async def outbox_rows(self, memories: Sequence[str]) -> dict[str, tuple[int, int]]:
        """(first, last) entry id of each of these memories that has entries."""
        ...

    async def outbox_fragments(self, uid: str) -> set[str]:
        """Ids of the memory's fragments that have an entry."""
        ...

    async def outbox_done(self, ids: Sequence[int]) -> None:
        """Remove entries that are durable in the index, by id: a high-water mark could skip entries."""
        ...

    async def outbox_enter(self, entries: Sequence[IndexEntry]) -> None:
        """Enter index work that no transition caused, as found by a reconciliation."""
        ...

    async def list_indexable(self, uid: str) -> list[str]:
        """Ids that belong in the index: live long-term fragments with a vector. Empty if the memory is gone."""
        ...

    async def count_largest_memory(self) -> int:
        """Fragments, in any tier and forgotten or not, of the memory that has most; 0 if there is none."""
        ...

    async def outbox_refill(self) -> int:
        """Enter all live long-term fragments with a vector, to rebuild the index; returns their number."""
        ...

    async def list_jobs(self, limit: int) -> list[Job]: ...

    async def enter_jobs(self, type: str, entered: Sequence[Job]) -> None:
        """Enter a job of this type for each of their memories that exists and has none waiting. Part of no revision."""
        ...

    async def count_jobs(self, type: str) -> int:
        """Waiting jobs of this type."""
        ...

    async def pending_memories(self) -> list[str]:
        """Uids of memories with receipts that are not stored yet; a server activates them at start."""
        ...
