"""Ingest: which producers write into a memory (`Sessions`), in which order, and which observations wait to be stored.

Rule 1. `submit` assigns numbers, ids and positions synchronously, so the order is fixed before the first await.
Rule 2. When the journal has received a batch, the batch is acknowledged and queued for the actor (`queue_batch`) in the
same step, in that order.
Rule 3. A small batch with a client that waits for *stored* skips its receipt: one commit receives and stores it
(`store_at_once`), if no other received batch waits to be stored. Later small batches wait and share the next commit.
All other batches wait until these are stored, so the journal sees all batches in the order of `submit`.
Rule 4. If the journal refuses a batch unexpectedly, the actor ends (`fail`), and the registry loads the memory again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from memstream_server.core.values import Fragment
from memstream_server.engine import quotas
from memstream_server.engine.errors import (
    NOT_READ,
    NOT_WRITTEN,
    BacklogFull,
    EngineError,
    JournalUnavailable,
    ProducerSuperseded,
    QuotaExceeded,
    answered_error,
    write_error,
)
from memstream_server.engine.memory.producers import ObserveSession, ProducerState, SubmissionTarget
from memstream_server.engine.memory.receipts import Batch, batch_of, verify_repeats
from memstream_server.engine.memory.superseding import refuse_unknown, superseding_error
from memstream_server.engine.quotas import find_full
from memstream_server.engine.requests import AckLevel, NewObservation, Opened, RejectedObservation
from memstream_server.engine.runtime.call_context import retrieve_error, without_account
from memstream_server.ports.journal.errors import AnswerExists, JournalError, OutcomeUnknown, StaleWrite, WriteRefused
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import LoadedMemory
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.journal.writing import BatchReceipt, Outcome

if TYPE_CHECKING:
    from memstream_server.engine.memory.working_set import WorkingSet
    from memstream_server.engine.runtime.dependencies import EngineModels, Runtime, Storage


class Decider(Protocol):
    """Decides and commits the batches of a memory."""

    @property
    def working(self) -> WorkingSet: ...

    @property
    def uid(self) -> str: ...

    @property
    def revision(self) -> int: ...

    def raise_if_failed(self) -> None: ...

    def fail(self, error: EngineError) -> EngineError: ...

    def queue_batch(self, batch: Batch) -> None: ...

    async def store_at_once(self, batches: tuple[Batch, ...]) -> None: ...


log = structlog.get_logger(__name__)

AT_ONCE_MAX = 16
"""Observations that one direct commit may store, over all batches that share it."""
STORAGE_RETRY_S = 5.0
"""Pause before a commit is repeated after the disk was full; clients get it as their retry delay."""


class Ingest:
    """Accepts a memory's observations: the order of receipt, the backlog, direct commits."""

    def __init__(
        self, loaded: LoadedMemory, decider: Decider, storage: Storage, models: EngineModels, runtime: Runtime
    ) -> None:
        self._decider = decider
        self._storage = storage
        self._models = models
        self._runtime = runtime
        self._next_position = loaded.next_position
        self._backlog = 0
        self._puts = 0
        self._unstored: dict[int, Batch] = {}
        self._submitted: dict[int, Batch] = {}
        """Batches that the journal is receiving."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = asyncio.Lock()
        """Held while batches are stored directly."""
        self._waiting: deque[Batch] = deque()
        """Batches that wait for a direct commit."""
        self._storing = 0
        """Observations in direct batches that are not yet stored. The next batch may be direct if all others are."""
        self._at_once: asyncio.Task[None] | None = None
        """The task that runs a direct commit now."""
        self._answers: dict[str, asyncio.Future[None]] = {}
        """Calls that wait for a batch of an earlier process to be stored, by request key."""
        self._sessions = Sessions(loaded, decider, storage.journal, self._order)

    def resume_receipts(self, receipts: Sequence[BatchReceipt]) -> None:
        """Queue the batches that an earlier process received and did not store."""
        for receipt in receipts:
            self._enqueue_batch(Batch(receipt, self._sessions.find_producer(receipt.producer)))

    @property
    def backlog(self) -> int:
        """Observations that are submitted and not yet stored."""
        return self._backlog

    @property
    def sessions(self) -> int:
        """Open sessions of streams and calls."""
        return self._sessions.count

    def list_producers(self) -> list[ProducerState]:
        """All producers with a session or a backlog, including unnumbered calls."""
        return self._sessions.list_producers()

    def received_of(self, producer: str) -> int | None:
        """The last number that a producer has sent; None if it has neither a session nor a backlog."""
        state = self._sessions.find_producer(producer)
        return None if state is None else max(state.received, state.submitted)

    @property
    def is_held(self) -> bool:
        """Whether a session is open or a journal write is in flight."""
        return bool(self._tasks or self._sessions.count)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and no session is open."""
        return not (self._backlog or self.is_held)

    def has_unstored(self, ids: Collection[str]) -> bool:
        """Whether one of these ids is received and not yet stored."""
        return any(one.id in ids for batch in self._unstored.values() for one in batch.receipt.fragments)

    # ---- sessions
    async def open_session(self, name: str, *, outcomes: bool = False) -> ObserveSession:
        """See Sessions.open_session."""
        return await self._sessions.open_session(self, name, outcomes)

    def open_anonymous(self, stored: int = 0) -> ObserveSession:
        """See Sessions.open_anonymous."""
        return self._sessions.open_anonymous(self, stored)

    def release_session(self, state: ProducerState) -> None:
        """A session of this producer was closed."""
        self._sessions.release_session(state)

    @property
    def journal(self) -> Journal:
        """The store of receipts."""
        return self._storage.journal

    async def wait_for_answer(self, request: str) -> None:
        """Wait until the batch of this request, if one waits, is stored. Raises the error that ends the actor."""
        self._decider.raise_if_failed()
        if any(_request_of(batch) == request for batch in self._unstored.values()):
            waiter = self._answers.setdefault(request, asyncio.get_running_loop().create_future())
            await asyncio.shield(waiter)

    def take_position(self) -> int:
        """The next position in the order of receipt, for a fragment that is not an observation of a stream."""
        self._next_position += 1
        return self._next_position - 1

    def take_positions_until(self, position: int) -> None:
        """Reserve the positions that imported fragments already have."""
        self._next_position = max(self._next_position, position + 1)

    @contextlib.contextmanager
    def admit_puts(self, given: Sequence[NewObservation]) -> Iterator[None]:
        """Admit observations that are stored without a receipt; they count towards the quota during the block."""
        most = self._runtime.limits.memory_fragments_max
        if any(isinstance(one, RejectedObservation) for one in self._admit_items(given, most)):
            raise quotas.fragments_error(most)
        self._puts += len(given)
        try:
            yield
        finally:
            self._puts -= len(given)

    def _admit_items(
        self, items: Sequence[NewObservation | RejectedObservation], most: int
    ) -> Sequence[NewObservation | RejectedObservation]:
        if not most:
            return items
        return quotas.refuse_excess(items, self._decider.working, self._backlog + self._puts, most)

    async def find_full(self) -> QuotaExceeded | None:
        """See ObserveSession.find_full."""
        if not self._runtime.limits.namespace_bytes_max:
            return None
        namespace = self._decider.working.record.namespace
        return await find_full(self._storage.journal, self._runtime.limits, namespace)

    # ---- receipts
    def submit(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | RejectedObservation],
        awaited: AckLevel = AckLevel.RECEIVED,
        answer: Answer | None = None,
        full: QuotaExceeded | None = None,
    ) -> asyncio.Future[None]:
        """Number, order and write a batch; see ObserveSession.submit."""
        self._decider.raise_if_failed()
        state.check_gap(first)
        new_from = max(first, state.next_number())
        repeats, fresh = items[: new_from - first], items[new_from - first :]
        state.check_repeats(first, repeats)
        # An empty backlog admits a batch larger than the bound: otherwise it could never be admitted.
        if self._backlog and self._backlog + len(fresh) > self._decider.working.record.policy.backlog_max:
            raise BacklogFull(
                f"{self._backlog} observations wait to be stored, the maximum of this memory's policy",
                retry_after_s=0.5,
            )
        most = self._runtime.limits.memory_fragments_max
        given, fresh = fresh, self._admit_items(fresh, most)
        if state.whole and fresh is not given:
            raise quotas.fragments_error(most)
        if full is not None:
            if state.whole and fresh:
                raise full
            fresh = quotas.refuse_all(fresh, full)
        fresh = refuse_unknown(fresh, self._decider.working, self._list_waiting, self._runtime.clock.now_us())
        if state.whole and fresh is not given:
            raise superseding_error(fresh)
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
                self._storing += batch.size
            else:
                self._submitted[batch.receipt.position] = batch
            # A batch of refused items takes a position too: positions identify receipts.
            self._next_position += max(1, batch.size)
            self._backlog += batch.size
            state.submitted = new_from + len(fresh) - 1
            state.remember_hashes(new_from, batch.receipt.hashes, batch.receipt.rejections)
        # Its steps wait for no turn: batches of several callers keep their order.
        task = asyncio.create_task(self._receive_batch(state, first, repeats, batch), context=without_account())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve_error)  # the session has it
        if batch is not None:
            state.receiving = task
        # Shielded: a cancelled caller must not keep the actor from learning that the journal has the batch.
        return asyncio.shield(task)

    def _list_waiting(self) -> Iterator[Fragment]:
        """The observations that are submitted and not yet stored."""
        for batch in (*self._unstored.values(), *self._submitted.values()):
            yield from batch.receipt.fragments

    def _may_be_at_once(self, batch: Batch) -> bool:
        """Whether one commit may both receive and store the batch.

        Not if another batch waits to be stored after its receipt. Not while a stream opens: it may raise the epoch of
        the batch's producer, then the journal would refuse the commit and the actor would end.
        """
        record = self._decider.working.record
        gatherer, embeddings = self._models.enricher, self._models.embeddings
        space = self._decider.working.embedding
        return (
            not (self._sessions.is_opening or batch.receipt.rejections)
            and self._backlog == self._storing
            and sum(one.size for one in self._waiting) + batch.size <= AT_ONCE_MAX
            and space.model.instant
            and embeddings.other_than(space.name) is None
            and not (gatherer.has_scorer and record.policy.score_importance)
        )

    async def _receive_batch(
        self,
        state: ProducerState,
        first: int,
        repeats: Sequence[NewObservation | RejectedObservation],
        batch: Batch | None,
    ) -> None:
        # The batch goes to the journal before the first await: its order is that of `submit`.
        session, before = state.session, state.receiving
        try:
            if batch is not None:
                await self._write_receipt(batch)
        except Exception as error:
            raise self._fail_session(session, self._undo_receipt(state, session, batch, error)) from error
        try:
            if batch is not None and not batch.at_once:
                self._mark_received(state, batch)
            if repeats:
                await self._answer_repeats(state, first, repeats, before)
        except EngineError as error:
            raise self._fail_session(session, error) from error
        except JournalError as error:
            # The batch stays received; only the first rejections of its repeats could not be read.
            raise self._fail_session(session, JournalUnavailable(NOT_READ, retry_after_s=0.2)) from error

    async def _write_receipt(self, batch: Batch) -> None:
        """Returns once the journal has received the batch."""
        async with self._order:
            self._decider.raise_if_failed()
            if batch in self._waiting:
                await self._store_waiting()
        if not batch.at_once:
            await self._storage.journal.receive(batch.receipt)

    async def _store_waiting(self) -> None:
        """Store all waiting direct batches in one commit, run by the first. If it fails, the others try again
        themselves.
        """
        batches = tuple(self._waiting)
        self._waiting.clear()
        self._at_once = asyncio.current_task()
        try:
            await self._store_together(batches)
        except BaseException as error:
            self._waiting.extendleft(reversed(batches[1:]))
            if isinstance(error, asyncio.CancelledError):
                self._decider.raise_if_failed()  # then `end_sessions` cancelled it
            raise
        finally:
            self._at_once = None

    async def _store_together(self, batches: tuple[Batch, ...]) -> None:
        """Store them in one commit; the first alone if one of several was answered before: it may be another."""
        try:
            await self._decider.store_at_once(batches)
        except AnswerExists:
            if len(batches) == 1:
                raise
            await self._decider.store_at_once(batches[:1])
            self._waiting.extendleft(reversed(batches[1:]))

    async def _answer_repeats(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | RejectedObservation],
        before: asyncio.Task[None] | None,
    ) -> None:
        """Send the first rejections of repeated numbers again, but not before the original batch is received."""
        session = state.session
        if first + len(items) - 1 > state.received and before is not None:
            await asyncio.wait({before})
            before.result()
        again = await verify_repeats(self._storage.journal, self._decider.uid, state, first, items)
        if session is not None:
            session.add_rejections(again)

    @staticmethod
    def _fail_session(session: ObserveSession | None, error: EngineError) -> EngineError:
        if session is not None:
            session.fail(error)
        return error

    def _mark_received(self, state: ProducerState, batch: Batch) -> None:
        receipt = batch.receipt
        self._submitted.pop(receipt.position, None)
        if receipt.rejections and state.session is not None:
            state.session.add_rejections(receipt.rejections)
        self._runtime.metrics.count_received(batch.size, len(receipt.rejections), self._age_s(batch) or 0.0)
        state.advance_levels(
            received=receipt.last_sequence
        )  # the session wakes first: the acknowledgement precedes the decision
        self._backlog -= batch.size  # `_enqueue_batch` adds it again
        self._enqueue_batch(batch)

    def _enqueue_batch(self, batch: Batch) -> None:
        self._backlog += batch.size
        self._unstored[batch.receipt.position] = batch
        self._decider.queue_batch(batch)

    def _undo_receipt(
        self, state: ProducerState, session: ObserveSession | None, batch: Batch | None, error: Exception
    ) -> EngineError:
        """Undo the submission of a refused batch and return its error. Unless RAM explains the refusal, the actor
        ends.
        """
        if batch is not None:
            self._backlog -= batch.size
            self._storing -= batch.size * batch.at_once
            self._unstored.pop(batch.receipt.position, None)
            self._submitted.pop(batch.receipt.position, None)
            if batch.receipt.producer_epoch != state.epoch:
                return ProducerSuperseded(
                    f"a newer stream of producer {state.name!r} was opened; this one is superseded"
                )
            state.submitted = state.received
            state.forget_after(state.received)
            self._sessions.drop_if_done(state)
        if isinstance(error, EngineError):
            return error  # the actor ended before the batch was stored
        if isinstance(error, WriteRefused):
            return write_error(error)
        if isinstance(error, AnswerExists):
            return answered_error(error)
        if isinstance(error, StaleWrite) and session is not None and session.error is not None:
            return session.error  # an earlier batch was refused, so this one leaves a gap
        if not isinstance(error, JournalError):
            log.error("receive_failed", memory=self._decider.uid, exc_info=error)
        return self._decider.fail(JournalUnavailable(NOT_WRITTEN, retry_after_s=0.2))

    # ---- called by the actor
    def mark_stored(self, batches: Sequence[Batch], outcomes: dict[int, Outcome]) -> None:
        """These batches are committed: notify their sessions and calls."""
        for batch in batches:
            self._backlog -= batch.size
            del self._unstored[batch.receipt.position]
            if batch.at_once:
                self._storing -= batch.size
                self._runtime.metrics.count_received(batch.size, 0, self._age_s(batch) or 0.0)
            self._runtime.metrics.count_stored(batch.size, self._age_s(batch))
            if (waiter := self._answers.pop(_request_of(batch), None)) is not None:
                waiter.set_result(None)
            state, receipt = batch.producer, batch.receipt
            if state is None:
                continue
            if state.session is not None:
                numbered = zip(receipt.sequences, receipt.fragments, strict=True)
                state.session.add_outcomes(
                    [outcomes[part.position].for_batch(number, receipt.related) for number, part in numbered]
                )
            last = receipt.last_sequence
            state.advance_levels(received=last, stored=last, revision=self._decider.revision)
            self._sessions.drop_if_done(state)

    def _age_s(self, batch: Batch) -> float | None:
        return None if batch.arrived_s is None else self._runtime.clock.monotonic_s() - batch.arrived_s

    # ---- the end
    async def wait_for_journal(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the journal's answers to submitted batches."""
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def end_sessions(self, error: EngineError) -> None:
        """End all open sessions and direct batches with `error`."""
        if self._at_once is not None and self._at_once is not asyncio.current_task():
            self._at_once.cancel()
        self._sessions.fail_all(error)
        for waiter in self._answers.values():
            waiter.set_exception(error)
            waiter.exception()  # marks it as retrieved: all callers may have left
        self._answers.clear()


def _request_of(batch: Batch) -> str:
    return "" if batch.receipt.answer is None else batch.receipt.answer.request


class Sessions:
    """Opens and releases the sessions of one memory. A session submits to the `target` that opened it."""

    def __init__(self, loaded: LoadedMemory, decider: Decider, journal: Journal, order: asyncio.Lock) -> None:
        """order: held while batches are stored directly."""
        self._decider = decider
        self._journal = journal
        self._order = order
        waiting = {receipt.producer for receipt in loaded.pending}
        self._producers = {  # those with observations that are not yet stored
            producer.name: ProducerState(
                producer.name,
                producer.epoch,
                producer.received,
                producer.stored,
                submitted=producer.received,
                revision=loaded.record.revision,
            )
            for producer in loaded.producers
            if producer.name in waiting
        }
        self._unnumbered: set[ProducerState] = set()
        self._opening: set[asyncio.Task[ObserveSession]] = set()
        self.count = 0
        """Open sessions, and those that are being opened."""

    @property
    def is_opening(self) -> bool:
        """Whether a stream is being opened."""
        return bool(self._opening)

    def find_producer(self, name: str) -> ProducerState | None:
        """The producer of that name, if it is in RAM."""
        return self._producers.get(name)

    def list_producers(self) -> list[ProducerState]:
        """All producers with a session or a backlog, including unnumbered calls."""
        return [*self._producers.values(), *self._unnumbered]

    async def open_session(self, target: SubmissionTarget, name: str, outcomes: bool) -> ObserveSession:
        """Open a session; an older session of the producer ends. `outcomes` keeps the outcomes of its observations.

        Raises JournalUnavailable if the write fails.
        """
        self._decider.raise_if_failed()
        self.count += 1
        # Its steps wait for no turn, like those of batches: a batch that the journal refuses for the new epoch would
        # find the former one here, and end the actor.
        opening = asyncio.create_task(self._open_producer(target, name, outcomes), context=without_account())
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The journal raises the producer's epoch anyway, so the state here must follow.
            opening.add_done_callback(_close_unused)
            raise

    async def _open_producer(self, target: SubmissionTarget, name: str, outcomes: bool) -> ObserveSession:
        epoch = self._decider.working.record.epoch
        try:
            async with self._order:  # the commit compares the producer's epoch
                pass
            producer = await self._journal.open_producer(self._decider.uid, epoch, name)
            self._decider.raise_if_failed()
        except (StaleWrite, OutcomeUnknown) as error:
            self.count -= 1
            raise self._decider.fail(
                JournalUnavailable("the memory is loaded again: try again", retry_after_s=0.1)
            ) from error
        except BaseException:
            self.count -= 1
            raise
        state = self._producers.setdefault(name, ProducerState(name, revision=self._decider.revision))
        if state.session is not None:
            state.session.fail(
                ProducerSuperseded(f"a newer stream of producer {name!r} was opened; this one is superseded")
            )
        state.epoch, state.outcomes, state.related = producer.epoch, outcomes, 0
        state.received = state.submitted = producer.received
        state.forget_after(state.received)
        state.stored = max(state.stored, producer.stored)
        session = ObserveSession(
            target, state, Opened(state.received, state.stored, state.epoch, self._decider.uid, self._decider.revision)
        )
        state.session = session
        return session

    def open_anonymous(self, target: SubmissionTarget, stored: int) -> ObserveSession:
        """A new session for the unnumbered observations of one call; `stored` of them are already stored."""
        self._decider.raise_if_failed()
        self.count += 1
        state = ProducerState("", received=stored, stored=stored, submitted=stored, whole=True)
        self._unnumbered.add(state)
        state.session = ObserveSession(target, state, Opened(0, 0, 0, self._decider.uid, self._decider.revision))
        return state.session

    def release_session(self, state: ProducerState) -> None:
        """A session of this producer was closed."""
        self.count -= 1
        self._unnumbered.discard(state)
        self.drop_if_done(state)

    def drop_if_done(self, state: ProducerState) -> None:
        """Drop a producer that the journal can restore; otherwise every producer ever seen would stay in RAM."""
        if state.session is None and state.stored >= state.submitted and self._producers.get(state.name) is state:
            del self._producers[state.name]

    def fail_all(self, error: EngineError) -> None:
        """End all open sessions with `error`."""
        for state in self.list_producers():
            if state.session is not None:
                state.session.fail(error)


def _close_unused(opening: asyncio.Task[ObserveSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
