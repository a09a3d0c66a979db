"""The Recall stream: many queries in flight, each answered, cancelled and asked again on its own.

Rule 1: one task owns the call, reads it and opens the next one; the writer lives as long as a connection.
Rule 2: a query that was not answered is asked again on the next connection; its caller notices only the time.
Rule 3: a caller that stops waiting gives its query up, and the server is told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc
import grpc.aio

from memstream.backoff import Backoff, persist
from memstream.channel import Link, MemoryPath, deadline, read_message
from memstream.codec import answer_from_wire, query_to_wire
from memstream.errors import MemstreamError, ProtocolViolation, ShuttingDown, StreamClosed
from memstream.status import from_status, translate
from memstream.v1 import stream_service_pb2 as pb
from memstream.values import Answer, RecallOptions, Structured

_Call: TypeAlias = grpc.aio.StreamStreamCall[pb.RecallRequest, pb.RecallResponse]
IN_FLIGHT_MAX = 64
"""Queries in flight where the server does not say how many it takes."""


@dataclass(slots=True)
class _Question:
    query: pb.RecallQuery
    answer: asyncio.Future[Answer]
    parts: list[pb.Recollections] = field(default_factory=list[pb.Recollections])


class RecallStream:
    """A stream of queries to one memory; made by `Memory.recall`, opened by `async with`.

    Ask from as many tasks of one event loop as wanted; beyond what the server takes at once, queries wait their turn.
    """

    def __init__(self, link: Link, memory: MemoryPath, session: str) -> None:
        self.memory = memory
        self.session = session
        self.connections = 0
        self._link = link
        self._task: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._asked: dict[str, _Question] = {}
        self._outbox: deque[pb.RecallRequest] = deque()
        self._in_flight_max = IN_FLIGHT_MAX
        self._changed = asyncio.Event()
        self._work = asyncio.Event()
        self._error: MemstreamError | None = None
        self._closing = self._closed = self._draining = self._connected = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise StreamClosed("a stream is opened once; call recall() again")
        self._task = asyncio.create_task(self._run(), name=f"memstream recall {self.memory}")
        try:
            await self._until(lambda: self.connections > 0)
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.close()
        finally:
            await self._abandon()

    async def query(self, what: str | Structured, **options: Unpack[RecallOptions]) -> Answer:
        """Asks and waits for the answer. Cancelling the wait gives the query up, and only this one.

        Raises DeadlineExceeded after `timeout_s` (default: the client's), the server's refusal of this query, and
        whatever ended the stream.
        """
        question = _Question(
            query_to_wire(str(next(self._ids)), what, **options), asyncio.get_running_loop().create_future()
        )
        timeout_s = options.get("timeout_s", self._link.settings.timeout_s)
        try:
            async with asyncio.timeout(timeout_s):  # around a future, never around a read, which would end the call
                return await self._ask(question)
        except TimeoutError as error:
            if isinstance(error, MemstreamError):
                raise
            raise deadline(timeout_s) from None
        finally:
            self._give_up(question)

    async def close(self) -> None:
        """Waits until the queries in flight are answered, and ends the stream. May be called again."""
        if self._closed:
            return
        self._check_open()
        await self._until(lambda: not self._asked)
        self._closing = True
        if self._connected:
            self._push(pb.RecallRequest(close=pb.RecallClose()))
            await self._until(lambda: not self._connected)
        self._closed = True  # nothing is in flight, so nothing is worth a new connection

    async def _ask(self, question: _Question) -> Answer:
        self._check_usable()
        await self._until(lambda: len(self._asked) < self._in_flight_max)
        self._check_usable()
        self._asked[question.query.query_id] = question
        self._push(pb.RecallRequest(query=question.query))
        return await question.answer

    def _give_up(self, question: _Question) -> None:
        query_id = question.query.query_id
        if self._asked.pop(query_id, None) is not None:
            self._push(pb.RecallRequest(cancel=pb.RecallCancel(query_id=query_id)))
            self._notify()

    def _push(self, request: pb.RecallRequest) -> None:
        if not self._draining:  # else the next connection asks for what is then still wanted
            self._outbox.append(request)
            self._work.set()

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._task is None:
            raise StreamClosed("the stream is not open: use `async with`")

    def _check_usable(self) -> None:
        self._check_open()
        if self._closing:
            raise StreamClosed("the stream is closed")

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _run(self) -> None:
        backoff = Backoff(self._link.settings.retry, asyncio.get_running_loop().time)
        try:
            await persist(lambda: self._connection(backoff), backoff)
        except MemstreamError as error:
            self._fail(error)

    def _fail(self, error: MemstreamError) -> None:
        if self._error is None and not self._closed:
            self._error = error
            for question in self._asked.values():
                if not question.answer.done():
                    question.answer.set_exception(error)
            self._asked.clear()
        self._notify()

    async def _abandon(self) -> None:
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._fail(StreamClosed("the stream was abandoned"))

    async def _connection(self, backoff: Backoff) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            return
        call: _Call = self._link.streams.Recall(metadata=self._link.metadata(self.memory))
        writer: asyncio.Task[None] | None = None
        try:
            self._open(await self._answer_to_open(call))
            backoff.opened()
            writer = asyncio.create_task(self._write(call))
            while (response := await self._read(call)) is not None:
                if self._take(response, call):
                    backoff.progressed()
        finally:
            call.cancel()
            self._connected = False
            self._notify()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _read(self, call: _Call) -> pb.RecallResponse | None:
        """The next answer; None when the server ended the stream because it was closed."""
        if not self._closing:
            return await read_message(call)
        message = await call.read()
        return message if isinstance(message, pb.RecallResponse) else None

    async def _answer_to_open(self, call: _Call) -> pb.RecallOpened:
        opening = pb.RecallOpen(namespace=self.memory.namespace, memory=self.memory.name, session=self.session)
        await call.write(pb.RecallRequest(open=opening))
        answer: pb.RecallResponse = await read_message(call)
        if answer.HasField("going_away"):
            raise ShuttingDown("the server is going away", reason="SHUTTING_DOWN")
        if not answer.HasField("opened"):
            raise ProtocolViolation(f"the server answered open with {answer.WhichOneof('message')}")
        return answer.opened

    def _open(self, opened: pb.RecallOpened) -> None:
        self._in_flight_max = opened.limits.queries_in_flight_max or IN_FLIGHT_MAX
        self._draining = False
        self._outbox.clear()
        for question in self._asked.values():
            question.parts.clear()
            self._push(pb.RecallRequest(query=question.query))
        self.connections += 1
        self._connected = True
        self._notify()

    def _take(self, response: pb.RecallResponse, call: _Call) -> bool:
        """Takes one message; whether it answered a query. Raises ShuttingDown when it is time to reconnect."""
        kind = response.WhichOneof("message")
        if kind == "recollections":
            question = self._asked.get(response.recollections.query_id)
            if question is not None:
                question.parts.append(response.recollections)
        elif kind == "done":
            self._answered(response.done)
        elif kind == "failed":
            self._refused(response.failed)
        elif kind == "going_away":
            self._drain(response.going_away, call)
        if self._draining and not self._asked:
            raise ShuttingDown("the server is going away", reason="SHUTTING_DOWN")
        return kind in ("done", "failed")

    def _answered(self, done: pb.RecallDone) -> None:
        question = self._asked.pop(done.query_id, None)
        if question is not None and not question.answer.done():
            question.answer.set_result(answer_from_wire(question.parts, done))
        self._notify()

    def _refused(self, failed: pb.RecallFailed) -> None:
        question = self._asked.pop(failed.query_id, None)
        if question is not None and not question.answer.done():
            question.answer.set_exception(from_status(failed.status))
        self._notify()

    def _drain(self, going_away: pb.GoingAway, call: _Call) -> None:
        # Queries are only questions: what is not answered within the grace is asked of the next server.
        self._draining = True
        grace_s = going_away.grace.seconds + going_away.grace.nanos / 1e9
        asyncio.get_running_loop().call_later(min(grace_s, 1.0), call.cancel)

    async def _write(self, call: _Call) -> None:
        try:
            while True:
                while self._outbox:
                    await call.write(self._outbox.popleft())
                await self._work.wait()
                self._work.clear()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            return  # the reader gets the status
        except Exception as defect:
            self._fail(translate(defect))
            call.cancel()
