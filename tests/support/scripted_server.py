"""A small server with the Observe, Recall and Watch contract in RAM, which fails where a script says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc.status_pb2 import Status

from memstream.v1 import event_pb2, fragment_pb2, memory_pb2, server_service_pb2
from memstream.v1 import memory_service_pb2 as memory_pb
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceServicer, add_MemoryServiceServicer_to_server
from memstream.v1.stream_service_pb2_grpc import StreamServiceServicer, add_StreamServiceServicer_to_server
from tests.support.scripts import Plan, duration, status

UID = "01HUID"


@dataclass
class Producer:
    """State of one producer: its items by number, and its rejections."""

    items: list[fragment_pb2.Observation] = field(default_factory=list)
    refused: dict[int, Status] = field(default_factory=dict)
    epoch: int = 0
    superseded: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedServer(StreamServiceServicer, MemoryServiceServicer):
    """Start it, point a client at `target`, and inspect what it recorded."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.recall_plans: list[Plan] = []
        self.watch_plans: list[Plan] = []
        self.window_observations = 1000
        self.window_bytes = 1 << 20
        self.batch_max = 64
        self.producers: dict[tuple[str, str], Producer] = {}
        self.metadata: list[dict[str, Any]] = []
        self.batch_sizes: list[int] = []
        self.first_sequences: list[int] = []
        self.in_flight_max = 0
        self.acking = asyncio.Event()  # cleared: no acknowledgements
        self.storing = asyncio.Event()  # cleared: received, not stored
        self.indexing = asyncio.Event()
        self.answering = asyncio.Event()  # cleared: "slow" queries wait, exports stop half-way, imports do not end
        for event in (self.acking, self.storing, self.indexing, self.answering):
            event.set()
        self.abandoned = self.closed = 0
        self.queries_in_flight_max = 4
        self.queries: list[pb.RecallQuery] = []
        self.told: list[list[pb.RecallResponse]] = []
        """The answers sent to each standing query in turn; later queries get none."""
        self.calls_cut = 0
        """This many of the first RecallOnce calls end as they do when a server's grace period is over."""
        self.cancelled: list[str] = []
        self.known: list[int | None] = []
        """The `known_sequence` with which each Observe stream was opened."""
        self.resume_page = 1_000
        """Numbers per message when rejections and outcomes are resent."""
        self.opens = 0
        self.openings: list[pb.RecallOpen] = []
        self.knows_done_in_recollections = True  # unlike older servers
        self.events: list[event_pb2.Event] = []
        self.watched: list[event_pb2.Cursor] = []
        self.memories: dict[str, memory_pb2.Memory] = {}
        self.imported = b""
        self.target = ""
        self._stored: dict[tuple[str, str], int] = {}
        self._server: grpc.aio.Server | None = None

    async def start(self, target: str = "127.0.0.1:0") -> None:
        """Listen; after `stop`, on the same target again."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_StreamServiceServicer_to_server(self, server)
        add_MemoryServiceServicer_to_server(self, server)
        port = server.add_insecure_port(target)
        await server.start()
        self.target = f"127.0.0.1:{port}"
        self._server = server

    async def stop(self) -> None:
        """Abort every connection."""
        if self._server is not None:
            await self._server.stop(0)

    def contents(self, producer: str = "p", memory: str = "ns/m") -> list[str]:
        """Observed contents, in order."""
        return [item.content for item in self.producers[memory, producer].items]

    def add_event(self, revision: int, ordinal: int = 0) -> None:
        """Add an event for watches."""
        cursor = event_pb2.Cursor(memory_uid=UID, revision=revision, ordinal=ordinal)
        self.events.append(
            event_pb2.Event(cursor=cursor, type=event_pb2.EVENT_TYPE_OBSERVED, fragment_id=f"f{revision}", cosine=0.0)
        )

    # The stubs are typed for generators; read and write handlers return nothing.
    async def Observe(self, _: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - see above
        opening: pb.ObserveRequest = await context.read()
        self.metadata.append(dict(context.invocation_metadata()))
        plan = self.plans.pop(0) if self.plans else Plan()
        if plan.refuse is not None:
            await _abort(context, plan.refuse)
        key = (f"{opening.open.namespace}/{opening.open.memory}", opening.open.producer)
        known = opening.open.known_sequence if opening.open.HasField("known_sequence") else None
        self.known.append(known)
        await _Observing(self, key, opening.open.ack_level, plan, context).run(known)

    async def Recall(self, _: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - see above
        opening: pb.RecallOpen = (await context.read()).open
        self.openings.append(opening)
        self.metadata.append(dict(context.invocation_metadata()))
        plan = self.recall_plans.pop(0) if self.recall_plans else Plan()
        if plan.refuse is not None:
            await _abort(context, plan.refuse)
        self.opens += 1
        limits = server_service_pb2.Limits(queries_in_flight_max=self.queries_in_flight_max)
        await context.write(pb.RecallResponse(opened=pb.RecallOpened(memory_uid=UID, limits=limits)))
        inside = opening.done_in_recollections and self.knows_done_in_recollections
        tasks: set[asyncio.Task[None]] = set()
        writing = asyncio.Lock()
        read = 0
        while (request := await context.read()) is not grpc.aio.EOF:
            if request.HasField("query"):
                self.queries.append(request.query)
                read += 1
                if plan.drop_after == read:
                    await context.abort(plan.drop_status, "scripted break")
                tasks.add(asyncio.create_task(self._answer(request.query, inside, context, writing)))
            elif request.HasField("cancel"):
                self.cancelled.append(request.cancel.query_id)
                gone = status(grpc.StatusCode.CANCELLED, "QUERY_CANCELLED")
                failed = pb.RecallFailed(query_id=request.cancel.query_id, status=gone)
                async with writing:
                    await context.write(pb.RecallResponse(failed=failed))
            elif request.HasField("close"):
                break
        await asyncio.gather(*tasks)

    async def _answer(self, query: pb.RecallQuery, inside: bool, context: Any, writing: asyncio.Lock) -> None:
        if query.subscribe:
            for response in self.told.pop(0) if self.told else ():
                getattr(response, response.WhichOneof("message") or "").query_id = query.query_id
                if response.recollections.HasField("done"):
                    response.recollections.done.query_id = query.query_id
                async with writing:
                    await context.write(response)
            return
        if query.text.startswith("slow"):
            await self.answering.wait()
        if query.query_id in self.cancelled:
            return
        if query.text.startswith("fail"):
            failed = status(grpc.StatusCode.DEADLINE_EXCEEDED, "REVISION_NOT_REACHED", revision="3")
            responses = [pb.RecallResponse(failed=pb.RecallFailed(query_id=query.query_id, status=failed))]
        else:
            responses = [pb.RecallResponse(recollections=part) for part in _answer_parts(query)]
            done = pb.RecallDone(query_id=query.query_id, revision=7, considered=2)
            if inside:
                responses[-1].recollections.done.CopyFrom(done)
            else:
                responses.append(pb.RecallResponse(done=done))
        for response in responses:
            async with writing:  # gRPC allows one write at a time
                await context.write(response)

    async def RecallOnce(self, request: pb.RecallOnceRequest, context: Any) -> pb.RecallOnceResponse:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        self.queries.append(request.query)
        if len(self.queries) <= self.calls_cut:
            await context.abort(grpc.StatusCode.CANCELLED, "the server's grace ended")
        parts = pb.Recollections()
        for part in _answer_parts(request.query):
            parts.MergeFrom(part)
        return pb.RecallOnceResponse(recollections=parts, done=pb.RecallDone(revision=7, considered=2))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        plan = self.watch_plans.pop(0) if self.watch_plans else Plan()
        if plan.refuse is not None:
            await _abort(context, plan.refuse)
        self.watched.append(request.cursor)
        start = (request.cursor.revision, request.cursor.ordinal)
        sent = 0
        while True:
            for event in self.events:
                if (event.cursor.revision, event.cursor.ordinal) <= start:
                    continue
                if plan.drop_after == sent:
                    await context.abort(plan.drop_status, "scripted break")
                yield pb.WatchResponse(
                    events=pb.WatchEvents(events=[event], fragments=[fragment_pb2.Fragment(id=event.fragment_id)])
                )
                start = (event.cursor.revision, event.cursor.ordinal)
                sent += 1
            yield pb.WatchResponse(
                progress=pb.WatchProgress(cursor=event_pb2.Cursor(memory_uid=UID, revision=start[0]))
            )
            await asyncio.sleep(0.02)

    async def CreateMemory(  # noqa: N802
        self, request: memory_pb.CreateMemoryRequest, context: Any
    ) -> memory_pb.CreateMemoryResponse:
        self.metadata.append(dict(context.invocation_metadata()))
        path = f"{request.namespace}/{request.memory}"
        if path in self.memories and not request.exist_ok:
            await _abort(context, status(grpc.StatusCode.ALREADY_EXISTS, "MEMORY_EXISTS", memory=request.memory))
        memory = memory_pb2.Memory(
            namespace=request.namespace, name=request.memory, uid=UID, kind=request.kind, policy=request.policy
        )
        created = self.memories.setdefault(path, memory) is memory
        return memory_pb.CreateMemoryResponse(memory=self.memories[path], created=created)

    async def GetMemory(  # noqa: N802
        self, request: memory_pb.GetMemoryRequest, context: Any
    ) -> memory_pb.GetMemoryResponse:
        found = self.memories.get(f"{request.namespace}/{request.memory}")
        if found is None:
            await _abort(context, status(grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND", memory=request.memory))
        return memory_pb.GetMemoryResponse(memory=found)

    async def ListFragments(  # noqa: N802
        self, request: memory_pb.ListFragmentsRequest, context: Any
    ) -> memory_pb.ListFragmentsResponse:
        items = [item for key, p in self.producers.items() if key[0].endswith(request.memory) for item in p.items]
        start, size = int(request.page_token or 0), request.page_size or 100
        fragments = [
            fragment_pb2.Fragment(id=f"f{n}", content=item.content, tier=fragment_pb2.TIER_SHORT_TERM)
            for n, item in enumerate(items)
        ]
        more = str(start + size) if start + size < len(items) else ""
        return memory_pb.ListFragmentsResponse(
            fragments=fragments[start : start + size], next_page_token=more, revision=9, memory_uid=UID
        )

    async def ExportMemories(  # noqa: N802
        self, _request: memory_pb.ExportMemoriesRequest, _context: Any
    ) -> AsyncIterator[memory_pb.ExportMemoriesResponse]:
        yield memory_pb.ExportMemoriesResponse(lines=b"first\n", done=1, total=2)
        await self.answering.wait()
        yield memory_pb.ExportMemoriesResponse(lines=b"second\n", done=2, total=2)

    async def ImportMemories(  # noqa: N802
        self, requests: AsyncIterator[memory_pb.ImportMemoriesRequest], _context: Any
    ) -> memory_pb.ImportMemoriesResponse:
        async for request in requests:
            self.imported += request.lines
        await self.answering.wait()
        return memory_pb.ImportMemoriesResponse()


class _Observing:
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
                pb.ObserveResponse(throttle=pb.Throttle(retry_delay=duration(self.plan.throttle_s)))
            )
        read = asyncio.create_task(self.context.read())
        superseded = asyncio.create_task(self.superseded.wait())
        try:
            while True:
                await asyncio.wait({read, superseded}, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                if superseded.done():
                    await _abort(self.context, status(grpc.StatusCode.ABORTED, "PRODUCER_SUPERSEDED"))
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
            await _abort(self.context, gap)
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
                await _abort(self.context, conflict)
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


def _answer_parts(query: pb.RecallQuery) -> list[pb.Recollections]:
    first = fragment_pb2.Fragment(id="a", content=query.text, tier=fragment_pb2.TIER_LONG_TERM)
    second = fragment_pb2.Fragment(id="b", content="second", tier=fragment_pb2.TIER_SHORT_TERM)
    part = pb.ScorePart(name="lexical", value=0.5, weight=2.0, contribution=1.0, details={"bm25": 3.0})
    hits = [
        pb.Recollection(
            fragment=first,
            score=1.0,
            relevance=0.5,
            rank=1,
            explanation=pb.Explanation(parts=[part], formula="absolute/2") if query.explain else None,
        ),
        pb.Recollection(fragment=second, score=0.5, relevance=0.25, rank=2),
    ]
    third = fragment_pb2.Fragment(id="c", content="third", tier=fragment_pb2.TIER_SHORT_TERM)
    limit = query.limit or 2
    return [
        pb.Recollections(query_id=query.query_id, recollections=hits[:1]),
        pb.Recollections(
            query_id=query.query_id,
            recollections=hits[1:limit],
            working_memory_ids=["c", "b"],
            working_memory=[third],
        ),
    ]


def _abort(context: Any, refusal: Status) -> Awaitable[None]:
    code = next(each for each in grpc.StatusCode if each.value[0] == refusal.code)
    trailing = (("grpc-status-details-bin", refusal.SerializeToString()),)
    aborting: Awaitable[None] = context.abort(code, refusal.message, trailing)
    return aborting
