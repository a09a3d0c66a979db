"""One active memory's actor: gives order at receipt, decides one group at a time, commits, then shows it.

Rule 1. Everything that changes the memory passes `_decide_loop`, one decision after another.
Rule 2. `submit` gives numbers, ids and positions synchronously, so that order is fixed before anything is awaited.
Rule 3. After a commit that was refused or whose outcome is unknown the actor is finished: its sessions end with a
retryable error and the memory is read again from the journal (see registry.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from memstream_server.core.events import Purpose
from memstream_server.core.tiers import settle
from memstream_server.core.values import Fragment
from memstream_server.engine.decision import (
    Decision,
    account_of,
    commit_of,
    decide_observations,
    effective_policy,
    jobs_of,
)
from memstream_server.engine.errors import (
    BacklogFull,
    EngineError,
    JournalUnavailable,
    MemoryExists,
    MemoryNotFound,
    ProducerSuperseded,
    ShuttingDown,
    StorageIsFull,
)
from memstream_server.engine.gather import Gathered
from memstream_server.engine.intake import Batch, batch_of, observations_in, verify_repeats
from memstream_server.engine.producers import ObserveSession, ProducerState
from memstream_server.engine.requests import NewObservation, Opened, Outcome, Refusal
from memstream_server.engine.working_set import WorkingSet
from memstream_server.ports.journal import (
    AlreadyExists,
    Conflict,
    Image,
    JournalError,
    OutcomeUnknown,
    Recorded,
    StorageFull,
)

if TYPE_CHECKING:
    from memstream_server.engine.dependencies import Dependencies
    from memstream_server.ports.models import Account

log = structlog.get_logger(__name__)

STORAGE_RETRY_S = 5.0
"""Pause before a decision that found the disk full is committed again, and what clients are told."""


Decide = Callable[["Actor"], "Decision | Awaitable[Decision | None] | None"]


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A decision other than observing, with who waits for it."""

    decide: Decide
    done: asyncio.Future[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    batches: tuple[Batch, ...]
    gathered: tuple[Gathered, ...]
    account: Account


class Actor:
    """The owner of one active memory. Created by the registry from an image, ended by `stop` or by a failed commit."""

    def __init__(self, image: Image, working: WorkingSet, dependencies: Dependencies) -> None:
        self.working = working
        self.failed: EngineError | None = None
        self._uses = 0
        self._deciding = False
        self._dependencies = dependencies
        waiting = {receipt.producer for receipt in image.pending}
        self._producers = {  # those with a session, or with something that is not stored
            producer.name: ProducerState(
                producer.name,
                producer.epoch,
                producer.received,
                producer.stored,
                submitted=producer.received,
                revision=image.record.revision,
            )
            for producer in image.producers
            if producer.name in waiting
        }
        self._next_position = image.next_position
        self._backlog = 0
        self._pending: deque[Batch] = deque()
        self._unstored: dict[int, Batch] = {}
        self._more = asyncio.Event()
        self._inbox: asyncio.Queue[_Prepared | _Work] = asyncio.Queue()
        self._held_back: deque[_Prepared] = deque()
        """Taken from the inbox while another one waited for room on the disk."""
        self._room = asyncio.Semaphore(2)
        self._receiving: set[asyncio.Task[None]] = set()
        self._sessions = 0
        self._unnumbered: set[ProducerState] = set()
        self._revised = asyncio.Event()
        for receipt in image.pending:
            self._enqueue(Batch(receipt, self._producers.get(receipt.producer)))
        self._tasks = [asyncio.create_task(self._prepare_loop()), asyncio.create_task(self._decide_loop())]

    # ---- what it is
    @property
    def uid(self) -> str:
        return self.working.record.uid

    @property
    def revision(self) -> int:
        return self.working.record.revision

    @property
    def backlog(self) -> int:
        """Observations between submission and stored."""
        return self._backlog

    @property
    def sessions(self) -> int:
        """Streams and calls that hold a producer open."""
        return self._sessions

    def producers(self) -> list[ProducerState]:
        """Everyone whose observations come in here now, unnumbered calls included."""
        return [*self._producers.values(), *self._unnumbered]

    @property
    def idle(self) -> bool:
        """Whether nothing is under way that an eviction would cut off."""
        waiting = self._backlog or self._inbox.qsize() or self._receiving
        return not (waiting or self._sessions or self._uses or self._deciding)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Somebody works with it: it is not evicted meanwhile."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1

    def unstored(self, ids: Collection[str]) -> bool:
        """Whether one of these was received and is not stored yet."""
        return any(one.id in ids for batch in self._unstored.values() for one in batch.receipt.fragments)

    async def revision_reached(self, revision: int) -> None:
        """Waits until the memory is at `revision` or beyond."""
        while self.revision < revision:
            self._raise_if_failed()
            revised = self._revised
            await revised.wait()

    # ---- the way in
    async def open_session(self, name: str, *, one_call: bool = False) -> ObserveSession:
        """Make this stream the producer's only one. Raises JournalUnavailable when the write fails.

        A producer made for `one_call` is forgotten after a while, as an answer to a request_id is.
        """
        self._raise_if_failed()
        self._sessions += 1
        opening = asyncio.create_task(self._open(name, one_call))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The journal raises the producer's epoch all the same, so the state here has to follow.
            opening.add_done_callback(_close_unused)
            raise

    async def _open(self, name: str, one_call: bool) -> ObserveSession:
        epoch = self.working.record.epoch
        try:
            producer = await self._dependencies.journal.open_producer(self.uid, epoch, name, one_call=one_call)
            self._raise_if_failed()
        except (Conflict, OutcomeUnknown) as error:
            self._sessions -= 1
            raise self.fail(JournalUnavailable(f"the memory moved on: {error}", retry_after_s=0.1)) from error
        except BaseException:
            self._sessions -= 1
            raise
        state = self._producers.setdefault(name, ProducerState(name, revision=self.revision))
        if state.session is not None:
            state.session.fail(
                ProducerSuperseded(f"a newer stream of producer {name!r} was opened; this one is superseded")
            )
        state.epoch = producer.epoch
        state.received = state.submitted = producer.received
        state.forget_after(state.received)
        state.stored = max(state.stored, producer.stored)
        session = ObserveSession(
            self, state, Opened(state.received, state.stored, state.epoch, self.uid, self.revision)
        )
        state.session = session
        return session

    def anonymous(self) -> ObserveSession:
        """A session of its own for the unnumbered observations of one call."""
        self._raise_if_failed()
        self._sessions += 1
        state = ProducerState("")
        self._unnumbered.add(state)
        state.session = ObserveSession(self, state, Opened(0, 0, 0, self.uid, self.revision))
        return state.session

    def released(self, state: ProducerState) -> None:
        """A session of this producer was closed."""
        self._sessions -= 1
        self._unnumbered.discard(state)
        self._let_go(state)

    def _let_go(self, state: ProducerState) -> None:
        """What the journal knows as well leaves RAM, or every producer there ever was would stay in it."""
        if state.session is None and state.stored >= state.submitted and self._producers.get(state.name) is state:
            del self._producers[state.name]

    def take_position(self) -> int:
        """The next place in the order of receipt, for a fragment that was not observed."""
        self._next_position += 1
        return self._next_position - 1

    def take_positions_until(self, position: int) -> None:
        """Places in the order of receipt that imported fragments bring along."""
        self._next_position = max(self._next_position, position + 1)

    def submit(
        self, state: ProducerState, first: int, items: Sequence[NewObservation | Refusal]
    ) -> asyncio.Future[None]:
        """Number, order and journal a batch; see ObserveSession.submit."""
        self._raise_if_failed()
        state.check_gap(first)
        new_from = max(first, state.expected())
        repeats, fresh = items[: new_from - first], items[new_from - first :]
        state.check_repeats(first, repeats)
        # A batch larger than the bound is taken when nothing waits: refused then, it would be refused for ever.
        if self._backlog and self._backlog + len(fresh) > self.working.record.policy.backlog_max:
            raise BacklogFull(
                f"{self._backlog} observations wait to be stored, the most this memory's policy allows",
                retry_after_s=0.5,
            )
        batch = None
        if fresh:
            batch = batch_of(self._dependencies, self.working.record, state, new_from, fresh, self._next_position)
            # A batch of refused items takes a position too: a receipt is known by its own.
            self._next_position += max(1, batch.count)
            self._backlog += batch.count
            state.submitted = new_from + len(fresh) - 1
            state.remember(new_from, batch.receipt.hashes, batch.receipt.rejections)
        task = asyncio.create_task(self._receive(state, first, repeats, batch))
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)
        if batch is not None:
            state.receiving = task
        # Shielded: whoever stops waiting must not take from the actor the news that the journal has the batch.
        return asyncio.shield(task)

    async def _receive(
        self, state: ProducerState, first: int, repeats: Sequence[NewObservation | Refusal], batch: Batch | None
    ) -> None:
        # The journal is given the batch before anything else is awaited: its order is the order of `submit`.
        session, before = state.session, state.receiving
        try:
            if batch is not None:
                await self._dependencies.journal.receive(batch.receipt)
        except Exception as error:
            raise self._ended(session, self._unreceived(state, session, batch, error)) from error
        try:
            if batch is not None:
                self._received(state, batch)
            if repeats:
                await self._repeated(state, first, repeats, before)
        except EngineError as error:
            raise self._ended(session, error) from error
        except JournalError as error:
            # What was received stays so; only what the repeats were told the first time could not be read.
            raise self._ended(session, JournalUnavailable(f"reading failed: {error}", retry_after_s=0.2)) from error

    async def _repeated(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | Refusal],
        before: asyncio.Task[None] | None,
    ) -> None:
        """Tell of repeats what was told the first time, and not before what they repeat is received."""
        session = state.session
        if first + len(items) - 1 > state.received and before is not None:
            await asyncio.wait({before})
            before.result()
        again = await verify_repeats(self._dependencies.journal, self.uid, state, first, items)
        if session is not None:
            session.reject(again)

    @staticmethod
    def _ended(session: ObserveSession | None, error: EngineError) -> EngineError:
        if session is not None:
            session.fail(error)
        return error

    def _received(self, state: ProducerState, batch: Batch) -> None:
        receipt = batch.receipt
        last = receipt.first_sequence + len(receipt.hashes) - 1
        if receipt.rejections and state.session is not None:
            state.session.reject(receipt.rejections)
        self._dependencies.metrics.received(batch.count, len(receipt.rejections), self._age_s(batch) or 0.0)
        self._backlog -= batch.count  # counted again by _enqueue
        self._enqueue(batch)
        state.advance(received=last)

    def _enqueue(self, batch: Batch) -> None:
        self._backlog += batch.count
        self._pending.append(batch)
        self._unstored[batch.receipt.position] = batch
        self._more.set()

    def _unreceived(
        self, state: ProducerState, session: ObserveSession | None, batch: Batch | None, error: Exception
    ) -> EngineError:
        """What the refusal of a batch means for its producer. A refusal that RAM does not explain ends the actor."""
        if batch is not None:
            self._backlog -= batch.count
            if batch.receipt.producer_epoch != state.epoch:
                return ProducerSuperseded(
                    f"a newer stream of producer {state.name!r} was opened; this one is superseded"
                )
            state.submitted = state.received
            state.forget_after(state.received)
            self._let_go(state)
        if isinstance(error, StorageFull):
            return StorageIsFull(str(error), retry_after_s=STORAGE_RETRY_S)
        if isinstance(error, Conflict) and session is not None and session.error is not None:
            return session.error  # an earlier batch was refused, so this one did not follow on
        if not isinstance(error, JournalError):
            log.error("receive_failed", memory=self.uid, exc_info=error)
        return self.fail(JournalUnavailable(f"the journal refused the batch: {error}", retry_after_s=0.2))

    # ---- deciding
    async def run(self, decide: Decide) -> int:
        """Decide in the memory's order; returns the revision after it.

        `decide` may read the journal (nothing changes meanwhile) but asks no model. None from it changes nothing.
        Raises what `decide` raises, or the actor's end.
        """
        self._raise_if_failed()
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Work(decide, done))
        return await done

    async def _prepare_loop(self) -> None:
        try:
            while True:
                await self._room.acquire()
                while not self._pending:
                    self._more.clear()
                    await self._more.wait()
                batches = self._next_group()
                working = self.working
                account = account_of(working.record)
                gathered = await observations_in(
                    batches, self._dependencies, working.record, account, working.embedding
                )
                self._inbox.put_nowait(_Prepared(batches, tuple(gathered), account))
        except Exception as error:
            log.exception("prepare_failed", memory=self.uid)
            self.fail(JournalUnavailable(f"preparing observations failed: {type(error).__name__}", retry_after_s=1.0))

    def _next_group(self) -> tuple[Batch, ...]:
        group = [self._pending.popleft()]
        size = group[0].count
        while self._pending and size + self._pending[0].count <= self._dependencies.limits.decide_max:
            group.append(self._pending.popleft())
            size += group[-1].count
        return tuple(group)

    async def _decide_loop(self) -> None:
        try:
            while True:
                item = self._held_back.popleft() if self._held_back else await self._inbox.get()
                self._deciding = True
                if isinstance(item, _Work):
                    await self._work(item)
                else:
                    await self._store(item)
                self._deciding = False
        except (Conflict, OutcomeUnknown) as error:
            self.fail(JournalUnavailable(f"the memory is read again: {error}", retry_after_s=0.2))
        except Exception as error:
            log.exception("decide_failed", memory=self.uid)
            self.fail(JournalUnavailable(f"deciding failed: {type(error).__name__}", retry_after_s=1.0))

    async def _work(self, work: _Work) -> None:
        try:
            deciding = work.decide(self)
            decision = await deciding if inspect.isawaitable(deciding) else deciding
            if decision is not None:
                await self._commit(decision)
        except EngineError as error:
            _settle(work.done, error)
        except StorageFull as error:
            _settle(work.done, StorageIsFull(str(error), retry_after_s=STORAGE_RETRY_S))
        except AlreadyExists as error:
            _settle(work.done, MemoryExists(f"another memory has that name or external id: {error}"))
        except BaseException:
            _settle(work.done, JournalUnavailable("the write's outcome is unknown; read again", retry_after_s=0.2))
            raise
        else:
            if not work.done.done():
                work.done.set_result(self.revision)

    async def _store(self, prepared: _Prepared) -> None:
        while True:
            keyed = await self._keyed(prepared.gathered)
            decision, outcomes = await decide_observations(
                self.working, prepared.batches, prepared.gathered, keyed, self._dependencies
            )
            decision = decision.costing(prepared.account, Purpose.IMPORTANCE)
            try:
                await self._commit(decision)
                break
            except StorageFull as error:  # received, so it must be stored: nothing was changed, wait for room
                log.warning("storage_full", memory=self.uid, error=str(error))
                await self._wait_for_room()
        self._room.release()
        self._stored(prepared.batches, outcomes)

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

    async def _keyed(self, gathered: Sequence[Gathered]) -> dict[str, Fragment]:
        """The fragments a group's external ids already name. Nothing else changes them: this is the memory's order."""
        wanted = {self.working.id_of(part.fragment.external_id) for part in gathered if part.fragment.external_id}
        wanted.discard("")
        if not wanted:
            return {}
        found = await self._dependencies.journal.fragments(self.uid, sorted(wanted))
        return {fragment.external_id: fragment for fragment in found}

    def _stored(self, batches: tuple[Batch, ...], outcomes: dict[int, Outcome]) -> None:
        for batch in batches:
            self._backlog -= batch.count
            del self._unstored[batch.receipt.position]
            self._dependencies.metrics.stored(batch.count, self._age_s(batch))
            state, receipt = batch.producer, batch.receipt
            if state is None:
                continue
            if state.session is not None:
                numbered = zip(receipt.sequences, receipt.fragments, strict=True)
                state.session.decided([replace(outcomes[part.position], sequence=number) for number, part in numbered])
            last = receipt.first_sequence + len(receipt.hashes) - 1
            state.advance(received=last, stored=last, revision=self.revision)
            self._let_go(state)

    def _age_s(self, batch: Batch) -> float | None:
        return None if batch.arrived_s is None else self._dependencies.clock.monotonic_s() - batch.arrived_s

    async def _commit(self, decision: Decision) -> None:
        decision = await self._revector(decision)
        commit = commit_of(self.working, decision, self._dependencies)
        started_s = self._dependencies.clock.monotonic_s()
        await self._dependencies.journal.commit(commit)
        self._dependencies.metrics.committed(self._dependencies.clock.monotonic_s() - started_s)
        self.working.apply(commit, decision)
        self._dependencies.committed(self.uid, Recorded(commit.revision + 1, commit.time_us, commit.events), commit)
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
        gathered = await self._dependencies.gatherer.gather(merged, own, importances, record, account_of(record), space)
        return decision.with_gathered(gathered)

    def settle(self, change: Decision) -> Decision:
        """Bring the tiers within a policy that `change` sets."""
        if change.policy is None:
            return change
        policy = effective_policy(change.policy, self._dependencies)
        transition = settle(self.working.state, policy, self.working.embedding.model.similarity_min)
        if not transition.events:
            return change
        jobs = jobs_of(self.working, transition, (), self._dependencies)
        return replace(change, transition=transition, jobs=(*change.jobs, *jobs))

    # ---- the end
    def fail(self, error: EngineError) -> EngineError:
        """Finish the actor: nothing more is decided, sessions end with `error`, the registry reads the memory again."""
        if self.failed is None:
            self.failed = error
            self._end()
            self._dependencies.lost(self)
        return self.failed

    async def stop(self) -> None:
        """Let what is received be stored where that needs no waiting, then end."""
        if self.failed is None:
            self.failed = ShuttingDown("the server is going away", retry_after_s=0.5)
        current = asyncio.current_task()
        waiting = [task for task in (*self._receiving,) if task is not current]
        if waiting:
            await asyncio.wait(waiting, timeout=2.0)
        self._end()
        for task in self._tasks:
            if task is not current:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def gone(self) -> None:
        """The memory was deleted."""
        self.fail(MemoryNotFound(f"memory {self.working.record.namespace}/{self.working.record.name} was deleted"))

    def _end(self) -> None:
        current = asyncio.current_task()
        error = self.failed or ShuttingDown("the server is going away", retry_after_s=0.5)
        for task in self._tasks:
            if task is not current:
                task.cancel()
        for state in self.producers():
            if state.session is not None:
                state.session.fail(error)
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            if isinstance(item, _Work):
                _settle(item.done, error)
        revised, self._revised = self._revised, asyncio.Event()
        revised.set()

    def _raise_if_failed(self) -> None:
        if self.failed is not None:
            raise self.failed


def _settle(future: asyncio.Future[int], error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)


def _close_unused(opening: asyncio.Task[ObserveSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
