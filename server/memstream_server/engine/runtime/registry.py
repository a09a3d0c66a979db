"""Active memories: loaded on first use, kept while in use, evicted least recently used first.

Rule 1. There is at most one actor per memory: activation is single-flight, and a failed actor is forgotten before the
next one is made.
Rule 2. This process owns every memory that it activates (ownership.py). An evicted memory is released to the other
processes.
Rule 3. An actor is not evicted while it is in use, nor before the call that requested its activation has used it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
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
from memstream_server.ports.journal.errors import JournalError, StaleWrite
from memstream_server.ports.journal.reading import LoadedMemory
from memstream_server.ports.journal.records import MemoryRecord

if TYPE_CHECKING:
    from memstream_server.engine.memory.enrich import Embedding
    from memstream_server.engine.runtime.dependencies import EngineEvents, EngineModels, Runtime, Storage

log = structlog.get_logger(__name__)

REVIVE_PAUSE_S = 0.2
"""First pause before a memory whose actor failed is loaded again: observations may wait in it. Doubles each time."""
REVIVE_PAUSE_MAX_S = 30.0
MEASURED_AT_ONCE = 8
"""Working sets measured per event-loop iteration, about 0.25 ms."""
RECORDS = 500
"""Records of memories that are read at once."""
NAMES_MAX = 65_536
"""Names kept of memories that are no longer active: a few MB."""
CREATED_MAX = 256
"""Memories known to be new."""
IMAGE_MIN = 1_000
"""Fragments of the smallest memory of which an image is written: its rows take 15 ms of CPU."""
IMAGE_WAIT_S = 0.1
"""How long an activation waits for the memory's image that is being written; 10,000 fragments' rows take as long."""
IMAGES_AT_STOP_S = 5.0
"""How long a stop may begin to write images; a memory of 10,000 fragments takes 15 ms."""
CALM_S = 60.0
"""Time without a failure after which the pause starts at its first value again."""


class Registry:
    """All active memories of this process and their actors."""

    def __init__(
        self, storage: Storage, models: EngineModels, runtime: Runtime, ownership: Ownership, events: EngineEvents
    ) -> None:
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._events = events
        self._actors: OrderedDict[str, Actor] = OrderedDict()
        self._sizes: dict[str, int] = {}
        """Bytes of each working set when last measured."""
        self._size_bytes = 0
        """Their sum, kept: an activation must not cost more with many active memories."""
        self._changed: set[str] = set()
        """Memories used or changed since they were last measured, and all with work left: only these are examined."""
        self._uids: dict[tuple[str, str], str] = {}
        """Uids by name, of active memories. If the journal is not shared, also of evicted ones: no other process can
        rename or delete them.
        """
        self._created: dict[str, MemoryRecord] = {}
        """The newest memories that were never active: nothing but an actor of this process writes into them."""
        self._activating: dict[str, asyncio.Task[Actor]] = {}
        self.ownership = ownership
        ownership.on_loss(self._end_all_actors)
        self._wanted: Counter[str] = Counter()
        """How many calls wait for each activation."""
        self._deleting: set[str] = set()
        """Memories with a deletion in progress: their RAM state is checked against the journal."""
        self._outlived: set[str] = set()
        """Memories whose deletion ended during an activation, which may have loaded an older state."""
        self._ended: set[Actor] = set()
        """Failed actors that streams may still refer to."""
        self._losses: dict[str, tuple[float, float]] = {}
        """Per memory: when its actor failed last, and the pause that followed."""
        self._reviving: set[str] = set()
        self._writing: dict[str, asyncio.Task[None]] = {}
        """Evictions that write an image."""
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def size_bytes(self) -> int:
        """Approximate size of all working sets; those in use are measured periodically."""
        return self._size_bytes

    def _set_size(self, uid: str, size: int) -> None:
        self._size_bytes += size - self._sizes.get(uid, 0)
        self._sizes[uid] = size

    def list_actors(self) -> list[Actor]:
        """The active memories' actors."""
        return list(self._actors.values())

    def list_busy(self) -> list[Actor]:
        """The actors that may have work left or an open stream."""
        return [self._actors[uid] for uid in self._changed if uid in self._actors]

    def mark_changed(self, uid: str) -> None:
        """The memory has a new revision."""
        self._changed.add(uid)

    def peek(self, uid: str) -> Actor | None:
        """The actor if the memory is active. Does not count as a use."""
        return self._actors.get(uid)

    async def list_memories(self) -> AsyncIterator[MemoryRecord]:
        """The records of all memories, active or not, in order of their uids."""
        after = ""
        while page := await self._storage.journal.all_memories(after, RECORDS):
            for record in page:
                yield record
            after = page[-1].uid

    async def read_record(self, namespace: str, name: str) -> MemoryRecord:
        """The record of a memory, from RAM if it is active. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        if uid is not None and uid in self._actors and uid not in self._deleting and self.ownership.is_valid():
            return self._actors[uid].working.record
        if (record := await self._storage.journal.get_memory(namespace, name)) is None:
            raise MemoryNotFound(
                f"there is no memory {namespace}/{name}; create it first", namespace=namespace, memory=name
            )
        return record

    def use(self, namespace: str, name: str) -> AbstractAsyncContextManager[Actor]:
        """The memory's actor, activated if necessary and kept active during the block. Raises MemoryNotFound."""
        return _Use(self, namespace, name)

    def use_uid(self, uid: str) -> AbstractAsyncContextManager[Actor]:
        """As `use`, by uid."""
        return _Use(self, uid=uid)

    async def find_uid(self, namespace: str, name: str) -> str:
        """The uid of a memory that is not being deleted. Raises MemoryNotFound."""
        uid = self._uids.get((namespace, name))
        if uid is None or uid in self._deleting:
            uid = (await self.read_record(namespace, name)).uid
        return uid

    def record_name(self, record: MemoryRecord, *, created: bool = False) -> None:
        """The memory has this name, and no read is needed to find it; if it was just created, none to activate it."""
        self._uids[record.namespace, record.name] = record.uid
        if len(self._uids) > NAMES_MAX:
            del self._uids[next(iter(self._uids))]  # a later call reads it again
        if created:
            self._created[record.uid] = record
            for uid in list(self._created)[:-CREATED_MAX]:
                del self._created[uid]

    async def begin_use(self, uid: str) -> Actor:
        """The actor, kept active until `end_use`."""
        if (actor := self._actors.get(uid)) is None:
            self._wanted[uid] += 1
            try:
                actor = await self.activate(uid)
            finally:
                self._wanted[uid] -= 1
                self._wanted += Counter()  # removes zero counts
        actor.begin_use()
        if self._actors.get(uid) is actor:
            self._actors.move_to_end(uid)
            self._changed.add(uid)
        return actor

    def end_use(self, actor: Actor) -> None:
        """Let the actor be evicted again."""
        actor.end_use()
        self._evict_one()

    async def activate(self, uid: str) -> Actor:
        """The memory's actor, activated if necessary. Raises MemoryNotFound if the memory was deleted."""
        if self._closed:
            raise ShuttingDown("the server is going away", retry_after_s=0.5)
        if uid in self._actors:
            return self._actors[uid]
        if (task := self._activating.get(uid)) is None:
            task = self._activating[uid] = asyncio.create_task(self._activate_memory(uid))
            task.add_done_callback(lambda done: self._finish_activation(uid, done))
        # Does not await the task itself: a cancelled caller must not cancel it for the others.
        await asyncio.wait({task})
        if task.cancelled():
            raise ShuttingDown("the server is going away", retry_after_s=0.5)
        return task.result()

    def _finish_activation(self, uid: str, task: asyncio.Task[Actor]) -> None:
        del self._activating[uid]
        self._outlived.discard(uid)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: an activation that no caller waits for must leave no warning

    async def _activate_memory(self, uid: str) -> Actor:
        if uid in self._writing:
            await asyncio.wait({self._writing[uid]}, timeout=IMAGE_WAIT_S)
        try:
            epoch = await self.ownership.take_memory(uid)
            embedding = self._models.embeddings.in_force
            loaded, working = await self._read_memory(uid, embedding)
            await self._models.prepare_language(loaded.record.policy)
        except StaleWrite as error:
            self.ownership.forget_memory(uid)
            raise MemoryDeleted("the memory was deleted") from error
        except JournalError as error:
            raise JournalUnavailable("the memory could not be read: try again", retry_after_s=0.5) from error
        self.ownership.confirm_memory(uid, epoch, loaded.record.epoch)
        if working.image_revision >= 0:
            self._storage.images.set_epoch(uid, loaded.record.epoch)
        if uid in self._deleting | self._outlived and await self._is_gone(loaded.record):
            self.ownership.forget_memory(uid)
            raise MemoryDeleted("the memory was deleted")
        actor = Actor(loaded, working, self._storage, self._models, self._runtime, self._events)
        self._actors[uid] = actor
        self._set_size(uid, working.size_bytes)
        self._changed.add(uid)
        self.record_name(loaded.record)
        self._evict_until_bounded(keep=uid)
        return actor

    async def _read_memory(self, uid: str, embedding: Embedding) -> tuple[LoadedMemory, WorkingSet]:
        """The memory as the journal has it, and its working set. Raises StaleWrite, JournalError."""
        limits, journal = self._runtime.limits, self._storage.journal
        vectors_max = limits.dense_max(embedding.model.dimension)
        working = WorkingSet(
            embedding, vectors_max, self._models.analyzer, self._storage.images, newest_vectors=limits.newest_vectors
        )
        created = self._created.pop(uid, None)
        try:
            if created is not None:
                working.begin(created, all_vectors=True)
                loaded = LoadedMemory.of_created(created)
            else:
                loaded = await journal.load_memory(uid, embedding.name, vectors_max, working)
        except ValueError:  # the analyzer lacks the language: prepare_language says so as an engine error
            await self._models.prepare_language(working.record.policy)
            raise
        working.finish_load(loaded)
        if working.dense is None and limits.newest_vectors:
            working.overlay_vectors(await journal.get_vectors(uid, embedding.name, working.list_newest()))
        return loaded, working

    async def move_to_space(self, lately: Callable[[str], Sequence[str]]) -> None:
        """Bring every active memory into the space in force, each in its own order of changes. Its streams continue.

        `lately` returns the fragments of a memory that the index may not show yet. A memory with a failing journal is
        loaded again anyway.
        """
        if self._activating:  # later activations load memories in the space in force
            await asyncio.wait(set(self._activating.values()))
        for actor in self.list_actors():
            if actor.working.embedding is not self._models.embeddings.in_force:
                with contextlib.suppress(EngineError):
                    await actor.run(lambda now: self._move_actor(now, lately(now.uid)))

    async def load_again(self, uid: str) -> None:
        """Read an active memory from the journal again, in its own order of changes. Its streams continue."""
        if uid in self._activating:
            await asyncio.wait({self._activating[uid]})
        actor = self._actors.get(uid)
        if actor is not None:
            await actor.run(lambda now: self._move_actor(now, ()))

    async def _move_actor(self, actor: Actor, lately: Sequence[str]) -> None:
        embedding, journal = self._models.embeddings.in_force, self._storage.journal
        _, working = await self._read_memory(actor.uid, embedding)
        if working.dense is None and lately:
            working.overlay_vectors(await journal.get_vectors(actor.uid, embedding.name, lately))
        working.take_over(actor.working)
        actor.working = working
        self._changed.add(actor.uid)

    def handle_lost_actor(self, uid: str, error: Exception) -> None:
        """Forget the memory's failed actor and load the memory again: observations may wait to be stored."""
        actor = self._actors.get(uid)
        if actor is not None and actor.failed is not None:
            self._forget_actor(actor)
            self._forget_name(actor.working.record)
            self._ended.add(actor)
            self.ownership.distrust_epoch(uid)
        if not self._closed and not isinstance(error, (MemoryNotFound, LeaseLost)):
            self._spawn_task(self._revive_later(uid, self._revive_pause_s(uid)))

    def _end_all_actors(self) -> None:
        """The lease is lost: from now on other processes may change every memory."""
        for actor in self.list_actors():
            actor.fail(LeaseLost("this server lost its lease on the memory; reconnect", retry_after_s=0.1, begun="yes"))

    def revive_memory(self, uid: str) -> None:
        """Activate a memory in the background and retry until it succeeds, because observations wait in it."""
        if uid not in self._reviving:
            self._spawn_task(self._revive_later(uid, 0.0))

    def record_rename(self, actor: Actor, namespace: str, name: str) -> None:
        """The memory had this name until now."""
        self._uids.pop((namespace, name), None)
        if self._actors.get(actor.uid) is actor:
            self._uids[actor.working.record.namespace, actor.working.record.name] = actor.uid

    def reread_memory(self, uid: str) -> None:
        """The working set may be out of date: end the actor and load the memory again."""
        actor = self._actors.get(uid)
        if actor is not None:
            text = "a write's outcome is unknown; the memory is loaded again"
            actor.fail(JournalUnavailable(text, retry_after_s=0.2))

    def _revive_pause_s(self, uid: str) -> float:
        """Pause before the memory is loaded again; doubles while it fails repeatedly."""
        now = self._runtime.clock.monotonic_s()
        at, last = self._losses.get(uid, (now, 0.0))
        pause = min(last * 2, REVIVE_PAUSE_MAX_S) if last and now - at < CALM_S else REVIVE_PAUSE_S
        self._losses = {known: loss for known, loss in self._losses.items() if now - loss[0] < CALM_S}
        self._losses[uid] = now, pause
        return pause

    async def _revive_later(self, uid: str, pause: float) -> None:
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
                log.warning("memory_not_reloaded_yet", memory=uid, error=error)
                pause = min(max(pause * 2, REVIVE_PAUSE_S), REVIVE_PAUSE_MAX_S)
            except EngineError as error:
                log.info("memory_not_reloaded", memory=uid, error=error)
                return
            else:
                return

    @contextlib.contextmanager
    def mark_deleting(self, record: MemoryRecord) -> Iterator[None]:
        """Mark the memory as being deleted. Its name is free after the journal's transaction, long before the deletion
        returns.
        """
        self._deleting.add(record.uid)
        self._created.pop(record.uid, None)
        try:
            yield
        finally:
            self._deleting.discard(record.uid)
            self._forget_name(record)  # also after a failure: the deletion may have happened
            if record.uid in self._activating:
                self._outlived.add(record.uid)

    def forget_deleted(self, record: MemoryRecord) -> None:
        """The journal has deleted the memory."""
        actor = self._actors.get(record.uid)
        if actor is not None:
            actor.end_deleted()
        if record.uid not in self._activating:  # the activation detects it
            self.ownership.forget_memory(record.uid)

    async def _is_gone(self, record: MemoryRecord) -> bool:
        now = await self._storage.journal.get_memory(record.namespace, record.name)
        return now is None or now.uid != record.uid

    async def close(self) -> None:
        """End all actors, and write the images of changed memories for a bounded time."""
        self._closed = True
        for task in [*self._background, *self._activating.values()]:
            task.cancel()
        tickets = [(actor, self._announce_image(actor)) for actor in reversed(self._actors.values())]
        await asyncio.gather(*(actor.stop() for actor in self.list_actors()))
        until_s = self._runtime.clock.monotonic_s() + IMAGES_AT_STOP_S
        for actor, ticket in tickets:
            if self._runtime.clock.monotonic_s() < until_s:
                await actor.write_image(ticket)
        self._actors.clear()
        self._sizes.clear()
        self._size_bytes = 0
        self._ended.clear()

    async def enforce_bounds(self) -> None:
        """Measure the working sets, which grow with use, and enforce the bounds. Keeps the memory used last.

        Retires failed actors once no stream or call uses them.
        """
        for ended in [one for one in self._ended if not one.in_use]:
            self._ended.discard(ended)
            self._spawn_task(ended.retire())
        for number, uid in enumerate(tuple(self._changed), 1):
            if (actor := self._actors.get(uid)) is not None:
                self._set_size(uid, actor.working.size_bytes)
            # Others change without a new call: through streams, and when the index has their latest vectors.
            if actor is None or (actor.is_idle and not actor.working.has_overlay):
                self._changed.discard(uid)
            if number % MEASURED_AT_ONCE == 0:
                await asyncio.sleep(0)
        if self._actors:
            self._evict_until_bounded(keep=next(reversed(self._actors)))

    def _evict_until_bounded(self, keep: str) -> None:
        """Evict idle actors, least recently used first, until the bounds hold or all others are in use."""
        limits = self._runtime.limits
        while len(self._actors) > limits.active_memories_max or self._size_bytes > limits.active_bytes_max:
            others = (one for one in self._actors.values() if one.uid != keep and self._is_evictable(one))
            if (idle := next(others, None)) is None:
                break
            self._evict_actor(idle)

    def _evict_one(self) -> None:
        """Evict one idle actor after a use, if there are too many: all may have been in use when the last one was
        activated.
        """
        if len(self._actors) > self._runtime.limits.active_memories_max:
            idle = next(filter(self._is_evictable, self._actors.values()), None)
            if idle is not None:
                self._evict_actor(idle)

    def _is_evictable(self, actor: Actor) -> bool:
        return actor.is_idle and not self._wanted[actor.uid]

    def _evict_actor(self, actor: Actor) -> None:
        self._forget_actor(actor)
        if self.ownership.shared:
            self._forget_name(actor.working.record)
        uid, ticket = actor.uid, self._announce_image(actor)
        retiring = self._spawn_task(self._retire_actor(actor, ticket))
        if ticket is not None:
            self._writing[uid] = retiring
            retiring.add_done_callback(lambda done: self._forget_writing(uid, done))

    def _forget_writing(self, uid: str, done: asyncio.Task[None]) -> None:
        if self._writing.get(uid) is done:
            del self._writing[uid]

    def _announce_image(self, actor: Actor) -> int | None:
        """The ticket of an image that the actor's end should write; None if it should write none."""
        working, images = actor.working, self._storage.images
        has_image = working.image_revision == working.record.revision and images.has(actor.uid)
        if actor.failed is not None or actor.uid in self._deleting or has_image:
            return None
        return images.announce(actor.uid) if working.fragment_count >= IMAGE_MIN else None

    async def _retire_actor(self, actor: Actor, ticket: int | None) -> None:
        await actor.retire()
        await actor.write_image(ticket)
        if actor.uid not in self._actors and actor.uid not in self._activating:
            await self.ownership.release_memory(actor.uid)

    def _forget_actor(self, actor: Actor) -> None:
        del self._actors[actor.uid]
        self._size_bytes -= self._sizes.pop(actor.uid)

    def _forget_name(self, record: MemoryRecord) -> None:
        """The name may belong to another memory by now."""
        if self._uids.get((record.namespace, record.name)) == record.uid:
            del self._uids[record.namespace, record.name]

    def _spawn_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


class _Use:
    """Context manager of an actor in use. A class, because generators cost each call 10 µs more."""

    __slots__ = ("_actor", "_name", "_registry", "_uid")

    def __init__(self, registry: Registry, namespace: str = "", name: str = "", uid: str = "") -> None:
        self._registry = registry
        self._name = namespace, name
        self._uid = uid

    async def __aenter__(self) -> Actor:
        uid = self._uid or await self._registry.find_uid(*self._name)
        self._actor = await self._registry.begin_use(uid)
        return self._actor

    async def __aexit__(self, *error: object) -> None:
        self._registry.end_use(self._actor)
