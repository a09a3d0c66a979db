"""StreamService: the handlers of the streams and of their unary twins.

Watch is here: a memory's committed transitions as typed events, with cursors that resume between any two of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import event_pb2, fragment_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream_server.core.events import Event, EventType
from memstream_server.core.printable import number_text
from memstream_server.engine.errors import CursorVoid, ProtocolViolation
from memstream_server.engine.requests import AckLevel, NewObservation, Query, RejectedObservation
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.rpc import observe, recall
from memstream_server.rpc.calls import Tracing
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import WatcherStalled
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.scopes import ScopedCall
from memstream_server.rpc.slow_consumer import end_if_stalled
from memstream_server.rpc.validation import Violations, check_identifier, memory_name, not_negative
from memstream_server.rpc.wire import fragments, observations, queries, scalars
from memstream_server.rpc.wire.observations import ACK_LEVELS, outcome_messages, rejected_messages

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.rpc.forwarding import Forwarding


_Context = grpc.aio.ServicerContext[Any, Any]
PROGRESS_DEFAULT_S = 10.0
PROGRESS_MIN_S = 0.1
EVENTS_MAX = 256
"""Maximum number of events in one message; a sixteenth of it if fragments are included."""
_Step = tuple[str, int, int, tuple[Event, ...]]


class StreamService:
    """The servicer: Observe, Recall, Watch, ObserveBatch, RecallOnce."""

    def __init__(
        self,
        engine: Engine,
        limits: RequestLimits,
        drain: Drain,
        forwarding: Forwarding | None,
        build_context: recall.ContextBuilder,
        tracing: Tracing | None,
    ) -> None:
        self._tracing = tracing
        self._forwarding = forwarding
        self._build_context = build_context
        self._engine = engine
        self._limits = limits
        self._drain = drain

    async def observe(
        self, requests: AsyncIterator[pb.ObserveRequest], _context: _Context
    ) -> AsyncIterator[pb.ObserveResponse]:
        """See rpc/observe.py."""
        first = await anext(requests, None)
        if first is None:
            raise ProtocolViolation("the stream ended before `open`")
        opening = observe.read_open(first, self._limits)
        drain = self._drain.memories  # before the session opens, so that the stream ends with the current lease
        session = await self._engine.open_observe(
            opening.namespace, opening.memory, opening.producer, opening.outcomes, opening.related
        )
        try:
            stream = observe.ObserveStream(
                session, opening, self._limits, drain, self._engine.dimension, self._engine.writing
            )
            async with aclosing(stream.responses(requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            session.close()

    async def recall(
        self, requests: AsyncIterator[pb.RecallRequest], context: _Context
    ) -> AsyncIterator[pb.RecallResponse]:
        """See rpc/recall.py."""
        first = await anext(requests, None)
        if first is None:
            raise ProtocolViolation("the stream ended before `open`")
        opening = recall.read_open(first, self._limits)
        stream = recall.RecallStream(
            self._engine,
            opening,
            self._limits,
            self._drain.memories,
            context,
            self._forwarding,
            self._build_context,
            self._tracing,
        )
        async with aclosing(stream.responses(requests)) as responses:
            async for response in responses:
                yield response

    async def watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        """See rpc/streams.py."""
        stream = WatchStream(self._engine, read_request(request, self._limits), self._drain.memories)
        patience_s = self._limits.watch_stalled_max_s
        async with aclosing(end_if_stalled(stream.responses(), context, patience_s, stalled_error)) as responses:
            async for response in responses:
                yield response

    async def observe_batch(self, request: pb.ObserveBatchRequest, _context: _Context) -> pb.ObserveBatchResponse:
        """One batch. Without a producer, whose numbers would keep a rejection, one malformed item refuses the whole
        batch."""
        limits, found = self._limits, Violations()
        namespace, memory = memory_name(found, request.namespace, request.memory, limits)
        producer = check_identifier(found, "producer", request.producer, limits)
        session = check_identifier(found, "session", request.session, limits)
        request_id = check_identifier(found, "request_id", request.request_id, limits)
        level = ACK_LEVELS.read_value(found, "ack_level", request.ack_level, AckLevel.STORED)
        related = observe.read_related(found, "related", request.related)
        found.check()
        first = request.first_sequence if producer else 1
        observe.check_numbers(first, len(request.observations), limits)
        items = await (self._read_numbered if producer else self._read_unnumbered)(request, session)
        digest = observations.digest_of(request.SerializeToString(deterministic=True)) if request_id else b""
        progress = await self._engine.observe_batch(
            namespace, memory, producer, first, items, level, request_id, digest, related
        )
        outcomes: list[pb.ObservationOutcome] = []
        async for part in in_slices(progress.outcomes, observations.READ_PER_SLICE):
            outcomes += outcome_messages(part)
        return pb.ObserveBatchResponse(
            ack=pb.Ack(
                received=progress.received,
                stored=progress.stored,
                indexed=progress.indexed,
                revision=progress.revision,
                rejected=rejected_messages(progress.rejected),
                outcomes=outcomes,
            )
        )

    async def _read_numbered(
        self, request: pb.ObserveBatchRequest, session: str
    ) -> list[NewObservation | RejectedObservation]:
        messages = list(request.observations)
        return (await observations.read_batch(messages, session, self._limits, self._engine.dimension))[0]

    async def _read_unnumbered(
        self, request: pb.ObserveBatchRequest, session: str
    ) -> list[NewObservation | RejectedObservation]:
        found, items = Violations(), list[NewObservation | RejectedObservation]()
        async for part in in_slices(request.observations, observations.READ_PER_SLICE):
            for message in part:
                digest = observations.digest_of(message.SerializeToString(deterministic=True))
                prefix = f"observations[{len(items)}]."
                items.append(
                    observations.read_observation(
                        found, message, digest, session, self._limits, self._engine.dimension, prefix
                    )
                )
        found.check()
        return items

    async def recall_once(self, request: pb.RecallOnceRequest, context: _Context) -> bytes:
        """One query. The serialised RecallOnceResponse."""
        limits, found = self._limits, Violations()
        session = check_identifier(found, "session", request.session, limits)
        query_id = check_identifier(found, "query.query_id", request.query.query_id, limits)
        if request.query.subscribe:
            found.add("query.subscribe", "is for a query on a Recall stream: this call has one answer")
        if request.query.scopes:
            recall.check_unnamed(found, request.namespace, request.memory)
            found.check()
            scoped = ScopedCall(self._engine, self._forwarding, limits, request.query, session, context)
            query = scoped.whole
            answer = await recall.recall_scopes(scoped, recall.query_timeout_s(request.query), context.time_remaining())
        else:
            namespace, memory = memory_name(found, request.namespace, request.memory, limits)
            found.check()
            query = recall.read_query(request.query, namespace, session, limits, self._engine.dimension)
            if request.query.count_words:
                return (await self._count_words(namespace, memory, query)).SerializeToString()
            answer = await recall.recall_once(
                self._engine, namespace, memory, query, recall.query_timeout_s(request.query), context.time_remaining()
            )
        done = await queries.done_response(query_id, answer, query.token_budget > 0)
        return recall.check_size(await queries.encode_answer(query_id, answer, query.explain, done), limits)

    async def _count_words(self, namespace: str, memory: str, query: Query) -> pb.RecallOnceResponse:
        words = await self._engine.scopes.count_words(namespace, memory, query)
        return pb.RecallOnceResponse(done=pb.RecallDone(word_statistics=queries.words_message(words)))


@dataclass(frozen=True, slots=True)
class Watching:
    """A validated request. `uid` is empty if the watch starts from now."""

    namespace: str
    memory: str
    uid: str
    revision: int
    ordinal: int
    types: frozenset[EventType]
    progress_s: float
    include_fragments: bool


def read_request(request: pb.WatchRequest, limits: RequestLimits) -> Watching:
    """Raises InvalidField."""
    found = Violations()
    namespace, memory = memory_name(found, request.namespace, request.memory, limits)
    cursor = request.cursor
    if request.HasField("cursor") and not cursor.memory_uid:
        found.add("cursor.memory_uid", "is required")
    if 0 in request.types:
        found.add("types", "has EVENT_TYPE_UNSPECIFIED")
    progress_s = PROGRESS_DEFAULT_S
    if request.HasField("progress_interval"):
        progress_s = scalars.duration_us(found, "progress_interval", request.progress_interval) / 1e6
    watching = Watching(
        namespace,
        memory,
        cursor.memory_uid,
        not_negative(found, "cursor.revision", cursor.revision),
        not_negative(found, "cursor.ordinal", cursor.ordinal),
        frozenset(fragments.EVENT_TYPES.read_all(found, "types", request.types)),
        max(progress_s, PROGRESS_MIN_S),
        request.include_fragments,
    )
    found.check()
    return watching


class WatchStream:
    """One open watch. `responses` runs once."""

    def __init__(self, engine: Engine, watching: Watching, drain: Drain) -> None:
        self._engine = engine
        self._watching = watching
        self._drain = drain
        self._drained = asyncio.Event()
        self._sent_s = asyncio.get_running_loop().time()
        self._sent = False

    async def responses(self) -> AsyncGenerator[pb.WatchResponse, None]:
        """Yields events and progress marks until the client or the server ends the stream."""
        cursor = await self._find_start()
        steps = self._engine.watch(
            self._watching.namespace, self._watching.memory, cursor.memory_uid, cursor.revision, 0
        )
        draining = asyncio.create_task(self._drained.wait())
        step = asyncio.create_task(_next_or_none(steps))
        try:
            with self._drain.notify_on_drain(self._drained.set):
                while not draining.done():
                    mark_due = False
                    if await self._wait_for_task({step, draining}) and step.done():
                        if (told := step.result()) is None:
                            return
                        step = asyncio.create_task(_next_or_none(steps))
                        async for response in self._build_messages(cursor, *told):
                            yield response
                            self._mark_sent()
                        if told[3]:
                            cursor = event_pb2.Cursor(memory_uid=told[0], revision=told[1])
                        elif not self._sent:  # the client learns at once that the watch is open, and its cursor
                            mark_due = True
                    if mark_due or self._silence_s() >= self._watching.progress_s:
                        yield pb.WatchResponse(
                            progress=pb.WatchProgress(
                                cursor=cursor, time=scalars.timestamp_message(time.time_ns() // 1_000)
                            )
                        )
                        self._mark_sent()
            yield pb.WatchResponse(going_away=self._drain.going_away_message())
            raise self._drain.shutdown_error()
        finally:
            step.cancel()
            draining.cancel()
            await asyncio.gather(step, draining, return_exceptions=True)
            await steps.aclose()

    async def _find_start(self) -> event_pb2.Cursor:
        """The start cursor. The engine refuses a void or compacted cursor."""
        watching = self._watching
        record = await self._engine.memories.get(watching.namespace, watching.memory)
        if not watching.uid:
            return event_pb2.Cursor(memory_uid=record.uid, revision=record.revision)
        if watching.uid == record.uid and watching.revision > record.revision:
            raise CursorVoid(
                f"the cursor is at revision {watching.revision}, the memory at {record.revision}: list it and "
                "watch from there"
            )
        return event_pb2.Cursor(memory_uid=watching.uid, revision=watching.revision, ordinal=watching.ordinal)

    async def _wait_for_task(self, tasks: set[asyncio.Task[Any]]) -> bool:
        """Waits until a task is done or a progress mark is due; returns whether a task is done."""
        timeout = max(0.0, self._watching.progress_s - self._silence_s())
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _silence_s(self) -> float:
        return asyncio.get_running_loop().time() - self._sent_s

    def _mark_sent(self) -> None:
        self._sent = True
        self._sent_s = asyncio.get_running_loop().time()

    async def _build_messages(
        self, seen: event_pb2.Cursor, uid: str, revision: int, time_us: int, events: Sequence[Event]
    ) -> AsyncIterator[pb.WatchResponse]:
        """The wanted events of one transition after the cursor, each with the cursor that follows it."""
        skipped = seen.ordinal if revision == seen.revision + 1 else 0
        chosen = [number for number, event in enumerate(events) if number >= skipped and self._is_wanted(event)]
        size = EVENTS_MAX // 16 if self._watching.include_fragments else EVENTS_MAX
        for start in range(0, len(chosen), size):
            part = [
                fragments.event_message(events[number], uid, *_cursor_after(number, len(events), revision), time_us)
                for number in chosen[start : start + size]
            ]
            yield pb.WatchResponse(events=pb.WatchEvents(events=part, fragments=await self._read_fragments(part)))

    def _is_wanted(self, event: Event) -> bool:
        return event.type in fragments.EVENT_TYPES and (not self._watching.types or event.type in self._watching.types)

    async def _read_fragments(self, events: Sequence[event_pb2.Event]) -> list[fragment_pb2.Fragment]:
        if not self._watching.include_fragments:
            return []
        ids = list(dict.fromkeys(event.fragment_id for event in events if event.fragment_id))
        found = (
            await self._engine.fragments.read_many(self._watching.namespace, self._watching.memory, ids) if ids else []
        )
        return [fragments.fragment_message(fragment) for fragment in found]


def stalled_error(response: pb.WatchResponse, limit_s: float) -> WatcherStalled:
    """The error of a watch whose client does not read `response`, with the cursor to resume from."""
    cursor = response.events.events[-1].cursor if response.HasField("events") else response.progress.cursor
    return WatcherStalled(
        "what was sent is not read: read on to the end, and watch again from the last cursor",
        quota="watch_stalled_max_s",
        limit=number_text(limit_s),
        memory_uid=cursor.memory_uid,
        revision=cursor.revision,
        ordinal=cursor.ordinal,
    )


def _cursor_after(number: int, count: int, revision: int) -> tuple[int, int]:
    """(revision, ordinal) after event `number` of the `count` of a revision: the last one completes it."""
    return (revision, 0) if number == count - 1 else (revision - 1, number + 1)


async def _next_or_none(steps: AsyncGenerator[_Step, None]) -> _Step | None:
    return await anext(steps, None)
