"""Sent: an observation that is not yet stored."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass

from memstream.errors import EventLoopMismatch, MemstreamError
from memstream.values import Outcome


@dataclass(frozen=True, slots=True)
class Stored:
    """An observation's tier decision is committed: recalls with `min_revision=revision` see it.

    `outcome` is set if the stream was opened with outcomes.
    """

    sequence: int
    revision: int
    outcome: Outcome | None


class Sent:
    """A numbered observation that will be delivered; await it to wait until it is stored.

    Awaiting raises the server's rejection of this observation, or the error that ended the stream before it was stored.
    You may send more without awaiting it.
    """

    __slots__ = ("_error", "_outcome", "_stored", "_waiter", "sequence")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self._stored: Stored | None = None
        self._error: MemstreamError | None = None
        self._outcome: Outcome | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether it is stored or rejected."""
        return self._stored is not None or self._error is not None

    @property
    def stored(self) -> Stored | None:
        """Its number, revision and outcome; None while it is pending, or if it was rejected."""
        return self._stored

    @property
    def error(self) -> MemstreamError | None:
        """Why it was rejected, or why the stream ended; None while it is pending, or if it was stored."""
        return self._error

    def __await__(self) -> Generator[None, None, Stored]:
        if not self.done:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            if self._waiter.get_loop() is not asyncio.get_running_loop():
                raise EventLoopMismatch("the stream of this observation belongs to another event loop")
            # Shielded: cancelling one awaiter must not cancel the others.
            yield from asyncio.shield(self._waiter).__await__()
        if self._stored is None:
            assert self._error is not None
            raise self._error
        return self._stored

    def record_outcome(self, outcome: Outcome) -> None:
        """Records the outcome; called by the stream before `store`."""
        self._outcome = outcome

    def mark_stored(self, revision: int) -> None:
        """Marks it as stored; called by the stream. Does not override a rejection."""
        if not self.done:
            self._stored = Stored(self.sequence, revision, self._outcome)
            self._wake_waiter()

    def mark_failed(self, error: MemstreamError) -> bool:
        """Marks it as failed; called by the stream. False if it was already stored or rejected."""
        if self.done:
            return False
        self._error = error
        self._wake_waiter()
        return True

    def _wake_waiter(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
