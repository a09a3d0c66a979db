"""Import: an operation that turns a checked file of lines into memories and conversations.

Rule 1. Everything is checked and compared with existing data before anything is written.
Rule 2. A memory is built in the unnamed namespace by transitions in its own order. The last one gives it its name, so
no client sees a partial memory. Conversations are built the same way.
Rule 3. Results of an earlier run, of this operation or another one with the same file, are found and kept.
Comparing is blocking work, of the journal's reader thread.
Rule 4. What imports leave behind is removed: uploaded files, and memories and conversations with a temporary name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from memstream_server.core.events import Event, EventType
from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.retention import is_expired
from memstream_server.core.suspicions import Suspicion
from memstream_server.engine.errors import (
    QUOTA_RETRY_S,
    EngineError,
    JournalUnavailable,
    MemoryExists,
    MemoryNotFound,
    QuotaExceeded,
    write_error,
)
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import enhances_short_term
from memstream_server.engine.operations.runner import OperationRunner, Progress
from memstream_server.engine.operations.transfer.check_lines import ImportTerms, Summary
from memstream_server.engine.operations.transfer.export_memory import fragment_line
from memstream_server.engine.operations.transfer.lines import (
    BlockLine,
    ConflictLine,
    ConversationLine,
    FragmentLine,
    MemoryLine,
    MessageLine,
    PlanLine,
    StateLine,
    policy_of,
)
from memstream_server.engine.operations.transfer.place_fragments import enrich_lines, fragment_of, transition_of
from memstream_server.engine.operations.transfer.upload import (
    SUFFIX,
    Reader,
    Upload,
    block_of,
    invalid_field,
    lines_from,
    message_of,
    plan_of,
)
from memstream_server.engine.quotas import check_bytes
from memstream_server.engine.runtime.call_context import PRINCIPAL, complete
from memstream_server.engine.runtime.clock import encode_ulid
from memstream_server.ports.conversation_records import StateName, StateScope
from memstream_server.ports.conversations import ConversationName, ConversationScan, Details, Message, NotThere, Status
from memstream_server.ports.journal.errors import AlreadyExists, JournalError
from memstream_server.ports.journal.reading import MemoryScan
from memstream_server.ports.journal.records import MemoryRecord, staged_name
from memstream_server.ports.journal.writing import Resolution
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.operations.runner import AnswerOf
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry
    from memstream_server.engine.settings import TransferSettings


log = structlog.get_logger(__name__)
T = TypeVar("T")

BATCH = 256
"""Fragments, or messages, per commit."""
POLL_INTERVAL_S = 0.5
"""How often a wait for a model checks for cancellation."""
TIDY_RETRY_S = 30.0
"""Pause before a failed cleanup is retried."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an import goes; an empty `memory` keeps the exported names."""

    namespace: str
    memory: str

    def name_of(self, line: MemoryLine | ConversationLine, renamed: str) -> str:
        """The target name of a memory or conversation; `renamed` is the name of the file's only memory."""
        return self.memory if self.memory and line.name == renamed else line.name


@dataclass(frozen=True, slots=True)
class _Job:
    """The payload of an operation."""

    id: str
    path: Path
    target: Target
    renamed: str
    total: int


class Importer:
    """The imports of a process. Call `cleanup.start` once, before operations are resumed."""

    def __init__(
        self,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        registry: Registry,
        runner: OperationRunner,
        delete: Callable[[MemoryRecord], Awaitable[None]],
        settings: TransferSettings,
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry
        self._conversations = storage.conversations
        self._runner = runner
        self._settings = settings
        self.cleanup = ImportCleanup(storage, runner, settings, delete)
        runner.register_type("import", "fragments", self._run_import, stays=True)

    # ---- called by the rpcs
    def open_upload(self, rename: str) -> Upload:
        """Receives the lines of an import. Blocking. Raises StorageIsFull."""
        embedding = self._models.embedding_model
        most = self._runtime.limits.memory_blocks_max
        names_max = self._settings.name_bytes_max
        terms = ImportTerms(embedding.dimension, embedding.name, names_max, self._has_stemmer, rename, most)
        return Upload(self._settings, terms)

    def _has_stemmer(self, language: str) -> bool:
        try:
            self._models.analyzer.terms("a", language)
        except (KeyError, ValueError):
            return False
        return True

    async def check_target(self, intake: Upload, summary: Summary, target: Target) -> None:
        """Raises MemoryExists if other data has a name already, QuotaExceeded if the namespace is full."""
        await check_bytes(self._journal, self._runtime.limits, target.namespace)
        await _map_errors(
            self._check_job(_Job("", intake.path, target, _old_name(target, summary), summary.fragments)), target
        )

    async def begin_import(self, intake: Upload, summary: Summary, target: Target, answer: AnswerOf) -> Operation:
        """Start the operation that imports the uploaded lines."""
        payload = {
            "file": intake.path.name,
            "namespace": target.namespace,
            "memory": target.memory,
            "renamed": _old_name(target, summary),
            "fragments": summary.fragments,
        }
        # Keep the file first: an operation must not begin without it.
        intake.keep_file()
        # Shielded: a cancelled caller must not leave a file without an operation.
        return await complete(asyncio.create_task(self._start_operation(intake, target, json.dumps(payload), answer)))

    async def _start_operation(self, intake: Upload, target: Target, payload: str, answer: AnswerOf) -> Operation:
        try:
            operation = await self._runner.start("import", target.namespace, target.memory, payload, answer)
        except BaseException:
            intake.path.unlink(missing_ok=True)
            raise
        self.cleanup.remove_after(operation)
        return operation

    # ---- the operation
    async def _run_import(self, operation: Operation, progress: Progress) -> None:
        said = json.loads(operation.payload)
        job = _Job(
            operation.id,
            self._settings.directory / said["file"],
            Target(said["namespace"], said["memory"]),
            said["renamed"],
            said["fragments"],
        )
        if not job.path.is_file():
            raise invalid_field(
                "lines", "the uploaded lines are gone (they may be on another server's disk): import them again"
            )
        await _map_errors(self._check_job(job), job.target)
        await _map_errors(self._apply_lines(job, progress), job.target)

    async def _check_job(self, job: _Job) -> None:
        """Raises MemoryExists, before anything is written."""
        async with Reader.open(job.path) as reader:
            while (line := await reader.peek()) is not None:
                if isinstance(line, MemoryLine):
                    await self._check_memory(job, line, reader.next_offset)
                elif isinstance(line, ConversationLine):
                    await self._has_conversation(job, line, reader.next_offset)
                elif isinstance(line, StateLine):
                    await self._has_state(job, line)
                await reader.skip_section()

    async def _check_memory(self, job: _Job, line: MemoryLine, offset: int) -> bool:
        """Whether the memory exists already. Raises MemoryExists if it differs, QuotaExceeded if it is too large."""
        name = job.target.name_of(line, job.renamed)
        existing = await self._journal.get_memory(job.target.namespace, name)
        if existing is None:
            self._check_room(line)
            return False
        if existing.uid == _uid_of(job, line):
            return True
        differs = "its kind, seed, policy or labels differ"
        if (existing.kind, existing.seed, existing.policy, existing.labels) == _describe_line(line):
            now_us = self._runtime.clock.now_us()
            differs = await self._journal.scan_memory(
                existing.uid, False, lambda scan: same_memory(scan, job.path, offset, now_us)
            )
        if differs:
            raise MemoryExists(
                f"there is another memory {job.target.namespace}/{name}: {differs}. "
                "Delete it, or give the imported memory another name",
                namespace=job.target.namespace,
                memory=name,
            )
        return True

    def _check_room(self, line: MemoryLine) -> None:
        most = self._runtime.limits.memory_fragments_max
        if most and line.fragments > most:
            raise QuotaExceeded(
                f"memory {line.name} of the file has {line.fragments} fragments, the quota is {most}",
                retry_after_s=QUOTA_RETRY_S,
                quota="memory_fragments_max",
                limit=most,
            )

    async def _has_conversation(self, job: _Job, line: ConversationLine, offset: int) -> bool:
        """Whether the conversation exists already, perhaps continued. Raises MemoryExists if it differs."""
        named = ConversationName(job.target.namespace, job.target.name_of(line, job.renamed))
        try:
            differs = await self._conversations.scan_conversation(
                named, lambda scan: same_conversation(scan, job.path, offset)
            )
        except NotThere:
            return False
        if differs:
            raise MemoryExists(
                f"there is another conversation {named}: {differs}", namespace=named.namespace, conversation=named.name
            )
        return True

    async def _has_state(self, job: _Job, line: StateLine) -> bool:
        """Whether there is the state document, perhaps written since. Raises MemoryExists if it differs."""
        name = StateName(job.target.namespace, StateScope(line.scope), line.name)
        try:
            found = await self._conversations.get_state(name)
        except NotThere:
            return False
        if found.document != line.document.encode() and found.update_time_us <= line.update_time_us:
            raise MemoryExists(
                f"there is another state document of the {line.scope} {line.name}", namespace=name.namespace
            )
        return True

    async def _apply_lines(self, job: _Job, progress: Progress) -> None:
        done = 0
        await _report_done(progress, 0, job.total)
        async with Reader.open(job.path) as reader:
            while (line := await reader.peek()) is not None:
                offset = reader.next_offset
                if isinstance(line, MemoryLine):
                    if await self._check_memory(job, line, offset):
                        await reader.skip_section()
                    else:
                        await reader.skip_line()
                        await self._import_memory(job, line, reader, progress, done)
                    done += line.fragments
                    await _report_done(progress, done, job.total)
                elif isinstance(line, ConversationLine) and not await self._has_conversation(job, line, offset):
                    await reader.skip_line()
                    await self._import_conversation(job, line, reader)
                    await _report_done(progress, done, job.total)
                elif isinstance(line, StateLine) and not await self._has_state(job, line):
                    await reader.skip_line()
                    await check_bytes(self._journal, self._runtime.limits, job.target.namespace)
                    name = StateName(job.target.namespace, StateScope(line.scope), line.name)
                    await self._conversations.set_state(name, line.document.encode(), 0, line.update_time_us)
                else:
                    await reader.skip_section()

    async def _import_memory(self, job: _Job, line: MemoryLine, reader: Reader, progress: Progress, done: int) -> None:
        staged = await self._stage_memory(job, line)
        async with self._registry.use_uid(staged.uid) as actor:
            suspected: list[tuple[str, ConflictLine]] = []
            while batch := await reader.read_body(FragmentLine, BATCH):
                await self._check_bytes(job, staged.name)
                suspected += [(one.id, conflict) for one in batch for conflict in one.conflicts]
                await self._import_fragments(actor, batch, progress, done, job.total)
                done += len(batch)
                await _report_done(progress, done, job.total)
            kept = self._runtime.limits.block_versions_max
            while blocks := await reader.read_body(BlockLine, BATCH):
                await self._check_bytes(job, staged.name)
                made = [block_of(one, PRINCIPAL.get()) for one in blocks]
                await self._storage.blocks.add_versions(staged.uid, made, kept)
            if line.block_version:
                await self._storage.blocks.add_versions(staged.uid, (), kept, line.block_version)
            await self._check_bytes(job, staged.name)
            target = job.target.namespace, job.target.name_of(line, job.renamed)
            renamed, most = Event(EventType.MEMORY_UPDATED, ""), self._runtime.limits.namespace_memories_max
            last = Decision(name=target, namespace_max=most)
            await actor.run(lambda now: _with_conflicts(replace(last, events=(renamed,)), now, suspected))
            self._registry.record_rename(actor, staged.namespace, staged.name)

    async def _check_bytes(self, job: _Job, staged: str) -> None:
        """Raises QuotaExceeded; the unpublished part counts."""
        await check_bytes(self._journal, self._runtime.limits, job.target.namespace, staged_name(staged))

    async def _stage_memory(self, job: _Job, line: MemoryLine) -> MemoryRecord:
        """The memory under its temporary name: new, or from an earlier run."""
        name = f"{job.id}.{line.name}"
        record = MemoryRecord(
            uid=_uid_of(job, line),
            namespace="",
            name=name,
            kind=line.kind,
            policy=policy_of(line.policy),
            seed=bytes.fromhex(line.seed),
            labels=tuple(sorted(line.labels.items())),
            revision=1,
            create_time_us=line.create_time_us,
            update_time_us=line.update_time_us,
            reflection_aggregate=line.reflection_aggregate,
        )
        try:
            await self._journal.create_memory(record, (Event(EventType.MEMORY_CREATED, ""),))
        except AlreadyExists:
            log.info("import_resumed", operation=job.id)
        return record

    async def _import_fragments(
        self, actor: Actor, batch: list[FragmentLine], progress: Progress, done: int, total: int
    ) -> None:
        new = [one for one in batch if actor.working.tier_of(one.id) is None]
        if not new:
            return
        record = actor.working.record
        parts = await _while_wanted(
            enrich_lines(new, record, self._models), lambda: _report_done(progress, done, total)
        )

        def decide(now: Actor) -> Decision:
            now.producers.take_positions_until(max(one.fragment.last_position for one in parts))
            seen = [part.in_space(now.working.embedding.name) for part in parts]
            transition = transition_of(now.working.state, new, seen, enhances_short_term(record.kind, record.policy))
            jobs = jobs_of(now.working, transition, seen, self._runtime)
            return Decision(transition=transition, gathered={part.fragment.id: part for part in seen}, jobs=jobs)

        await actor.run(decide)

    async def _import_conversation(self, job: _Job, line: ConversationLine, reader: Reader) -> None:
        staged = f"{job.id}.{line.name}"
        await self._conversations.stage_rows(staged, line.create_time_us, (), ())
        while messages := await reader.read_body(MessageLine, BATCH):
            await self._check_bytes(job, staged)
            await self._conversations.stage_rows(staged, line.create_time_us, [message_of(one) for one in messages], ())
        while plans := await reader.read_body(PlanLine, BATCH):
            await self._check_bytes(job, staged)
            await self._conversations.stage_rows(staged, line.create_time_us, (), [plan_of(one) for one in plans])
        await self._check_bytes(job, staged)
        status = Status(line.last_number, line.completed, line.completions, line.completed_number)
        named = ConversationName(job.target.namespace, job.target.name_of(line, job.renamed))
        state = None if line.state is None else line.state.encode()
        updated_us = line.update_time_us or line.create_time_us
        details = Details(tuple(sorted(line.labels.items())), line.ttl_us, updated_us, state)
        await self._conversations.publish_staged(staged, named, status, details)


def _with_conflicts(last: Decision, now: Actor, suspected: Sequence[tuple[str, ConflictLine]]) -> Decision:
    """The last decision of an import with the suspicions whose fragments were imported, and their decisions."""
    there = now.working.columns
    kept = [(newer, one) for newer, one in suspected if newer in there and one.older in there]
    suspicions = tuple(Suspicion(newer, one.older, one.reason, one.time_us) for newer, one in kept)
    resolutions = tuple(
        Resolution(newer, one.older, one.decision, one.note, one.decide_time_us or one.time_us)
        for newer, one in kept
        if one.decision is not None
    )
    events = (
        *(Event(EventType.CONFLICT_SUSPECTED, one.newer, one.older, conflict_reason=one.reason) for one in suspicions),
        *(
            Event(EventType.CONFLICT_RESOLVED, one.newer, one.older, conflict_decision=one.decision)
            for one in resolutions
        ),
    )
    return replace(last, events=(*last.events, *events), suspicions=suspicions, resolutions=resolutions)


def _old_name(target: Target, summary: Summary) -> str:
    return summary.memories[0][0] if target.memory and summary.memories else ""


def _uid_of(job: _Job, line: MemoryLine) -> str:
    """A new uid that is the same in every run of this operation, so that it finds its own work."""
    digest = blake2b(f"{job.id}\n{line.uid}".encode(), digest_size=16).digest()
    return encode_ulid(int.from_bytes(digest) >> 1)


def _describe_line(line: MemoryLine) -> tuple[object, ...]:
    return line.kind, bytes.fromhex(line.seed), policy_of(line.policy), tuple(sorted(line.labels.items()))


async def _while_wanted(work: Coroutine[None, None, T], wanted: Callable[[], Awaitable[None]]) -> T:
    """The work's result; cancels it if `wanted` raises."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_INTERVAL_S))[0]:
            await wanted()
        return task.result()
    finally:
        task.cancel()


async def _report_done(progress: Progress, done: int, total: int) -> None:
    """Report progress; a repeated run never goes below an earlier one."""
    await progress.report_done(max(done, progress.operation.done), total)


async def _map_errors(work: Awaitable[None], target: Target) -> None:
    """Raise the journal's errors as engine errors."""
    try:
        await work
    except AlreadyExists as error:
        raise MemoryExists("a concurrent call created something with that name", namespace=target.namespace) from error
    except MemoryNotFound as error:
        raise JournalUnavailable("a memory was deleted during the import", retry_after_s=0.5) from error
    except JournalError as error:
        raise write_error(error) from error


def same_memory(scan: MemoryScan, path: Path, offset: int, now_us: int) -> str:
    """How a memory differs from the lines of a file; empty if it does not. Ignores access statistics and expired
    fragments.
    """
    retention = scan.record.policy.retention
    lines = _unexpired_lines(path, offset, now_us, retention)
    for page in scan.pages():
        for fragment, _ in page:
            if is_expired(fragment, now_us, retention):
                continue
            line = next(lines, None)
            here = fragment_line(fragment, None, scan.anchors.get(fragment.id), False)
            if line is None or line.id != fragment.id:
                return f"it has a fragment {fragment.id} that the import lacks at this position"
            if _strip_volatile(line) != _strip_volatile(here):
                return f"its fragment {fragment.id} has other values"
    line = next(lines, None)
    return _compare_blocks(scan, path, offset) if line is None else f"it lacks the fragment {line.id}"


def _compare_blocks(scan: MemoryScan, path: Path, offset: int) -> str:
    """How the blocks differ; empty also if they were written since."""
    lines = [line for line in lines_from(path, offset) if isinstance(line, BlockLine)]
    here = {block.version: replace(block, principal="") for block in scan.blocks}
    if lines and scan.block_version <= lines[-1].version:
        for line in lines:
            if here.get(line.version) != block_of(line):
                return f"it lacks version {line.version} of the block {line.name}, or that version differs"
    return ""


def _unexpired_lines(path: Path, offset: int, now_us: int, retention: RetentionPolicy) -> Iterator[FragmentLine]:
    """The memory's fragments that have not expired, up to the next line of another type."""
    for line in lines_from(path, offset):
        if not isinstance(line, FragmentLine):
            return
        if not is_expired(fragment_of(line, ""), now_us, retention):
            yield line


def _strip_volatile(line: FragmentLine) -> FragmentLine:
    """The line without values that a read changes or an import makes."""
    return msgspec.structs.replace(
        line,
        version=0,
        access_time_us=0,
        access_count=0,
        own_vector=False,
        model="",
        vector=None,
        content_vector=None,
        conflicts=[],
    )


def same_conversation(scan: ConversationScan, path: Path, offset: int) -> str:
    """How a conversation differs from the lines of a file; empty also if it has been continued since."""
    messages = scan.messages()
    plans = {plan.number for plan in scan.plans()}
    for line in lines_from(path, offset):
        if isinstance(line, MessageLine):
            wanted = message_of(line)
            if _next_message(messages, wanted.number) != wanted:
                return f"it lacks message {line.number}, or that message differs"
        elif isinstance(line, PlanLine) and line.number not in plans:
            return f"it lacks plan {line.number}"
    return ""


def _next_message(messages: Iterator[Message], number: int) -> Message | None:
    """The first message with that number or a higher one."""
    return next((found for found in messages if found.number >= number), None)


class ImportCleanup:
    """The cleanup of a process's imports."""

    def __init__(
        self,
        storage: Storage,
        runner: OperationRunner,
        settings: TransferSettings,
        delete: Callable[[MemoryRecord], Awaitable[None]],
    ) -> None:
        self._journal = storage.journal
        self._operations = storage.operations
        self._conversations = storage.conversations
        self._runner = runner
        self._directory = settings.directory
        self._delete = delete
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Remove what ended imports have left, and later what the unfinished ones leave."""
        # In this order: another server may start an import at any time, and writes its operation first.
        memories, names = await self._staged_memories(), await self._conversations.list_names("", "", 1_000_000)
        going_on = {one.id: one for one in await self._operations.list_unfinished() if one.type == "import"}
        for record in memories:
            if record.name.partition(".")[0] not in going_on:
                await self._delete(record)
        for name in names:
            if name.partition(".")[0] not in going_on:
                await self._conversations.discard_staged(name)
        kept = {json.loads(one.payload)["file"] for one in going_on.values()}
        await asyncio.to_thread(self._remove_files, kept)
        for operation in going_on.values():
            self.remove_after(operation)

    async def stop(self) -> None:
        """Stop the cleanup; the next start does it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def remove_after(self, operation: Operation) -> None:
        """Remove what the operation leaves, once it has ended."""
        task = asyncio.create_task(self._remove_when_ended(operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove_when_ended(self, operation: Operation) -> None:
        """Remove what the operation leaves, after its end: an unfinished one may be resumed."""
        while True:
            try:
                await self._runner.wait_for_end(operation.id)
                await self._remove_leftovers(operation)
            except (EngineError, JournalError) as error:
                log.warning("import_cleanup_failed", operation=operation.id, error=error)
                await asyncio.sleep(TIDY_RETRY_S)
            else:
                return

    async def _remove_leftovers(self, operation: Operation) -> None:
        path = self._directory / json.loads(operation.payload)["file"]
        await asyncio.to_thread(path.unlink, missing_ok=True)
        for record in await self._staged_memories():
            if record.name.startswith(f"{operation.id}."):
                await self._delete(record)
        for name in await self._conversations.list_names("", f"{operation.id}.", 1_000_000):
            if name.startswith(f"{operation.id}."):
                await self._conversations.discard_staged(name)

    async def _staged_memories(self) -> list[MemoryRecord]:
        return await self._journal.list_memories("", "", 1_000_000)

    def _remove_files(self, kept: set[str]) -> None:
        for path in self._directory.glob(f"*{SUFFIX}"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
