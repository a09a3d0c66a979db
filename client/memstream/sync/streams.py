"""The blocking Observe, Recall and Watch streams, and standing queries."""

from __future__ import annotations

import concurrent.futures
from types import TracebackType
from typing import Self, Unpack

import memstream.observe as observe
import memstream.recall as recall
import memstream.sent as sent
import memstream.standing as standing
import memstream.watch as watch
from memstream.answer_values import Answer
from memstream.arguments import check_methods
from memstream.codec import Observable
from memstream.resources import Cursor, Event
from memstream.sync.iterated import Iterated
from memstream.sync.loop import LOOP
from memstream.values import ObservationFields, RecallOptions, Rejected, Resumption, Structured


class Sent:
    """A numbered observation that will be delivered; `wait` waits until it is stored."""

    def __init__(self, inner: sent.Sent) -> None:
        self._inner = inner

    @property
    def sequence(self) -> int:
        """Its number."""
        return self._inner.sequence

    @property
    def done(self) -> bool:
        """Whether it is stored or rejected."""
        return self._inner.done

    def wait(self) -> sent.Stored:
        """Waits until it is stored; raises the error if it was rejected."""

        async def stored() -> sent.Stored:
            return await self._inner

        return LOOP.run(stored())


@check_methods
class ObserveStream:
    """See memstream.ObserveStream."""

    def __init__(self, inner: observe.ObserveStream) -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        LOOP.run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LOOP.run(self._inner.__aexit__(kind, error, trace))

    @property
    def expected_sequence(self) -> int:
        """The number of the next observation; after a restart, the position at which to resume reading your source."""
        return self._inner.expected_sequence

    @property
    def received(self) -> int:
        """Everything up to this number is durable, or rejected."""
        return self._inner.received

    @property
    def stored(self) -> int:
        """Everything up to this number is visible to every recall, or rejected."""
        return self._inner.stored

    @property
    def revision(self) -> int:
        """The memory's revision at `stored`."""
        return self._inner.revision

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The latest 1,000 rejections."""
        return self._inner.rejected

    @property
    def rejected_count(self) -> int:
        """Number of rejected observations."""
        return self._inner.rejected_count

    @property
    def resumption(self) -> Resumption | None:
        """Rejections and outcomes of the producer's earlier numbers, if opened with `known_sequence`."""
        return self._inner.resumption

    @property
    def waiting(self) -> str:
        """Why nothing moves now: the server's reason for a pause, or the error after which the stream reconnects."""
        return self._inner.waiting

    def send(self, what: Observable, **said: Unpack[ObservationFields]) -> Sent:
        """Numbers and queues an observation; waits only while the window is full."""
        return Sent(LOOP.run(self._inner.send(what, **said)))

    def flush(self) -> None:
        """Waits until everything sent so far has reached the stream's `ack_level`."""
        LOOP.run(self._inner.flush())

    def close(self) -> None:
        """Flushes, and tells the server that the producer has finished."""
        LOOP.run(self._inner.close())


@check_methods
class RecallStream:
    """See memstream.RecallStream. Use several threads, or `submit`, to have many queries in flight."""

    def __init__(self, inner: recall.RecallStream) -> None:
        self._inner = inner

    def __enter__(self) -> Self:
        LOOP.run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        LOOP.run(self._inner.__aexit__(kind, error, trace))

    def query(self, what: str | Structured, **options: Unpack[RecallOptions]) -> Answer:
        """Sends a query and waits for the answer."""
        return LOOP.run(self._inner.query(what, **options))

    def submit(self, what: str | Structured, **options: Unpack[RecallOptions]) -> concurrent.futures.Future[Answer]:
        """Sends a query and returns a future of the answer; cancelling it cancels the query."""
        return LOOP.submit(self._inner.query(what, **options))

    def subscribe(self, what: str | Structured, **options: Unpack[RecallOptions]) -> StandingQuery:
        """A standing query, whose answer follows the memory; `with` or iteration starts it."""

        async def make() -> standing.StandingQuery:  # on the background loop, to which it belongs
            return self._inner.subscribe(what, **options)

        return StandingQuery(LOOP.run(make()))

    def close(self) -> None:
        """Waits until the queries in flight are answered, then ends the stream."""
        LOOP.run(self._inner.close())


class StandingQuery(Iterated[standing.AnswerChange]):
    """See memstream.StandingQuery."""

    def __init__(self, inner: standing.StandingQuery) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def answer(self) -> Answer | None:
        """The whole current answer."""
        return self._inner.answer


class Watch(Iterated[Event]):
    """See memstream.Watch."""

    def __init__(self, inner: watch.Watch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def cursor(self) -> Cursor | None:
        """The position for a later watch."""
        return self._inner.cursor
