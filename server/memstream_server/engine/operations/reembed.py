"""The operation "reindex", and re-embedding: embeds everything with another model while recalls continue. Both spaces
are written, then one row switches.

Rule 1. The space in force is a row of the journal. It changes once, when only inputs that the next model refuses lack a
vector. Active memories follow one by one, each in its own order and completely in one space at any time.
Rule 2. New fragments are embedded in both spaces (memory/enrich.py). If the next model does not answer in time, the
next pass makes the vector; after the switch a backfill does.
Rule 3. Nothing is in RAM only: a new process resumes from the rows `next` and `old`, and all processes of a store
follow them (`follow_store`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EngineError, MemoryNotFound, ModelDown, ModelMismatch, OwnedElsewhere
from memstream_server.engine.memory.decision import Decision, pack_vector
from memstream_server.engine.memory.enrich import Embedded, Embedding, compares_content, enhances_short_term
from memstream_server.engine.operations.runner import AnswerOf, OperationCancelled, OperationRunner, Progress
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Job, Made, MemoryRecord, Space, Spaces
from memstream_server.ports.models import ModelUnavailable
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.indexer import Indexer
    from memstream_server.engine.background.vectors import MissingVectors
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

T = TypeVar("T")

PAGE = 256
"""Fragments embedded, or memories read, at once."""
SLICE = 1_000
"""Vectors removed per write."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
HOW = "set next_embedding and its settings to the new model, and start the server again"
TYPE = "reindex"
UNIT = "fragments"


class Reembedding:
    """Runs the operation, resumes it at a start, and follows other servers. The engine makes it."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, registry: Registry, indexer: Indexer
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._journal = storage.journal
        self._embeddings = models.embeddings
        self._registry = registry
        self._indexer = indexer
        self._removing: asyncio.Task[None] | None = None

    # ---- at a start, and with other servers
    async def resume(self) -> None:
        """Resume from the journal's rows. Call before the index is opened."""
        spaces = await self._journal.get_spaces()
        if spaces.next is not None:
            await self._fill_too(spaces)
        if spaces.old is not None and not self._registry.ownership.shared:
            self._start_removal(spaces.old)

    async def stop(self) -> None:
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)

    async def follow_store(self) -> None:
        """Follow the other servers of the store; called every few seconds. Raises ModelMismatch if this server's
        settings do not name the model in force.
        """
        spaces = await self._journal.get_spaces()
        removing = self._removing is not None and not self._removing.done()
        if spaces.old is not None and self._registry.ownership.leads and not removing:
            self._start_removal(spaces.old)
        if spaces.in_force is not None and spaces.in_force.model != self._embeddings.in_force.name:
            candidate = self._embeddings.candidate
            if candidate is None or await candidate.find_name() != spaces.in_force.model:
                raise ModelMismatch(f"another server put {spaces.in_force.model} in force; {HOW}")
            await self._switch_space(await candidate.make_embedding(spaces.in_force), spaces.in_force)
        elif spaces.next is None and self._embeddings.next is not None and spaces.in_force is not None:
            self._embeddings.next = None
            self._indexer.use_spaces(spaces.in_force)
        elif spaces.next is not None and self._embeddings.next is None:
            await self._fill_too(spaces)

    async def _fill_too(self, spaces: Spaces) -> None:
        """Embed new fragments in the next space as well, if this server can."""
        candidate = self._embeddings.candidate
        if spaces.in_force is None or spaces.next is None:
            return
        if candidate is None or await candidate.find_name() != spaces.next.model:
            log.warning("next_space_unknown", space=spaces.next.model, what_to_do=HOW)
            return
        self._embeddings.next = await candidate.make_embedding(spaces.next)
        self._indexer.use_spaces(spaces.in_force, spaces.next)

    # ---- the operation
    async def find_target(self) -> str:
        """The name of the next space. Raises ModelMismatch with instructions if no next model is set."""
        candidate = self._embeddings.candidate
        if candidate is None:
            raise ModelMismatch(
                f"everything is embedded by {self._embeddings.in_force.name}, and no other model is set: "
                f"{HOW}; without --embed `memstream reindex` rebuilds the index"
            )
        return await candidate.find_name()

    async def run_operation(self, operation: Operation, progress: Progress) -> None:
        """The work of the operation, see runner.py. A repeat does the rest."""
        name: str = json.loads(operation.payload)["model"]
        if self._embeddings.in_force.name == name:  # the process crashed after the switch
            await self._storage.images.remove_all()
            await self._backfill_leftovers(set())
            return
        try:
            await progress.check_cancelled()
            embedding, space = await self._begin_fill(name, progress)
            refused: set[tuple[str, int]] = set()
            await self._fill_space(embedding, progress, refused)
            await self._indexer.wait_for_outbox(progress.check_cancelled)
        except (OperationCancelled, ModelMismatch):
            await self._abandon_next()
            raise
        spaces = await self._journal.get_spaces()
        await self._journal.set_spaces(Spaces(in_force=space, next=None, old=spaces.in_force))
        await self._switch_space(embedding, space, refused)

    async def _begin_fill(self, name: str, progress: Progress) -> tuple[Embedding, Space]:
        candidate = self._embeddings.candidate
        if candidate is None or await candidate.find_name() != name:
            raise ModelMismatch(f"this server is no longer set up for {name}: {HOW}")
        spaces = await self._journal.get_spaces()
        if spaces.next is not None and spaces.next.model != name:
            await self._abandon_next()
        if self._removing is not None:  # there can be only one space besides the one in force
            await asyncio.wait({self._removing})
        spaces = await self._journal.get_spaces()
        assert spaces.in_force is not None, "a running server has a space"
        embedding = await self._ask_until_answered(progress, lambda: candidate.make_embedding(spaces.next))
        space = embedding.as_space(spaces.in_force.index_layout)
        await self._journal.set_spaces(replace(spaces, next=space))
        self._embeddings.next = embedding
        self._indexer.use_spaces(spaces.in_force, space)
        await self._indexer.wait_until_open(space, progress.check_cancelled)
        return embedding, space

    async def _fill_space(self, embedding: Embedding, progress: Progress, refused: set[tuple[str, int]]) -> None:
        """Pass over all memories until one pass finds almost nothing: only fragments that came during it."""
        done, total = await self._journal.count_vectors(embedding.name)
        while True:
            found = 0
            async for record in self._registry.list_memories():
                found += await self._fill_memory(record, embedding, progress, refused, (done + found, total))
            done += found
            if found < PAGE:
                return

    async def _fill_memory(
        self,
        record: MemoryRecord,
        embedding: Embedding,
        progress: Progress,
        refused: set[tuple[str, int]],
        count: tuple[int, int],
    ) -> int:
        """Make the missing vectors of a memory; returns how many. Calls the model outside of the memory's order."""
        compared = enhances_short_term(record.kind, record.policy)
        written, after, (done, total) = 0, -1, count
        while page := await self._journal.list_unvectored(record.uid, embedding.name, compared, after, PAGE):
            after = page[-1].position
            wanted = [one for one in page if (one.id, one.version) not in refused]
            made = await self._ask_until_answered(progress, partial(self._make_vectors, record, wanted, embedding))
            refused.update((one.fragment, one.version) for one in made if one.vector is None)
            kept = await self._journal.add_vectors(record.uid, embedding.name, made)
            self._indexer.notify_rows(kept)
            written += sum(one.vector is not None for one in made)
            await progress.report_done(min(done + written, total), total)
        await progress.report_done(min(done + written, total), total)
        return written

    async def _make_vectors(
        self, record: MemoryRecord, fragments: Sequence[Fragment], embedding: Embedding
    ) -> list[Made]:
        if not fragments:
            return []
        asking = replace(record, policy=replace(record.policy, wait_for_models=False))
        content = enhances_short_term(record.kind, record.policy)
        by_content = content and compares_content(record.kind, record.policy)
        found = await self._models.enricher.embed_fragments(fragments, by_content, asking, embedding)
        if any(one.missing for one in found):
            raise ModelUnavailable(f"{embedding.name} does not answer")
        return [_vectors_of(fragment, one, content) for fragment, one in zip(fragments, found, strict=True)]

    async def _ask_until_answered(self, progress: Progress, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the model until it answers; the operation shows what it waits for."""
        pause = RETRY_S
        while True:
            try:
                answer = await ask()
            except ModelUnavailable as error:
                log.warning("next_model_unavailable", error=error, retry_in_s=pause)
                why = ModelDown(f"the next model does not answer, retrying: {error.summary}", retry_after_s=pause)
                await progress.report_wait(self._runtime.failure_of(why))
                for _ in range(max(1, round(pause / RETRY_S))):
                    await asyncio.sleep(RETRY_S)
                    await progress.check_cancelled()
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                await progress.report_wait(None)
                return answer

    # ---- the switch and the cleanup
    async def _switch_space(
        self, embedding: Embedding, space: Space, refused: Collection[tuple[str, int]] = frozenset()
    ) -> None:
        """Switch this process to the new space: memories activated from now on use it, active ones follow."""
        await self._storage.images.remove_all()  # a space that returns later has other vectors
        spaces = await self._journal.get_spaces()
        self._embeddings.in_force, self._embeddings.next, self._embeddings.candidate = embedding, None, None
        self._indexer.use_spaces(space, spaces.old)
        log.info("space_in_force", space=embedding.name, dimension=embedding.model.dimension)
        await self._registry.move_to_space(self._indexer.overlays.list_unsettled)
        self._indexer.use_spaces(space)
        await self._backfill_leftovers(refused)
        if spaces.old is not None and self._registry.ownership.leads:
            self._start_removal(spaces.old)

    async def _backfill_leftovers(self, refused: Collection[tuple[str, int]]) -> None:
        """Add backfill jobs for fragments without a vector in the new space, in the memories that this process
        maintains.
        """
        name = self._embeddings.in_force.name
        tended = await self._registry.ownership.select_tended()
        async for record in self._registry.list_memories():
            if not tended(record.uid):
                continue
            if await self._lacks_vectors(record, name, refused):
                now_us, id_ = self._runtime.clock.now_us(), self._runtime.ids.next_id()
                job = Job(id_, record.uid, "backfill", "{}", now_us)
                with contextlib.suppress(OwnedElsewhere, MemoryNotFound):  # its owner does the same
                    async with self._registry.use_uid(record.uid) as actor:
                        await actor.run(partial(_enter_job, job))

    async def _lacks_vectors(self, record: MemoryRecord, model: str, refused: Collection[tuple[str, int]]) -> bool:
        """Whether a fragment that the model accepts lacks its vector."""
        after = -1
        while page := await self._journal.list_unvectored(record.uid, model, False, after, PAGE):
            if any((one.id, one.version) not in refused for one in page):
                return True
            after = page[-1].position
        return False

    async def _abandon_next(self) -> None:
        """Keep the space in force and remove the next one."""
        spaces = await self._journal.get_spaces()
        self._embeddings.next = None
        if spaces.next is None or spaces.in_force is None:
            return
        await self._journal.set_spaces(Spaces(in_force=spaces.in_force, next=None, old=spaces.next))
        self._indexer.use_spaces(spaces.in_force)
        self._start_removal(spaces.next)

    def _start_removal(self, space: Space) -> None:
        self._removing = asyncio.create_task(self._remove_space(space))

    async def _remove_space(self, space: Space) -> None:
        """Remove a space's vectors in slices, then its collection."""
        await asyncio.sleep(self._runtime.limits.space_notice_s)
        if self._registry.ownership.shared:  # all servers follow by now: add the jobs of those that have ended
            with contextlib.suppress(EngineError):
                await self._backfill_leftovers(frozenset())
        pause = RETRY_S
        while True:
            try:
                after: int | None = -1
                while after is not None:
                    after = await self._journal.drop_vectors(space.model, after, SLICE)
                await self._indexer.remove_space(space)
                await self._journal.set_spaces(replace(await self._journal.get_spaces(), old=None))
            except JournalError as error:
                log.warning("space_not_removed", space=space.model, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                log.info("space_removed", space=space.model)
                return


def _enter_job(job: Job, _: Actor) -> Decision:
    return Decision(jobs=(job,))


def _vectors_of(fragment: Fragment, found: Embedded, content: bool) -> Made:
    vector = None if found.vector is None else pack_vector(found.vector)
    compared = found.content_vector if content else None
    packed = None if compared is None else pack_vector(compared)
    return Made(fragment.id, fragment.version, vector, packed, found.computed)


class Reindexing:
    """Starts and runs the operation: it rebuilds the index from the journal's vectors. With `embed` everything is
    embedded with the next model instead, with `missing` what has no vector.

    Recalls continue and report in `degraded` what they lack.
    """

    def __init__(
        self, runner: OperationRunner, indexer: Indexer, reembedding: Reembedding, missing: MissingVectors
    ) -> None:
        self._runner = runner
        self._indexer = indexer
        self._reembedding = reembedding
        self._missing = missing
        runner.register_type(TYPE, UNIT, self._run_reindex, undoes=True)

    async def start(self, embed: bool, missing: bool = False, answer: AnswerOf = None) -> Operation:
        """Raises ModelMismatch if `embed` is set and there is no next model."""
        payload = {"embed": embed, "missing": missing, "model": await self._reembedding.find_target() if embed else ""}
        return await self._runner.start(TYPE, "", "", json.dumps(payload), answer)

    async def _run_reindex(self, operation: Operation, progress: Progress) -> None:
        payload = json.loads(operation.payload)
        if payload["embed"]:
            await self._reembedding.run_operation(operation, progress)
        elif payload.get("missing"):
            await self._missing.embed_all(progress)
        else:
            await progress.check_cancelled()
            await self._indexer.rebuild_index(progress.report_done)
