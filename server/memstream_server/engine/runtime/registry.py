"""Active memories: read from the journal when first used, kept while used, the least recently used leave first.

Rule 1. At most one actor per memory at any time: activation is single-flight, and an actor that failed is forgotten
before the next one is made.
Rule 2. This process owns what it activates (ownership.py); what leaves is released to other processes, if there are.
Rule 3. An actor in use, or just activated for somebody, is not evicted: who asked for it gets to use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING

import structlog

from memstream_server.engine.errors import (
    EngineError,
    JournalUnavailable,
    LeaseLost,
    MemoryDeleted,
    MemoryNotFound,
    ShuttingDown,
)
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.runtime.ownership import Ownership
from memstream_server.ports.journal.errors import Conflict, JournalError
from memstream_server.ports.journal.reading import Image
from memstream_server.ports.journal.records import MemoryRecord

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import EngineEvents, EngineModels, Runtime, Storage
    from memstream_server.engine.runtime.embedding_spaces import Embedding

log = structlog.get_logger(__name__)

REVIVE_PAUSE_S = 0.2
"""Before a memory whose actor failed is activated again: observations may wait in it. Doubles while it fails anew."""
REVIVE_PAUSE_MAX_S = 30.0
MEASURED_AT_ONCE = 8
"""Working sets looked at in one turn of the event loop: a quarter of a millisecond."""
NAMES_MAX = 65_536
"""Names kept of memories that have left RAM: a few MB."""
CALM_S = 60.0
"""After so long without a failure the pause is the first one again."""


class Registry:
    """All actors of this process."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, ownership: Ownership, events: EngineEvents
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._events = events
        self._actors: OrderedDict[str, Actor] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """Bytes of each actor's working set when it was measured last."""
        self._changed: set[str] = set()
        """Memories that were used since."""
        self._uids: dict[tuple[str, str], str] = {}
        """By name, of memories that are active; and of those that were, where nobody else can rename or delete one."""
        self._activating: dict[str, asyncio.Task[Actor]] = {}
        self.ownership = ownership
        ownership.on_loss(self._disowned)
        self._wanted: Counter[str] = Counter()
        """How many calls wait for an activation."""
        self._deleting: set[str] = set()
        """Memories whose deletion was begun: what RAM has of them is checked against the journal."""
        self._outlived: set[str] = set()
        """Memories whose deletion ended while they were being activated, perhaps from an older reading."""
        self._ended: set[Actor] = set()
        """Actors that failed, and whose streams may hold them."""
        self._losses: dict[str, tuple[float, float]] = {}
        """When a memory's actor failed last, and the pause that followed."""
        self._reviving: set[str] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def size_bytes(self) -> int:
        """Of all working sets, about: a memory that is used is measured from time to time."""
        return sum(self._sizes.values())

    def actors(self) -> list[Actor]:
        """Those active now."""
        return list(self._actors.values())

    def peek(self, uid: str) -> Actor | None:
        """The actor if the memory is active; does not count as a use."""
        return self._actors.get(uid)

    async def record(self, namespace: str, name: str) -> MemoryRecord:
        """The memory of that name, as RAM has it when active. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        if uid is not None and uid in self._actors and uid not in self._deleting and self.ownership.valid():
            return self._actors[uid].working.record
        record = await self._storage.journal.get_memory(namespace, name)
        if record is None:
            raise MemoryNotFound(
                f"there is no memory {namespace}/{name}; create it first", namespace=namespace, memory=name
            )
        return record

    @contextlib.asynccontextmanager
    async def use(self, namespace: str, name: str) -> AsyncIterator[Actor]:
        """The actor of that memory, activated if need be and kept while it is used. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        if uid is None or uid in self._deleting:
            uid = (await self.record(namespace, name)).uid
        async with self.use_uid(uid) as actor:
            yield actor

    @contextlib.asynccontextmanager
    async def use_uid(self, uid: str) -> AsyncIterator[Actor]:
        """As `use`, by the memory's identity."""
        actor = self._actors.get(uid)
        if actor is None:
            self._wanted[uid] += 1
            try:
                actor = await self.activate(uid)
            finally:
                self._wanted[uid] -= 1
                self._wanted += Counter()  # zeros go
        try:
            with actor.used():
                if self._actors.get(uid) is actor:
                    self._actors.move_to_end(uid)
                    self._changed.add(uid)
                yield actor
        finally:
            self._settle()

    async def activate(self, uid: str) -> Actor:
        """The actor of that memory. Raises MemoryNotFound when it is gone."""
        if self._closed:
            raise ShuttingDown("the server is going away", retry_after_s=0.5)
        if uid in self._actors:
            return self._actors[uid]
        task = self._activating.get(uid)
        if task is None:
            task = self._activating[uid] = asyncio.create_task(self._activate(uid))
            task.add_done_callback(lambda done: self._activated(uid, done))
        # Not by awaiting the task itself: whoever gives up must not end it for the others.
        await asyncio.wait({task})
        if task.cancelled():
            raise ShuttingDown("the server is going away", retry_after_s=0.5)
        return task.result()

    def _activated(self, uid: str, task: asyncio.Task[Actor]) -> None:
        del self._activating[uid]
        self._outlived.discard(uid)
        if not task.cancelled():
            task.exception()  # looked at, so that an activation nobody waits for any longer leaves no warning

    async def _activate(self, uid: str) -> Actor:
        try:
            epoch = await self.ownership.take(uid)
            embedding = self._models.embeddings.in_force
            image, working = await self._read(uid, embedding)
            await self._models.prepare_language(image.record.policy)
        except Conflict as error:
            self.ownership.forget(uid)
            raise MemoryDeleted("the memory was deleted") from error
        except JournalError as error:
            raise JournalUnavailable("the memory could not be read: try again", retry_after_s=0.5) from error
        self.ownership.confirm(uid, epoch, image.record.epoch)
        if uid in self._deleting | self._outlived and await self._is_gone(image.record):
            self.ownership.forget(uid)
            raise MemoryDeleted("the memory was deleted")
        actor = Actor(image, working, self._storage, self._models, self._runtime, self._events)
        self._actors[uid] = actor
        self._sizes[uid] = working.size_bytes
        self._uids[image.record.namespace, image.record.name] = uid
        if len(self._uids) > NAMES_MAX:
            del self._uids[next(iter(self._uids))]  # it is looked up again
        self._shrink(keep=uid)
        return actor

    async def _read(self, uid: str, embedding: Embedding) -> tuple[Image, WorkingSet]:
        """What the journal has of a memory, and its working set. Raises Conflict, JournalError."""
        vectors_max = self._runtime.limits.dense_max(embedding.model.dimension)
        working = WorkingSet(embedding, vectors_max)
        image = await self._storage.journal.load_memory(uid, embedding.name, vectors_max, working)
        working.woken(image)
        return image, working

    async def move(self, lately: Callable[[str], Sequence[str]]) -> None:
        """Bring every active memory into the space in force, each in its own order; its streams notice nothing.

        `lately` tells what of a memory the index may not show yet. Whose journal fails meanwhile is read anew anyway.
        """
        if self._activating:  # from now on memories are read in the space in force
            await asyncio.wait(set(self._activating.values()))
        for actor in self.actors():
            if actor.working.embedding is not self._models.embeddings.in_force:
                with contextlib.suppress(EngineError):
                    await actor.run(lambda now: self._moved(now, lately(now.uid)))

    async def _moved(self, actor: Actor, lately: Sequence[str]) -> None:
        embedding, journal = self._models.embeddings.in_force, self._storage.journal
        _, working = await self._read(actor.uid, embedding)
        if working.dense is None and lately:
            working.overlay(await journal.get_vectors(actor.uid, embedding.name, lately))
        working.follow(actor.working)
        actor.working = working
        self._changed.add(actor.uid)

    def handle_lost_actor(self, uid: str, error: Exception) -> None:
        """Forget the memory's failed actor and load the memory again: observations may wait to be stored."""
        actor = self._actors.get(uid)
        if actor is not None and actor.failed is not None:
            self._forget(actor)
            self._unname(actor.working.record)
            self._ended.add(actor)
            self.ownership.distrust(uid)
        if not self._closed and not isinstance(error, (MemoryNotFound, LeaseLost)):
            self._spawn(self._revive(uid, self._pause(uid)))

    def _disowned(self) -> None:
        """The lease is lost: other processes may change every memory from here on."""
        for actor in self.actors():
            actor.fail(LeaseLost("this server lost its lease on the memory; reconnect", retry_after_s=0.1, begun="yes"))

    def revive(self, uid: str) -> None:
        """Activate a memory in which observations wait, in the background and until it succeeds."""
        if uid not in self._reviving:
            self._spawn(self._revive(uid, 0.0))

    def renamed(self, actor: Actor, namespace: str, name: str) -> None:
        """The memory went by these until now."""
        self._uids.pop((namespace, name), None)
        if self._actors.get(actor.uid) is actor:
            self._uids[actor.working.record.namespace, actor.working.record.name] = actor.uid

    def reread(self, uid: str) -> None:
        """What RAM has of the memory may be out of date: end its actor and read again."""
        actor = self._actors.get(uid)
        if actor is not None:
            actor.fail(JournalUnavailable("a write's outcome is unknown; the memory is read again", retry_after_s=0.2))

    def _pause(self, uid: str) -> float:
        """How long to wait before the memory is read again: longer when it fails over and over."""
        now = self._runtime.clock.monotonic_s()
        at, last = self._losses.get(uid, (now, 0.0))
        pause = min(last * 2, REVIVE_PAUSE_MAX_S) if last and now - at < CALM_S else REVIVE_PAUSE_S
        self._losses = {known: loss for known, loss in self._losses.items() if now - loss[0] < CALM_S}
        self._losses[uid] = now, pause
        return pause

    async def _revive(self, uid: str, pause: float) -> None:
        self._reviving.add(uid)
        try:
            await self._activate_at_last(uid, pause)
        finally:
            self._reviving.discard(uid)

    async def _activate_at_last(self, uid: str, pause: float) -> None:
        while True:
            await asyncio.sleep(pause)
            try:
                await self.activate(uid)
            except JournalUnavailable as error:
                log.warning("not_revived_yet", memory=uid, error=error)
                pause = min(max(pause * 2, REVIVE_PAUSE_S), REVIVE_PAUSE_MAX_S)
            except EngineError as error:
                log.info("not_revived", memory=uid, error=error)
                return
            else:
                return

    @contextlib.contextmanager
    def deleting(self, record: MemoryRecord) -> Iterator[None]:
        """While the journal deletes it: from its transaction on the name is free, long before the deletion returns."""
        self._deleting.add(record.uid)
        try:
            yield
        finally:
            self._deleting.discard(record.uid)
            self._unname(record)  # also where it failed: it may have happened
            if record.uid in self._activating:
                self._outlived.add(record.uid)

    def deleted(self, record: MemoryRecord) -> None:
        """The memory is gone from the journal."""
        actor = self._actors.get(record.uid)
        if actor is not None:
            actor.gone()
        if record.uid not in self._activating:  # which finds out by itself
            self.ownership.forget(record.uid)

    async def _is_gone(self, record: MemoryRecord) -> bool:
        now = await self._storage.journal.get_memory(record.namespace, record.name)
        return now is None or now.uid != record.uid

    async def close(self) -> None:
        """End every actor."""
        self._closed = True
        for task in [*self._background, *self._activating.values()]:
            task.cancel()
        await asyncio.gather(*(actor.stop() for actor in self.actors()))
        self._actors.clear()
        self._sizes.clear()
        self._ended.clear()

    async def shrink(self) -> None:
        """Memories grow while they are active: measure them, and hold the bounds again. The one used last stays.

        Those that have ended leave for good once the streams and calls that held them have ended, too.
        """
        for actor in [one for one in self._ended if not one.in_use]:
            self._ended.discard(actor)
            self._spawn(actor.retire())
        changed = self._changed
        # These change without being asked for again: by their streams, and when the index has got their latest.
        self._changed = {actor.uid for actor in self.actors() if actor.in_use or actor.working.fresh}
        for number, uid in enumerate(changed | self._changed, 1):
            if uid in self._actors:
                self._sizes[uid] = self._actors[uid].working.size_bytes
            if number % MEASURED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if self._actors:
            self._shrink(keep=next(reversed(self._actors)))

    def _shrink(self, keep: str) -> None:
        """Evict idle actors, least recently used first, until the bounds hold (or all that is left is in use)."""
        limits = self._runtime.limits
        total = sum(self._sizes.values())
        for actor in list(self._actors.values()):
            if len(self._actors) <= limits.active_memories_max and total <= limits.active_bytes_max:
                break
            if actor.uid != keep and self._evictable(actor):
                total -= self._sizes[actor.uid]
                self._evict(actor)

    def _settle(self) -> None:
        """After a use: if all were in use when the last one came, there may be one to evict by now."""
        if len(self._actors) > self._runtime.limits.active_memories_max:
            idle = next(filter(self._evictable, self._actors.values()), None)
            if idle is not None:
                self._evict(idle)

    def _evictable(self, actor: Actor) -> bool:
        return actor.idle and not self._wanted[actor.uid]

    def _evict(self, actor: Actor) -> None:
        self._forget(actor)
        if self.ownership.shared:
            self._unname(actor.working.record)
        self._spawn(self._retire(actor))

    async def _retire(self, actor: Actor) -> None:
        await actor.retire()
        if actor.uid not in self._actors and actor.uid not in self._activating:
            await self.ownership.release(actor.uid)

    def _forget(self, actor: Actor) -> None:
        del self._actors[actor.uid]
        del self._sizes[actor.uid]

    def _unname(self, record: MemoryRecord) -> None:
        """The name may be another memory's by now."""
        if self._uids.get((record.namespace, record.name)) == record.uid:
            del self._uids[record.namespace, record.name]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
