"""Import: a checked file of lines becomes memories and conversations, as an operation.

Rule 1. Everything is checked, and compared with what goes by these names already, before anything is written.
Rule 2. A memory is built aside, in the namespace of no name, by transitions in its own order, and gets its name with
the last one: nobody sees a part of it. So is a conversation.
Rule 3. What an earlier run (of this operation, or another of the same file) has done is found and left as it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import structlog

from memstream_server.core.events import Event, EventType
from memstream_server.engine.errors import (
    DISK_FULL,
    NOT_WRITTEN,
    QUOTA_RETRY_S,
    EngineError,
    JournalUnavailable,
    MemoryExists,
    MemoryNotFound,
    QuotaExceeded,
    StorageIsFull,
)
from memstream_server.engine.memory.decide import jobs_of
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import enhances_short_term
from memstream_server.engine.operations.runner import OperationRunner, Progress
from memstream_server.engine.operations.transfer.check_lines import Summary, Terms
from memstream_server.engine.operations.transfer.compare_exports import same_conversation, same_memory
from memstream_server.engine.operations.transfer.disk_space import Disk
from memstream_server.engine.operations.transfer.lines import ConversationLine, FragmentLine, MemoryLine, policy_of
from memstream_server.engine.operations.transfer.place_fragments import gathered, transition_of
from memstream_server.engine.operations.transfer.read_lines import Reader, message_of, plan_of
from memstream_server.engine.operations.transfer.upload import SUFFIX, Intake, invalid
from memstream_server.engine.runtime.clock import encode_ulid
from memstream_server.ports.conversations import ConversationName, ConversationStore, NotThere, Status
from memstream_server.ports.journal.errors import AlreadyExists, JournalError, StorageFull
from memstream_server.ports.journal.records import MemoryRecord
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.operations.runner import AnswerOf
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)
T = TypeVar("T")

BATCH = 256
"""Fragments, or messages, of one commit."""
LOOK_S = 0.5
"""How often a wait for a model looks whether it is still wanted."""
TIDY_RETRY_S = 30.0
"""Before what could not be tidied is looked at again."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an import goes; `memory` empty keeps the exported names."""

    namespace: str
    memory: str

    def named(self, line: MemoryLine | ConversationLine, renamed: str) -> str:
        """The name a memory or conversation is to have; `renamed` is the name of the one memory of the file."""
        return self.memory if self.memory and line.name == renamed else line.name


@dataclass(frozen=True, slots=True)
class _Job:
    """What an operation's payload says."""

    id: str
    path: Path
    target: Target
    renamed: str
    total: int


class Importer:
    """The imports of a process. `start` once, when the engine is."""

    def __init__(
        self,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        registry: Registry,
        conversations: ConversationStore,
        runner: OperationRunner,
        disk: Disk,
        delete: Callable[[MemoryRecord], Awaitable[None]],
        *,
        bytes_max: int,
        name_bytes_max: int,
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._journal = storage.journal
        self._registry = registry
        self._conversations = conversations
        self._runner = runner
        self._disk = disk
        self._delete = delete
        self._bytes_max = bytes_max
        self._name_bytes_max = name_bytes_max
        self._tidying: set[asyncio.Task[None]] = set()
        runner.register("import", "fragments", self._work, stays=True)

    async def start(self, unfinished: Callable[[], Awaitable[list[Operation]]]) -> None:
        """Remove what imports that have ended left, and will once the unfinished ones have."""
        # Looked up in this order: another server may begin an import at any time, and its operation is there first.
        memories, names = await self._staged_memories(), await self._conversations.list_names("", "", 1_000_000)
        going_on = {one.id: one for one in await unfinished() if one.type == "import"}
        for record in memories:
            if record.name.partition(".")[0] not in going_on:
                await self._delete(record)
        for name in names:
            if name.partition(".")[0] not in going_on:
                await self._conversations.discard_staged(name)
        kept = {json.loads(one.payload)["file"] for one in going_on.values()}
        await asyncio.to_thread(self._remove_files, kept)
        for operation in going_on.values():
            self._tidy_after(operation)

    async def stop(self) -> None:
        """What imports leave is removed after the next start."""
        for task in self._tidying:
            task.cancel()
        await asyncio.gather(*self._tidying, return_exceptions=True)

    # ---- what the wire asks
    def intake(self, rename: str) -> Intake:
        """Takes the lines of an import. Blocking. Raises StorageIsFull."""
        embedding = self._models.embedding
        terms = Terms(embedding.dimension, embedding.name, self._name_bytes_max, self._speaks, rename)
        return Intake(self._disk, terms, self._bytes_max)

    def _speaks(self, language: str) -> bool:
        try:
            self._models.analyzer.terms("a", language)
        except (KeyError, ValueError):
            return False
        return True

    async def check(self, intake: Intake, summary: Summary, target: Target) -> None:
        """Raises MemoryExists where something else goes by a name already."""
        await _engines(self._check(_Job("", intake.path, target, _renamed(target, summary), summary.fragments)), target)

    async def begin(self, intake: Intake, summary: Summary, target: Target, answer: AnswerOf) -> Operation:
        """The operation that imports what was taken in."""
        payload = {
            "file": intake.path.name,
            "namespace": target.namespace,
            "memory": target.memory,
            "renamed": _renamed(target, summary),
            "fragments": summary.fragments,
        }
        # Kept first: an operation must not begin without its file.
        intake.keep()
        # Whoever waits may leave: the file is the operation's, and goes alone where none was made.
        return await asyncio.shield(asyncio.create_task(self._begun(intake, target, json.dumps(payload), answer)))

    async def _begun(self, intake: Intake, target: Target, payload: str, answer: AnswerOf) -> Operation:
        try:
            operation = await self._runner.start("import", target.namespace, target.memory, payload, answer)
        except BaseException:
            intake.path.unlink(missing_ok=True)
            raise
        self._tidy_after(operation)
        return operation

    # ---- the operation
    async def _work(self, operation: Operation, progress: Progress) -> None:
        said = json.loads(operation.payload)
        job = _Job(
            operation.id,
            self._disk.directory / said["file"],
            Target(said["namespace"], said["memory"]),
            said["renamed"],
            said["fragments"],
        )
        if not job.path.is_file():
            raise invalid("lines", "what was sent is no longer there (another server's disk has it?): import it again")
        await _engines(self._check(job), job.target)
        await _engines(self._apply(job, progress), job.target)

    async def _check(self, job: _Job) -> None:
        """Raises MemoryExists, before anything is written."""
        async with Reader.open(job.path) as reader:
            while (line := await reader.peek()) is not None:
                if isinstance(line, MemoryLine):
                    await self._check_memory(job, line, reader.next_offset)
                elif isinstance(line, ConversationLine):
                    await self._has_conversation(job, line, reader.next_offset)
                await reader.skip_section()

    async def _check_memory(self, job: _Job, line: MemoryLine, offset: int) -> bool:
        """Whether it is there already. Raises MemoryExists when it is another, QuotaExceeded when it is too large."""
        name = job.target.named(line, job.renamed)
        existing = await self._journal.get_memory(job.target.namespace, name)
        if existing is None:
            self._check_room(line)
            return False
        if existing.uid == _uid(job, line):
            return True
        differs = "it is of another kind, seed, policy or labels"
        if _described(existing) == _described_by(line):
            now_us = self._runtime.clock.now_us()
            differs = await self._journal.scan_memory(
                existing.uid, False, lambda scan: same_memory(scan, job.path, offset, now_us)
            )
        if differs:
            raise MemoryExists(
                f"there is another memory {job.target.namespace}/{name}: {differs}. "
                "Delete it, or give the imported one another name",
                namespace=job.target.namespace,
                memory=name,
            )
        return True

    def _check_room(self, line: MemoryLine) -> None:
        most = self._runtime.limits.memory_fragments_max
        if most and line.fragments > most:
            raise QuotaExceeded(
                f"memory {line.name} of the file has {line.fragments} fragments, at most {most} are allowed",
                retry_after_s=QUOTA_RETRY_S,
                quota="memory_fragments_max",
                limit=most,
            )

    async def _has_conversation(self, job: _Job, line: ConversationLine, offset: int) -> bool:
        """Whether it is there already, perhaps gone on since. Raises MemoryExists when it is another."""
        named = ConversationName(job.target.namespace, job.target.named(line, job.renamed))
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

    async def _apply(self, job: _Job, progress: Progress) -> None:
        done = 0
        await _reached(progress, 0, job.total)
        async with Reader.open(job.path) as reader:
            while (line := await reader.peek()) is not None:
                offset = reader.next_offset
                if isinstance(line, MemoryLine):
                    if await self._check_memory(job, line, offset):
                        await reader.skip_section()
                    else:
                        await reader.take()
                        await self._memory(job, line, reader, progress, done)
                    done += line.fragments
                    await _reached(progress, done, job.total)
                elif isinstance(line, ConversationLine) and not await self._has_conversation(job, line, offset):
                    await reader.take()
                    await self._conversation(job, line, reader)
                    await _reached(progress, done, job.total)
                else:
                    await reader.skip_section()

    async def _memory(self, job: _Job, line: MemoryLine, reader: Reader, progress: Progress, done: int) -> None:
        staged = await self._stage(job, line)
        async with self._registry.use_uid(staged.uid) as actor:
            while batch := await reader.body(FragmentLine, BATCH):
                await self._fragments(actor, batch, progress, done, job.total)
                done += len(batch)
                await _reached(progress, done, job.total)
            target = job.target.namespace, job.target.named(line, job.renamed)
            renamed, most = (Event(EventType.MEMORY_UPDATED, ""),), self._runtime.limits.namespace_memories_max
            await actor.run(lambda _: Decision(events=renamed, name=target, namespace_max=most))
            self._registry.renamed(actor, staged.namespace, staged.name)

    async def _stage(self, job: _Job, line: MemoryLine) -> MemoryRecord:
        """The memory under its working name: new, or as an earlier run left it."""
        name = f"{job.id}.{line.name}"
        record = MemoryRecord(
            uid=_uid(job, line),
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
            log.info("import_goes_on", operation=job.id)
        return record

    async def _fragments(
        self, actor: Actor, batch: list[FragmentLine], progress: Progress, done: int, total: int
    ) -> None:
        new = [one for one in batch if actor.working.tier_of(one.id) is None]
        if not new:
            return
        record = actor.working.record
        parts = await _while_wanted(gathered(new, record, self._models), lambda: _reached(progress, done, total))

        def decide(now: Actor) -> Decision:
            now.receiving.take_positions_until(new[-1].position)
            seen = [part.under(now.working.embedding.name) for part in parts]
            transition = transition_of(now.working.state, new, seen, enhances_short_term(record.kind, record.policy))
            jobs = jobs_of(now.working, transition, seen, self._runtime)
            return Decision(transition=transition, gathered={part.fragment.id: part for part in seen}, jobs=jobs)

        await actor.run(decide)

    async def _conversation(self, job: _Job, line: ConversationLine, reader: Reader) -> None:
        staged = f"{job.id}.{line.name}"
        await self._conversations.stage_rows(staged, line.create_time_us, (), ())
        while messages := await reader.messages(BATCH):
            await self._conversations.stage_rows(staged, line.create_time_us, [message_of(one) for one in messages], ())
        while plans := await reader.plans(BATCH):
            await self._conversations.stage_rows(staged, line.create_time_us, (), [plan_of(one) for one in plans])
        status = Status(line.last_number, line.completed, line.completions, line.completed_number)
        named = ConversationName(job.target.namespace, job.target.named(line, job.renamed))
        await self._conversations.publish_staged(staged, named, status)

    # ---- what is left behind
    def _tidy_after(self, operation: Operation) -> None:
        task = asyncio.create_task(self._tidied(operation))
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    async def _tidied(self, operation: Operation) -> None:
        """Once it has ended: while the journal does not say so it may be gone on with."""
        while True:
            try:
                await self._runner.finished(operation.id)
                await self._left_behind(operation)
            except (EngineError, JournalError) as error:
                log.warning("import_not_tidied", operation=operation.id, error=error)
                await asyncio.sleep(TIDY_RETRY_S)
            else:
                return

    async def _left_behind(self, operation: Operation) -> None:
        path = self._disk.directory / json.loads(operation.payload)["file"]
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
        for path in self._disk.directory.glob(f"*{SUFFIX}"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _renamed(target: Target, summary: Summary) -> str:
    return summary.memories[0][0] if target.memory and summary.memories else ""


def _uid(job: _Job, line: MemoryLine) -> str:
    """A new identity, the same whenever this operation makes the memory: so it knows its own work again."""
    digest = blake2b(f"{job.id}\n{line.uid}".encode(), digest_size=16).digest()
    return encode_ulid(int.from_bytes(digest) >> 1)


def _described(record: MemoryRecord) -> tuple[object, ...]:
    return record.kind, record.seed, record.policy, record.labels


def _described_by(line: MemoryLine) -> tuple[object, ...]:
    return line.kind, bytes.fromhex(line.seed), policy_of(line.policy), tuple(sorted(line.labels.items()))


async def _while_wanted(work: Coroutine[None, None, T], wanted: Callable[[], Awaitable[None]]) -> T:
    """The work's result; it is cancelled when `wanted` raises."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
            await wanted()
        return task.result()
    finally:
        task.cancel()


async def _reached(progress: Progress, done: int, total: int) -> None:
    """So much of the file is there. A run that goes over what an earlier one has done takes nothing of it back."""
    await progress.at(max(done, progress.operation.done), total)


async def _engines(work: Awaitable[None], target: Target) -> None:
    """The journal's errors as the engine's."""
    try:
        await work
    except StorageFull as error:
        raise StorageIsFull(DISK_FULL, retry_after_s=5.0) from error
    except AlreadyExists as error:
        raise MemoryExists("something of that name was made meanwhile", namespace=target.namespace) from error
    except MemoryNotFound as error:
        raise JournalUnavailable("a memory was deleted during the import", retry_after_s=0.5) from error
    except JournalError as error:
        raise JournalUnavailable(NOT_WRITTEN, retry_after_s=0.5) from error
