"""Observe: observations of a producer in, cumulative acknowledgements out.

Rule 1. One task reads requests; the generator follows the session and is the only writer. They share this object's
fields, so acknowledgements are merged while a client is slow, and no queue grows.
Rule 2. The acknowledgement of *received* returns flow-control credit, and nothing else does: a client that does not
read acknowledgements runs out of window instead of filling the server's memory.
Rule 3. A client error ends the stream only after everything that the client sent before was received and acknowledged.
Rule 4. A request stream that ends without `close` is an abandoned producer: the server does not wait for *stored*.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from memstream.v1 import stream_service_pb2 as pb
from memstream_server.engine.errors import (
    REFUSED_RETRY_S,
    BacklogFull,
    EngineError,
    ProtocolViolation,
    QuotaExceeded,
    WindowExceeded,
)
from memstream_server.engine.requests import (
    RELATED_MAX,
    AckLevel,
    NewObservation,
    ProducerProgress,
    RejectedObservation,
)
from memstream_server.ports.journal.writing import Outcome
from memstream_server.rpc.calls import AFTER_CLOSE_S
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import RETRY_S
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.validation import (
    Violations,
    check_bounds,
    check_identifier,
    invalid_field,
    memory_name,
    not_negative,
)
from memstream_server.rpc.wire import observations
from memstream_server.rpc.wire.observations import ACK_LEVELS, outcome_messages, rejected_messages
from memstream_server.rpc.wire.scalars import duration_message

if TYPE_CHECKING:
    from memstream_server.engine.engine import ObserveSession
    from memstream_server.engine.status import WriteStatus
    from memstream_server.ports.journal.writing import Rejection

SEQUENCE_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ObserveOpening:
    """A validated `open`."""

    namespace: str
    memory: str
    producer: str
    session: str
    level: AckLevel
    outcomes: bool
    related: int = 0
    """How many related statements each outcome names."""
    known: int | None = None
    """The sequence number up to which the client knows rejections and outcomes; None: it does not ask for missed ones.
    """


def read_open(message: pb.ObserveRequest, limits: RequestLimits) -> ObserveOpening:
    """Validates the first message of a stream. Raises ProtocolViolation, InvalidField."""
    if message.WhichOneof("message") != "open":
        raise ProtocolViolation("the first message of an Observe stream must be `open`")
    given, found = message.open, Violations()
    namespace, memory = memory_name(found, given.namespace, given.memory, limits, "open.")
    opening = ObserveOpening(
        namespace,
        memory,
        check_identifier(found, "open.producer", given.producer, limits, required=True),
        check_identifier(found, "open.session", given.session, limits),
        ACK_LEVELS.read_value(found, "open.ack_level", given.ack_level, AckLevel.STORED),
        given.outcomes,
        read_related(found, "open.related", given.related),
        _read_known_sequence(found, given.known_sequence) if given.HasField("known_sequence") else None,
    )
    found.check()
    return opening


def read_related(found: Violations, field: str, count: int) -> int:
    """How many related statements an outcome names."""
    return int(check_bounds(found, field, count, 0, RELATED_MAX))


def _read_known_sequence(found: Violations, known: int) -> int:
    if known >= SEQUENCE_MAX:  # the number after it must fit into the response
        found.add("open.known_sequence", f"is {known}: numbers end before {SEQUENCE_MAX}")
    return not_negative(found, "open.known_sequence", known)


def check_numbers(first: int, count: int, limits: RequestLimits, prefix: str = "") -> None:
    """Validates a batch's size and numbers. Raises InvalidField."""
    if count == 0:
        raise invalid_field(f"{prefix}observations", "is empty")
    if count > limits.batch_max:
        raise invalid_field(
            f"{prefix}observations", f"has {count} observations, at most {limits.batch_max} are allowed"
        )
    if not 1 <= first <= SEQUENCE_MAX - count:
        raise invalid_field(f"{prefix}first_sequence", f"is {first}: numbers start at 1 and end before 2^63")


class _InFlight(Struct, frozen=True):
    last: int
    count: int
    size: int
    repeat: bool
    """Whether the whole batch is a repeat: it needs an acknowledgement although no number advances."""
    received: asyncio.Future[None]


class ObserveStream:
    """One open stream. `responses` runs once."""

    def __init__(
        self,
        session: ObserveSession,
        opening: ObserveOpening,
        limits: RequestLimits,
        drain: Drain,
        dimension: int,
        writing: WriteStatus,
    ) -> None:
        self._session = session
        self._opening = opening
        self._limits = limits
        self._drain = drain
        self._writing = writing
        self._dimension = dimension
        opened = session.opened
        self._received = opened.received
        self._stored = opened.stored
        self._indexed = 0
        self._revision = opened.revision
        self._last_sent = opened.received
        """Highest sequence number that this stream sent, or that was received before it."""
        self._in_flight: deque[_InFlight] = deque()
        self._observations_in_flight = 0
        self._bytes_in_flight = 0
        self._rejected: list[Rejection] = []
        self._outcomes: list[Outcome] = []
        self._flushes: deque[tuple[int, int]] = deque()
        """(flush_id, sequence number that must have reached the level)."""
        self._flushed = 0
        self._outcomes_resumed_to = opened.stored if opening.known is not None else 0
        """Outcomes up to this number were sent again when the stream opened, ..."""
        self._resumed_to = 0
        """... and rejections up to this one."""
        self._ack_due = False
        self._throttle: pb.Throttle | None = None
        self._closing = False
        self._going_away = False
        self._grace_over = False
        self._wake = session.news

    async def responses(self, requests: AsyncIterator[pb.ObserveRequest]) -> AsyncGenerator[pb.ObserveResponse, None]:
        """Yields every message of the server, until `closed`, the end of the requests, or an error."""
        self._poll_progress()  # `opened` lacks *indexed*, and progress since the session opened
        self._wake.set()
        reader = asyncio.create_task(self._read_requests(requests))
        reader.add_done_callback(lambda _: self._wake.set())
        try:
            with self._drain.notify_on_drain(self._on_drain), self._writing.notify_on_change(self._on_write_problem):
                async with aclosing(self._opening_messages()) as messages:
                    async for message in messages:
                        yield message
                while True:
                    await self._wake.wait()
                    self._wake.clear()
                    if self._drain.begun and not self._going_away:  # first, because pending responses may raise
                        self._going_away = True
                        yield pb.ObserveResponse(going_away=self._drain.going_away_message())
                    ended = self._poll_progress()
                    due = self._pending_responses()
                    for response in due:
                        yield response
                    if ended is not None:
                        raise ended
                    if self._grace_over:
                        raise self._drain.shutdown_error()
                    if not self._wake.is_set() and self._is_finished(reader):  # else more may be pending by now
                        break
            if self._closing:
                await asyncio.wait({reader}, timeout=AFTER_CLOSE_S)
                _raise_failure(reader)
                yield pb.ObserveResponse(closed=self._closed_message())
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    # ---- requests
    async def _read_requests(self, requests: AsyncIterator[pb.ObserveRequest]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if self._closing:
                raise ProtocolViolation(f"a message ({kind}) came after `close`")
            if kind == "batch":
                await self._accept_batch(message.batch)  # wakes the writer once the batch is received
                continue
            if kind == "flush":
                self._accept_flush(message.flush)
            elif kind == "close":
                self._closing = True
            elif kind == "open":
                raise ProtocolViolation("a second `open` came; a stream has one, its first message")
            else:
                raise ProtocolViolation("a message came with nothing set")
            self._wake.set()

    async def _accept_batch(self, batch: pb.ObservationBatch) -> None:
        count = len(batch.observations)
        check_numbers(batch.first_sequence, count, self._limits, "batch.")
        items, size = await observations.read_batch(
            list(batch.observations), self._opening.session, self._limits, self._dimension
        )
        self._check_window(count, size)
        full = await self._session.find_full()
        received = self._submit_batch(batch.first_sequence, items, full)
        if isinstance(received, BacklogFull):
            received = await self._submit_later(received, batch.first_sequence, items, full)
        last = batch.first_sequence + count - 1
        self._in_flight.append(_InFlight(last, count, size, last <= self._received, received))
        self._observations_in_flight += count
        self._bytes_in_flight += size
        self._last_sent = max(self._last_sent, last)
        received.add_done_callback(self._on_received)

    def _on_received(self, received: asyncio.Future[None]) -> None:
        """Wake the writer for what the session's levels do not show: an error, or a repeated batch that was compared.

        Any other batch has raised a level, which has woken the writer already. A repeated batch behind the first one
        in flight follows it.
        """
        failed = received.cancelled() or received.exception() is not None
        if failed or (self._in_flight and self._in_flight[0].repeat):
            self._wake.set()

    def _check_window(self, count: int, size: int) -> None:
        for held, more, most, unit in (
            (self._observations_in_flight, count, self._limits.window_observations, "observations"),
            (self._bytes_in_flight, size, self._limits.window_bytes, "bytes"),
        ):
            if held + more > most:
                raise WindowExceeded(
                    f"{held} {unit} are in flight and {more} more came, the window is {most}; wait for acknowledgements"
                )

    def _submit_batch(
        self, first: int, items: Sequence[NewObservation | RejectedObservation], full: QuotaExceeded | None
    ) -> asyncio.Future[None] | BacklogFull:
        """Submits the batch to the engine."""
        try:
            return self._session.submit(first, items, self._opening.level, full=full)
        except BacklogFull as full:
            return full

    async def _submit_later(
        self,
        backlog: BacklogFull,
        first: int,
        items: Sequence[NewObservation | RejectedObservation],
        full: QuotaExceeded | None,
    ) -> asyncio.Future[None]:
        """Retries while the backlog is full, for a limited time, and throttles the client."""
        deadline = asyncio.get_running_loop().time() + self._limits.backlog_wait_s
        while True:
            delay_s = max(0.01, backlog.retry_after_s or RETRY_S[backlog.reason])
            if asyncio.get_running_loop().time() + delay_s > deadline:
                raise backlog
            self._throttle_client(delay_s, "the memory's backlog is full")
            await asyncio.sleep(delay_s)
            received = self._submit_batch(first, items, full)
            if not isinstance(received, BacklogFull):
                return received
            backlog = received

    def _accept_flush(self, flush: pb.ObserveFlush) -> None:
        if flush.flush_id < 1:
            raise invalid_field("flush.flush_id", f"is {flush.flush_id}: it must be 1 or more")
        flush_id = flush.flush_id
        if self._flushes and self._flushes[-1][1] == self._last_sent:  # they complete together
            flush_id = max(flush_id, self._flushes.pop()[0])
        elif len(self._flushes) >= self._limits.window_observations:
            raise WindowExceeded(f"{len(self._flushes)} flushes wait, more are not allowed; wait for acknowledgements")
        self._flushes.append((flush_id, self._last_sent))

    # ---- progress of the session
    def _poll_progress(self) -> EngineError | None:
        """Returns the error that ended the session, if any."""
        try:
            self._merge_progress(self._session.take_progress())
        except EngineError as error:
            return error
        return None

    def _merge_progress(self, progress: ProducerProgress) -> None:
        before = self._received, self._stored, self._indexed
        self._received = max(self._received, progress.received)
        if progress.stored >= self._stored:
            self._stored, self._revision = progress.stored, max(self._revision, progress.revision)
        self._indexed = max(self._indexed, progress.indexed)
        self._rejected.extend(progress.rejected)
        if self._opening.outcomes:
            self._outcomes.extend(one for one in progress.outcomes if one.sequence > self._outcomes_resumed_to)
        moved = before != (self._received, self._stored, self._indexed)
        self._ack_due = self._ack_due or moved or bool(self._rejected or self._outcomes)

    def _on_drain(self) -> None:
        asyncio.get_running_loop().call_later(self._drain.grace_s, self._on_grace_over)
        self._wake.set()

    def _on_write_problem(self) -> None:
        problem = self._writing.problem
        if problem:
            self._throttle_client(REFUSED_RETRY_S, problem)

    def _throttle_client(self, delay_s: float, why: str) -> None:
        self._throttle = pb.Throttle(retry_delay=duration_message(delay_s), description=why)
        self._wake.set()

    def _on_grace_over(self) -> None:
        self._grace_over = True
        self._wake.set()

    # ---- responses
    def _pending_responses(self) -> list[pb.ObserveResponse]:
        responses = []
        self._return_credits()
        self._complete_flushes()
        if self._ack_due:
            responses.append(pb.ObserveResponse(ack=self._take_ack()))
        if self._throttle is not None:
            responses.append(pb.ObserveResponse(throttle=self._throttle))
            self._throttle = None
        return responses

    def _return_credits(self) -> None:
        """Returns the credit of received batches. Raises the engine's error of a failed one."""
        while self._in_flight:
            batch = self._in_flight[0]
            if batch.received.done():
                batch.received.result()
            elif batch.repeat or batch.last > self._received:
                return
            self._in_flight.popleft()
            self._observations_in_flight -= batch.count
            self._bytes_in_flight -= batch.size
            self._ack_due = self._ack_due or batch.repeat or batch.last > self._received
            self._received = max(self._received, batch.last)

    def _complete_flushes(self) -> None:
        if not self._flushes:
            return
        reached = {AckLevel.RECEIVED: self._received, AckLevel.STORED: self._stored, AckLevel.INDEXED: self._indexed}[
            self._opening.level
        ]
        if self._in_flight:  # a repeated batch must first be compared with the received one
            first = self._in_flight[0]
            reached = min(reached, first.last - first.count)
        while self._flushes and self._flushes[0][1] <= reached:
            self._flushed = max(self._flushed, self._flushes.popleft()[0])
            self._ack_due = True

    def _is_finished(self, reader: asyncio.Task[None]) -> bool:
        """Whether the stream is over. Raises the reader's error once all batches before it are acknowledged."""
        if reader.done() and not self._in_flight:
            _raise_failure(reader)
            if not self._closing:
                return True
        return self._closing and not self._in_flight and self._stored >= self._last_sent

    async def _opening_messages(self) -> AsyncGenerator[pb.ObserveResponse, None]:
        """`opened`, then acknowledgements with the missed rejections and outcomes that the client asked for."""
        opened = self._opened_message()
        if self._opening.known is None:
            yield pb.ObserveResponse(opened=opened)
            return
        resumption = await self._session.resume(self._opening.known)
        opened.resume_to = resumption.upto
        opened.rejected_since, opened.outcomes_since = resumption.rejected_since, resumption.outcomes_since
        async with aclosing(resumption.pages) as pages:
            first = await anext(pages)
            opened.resumed = first.upto
            opened.rejected.extend(rejected_messages(first.rejected))
            opened.outcomes.extend(outcome_messages(first.outcomes))
            yield pb.ObserveResponse(opened=opened)
            async for page in pages:
                ack = pb.Ack(
                    received=opened.received,
                    stored=opened.stored,
                    revision=opened.revision,
                    rejected=rejected_messages(page.rejected),
                    outcomes=outcome_messages(page.outcomes),
                    resumed=page.upto,
                )
                yield pb.ObserveResponse(ack=ack)
        self._resumed_to = resumption.upto

    def _opened_message(self) -> pb.ObserveOpened:
        opened = self._session.opened
        return pb.ObserveOpened(
            received=opened.received,
            stored=opened.stored,
            expected_sequence=opened.received + 1,
            producer_epoch=opened.producer_epoch,
            window_observations=self._limits.window_observations,
            window_bytes=self._limits.window_bytes,
            limits=self._limits.to_message(),
            memory_uid=opened.memory_uid,
            revision=opened.revision,
        )

    def _take_ack(self) -> pb.Ack:
        self._ack_due = False
        rejected, self._rejected = self._rejected, []
        outcomes, self._outcomes = self._outcomes, []
        return pb.Ack(
            received=self._received,
            stored=self._stored,
            indexed=self._indexed,
            revision=self._revision,
            rejected=rejected_messages(rejected),
            outcomes=outcome_messages(outcomes),
            flushed=self._flushed,
            resumed=self._resumed_to,
        )

    def _closed_message(self) -> pb.ObserveClosed:
        return pb.ObserveClosed(
            received=self._received,
            stored=self._stored,
            revision=self._revision,
            rejected=rejected_messages(self._rejected),
            outcomes=outcome_messages(self._outcomes),
        )


def _raise_failure(task: asyncio.Task[None]) -> None:
    if task.done() and not task.cancelled():
        error = task.exception()
        if error is not None:
            raise error
