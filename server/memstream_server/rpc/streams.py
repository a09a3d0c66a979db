"""StreamService: the handlers of the streams and of their unary twins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc.aio

from memstream.v1 import stream_service_pb2 as pb
from memstream_server.engine.errors import ProtocolViolation
from memstream_server.engine.requests import AckLevel, NewObservation, Query, Refusal
from memstream_server.engine.runtime.turns import in_slices
from memstream_server.rpc import observe, recall, watch
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.limits import Limits
from memstream_server.rpc.scopes import ScopedQuery
from memstream_server.rpc.slow_consumer import end_if_stalled
from memstream_server.rpc.validation import Violations, check_identifier, memory_name
from memstream_server.rpc.wire import observations, queries
from memstream_server.rpc.wire.observations import ACK_LEVELS, outcome_messages, rejected_messages

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.rpc.forwarding import Forwarding

_Context = grpc.aio.ServicerContext[Any, Any]


class StreamService:
    """The servicer: Observe, Recall, Watch, ObserveBatch, RecallOnce."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        drain: Drain,
        forwarding: Forwarding | None,
        build_context: recall.ContextBuilder,
    ) -> None:
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
            self._engine, opening, self._limits, self._drain.memories, context, self._forwarding, self._build_context
        )
        async with aclosing(stream.responses(requests)) as responses:
            async for response in responses:
                yield response

    async def watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:
        """See rpc/watch.py."""
        stream = watch.WatchStream(self._engine, watch.read_request(request, self._limits), self._drain.memories)
        patience_s = self._limits.watch_stalled_max_s
        async with aclosing(end_if_stalled(stream.responses(), context, patience_s, watch.stalled_error)) as responses:
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

    async def _read_numbered(self, request: pb.ObserveBatchRequest, session: str) -> list[NewObservation | Refusal]:
        messages = list(request.observations)
        return (await observations.read_batch(messages, session, self._limits, self._engine.dimension))[0]

    async def _read_unnumbered(self, request: pb.ObserveBatchRequest, session: str) -> list[NewObservation | Refusal]:
        found, items = Violations(), list[NewObservation | Refusal]()
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
            scoped = ScopedQuery(self._engine, self._forwarding, limits, request.query, session, context)
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
        done = queries.done_response(query_id, answer, query.token_budget > 0)
        return recall.check_size(await queries.encode_answer(query_id, answer, query.explain, done), limits)

    async def _count_words(self, namespace: str, memory: str, query: Query) -> pb.RecallOnceResponse:
        words = await self._engine.scopes.count_words(namespace, memory, query)
        return pb.RecallOnceResponse(done=pb.RecallDone(word_statistics=queries.words_message(words)))
