"""The producers of an active memory and their open sessions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from memstream_server.engine.errors import EngineError, JournalUnavailable, ProducerSuperseded
from memstream_server.engine.memory.producers import ObserveSession, ProducerState, SubmissionTarget
from memstream_server.engine.requests import Opened
from memstream_server.engine.runtime.call_context import without_account
from memstream_server.ports.journal.errors import Conflict, OutcomeUnknown

if TYPE_CHECKING:
    from memstream_server.engine.memory.decider import Decider
    from memstream_server.ports.journal.port import Journal
    from memstream_server.ports.journal.reading import LoadedMemory


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
        except (Conflict, OutcomeUnknown) as error:
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
