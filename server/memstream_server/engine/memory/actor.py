"""The actor of one active memory: decides received observations group by group, commits, then updates the working set.

Rule 1. Every change of the memory is decided and committed under `_deciding`, one decision at a time.
Rule 2. Observations are decided in the order of receipt, which ingest.py fixes before they arrive here.
Rule 3. If a commit is refused, or its outcome is unknown, the actor ends: its sessions fail with a retryable error, and
the registry loads the memory again from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from memstream_server.core.events import EventType, Purpose
from memstream_server.core.tiers import settle_held
from memstream_server.core.transition import Transition
from memstream_server.engine.errors import (
    EngineError,
    JournalUnavailable,
    MemoryDeleted,
    ShuttingDown,
    namespace_full,
    write_error,
)
from memstream_server.engine.memory.decide import decide_observations, effective_policy, jobs_of
from memstream_server.engine.memory.decision import Decision, account_of, commit_of
from memstream_server.engine.memory.enrich import EnrichedFragment
from memstream_server.engine.memory.known_fragments import read_known
from memstream_server.engine.memory.producers import Batch, Producers
from memstream_server.engine.memory.receipts import observations_in
from memstream_server.engine.memory.related import find_related, settle_suspicions
from memstream_server.engine.memory.superseding import settle_decision
from memstream_server.engine.memory.working_set import UNSHOWN_MAX, WorkingSet
from memstream_server.engine.runtime.call_context import Origin, capture_origin, empty_origin, paid_by, working_for
from memstream_server.ports.journal.errors import (
    AlreadyExists,
    NamespaceFull,
    OutcomeUnknown,
    PreconditionFailed,
    StaleWrite,
    WriteRefused,
)
from memstream_server.ports.journal.reading import LoadedMemory
from memstream_server.ports.journal.records import Recorded
from memstream_server.ports.journal.writing import Outcome

if TYPE_CHECKING:
    from memstream_server.engine.runtime.dependencies import EngineEvents, EngineModels, Runtime, Storage
    from memstream_server.ports.models import Account

log = structlog.get_logger(__name__)

STORAGE_RETRY_S = 5.0
"""Pause before a commit is repeated after the disk was full; clients get it as their retry delay."""

Decide = Callable[["Actor"], "Decision | Awaitable[Decision | None] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A decision that does not come from observations, and the future of its caller."""

    decide: Decide
    done: asyncio.Future[int]
    origin: Origin


class _Prepared(Struct, frozen=True, eq=False):
    batches: tuple[Batch, ...]
    gathered: tuple[EnrichedFragment, ...]
    account: Account

    @property
    def origin(self) -> Origin:
        """The origin of the first batch, if they come from several calls."""
        return self.batches[0].origin


class Actor:
    """The owner of one active memory. The registry creates it after the load; `stop` or a failed commit ends it."""

    def __init__(
        self,
        loaded: LoadedMemory,
        working: WorkingSet,
        storage: Storage,
        models: EngineModels,
        runtime: Runtime,
        events: EngineEvents,
    ) -> None:
        self.working = working
        self.failed: EngineError | None = None
        self._uses = 0
        self.storage = storage
        self.models = models
        self.runtime = runtime
        self._events = events
        self._deciding = asyncio.Lock()
        self._pending: deque[Batch] = deque()
        self._more = asyncio.Event()
        self._inbox: asyncio.Queue[_Prepared | _Work] = asyncio.Queue()
        self._held_back: deque[_Prepared] = deque()
        """Items taken from the inbox while another one waited for disk space."""
        self._prepare_slots = asyncio.Semaphore(2)
        self._revised = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        """The loops, once there is something for them: most activations are for a recall or a small batch."""
        self.producers = Producers(loaded, runtime)
        """What `ingest.py` has numbered and ordered before it came to `queue_batch`."""
        for receipt in loaded.pending:  # of an earlier process, which did not store them
            self.queue_batch(Batch(receipt, self.producers.by_name.get(receipt.producer)))

    # ---- state
    @property
    def uid(self) -> str:
        return self.working.record.uid

    @property
    def revision(self) -> int:
        return self.working.record.revision

    @property
    def is_idle(self) -> bool:
        """Whether an eviction would interrupt nothing."""
        return self.producers.is_idle and not (self._inbox.qsize() or self._uses or self._deciding.locked())

    @property
    def in_use(self) -> bool:
        """Whether a call or a stream uses it, or the journal still owes it an answer."""
        return bool(self._uses) or self.producers.is_held

    @contextlib.contextmanager
    def keep_active(self) -> Iterator[None]:
        """Prevent eviction during the block."""
        self.begin_use()
        try:
            yield
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Prevent eviction until `end_use`."""
        self._uses += 1

    def end_use(self) -> None:
        """Undo one `begin_use`."""
        self._uses -= 1

    async def wait_for_revision(self, revision: int) -> None:
        """Wait until the memory is at `revision` or later."""
        while self.revision < revision:
            self.raise_if_failed()
            revised = self._revised
            await revised.wait()

    async def write_image(self, ticket: int | None) -> None:
        """Once it has ended, write the memory's image. One that failed meanwhile does not know its revision."""
        if ticket is not None and isinstance(self.failed, ShuttingDown):
            await self.working.write_image(ticket)

    # ---- deciding
    def queue_batch(self, batch: Batch) -> None:
        """Decide this received batch after all earlier ones."""
        self.producers.backlog += batch.size
        self.producers.unstored[batch.receipt.position] = batch
        self._pending.append(batch)
        self._more.set()
        self._begin_loops()

    async def store_at_once(self, batches: tuple[Batch, ...]) -> None:
        """Decide and commit batches that the journal has not received; returns when they are stored.

        The caller ensures that no received batch waits to be stored, and that none is received meanwhile. Raises
        JournalError.
        """
        async with self._deciding:
            with paid_by(batches[0].origin):
                prepared = await self._prepare_batches(batches)
                outcomes, decision = await self._decide_batches(prepared)
                await self._commit_decision(decision)
        self.producers.mark_stored(batches, outcomes, self.revision)

    async def run(self, decide: Decide) -> int:
        """Decide in the memory's order; returns the revision after it.

        `decide` may read the journal, which does not change meanwhile, but must not call a model. If it returns None,
        nothing changes. Raises the errors of `decide`, or the error that ended the actor.
        """
        self.raise_if_failed()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Work(decide, done, capture_origin()))
        self._begin_loops()
        return await done

    def _begin_loops(self) -> None:
        if not self._tasks and self.failed is None:
            loops = self._prepare_loop(), self._decide_loop()
            self._tasks = [asyncio.create_task(work, context=empty_origin()) for work in loops]

    async def _prepare_loop(self) -> None:
        try:
            while True:
                await self._prepare_slots.acquire()
                while not self._pending:
                    self._more.clear()
                    await self._more.wait()
                batches = self._next_group()
                with working_for(batches[0].origin):
                    self._inbox.put_nowait(await self._prepare_batches(batches))
        except Exception:
            log.exception("prepare_failed", memory=self.uid)
            self.fail(JournalUnavailable("observations could not be prepared: try again", retry_after_s=1.0))

    async def _prepare_batches(self, batches: tuple[Batch, ...]) -> _Prepared:
        working = self.working
        account = account_of(working.record)
        gathered = await observations_in(batches, self.models, working.record, account, working.embedding)
        return _Prepared(batches, tuple(gathered), account)

    def _next_group(self) -> tuple[Batch, ...]:
        group = [self._pending.popleft()]
        size = group[0].size
        while self._pending and size + self._pending[0].size <= self.runtime.limits.decide_max:
            group.append(self._pending.popleft())
            size += group[-1].size
        return tuple(group)

    async def _decide_loop(self) -> None:
        item: _Prepared | _Work | None = None
        try:
            while True:
                item = self._held_back.popleft() if self._held_back else await self._inbox.get()
                with working_for(item.origin):
                    async with self._deciding:
                        if isinstance(item, _Work):
                            await self._run_work(item)
                        else:
                            await self._store_batches(item)
        except (StaleWrite, OutcomeUnknown):
            self.fail(JournalUnavailable("the memory is loaded again: try again", retry_after_s=0.2))
        except Exception:
            log.exception("decide_failed", memory=self.uid)
            self.fail(JournalUnavailable("observations could not be stored: try again", retry_after_s=1.0))
        finally:
            if isinstance(item, _Work):  # an item that was taken from the inbox and waited for `store_at_once`
                _set_error(item.done, self._ending_error())

    async def _run_work(self, work: _Work) -> None:
        try:
            deciding = work.decide(self)
            decision = await deciding if inspect.isawaitable(deciding) else deciding
            if decision is not None:
                await self._commit_decision(decision)
        except EngineError as error:
            _set_error(work.done, error)
        except NamespaceFull as error:
            _set_error(work.done, namespace_full(error))
        except WriteRefused as error:
            _set_error(work.done, write_error(error))
        except PreconditionFailed as error:  # of a conversation; the caller knows what it says
            _set_error(work.done, error)
        except AlreadyExists:
            text = "another fragment has been given this external_id: try again"
            _set_error(work.done, JournalUnavailable(text, retry_after_s=0.2))
        except BaseException:
            _set_error(work.done, JournalUnavailable("the write's outcome is unknown; read again", retry_after_s=0.2))
            raise
        else:
            if not work.done.done():
                work.done.set_result(self.revision)

    async def _store_batches(self, prepared: _Prepared) -> None:
        while True:
            try:
                outcomes, decision = await self._decide_batches(prepared)
                await self._commit_decision(decision)
                break
            except WriteRefused as error:  # the transaction changed nothing
                log.warning("storage_refuses_writes", memory=self.uid, error=error)
                await self._wait_for_disk_space()  # retries: a received batch must be stored
        self._prepare_slots.release()
        self.producers.mark_stored(prepared.batches, outcomes, self.revision)

    async def _decide_batches(self, prepared: _Prepared) -> tuple[dict[int, Outcome], Decision]:
        known = await read_known(self.working, prepared.gathered, self.storage)
        wanted = [one for batch in prepared.batches if batch.receipt.related for one in batch.receipt.fragments]
        related = (
            await find_related(self.working, wanted, prepared.gathered, self.storage, self.models.analyzer)
            if wanted
            else {}
        )
        decision, outcomes = await decide_observations(
            self.working, prepared.batches, prepared.gathered, known, self.models, self.runtime, related
        )
        return outcomes, decision.with_cost(prepared.account, Purpose.IMPORTANCE)

    async def _wait_for_disk_space(self) -> None:
        """Pause until the disk may have space again, and run other decisions meanwhile: those that add data fail too,
        but a deletion frees space.

        Returns after the first such decision. Batches keep their order.
        """
        item: _Prepared | _Work | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STORAGE_RETRY_S):
                while isinstance(item := await self._inbox.get(), _Prepared):
                    self._held_back.append(item)
        if isinstance(item, _Work):
            await self._run_work(item)

    async def _commit_decision(self, decision: Decision) -> None:
        """Settle what a decision does to chains, merged texts and suspicions, commit it, then show it."""
        working, step = self.working, decision.transition
        if step is not None and (working.links or EventType.SUPERSEDED in [event.type for event in step.events]):
            decision = await settle_decision(working, decision, self.storage, self.runtime)
        if decision.transition is not None and decision.transition.merged:
            decision = await self._embed_merged(decision, decision.transition)
        asked = working.record.policy.conflicts
        if working.suspicions or (asked.suspect and asked.ask_llm):
            decision = await settle_suspicions(working, decision, self.storage, self.models, self.runtime)
        commit = await commit_of(working, decision, self.models, self.runtime)
        if working.outdates_image(commit):  # before: a crash leaves no image of what the commit removes
            working.forget_image()
            await self.storage.images.remove(self.uid, durable=bool(commit.removed or commit.erased))
        started_s = self.runtime.clock.monotonic_s()
        await self.storage.journal.commit(commit)
        self.runtime.metrics.count_commit(self.runtime.clock.monotonic_s() - started_s)
        before = working.state
        working.apply_commit(commit, decision.transition)
        self._events.on_commit(self.uid, Recorded(commit.revision + 1, commit.time_us, commit.events), commit, before)
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()
        if working.pending_rows > UNSHOWN_MAX:
            await working.show_rows()

    async def _embed_merged(self, decision: Decision, transition: Transition) -> Decision:
        """Make terms and vectors for a merged text that became a fragment's content.

        A vector that the client gave for the anchor stays: the server cannot embed in the client's space.
        """
        merged = [fragment for fragment in transition.puts if fragment.id in set(transition.merged)]
        record = self.working.record
        held = (*self.working.state.sensory, *self.working.state.short_term)
        known = {one.fragment.id: one.vector for one in held}
        known |= {id_: part.vector for id_, part in decision.gathered.items()}
        own = {one.id: vector for one in merged if one.own_vector and (vector := known.get(one.id)) is not None}
        importances, space = [fragment.importance for fragment in merged], self.working.embedding
        gathered = await self.models.enricher.enrich_fragments(
            merged, own, importances, record, account_of(record), space
        )
        more = jobs_of(self.working, Transition(transition.state), gathered, self.runtime)
        return replace(decision, jobs=(*decision.jobs, *more)).with_gathered(gathered)

    def settle_tiers(self, change: Decision) -> Decision:
        """Extend a policy change by what it does to the tiers, e.g. drop fragments beyond a smaller capacity."""
        if change.policy is None:
            return change
        policy = effective_policy(change.policy, self.models)
        transition = settle_held(self.working.state, policy, self.working.embedding.model.fitted.similarity_min)
        if not transition.events:
            return change
        jobs = jobs_of(self.working, transition, (), self.runtime)
        return replace(change, transition=transition, jobs=(*change.jobs, *jobs))

    # ---- the end
    def fail(self, error: EngineError) -> EngineError:
        """End the actor after a failure: it decides nothing more, sessions fail with `error`, the registry loads the
        memory again.
        """
        if self.failed is None:
            self.failed = error
            self._end_tasks()
            self._events.on_actor_lost(self.uid, error)
        return self.failed

    async def stop(self) -> None:
        """Wait a short time for the journal's pending answers, then end the actor."""
        if self.failed is None:
            self.failed = ShuttingDown("the server is going away", retry_after_s=0.5)
        await self.producers.wait_for_journal(2.0)
        self._end_tasks()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def retire(self) -> None:
        """As `stop`, for an actor without users: its RAM is freed at once.

        No cycle may be left: the garbage collector looks for one only once in two million containers, and a server
        bounded to one memory of 10,000 fragments had grown to 4 GB after 180 activations.
        """
        await self.stop()
        if self.failed is not None:
            self.failed.__traceback__ = None  # the traceback's frames refer to the actor

    def end_deleted(self) -> None:
        """The memory was deleted: end the actor with MemoryDeleted."""
        self.fail(MemoryDeleted(f"memory {self.working.record.namespace}/{self.working.record.name} was deleted"))

    def _end_tasks(self) -> None:
        current = asyncio.current_task()
        error = self._ending_error()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self.producers.end_sessions(error)
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Work):
                _set_error(item.done, error)
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()

    def _ending_error(self) -> EngineError:
        return self.failed or ShuttingDown("the server is going away", retry_after_s=0.5)

    def raise_if_failed(self) -> None:
        """Raises the error that ended the actor, if it has ended."""
        if self.failed is not None:
            raise self.failed


def _set_error(future: asyncio.Future[int], error: EngineError | PreconditionFailed) -> None:
    if not future.done():
        future.set_exception(error)
