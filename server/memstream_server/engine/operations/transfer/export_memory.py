"""Export: writes the journal's content as lines, each memory and each conversation at one revision.

Rule 1. One snapshot of a memory is written to an anonymous temporary file in the data directory and sent from there: a
slow client holds neither RAM nor the snapshot, and all lines show one revision.
Rule 2. Nothing of an export outlives its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import IO

from msgspec.structs import asdict

from memstream_server.core.filters import EVERYTHING, Filter, make_test
from memstream_server.core.retention import is_expired
from memstream_server.core.values import Fragment, Structured, Tier
from memstream_server.engine.errors import NOT_READ, JournalUnavailable, MemoryDeleted, MemoryNotFound, StorageIsFull
from memstream_server.engine.operations.transfer import lines
from memstream_server.engine.runtime.threads import run_in_thread
from memstream_server.engine.settings import TransferSettings
from memstream_server.ports.blocks import Block
from memstream_server.ports.conversation_records import SessionStore, StateDocument, StateName, StateScope
from memstream_server.ports.conversations import ConversationName, ConversationScan, Message, NotThere
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import MemoryScan, StoredConflict
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.journal.rows import Anchor

PAGE = 100
"""Names of memories or conversations read at once."""
STATES = 4
"""State documents read at once: each may have the bytes of a body."""
PART_BYTES = 256 << 10
"""Approximate size of one message; a line is never split."""
PENDING_POLL_INTERVAL_S = 0.05
CHECK_LINES = 1_000
"""How often a spool checks the disk space and whether its client is still there."""


@dataclass(frozen=True, slots=True)
class ExportPart:
    """Whole lines, with the number of fragments sent so far and in total."""

    lines: bytes
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export; an empty `memory` means the whole namespace."""

    namespace: str
    memory: str
    vectors: bool
    chosen: Filter = EVERYTHING
    """Of fragments: with one, conversations and states are left out."""


class _Abandoned(Exception):
    """The client has left."""


class Exporter:
    """The exports of a process."""

    def __init__(
        self, journal: Journal, conversations: SessionStore, settings: TransferSettings, now_us: Callable[[], int]
    ) -> None:
        self._journal = journal
        self._conversations = conversations
        self._settings = settings
        self._now_us = now_us
        # One spool at a time: it occupies one of the journal's few readers.
        self._reading = asyncio.Semaphore(1)

    async def export(self, wanted: Wanted) -> AsyncGenerator[ExportPart, None]:
        """Yields the lines in parts. Raises MemoryNotFound, StorageIsFull, JournalUnavailable."""
        try:
            async with contextlib.aclosing(_Export(self, wanted).stream_parts()) as parts:
                async for part in parts:
                    yield part
        except JournalError as error:
            raise JournalUnavailable(NOT_READ, retry_after_s=0.5) from error

    # ---- used by an export
    def build_header(self, wanted: Wanted) -> bytes:
        return lines.encode_line(
            lines.Header(
                format="memstream-export",
                version=1,
                server=self._settings.server,
                time_us=self._now_us(),
                vectors=wanted.vectors,
            )
        )

    async def list_memories(self, wanted: Wanted) -> AsyncGenerator[MemoryRecord, None]:
        if wanted.memory:
            record = await self._journal.get_memory(wanted.namespace, wanted.memory)
            if record is None:
                raise MemoryNotFound(
                    f"there is no memory {wanted.namespace}/{wanted.memory}",
                    namespace=wanted.namespace,
                    memory=wanted.memory,
                )
            yield record
            return
        after = ""
        while page := await self._journal.list_memories(wanted.namespace, after, PAGE):
            for record in page:
                yield record
            after = page[-1].name

    async def list_conversations(self, wanted: Wanted) -> AsyncGenerator[str, None]:
        if wanted.chosen != EVERYTHING:
            return
        if wanted.memory:
            yield wanted.memory
            return
        after = ""
        while page := await self._conversations.list_names(wanted.namespace, after, PAGE):
            for name in page:
                yield name
            after = page[-1]

    async def list_states(self, wanted: Wanted) -> AsyncGenerator[tuple[StateName, StateDocument], None]:
        after = ("", "")
        whole = not wanted.memory and wanted.chosen == EVERYTHING
        while whole and (page := await self._conversations.list_states(wanted.namespace, after, STATES)):
            for name, state in page:
                yield name, state
            after = page[-1][0].scope.value, page[-1][0].name

    async def count_fragments(self, wanted: Wanted) -> int:
        return await self._journal.fragment_total(wanted.namespace, wanted.memory)

    @contextlib.asynccontextmanager
    async def memory_spool(
        self, record: MemoryRecord, wanted: Wanted
    ) -> AsyncGenerator[tuple[bytes, int, IO[bytes]], None]:
        """(the memory's line, number of its blocks' versions, a file with the lines of its fragments, then of its
        blocks). Raises StaleWrite if the memory was deleted.

        Waits until everything that was received at the beginning is stored.
        """
        goal: list[int] = []
        head: list[bytes] = []
        blocks: list[int] = []
        async with self._open_spool() as (file, given):

            def read(scan: MemoryScan) -> bool:
                goal[:] = goal or [scan.next_position]
                if scan.first_pending is not None and scan.first_pending < goal[0]:
                    return False
                count = _write_fragments(scan, wanted, self._now_us(), file, given, self._settings)
                blocks[:] = [len(_list_blocks(scan, wanted))]
                head[:] = [lines.encode_line(_memory_line(scan, count, blocks[0]))]
                return True

            while True:
                async with self._reading:
                    if await self._journal.scan_memory(record.uid, wanted.vectors, read):
                        break
                await asyncio.sleep(PENDING_POLL_INTERVAL_S)
            yield head[0], blocks[0], file

    @contextlib.asynccontextmanager
    async def conversation_spool(
        self, named: ConversationName
    ) -> AsyncGenerator[tuple[IO[bytes], tuple[int, int]], None]:
        """(a file with its lines, (messages, plans)). Raises NotThere."""
        async with self._open_spool() as (file, given):
            async with self._reading:
                counts = await self._conversations.scan_conversation(
                    named, lambda scan: _write_conversation(named, scan, file, given, self._settings)
                )
            yield file, counts

    @contextlib.asynccontextmanager
    async def _open_spool(self) -> AsyncGenerator[tuple[IO[bytes], threading.Event], None]:
        await asyncio.to_thread(self._settings.check_free)
        given = threading.Event()
        with tempfile.TemporaryFile(dir=self._settings.directory) as file:
            try:
                yield file, given
            finally:
                given.set()


class _Export:
    """One running export."""

    def __init__(self, exporter: Exporter, wanted: Wanted) -> None:
        self._exporter = exporter
        self._wanted = wanted
        self._hash = sha256()
        self._counts = dict.fromkeys(
            ("memories", "fragments", "blocks", "conversations", "messages", "plans", "states"), 0
        )
        self._total = 0

    async def stream_parts(self) -> AsyncGenerator[ExportPart, None]:
        wanted, exporter = self._wanted, self._exporter
        self._total = await exporter.count_fragments(wanted)
        yield self._make_part(exporter.build_header(wanted))
        async with contextlib.aclosing(exporter.list_memories(wanted)) as records:
            async for record in records:
                async with contextlib.aclosing(self._stream_memory(record)) as parts:
                    async for part in parts:
                        yield part
        async with contextlib.aclosing(exporter.list_conversations(wanted)) as names:
            async for name in names:
                async with contextlib.aclosing(self._stream_conversation(name)) as parts:
                    async for part in parts:
                        yield part
        async for part in self._stream_states():
            yield part
        self._total = self._counts["fragments"]
        yield self._make_part(lines.encode_line(lines.End(**self._counts, sha256=self._hash.hexdigest())))

    async def _stream_memory(self, record: MemoryRecord) -> AsyncGenerator[ExportPart, None]:
        try:
            async with self._exporter.memory_spool(record, self._wanted) as (head, blocks, file):
                self._counts["memories"] += 1
                yield self._make_part(head)
                while part := await _read_part(file):
                    self._counts["fragments"] += part.count(b"\n")
                    yield self._make_part(part)
                self._counts["fragments"] -= blocks
                self._counts["blocks"] += blocks
        except StaleWrite as error:
            if self._wanted.memory:
                raise MemoryDeleted("the memory was deleted during the export") from error
            return  # deleted since the namespace was listed

    async def _stream_conversation(self, name: str) -> AsyncGenerator[ExportPart, None]:
        named = ConversationName(self._wanted.namespace, name)
        try:
            async with self._exporter.conversation_spool(named) as (file, (messages, plans)):
                self._counts["conversations"] += 1
                self._counts["messages"] += messages
                self._counts["plans"] += plans
                while part := await _read_part(file):
                    yield self._make_part(part)
        except NotThere:
            return

    async def _stream_states(self) -> AsyncGenerator[ExportPart, None]:
        async for name, state in self._exporter.list_states(self._wanted):
            self._counts["states"] += 1
            line = lines.StateLine(
                scope="app" if name.scope is StateScope.APP else "user",
                name=name.name,
                document=state.document.decode(),
                update_time_us=state.update_time_us,
            )
            yield self._make_part(lines.encode_line(line))

    def _make_part(self, part: bytes) -> ExportPart:
        self._hash.update(part)
        done = max(0, self._counts["fragments"])
        return ExportPart(part, done, max(done, self._total))


async def _read_part(file: IO[bytes]) -> bytes:
    """The next lines, about PART_BYTES; empty at the end."""
    return await run_in_thread(lambda: b"".join(file.readlines(PART_BYTES)))


# ---- runs in the journal's reader thread


class _Writer:
    def __init__(self, file: IO[bytes], given: threading.Event, settings: TransferSettings) -> None:
        file.seek(0)
        file.truncate()  # a scan may be repeated
        self._file, self._given, self._settings = file, given, settings
        self._count = 0

    def write_line(self, line: lines.Line) -> None:
        self._count += 1
        if self._count % CHECK_LINES == 0:
            if self._given.is_set():
                raise _Abandoned
            self._settings.check_free()
        try:
            self._file.write(lines.encode_line(line))
        except OSError as error:
            raise StorageIsFull(
                f"the export could not be written to disk: {error.strerror}", retry_after_s=5.0
            ) from error

    def finish_file(self) -> None:
        self._file.flush()
        self._file.seek(0)


def _write_fragments(
    scan: MemoryScan, wanted: Wanted, now_us: int, file: IO[bytes], given: threading.Event, settings: TransferSettings
) -> int:
    """Write a line for each chosen fragment that has not expired, and for each block; returns the number of
    fragments.
    """
    writer, count = _Writer(file, given, settings), 0
    retention, chosen = scan.record.policy.retention, wanted.chosen
    matches = make_test(chosen)
    kept = None if chosen == EVERYTHING else {one.id for page in scan.pages() for one, _ in page if matches(one)}
    for page in scan.pages():
        for fragment, vector in page:
            if is_expired(fragment, now_us, retention) or (kept is not None and fragment.id not in kept):
                continue
            line = fragment_line(fragment, vector, scan.anchors.get(fragment.id), wanted.vectors)
            line.conflicts = [_conflict_line(one) for one in scan.conflicts.get(fragment.id, ())]
            writer.write_line(line if kept is None else _without_others(line, kept))
            count += 1
    for block in _list_blocks(scan, wanted):
        writer.write_line(_block_line(block))
    writer.finish_file()
    return count


def _without_others(line: lines.FragmentLine, kept: Collection[str]) -> lines.FragmentLine:
    """The line without links to fragments that the export does not have, and without their texts."""
    line.sources = [each for each in line.sources if each in kept]
    line.supersedes = [each for each in line.supersedes if each in kept]
    line.conflicts = [each for each in line.conflicts if each.older in kept]
    shown = [each for each in line.enhancements if each.id in kept]
    line.enhancement_count -= len(line.enhancements) - len(shown)
    line.enhancements = shown
    if line.superseded_by is not None and line.superseded_by not in kept:
        line.superseded_by = line.supersede_time_us = None
    return line


def _list_blocks(scan: MemoryScan, wanted: Wanted) -> tuple[Block, ...]:
    """The blocks to export: all, or none with a filter, which chooses fragments."""
    return scan.blocks if wanted.chosen == EVERYTHING else ()


def _memory_line(scan: MemoryScan, fragments: int, blocks: int) -> lines.MemoryLine:
    record = scan.record
    return lines.MemoryLine(
        namespace=record.namespace,
        name=record.name,
        uid=record.uid,
        kind=record.kind,
        policy=lines.policy_line(record.policy),
        labels=dict(record.labels),
        seed=record.seed.hex(),
        revision=record.revision,
        create_time_us=record.create_time_us,
        update_time_us=record.update_time_us,
        reflection_aggregate=record.reflection_aggregate,
        fragments=fragments,
        blocks=blocks,
        block_version=scan.block_version,
    )


def _block_line(block: Block) -> lines.BlockLine:
    return lines.BlockLine(
        version=block.version,
        name=block.name,
        text=block.content.text,
        max_tokens=block.content.max_tokens,
        metadata=dict(block.content.metadata),
        create_time_us=block.create_time_us,
        update_time_us=block.update_time_us,
        standing=block.content.standing,
    )


def fragment_line(fragment: Fragment, vector: bytes | None, anchor: Anchor | None, vectors: bool) -> lines.FragmentLine:
    """The line of a fragment; a held one includes its short-term state."""
    held = fragment.tier is not Tier.LONG_TERM and fragment.forget_time_us is None
    side = anchor if held else None
    given = asdict(fragment)
    given["structured"] = _structured_line(fragment.structured)
    given["sources"] = list(fragment.sources)
    given["metadata"] = dict(fragment.metadata)
    given["own_vector"] = fragment.own_vector and vector is not None
    given["superseded_by"] = fragment.superseded_by or None
    given["supersedes"] = list(fragment.supersedes)
    return lines.FragmentLine(
        **given,
        vector=vector,
        content_vector=side.vector if side is not None and vectors and fragment.model else None,
        enhancements=[
            lines.EnhancementLine(
                id=one.id, text=one.text, recollection=one.recollection, structured=_structured_line(one.structured)
            )
            for one in (() if side is None else side.enhancements)
        ],
    )


def _conflict_line(conflict: StoredConflict) -> lines.ConflictLine:
    return lines.ConflictLine(
        older=conflict.suspicion.older,
        reason=conflict.suspicion.reason,
        time_us=conflict.suspicion.time_us,
        decision=conflict.decision,
        note=conflict.note,
        decide_time_us=conflict.decide_time_us,
    )


def _structured_line(structured: Structured | None) -> lines.StructuredLine | None:
    return None if structured is None else lines.StructuredLine(**structured.parts())


def _message_line(message: Message) -> lines.MessageLine:
    given = {item.name: getattr(message, item.name) for item in fields(message) if item.name != "body_size_bytes"}
    body = None if message.body is None else message.body.decode()
    return lines.MessageLine(**given | {"metadata": dict(message.metadata), "body": body})


def _write_conversation(
    named: ConversationName, scan: ConversationScan, file: IO[bytes], given: threading.Event, settings: TransferSettings
) -> tuple[int, int]:
    writer = _Writer(file, given, settings)
    writer.write_line(
        lines.ConversationLine(
            namespace=named.namespace,
            name=named.name,
            last_number=scan.status.last_number,
            completed=scan.status.completed,
            completions=scan.status.completions,
            completed_number=scan.status.completed_number,
            create_time_us=scan.create_time_us,
            messages=scan.message_count,
            plans=scan.plan_count,
            labels=dict(scan.details.labels),
            ttl_us=scan.details.ttl_us,
            update_time_us=scan.details.update_time_us,
            state=None if scan.details.state is None else scan.details.state.decode(),
        )
    )
    for message in scan.messages():
        writer.write_line(_message_line(message))
    for plan in scan.plans():
        writer.write_line(lines.PlanLine(**{item.name: getattr(plan, item.name) for item in fields(plan)}))
    writer.finish_file()
    return scan.message_count, scan.plan_count
