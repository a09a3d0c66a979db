"""Producers: their sequence numbers, their progress, and the one open session of each.

A session that resumes reads the rejections and outcomes that its client has missed from the kept receipts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memstream_server.engine.errors import EngineError, JournalUnavailable, QuotaExceeded, SequenceConflict, SequenceGap
from memstream_server.engine.requests import AckLevel, Missed, Opened, ProducerProgress
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.records import Answer
from memstream_server.ports.journal.writing import Outcome, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memstream_server.engine.requests import NewObservation, RejectedObservation


RECENT_MAX = 4_096
"""Hashes of sequence numbers kept in RAM per producer: a repeat rarely needs the journal."""
PAGE_RECEIPTS = 256
"""Receipts read at once."""
PAGE_ITEMS = 1_000
"""Rejections and outcomes per message; those of one receipt are never split."""


@dataclass(slots=True, eq=False)
class ProducerState:
    """One producer of an active memory. `name` is empty for the unnumbered observations of a single call."""

    name: str
    epoch: int = 0
    received: int = 0
    stored: int = 0
    indexed: int = 0
    submitted: int = 0
    """Last submitted number, received or not."""
    revision: int = 0
    """The revision that made `stored` true."""
    recent: OrderedDict[int, tuple[bytes, Rejection | None]] = field(default_factory=OrderedDict)
    """Hashes and rejections of submitted numbers, received or not."""
    receiving: asyncio.Task[None] | None = None
    """The task that writes the latest submitted batch."""
    session: ObserveSession | None = None
    whole: bool = False
    """A batch is admitted completely or not at all, because its caller cannot be shown single rejections."""
    outcomes: bool = False
    """Keep the outcomes of observations submitted from now on, for clients that resume."""
    related: int = 0
    """How many related statements the outcomes of observations submitted from now on name."""

    def next_number(self) -> int:
        return self.submitted + 1

    def remember_hashes(self, first: int, hashes: Sequence[bytes], rejections: Sequence[Rejection]) -> None:
        refused = {rejection.sequence: rejection for rejection in rejections}
        for number, digest in enumerate(hashes, first):
            self.recent[number] = (digest, refused.get(number))
        while len(self.recent) > RECENT_MAX:
            self.recent.popitem(last=False)

    def forget_after(self, number: int) -> None:
        """Forget numbers that were submitted but not received: they may come again with other content."""
        while self.recent and next(reversed(self.recent)) > number:
            self.recent.popitem()

    def check_repeats(self, first: int, items: Sequence[NewObservation | RejectedObservation]) -> None:
        """Raises SequenceConflict for a known number with other content, before the batch is admitted."""
        for number, item in enumerate(items, first):
            if number in self.recent:
                self.check_repeat(number, item.digest, self.recent[number])

    def check_gap(self, first: int) -> None:
        """Raises SequenceGap if a batch starts beyond the expected number."""
        if first > self.next_number():
            raise SequenceGap(
                f"the batch starts at {first}, expected {self.next_number()}; open again and continue from there",
                expected_sequence=self.next_number(),
            )

    def check_repeat(self, number: int, digest: bytes, known: tuple[bytes, Rejection | None]) -> Rejection | None:
        """The first rejection of this number, if any. Raises SequenceConflict if the content differs."""
        if known[0] != digest:
            raise SequenceConflict(
                f"number {number} of producer {self.name!r} was received before with other content; "
                "two processes may share the producer's name",
                sequence=number,
            )
        return known[1]

    def advance_levels(self, *, received: int = 0, stored: int = 0, revision: int = 0) -> None:
        """Raise the levels, which never decrease, and notify the session."""
        self.received = max(self.received, received)
        if stored > self.stored:
            self.stored, self.revision = stored, revision
        self.notify_session()

    def notify_session(self) -> None:
        if self.session is not None:
            self.session.notify_waiter()


class SubmissionTarget(Protocol):
    """The memory that a session submits to."""

    @property
    def journal(self) -> Journal: ...

    def submit(
        self,
        state: ProducerState,
        first: int,
        items: Sequence[NewObservation | RejectedObservation],
        awaited: AckLevel,
        answer: Answer | None,
        full: QuotaExceeded | None,
    ) -> asyncio.Future[None]: ...

    async def find_full(self) -> QuotaExceeded | None: ...

    def release_session(self, state: ProducerState) -> None: ...


class ObserveSession:
    """One open Observe stream of a producer. For one task only."""

    def __init__(self, target: SubmissionTarget, state: ProducerState, opened: Opened) -> None:
        self.opened = opened
        self.news = asyncio.Event()
        """Set on progress. Other code may also set it to wake the waiting task, which clears it."""
        self._target = target
        self._state = state
        self._error: EngineError | None = None
        self._closed = False
        self._rejected: list[Rejection] = []
        self._outcomes: list[Outcome] = []

    def submit(
        self,
        first_sequence: int,
        items: Sequence[NewObservation | RejectedObservation],
        awaited: AckLevel = AckLevel.RECEIVED,
        answer: Answer | None = None,
        full: QuotaExceeded | None = None,
    ) -> asyncio.Future[None]:
        """Submit a batch; the future completes when the journal has received it.

        awaited: the level that the client waits for; above RECEIVED, the batch may skip its receipt. answer: stored
        with the receipt. full: of `find_full`, refuses what is not a repeat. Raises SequenceGap, SequenceConflict,
        BacklogFull or the session's error, at once or in the future.
        """
        self._raise_if_ended()
        return self._target.submit(self._state, first_sequence, items, awaited, answer, full)

    async def find_full(self) -> QuotaExceeded | None:
        """Why the namespace may store no more now; None if it may. Raises JournalUnavailable."""
        return await self._target.find_full()

    async def resume(self, known: int) -> Resumption:
        """The rejections and outcomes after number `known`. Raises JournalUnavailable."""
        return await begin_resumption(self._target.journal, self._state.name, self._state.outcomes, self.opened, known)

    def take_progress(self) -> ProducerProgress:
        """The current levels, with rejections and outcomes since the last call.

        Raises the error that ended the session.
        """
        self._raise_if_ended()
        return self._collect_progress()

    async def wait_for_level(self, level: AckLevel, sequence: int) -> ProducerProgress:
        """Wait until everything up to `sequence` has reached `level`."""
        while True:
            if self._level_number(level) >= sequence:  # a reached level stays true after the session ends
                return self._collect_progress()
            self._raise_if_ended()
            await self.news.wait()
            self.news.clear()

    def close(self) -> None:
        """End the session. Received batches are still stored."""
        if self._closed:
            return
        self._closed = True
        if self._state.session is self:
            self._state.session = None
        self._target.release_session(self._state)

    @property
    def error(self) -> EngineError | None:
        """The error that ended the session, if any."""
        return self._error

    @property
    def indexed_behind(self) -> bool:
        """Whether a stored observation may be missing in the index."""
        return self._state.indexed < self._state.stored

    # ---- called by ingest
    def notify_waiter(self) -> None:
        self.news.set()

    def fail(self, error: EngineError) -> None:
        """End the session: every waiting and later call raises `error`."""
        if self._error is None:
            self._error = error
        self.news.set()

    def add_rejections(self, rejections: Sequence[Rejection]) -> None:
        self._rejected.extend(rejections)
        self.news.set()

    def name_related(self, count: int) -> None:
        """Name so many related statements in the outcomes of observations submitted from now on."""
        self._state.related = count

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes.extend(outcomes)

    # ---- inside
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

    def _raise_if_ended(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True)
class Resumption:
    """The rejections and outcomes that a new stream sends again."""

    upto: int
    """The last number that it covers."""
    rejected_since: int
    """Rejections from this number on are complete."""
    outcomes_since: int
    """Outcomes from this number on are complete, up to the stored number at open; 0: the client did not request
    outcomes.
    """
    pages: AsyncGenerator[Missed, None]
    """The caller closes it."""


async def begin_resumption(journal: Journal, producer: str, outcomes: bool, opened: Opened, known: int) -> Resumption:
    """See ObserveSession.resume."""
    try:
        oldest = await journal.kept_receipts(opened.memory_uid, producer, known, 1)
        rejected_since = max(known + 1, oldest[0].first_sequence if oldest else opened.received + 1)
        outcomes_since = 0
        if outcomes:
            unknown = await journal.last_without_outcomes(opened.memory_uid, producer, known, opened.stored)
            outcomes_since = max(rejected_since, unknown + 1)
    except JournalError as error:
        raise _read_error(error) from error
    pages = _read_pages(journal, producer, outcomes, opened, known)
    return Resumption(max(known, opened.received), rejected_since, outcomes_since, pages)


async def _read_pages(
    journal: Journal, producer: str, outcomes: bool, opened: Opened, known: int
) -> AsyncGenerator[Missed, None]:
    """At least one page. The last one ends at the number that was received when the stream opened."""
    page, after = Missed(known), known
    while after < opened.received:
        try:
            receipts = await journal.kept_receipts(opened.memory_uid, producer, after, PAGE_RECEIPTS)
        except JournalError as error:
            raise _read_error(error) from error
        for kept in receipts:
            after = kept.last_sequence
            if after > opened.received:
                break
            became = (kept.outcomes or ()) if outcomes and after <= opened.stored else ()
            page = Missed(
                after,
                page.rejected + tuple(one for one in kept.rejections if one.sequence > known),
                page.outcomes + tuple(one for one in became if one.sequence > known),
            )
            if after < opened.received and len(page.rejected) + len(page.outcomes) >= PAGE_ITEMS:
                yield page
                page = Missed(after)
        if len(receipts) < PAGE_RECEIPTS:
            break
    yield Missed(max(known, opened.received), page.rejected, page.outcomes)


def _read_error(error: JournalError) -> JournalUnavailable:
    return JournalUnavailable(f"the journal could not be read: {error}", retry_after_s=0.5)
