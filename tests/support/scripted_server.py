"""A small server with the Observe, Recall and Watch contract in RAM, which fails where a script says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from memstream.v1 import event_pb2, fragment_pb2, memory_pb2, server_service_pb2
from memstream.v1 import memory_service_pb2 as memory_pb
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.memory_service_pb2_grpc import MemoryServiceServicer, add_MemoryServiceServicer_to_server
from memstream.v1.stream_service_pb2_grpc import StreamServiceServicer, add_StreamServiceServicer_to_server
from tests.support.scripted_observe import UID, Producer, ScriptedObserve, abort_with_status
from tests.support.scripts import Plan, status


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
            await abort_with_status(context, plan.refuse)
        key = (f"{opening.open.namespace}/{opening.open.memory}", opening.open.producer)
        known = opening.open.known_sequence if opening.open.HasField("known_sequence") else None
        self.known.append(known)
        await ScriptedObserve(self, key, opening.open.ack_level, plan, context).run(known)

    async def Recall(self, _: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802 - see above
        opening: pb.RecallOpen = (await context.read()).open
        self.openings.append(opening)
        self.metadata.append(dict(context.invocation_metadata()))
        plan = self.recall_plans.pop(0) if self.recall_plans else Plan()
        if plan.refuse is not None:
            await abort_with_status(context, plan.refuse)
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
        if request.query.text.startswith("slow"):
            await self.answering.wait()
        parts = pb.Recollections()
        for part in _answer_parts(request.query):
            parts.MergeFrom(part)
        return pb.RecallOnceResponse(recollections=parts, done=pb.RecallDone(revision=7, considered=2))

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        plan = self.watch_plans.pop(0) if self.watch_plans else Plan()
        if plan.refuse is not None:
            await abort_with_status(context, plan.refuse)
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
            await abort_with_status(
                context, status(grpc.StatusCode.ALREADY_EXISTS, "MEMORY_EXISTS", memory=request.memory)
            )
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
            await abort_with_status(
                context, status(grpc.StatusCode.NOT_FOUND, "MEMORY_NOT_FOUND", memory=request.memory)
            )
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
            explanation=pb.Explanation(parts=[part], formula="absolute/4") if query.explain else None,
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
