"""The Recall stream: many queries in flight, each answered, cancelled and resent independently.

Rule 1: an unanswered query is resent on the next connection; its caller only sees a delay.
Rule 2: a caller that stops waiting cancels its query, also on the server.
Rule 3: a standing query is resent as well, and continues from its current answer; see standing.py.
Rule 4: a query for the context of a turn has one message as its answer; all else about it is as for other queries.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias, Unpack

import grpc
import grpc.aio

from memstream.answer_codec import answer_from_wire
from memstream.answer_values import Answer
from memstream.argument_types import Count, Several
from memstream.arguments import check_methods
from memstream.backoff import Backoff
from memstream.channel import Link, MemoryPath, deadline_error, read_message
from memstream.codec import query_to_wire
from memstream.context import Context, ContextOptions, ContextText, context_to_wire
from memstream.errors import MemstreamError, ProtocolViolation, ShuttingDown, StreamClosed
from memstream.standing import StandingQuery
from memstream.status import error_from_status, is_cut
from memstream.twoway import TwoWayStream
from memstream.v1 import context_service_pb2
from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.scope_pb2 import RecallScope
from memstream.values import RecallOptions, Scope, Structured

_Call: TypeAlias = grpc.aio.StreamStreamCall[pb.RecallRequest, pb.RecallResponse]
IN_FLIGHT_MAX = 64
"""Queries in flight, if the server does not announce a limit."""
RESEND_DELAY_S = 1.0
"""Delay before resending a standing query after a transient error, if the server gives none."""


@dataclass(slots=True)
class _PendingQuery:
    query: pb.RecallQuery
    answer: asyncio.Future[Answer]
    traceparent: str = ""
    parts: list[pb.Recollections] = field(default_factory=list[pb.Recollections])

    def prepare_resend(self) -> None:
        """Prepares for resending on a new connection."""
        self.parts.clear()

    def add_part(self, part: pb.Recollections) -> None:
        """Adds a part of the answer."""
        self.parts.append(part)

    def complete_answer(self, done: pb.RecallDone) -> None:
        """Completes the answer."""
        if not self.answer.done():
            self.answer.set_result(answer_from_wire(self.parts, done))

    def fail_query(self, error: MemstreamError) -> None:
        """Fails the query."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True)
class _PendingContext:
    query: pb.ContextQuery
    answer: asyncio.Future[context_service_pb2.ContextResponse]
    traceparent: str = ""

    def prepare_resend(self) -> None:
        """Its answer has one part, so nothing of it is there."""

    def fail_query(self, error: MemstreamError) -> None:
        """Fails the query."""
        if not self.answer.done():
            self.answer.set_exception(error)


_OpenQuery: TypeAlias = _PendingQuery | _PendingContext | StandingQuery


def _request_of(question: _OpenQuery) -> pb.RecallRequest:
    if isinstance(question, _PendingContext):
        return pb.RecallRequest(context=question.query, traceparent=question.traceparent)
    return pb.RecallRequest(query=question.query, traceparent=question.traceparent)


@check_methods
class RecallStream(TwoWayStream[pb.RecallRequest, pb.RecallResponse]):
    """A stream of queries to one memory, created by `Memory.recall`, or to several, created by `Client.recall`; opened
    by `async with`.

    Any number of tasks of one event loop may query; queries over the server's limit in flight are queued.
    """

    def __init__(
        self,
        link: Link,
        memory: MemoryPath | None,
        session: str,
        scopes: Sequence[RecallScope] = (),
        partial: bool = False,
    ) -> None:
        super().__init__(link, memory or MemoryPath("", ""))
        self.session = session
        self._scopes, self._partial = scopes, partial
        """Of every query, if the stream names no memory."""
        self._ids = itertools.count(1)
        self._open_queries: dict[str, _OpenQuery] = {}
        """Queries that have not ended, by id."""
        self._to_resend: deque[_OpenQuery] = deque()
        """Queries of an earlier connection that exceed this server's limit in flight, to be resent."""
        self._outbox: deque[pb.RecallRequest] = deque()
        self._in_flight_max = IN_FLIGHT_MAX
        self._connected = False

    async def query(self, what: str | Structured, **options: Unpack[RecallOptions]) -> Answer:
        """Sends a query and waits for the answer. Cancelling the wait cancels only this query.

        Raises DeadlineExceeded after `timeout_s` (default: the client's), when the server also stops the query; the
        server's error for this query; or the error that ended the stream.
        """
        self._check_usable()
        timeout_s = self._timeout_s(options.get("timeout_s"))
        query = self._make_query(what, options, timeout_s)
        question = _PendingQuery(query, asyncio.get_running_loop().create_future())
        with self._link.traced_memory(query, self.memory, self.session) as note, self._link.traced("RecallQuery"):
            question.traceparent = self._link.traceparent()
            await self._wait_for_answer(question, timeout_s)
            note(question.answer.result())
        return question.answer.result()

    async def context(
        self,
        question: str,
        *,
        scopes: Several[str | Scope] | None = None,
        conversation: str = "",
        blocks: Several[str] = (),
        budget: Count = 0,
        after: ContextText | bytes | None = None,
        partial: bool | None = None,
        **options: Unpack[ContextOptions],
    ) -> Context:
        """As `Client.context`, on this stream; `scopes` and `partial` are by default those of the stream."""
        self._check_usable()
        timeout_s = self._timeout_s(options.get("timeout_s"))
        partial = self._partial if partial is None else partial
        request = context_to_wire(scopes or (), question, conversation, blocks, budget, after, partial, options)
        if scopes is None:
            request.scopes.extend(self._scopes or [RecallScope(memory=str(self.memory))])
        query = pb.ContextQuery(query_id=str(next(self._ids)), request=request)
        asked = _PendingContext(query, asyncio.get_running_loop().create_future())
        with self._link.traced_memory(query, self.memory, self.session) as note, self._link.traced("ContextQuery"):
            asked.traceparent = self._link.traceparent()
            await self._wait_for_answer(asked, timeout_s)
            note(asked.answer.result())
        return Context(self._link, request, asked.answer.result())

    def subscribe(self, what: str | Structured, **options: Unpack[RecallOptions]) -> StandingQuery:
        """A standing query, whose answer follows the memory; `async with` or iteration starts it.

        It returns no working memory and reinforces nothing. It counts as a query in flight until it is closed.
        `timeout_s`
        (default: the client's) applies to the first answer. Raises CapabilityMissing if the server has no standing
        queries.
        """
        timeout_s = self._timeout_s(options.get("timeout_s"))
        query = self._make_query(what, options, timeout_s)
        query.subscribe = True
        return StandingQuery(query, lambda standing: self._start_standing(standing, timeout_s), self._cancel_query)

    def _make_query(self, what: str | Structured, options: RecallOptions, timeout_s: float) -> pb.RecallQuery:
        query = _with_timeout(query_to_wire(str(next(self._ids)), what, **options), timeout_s)
        query.scopes.extend(self._scopes)
        query.partial = self._partial
        return query

    def _timeout_s(self, given: float | None) -> float:
        return self._link.settings.timeout_s if given is None else given

    async def _start_standing(self, standing: StandingQuery, timeout_s: float) -> None:
        self._check_usable()
        standing.traceparent = self._link.traceparent()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_query(standing)
                await standing.wait_for_first()
        except TimeoutError as error:
            if isinstance(error, MemstreamError):
                raise
            self._cancel_query(standing)
            raise deadline_error(timeout_s) from None

    async def _wait_for_answer(self, question: _PendingQuery | _PendingContext, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):  # around a future: cancelling a read would end the call
                await self._send_query(question)
                await question.answer
        except TimeoutError as error:
            if isinstance(error, MemstreamError):
                raise
            raise deadline_error(timeout_s) from None
        finally:
            self._cancel_query(question)

    async def close(self) -> None:
        """Waits until the queries in flight are answered, then ends the stream. Idempotent."""
        if self._closed:
            return
        self._check_open()
        await self._wait_until(lambda: not self._has_waiting())
        self._closing = True
        if self._connected:
            self._push_request(pb.RecallRequest(close=pb.RecallClose()))
            await self._wait_until(lambda: not self._connected)
        self._closed = True  # nothing is in flight, so there is no need to reconnect
        self._on_failed(StreamClosed("the stream is closed"))  # ends the standing queries

    async def _send_query(self, question: _OpenQuery) -> None:
        """Sends a query once fewer than the limit are in flight."""
        self._check_usable()
        await self._wait_until(lambda: len(self._open_queries) < self._in_flight_max)
        self._check_usable()
        if self._open_queries.setdefault(question.query.query_id, question) is question:
            self._push_request(_request_of(question))

    def _has_waiting(self) -> bool:
        """Whether a caller waits for an answer."""
        return any(
            not isinstance(question, StandingQuery) or question.answer is None
            for question in self._open_queries.values()
        )

    def _cancel_query(self, question: _OpenQuery) -> None:
        query_id = question.query.query_id
        if self._open_queries.pop(query_id, None) is not None:
            if question in self._to_resend:
                self._to_resend.remove(question)
            else:
                self._push_request(pb.RecallRequest(cancel=pb.RecallCancel(query_id=query_id)))
            self._notify_waiters()

    def _notify_waiters(self) -> None:
        super()._notify_waiters()
        while self._to_resend and len(self._open_queries) - len(self._to_resend) < self._in_flight_max:
            self._push_request(_request_of(self._to_resend.popleft()))

    def _push_request(self, request: pb.RecallRequest) -> None:
        if not self._draining:  # else the next connection sends the queries that remain
            self._outbox.append(request)
            self._work.set()

    def _on_failed(self, error: MemstreamError) -> None:
        for question in self._open_queries.values():
            question.fail_query(error)
        self._open_queries.clear()
        self._to_resend.clear()

    def _start_call(self) -> _Call:
        return self._link.streams.Recall(metadata=self._link.metadata(self.memory if self.memory.name else None))

    async def _open_connection(self, call: _Call) -> None:
        opening = pb.RecallOpen(
            namespace=self.memory.namespace, memory=self.memory.name, session=self.session, done_in_recollections=True
        )
        await call.write(pb.RecallRequest(open=opening))
        answer = await read_message(call)
        if answer.HasField("going_away"):
            raise ShuttingDown("the server is going away", reason="SHUTTING_DOWN")
        if not answer.HasField("opened"):
            raise ProtocolViolation(f"the server answered open with {answer.WhichOneof('message')}")
        self._link.allow_calls(answer.opened.limits.connection_streams_max)
        self._in_flight_max = answer.opened.limits.queries_in_flight_max or IN_FLIGHT_MAX
        self._draining = False
        self._outbox.clear()
        for question in self._open_queries.values():
            question.prepare_resend()
        self._to_resend = deque(self._open_queries.values())
        self._connected = True

    async def _run_connection(self, backoff: Backoff) -> None:
        if not self._closing or self._error is not None:
            await super()._run_connection(backoff)

    async def _read_responses(self, call: _Call, backoff: Backoff) -> None:
        while (response := await self._read_response(call)) is not None:
            if self._handle_response(response, call):
                backoff.mark_progress()

    async def _read_response(self, call: _Call) -> pb.RecallResponse | None:
        """The next response; None when the server has ended a closed stream."""
        if not self._closing:
            return await read_message(call)
        message = await call.read()
        return message if isinstance(message, pb.RecallResponse) else None

    def _on_disconnected(self) -> None:
        self._connected = False

    def _is_last(self, request: pb.RecallRequest) -> bool:
        return request.HasField("close")

    def _next_request(self) -> pb.RecallRequest | None:
        return self._outbox.popleft() if self._outbox else None

    def _handle_response(self, response: pb.RecallResponse, call: _Call) -> bool:
        """Handles one response and returns whether it ended a query. Raises ShuttingDown when it is time to
        reconnect."""
        kind = response.WhichOneof("message")
        if kind == "recollections":
            self._add_part(response.recollections)
        elif kind == "context":
            self._complete_context(response.context)
        elif kind == "done":  # from an older server
            self._complete_query(response.done)
        elif kind == "failed":
            self._fail_query(response.failed)
        elif kind == "going_away":
            self._drain_connection(response.going_away, call)
        if self._draining and not self._has_waiting():
            raise ShuttingDown("the server is going away", reason="SHUTTING_DOWN")
        return kind in ("context", "done", "failed") or response.recollections.HasField("done")

    def _add_part(self, part: pb.Recollections) -> None:
        question = self._open_queries.get(part.query_id)
        if question is not None and not isinstance(question, _PendingContext):
            question.add_part(part)
        if part.HasField("done"):
            self._complete_query(part.done)

    def _complete_query(self, done: pb.RecallDone) -> None:
        question = self._open_queries.get(done.query_id)
        if question is None or isinstance(question, _PendingContext):
            return
        if isinstance(question, _PendingQuery):
            del self._open_queries[done.query_id]
        question.complete_answer(done)
        self._notify_waiters()

    def _complete_context(self, answer: pb.ContextAnswer) -> None:
        question = self._open_queries.get(answer.query_id)
        if isinstance(question, _PendingContext):
            del self._open_queries[answer.query_id]
            if not question.answer.done():
                question.answer.set_result(answer.response)
            self._notify_waiters()

    def _fail_query(self, failed: pb.RecallFailed) -> None:
        question, error = self._open_queries.get(failed.query_id), error_from_status(failed.status)
        if question is None:
            return
        if isinstance(question, StandingQuery) and question.answer is not None and is_cut(error):
            delay_s = RESEND_DELAY_S if error.retry_after is None else error.retry_after
            asyncio.get_running_loop().call_later(delay_s, self._resend_standing, question, self.connections)
            return
        del self._open_queries[failed.query_id]
        question.fail_query(error)
        self._notify_waiters()

    def _resend_standing(self, standing: StandingQuery, connection: int) -> None:
        """Resends a standing query, unless a new connection has done so."""
        if (
            self._open_queries.get(standing.query.query_id) is standing
            and self.connections == connection
            and self._connected
        ):
            standing.prepare_resend()
            self._push_request(_request_of(standing))

    def _drain_connection(self, going_away: pb.GoingAway, call: _Call) -> None:
        # Queries are safe to repeat: those not answered during the grace period go to the next server.
        self._draining = True
        grace_s = going_away.grace.seconds + going_away.grace.nanos / 1e9
        asyncio.get_running_loop().call_later(min(grace_s, 1.0), call.cancel)


def _with_timeout(query: pb.RecallQuery, timeout_s: float) -> pb.RecallQuery:
    """Sets the timeout at which the server stops the query; not for one that has expired."""
    if timeout_s > 0:
        query.timeout.FromTimedelta(timedelta(seconds=max(float(timeout_s), 1e-6)))
    return query
