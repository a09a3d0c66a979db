"""`SqlJournal`: the port's methods over the writer and the readers, and `open_journal`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from memstream_server.adapters.journal.blocks import SqlBlocks, read_blocks
from memstream_server.adapters.journal.conversations import SqlConversations
from memstream_server.adapters.journal.database import directory, postgres
from memstream_server.adapters.journal.database.database import Database, SharedRun, read_snapshot
from memstream_server.adapters.journal.database.migrate import BACKUPS_KEPT
from memstream_server.adapters.journal.database.postgres import PostgresDatabase
from memstream_server.adapters.journal.processes import SqlOperations, SqlProcesses
from memstream_server.adapters.journal.sql import (
    answers,
    byte_counts,
    conflicts,
    export_reads,
    fragment_reads,
    load_memory,
    messages,
    outbox,
    reads,
    recall_receipts,
    vector_upkeep,
    versions,
    writes,
)
from memstream_server.adapters.journal.sql import commit as sql_commit
from memstream_server.adapters.journal.sql.vector_forms import Computing
from memstream_server.adapters.journal.writer import JointWork, Writer
from memstream_server.core.events import Event
from memstream_server.core.values import Fragment
from memstream_server.engine.runtime.threads import Threads
from memstream_server.ports.conversations import Message, NotThere
from memstream_server.ports.journal.errors import JournalError, OutcomeUnknown, StorageFull
from memstream_server.ports.journal.reading import (
    FragmentQuery,
    Gathering,
    LoadedMemory,
    MemoryScan,
    Moment,
    MomentQuery,
)
from memstream_server.ports.journal.records import (
    Answer,
    ComputeVectors,
    Counts,
    FragmentVersion,
    Indexable,
    IndexEntry,
    Job,
    Made,
    MemoryRecord,
    Producer,
    Space,
    Spaces,
)
from memstream_server.ports.journal.writing import Accesses, BatchReceipt, Commit

RESERVE_BYTES = 64 << 20
"""Writes that add data are rejected while free space is below this plus what a checkpoint may need."""
READERS = 4
"""Threads that read; one principal uses at most three."""
_COMPACTED, _ALL = "vectors_compacted", "all"
"""In `meta`: the uid of the last memory whose vectors are converted, or that all are."""
SCRUB_S, SCRUB_PAUSE_S = 60.0, 0.02
"""How long, and how often, emptying the log is tried while readers need it."""
SCRUB_REST = 8
"""A scrub, or another try, begins after so many times the time for which writes waited for the one before."""

P = ParamSpec("P")
T = TypeVar("T")


def _reading(
    function: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[SqlJournal, P], Coroutine[Any, Any, T]]:
    """A method that runs a read as it is. Its parameters have the port's names, which mypy compares."""

    async def read(self: SqlJournal, /, *given: P.args, **named: P.kwargs) -> T:
        return await self._read(function, *given, **named)

    return read


class SqlJournal:
    """`ports.journal.port.Journal` on its own database. Made by `open_journal`."""

    def __init__(
        self, database: Database, clock_us: Callable[[], int], readers: int, computing: Computing | None = None
    ) -> None:
        self._database, self._clock_us = database, clock_us
        self._computing = computing or Computing()
        self._readers = Threads(readers, "journal-reader")
        self._writer = Writer(database, asyncio.get_running_loop())
        self._closed = False
        self._trial: asyncio.Task[None] | None = None
        self._scrubs = SharedRun()
        self._model: str | None = None
        """Model of the space in force, as last read or set by this process."""
        self.conversations = SqlConversations(self._writer.submit, self._run_read)
        self.blocks = SqlBlocks(self._writer.submit, self._run_read)
        self.processes: SqlProcesses | None = None  # set if several servers may share the database
        if isinstance(database, PostgresDatabase):
            self.processes = SqlProcesses(database, self._writer.submit, self._run_read)
        self.operations = SqlOperations(self._writer.submit, self._run_read)

    async def _write(
        self,
        function: Callable[Concatenate[Connection, P], T],
        rows: int,
        adds: bool,
        *given: P.args,
        **named: P.kwargs,
    ) -> T:
        return await self._writer.submit(lambda connection: function(connection, *given, **named), rows, adds)

    async def _write_memory(self, function: Callable[..., T], rows: int, adds: bool, uid: str, *arguments: object) -> T:
        # In the order of the memory's writes.
        return await self._writer.submit(lambda connection: function(connection, uid, *arguments), rows, adds, uid)

    async def _read(
        self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        if self._closed:
            raise JournalError("the journal is closed")
        return await self._readers.run(
            partial(read_snapshot, self._database, lambda c: function(c, *arguments, **named))
        )

    async def _run_read(self, work: Callable[[Connection], T]) -> T:
        return await self._read(work)

    async def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        await self._writer.close()
        if self._trial is not None:
            await self._trial
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        self._readers.close()
        self._database.close()

    # ---- the store itself

    @property
    def description(self) -> str:
        """Engine and version for display, for instance "sqlite 3.46.0" or "postgresql 15.8"."""
        return self._database.description

    @property
    def write_problem(self) -> str:
        problem = self._writer.problem
        return "" if problem is None else f"the journal cannot be written ({problem.cause})"

    async def check_writing(self) -> None:
        full = await asyncio.to_thread(self._database.why_full)
        if full is not None:
            self._writer.note_problem(StorageFull(full))
        elif self._trial is None or self._trial.done():  # not awaited: on a disk that hangs it does not return
            self._trial = asyncio.create_task(self._try_to_write())

    async def _try_to_write(self) -> None:
        """Notice a storage that takes no write while nobody writes; after a problem, find whether it is over."""
        if (found := await asyncio.to_thread(self._database.why_unwritable)) is not None:
            self._writer.note_problem(found)
        elif self._writer.problem is not None:
            with contextlib.suppress(JournalError):  # the writer remembers it
                await self._write(writes.set_meta, 1, True, "write_trial", "")

    async def get_space(self) -> Space | None:
        return (await self.get_spaces()).in_force

    async def set_space(self, space: Space) -> None:
        await self._write(writes.set_space, 1, True, space)
        self._model = space.model

    async def get_spaces(self) -> Spaces:
        spaces = await self._read(reads.read_spaces)
        self._model = None if spaces.in_force is None else spaces.in_force.model
        return spaces

    async def set_spaces(self, spaces: Spaces) -> None:
        await self._write(writes.set_spaces, 3, False, spaces)
        self._model = None if spaces.in_force is None else spaces.in_force.model

    list_unvectored = _reading(vector_upkeep.list_lacking)

    async def count_unvectored(self) -> int:
        return await self._read(vector_upkeep.count_unvectored, self._model)

    async def list_unvectored_memories(self) -> list[tuple[str, int]]:
        return await self._read(vector_upkeep.list_unvectored_memories, self._model)

    async def add_vectors(self, uid: str, model: str, made: Sequence[Made]) -> int:
        return await self._write_memory(vector_upkeep.add_vectors, 3 * len(made), True, uid, model, made)

    count_vectors = _reading(vector_upkeep.count_vectors)

    async def drop_vectors(self, model: str, after: int, limit: int) -> int | None:
        keys = await self._read(vector_upkeep.list_vector_keys, model, after, limit)
        await self._write(vector_upkeep.drop_vectors, len(keys), False, model, keys)
        return keys[-1] if keys else None

    async def compact_vectors(self, uid: str, after: int, limit: int) -> tuple[int | None, bool, bool]:
        found = await self._read(vector_upkeep.read_slice, self._computing, uid, after, limit)
        rows = len(found.vectors) + len(found.anchors)
        if rows:
            await self._write(vector_upkeep.write_slice, rows, False, found)
        return found.after, rows > 0, found.is_rounded

    async def compacted_up_to(self) -> str | None:
        written = await self._read(reads.meta_value, _COMPACTED)
        return None if written == _ALL else written or ""

    async def set_compacted(self, after: str | None) -> None:
        await self._write(writes.set_meta, 1, False, _COMPACTED, _ALL if after is None else after)

    async def scrub_files(self) -> None:
        if self._database.scrub is not None:
            await self._scrubs.run(partial(self._scrub, self._database.scrub))

    async def _scrub(self, scrub: Callable[[], bool]) -> None:
        await asyncio.to_thread(self._database.copy_log)  # no write waits for this part
        latest = time.monotonic() + SCRUB_S
        while (begun := time.monotonic()) < latest:
            emptied = await self._writer.run_exclusively(scrub)
            pause_s = max(SCRUB_PAUSE_S, SCRUB_REST * (time.monotonic() - begun))
            if emptied:
                self._scrubs.not_before = time.monotonic() + pause_s
                return
            await asyncio.sleep(pause_s)
        raise OutcomeUnknown("the journal's log could not be emptied: readers hold it; it will be retried")

    async def backup(self, path: str) -> None:
        await asyncio.to_thread(self._database.backup, Path(path))

    # ---- memories

    async def create_memory(
        self, record: MemoryRecord, events: tuple[Event, ...], answer: Answer | None = None, namespace_max: int = 0
    ) -> None:
        await self._write(writes.create_memory, 2, True, record, events, answer, namespace_max)

    async def delete_memory(self, uid: str, answer: Answer | None = None, epoch: int | None = None) -> None:
        await self._write_memory(writes.delete_memory, 3, False, uid, answer, epoch)
        await self.purge()

    async def purge(self) -> None:
        """Remove the rows of deleted memories; after a crash, `open_journal` continues."""
        while await self._write(writes.purge_slice, writes.SLICE_ROWS, False):
            pass

    get_memory = _reading(reads.get_memory)
    list_memories = _reading(reads.list_memories)
    all_memories = _reading(reads.all_memories)
    get_records = _reading(reads.get_records)
    read_epochs = _reading(reads.read_epochs)
    list_namespaces = _reading(byte_counts.list_namespaces)
    read_bytes = _reading(byte_counts.read_bytes)
    largest_bytes = _reading(byte_counts.read_largest)

    async def own_memory(self, uid: str) -> MemoryRecord:
        return await self._write_memory(_take_ownership, 1, False, uid)

    async def load_memory(self, uid: str, model: str, vectors_max: int, into: Gathering | None = None) -> LoadedMemory:
        return await self._read(load_memory.load_memory, self._computing, uid, model, vectors_max, into)

    async def scan_memory(self, uid: str, all_vectors: bool, visit: Callable[[MemoryScan], T]) -> T:
        return await self._read(export_reads.scan_memory, self._computing, uid, all_vectors, visit)

    fragment_total = _reading(export_reads.count_fragments)

    # ---- the way in

    async def open_producer(self, uid: str, epoch: int, name: str) -> Producer:
        return await self._write_memory(writes.open_producer, 1, False, uid, epoch, name)

    async def receive(self, receipt: BatchReceipt) -> None:
        # A batch is one row; its bytes cost as much as the rows of a tenth of its fragments.
        rows = 3 + len(receipt.fragments) // 10
        await self._writer.submit(JointWork(writes.receive_batches, receipt, receipt.memory), rows, True)

    received_hashes = _reading(reads.received_hashes)
    kept_receipts = _reading(reads.kept_receipts)
    last_without_outcomes = _reading(reads.last_without_outcomes)

    async def commit(self, commit: Commit) -> None:
        await self._writer.submit(
            JointWork(sql_commit.commit_transitions, commit, commit.memory), *sql_commit.cost_of(commit)
        )

    async def add_accesses(self, accesses: Accesses) -> None:
        work = JointWork(sql_commit.touch_fragments, accesses, accesses.memory)
        await self._writer.submit(work, len(accesses.each), True)

    # ---- reads

    async def read_moment(self, wanted: MomentQuery) -> Moment:
        return await self._read(_read_moment, wanted, self._model)

    async def get_fragments(self, uid: str, ids: Sequence[str]) -> list[Fragment]:
        return await self._read(fragment_reads.read_fragments, uid, ids, self._model)

    async def get_vectors(self, uid: str, model: str, ids: Sequence[str]) -> dict[str, bytes]:
        return await self._read(fragment_reads.read_vectors, self._computing, uid, model, ids)

    async def list_fragments(self, uid: str, query: FragmentQuery) -> list[Fragment]:
        return await self._read(fragment_reads.list_fragments, uid, query, self._model)

    list_citing = _reading(fragment_reads.list_citing)
    list_conflicts = _reading(conflicts.list_conflicts)
    get_conflict = _reading(conflicts.get_conflict)
    list_expired = _reading(fragment_reads.list_expired)
    oldest_forgotten = _reading(fragment_reads.list_oldest_forgotten)
    list_purgeable = _reading(fragment_reads.list_purgeable)

    async def prune_events(self, uid: str, before_us: int, limit: int) -> int:
        return await self._write_memory(writes.prune_events, limit, False, uid, before_us, limit)

    async def count_fragments(self, uid: str, now_us: int | None = None) -> Counts:
        return await self._read(_count_fragments, uid, now_us, self._model)

    list_events = _reading(reads.read_events)
    list_fragment_events = _reading(reads.read_fragment_events)

    # ---- versions
    list_versions = _reading(versions.list_versions)
    version_keys = _reading(versions.read_keys)

    async def get_versions(self, uid: str, wanted: Mapping[str, int]) -> dict[str, FragmentVersion]:
        return await self._read(versions.read_versions, self._computing, uid, wanted)

    async def prune_versions(self, uid: str, before_us: int) -> int:
        return await self._write_memory(versions.prune_versions, 1, False, uid, before_us)

    find_revision = _reading(versions.find_revision)

    # ---- receipts of recalls
    list_recall_receipts = _reading(recall_receipts.list_receipts)
    get_recall_receipt = _reading(recall_receipts.get_receipt)

    async def prune_recall_receipts(self, uid: str, before_us: int) -> int:
        return await self._write_memory(recall_receipts.prune_receipts, 1, False, uid, before_us)

    # ---- answers
    async def get_answer(self, request: str) -> Answer | None:
        return await self._read(reads.read_answer, request, self._clock_us())

    async def put_answer(self, answer: Answer) -> None:
        await self._write(answers.replace_answers, 1, False, [answer])

    async def prune_answers(self, limit: int) -> int:
        return await self._write(answers.prune_answers, limit, False, self._clock_us() - answers.ANSWER_KEPT_US, limit)

    # ---- the index's outbox and jobs

    async def read_outbox(self, limit: int) -> list[tuple[IndexEntry, Indexable | None]]:
        return await self._read(outbox.read_entries, self._computing, limit, self._model)

    outbox_size = _reading(outbox.count_entries)
    outbox_last = _reading(outbox.last_id)
    outbox_rows = _reading(outbox.id_ranges)
    outbox_fragments = _reading(outbox.entered_fragments)

    async def outbox_done(self, ids: Sequence[int]) -> None:
        await self._write(outbox.remove_entries, len(ids), False, ids)

    async def outbox_enter(self, entries: Sequence[IndexEntry]) -> None:
        await self._write(outbox.enter_entries, len(entries), True, entries)

    async def list_indexable(self, uid: str) -> list[str]:
        return await self._read(outbox.list_indexable, uid, self._model)

    count_largest_memory = _reading(outbox.count_largest_memory)

    async def outbox_refill(self) -> int:
        return await self._write(outbox.enter_all, 1_000, True)

    list_jobs = _reading(reads.waiting_jobs)

    async def enter_jobs(self, type: str, entered: Sequence[Job]) -> None:
        if entered:  # PostgreSQL has no transaction without a statement, and a commit of it fails
            await self._write(vector_upkeep.enter_jobs, len(entered), True, type, entered)

    count_jobs = _reading(vector_upkeep.count_jobs)
    pending_memories = _reading(reads.pending_memories)


def _count_fragments(connection: Connection, uid: str, now_us: int | None, model: str | None) -> Counts:
    missing = vector_upkeep.count_unvectored_in(connection, uid, model)
    return replace(reads.count_fragments(connection, uid, now_us), unvectored=missing)


def _take_ownership(connection: Connection, uid: str) -> MemoryRecord:
    writes.raise_epoch(connection, uid)
    return reads.get_by_uid(connection, uid)


async def open_journal(
    data_dir: Path,
    *,
    url: str = "",
    shared: bool = False,
    lease_s: float = 10.0,
    clock_us: Callable[[], int],
    free_bytes: Callable[[], int] | None = None,
    reserve_bytes: int = RESERVE_BYTES,
    readers: int = READERS,
    computed: Mapping[str, ComputeVectors] | None = None,
    backups_kept: int = BACKUPS_KEPT,
) -> SqlJournal:
    """Open, create or migrate the journal of a data directory or of a PostgreSQL database, and hold it until `close`.

    url: of the database (postgresql://...); if empty, the journal is in data_dir. A database never touches data_dir.
    shared: share the database with other servers that set it, too; lease_s: this server's lease in that case.
    clock_us: current time in microseconds since the epoch, for the age of stored answers. free_bytes: free space for
    the directory, by default of its file system; below reserve_bytes, writes that add data raise StorageFull.
    PostgreSQL reports a full disk itself. computed: the spaces whose vectors are computed when they are read.
    backups_kept: copies of a directory's journal that migrations make first.
    Raises Unreadable if the journal is damaged, of a newer format, not reachable, or held by another server.
    """
    if url:
        database: Database = await asyncio.to_thread(
            postgres.open_database, url, readers=readers, shared=shared, lease_s=lease_s
        )
    else:
        database = await asyncio.to_thread(
            directory.open_database,
            data_dir,
            readers=readers,
            free_bytes=free_bytes,
            reserve_bytes=reserve_bytes,
            backups_kept=backups_kept,
        )
    journal = SqlJournal(database, clock_us, readers, Computing(computed))
    try:
        await journal.purge()
        await journal.get_spaces()
    except BaseException:
        await journal.close()
        raise
    return journal


def _read_moment(connection: Connection, wanted: MomentQuery, model: str | None) -> Moment:
    """See Journal.read_moment."""
    found: Sequence[Message] = ()
    if wanted.conversation is not None:
        with contextlib.suppress(NotThere):
            found = messages.read_messages(connection, wanted.conversation, wanted.messages)
    return Moment(
        reads.find_revisions(connection, wanted.memories),
        read_blocks(connection, wanted.blocks),
        found,
        {uid: _read_chains(connection, uid, ids, model, wanted) for uid, ids in wanted.fragments.items()},
    )


def _read_chains(
    connection: Connection, uid: str, ids: Sequence[str], model: str | None, wanted: MomentQuery
) -> Mapping[str, Fragment]:
    """By id."""
    found: dict[str, Fragment] = {}
    left = [*ids]
    for _ in range(wanted.steps + 1):
        read = fragment_reads.read_fragments(connection, uid, left, model)
        found |= {one.id: one for one in read}
        named = {"" if wanted.next_of is None else wanted.next_of(one) for one in read}
        left = sorted(named - found.keys() - {""})
        if not left:
            break
    return found
