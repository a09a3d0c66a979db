"""Standing queries: an answer that is kept as it is now, over any number of connections.

The server tells the whole answer, and then what changes in it; a new connection begins with the whole answer again. So
what is handed out is not what was told but the difference between the answer now and the one handed out before: nothing
is lost by a break, and whoever reads slowly reads less.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from memstream.codec import answer_from_wire
from memstream.errors import MemstreamError, ProtocolViolation, StreamClosed
from memstream.v1 import stream_service_pb2 as pb
from memstream.values import Answer, Recollection


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """What is new in the answer to a standing query since the change before; in the first, everything has entered.

    `answer` is the whole of it, best first. `entered` came among the best; `changed` were there and are of another
    version (enhanced, promoted, edited), or others are folded into them; `retracted` are ids of those that are among
    the best no more: others are better, or they were forgotten, merged or erased.
    """

    answer: Answer
    entered: tuple[Recollection, ...]
    changed: tuple[Recollection, ...]
    retracted: tuple[str, ...]


class StandingQuery:
    """A query that goes on being answered; made by `RecallStream.subscribe`.

    Iterate over it for the changes; leave `async with`, or `aclose`, to give it up. Waiting for the next change may be
    cancelled (or timed out) and resumed; nothing is lost by it. `answer` is the whole answer as it is now.
    """

    def __init__(
        self,
        query: pb.RecallQuery,
        ask: Callable[[StandingQuery], Awaitable[None]],
        give_up: Callable[[StandingQuery], None],
    ) -> None:
        """`ask` returns once the first answer is there, or raises; `give_up` tells the server."""
        self.query = query
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
            await self._begin()
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
        """The next change. Raises why the query failed (MemoryNotFound: the memory was deleted), or the stream."""
        await self._begin()
        while True:
            self._changed.clear()
            if self.answer is not None and (change := _difference(self._handed, self.answer)) is not None:
                self._handed = self.answer
                return change
            if self._error is not None:
                raise self._error
            await self._changed.wait()

    async def aclose(self) -> None:
        """Gives the query up; iterating on raises StreamClosed. May be called again."""
        self.failed(StreamClosed("the standing query is closed"))
        self._handed = self.answer
        self._give_up(self)

    async def _begin(self) -> None:
        if self._error is None and self.answer is None:
            await self._ask(self)

    # ---- for the stream
    async def first(self) -> None:
        """Waits for the first answer. Raises why there is none."""
        while self.answer is None:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def again(self) -> None:
        """It is asked on a new connection, which answers it whole."""
        self._parts.clear()
        self._known.clear()

    def continued(self, part: pb.Recollections) -> None:
        """A part of the answer, or of a change."""
        self._parts.append(part)

    def answered(self, done: pb.RecallDone) -> None:
        """The answer, or a change, is complete. Raises ProtocolViolation where it names what was never told."""
        told = answer_from_wire(self._parts, done)
        self._parts.clear()
        known = self._known | {hit.fragment.id: hit for hit in told.recollections}
        if missing := [id_ for id_ in done.ranking_ids if id_ not in known]:
            raise ProtocolViolation(f"the server ranks what it has not told: {', '.join(missing[:3])}")
        ranked = tuple(replace(known[id_], rank=rank) for rank, id_ in enumerate(done.ranking_ids, 1))
        self._known = {hit.fragment.id: hit for hit in ranked}
        self.answer = replace(told, recollections=ranked)
        self._changed.set()

    def failed(self, error: MemstreamError) -> None:
        """It is answered no more."""
        if self._error is None:
            self._error = error
        self._changed.set()


def _difference(before: Answer | None, now: Answer) -> AnswerChange | None:
    """None where nothing is new that one would want to be told."""
    held = {hit.fragment.id: _version(hit) for hit in before or ()}
    holds = {hit.fragment.id: _version(hit) for hit in now}
    if before is not None and list(held.items()) == list(holds.items()) and bool(before.degraded) is bool(now.degraded):
        return None
    return AnswerChange(
        answer=now,
        entered=tuple(hit for hit in now if hit.fragment.id not in held),
        changed=tuple(hit for hit in now if held.get(hit.fragment.id, _version(hit)) != _version(hit)),
        retracted=tuple(id_ for id_ in held if id_ not in holds),
    )


def _version(hit: Recollection) -> tuple[str, frozenset[str]]:
    """What says whether it is as it was."""
    return hit.fragment.etag, frozenset(hit.folded_ids)
