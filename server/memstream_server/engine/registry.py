"""Active memories: read from the journal when first used, kept while used, the least recently used leave first.

Rule 1. At most one actor per memory at any time: activation is single-flight, and an actor that failed is forgotten
before the next one is made.
Rule 2. This process owns what it activates; the epoch is raised once per memory and process, not per activation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.actor import Actor
from memstream_server.engine.errors import EngineError, JournalUnavailable, MemoryNotFound, ModelMismatch, ShuttingDown
from memstream_server.engine.working_set import WorkingSet
from memstream_server.ports.journal import Conflict, JournalError, MemoryRecord

if TYPE_CHECKING:
    from memstream_server.engine.dependencies import Dependencies

log = structlog.get_logger(__name__)

REVIVE_PAUSE_S = 0.2
"""Before a memory whose actor failed with observations waiting is activated again."""


class Registry:
    """All actors of this process."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies
        self._actors: OrderedDict[str, Actor] = OrderedDict()
        self._uids: dict[tuple[str, str], str] = {}
        self._activating: dict[str, asyncio.Task[Actor]] = {}
        self._owned: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._actors)

    def actors(self) -> list[Actor]:
        """Those active now."""
        return list(self._actors.values())

    def peek(self, uid: str) -> Actor | None:
        """The actor if the memory is active; does not count as a use."""
        return self._actors.get(uid)

    async def record(self, namespace: str, name: str) -> MemoryRecord:
        """The memory of that name, as RAM has it when active. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        if uid is not None and uid in self._actors:
            return self._actors[uid].working.record
        record = await self._dependencies.journal.get_memory(namespace, name)
        if record is None:
            raise MemoryNotFound(
                f"there is no memory {namespace}/{name}; create it first", namespace=namespace, memory=name
            )
        return record

    async def active(self, namespace: str, name: str) -> Actor:
        """The actor of that memory, activated if need be. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        actor = None if uid is None else self._actors.get(uid)
        if actor is None:
            actor = await self.activate((await self.record(namespace, name)).uid)
        self._actors.move_to_end(actor.uid)
        actor.last_used_s = self._dependencies.clock.monotonic_s()
        return actor

    async def activate(self, uid: str) -> Actor:
        """The actor of that memory. Raises MemoryNotFound when it is gone."""
        if self._closed:
            raise ShuttingDown("the server is going away", retry_after_s=0.5)
        if uid in self._actors:
            return self._actors[uid]
        task = self._activating.get(uid)
        if task is None:
            task = self._activating[uid] = asyncio.create_task(self._activate(uid))
            task.add_done_callback(lambda _: self._activating.pop(uid, None))
        return await asyncio.shield(task)

    async def _activate(self, uid: str) -> Actor:
        dependencies = self._dependencies
        try:
            if uid not in self._owned:
                await dependencies.journal.own(uid)
                self._owned.add(uid)
            image = await dependencies.journal.load(
                uid, dependencies.embedding.name, dependencies.limits.dense_in_memory_max
            )
        except Conflict as error:
            raise MemoryNotFound(f"the memory was deleted: {error}") from error
        except JournalError as error:
            raise JournalUnavailable(f"the memory could not be read: {error}", retry_after_s=0.5) from error
        foreign = {row.fragment.model for row in image.rows} - {"", dependencies.embedding.name}
        if foreign:
            raise ModelMismatch(
                f"the memory's vectors are of {', '.join(sorted(foreign))}, this server's model is "
                f"{dependencies.embedding.name}; run `memstream reindex`, or start it with that model"
            )
        working = WorkingSet(image, dependencies.embedding.dimension, dependencies.limits.dense_in_memory_max)
        actor = Actor(image, working, dependencies)
        self._actors[uid] = actor
        self._uids[image.record.namespace, image.record.name] = uid
        self._shrink(keep=uid)
        return actor

    def lost(self, actor: Actor) -> None:
        """An actor is finished before its time: forget it, and read the memory again if observations wait in it."""
        if self._actors.get(actor.uid) is actor:
            self._forget(actor)
            self._owned.discard(actor.uid)
        if not self._closed and not isinstance(actor.failed, MemoryNotFound):
            self._spawn(self._revive(actor.uid))

    async def _revive(self, uid: str) -> None:
        await asyncio.sleep(REVIVE_PAUSE_S)
        try:
            await self.activate(uid)
        except EngineError as error:
            log.info("not_revived", error=error.message)

    def deleted(self, record: MemoryRecord) -> None:
        """The memory is gone from the journal."""
        actor = self._actors.get(record.uid)
        if actor is not None:
            actor.gone()
        self._uids.pop((record.namespace, record.name), None)

    async def close(self) -> None:
        """End every actor."""
        self._closed = True
        for task in [*self._background, *self._activating.values()]:
            task.cancel()
        await asyncio.gather(*(actor.stop() for actor in self.actors()))
        self._actors.clear()

    def _shrink(self, keep: str) -> None:
        """Evict idle actors, least recently used first, until the bounds hold (or all that is left is in use)."""
        limits = self._dependencies.limits
        total = sum(actor.working.size_bytes for actor in self._actors.values())
        for actor in list(self._actors.values()):
            if len(self._actors) <= limits.active_memories_max and total <= limits.active_bytes_max:
                break
            if actor.uid != keep and actor.idle:
                total -= actor.working.size_bytes
                self._forget(actor)
                self._spawn(actor.stop())
        self._dependencies.metrics.active(len(self._actors), total)

    def _forget(self, actor: Actor) -> None:
        del self._actors[actor.uid]
        self._uids.pop((actor.working.record.namespace, actor.working.record.name), None)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
