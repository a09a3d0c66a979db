"""The Observe streams of the scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from memstream.v1 import event_pb2, fragment_pb2, server_service_pb2
from memstream.v1 import stream_service_pb2 as pb
from tests.support.scripts import Plan, duration, status

if TYPE_CHECKING:
    from tests.support.scripted_server import ScriptedServer

UID = "01HUID"


@dataclass
class Producer:
    """State of one producer: its items by number, and its rejections."""

    items: list[fragment_pb2.Observation] = field(default_factory=list)
    refused: dict[int, Status] = field(default_factory=dict)
    epoch: int = 0
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedObserve:
    """One Observe stream of the scripted server."""

    def __init__(
        self, server: ScriptedServer, key: tuple[str, str], level: pb.AckLevel.ValueType, plan: Plan, context: Any
    ) -> None:
        self.server, self.key, self.level, self.plan, self.context = server, key, level, plan, context
        self.producer = server.producers.setdefault(key, Producer())
        self.producer.superseded.set()
        self.superseded = self.producer.superseded = asyncio.Event()
        self.producer.epoch += 1
        self.flushes: list[tuple[int, int]] = []
        self.journaled = self.unacknowledged = 0
        self.told = (*self.levels[:2], 0)  # the levels in `opened`
        self.fresh_refusals: list[int] = []
        self.outcomes_told = self.stored

    @property
    def received(self) -> int:
        return len(self.producer.items)

    @property
    def stored(self) -> int:
        if self.server.storing.is_set():
            self.server._stored[self.key] = self.received
        return min(self.server._stored.get(self.key, 0), self.received)

    @property
    def levels(self) -> tuple[int, int, int]:
        """The highest received, stored and indexed numbers."""
        stored = self.stored
        return self.received, stored, stored if self.server.indexing.is_set() else 0

    async def run(self, known: int | None) -> None:
        opened = pb.ObserveOpened(
            received=self.received,
            stored=self.stored,
            expected_sequence=self.received + 1,
            producer_epoch=self.producer.epoch,
            window_observations=self.server.window_observations,
            window_bytes=self.server.window_bytes,
            limits=server_service_pb2.Limits(batch_max=self.server.batch_max, message_bytes_max=1 << 22),
            memory_uid=UID,
            revision=self.received,
        )
        pages = [] if known is None else self.resumed(known)
        for page in pages[:1]:
            opened.rejected.extend(page.rejected)
            opened.outcomes.extend(page.outcomes)
            opened.resumed, opened.resume_to = page.resumed, pages[-1].resumed
            opened.rejected_since = opened.outcomes_since = page.resumed and known + 1
        await self.context.write(pb.ObserveResponse(opened=opened))
        for page in pages[1:]:
            await self.context.write(pb.ObserveResponse(ack=page))
        if self.plan.throttle_s:
            await self.context.write(
                pb.ObserveResponse(
                    throttle=pb.Throttle(retry_delay=duration(self.plan.throttle_s), description="scripted")
                )
            )
        read = asyncio.create_task(self.context.read())
        superseded = asyncio.create_task(self.superseded.wait())
        try:
            while True:
                await asyncio.wait({read, superseded}, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                if superseded.done():
                    await abort_with_status(self.context, status(grpc.StatusCode.ABORTED, "PRODUCER_SUPERSEDED"))
                if read.done():
                    request = read.result()
                    if request is grpc.aio.EOF:
                        self.server.abandoned += 1
                        return
                    if await self.take(request):
                        return
                    read = asyncio.create_task(self.context.read())
                elif self.server.acking.is_set() and (self.unacknowledged or self.told != self.levels):
                    await self.acknowledge()
        finally:
            read.cancel()
            superseded.cancel()

    def resumed(self, known: int) -> list[pb.Ack]:
        """Rejections and outcomes of later numbers, in pages."""
        received, stored, size = self.received, self.stored, self.server.resume_page
        pages = []
        for first in range(known + 1, received + 1, size) or [known + 1]:
            numbers = range(first, min(first + size, received + 1))
            pages.append(
                pb.Ack(
                    received=received,
                    stored=stored,
                    rejected=self.rejected(n for n in numbers if n in self.producer.refused),
                    outcomes=self.outcomes(n for n in numbers if n <= stored),
                    resumed=max(numbers[-1] if numbers else 0, min(known, received)),
                )
            )
        return pages

    def rejected(self, numbers: Iterable[int]) -> list[pb.RejectedObservation]:
        return [pb.RejectedObservation(sequence=n, status=self.producer.refused[n]) for n in numbers]

    def outcomes(self, numbers: Iterable[int]) -> list[pb.ObservationOutcome]:
        return [
            pb.ObservationOutcome(sequence=n, fragment_id=f"f{n}", type=event_pb2.EVENT_TYPE_OBSERVED)
            for n in numbers
            if n not in self.producer.refused
        ]

    async def take(self, request: pb.ObserveRequest) -> bool:
        kind = request.WhichOneof("message")
        if kind == "batch":
            return await self.journal(request.batch)
        if kind == "flush":
            self.flushes.append((request.flush.flush_id, self.received))
            if self.server.acking.is_set():
                await self.acknowledge()
        elif kind == "close":
            if self.plan.drop_at_close:
                await self.context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break at close")
            await self.server.storing.wait()
            self.server.closed += 1
            closed = pb.ObserveClosed(received=self.received, stored=self.stored, revision=self.received)
            await self.context.write(pb.ObserveResponse(closed=closed))
            return True
        return False

    async def journal(self, batch: pb.ObservationBatch) -> bool:
        self.server.batch_sizes.append(len(batch.observations))
        self.server.first_sequences.append(batch.first_sequence)
        self.unacknowledged += len(batch.observations)
        self.server.in_flight_max = max(self.server.in_flight_max, self.unacknowledged)
        if batch.first_sequence > self.received + 1:
            gap = status(grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_GAP", expected_sequence=str(self.received + 1))
            await abort_with_status(self.context, gap)
        for sequence, observation in enumerate(batch.observations, batch.first_sequence):
            await self.one(sequence, observation)
            if self.plan.end_after == self.journaled:
                return True
        if self.plan.going_away_after is not None and self.journaled >= self.plan.going_away_after:
            self.plan.going_away_after = None
            going = pb.GoingAway(grace=duration(0.5), description="scripted")
            await self.context.write(pb.ObserveResponse(going_away=going))
        if self.server.acking.is_set():
            await self.acknowledge()
        return False

    async def one(self, sequence: int, observation: fragment_pb2.Observation) -> None:
        if sequence <= self.received:
            if self.producer.items[sequence - 1] != observation:
                conflict = status(grpc.StatusCode.FAILED_PRECONDITION, "SEQUENCE_CONFLICT", sequence=str(sequence))
                await abort_with_status(self.context, conflict)
        else:
            self.producer.items.append(observation)
            self.journaled += 1
            if observation.content.startswith("reject"):
                refusal = status(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field="content")
                self.producer.refused[sequence] = refusal
            if self.plan.drop_after == self.journaled:
                await self.context.abort(self.plan.drop_status, "scripted break")
        if sequence in self.producer.refused:
            self.fresh_refusals.append(sequence)

    async def acknowledge(self) -> None:
        refusals, self.fresh_refusals = self.fresh_refusals, []
        received, stored, indexed = self.told = self.levels
        levels = {pb.ACK_LEVEL_RECEIVED: received, pb.ACK_LEVEL_STORED: stored, pb.ACK_LEVEL_INDEXED: indexed}
        reached = levels[self.level]
        satisfied = [flush_id for flush_id, upto in self.flushes if upto <= reached]
        self.flushes = [(flush_id, upto) for flush_id, upto in self.flushes if upto > reached]
        ack = pb.Ack(
            received=received,
            stored=stored,
            indexed=indexed,
            revision=stored,
            flushed=max(satisfied, default=0),
            rejected=self.rejected(refusals),
            outcomes=self.outcomes(range(self.outcomes_told + 1, stored + 1)),
        )
        self.outcomes_told = stored
        self.unacknowledged = 0
        for _ in range(2 if self.plan.double_acks else 1):
            await self.context.write(pb.ObserveResponse(ack=ack))


def abort_with_status(context: Any, refusal: Status) -> Awaitable[None]:
    """End a call with a google.rpc.Status."""
    code = next(each for each in grpc.StatusCode if each.value[0] == refusal.code)
    trailing = (("grpc-status-details-bin", refusal.SerializeToString()),)
    aborting: Awaitable[None] = context.abort(code, refusal.message, trailing)
    return aborting
