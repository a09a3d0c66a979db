"""The Observe stream: numbered observations, delivered once over any number of connections.

Rule 1: requests are built from the ledger when they are sent, so a broken connection loses none.
Rule 2: only `close` tells the server that the producer has finished. Leaving the stream by an exception abandons it,
and observations that were not received are lost.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TypeAlias, Unpack

import grpc
import grpc.aio

from memstream.arguments import check_methods
from memstream.backoff import Backoff
from memstream.channel import Link, MemoryPath, read_end, read_message
from memstream.codec import Observable, ack_level_to_wire, observation_to_wire
from memstream.errors import MemstreamError, ProtocolViolation, ShuttingDown
from memstream.ledger import Ledger
from memstream.sent import Sent
from memstream.twoway import TwoWayStream
from memstream.v1 import stream_service_pb2 as pb
from memstream.values import AckLevel, ObservationFields, Rejected, Resumption
from memstream.wiretypes import invalid_field

_Call: TypeAlias = grpc.aio.StreamStreamCall[pb.ObserveRequest, pb.ObserveResponse]
BATCH_MAX = 128
"""Observations in one message; gRPC's cost is per message, and larger batches are not cheaper."""
_YIELD_EVERY = 64
_GRACE_MAX_S = 30.0


@check_methods
class ObserveStream(TwoWayStream[pb.ObserveRequest, pb.ObserveResponse]):
    """A producer's stream into one memory, created by `Memory.observe`, opened by `async with`.

    Leaving the block normally flushes and closes; leaving it by an exception abandons the stream. A rejected
    observation
    does not end the stream: `rejected` lists it, and awaiting its `Sent` raises the error; `flush` does not raise. Many
    tasks of one event loop may share a stream.
    """

    def __init__(
        self,
        link: Link,
        memory: MemoryPath,
        producer: str,
        session: str,
        ack_level: AckLevel,
        outcomes: bool,
        known_sequence: int | None = None,
        related: int = 0,
    ) -> None:
        super().__init__(link, memory)
        self.producer = producer
        self.session = session
        self.ack_level = AckLevel(ack_level)
        self._outcomes = outcomes or related > 0
        self._related = related
        self._ledger = Ledger(BATCH_MAX, known_sequence)
        self._turn = asyncio.Lock()
        self._finished = False
        self._flush_ids = itertools.count(1)
        self._pause_until = 0.0
        self._pause_reason = ""
        # State of the current connection.
        self._repeats_flush = 0
        self._close_sent = False

    @property
    def expected_sequence(self) -> int:
        """The number of the next observation; after a restart, the position at which to resume reading your source."""
        return self._ledger.last + 1

    @property
    def received(self) -> int:
        """Everything up to this number is durable, or rejected."""
        return self._ledger.received

    @property
    def stored(self) -> int:
        """Everything up to this number is visible to every recall, or rejected."""
        return self._ledger.stored

    @property
    def revision(self) -> int:
        """The memory's revision at `stored`: pass it to a recall as `min_revision`."""
        return self._ledger.revision

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The latest 1,000 rejections; `rejected_count` counts all."""
        return tuple(self._ledger.rejected)

    @property
    def rejected_count(self) -> int:
        """Number of rejected observations."""
        return self._ledger.rejected_count

    @property
    def resumption(self) -> Resumption | None:
        """Rejections and outcomes of the producer's earlier numbers, if opened with `known_sequence`."""
        return self._ledger.resumption

    @property
    def waiting(self) -> str:
        """Why nothing moves now: the server's reason for a pause (a full disk or backlog, for instance), or the error
        after which the stream reconnects. Empty while it moves."""
        return self._pause_reason or super().waiting

    async def send(self, what: Observable, **said: Unpack[ObservationFields]) -> Sent:
        """Numbers and queues an observation; waits only while the window is full.

        Returns a `Sent`: await it to wait until the observation is stored. If this raises, including CancelledError,
        the
        observation is not queued. Raises InvalidRequest for an invalid observation, or the error that ended the stream.
        """
        observation = observation_to_wire(what, **said)
        size = observation.ByteSize()
        self._check_takes(size)
        if self._ledger.last % _YIELD_EVERY == 0:
            await asyncio.sleep(0)  # yield, so that a producer in a tight loop lets other tasks run
        if self._turn.locked() or not self._ledger.has_room(size):
            async with self._turn:  # first come, first numbered
                # A later connection may grant a smaller window.
                await self._wait_until(lambda: self._ledger.has_room(size) or size > self._ledger.size_max)
        self._check_takes(size)
        with self._link.traced_memory(observation, self.memory, observation.session or self.session):
            sent = self._ledger.add_observation(observation, size)
        self._work.set()
        return sent

    async def flush(self) -> None:
        """Waits until everything sent so far has reached the stream's `ack_level`."""
        self._link.check_loop()
        target = self._ledger.last
        if self._ledger.acknowledged_up_to(self.ack_level) < target:
            self._check_usable()
            # The server acknowledges unasked: a flush request would cost one more message each way.
            await self._wait_until(lambda: self._ledger.acknowledged_up_to(self.ack_level) >= target)

    async def close(self) -> None:
        """Flushes, and tells the server that the producer has finished. Idempotent."""
        if self._closed:
            return
        self._check_open()
        self._closing = True
        self._work.set()
        await self._wait_until(lambda: self._closed)

    def _check_takes(self, size: int) -> None:
        self._check_usable()
        if size > self._ledger.size_max:
            raise invalid_field("observation", f"has {size} bytes, the server takes at most {self._ledger.size_max}")

    def _on_failed(self, error: MemstreamError) -> None:
        self._ledger.fail_pending(error)

    def _notify_waiters(self) -> None:
        super()._notify_waiters()
        self._work.set()  # acknowledgements make room in the window

    def _start_call(self) -> _Call:
        return self._link.streams.Observe(metadata=self._link.metadata(self.memory))

    async def _open_connection(self, call: _Call) -> None:
        # ack_level applies to the flush after repeats, the only one sent; it must not wait for the index.
        level = AckLevel.STORED if self.ack_level is AckLevel.INDEXED else self.ack_level
        known = self._ledger.known_sequence
        await call.write(
            pb.ObserveRequest(
                open=pb.ObserveOpen(
                    namespace=self.memory.namespace,
                    memory=self.memory.name,
                    producer=self.producer,
                    session=self.session,
                    ack_level=ack_level_to_wire(level),
                    outcomes=self._outcomes,
                    known_sequence=known,
                    related=self._related,
                )
            )
        )
        opened = (await _answer_to_open(call, "opened")).opened
        self._link.allow_calls(opened.limits.connection_streams_max)
        if known is not None:
            await self._read_resumption(call, opened)
        self._ledger.apply_opened(opened)
        self._repeats_flush = 0
        self._close_sent = self._draining = False

    async def _read_resumption(self, call: _Call, opened: pb.ObserveOpened) -> None:
        """Reads the rejections and outcomes that the server resends before any other message."""
        rejected, outcomes = list(opened.rejected), list(opened.outcomes)
        resumed = opened.resumed
        while resumed < opened.resume_to:
            ack = (await _answer_to_open(call, "ack")).ack
            if ack.resumed <= resumed:
                raise ProtocolViolation(f"the server resumed up to {resumed} of {opened.resume_to}, and no further")
            rejected.extend(ack.rejected)
            outcomes.extend(ack.outcomes)
            resumed = ack.resumed
        self._ledger.apply_resumption(opened, rejected, outcomes)

    async def _read_responses(self, call: _Call, backoff: Backoff) -> None:
        while not self._finished:
            if self._handle_response(await read_message(call), call):
                backoff.mark_progress()
        await read_end(call)
        self._closed = True

    def _handle_response(self, response: pb.ObserveResponse, call: _Call) -> bool:
        """Handles one response and returns whether it was progress. Raises ShuttingDown when it is time to
        reconnect."""
        progress = False
        kind = response.WhichOneof("message")
        if kind == "ack":
            progress = self._apply_ack(response.ack)
        elif kind == "closed":
            self._ledger.settle_repeats()  # no further acknowledgement follows
            self._ledger.apply_ack(_last_ack(response.closed))
            self._finished = progress = True
        elif kind == "throttle":
            delay = response.throttle.retry_delay
            self._pause_reason = response.throttle.description
            self._pause_until = asyncio.get_running_loop().time() + delay.seconds + delay.nanos / 1e9
        elif kind == "going_away":
            self._drain_connection(response.going_away, call)
        if progress:
            self._pause_reason = ""
        self._notify_waiters()
        if self._draining and not self._close_sent and self._ledger.all_received:
            raise ShuttingDown("the server is going away", reason="SHUTTING_DOWN")
        return progress

    def _apply_ack(self, ack: pb.Ack) -> bool:
        if self._repeats_flush and ack.flushed >= self._repeats_flush:
            self._repeats_flush = 0
            self._ledger.settle_repeats()
        return self._ledger.apply_ack(ack)

    def _drain_connection(self, going_away: pb.GoingAway, call: _Call) -> None:
        # The server may still acknowledge what is in flight; the next connection sends the queue.
        self._draining = True
        grace = going_away.grace.seconds + going_away.grace.nanos / 1e9
        asyncio.get_running_loop().call_later(min(grace, _GRACE_MAX_S), call.cancel)

    def _is_last(self, request: pb.ObserveRequest) -> bool:
        return request.HasField("close")

    def _next_request(self) -> pb.ObserveRequest | None:
        if self._draining or self._close_sent:
            return None
        if self._ledger.repeats_sent and not self._repeats_flush:
            self._repeats_flush = next(self._flush_ids)
            return pb.ObserveRequest(flush=pb.ObserveFlush(flush_id=self._repeats_flush))
        batch = self._ledger.next_batch()
        if batch is not None:
            return pb.ObserveRequest(batch=batch)
        if not self._ledger.all_sent:
            return None
        if self._closing:
            self._close_sent = True
            return pb.ObserveRequest(close=pb.ObserveClose())
        return None

    async def _may_send(self) -> None:
        delay_s = self._pause_until - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)


async def _answer_to_open(call: _Call, expected: str) -> pb.ObserveResponse:
    answer = await read_message(call)
    if answer.HasField("going_away"):
        raise _going_away(answer.going_away)
    if answer.WhichOneof("message") != expected:
        raise ProtocolViolation(f"the server answered open with {answer.WhichOneof('message')}")
    return answer


def _last_ack(closed: pb.ObserveClosed) -> pb.Ack:
    return pb.Ack(
        received=closed.received,
        stored=closed.stored,
        revision=closed.revision,
        rejected=closed.rejected,
        outcomes=closed.outcomes,
    )


def _going_away(message: pb.GoingAway) -> ShuttingDown:
    return ShuttingDown(message.description or "the server is going away", reason="SHUTTING_DOWN")
