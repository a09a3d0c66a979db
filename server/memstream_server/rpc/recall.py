"""Recall: many concurrent queries on one stream; each completes, fails or is cancelled on its own.

Rule 1. Every query is a task and writes its own answer, one message of the stream at a time: a queue to the generator
would cost one more event-loop iteration. The generator starts and ends the stream.
Rule 2. A failed query ends alone, with `failed` under its id, even if the id is empty or in use; only messages in the
wrong order end the stream.
Rule 3. A standing query sends its answer and then changes of it, until it is cancelled or the stream is closed. Each
ranking counts as a request: if the caller loses the right to ask, the stream ends.
Rule 4. A query is over when its `done` (inside the last part if the client reads it there, otherwise alone) or `failed`
is passed to the transport; its id is then free. A query that is cancelled earlier ends with `failed`, after the message
that is being written. Each query ends with exactly one of these messages, and nothing follows it. A query for the
context of a turn ends with `context` instead of `done`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import grpc.aio
from msgspec.structs import replace

from memstream.v1 import stream_service_pb2 as pb
from memstream.v1.context_service_pb2 import ContextRequest, ContextResponse
from memstream_server.engine.errors import (
    EngineError,
    InvalidField,
    LeaseLost,
    OwnedElsewhere,
    ProtocolViolation,
    QueryCancelled,
    QueryIdInUse,
    QueryTimeout,
    RevisionNotReached,
    WindowExceeded,
)
from memstream_server.engine.requests import Query
from memstream_server.rpc.access.caller import Verb, caller_may, recheck_caller
from memstream_server.rpc.calls import AFTER_CLOSE_S, Tracing, is_task_cancelled, wait_limit_s
from memstream_server.rpc.drain import Drain
from memstream_server.rpc.errors import PermissionDenied, Unauthenticated, status_of_any
from memstream_server.rpc.limits import RequestLimits
from memstream_server.rpc.memory_records import listed_query
from memstream_server.rpc.scopes import ScopedCall, ScopeDenied
from memstream_server.rpc.validation import Violations, check_identifier, invalid_field, memory_name
from memstream_server.rpc.wire import queries

if TYPE_CHECKING:
    from memstream_server.engine.engine import Engine
    from memstream_server.engine.requests import Change, RecallAnswer
    from memstream_server.rpc.forwarding import Forwarding

T = TypeVar("T")
ContextBuilder = Callable[[ContextRequest, grpc.aio.ServicerContext[Any, Any]], Awaitable[ContextResponse]]
"""ContextService.context."""


@dataclass(frozen=True, slots=True)
class RecallOpening:
    """A validated `open`."""

    namespace: str
    memory: str
    session: str
    done_in_recollections: bool


def read_open(message: pb.RecallRequest, limits: RequestLimits) -> RecallOpening:
    """Validates the first message of a stream. Raises ProtocolViolation, InvalidField."""
    if message.WhichOneof("message") != "open":
        raise ProtocolViolation("the first message of a Recall stream must be `open`")
    found = Violations()
    namespace, memory = message.open.namespace, message.open.memory
    if namespace or memory:  # else every query has scopes
        memory_name(found, namespace, memory, limits, "open.")
    session = check_identifier(found, "open.session", message.open.session, limits)
    found.check()
    return RecallOpening(namespace, memory, session, message.open.done_in_recollections)


class RecallStream:
    """One open stream. `responses` runs once; other messages go to `write`, which returns when the transport has taken
    them."""

    def __init__(
        self,
        engine: Engine,
        opening: RecallOpening,
        limits: RequestLimits,
        drain: Drain,
        context: grpc.aio.ServicerContext[Any, Any],
        forwarding: Forwarding | None,
        build_context: ContextBuilder,
        tracing: Tracing | None,
    ) -> None:
        self._context = context
        self._tracing = tracing
        self._build_context = build_context
        self._forwarding = forwarding
        self._engine = engine
        self._opening = opening
        self._limits = limits
        self._drain = drain
        self._queries: dict[str, asyncio.Task[None]] = {}
        """Tasks of unfinished queries, by id."""
        self._answering: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """All tasks of the stream."""
        self._send = context.write
        self._time_remaining = context.time_remaining
        self._closing = False
        self._closed = asyncio.Event()
        """Set when no more queries come."""
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[Any] | None = None
        """The task whose message the transport is taking."""
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    async def responses(self, requests: AsyncIterator[pb.RecallRequest]) -> AsyncGenerator[pb.RecallResponse, None]:
        """Yields the server's first message; ends with an error, or after `close` once all queries are answered."""
        opened = pb.RecallOpened(limits=self._limits.to_message())
        if self._opening.memory:
            record = await self._engine.memories.get(self._opening.namespace, self._opening.memory)
            opened.memory_uid, opened.revision = record.uid, record.revision
        yield pb.RecallResponse(opened=opened)  # before any other message is written
        try:
            with self._drain.notify_on_drain(self._on_drain):
                self._start_task(self._wait_for_end(self._start_task(self._read_requests(requests))))
                await self._ended.wait()
            if self._error is not None:
                raise self._error
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_stream(self, error: Exception | None = None) -> None:
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    async def _write_message(self, message: pb.RecallResponse, over: str = "") -> None:
        """`over` is the query whose last message this is: its id is free before the client can read the message."""
        async with self._writing:
            self._writer = asyncio.current_task()
            if over and self._queries.get(over) is self._writer:
                del self._queries[over]
            try:
                await self._send(message)
            except Exception as error:  # nothing more can be sent on this stream
                self._end_stream(error)
                raise
            finally:
                self._writer = None

    def _on_drain(self) -> None:
        self._start_task(self._go_away())

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._end_stream(error)

    async def _wait_for_end(self, reader: asyncio.Task[None]) -> None:
        """Ends the stream after its last request, once the queries in flight are answered."""
        reader.add_done_callback(lambda _: self._closed.set())
        await self._closed.wait()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await asyncio.wait({reader}, timeout=AFTER_CLOSE_S)
        self._end_stream()

    async def _read_requests(self, requests: AsyncIterator[pb.RecallRequest]) -> None:
        async for message in requests:
            if self._closing:
                raise ProtocolViolation(f"a message ({message.WhichOneof('message')}) came after `close`")
            await self._handle_message(message)

    async def _handle_message(self, message: pb.RecallRequest) -> None:
        kind = message.WhichOneof("message")
        if kind == "query":
            query = message.query
            await self._begin_query(message, query.query_id, partial(self._prepare_query, query), query.subscribe)
        elif kind == "context":
            asked = message.context
            await self._begin_query(message, asked.query_id, lambda: partial(self._answer_context, asked))
        elif kind == "cancel":
            await self._cancel_query(message.cancel.query_id)
        elif kind == "close":
            self._closing = True
            self._closed.set()
        elif kind == "open":
            raise ProtocolViolation("a second `open` came; a stream has one, its first message")
        else:
            raise ProtocolViolation("a message came with nothing set")

    async def _begin_query(
        self,
        message: pb.RecallRequest,
        query_id: str,
        prepare: Callable[[], Callable[[], Awaitable[None]]],
        subscribe: bool = False,
    ) -> None:
        """prepare: validates the query and returns what answers it."""
        if (refusal := self._check_new_query(query_id)) is not None:
            await self._fail_query(query_id[: self._limits.name_bytes_max], refusal)
            return
        try:
            answer = prepare()
        except EngineError as error:
            await self._fail_query(query_id, error)
            return
        if self._tracing is not None:
            name = "ContextQuery" if message.HasField("context") else "RecallQuery"
            answer = partial(self._tracing.trace_query, name, message.traceparent, answer)
        task = self._start_task(self._answer_query(query_id, answer))
        self._queries[query_id] = task
        if not subscribe:
            self._answering.add(task)
        task.add_done_callback(lambda done: self._on_query_done(query_id, done))

    def _prepare_query(self, message: pb.RecallQuery) -> Callable[[], Awaitable[None]]:
        opening, limits = self._opening, self._limits
        answer = self._follow_changes if message.subscribe else self._answer_once
        if not message.scopes and opening.memory:
            if message.count_words:
                raise invalid_field("query.count_words", "is for RecallOnce")
            query = read_query(message, opening.namespace, opening.session, limits, self._engine.dimension)
            return partial(answer, message, query)
        found = Violations()
        check_unnamed(found, opening.namespace, opening.memory, "open.")
        if not message.scopes:
            found.add("query.scopes", "is required: the stream names no memory")
        found.check()
        scoped = ScopedCall(self._engine, self._forwarding, limits, message, opening.session, self._context)
        return partial(answer, message, scoped)

    def _check_new_query(self, query_id: str) -> EngineError | None:
        """The reason why a query with this id cannot start."""
        found = Violations()
        check_identifier(found, "query.query_id", query_id, self._limits, required=True)
        try:
            found.check()
        except InvalidField as error:
            return error
        if query_id in self._queries:
            text = f"a query of id {query_id!a} is in flight and is still answered: give every query its own"
            return QueryIdInUse(text, query_id=query_id)
        if len(self._queries) >= self._limits.queries_in_flight_max:
            return WindowExceeded(f"{len(self._queries)} queries are in flight, more are not allowed")
        return None

    async def _cancel_query(self, query_id: str) -> None:
        """Ends the query with `failed`, unless its last message is already being written. The stream reads nothing
        meanwhile, so a client that does not read cannot pile up ended queries."""
        task = self._queries.pop(query_id, None)
        if task is None:
            return
        if task is not self._writer:
            task.cancel()
        await self._fail_query(query_id, QueryCancelled("the client cancelled the query"))

    def _on_query_done(self, query_id: str, task: asyncio.Task[None]) -> None:
        self._answering.discard(task)
        if self._queries.get(query_id) is task:
            del self._queries[query_id]

    async def _answer_query(self, query_id: str, answer: Callable[[], Awaitable[None]]) -> None:
        try:
            await answer()
        except (OwnedElsewhere, LeaseLost) as error:  # the memory moved, and the client must reconnect
            await self._write_message(pb.RecallResponse(going_away=pb.GoingAway(description=error.message)))
            self._end_stream(error)
        except (Unauthenticated, PermissionDenied) as error:
            if not isinstance(error, ScopeDenied):
                self._end_stream(error)
            elif self._is_wanted(query_id):
                await self._fail_query(query_id, error)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_task_cancelled():
                raise
            if self._is_wanted(query_id):
                await self._fail_query(query_id, error)

    async def _answer_context(self, asked: pb.ContextQuery) -> None:
        response = await self._build_context(asked.request, self._context)
        if self._is_wanted(asked.query_id):
            answer = pb.ContextAnswer(query_id=asked.query_id, response=response)
            await self._write_message(pb.RecallResponse(context=answer), asked.query_id)

    async def _answer_once(self, message: pb.RecallQuery, query: Query | ScopedCall) -> None:
        timeout_s = query_timeout_s(message)
        if isinstance(query, ScopedCall):
            answer = await recall_scopes(query, timeout_s, self._time_remaining())
        else:
            query = _with_time(query, timeout_s, self._time_remaining())
            asking = self._engine.recall(self._opening.namespace, self._opening.memory, query)
            answer = await _limit_time(asking, timeout_s)
        done = await queries.done_response(message.query_id, answer, message.token_budget > 0)
        inside = done if self._opening.done_in_recollections else None
        responses = queries.recollection_responses(message.query_id, answer, message.explain, inside)
        async for response in responses:
            if not self._is_wanted(message.query_id):
                return
            over = message.query_id if response.recollections.HasField("done") else ""
            await self._write_message(response, over)
        if inside is None and self._is_wanted(message.query_id):
            await self._write_message(pb.RecallResponse(done=done), message.query_id)

    async def _follow_changes(self, message: pb.RecallQuery, query: Query | ScopedCall) -> None:
        inside, budgeted = self._opening.done_in_recollections, message.token_budget > 0
        timeout_s = query_timeout_s(message)
        listed = listed_query(message, self._opening.session)
        if isinstance(query, ScopedCall):
            changes = self._engine.scopes.follow(query, recheck_caller, listed)
        else:
            query = _with_time(query, timeout_s, None)
            changes = self._engine.follow_query(
                self._opening.namespace, self._opening.memory, query, recheck_caller, listed
            )
        async with aclosing(changes):
            change: Change | None = await _limit_time(anext(changes), timeout_s)
            while change is not None:
                parts = queries.change_responses(message.query_id, change, message.explain, budgeted, inside)
                async for response in parts:
                    if not self._is_wanted(message.query_id):
                        return
                    await self._write_message(response)
                    listed.messages_sent += 1
                change = await anext(changes, None)

    def _is_wanted(self, query_id: str) -> bool:
        """Whether the running query has not been cancelled."""
        return self._queries.get(query_id) is asyncio.current_task()

    async def _fail_query(self, query_id: str, error: BaseException) -> None:
        failed = pb.RecallFailed(query_id=query_id, status=status_of_any(error))
        await self._write_message(pb.RecallResponse(failed=failed), query_id)

    async def _go_away(self) -> None:
        await self._write_message(pb.RecallResponse(going_away=self._drain.going_away_message()))
        await asyncio.sleep(self._drain.grace_s)
        self._end_stream(self._drain.shutdown_error())


def read_query(message: pb.RecallQuery, namespace: str, session: str, limits: RequestLimits, dimension: int) -> Query:
    """A validated query of the caller. Raises InvalidField, PermissionDenied.

    A caller that may not observe changes nothing: its query reinforces nothing and echoes in no session.
    """
    query = queries.read_query(message, session, limits, dimension)
    if caller_may(Verb.OBSERVE, namespace):
        return query
    if query.reinforce:
        raise PermissionDenied("query.reinforce needs the right observe in this namespace: leave it unset, or false")
    return replace(query, reinforce=False, session="")


def query_timeout_s(message: pb.RecallQuery) -> float | None:
    """The timeout of a valid query; None without one."""
    return message.timeout.ToMicroseconds() / 1e6 if message.HasField("timeout") else None


def _with_time(query: Query, timeout_s: float | None, remaining_s: float | None) -> Query:
    """The query with its time limits set."""
    if timeout_s is None:
        return query if remaining_s is None else replace(query, time_s=remaining_s)
    time_s = timeout_s if remaining_s is None else min(timeout_s, remaining_s)
    return replace(query, time_s=time_s, wait_s=wait_limit_s(time_s))


async def _limit_time(answering: Awaitable[T], timeout_s: float | None) -> T:
    """Raises QueryTimeout after `timeout_s`. Must not wrap reads or writes of a stream, because it would end the
    stream."""
    if timeout_s is None:
        return await answering
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await answering
    except TimeoutError:
        if not limit.expired():
            raise
        raise QueryTimeout(f"the query's timeout of {timeout_s} s passed before its answer was complete") from None


async def recall_once(
    engine: Engine, namespace: str, memory: str, query: Query, timeout_s: float | None, time_remaining_s: float | None
) -> RecallAnswer:
    """Answers one query within its own timeout and the call's."""
    query = _with_time(query, timeout_s, time_remaining_s)
    return await _limit_time(_recall_once(engine, namespace, memory, query, query.time_s), timeout_s)


def check_unnamed(found: Violations, namespace: str, memory: str, prefix: str = "") -> None:
    """A query with scopes is of no other memory."""
    for name, value in (("namespace", namespace), ("memory", memory)):
        if value:
            found.add(f"{prefix}{name}", "is given with query.scopes, which name the memories")


async def recall_scopes(scoped: ScopedCall, timeout_s: float | None, time_remaining_s: float | None) -> RecallAnswer:
    """Answers a query with scopes within its own timeout and the call's."""
    times_s = [each for each in (timeout_s, time_remaining_s) if each is not None]

    async def answer() -> RecallAnswer:
        return await scoped.recall(await scoped.find_memories(), min(times_s, default=None))

    return await _limit_time(answer(), timeout_s)


async def _recall_once(
    engine: Engine, namespace: str, memory: str, query: Query, time_remaining_s: float | None
) -> RecallAnswer:
    """If the query waits for a revision, gives up shortly before the deadline, so that the client gets the reason."""
    if not query.min_revision or time_remaining_s is None:
        return await engine.recall(namespace, memory, query)
    answering = asyncio.create_task(engine.recall(namespace, memory, query))
    try:
        await asyncio.wait({answering}, timeout=wait_limit_s(time_remaining_s))
        revision = query.min_revision if answering.done() else (await engine.memories.get(namespace, memory)).revision
        if revision < query.min_revision:
            raise RevisionNotReached(
                f"{namespace}/{memory} is at revision {revision}, {query.min_revision - revision} behind the "
                f"{query.min_revision} asked for",
                revision=revision,
            )
        return await answering
    finally:
        answering.cancel()


def check_size(response: bytes, limits: RequestLimits) -> bytes:
    """Raises InvalidField when an answer is too large for one message."""
    if len(response) > limits.message_bytes_max:
        raise invalid_field(
            "query.limit",
            f"leads to an answer of {len(response)} bytes, a message has at most {limits.message_bytes_max}: "
            "ask for less, set a token budget, or use the Recall stream",
        )
    return response
