"""Producers: who numbers observations, how far they have come, and the one open stream of each."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memstream_server.engine.errors import EngineError, SequenceConflict, SequenceGap
from memstream_server.engine.memory.resume_streams import Resumption, begin_resumption
from memstream_server.engine.requests import AckLevel, Opened, Progress
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.journal.writing import Outcome, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager

    from memstream_server.engine.requests import NewObservation, Refusal
    from memstream_server.ports.journal.port import Journal

RECENT_MAX = 4_096
"""Numbers whose hashes are kept in RAM per producer, so that a repeat rarely needs the journal."""


@dataclass(slots=True, eq=False)
class ProducerState:
    """One producer of an active memory. `name` is empty for the unnumbered writes of a single call."""

    name: str
    epoch: int = 0
    received: int = 0
    stored: int = 0
    indexed: int = 0
    submitted: int = 0
    """Last number given to the journal, received or not."""
    revision: int = 0
    """The memory's revision that made `stored` true."""
    recent: OrderedDict[int, tuple[bytes, Rejection | None]] = field(default_factory=OrderedDict)
    """Hashes and rejections of numbers submitted, received or not."""
    receiving: asyncio.Task[None] | None = None
    """The journal's work on the latest batch submitted."""
    session: ObserveSession | None = None
    whole: bool = False
    """Its batches are received whole or not at all: nobody would be told which of their items were refused."""
    outcomes: bool = False
    """Keep what becomes of the observations submitted from now on, to send it again to a client that resumes."""

    def expected(self) -> int:
        return self.submitted + 1

    def remember(self, first: int, hashes: Sequence[bytes], rejections: Sequence[Rejection]) -> None:
        refused = {rejection.sequence: rejection for rejection in rejections}
        for number, digest in enumerate(hashes, first):
            self.recent[number] = (digest, refused.get(number))
        while len(self.recent) > RECENT_MAX:
            self.recent.popitem(last=False)

    def forget_after(self, number: int) -> None:
        """Numbers beyond it were submitted and not received: they may come again with other content."""
        while self.recent and next(reversed(self.recent)) > number:
            self.recent.popitem()

    def check_repeats(self, first: int, items: Sequence[NewObservation | Refusal]) -> None:
        """Raises SequenceConflict for what is known here, before anything of the batch is taken in."""
        for number, item in enumerate(items, first):
            if number in self.recent:
                self.check_repeat(number, item.digest, self.recent[number])

    def check_gap(self, first: int) -> None:
        """Raises SequenceGap when a batch starts beyond the number expected."""
        if first > self.expected():
            raise SequenceGap(
                f"the batch starts at {first}, expected {self.expected()}; open again and continue from there",
                expected_sequence=self.expected(),
            )

    def check_repeat(self, number: int, digest: bytes, known: tuple[bytes, Rejection | None]) -> Rejection | None:
        """The rejection this number got the first time, if any. Raises SequenceConflict when the content differs."""
        if known[0] != digest:
            raise SequenceConflict(
                f"number {number} of producer {self.name!r} was received before with other content; "
                "two processes may share the producer's name",
                sequence=number,
            )
        return known[1]

    def advance(self, *, received: int = 0, stored: int = 0, revision: int = 0) -> None:
        """Levels never go back; whoever watches is told."""
        self.received = max(self.received, received)
        if stored > self.stored:
            self.stored, self.revision = stored, revision
        self.tell()

    def tell(self) -> None:
        if self.session is not None:
            self.session.tell()


class SubmissionTarget(Protocol):
    """The memory that a session submits to."""

    @property
    def journal(self) -> Journal: ...

    def turn(self) -> AbstractAsyncContextManager[None]: ...

    def submit(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | Refusal],
        awaited: AckLevel,
        answer: Answer | None,
    ) -> asyncio.Future[None]: ...

    def released(self, state: ProducerState) -> None: ...


class ObserveSession:
    """One open Observe stream of a producer. Not for use by several tasks at once."""

    def __init__(self, target: SubmissionTarget, state: ProducerState, opened: Opened) -> None:
        self.opened = opened
        self.news = asyncio.Event()
        """Set when something is new, and by whatever else wakes the one that waits for it and clears it."""
        self._target = target
        self._state = state
        self._error: EngineError | None = None
        self._closed = False
        self._rejected: list[Rejection] = []
        self._outcomes: list[Outcome] = []

    def submit(
        self,
        first_sequence: int,
        items: Sequence[NewObservation | Refusal],
        awaited: AckLevel = AckLevel.RECEIVED,
        answer: Answer | None = None,
    ) -> asyncio.Future[None]:
        """Give a batch to the journal; the future is done once it is received. `awaited` is what its client waits for:
        one that waits for more than that is not told of it a commit earlier. `answer` goes into its receipt.

        Raises SequenceGap, SequenceConflict, BacklogFull or the session's own end, at once or in the future.
        """
        self._raise_if_ended()
        return self._target.submit(self._state, first_sequence, items, awaited, answer)

    async def resume(self, known: int) -> Resumption:
        """What a client that knows all up to `known` has missed. Raises JournalUnavailable."""
        return await begin_resumption(self._target.journal, self._state.name, self._state.outcomes, self.opened, known)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """To read and submit a batch in: both are computed, and a hundred streams may send at once."""
        return self._target.turn()

    def progress(self) -> Progress:
        """Where the producer stands, and what was refused and decided since it was asked last.

        Raises what ended the session.
        """
        self._raise_if_ended()
        return self._progress()

    async def reached(self, level: AckLevel, sequence: int) -> Progress:
        """Waits until everything up to `sequence` has reached `level`."""
        while True:
            if self._level(level) >= sequence:  # what is reached stays so, however the session ended since
                return self._progress()
            self._raise_if_ended()
            await self.news.wait()
            self.news.clear()

    def close(self) -> None:
        """Let go of the producer; what was received goes its way all the same."""
        if self._closed:
            return
        self._closed = True
        if self._state.session is self:
            self._state.session = None
        self._target.released(self._state)

    @property
    def error(self) -> EngineError | None:
        """What ended the session, if anything did."""
        return self._error

    @property
    def indexed_behind(self) -> bool:
        """Whether something stored is not known to be in the index."""
        return self._state.indexed < self._state.stored

    # ---- told by the actor
    def tell(self) -> None:
        self.news.set()

    def fail(self, error: EngineError) -> None:
        """End the session: every waiting and later call raises `error`."""
        if self._error is None:
            self._error = error
        self.news.set()

    def reject(self, rejections: Sequence[Rejection]) -> None:
        self._rejected.extend(rejections)
        self.news.set()

    def decided(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes.extend(outcomes)

    # ---- inside
    def _level(self, level: AckLevel) -> int:
        state = self._state
        return {AckLevel.RECEIVED: state.received, AckLevel.STORED: state.stored, AckLevel.INDEXED: state.indexed}[
            level
        ]

    def _progress(self) -> Progress:
        rejected, self._rejected = tuple(self._rejected), []
        outcomes, self._outcomes = tuple(self._outcomes), []
        state = self._state
        return Progress(state.received, state.stored, state.indexed, state.revision, rejected, outcomes)

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error
