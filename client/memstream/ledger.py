"""Tracks the observations of a producer that are not yet stored: numbers, window, batches, acknowledgements; no I/O.

Rule 1: an observation gets its number once, in order, and keeps it across connections.
Rule 2: an observation is buffered until it is stored, and resent on each new connection until it is received. The
server recognises a repeat by number and content, so that it counts once.
Rule 3: the observations buffered but not received never exceed the granted window, in count and in bytes.
Rule 4: an observation that the server had received before this connection, without acknowledging it, is settled by the
answer to its repeat, not by its number: only that answer says whether it was rejected. A flush after the last repeat
marks that point.
Rule 5: up to `stored`, every rejection and outcome is known here. A new connection requests those of later numbers and
reads them first, so that a lost connection loses none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memstream.codec import outcome_from_wire, rejected_from_wire
from memstream.errors import MemstreamError, ProducerSuperseded, ServerBehind
from memstream.sent import Sent
from memstream.v1 import fragment_pb2, stream_service_pb2
from memstream.values import AckLevel, Rejected, Resumption

BATCH_BYTES_MAX = 1 << 20
"""Bytes of observations in one message; larger messages are not faster."""
_MESSAGE_BYTES = 4 << 20  # gRPC's default limit, if the server names none
_FRAME_BYTES = 64  # overhead of a message with one observation
REJECTED_KEPT = 1000
"""Rejections that a stream keeps."""


@dataclass(slots=True)
class Item:
    """One numbered observation and its size on the wire."""

    sent: Sent
    observation: fragment_pb2.Observation
    size: int

    @property
    def sequence(self) -> int:
        """Its number."""
        return self.sent.sequence


class Ledger:
    """The numbered observations of one stream, in four queues: queue, flight, kept and bare.

    queue: to send on this connection; flight: sent on it, not received; kept: received, not stored, buffered in case
    the
    server loses them; bare: as kept, but over the byte limit of the buffer, so only their numbers are known.
    """

    def __init__(self, batch_max: int, known_sequence: int | None = None) -> None:
        """`known_sequence` is the last number whose result an earlier process of the producer knew."""
        self.received = 0
        self.stored = 0
        self.indexed = 0
        self.revision = 0
        self.last = 0
        self.rejected: deque[Rejected] = deque(maxlen=REJECTED_KEPT)
        self.rejected_count = 0
        self.resumption: Resumption | None = None
        self._known = known_sequence
        self._started = False
        self._repeats_upto = 0
        self._batch_max = batch_max
        self._batch_bytes = BATCH_BYTES_MAX
        self._message_bytes = _MESSAGE_BYTES
        self._window_observations = 0
        self._window_bytes = 0
        self._sent: dict[int, Sent] = {}
        self._queue: deque[Item] = deque()
        self._flight: deque[Item] = deque()
        self._kept: deque[Item] = deque()
        self._bare: deque[Sent] = deque()
        self._queue_bytes = self._flight_bytes = self._kept_bytes = 0

    def apply_opened(self, opened: stream_service_pb2.ObserveOpened) -> None:
        """Handles an opened connection: the first sets the next number, later ones decide what to resend.

        Raises ServerBehind when the server expects acknowledged numbers that are no longer buffered, ProducerSuperseded
        when another process has used numbers of this producer.
        """
        self._set_window(opened)
        if not self._started:
            self._started = True
            self.received, self.stored = opened.received, opened.stored
            self.last = max(opened.expected_sequence, 1) - 1
            self.revision = opened.revision
            return
        if opened.expected_sequence > self.last + 1:
            raise ProducerSuperseded(
                f"observation {opened.expected_sequence} is expected, but only {self.last} were made here: "
                "another process uses this producer's name"
            )
        self._requeue_items(self._flight)
        self._flight_bytes = 0
        self._repeats_upto = opened.received if opened.received > self.received else 0
        if opened.expected_sequence <= self.received:
            self._roll_back(opened.expected_sequence)
        # Only this message reports what was stored meanwhile. Not for repeats: they may have been rejected.
        self.revision = opened.revision  # lower than before if the server was restored
        self._mark_stored(min(opened.stored, self.received))

    @property
    def known_sequence(self) -> int | None:
        """The `known_sequence` of `open`; None requests nothing."""
        return self.stored if self._started else self._known

    def apply_resumption(
        self,
        opened: stream_service_pb2.ObserveOpened,
        rejected: Sequence[stream_service_pb2.RejectedObservation],
        outcomes: Sequence[stream_service_pb2.ObservationOutcome],
    ) -> None:
        """Records the rejections and outcomes requested by `known_sequence`; call it before `opened`."""
        if self._started:
            self._reject_items(rejected)
            self._record_outcomes(outcomes)
            return
        refused = tuple(map(rejected_from_wire, rejected))  # of an earlier process
        became = tuple(map(outcome_from_wire, outcomes))
        self.resumption = Resumption(refused, became, opened.rejected_since, opened.outcomes_since)

    @property
    def size_max(self) -> int:
        """Bytes of the largest observation that fits into an empty window and a message."""
        return min(self._window_bytes, self._message_bytes - _FRAME_BYTES)

    def has_room(self, size: int) -> bool:
        """Whether the window has room for an observation of that many bytes."""
        count = len(self._queue) + len(self._flight)
        unreceived_bytes = self._queue_bytes + self._flight_bytes
        return count < self._window_observations and unreceived_bytes + size <= self._window_bytes

    def add_observation(self, observation: fragment_pb2.Observation, size: int) -> Sent:
        """Numbers an observation and queues it."""
        self.last += 1
        item = Item(Sent(self.last), observation, size)
        self._sent[self.last] = item.sent
        self._queue.append(item)
        self._queue_bytes += size
        return item.sent

    def next_batch(self) -> stream_service_pb2.ObservationBatch | None:
        """The next batch, as large as the window and a message allow; None when nothing may be sent."""
        taken: list[Item] = []
        size = 0
        while self._queue and len(taken) < self._batch_max:
            item = self._queue[0]
            if not self._may_send(item) or (taken and size + item.size > self._batch_bytes):
                break
            if taken and taken[0].sequence <= self._repeats_upto < item.sequence:
                break
            self._queue.popleft()
            self._flight.append(item)
            self._queue_bytes -= item.size
            self._flight_bytes += item.size
            size += item.size
            taken.append(item)
        if not taken:
            return None
        observations = [item.observation for item in taken]
        return stream_service_pb2.ObservationBatch(first_sequence=taken[0].sequence, observations=observations)

    @property
    def repeats_sent(self) -> bool:
        """Whether all repeats that may be sent are sent but not settled: time to flush."""
        if not self._queue or self._queue[0].sequence > self._repeats_upto:
            return self._repeats_upto > 0
        return not self._may_send(self._queue[0])  # the window has shrunk since they were first sent

    def settle_repeats(self) -> None:
        """Records the answer to the flush after the last repeat."""
        if self._queue and self._queue[0].sequence <= self._repeats_upto:
            self._mark_received(self._queue[0].sequence - 1)
        else:
            self._repeats_upto = 0

    @property
    def all_sent(self) -> bool:
        """Whether everything is sent on this connection."""
        return not self._queue

    @property
    def all_received(self) -> bool:
        """Whether the server has received everything sent on this connection."""
        return not self._flight

    def acknowledged_up_to(self, level: AckLevel) -> int:
        """The number up to which everything has reached `level`."""
        return {AckLevel.RECEIVED: self.received, AckLevel.STORED: self.stored, AckLevel.INDEXED: self.indexed}[level]

    def apply_ack(self, ack: stream_service_pb2.Ack) -> bool:
        """Applies an acknowledgement and returns whether there was progress; repeated and outdated ones change
        nothing."""
        self._reject_items(ack.rejected)
        self._record_outcomes(ack.outcomes)
        self.revision = max(self.revision, ack.revision)
        settled = self.received if self._repeats_upto else ack.received
        stored = min(ack.stored, max(settled, self.received))
        progress = settled > self.received or stored > self.stored
        self._mark_received(settled)
        self._mark_stored(stored)
        self.indexed = max(self.indexed, min(ack.indexed, self.stored))
        return progress

    def fail_pending(self, error: MemstreamError) -> None:
        """Ends the stream: every pending observation fails with `error`."""
        for sent in self._sent.values():
            sent.mark_failed(error)

    def _set_window(self, opened: stream_service_pb2.ObserveOpened) -> None:
        limits = opened.limits
        self._message_bytes = limits.message_bytes_max or _MESSAGE_BYTES
        self._window_observations = max(opened.window_observations, 1)
        self._window_bytes = max(opened.window_bytes, 1)
        if limits.batch_max:
            self._batch_max = min(self._batch_max, limits.batch_max)
        if limits.message_bytes_max:
            # Half: the message adds overhead to every observation.
            self._batch_bytes = min(BATCH_BYTES_MAX, limits.message_bytes_max // 2)

    def _may_send(self, item: Item) -> bool:
        if not self._flight:
            return True
        fits = self._flight_bytes + item.size <= self._window_bytes
        return fits and len(self._flight) < self._window_observations

    def _requeue_items(self, items: deque[Item]) -> None:
        self._queue.extendleft(reversed(items))
        self._queue_bytes += sum(item.size for item in items)
        items.clear()

    def _roll_back(self, expected: int) -> None:
        if not self._kept or self._kept[0].sequence > expected:
            raise ServerBehind(expected, self.received)
        lost: deque[Item] = deque()
        while self._kept and self._kept[-1].sequence >= expected:
            item = self._kept.pop()
            self._kept_bytes -= item.size
            lost.appendleft(item)
        self._requeue_items(lost)
        self.received = expected - 1

    def _reject_items(self, refusals: Iterable[stream_service_pb2.RejectedObservation]) -> None:
        for wire in refusals:
            sent = self._sent.get(wire.sequence)
            rejected = rejected_from_wire(wire)
            if sent is not None and sent.mark_failed(rejected.error):
                self.rejected.append(rejected)
                self.rejected_count += 1

    def _record_outcomes(self, outcomes: Iterable[stream_service_pb2.ObservationOutcome]) -> None:
        for wire in outcomes:
            sent = self._sent.get(wire.sequence)
            if sent is not None:
                sent.record_outcome(outcome_from_wire(wire))

    def _mark_received(self, upto: int) -> None:
        while self._flight and self._flight[0].sequence <= upto:
            item = self._flight.popleft()
            self._flight_bytes -= item.size
            self._keep_item(item)
        self.received = max(self.received, upto)

    def _keep_item(self, item: Item) -> None:
        self._kept.append(item)
        self._kept_bytes += item.size
        while self._kept_bytes > self._window_bytes:
            oldest = self._kept.popleft()
            self._kept_bytes -= oldest.size
            self._bare.append(oldest.sent)

    def _mark_stored(self, upto: int) -> None:
        while self._bare and self._bare[0].sequence <= upto:
            self._settle_item(self._bare.popleft())
        while self._kept and self._kept[0].sequence <= upto:
            item = self._kept.popleft()
            self._kept_bytes -= item.size
            self._settle_item(item.sent)
        self.stored = max(self.stored, upto)

    def _settle_item(self, sent: Sent) -> None:
        del self._sent[sent.sequence]
        sent.mark_stored(self.revision)
