"""Standing queries: an answer that is kept current over any number of connections.

The server sends the whole answer, then its changes; a new connection starts with the whole answer again. The iterator
therefore returns the difference between the current answer and the last one returned, not the server's changes: a
reconnect loses nothing, and a slow reader gets fewer, combined changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from memstream.answer_codec import answer_from_wire
from memstream.answer_values import Answer, Recollection
from memstream.errors import MemstreamError, ProtocolViolation, StreamClosed
from memstream.v1 import stream_service_pb2 as pb
from memstream.values import TruthStatus


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """The change in the answer to a standing query since the last change; in the first, everything has entered.

    `answer` is the whole answer, best first. `entered`: new in the answer. `changed`: still in it, with a new version
    (enhanced, promoted, edited), status or folded fragments. `retracted`: ids of fragments that left it, because others
    rank higher or because they were superseded, forgotten, merged or erased.
    """

    answer: Answer
    entered: tuple[Recollection, ...]
    changed: tuple[Recollection, ...]
    retracted: tuple[str, ...]


class StandingQuery:
    """A query whose answer is kept current, created by `RecallStream.subscribe`.

    Iterate over it to get changes; leaving `async with`, or `aclose`, ends it. Waiting for the next change may be
    cancelled (or time out) and resumed without loss. `answer` is the whole current answer.
    """

    def __init__(
        self,
        query: pb.RecallQuery,
        ask: Callable[[StandingQuery], Awaitable[None]],
        give_up: Callable[[StandingQuery], None],
    ) -> None:
        """`ask` sends the query and returns after the first answer, or raises; `give_up` cancels it on the server."""
        self.query = query
        self.traceparent = ""
        """The span of the program that started it, as W3C trace context."""
        self.answer: Answer | None = None
        self._ask = ask
        self._give_up = give_up
        self._handed: Answer | None = None
        self._parts: list[pb.Recollections] = []
        self._known: dict[str, Recollection] = {}
        self._changed = asyncio.Event()
        self._error: MemstreamError | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start_query()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AnswerChange:
        """The next change. Raises the error that ended the query (MemoryNotFound: the memory was deleted) or the
        stream."""
        await self._start_query()
        while True:
            self._changed.clear()
            if self.answer is not None and (change := _answer_change(self._handed, self.answer)) is not None:
                self._handed = self.answer
                return change
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def aclose(self) -> None:
        """Ends the query; further iteration raises StreamClosed. Idempotent."""
        self.fail_query(StreamClosed("the standing query is closed"))
        self._handed = self.answer
        self._give_up(self)

    async def _start_query(self) -> None:
        if self._error is None and self.answer is None:
            await self._ask(self)

    # ---- called by the stream
    async def wait_for_first(self) -> None:
        """Waits for the first answer. Raises the error that ended the query."""
        while self.answer is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def prepare_resend(self) -> None:
        """Prepares for resending on a new connection, which sends the whole answer."""
        self._parts.clear()
        self._known.clear()

    def add_part(self, part: pb.Recollections) -> None:
        """Adds a part of the answer, or of a change."""
        self._parts.append(part)

    def complete_answer(self, done: pb.RecallDone) -> None:
        """Completes the answer, or a change. Raises ProtocolViolation if it ranks a fragment that was never sent."""
        received = answer_from_wire(self._parts, done)
        self._parts.clear()
        known = self._known | {hit.fragment.id: hit for hit in received.recollections}
        if missing := [id_ for id_ in done.ranking_ids if id_ not in known]:
            raise ProtocolViolation(f"the server ranks fragments that it has not sent: {', '.join(missing[:3])}")
        ranked = tuple(replace(known[id_], rank=rank) for rank, id_ in enumerate(done.ranking_ids, 1))
        self._known = {hit.fragment.id: hit for hit in ranked}
        self.answer = replace(received, recollections=ranked)
        self._changed.set()

    def fail_query(self, error: MemstreamError) -> None:
        """Ends the query with an error."""
        if self._error is None:
            self._error = error
        self._changed.set()


def _answer_change(before: Answer | None, now: Answer) -> AnswerChange | None:
    """The change from one answer to the next; None if nothing that a reader would notice changed."""
    before_versions = {hit.fragment.id: _version(hit) for hit in before or ()}
    now_versions = {hit.fragment.id: _version(hit) for hit in now}
    if (
        before is not None
        and list(before_versions.items()) == list(now_versions.items())
        and bool(before.degraded) is bool(now.degraded)
    ):
        return None
    return AnswerChange(
        answer=now,
        entered=tuple(hit for hit in now if hit.fragment.id not in before_versions),
        changed=tuple(hit for hit in now if before_versions.get(hit.fragment.id, _version(hit)) != _version(hit)),
        retracted=tuple(id_ for id_ in before_versions if id_ not in now_versions),
    )


def _version(hit: Recollection) -> tuple[tuple[tuple[str, str], ...], frozenset[str], TruthStatus]:
    """Changes whenever the recollection does."""
    return tuple((one.id, one.etag) for one in hit.fragments), frozenset(hit.folded_ids), hit.status
