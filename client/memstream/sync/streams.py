"""The blocking ObserveStream, RecallStream, StandingQuery, Watch.

Written by scripts/sync_sdk.py: change the asynchronous class, then run `make generate`.
"""

from __future__ import annotations

from typing import Unpack

import memstream.observe
import memstream.recall
import memstream.standing
import memstream.watch
from memstream.answer_values import Answer
from memstream.argument_types import Count, Several
from memstream.arguments import check_methods
from memstream.codec import Observable
from memstream.context import ContextOptions, ContextText
from memstream.resources import Cursor, Event
from memstream.standing import AnswerChange
from memstream.sync.bases import Context, Iterated, Opened, OpenedRecall, Sent
from memstream.sync.loop import LOOP
from memstream.values import ObservationFields, RecallOptions, Rejected, Resumption, Scope, Structured


@check_methods
class ObserveStream(Opened):
    """See memstream.ObserveStream."""

    def __init__(self, inner: memstream.observe.ObserveStream) -> None:
        super().__init__(inner)
        self._inner = inner

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
        """The memory's revision at `stored`: pass it to a recall as `min_revision`."""
        return self._inner.revision

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The latest 1,000 rejections; `rejected_count` counts all."""
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
        """Why nothing moves now: the server's reason for a pause (a full disk or backlog, for instance), or the error
        after which the stream reconnects. Empty while it moves."""
        return self._inner.waiting

    def send(self, what: Observable, **said: Unpack[ObservationFields]) -> Sent:
        """Numbers and queues an observation; waits only while the window is full.

        Returns a `Sent`: await it to wait until the observation is stored. If this raises, including CancelledError,
        the
        observation is not queued. Raises InvalidRequest for an invalid observation, or the error that ended the stream.
        """
        return Sent(LOOP.run(self._inner.send(what, **said)))

    def flush(self) -> None:
        """Waits until everything sent so far has reached the stream's `ack_level`."""
        LOOP.run(self._inner.flush())

    def close(self) -> None:
        """Flushes, and tells the server that the producer has finished. Idempotent."""
        LOOP.run(self._inner.close())


@check_methods
class RecallStream(OpenedRecall):
    """See memstream.RecallStream."""

    def __init__(self, inner: memstream.recall.RecallStream) -> None:
        super().__init__(inner)
        self._inner = inner

    def query(self, what: str | Structured, **options: Unpack[RecallOptions]) -> Answer:
        """Sends a query and waits for the answer. Cancelling the wait cancels only this query.

        Raises DeadlineExceeded after `timeout_s` (default: the client's), when the server also stops the query; the
        server's error for this query; or the error that ended the stream.
        """
        return LOOP.run(self._inner.query(what, **options))

    def context(
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
        return Context(
            LOOP.run(
                self._inner.context(
                    question,
                    scopes=scopes,
                    conversation=conversation,
                    blocks=blocks,
                    budget=budget,
                    after=after,
                    partial=partial,
                    **options,
                )
            )
        )

    def subscribe(self, what: str | Structured, **options: Unpack[RecallOptions]) -> StandingQuery:
        """A standing query, whose answer follows the memory; `with` or iteration starts it.

        It returns no working memory and reinforces nothing. It counts as a query in flight until it is closed.
        `timeout_s`
        (default: the client's) applies to the first answer. Raises CapabilityMissing if the server has no standing
        queries.
        """
        return StandingQuery(LOOP.make(lambda: self._inner.subscribe(what, **options)))

    def close(self) -> None:
        """Waits until the queries in flight are answered, then ends the stream. Idempotent."""
        LOOP.run(self._inner.close())


class StandingQuery(Iterated[AnswerChange]):
    """See memstream.StandingQuery."""

    def __init__(self, inner: memstream.standing.StandingQuery) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def answer(self) -> Answer | None:
        """The whole current answer."""
        return self._inner.answer


class Watch(Iterated[Event]):
    """See memstream.Watch."""

    def __init__(self, inner: memstream.watch.Watch) -> None:
        super().__init__(inner)
        self._inner = inner

    @property
    def cursor(self) -> Cursor | None:
        """The position from which a later watch continues; None before the first page."""
        return self._inner.cursor
