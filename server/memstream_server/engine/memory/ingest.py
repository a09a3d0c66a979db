"""Ingest: sessions that number, order and write observations, and give them to the memory's actor.

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
from collections.abc import Sequence

import structlog

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
from memstream_server.engine.memory.actor import Actor
from memstream_server.engine.memory.producers import Batch, ProducerState, Resumption, SessionNews, begin_resumption
from memstream_server.engine.memory.receipts import batch_of, verify_repeats
from memstream_server.engine.memory.superseding import refuse_unknown, superseding_error
from memstream_server.engine.requests import AckLevel, NewObservation, Opened, ProducerProgress, RejectedObservation
from memstream_server.engine.runtime.call_context import close_result, retrieve_error, without_account
from memstream_server.ports.journal.errors import AnswerExists, JournalError, OutcomeUnknown, StaleWrite, WriteRefused
from memstream_server.ports.journal.records import Answer

log = structlog.get_logger(__name__)

AT_ONCE_MAX = 16
"""Observations that one direct commit may store, over all batches that share it."""


async def open_session(actor: Actor, name: str, *, outcomes: bool = False) -> ObserveSession:
    """Open a session; an older session of the producer ends. `outcomes` keeps the outcomes of its observations.

    Raises JournalUnavailable if the write fails.
    """
    actor.raise_if_failed()
    producers = actor.producers
    producers.sessions += 1
    # Its steps wait for no turn, like those of batches: a batch that the journal refuses for the new epoch would find
    # the former one here, and end the actor.
    opening = asyncio.create_task(_open_producer(actor, name, outcomes), context=without_account())
    producers.opening.add(opening)
    opening.add_done_callback(producers.opening.discard)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        # The journal raises the producer's epoch anyway, so the state here must follow.
        opening.add_done_callback(close_result)
        raise


async def _open_producer(actor: Actor, name: str, outcomes: bool) -> ObserveSession:
    producers, epoch = actor.producers, actor.working.record.epoch
    try:
        async with producers.order:  # the commit compares the producer's epoch
            pass
        producer = await actor.storage.journal.open_producer(actor.uid, epoch, name)
        actor.raise_if_failed()
    except (StaleWrite, OutcomeUnknown) as error:
        producers.sessions -= 1
        raise actor.fail(JournalUnavailable("the memory is loaded again: try again", retry_after_s=0.1)) from error
    except BaseException:
        producers.sessions -= 1
        raise
    state = producers.by_name.setdefault(name, ProducerState(name, revision=actor.revision))
    if state.session is not None:
        state.session.fail(_superseded_error(state))
    state.epoch, state.outcomes, state.related = producer.epoch, outcomes, 0
    state.received = state.submitted = producer.received
    state.forget_after(state.received)
    state.stored = max(state.stored, producer.stored)
    opened = Opened(state.received, state.stored, state.epoch, actor.uid, actor.revision)
    state.session = session = ObserveSession(actor, state, opened)
    return session


def open_anonymous(actor: Actor, stored: int = 0) -> ObserveSession:
    """A new session for the unnumbered observations of one call; `stored` of them are already stored."""
    actor.raise_if_failed()
    state = ProducerState("", received=stored, stored=stored, submitted=stored, whole=True)
    actor.producers.add_unnumbered(state)
    state.session = session = ObserveSession(actor, state, Opened(0, 0, 0, actor.uid, actor.revision))
    return session


def _superseded_error(state: ProducerState) -> ProducerSuperseded:
    return ProducerSuperseded(f"a newer stream of producer {state.name!r} was opened; this one is superseded")


class ObserveSession(SessionNews):
    """One open Observe stream of a producer. For one task only."""

    def __init__(self, actor: Actor, state: ProducerState, opened: Opened) -> None:
        super().__init__()
        self.opened = opened
        self._actor = actor
        self._producers = actor.producers
        self._state = state
        self._closed = False

    async def find_full(self) -> QuotaExceeded | None:
        """Why the namespace may store no more now; None if it may. Raises JournalUnavailable."""
        limits = self._actor.runtime.limits
        if not limits.namespace_bytes_max:
            return None
        return await quotas.find_full(self._actor.storage.journal, limits, self._actor.working.record.namespace)

    async def resume(self, known: int) -> Resumption:
        """The rejections and outcomes after number `known`. Raises JournalUnavailable."""
        state = self._state
        return await begin_resumption(self._actor.storage.journal, state.name, state.outcomes, self.opened, known)

    def name_related(self, count: int) -> None:
        """Name so many related statements in the outcomes of observations submitted from now on."""
        self._state.related = count

    def take_progress(self) -> ProducerProgress:
        """The current levels, with rejections and outcomes since the last call.

        Raises the error that ended the session.
        """
        if self.error is not None:
            raise self.error
        return self._collect_progress()

    async def wait_for_level(self, level: AckLevel, sequence: int) -> ProducerProgress:
        """Wait until everything up to `sequence` has reached `level`."""
        while True:
            if self._level_number(level) >= sequence:  # a reached level stays true after the session ends
                return self._collect_progress()
            if self.error is not None:
                raise self.error
            await self.news.wait()
            self.news.clear()

    def _level_number(self, level: AckLevel) -> int:
        state = self._state
        return {AckLevel.RECEIVED: state.received, AckLevel.STORED: state.stored, AckLevel.INDEXED: state.indexed}[
            level
        ]

    def _collect_progress(self) -> ProducerProgress:
        rejected, self._rejected = tuple(self._rejected), []
        outcomes, self._outcomes = tuple(self._outcomes), []
        state = self._state
        return ProducerProgress(state.received, state.stored, state.indexed, state.revision, rejected, outcomes)

    @property
    def indexed_behind(self) -> bool:
        """Whether a stored observation may be missing in the index."""
        return self._state.indexed < self._state.stored

    def close(self) -> None:
        """End the session. Received batches are still stored."""
        if self._closed:
            return
        self._closed = True
        if self._state.session is self:
            self._state.session = None
        self._producers.release_session(self._state)

    # ---- receipts
    def submit(
        self,
        first: int,
        items: Sequence[NewObservation | RejectedObservation],
        awaited: AckLevel = AckLevel.RECEIVED,
        answer: Answer | None = None,
        full: QuotaExceeded | None = None,
    ) -> asyncio.Future[None]:
        """Submit a batch from number `first` on; the future completes when the journal has received it.

        awaited: the level that the client waits for; above RECEIVED, the batch may skip its receipt. answer: stored
        with the receipt. full: of `find_full`, refuses what is not a repeat. Raises SequenceGap, SequenceConflict,
        BacklogFull or the session's error, at once or in the future.
        """
        if self.error is not None:
            raise self.error
        self._actor.raise_if_failed()
        state, producers = self._state, self._producers
        state.check_gap(first)
        new_from = max(first, state.next_number())
        repeats, fresh = items[: new_from - first], items[new_from - first :]
        state.check_repeats(first, repeats)
        fresh, batch = self._admit_items(fresh, full), None
        if fresh:
            batch = batch_of(
                self._actor.models,
                self._actor.runtime,
                self._actor.working.record,
                state,
                new_from,
                fresh,
                producers.next_position,
                answer,
            )
            if awaited is not AckLevel.RECEIVED and self._may_be_at_once(batch):
                batch.at_once = True
                producers.unstored[batch.receipt.position] = batch
                producers.waiting.append(batch)
                producers.storing += batch.size
            else:
                producers.submitted[batch.receipt.position] = batch
            # A batch of refused items takes a position too: positions identify receipts.
            producers.next_position += max(1, batch.size)
            producers.backlog += batch.size
            state.submitted = new_from + len(fresh) - 1
            state.remember_hashes(new_from, batch.receipt.hashes, batch.receipt.rejections)
        # Its steps wait for no turn: batches of several callers keep their order.
        receiving = self._receive_batch(first, repeats, batch, before=state.receiving)
        task = asyncio.create_task(receiving, context=without_account())
        producers.receiving.add(task)
        task.add_done_callback(producers.receiving.discard)
        task.add_done_callback(retrieve_error)  # the session has it
        if batch is not None:
            state.receiving = task
        # Shielded: a cancelled caller must not keep the actor from learning that the journal has the batch.
        return asyncio.shield(task)

    def _admit_items(
        self, given: Sequence[NewObservation | RejectedObservation], full: QuotaExceeded | None
    ) -> Sequence[NewObservation | RejectedObservation]:
        """The new items of a batch, with those refused that the backlog, a quota or a wrong link does not admit."""
        working, producers, whole = self._actor.working, self._producers, self._state.whole
        # An empty backlog admits a batch larger than the bound: otherwise it could never be admitted.
        if producers.backlog and producers.backlog + len(given) > working.record.policy.backlog_max:
            raise BacklogFull(
                f"{producers.backlog} observations wait to be stored, the maximum of this memory's policy",
                retry_after_s=0.5,
            )
        most, fresh = self._actor.runtime.limits.memory_fragments_max, given
        if most:
            fresh = quotas.refuse_excess(given, working, producers.backlog + producers.puts, most)
        if whole and fresh is not given:
            raise quotas.fragments_error(most)
        if full is not None:
            if whole and fresh:
                raise full
            fresh = quotas.refuse_all(fresh, full)
        linked = refuse_unknown(fresh, working, producers.list_waiting, self._actor.runtime.clock.now_us())
        if whole and linked is not fresh:
            raise superseding_error(linked)
        return linked

    def _may_be_at_once(self, batch: Batch) -> bool:
        """Whether one commit may both receive and store the batch.

        Not if another batch waits to be stored after its receipt. Not while a stream opens: it may raise the epoch of
        the batch's producer, then the journal would refuse the commit and the actor would end.
        """
        producers, models, working = self._producers, self._actor.models, self._actor.working
        # A batch that waits for a server, a second model or other batches needs its receipt: it may wait for seconds.
        return (
            not producers.opening
            and producers.backlog == producers.storing
            and sum(one.size for one in producers.waiting) + batch.size <= AT_ONCE_MAX
            and working.embedding.model.instant
            and models.embeddings.other_than(working.embedding.name) is None
            and not (models.enricher.has_scorer and working.record.policy.score_importance)
        )

    async def _receive_batch(
        self,
        first: int,
        repeats: Sequence[NewObservation | RejectedObservation],
        batch: Batch | None,
        before: asyncio.Task[None] | None,
    ) -> None:
        """before: receives the batch before it. An error ends this session, not one that has opened since `submit`."""
        # The batch goes to the journal before the first await: its order is that of `submit`.
        try:
            if batch is not None:
                await self._write_receipt(batch)
        except Exception as error:
            raise self._fail_with(self._undo_receipt(batch, error)) from error
        try:
            if batch is not None and not batch.at_once:
                self._mark_received(batch)
            if repeats:
                await self._answer_repeats(first, repeats, before)
        except EngineError as error:
            raise self._fail_with(error) from error
        except JournalError as error:
            # The batch stays received; only the first rejections of its repeats could not be read.
            raise self._fail_with(JournalUnavailable(NOT_READ, retry_after_s=0.2)) from error

    def _fail_with(self, error: EngineError) -> EngineError:
        self.fail(error)
        return error

    async def _write_receipt(self, batch: Batch) -> None:
        """Returns once the journal has received the batch."""
        async with self._producers.order:
            self._actor.raise_if_failed()
            if batch in self._producers.waiting:  # else the commit of an earlier one has stored it as well
                await self._store_waiting()
        if not batch.at_once:
            await self._actor.storage.journal.receive(batch.receipt)

    async def _store_waiting(self) -> None:
        """Store all waiting direct batches in one commit, run by the first. If it fails, the others try again
        themselves.
        """
        producers = self._producers
        batches = tuple(producers.waiting)
        producers.waiting.clear()
        producers.at_once = asyncio.current_task()
        try:
            try:
                await self._actor.store_at_once(batches)
            except AnswerExists:
                if len(batches) == 1:
                    raise
                # One of several was answered before: the first goes alone, it may be another that was.
                await self._actor.store_at_once(batches[:1])
                producers.waiting.extendleft(reversed(batches[1:]))
        except BaseException as error:
            producers.waiting.extendleft(reversed(batches[1:]))
            if isinstance(error, asyncio.CancelledError):
                self._actor.raise_if_failed()  # then `end_sessions` cancelled it
            raise
        finally:
            producers.at_once = None

    async def _answer_repeats(
        self, first: int, items: Sequence[NewObservation | RejectedObservation], before: asyncio.Task[None] | None
    ) -> None:
        """Send the first rejections of repeated numbers again, but not before the original batch is received."""
        state = self._state
        if first + len(items) - 1 > state.received and before is not None:
            await asyncio.wait({before})
            before.result()
        self.add_rejections(await verify_repeats(self._actor.storage.journal, self._actor.uid, state, first, items))

    def _mark_received(self, batch: Batch) -> None:
        self._producers.submitted.pop(batch.receipt.position, None)
        self._producers.count_received(batch)
        # The session wakes first: the acknowledgement precedes the decision.
        self._state.advance_levels(received=batch.receipt.last_sequence)
        self._producers.backlog -= batch.size  # `queue_batch` adds it again
        self._actor.queue_batch(batch)

    def _undo_receipt(self, batch: Batch | None, error: Exception) -> EngineError:
        """Undo the submission of a refused batch and return its error. Unless RAM explains the refusal, the actor
        ends.
        """
        state, producers = self._state, self._producers
        if batch is not None:
            producers.backlog -= batch.size
            producers.storing -= batch.size * batch.at_once
            producers.unstored.pop(batch.receipt.position, None)
            producers.submitted.pop(batch.receipt.position, None)
            if batch.receipt.producer_epoch != state.epoch:
                return _superseded_error(state)
            state.submitted = state.received
            state.forget_after(state.received)
            producers.drop_if_done(state)
        if isinstance(error, EngineError):
            return error  # the actor ended before the batch was stored
        if isinstance(error, WriteRefused):
            return write_error(error)
        if isinstance(error, AnswerExists):
            return answered_error(error)
        if isinstance(error, StaleWrite) and self.error is not None:
            return self.error  # an earlier batch was refused, so this one leaves a gap
        if not isinstance(error, JournalError):
            log.error("receive_failed", memory=self._actor.uid, exc_info=error)
        return self._actor.fail(JournalUnavailable(NOT_WRITTEN, retry_after_s=0.2))
