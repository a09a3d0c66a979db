"""Observing, recalling and watching for scripts: each call waits for its answer."""

from __future__ import annotations

import concurrent.futures
from types import TracebackType
from typing import Self, Unpack

import memstream.observe as observe
import memstream.recall as recall
import memstream.sent as sent
import memstream.standing as standing
import memstream.watch as watch
from memstream.arguments import check_methods
from memstream.codec import Observable
from memstream.resources import Cursor, Event
from memstream.sync.iterated import Iterated
from memstream.sync.loop import LOOP
from memstream.values import Answer, ObservationFields, RecallOptions, Rejected, Resumption, Structured


class Sent:
    """An observation that was numbered and will be delivered; `wait` to learn that it is stored."""

    def __init__(self, inner: sent.Sent) -> None:
        self._inner = inner

    @property
    def sequence(self) -> int:
        """Its number."""
        return self._inner.sequence

    @property
    def done(self) -> bool:
        """Whether it was stored or refused."""
        return self._inner.done

    def wait(self) -> sent.Stored:
        """Waits until it is stored; raises why it was refused."""

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
        """The number the next observation will get; after a restart, where to resume reading one's own source."""
        return self._inner.expected_sequence

    @property
    def received(self) -> int:
        """Everything up to this number is durable, or was refused."""
        return self._inner.received

    @property
    def stored(self) -> int:
        """Everything up to this number is seen by every recall, or was refused."""
        return self._inner.stored

    @property
    def revision(self) -> int:
        """The memory's revision that made `stored` true."""
        return self._inner.revision

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The latest 1,000 observations that were refused, and why."""
        return self._inner.rejected

    @property
    def rejected_count(self) -> int:
        """How many observations were refused."""
        return self._inner.rejected_count

    @property
    def resumption(self) -> Resumption | None:
        """Refusals and outcomes of the producer's earlier numbers, if it was opened with `known_sequence`."""
        return self._inner.resumption

    def send(self, what: Observable, **said: Unpack[ObservationFields]) -> Sent:
        """Numbers an observation and hands it over; waits only while the window is full."""
        return Sent(LOOP.run(self._inner.send(what, **said)))

    def flush(self) -> None:
        """Waits until everything sent so far has come to the stream's `ack_level`."""
        LOOP.run(self._inner.flush())

    def close(self) -> None:
        """Flushes, and tells the server that the producer has finished."""
        LOOP.run(self._inner.close())


@check_methods
class RecallStream:
    """See memstream.RecallStream. Ask from several threads, or `submit`, for many queries in flight."""

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
        """Asks and waits for the answer."""
        return LOOP.run(self._inner.query(what, **options))

    def submit(self, what: str | Structured, **options: Unpack[RecallOptions]) -> concurrent.futures.Future[Answer]:
        """Asks, and gives the answer as a future; cancelling it gives the query up."""
        return LOOP.submit(self._inner.query(what, **options))

    def subscribe(self, what: str | Structured, **options: Unpack[RecallOptions]) -> StandingQuery:
        """A query that goes on being answered as the memory changes; ask by `with`, or by iterating over it."""

        async def make() -> standing.StandingQuery:  # over there: it belongs to that loop
            return self._inner.subscribe(what, **options)

        return StandingQuery(LOOP.run(make()))

    def close(self) -> None:
        """Waits until the queries in flight are answered, and ends the stream."""
        LOOP.run(self._inner.close())


class StandingQuery(Iterated[standing.AnswerChange]):
    """See memstream.StandingQuery."""

    def __init__(self, inner: standing.StandingQuery) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def answer(self) -> Answer | None:
        """The whole answer as it is now."""
        return self._inner.answer


class Watch(Iterated[Event]):
    """See memstream.Watch."""

    def __init__(self, inner: watch.Watch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def cursor(self) -> Cursor | None:
        """Where a later watch would go on."""
        return self._inner.cursor
