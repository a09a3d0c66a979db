"""An observation on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass

from memstream.errors import EventLoopMismatch, MemstreamError
from memstream.values import Outcome


@dataclass(frozen=True, slots=True)
class Stored:
    """An observation's tier decision is committed: recalls with `min_revision=revision` see it.

    `outcome` says what became of it, if the stream was opened with outcomes.
    """

    sequence: int
    revision: int
    outcome: Outcome | None


class Sent:
    """An observation that was numbered and will be delivered; await it to learn that it is stored.

    Awaiting raises the server's refusal of this one observation, or what ended the stream before it was stored.
    Sending more need not wait for it.
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
        """Whether it was stored or refused."""
        return self._stored is not None or self._error is not None

    @property
    def stored(self) -> Stored | None:
        """Where it was stored; None while it is on its way, or was refused."""
        return self._stored

    @property
    def error(self) -> MemstreamError | None:
        """Why it was refused, or the stream ended; None while it is on its way, or was stored."""
        return self._error

    def __await__(self) -> Generator[None, None, Stored]:
        if not self.done:
            if self._waiter is None:
                self._waiter = asyncio.get_running_loop().create_future()
            if self._waiter.get_loop() is not asyncio.get_running_loop():
                raise EventLoopMismatch("the stream of this observation belongs to another event loop")
            # Shielded: one awaiter that is cancelled must not end the wait of the others.
            yield from asyncio.shield(self._waiter).__await__()
        if self._stored is None:
            assert self._error is not None
            raise self._error
        return self._stored

    def note(self, outcome: Outcome) -> None:
        """What became of it; called by the stream before `store`."""
        self._outcome = outcome

    def store(self, revision: int) -> None:
        """It is stored; called by the stream. A refusal stands."""
        if not self.done:
            self._stored = Stored(self.sequence, revision, self._outcome)
            self._wake()

    def refuse(self, error: MemstreamError) -> bool:
        """It will not be stored; called by the stream. False when that was known."""
        if self.done:
            return False
        self._error = error
        self._wake()
        return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
