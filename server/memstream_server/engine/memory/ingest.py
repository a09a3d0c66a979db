"""Receiving: who writes into a memory, in what order, and what of it waits to be stored.

Rule 1. `submit` gives numbers, ids and positions synchronously, so that order is fixed before anything is awaited.
Rule 2. What the journal has received is acknowledged, and in the same step handed to the actor (`Actor.store`), in that
order.
Rule 3. A small batch whose client waits for *stored* is received by being stored (`Actor.store_at_once`), one commit
instead of two, where nothing is received that is not stored. A few that come meanwhile wait, and are stored together;
what is received otherwise waits for them, so that the journal has all in the order of `submit`.
Rule 4. A refusal that RAM does not explain ends the actor (`Actor.fail`); the memory is read again from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from memstream_server.engine.errors import (
    DISK_FULL,
    NOT_READ,
    NOT_WRITTEN,
    BacklogFull,
    EngineError,
    JournalUnavailable,
    ProducerSuperseded,
    StorageIsFull,
)
from memstream_server.engine.memory import fragment_quota
from memstream_server.engine.memory.producers import ObserveSession, ProducerState
from memstream_server.engine.memory.receipts import Batch, batch_of, verify_repeats
from memstream_server.engine.requests import AckLevel, NewObservation, Opened, Refusal
from memstream_server.ports.journal.errors import Conflict, JournalError, OutcomeUnknown, StorageFull
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import Image
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.journal.writing import Outcome, Receipt

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage

log = structlog.get_logger(__name__)

AT_ONCE_MAX = 16
"""Observations that are received by being stored, of a batch and of all that wait for it."""
STORAGE_RETRY_S = 5.0
"""Pause before a decision that found the disk full is committed again, and what clients are told."""


class Decider(Protocol):
    """Decides and commits what a memory received."""

    @property
    def working(self) -> WorkingSet: ...

    @property
    def uid(self) -> str: ...

    @property
    def revision(self) -> int: ...

    def raise_if_failed(self) -> None: ...

    def fail(self, error: EngineError) -> EngineError: ...

    def store(self, batch: Batch) -> None: ...

    async def store_at_once(self, batches: tuple[Batch, ...]) -> None: ...


class Receiving:
    """One active memory's way in: its producers with their sessions, the order of receipt, the backlog."""

    def __init__(
        self, image: Image, decider: Decider, storage: Storage, models: EngineModels, runtime: Runtime
    ) -> None:
        self._decider = decider
        self._storage = storage
        self._models = models
        self._runtime = runtime
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
        self._unnumbered: set[ProducerState] = set()
        self._next_position = image.next_position
        self._backlog = 0
        self._puts = 0
        self._unstored: dict[int, Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()
        """Held by batches that are received by being stored."""
        self._waiting: deque[Batch] = deque()
        """Those of them that are not begun."""
        self._storing = 0
        """Observations of these batches that are not stored; all of the backlog, where the next may be one of them."""
        self._at_once: asyncio.Task[None] | None = None
        """What stores some of these just now."""
        self._answers: dict[str, asyncio.Future[None]] = {}
        """Who waits for a batch to be stored that an earlier process received, by the request that brought it."""
        self._sessions = 0
        self._opening: set[asyncio.Task[ObserveSession]] = set()

    def resume(self, receipts: Sequence[Receipt]) -> None:
        """Hand over what an earlier process received and did not store."""
        for receipt in receipts:
            self._enqueue(Batch(receipt, self._producers.get(receipt.producer)))

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
    def held(self) -> bool:
        """Whether somebody holds a producer open, or waits for the journal."""
        return bool(self._tasks or self._sessions)

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nobody holds a producer open."""
        return not (self._backlog or self.held)

    def unstored(self, ids: Collection[str]) -> bool:
        """Whether one of these was received and is not stored yet."""
        return any(one.id in ids for batch in self._unstored.values() for one in batch.receipt.fragments)

    # ---- sessions
    async def open_session(self, name: str, *, outcomes: bool = False) -> ObserveSession:
        """Make this stream the producer's only one; `outcomes` keeps what becomes of its observations.

        Raises JournalUnavailable when the write fails.
        """
        self._decider.raise_if_failed()
        self._sessions += 1
        opening = asyncio.create_task(self._open(name, outcomes))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The journal raises the producer's epoch all the same, so the state here has to follow.
            opening.add_done_callback(_close_unused)
            raise

    async def _open(self, name: str, outcomes: bool) -> ObserveSession:
        epoch = self._decider.working.record.epoch
        try:
            async with self._order:  # its producer's epoch is compared when it is written
                pass
            producer = await self._storage.journal.open_producer(self._decider.uid, epoch, name)
            self._decider.raise_if_failed()
        except (Conflict, OutcomeUnknown) as error:
            self._sessions -= 1
            raise self._decider.fail(
                JournalUnavailable("the memory is read again: try again", retry_after_s=0.1)
            ) from error
        except BaseException:
            self._sessions -= 1
            raise
        state = self._producers.setdefault(name, ProducerState(name, revision=self._decider.revision))
        if state.session is not None:
            state.session.fail(
                ProducerSuperseded(f"a newer stream of producer {name!r} was opened; this one is superseded")
            )
        state.epoch, state.outcomes = producer.epoch, outcomes
        state.received = state.submitted = producer.received
        state.forget_after(state.received)
        state.stored = max(state.stored, producer.stored)
        session = ObserveSession(
            self, state, Opened(state.received, state.stored, state.epoch, self._decider.uid, self._decider.revision)
        )
        state.session = session
        return session

    def anonymous(self, stored: int = 0) -> ObserveSession:
        """A session of its own for the unnumbered observations of one call, of which so many are stored."""
        self._decider.raise_if_failed()
        self._sessions += 1
        state = ProducerState("", received=stored, stored=stored, submitted=stored, whole=True)
        self._unnumbered.add(state)
        state.session = ObserveSession(self, state, Opened(0, 0, 0, self._decider.uid, self._decider.revision))
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

    @property
    def journal(self) -> Journal:
        """Where receipts are kept."""
        return self._storage.journal

    async def answered(self, request: str) -> None:
        """Waits while a batch that this request brought waits to be stored. Raises what ends the memory's actor."""
        self._decider.raise_if_failed()
        if any(_request_of(batch) == request for batch in self._unstored.values()):
            waiter = self._answers.setdefault(request, asyncio.get_running_loop().create_future())
            await asyncio.shield(waiter)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """See ObserveSession.turn."""
        return self._runtime.turns.of(self._decider.working.record.namespace)

    def take_position(self) -> int:
        """The next place in the order of receipt, for a fragment that was not observed."""
        self._next_position += 1
        return self._next_position - 1

    def take_positions_until(self, position: int) -> None:
        """Places in the order of receipt that imported fragments bring along."""
        self._next_position = max(self._next_position, position + 1)

    @contextlib.contextmanager
    def put(self, new: NewObservation) -> Iterator[None]:
        """While an observation is stored without being received: it takes its place among what waits."""
        most = self._runtime.limits.memory_fragments_max
        if isinstance(self._fitting([new], most)[0], Refusal):
            raise fragment_quota.full(most)
        self._puts += 1
        try:
            yield
        finally:
            self._puts -= 1

    def _fitting(self, items: Sequence[NewObservation | Refusal], most: int) -> Sequence[NewObservation | Refusal]:
        return fragment_quota.fitting(items, self._decider.working, self._backlog + self._puts, most) if most else items

    # ---- receipts
    def submit(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | Refusal],
        awaited: AckLevel = AckLevel.RECEIVED,
        answer: Answer | None = None,
    ) -> asyncio.Future[None]:
        """Number, order and journal a batch; see ObserveSession.submit."""
        self._decider.raise_if_failed()
        state.check_gap(first)
        new_from = max(first, state.expected())
        repeats, fresh = items[: new_from - first], items[new_from - first :]
        state.check_repeats(first, repeats)
        # A batch larger than the bound is taken when nothing waits: refused then, it would be refused for ever.
        if self._backlog and self._backlog + len(fresh) > self._decider.working.record.policy.backlog_max:
            raise BacklogFull(
                f"{self._backlog} observations wait to be stored, the most this memory's policy allows",
                retry_after_s=0.5,
            )
        most = self._runtime.limits.memory_fragments_max
        given, fresh = fresh, self._fitting(fresh, most)
        if state.whole and fresh is not given:
            raise fragment_quota.full(most)
        batch = None
        if fresh:
            batch = batch_of(
                self._models,
                self._runtime,
                self._decider.working.record,
                state,
                new_from,
                fresh,
                self._next_position,
                answer,
            )
            if awaited is not AckLevel.RECEIVED and self._may_be_at_once(batch):
                batch.at_once = True
                self._unstored[batch.receipt.position] = batch
                self._waiting.append(batch)
                self._storing += batch.count
            # A batch of refused items takes a position too: a receipt is known by its own.
            self._next_position += max(1, batch.count)
            self._backlog += batch.count
            state.submitted = new_from + len(fresh) - 1
            state.remember(new_from, batch.receipt.hashes, batch.receipt.rejections)
        task = asyncio.create_task(self._receive(state, first, repeats, batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if batch is not None:
            state.receiving = task
        # Shielded: whoever stops waiting must not take from the actor the news that the journal has the batch.
        return asyncio.shield(task)

    def _may_be_at_once(self, batch: Batch) -> bool:
        """Whether it may be received by being stored: nobody waits for what happens between the two.

        Not behind anything that is not: that is received first, and stored whenever it comes to it. Not while a stream
        opens, which may be its producer's next one: the commit would be refused, and end the actor.
        """
        record = self._decider.working.record
        gatherer, embeddings = self._models.gatherer, self._models.embeddings
        space = self._decider.working.embedding
        return (
            not (self._opening or batch.receipt.rejections)
            and self._backlog == self._storing
            and sum(one.count for one in self._waiting) + batch.count <= AT_ONCE_MAX
            and space.model.instant
            and embeddings.beside(space.name) is None
            and not (gatherer.rates and record.policy.score_importance)
        )

    async def _receive(
        self, state: ProducerState, first: int, repeats: Sequence[NewObservation | Refusal], batch: Batch | None
    ) -> None:
        # The journal is given the batch before anything else is awaited: its order is the order of `submit`.
        session, before = state.session, state.receiving
        try:
            if batch is not None:
                await self._journal(batch)
        except Exception as error:
            raise self._ended(session, self._unreceived(state, session, batch, error)) from error
        try:
            if batch is not None and not batch.at_once:
                self._received(state, batch)
            if repeats:
                await self._repeated(state, first, repeats, before)
        except EngineError as error:
            raise self._ended(session, error) from error
        except JournalError as error:
            # What was received stays so; only what the repeats were told the first time could not be read.
            raise self._ended(session, JournalUnavailable(NOT_READ, retry_after_s=0.2)) from error

    async def _journal(self, batch: Batch) -> None:
        """Returns once it is received."""
        async with self._order:
            self._decider.raise_if_failed()
            if batch in self._waiting:
                await self._store_waiting()
        if not batch.at_once:
            await self._storage.journal.receive(batch.receipt)

    async def _store_waiting(self) -> None:
        """All that wait, in the name of the first. Where it fails the others find out by themselves."""
        batches = tuple(self._waiting)
        self._waiting.clear()
        self._at_once = asyncio.current_task()
        try:
            await self._decider.store_at_once(batches)
        except BaseException as error:
            self._waiting.extendleft(reversed(batches[1:]))
            if isinstance(error, asyncio.CancelledError):
                self._decider.raise_if_failed()  # then it was `end` that gave it up
            raise
        finally:
            self._at_once = None

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
        again = await verify_repeats(self._storage.journal, self._decider.uid, state, first, items)
        if session is not None:
            session.reject(again)

    @staticmethod
    def _ended(session: ObserveSession | None, error: EngineError) -> EngineError:
        if session is not None:
            session.fail(error)
        return error

    def _received(self, state: ProducerState, batch: Batch) -> None:
        receipt = batch.receipt
        if receipt.rejections and state.session is not None:
            state.session.reject(receipt.rejections)
        self._runtime.metrics.count_received(batch.count, len(receipt.rejections), self._age_s(batch) or 0.0)
        state.advance(received=receipt.last_sequence)  # woken before the actor: the answer goes before the decision
        self._backlog -= batch.count  # counted again by _enqueue
        self._enqueue(batch)

    def _enqueue(self, batch: Batch) -> None:
        self._backlog += batch.count
        self._unstored[batch.receipt.position] = batch
        self._decider.store(batch)

    def _unreceived(
        self, state: ProducerState, session: ObserveSession | None, batch: Batch | None, error: Exception
    ) -> EngineError:
        """What the refusal of a batch means for its producer. A refusal that RAM does not explain ends the actor."""
        if batch is not None:
            self._backlog -= batch.count
            self._storing -= batch.count * batch.at_once
            self._unstored.pop(batch.receipt.position, None)
            if batch.receipt.producer_epoch != state.epoch:
                return ProducerSuperseded(
                    f"a newer stream of producer {state.name!r} was opened; this one is superseded"
                )
            state.submitted = state.received
            state.forget_after(state.received)
            self._let_go(state)
        if isinstance(error, EngineError):
            return error  # of an actor that ended before it was stored
        if isinstance(error, StorageFull):
            return StorageIsFull(DISK_FULL, retry_after_s=STORAGE_RETRY_S)
        if isinstance(error, Conflict) and session is not None and session.error is not None:
            return session.error  # an earlier batch was refused, so this one did not follow on
        if not isinstance(error, JournalError):
            log.error("receive_failed", memory=self._decider.uid, exc_info=error)
        return self._decider.fail(JournalUnavailable(NOT_WRITTEN, retry_after_s=0.2))

    # ---- told by the actor
    def stored(self, batches: Sequence[Batch], outcomes: dict[int, Outcome]) -> None:
        """These are decided and committed: whoever waits for them is told."""
        for batch in batches:
            self._backlog -= batch.count
            del self._unstored[batch.receipt.position]
            if batch.at_once:
                self._storing -= batch.count
                self._runtime.metrics.count_received(batch.count, 0, self._age_s(batch) or 0.0)
            self._runtime.metrics.count_stored(batch.count, self._age_s(batch))
            if (waiter := self._answers.pop(_request_of(batch), None)) is not None:
                waiter.set_result(None)
            state, receipt = batch.producer, batch.receipt
            if state is None:
                continue
            if state.session is not None:
                numbered = zip(receipt.sequences, receipt.fragments, strict=True)
                state.session.decided([outcomes[part.position].with_sequence(number) for number, part in numbered])
            last = receipt.last_sequence
            state.advance(received=last, stored=last, revision=self._decider.revision)
            self._let_go(state)

    def _age_s(self, batch: Batch) -> float | None:
        return None if batch.arrived_s is None else self._runtime.clock.monotonic_s() - batch.arrived_s

    # ---- the end
    async def settled(self, timeout_s: float) -> None:
        """Waits, for so long at most, until the journal has answered what was submitted."""
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def end(self, error: EngineError) -> None:
        """Every open session, and what is received by being stored, ends with `error`."""
        if self._at_once is not None and self._at_once is not asyncio.current_task():
            self._at_once.cancel()
        for state in self.producers():
            if state.session is not None:
                state.session.fail(error)
        for waiter in self._answers.values():
            waiter.set_exception(error)
            waiter.exception()  # marks it as retrieved: all callers may be gone
        self._answers.clear()


def _request_of(batch: Batch) -> str:
    return "" if batch.receipt.answer is None else batch.receipt.answer.request


def _close_unused(opening: asyncio.Task[ObserveSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
