"""Producers of an active memory: their numbers and progress, and the observations that wait to be stored (`Producers`).

`ingest.py` fills it, the actor empties it; it knows neither.

A session that resumes reads the rejections and outcomes that its client has missed from the kept receipts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memstream_server.engine.errors import EngineError, JournalUnavailable, SequenceConflict, SequenceGap
from memstream_server.engine.requests import Missed, Opened
from memstream_server.engine.runtime.call_context import Origin, empty_origin
from memstream_server.ports.journal.errors import JournalError
from memstream_server.ports.journal.port import Journal
from memstream_server.ports.journal.reading import LoadedMemory
from memstream_server.ports.journal.writing import BatchReceipt, Outcome, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memstream_server.core.values import Fragment
    from memstream_server.engine.requests import NewObservation, RejectedObservation
    from memstream_server.engine.runtime.dependencies import Runtime


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
    session: SessionNews | None = None
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
            self.session.news.set()


class SessionNews:
    """What a producer tells its open session: progress, rejections, outcomes, and the error that ends it."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Set on progress. Other code may also set it to wake the waiting task, which clears it."""
        self.error: EngineError | None = None
        """The error that ended the session, if any."""
        self._rejected: list[Rejection] = []
        self._outcomes: list[Outcome] = []

    def fail(self, error: EngineError) -> None:
        """End the session: every waiting and later call raises `error`."""
        if self.error is None:
            self.error = error
        self.news.set()

    def add_rejections(self, rejections: Sequence[Rejection]) -> None:
        self._rejected.extend(rejections)
        self.news.set()

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes.extend(outcomes)


@dataclass(slots=True, eq=False)
class Batch:
    """A receipt that waits to be stored, and its producer (None for unnumbered batches after a restart).

    Its creator sets `at_once`; after that it does not change.
    """

    receipt: BatchReceipt
    producer: ProducerState | None
    arrived_s: float | None = None
    """Monotonic time of arrival; None if an earlier process received it."""
    origin: Origin = field(default_factory=empty_origin)
    at_once: bool = False
    """The journal has not received it: the commit that stores it also receives it."""
    size: int = field(init=False)
    """Its observations."""

    def __post_init__(self) -> None:
        self.size = len(self.receipt.fragments)


class Producers:
    """The producers of an active memory, and its observations that wait to be stored. It writes nothing itself."""

    def __init__(self, loaded: LoadedMemory, runtime: Runtime) -> None:
        self._runtime = runtime
        waiting = {receipt.producer for receipt in loaded.pending}
        self.by_name = {  # those with a session, or with observations that are not yet stored
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
        self.opening: set[asyncio.Task[Any]] = set()
        """Streams that are being opened."""
        self.sessions = 0
        """Open sessions of streams and calls, and those that are being opened."""
        self.next_position = loaded.next_position
        self.backlog = 0
        """Observations that are submitted and not yet stored."""
        self.puts = 0
        """Observations that are stored without a receipt now; see `quotas.admit_puts`."""
        self.unstored: dict[int, Batch] = {}
        """Batches that are received or will be stored directly, by position."""
        self.submitted: dict[int, Batch] = {}
        """Batches that the journal is receiving."""
        self.receiving: set[asyncio.Task[None]] = set()
        """The tasks of submitted batches."""
        self.order = asyncio.Lock()
        """Held while batches are stored directly."""
        self.waiting: deque[Batch] = deque()
        """Batches that wait for a direct commit."""
        self.storing = 0
        """Observations in direct batches that are not yet stored. The next batch may be direct if all others are."""
        self.at_once: asyncio.Task[Any] | None = None
        """The task that runs a direct commit now."""
        self._answers: dict[str, asyncio.Future[None]] = {}
        """Calls that wait for a batch of an earlier process to be stored, by request key."""

    def list_all(self) -> list[ProducerState]:
        """All producers with a session or a backlog, including unnumbered calls."""
        return [*self.by_name.values(), *self._unnumbered]

    def received_of(self, producer: str) -> int | None:
        """The last number that a producer has sent; None if it has neither a session nor a backlog."""
        state = self.by_name.get(producer)
        return None if state is None else max(state.received, state.submitted)

    @property
    def is_held(self) -> bool:
        """Whether a session is open or a journal write is in flight."""
        return bool(self.receiving or self.sessions)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and no session is open."""
        return not (self.backlog or self.is_held)

    def has_unstored(self, ids: Collection[str]) -> bool:
        """Whether one of these ids is received and not yet stored."""
        return any(one.id in ids for batch in self.unstored.values() for one in batch.receipt.fragments)

    def list_waiting(self) -> Iterator[Fragment]:
        """The observations that are submitted and not yet stored."""
        for batch in (*self.unstored.values(), *self.submitted.values()):
            yield from batch.receipt.fragments

    async def wait_for_answer(self, request: str) -> None:
        """Wait until the batch of this request, if one waits, is stored. Raises the error that ends the actor."""
        if any(_request_of(batch) == request for batch in self.unstored.values()):
            waiter = self._answers.setdefault(request, asyncio.get_running_loop().create_future())
            await asyncio.shield(waiter)

    def take_position(self) -> int:
        """The next position in the order of receipt, for a fragment that is not an observation of a stream."""
        self.next_position += 1
        return self.next_position - 1

    def take_positions_until(self, position: int) -> None:
        """Reserve the positions that imported fragments already have."""
        self.next_position = max(self.next_position, position + 1)

    # ---- sessions
    def add_unnumbered(self, state: ProducerState) -> None:
        """A call without numbers has a session of its own."""
        self.sessions += 1
        self._unnumbered.add(state)

    def release_session(self, state: ProducerState) -> None:
        """A session of this producer was closed."""
        self.sessions -= 1
        self._unnumbered.discard(state)
        self.drop_if_done(state)

    def drop_if_done(self, state: ProducerState) -> None:
        """Drop a producer that the journal can restore; otherwise every producer ever seen would stay in RAM."""
        if state.session is None and state.stored >= state.submitted and self.by_name.get(state.name) is state:
            del self.by_name[state.name]

    def count_received(self, batch: Batch) -> None:
        """The journal has this batch: count it, and give its rejections to the session."""
        state, receipt = batch.producer, batch.receipt
        if receipt.rejections and state is not None and state.session is not None:
            state.session.add_rejections(receipt.rejections)
        age_s = 0.0 if batch.arrived_s is None else self._runtime.clock.monotonic_s() - batch.arrived_s
        self._runtime.metrics.count_received(batch.size, len(receipt.rejections), age_s)

    # ---- called by the actor
    def mark_stored(self, batches: Sequence[Batch], outcomes: dict[int, Outcome], revision: int) -> None:
        """The commit of this revision has these batches: notify their sessions and calls."""
        for batch in batches:
            self.backlog -= batch.size
            del self.unstored[batch.receipt.position]
            age_s = None if batch.arrived_s is None else self._runtime.clock.monotonic_s() - batch.arrived_s
            if batch.at_once:
                self.storing -= batch.size
                self.count_received(batch)
            self._runtime.metrics.count_stored(batch.size, age_s)
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
            state.advance_levels(received=last, stored=last, revision=revision)
            self.drop_if_done(state)

    async def wait_for_journal(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the journal's answers to submitted batches."""
        tasks = self.receiving - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    def end_sessions(self, error: EngineError) -> None:
        """End all open sessions and direct batches with `error`."""
        if self.at_once is not None and self.at_once is not asyncio.current_task():
            self.at_once.cancel()
        for state in self.list_all():
            if state.session is not None:
                state.session.fail(error)
        for waiter in self._answers.values():
            waiter.set_exception(error)
            waiter.exception()  # marks it as retrieved: all callers may have left
        self._answers.clear()


def _request_of(batch: Batch) -> str:
    return "" if batch.receipt.answer is None else batch.receipt.answer.request


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
