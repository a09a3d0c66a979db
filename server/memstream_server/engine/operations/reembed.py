"""Everything embedded anew under another model, while recalls go on: both spaces are written, then one row switches.

Rule 1. The space in force is a row of the journal. It changes once, when nothing lacks a vector in the next space but
what its model refuses; active memories follow it one by one, in their own order, each wholly in one space at any time.
Rule 2. What is new meanwhile is embedded in both spaces (gather.py). What misses one there, because its model did not
answer in time, is found by the next pass; after the switch a backfill finds it.
Rule 3. Nothing of it is in RAM alone: a process that starts goes on from the rows `next` and `old`, and every process
of a store follows them by `notice`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from memstream_server.core.values import Fragment
from memstream_server.engine.errors import EngineError, MemoryNotFound, ModelDown, ModelMismatch, OwnedElsewhere
from memstream_server.engine.memory.build_commit import packed
from memstream_server.engine.memory.decision import Decision
from memstream_server.engine.memory.enrich import Embedded, compares_content, enhances_short_term
from memstream_server.engine.operations.runner import OperationCancelled, Progress
from memstream_server.engine.runtime.embedding_spaces import Embedding
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.records import Job, MemoryRecord
from memstream_server.ports.journal.spaces import Made, Space, Spaces
from memstream_server.ports.models import ModelUnavailable
from memstream_server.ports.operations import Operation

if TYPE_CHECKING:
    from memstream_server.engine.background.indexer import Indexer
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.registry import Registry

log = structlog.get_logger(__name__)

T = TypeVar("T")

PAGE = 256
"""Fragments embedded, or memories read, at once."""
SLICE = 1_000
"""Vectors removed in one write."""
RETRY_S = 1.0
RETRY_MAX_S = 30.0
HOW = "set next_embedding (and what belongs to it) to the model to go to and start the server again"


class Reembedding:
    """The work, what a start finds of it, and what other servers did. Made by the engine."""

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

    # ---- at a start, and beside other servers
    async def resume(self) -> None:
        """Go on where the journal says: before the index is opened."""
        spaces = await self._journal.get_spaces()
        if spaces.next is not None:
            await self._fill_too(spaces)
        if spaces.old is not None and not self._registry.ownership.shared:
            self._remove(spaces.old)

    async def stop(self) -> None:
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)

    async def notice(self) -> None:
        """Follow what another server of the store did: to be called every few seconds. Raises ModelMismatch when the
        space in force is none that this server's settings name."""
        spaces = await self._journal.get_spaces()
        removing = self._removing is not None and not self._removing.done()
        if spaces.old is not None and self._registry.ownership.leads and not removing:
            self._remove(spaces.old)
        if spaces.in_force is not None and spaces.in_force.model != self._embeddings.in_force.name:
            candidate = self._embeddings.candidate
            if candidate is None or await candidate.named() != spaces.in_force.model:
                raise ModelMismatch(f"another server put {spaces.in_force.model} in force; {HOW}")
            await self._follow(await candidate.embedding(spaces.in_force), spaces.in_force)
        elif spaces.next is None and self._embeddings.next is not None and spaces.in_force is not None:
            self._embeddings.next = None
            self._indexer.keep(spaces.in_force)
        elif spaces.next is not None and self._embeddings.next is None:
            await self._fill_too(spaces)

    async def _fill_too(self, spaces: Spaces) -> None:
        """Embed what is new in the next space, too, if this server can."""
        candidate = self._embeddings.candidate
        if spaces.in_force is None or spaces.next is None:
            return
        if candidate is None or await candidate.named() != spaces.next.model:
            log.warning("next_space_unknown", space=spaces.next.model, what_to_do=HOW)
            return
        self._embeddings.next = await candidate.embedding(spaces.next)
        self._indexer.keep(spaces.in_force, spaces.next)

    # ---- the operation
    async def target(self) -> str:
        """The space to go to. Raises ModelMismatch, saying what to set, when there is none."""
        candidate = self._embeddings.candidate
        if candidate is None:
            raise ModelMismatch(
                f"everything is embedded by {self._embeddings.in_force.name}, and there is no other model to go to: "
                f"{HOW}; without --embed `memstream reindex` rebuilds the index"
            )
        return await candidate.named()

    async def work(self, operation: Operation, progress: Progress) -> None:
        """See engine/operations/runner.py: run again, it finds what is left."""
        name: str = json.loads(operation.payload)["model"]
        if self._embeddings.in_force.name == name:  # a crash came after the switch
            await self._leftovers(set())
            return
        try:
            await progress.still()
            embedding, space = await self._begin(name, progress)
            refused: set[tuple[str, int]] = set()
            await self._fill(embedding, progress, refused)
            await self._indexer.abreast(progress.still)
        except (OperationCancelled, ModelMismatch):
            await self._abandon()
            raise
        spaces = await self._journal.get_spaces()
        await self._journal.set_spaces(Spaces(in_force=space, next=None, old=spaces.in_force))
        await self._follow(embedding, space, refused)

    async def _begin(self, name: str, progress: Progress) -> tuple[Embedding, Space]:
        candidate = self._embeddings.candidate
        if candidate is None or await candidate.named() != name:
            raise ModelMismatch(f"this server is no longer set up to go to {name}: {HOW}")
        spaces = await self._journal.get_spaces()
        if spaces.next is not None and spaces.next.model != name:
            await self._abandon()
        if self._removing is not None:  # there is room for one space beside the one in force
            await asyncio.wait({self._removing})
        spaces = await self._journal.get_spaces()
        assert spaces.in_force is not None, "a server that serves has a space"
        embedding = await self._asked(progress, lambda: candidate.embedding(spaces.next))
        space = embedding.space(spaces.in_force.index_layout)
        await self._journal.set_spaces(replace(spaces, next=space))
        self._embeddings.next = embedding
        self._indexer.keep(spaces.in_force, space)
        await self._indexer.opened(space, progress.still)
        return embedding, space

    async def _fill(self, embedding: Embedding, progress: Progress, refused: set[tuple[str, int]]) -> None:
        """Passes over all memories until one finds next to nothing: the last ones came while it went."""
        done, total = await self._journal.count_vectors(embedding.name)
        while True:
            found = 0
            async for record in self._memories():
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
        """Vectors for what lacks them now; returns for how many they were made. Asks the model outside any order."""
        compared = enhances_short_term(record.kind, record.policy)
        written, after, (done, total) = 0, -1, count
        while page := await self._journal.list_unvectored(record.uid, embedding.name, compared, after, PAGE):
            after = page[-1].position
            wanted = [one for one in page if (one.id, one.version) not in refused]
            made = await self._asked(progress, partial(self._made, record, wanted, embedding))
            refused.update((one.fragment, one.version) for one in made if one.vector is None)
            kept = await self._journal.add_vectors(record.uid, embedding.name, made)
            self._indexer.entered(kept)
            written += sum(one.vector is not None for one in made)
            await progress.at(min(done + written, total), total)
        await progress.at(min(done + written, total), total)
        return written

    async def _made(self, record: MemoryRecord, fragments: Sequence[Fragment], embedding: Embedding) -> list[Made]:
        if not fragments:
            return []
        asking = replace(record, policy=replace(record.policy, wait_for_models=False))
        content = enhances_short_term(record.kind, record.policy)
        by_content = content and compares_content(record.kind, record.policy)
        found = await self._models.gatherer.embedded(fragments, by_content, asking, embedding)
        if any(one.missing for one in found):
            raise ModelUnavailable(f"{embedding.name} does not answer")
        return [_made(fragment, one, content) for fragment, one in zip(fragments, found, strict=True)]

    async def _asked(self, progress: Progress, ask: Callable[[], Awaitable[T]]) -> T:
        """What a model answers, however long it takes it to come back; the operation says that it waits."""
        pause = RETRY_S
        while True:
            try:
                answer = await ask()
            except ModelUnavailable as error:
                log.warning("next_model_unavailable", error=error, retry_in_s=pause)
                why = ModelDown(
                    f"the next model does not answer, it is asked again: {error.summary}", retry_after_s=pause
                )
                await progress.waits(self._runtime.failure_of(why))
                for _ in range(max(1, round(pause / RETRY_S))):
                    await asyncio.sleep(RETRY_S)
                    await progress.still()
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                await progress.waits(None)
                return answer

    # ---- the switch, and what is left
    async def _follow(
        self, embedding: Embedding, space: Space, refused: Collection[tuple[str, int]] = frozenset()
    ) -> None:
        """RAM after the journal: what becomes active from here on is in that space, what is active comes after."""
        spaces = await self._journal.get_spaces()
        self._embeddings.in_force, self._embeddings.next, self._embeddings.candidate = embedding, None, None
        self._indexer.keep(space, spaces.old)
        log.info("space_in_force", space=embedding.name, dimension=embedding.model.dimension)
        await self._registry.move(self._indexer.settling)
        self._indexer.keep(space)
        await self._leftovers(refused)
        if spaces.old is not None and self._registry.ownership.leads:
            self._remove(spaces.old)

    async def _leftovers(self, refused: Collection[tuple[str, int]]) -> None:
        """What came without a vector in the space just before it was put in force, of the memories tended here."""
        name = self._embeddings.in_force.name
        tended = await self._registry.ownership.tended()
        async for record in self._memories():
            if not tended(record.uid):
                continue
            if await self._lacks(record, name, refused):
                now_us, id_ = self._runtime.clock.now_us(), self._runtime.ids.next()
                job = Job(id_, record.uid, "backfill", "{}", now_us)
                with contextlib.suppress(OwnedElsewhere, MemoryNotFound):  # whoever has it looks by itself
                    async with self._registry.use_uid(record.uid) as actor:
                        await actor.run(partial(_entering, job))

    async def _lacks(self, record: MemoryRecord, model: str, refused: Collection[tuple[str, int]]) -> bool:
        """Whether anything but what the model refuses is without a vector."""
        after = -1
        while page := await self._journal.list_unvectored(record.uid, model, False, after, PAGE):
            if any((one.id, one.version) not in refused for one in page):
                return True
            after = page[-1].position
        return False

    async def _abandon(self) -> None:
        """The space in force stays; what there is of the next one goes."""
        spaces = await self._journal.get_spaces()
        self._embeddings.next = None
        if spaces.next is None or spaces.in_force is None:
            return
        await self._journal.set_spaces(Spaces(in_force=spaces.in_force, next=None, old=spaces.next))
        self._indexer.keep(spaces.in_force)
        self._remove(spaces.next)

    def _remove(self, space: Space) -> None:
        self._removing = asyncio.create_task(self._removed(space))

    async def _removed(self, space: Space) -> None:
        """A space's vectors, a slice at a time, and its collection."""
        await asyncio.sleep(self._runtime.limits.space_notice_s)
        if self._registry.ownership.shared:  # every server follows by now: what one that ended has left lacking
            with contextlib.suppress(EngineError):
                await self._leftovers(frozenset())
        pause = RETRY_S
        while True:
            try:
                after: int | None = -1
                while after is not None:
                    after = await self._journal.drop_vectors(space.model, after, SLICE)
                await self._indexer.remove(space)
                await self._journal.set_spaces(replace(await self._journal.get_spaces(), old=None))
            except JournalError as error:
                log.warning("space_not_removed", space=space.model, reason=error, retry_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)
            else:
                log.info("space_removed", space=space.model)
                return

    async def _memories(self) -> AsyncIterator[MemoryRecord]:
        after = ""
        while page := await self._journal.all_memories(after, PAGE):
            for record in page:
                yield record
            after = page[-1].uid


def _entering(job: Job, _: Actor) -> Decision:
    return Decision(jobs=(job,))


def _made(fragment: Fragment, found: Embedded, content: bool) -> Made:
    vector = None if found.vector is None else packed(found.vector)
    compared = found.content_vector if content else None
    return Made(fragment.id, fragment.version, vector, None if compared is None else packed(compared))
