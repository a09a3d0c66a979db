"""One active memory's actor: decides what was received one group at a time, commits, then shows it.

Rule 1. What changes the memory is decided and committed under `_deciding`, one decision after another.
Rule 2. What is observed is decided in the order of its receipt, which is fixed before it comes here (receiving.py).
Rule 3. After a commit that was refused or whose outcome is unknown the actor is finished: its sessions end with a
retryable error and the memory is read again from the journal (see registry.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from memstream_server.core.events import Purpose
from memstream_server.core.tiers import settle_held
from memstream_server.core.transition import Transition
from memstream_server.engine.errors import (
    DISK_FULL,
    EngineError,
    JournalUnavailable,
    MemoryDeleted,
    ShuttingDown,
    StorageIsFull,
    namespace_full,
)
from memstream_server.engine.memory.build_commit import commit_of
from memstream_server.engine.memory.decide import TURN, decide_observations, effective_policy, jobs_of
from memstream_server.engine.memory.decision import Decision, account_of
from memstream_server.engine.memory.enrich import Gathered
from memstream_server.engine.memory.ingest import STORAGE_RETRY_S, Receiving
from memstream_server.engine.memory.known_fragments import read_known
from memstream_server.engine.memory.receipts import Batch, observations_in
from memstream_server.engine.memory.working_set import WorkingSet
from memstream_server.engine.runtime.call_context import Origin, here, nowhere, working_for
from memstream_server.ports.journal.errors import AlreadyExists, Conflict, NamespaceFull, OutcomeUnknown, StorageFull
from memstream_server.ports.journal.reading import Image
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.writing import Commit, Outcome

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import EngineEvents, EngineModels, Runtime, Storage
    from memstream_server.ports.models import Account

log = structlog.get_logger(__name__)

Decide = Callable[["Actor"], "Decision | Awaitable[Decision | None] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A decision other than observing, with who waits for it."""

    decide: Decide
    done: asyncio.Future[int]
    origin: Origin


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    batches: tuple[Batch, ...]
    gathered: tuple[Gathered, ...]
    account: Account

    @property
    def origin(self) -> Origin:
        """Of the first, where they come from several calls."""
        return self.batches[0].origin


class Actor:
    """The owner of one active memory. Created by the registry from an image, ended by `stop` or by a failed commit."""

    def __init__(
        self,
        image: Image,
        working: WorkingSet,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        events: EngineEvents,
    ) -> None:
        self.working = working
        self.failed: EngineError | None = None
        self._uses = 0
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._events = events
        self._deciding = asyncio.Lock()
        self._pending: deque[Batch] = deque()
        self._more = asyncio.Event()
        self._inbox: asyncio.Queue[_Prepared | _Work] = asyncio.Queue()
        self._held_back: deque[_Prepared] = deque()
        """Taken from the inbox while another one waited for room on the disk."""
        self._room = asyncio.Semaphore(2)
        self._revised = asyncio.Event()
        self.receiving = Receiving(image, self, storage, models, runtime)
        """The way in; what it has received comes back by `store`."""
        self.receiving.resume(image.pending)
        self._tasks = [
            asyncio.create_task(work, context=nowhere()) for work in (self._prepare_loop(), self._decide_loop())
        ]

    # ---- what it is
    @property
    def uid(self) -> str:
        return self.working.record.uid

    @property
    def revision(self) -> int:
        return self.working.record.revision

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that an eviction would cut off."""
        return self.receiving.idle and not (self._inbox.qsize() or self._uses or self._deciding.locked())

    @property
    def in_use(self) -> bool:
        """Whether a call or a stream holds it, or something given to the journal is not answered."""
        return bool(self._uses) or self.receiving.held

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Somebody works with it: it is not evicted meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1

    async def revision_reached(self, revision: int) -> None:
        """Waits until the memory is at `revision` or beyond."""
        while self.revision < revision:
            self.raise_if_failed()
            revised = self._revised
            await revised.wait()

    # ---- deciding
    def store(self, batch: Batch) -> None:
        """What was received next is decided after what was received before it."""
        self._pending.append(batch)
        self._more.set()

    async def store_at_once(self, batches: tuple[Batch, ...]) -> None:
        """Decide and commit what the journal has not received; returns when all is stored.

        Nothing received waits to be stored before it, and nothing is received meanwhile. Raises JournalError.
        """
        prepared = await self._prepared(batches)
        async with self._deciding:
            outcomes = await self._decide(prepared)
        self.receiving.stored(batches, outcomes)

    async def run(self, decide: Decide) -> int:
        """Decide in the memory's order; returns the revision after it.

        `decide` may read the journal (nothing changes meanwhile) but asks no model. None from it changes nothing.
        Raises what `decide` raises, or the actor's end.
        """
        self.raise_if_failed()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Work(decide, done, here()))
        return await done

    async def _prepare_loop(self) -> None:
        try:
            while True:
                await self._room.acquire()
                while not self._pending:
                    self._more.clear()
                    await self._more.wait()
                batches = self._next_group()
                with working_for(batches[0].origin):
                    self._inbox.put_nowait(await self._prepared(batches))
        except Exception:
            log.exception("prepare_failed", memory=self.uid)
            self.fail(JournalUnavailable("observations could not be prepared: try again", retry_after_s=1.0))

    async def _prepared(self, batches: tuple[Batch, ...]) -> _Prepared:
        working = self.working
        account = account_of(working.record)
        waits_for_nobody = working.embedding.model.instant and not self._models.gatherer.rates
        count = sum(batch.count for batch in batches)
        async with self._one_turn(count) if waits_for_nobody else contextlib.nullcontext():
            gathered = await observations_in(batches, self._models, working.record, account, working.embedding)
        return _Prepared(batches, tuple(gathered), account)

    def _next_group(self) -> tuple[Batch, ...]:
        group = [self._pending.popleft()]
        size = group[0].count
        while self._pending and size + self._pending[0].count <= self._runtime.limits.decide_max:
            group.append(self._pending.popleft())
            size += group[-1].count
        return tuple(group)

    async def _decide_loop(self) -> None:
        item: _Prepared | _Work | None = None
        try:
            while True:
                item = self._held_back.popleft() if self._held_back else await self._inbox.get()
                with working_for(item.origin):
                    async with self._deciding:
                        if isinstance(item, _Work):
                            await self._work(item)
                        else:
                            await self._store(item)
        except (Conflict, OutcomeUnknown):
            self.fail(JournalUnavailable("the memory is read again: try again", retry_after_s=0.2))
        except Exception:
            log.exception("decide_failed", memory=self.uid)
            self.fail(JournalUnavailable("observations could not be stored: try again", retry_after_s=1.0))
        finally:
            if isinstance(item, _Work):  # one that was taken, and waited for what is stored at once
                _settle(item.done, self._ending())

    async def _work(self, work: _Work) -> None:
        try:
            deciding = work.decide(self)
            decision = await deciding if inspect.isawaitable(deciding) else deciding
            if decision is not None:
                await self._commit(*await self._commit_of(decision))
        except EngineError as error:
            _settle(work.done, error)
        except NamespaceFull as error:
            _settle(work.done, namespace_full(error))
        except StorageFull:
            _settle(work.done, StorageIsFull(DISK_FULL, retry_after_s=STORAGE_RETRY_S))
        except AlreadyExists:
            text = "another fragment was given that external_id meanwhile: try again"
            _settle(work.done, JournalUnavailable(text, retry_after_s=0.2))
        except BaseException:
            _settle(work.done, JournalUnavailable("the write's outcome is unknown; read again", retry_after_s=0.2))
            raise
        else:
            if not work.done.done():
                work.done.set_result(self.revision)

    async def _store(self, prepared: _Prepared) -> None:
        while True:
            try:
                outcomes = await self._decide(prepared)
                break
            except StorageFull as error:  # nothing was changed
                log.warning("storage_full", memory=self.uid, error=error)
                await self._wait_for_room()  # received, so it must be stored
        self._room.release()
        self.receiving.stored(prepared.batches, outcomes)

    async def _decide(self, prepared: _Prepared) -> dict[int, Outcome]:
        async with self._one_turn(len(prepared.gathered)):
            known = await read_known(self.working, prepared.gathered, self._storage)
            decision, outcomes = await decide_observations(
                self.working, prepared.batches, prepared.gathered, known, self._models, self._runtime
            )
            decision = decision.costing(prepared.account, Purpose.IMPORTANCE)
            decision, commit = await self._commit_of(decision)
        await self._commit(decision, commit)
        return outcomes

    def _turn(self) -> AbstractAsyncContextManager[None]:
        return self._runtime.turns.of(self.working.record.namespace)

    def _one_turn(self, count: int) -> AbstractAsyncContextManager[None]:
        """For all that is computed of so few observations; more of them take a turn for every few."""
        return self._turn() if count <= TURN else contextlib.nullcontext()

    async def _wait_for_room(self) -> None:
        """A pause in which what was asked for goes on: what adds is refused as well, and what removes makes room.

        Returns after the first such decision; what else is to be stored keeps its place.
        """
        item: _Prepared | _Work | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORAGE_RETRY_S):
                while isinstance(item := await self._inbox.get(), _Prepared):
                    self._held_back.append(item)
        if isinstance(item, _Work):
            await self._work(item)

    async def _commit_of(self, decision: Decision) -> tuple[Decision, Commit]:
        """What is written, and the decision with all that it makes."""
        decision = await self._revector(decision)
        async with self._turn():
            return decision, commit_of(self.working, decision, self._models, self._runtime)

    async def _commit(self, decision: Decision, commit: Commit) -> None:
        started_s = self._runtime.clock.monotonic_s()
        await self._storage.journal.commit(commit)
        self._runtime.metrics.time_commit(self._runtime.clock.monotonic_s() - started_s)
        async with self._turn():
            self.working.apply(commit, decision)
        self._events.committed(self.uid, Recorded(commit.revision + 1, commit.time_us, commit.events), commit)
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()

    async def _revector(self, decision: Decision) -> Decision:
        """A merged text that became the content is another text: it needs terms and a vector of its own.

        Where the client gave the anchor's vector that one stays: nobody here can embed in the client's space.
        """
        transition = decision.transition
        if transition is None or not transition.merged:
            return decision
        merged = [fragment for fragment in transition.puts if fragment.id in set(transition.merged)]
        record = self.working.record
        held = (*self.working.state.sensory, *self.working.state.short_term)
        known = {one.fragment.id: one.vector for one in held}
        known |= {id_: part.vector for id_, part in decision.gathered.items()}
        own = {one.id: vector for one in merged if one.own_vector and (vector := known.get(one.id)) is not None}
        importances, space = [fragment.importance for fragment in merged], self.working.embedding
        gathered = await self._models.gatherer.gather(merged, own, importances, record, account_of(record), space)
        more = jobs_of(self.working, Transition(transition.state), gathered, self._runtime)
        return replace(decision, jobs=(*decision.jobs, *more)).with_gathered(gathered)

    def settle(self, change: Decision) -> Decision:
        """Bring the tiers within a policy that `change` sets."""
        if change.policy is None:
            return change
        policy = effective_policy(change.policy, self._models)
        transition = settle_held(self.working.state, policy, self.working.embedding.model.similarity_min)
        if not transition.events:
            return change
        jobs = jobs_of(self.working, transition, (), self._runtime)
        return replace(change, transition=transition, jobs=(*change.jobs, *jobs))

    # ---- the end
    def fail(self, error: EngineError) -> EngineError:
        """Finish the actor: nothing more is decided, sessions end with `error`, the registry reads the memory again."""
        if self.failed is None:
            self.failed = error
            self._end()
            self._events.actor_lost(self.uid, error)
        return self.failed

    async def stop(self) -> None:
        """Let what is received be stored where that needs no waiting, then end."""
        if self.failed is None:
            self.failed = ShuttingDown("the server is going away", retry_after_s=0.5)
        await self.receiving.settled(2.0)
        self._end()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def retire(self) -> None:
        """As `stop`, for one that nobody uses any more.

        Its RAM is free at once: the two refer to each other, and the collector looks for such once in two million
        containers. A server with room for one memory of 10,000 had grown to 4 GB after 180 activations.
        """
        await self.stop()
        del self.receiving
        if self.failed is not None:
            self.failed.__traceback__ = None  # the frames of those who were told of it know it, too

    def gone(self) -> None:
        """The memory was deleted."""
        self.fail(MemoryDeleted(f"memory {self.working.record.namespace}/{self.working.record.name} was deleted"))

    def _end(self) -> None:
        current = asyncio.current_task()
        error = self._ending()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self.receiving.end(error)
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Work):
                _settle(item.done, error)
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()

    def _ending(self) -> EngineError:
        return self.failed or ShuttingDown("the server is going away", retry_after_s=0.5)

    def raise_if_failed(self) -> None:
        """Raises what finished the actor, if anything did."""
        if self.failed is not None:
            raise self.failed


def _settle(future: asyncio.Future[int], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)
