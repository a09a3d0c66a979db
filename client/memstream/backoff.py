"""When to make a call or open a broken stream again, and when to give up."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import grpc
import grpc.aio

from memstream.argument_types import Seconds
from memstream.arguments import check_fields
from memstream.errors import MemstreamError, Unauthenticated
from memstream.status import is_cut, task_is_cancelled, translate


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How streams reconnect and calls are repeated: full jitter up to a doubling delay, or what the server asks for
    where that is longer, until so long has passed without progress.

    `first_s` bounds the first opening (a wrong address is to be told soon), `later_s` every reconnection (a server is
    restarted, upgraded or moved meanwhile), `calls_s` the repeats of a call while the server is unavailable; 0 repeats
    none. A call never outlasts its own time limit. All in seconds.
    """

    first_s: Seconds = 10.0
    later_s: Seconds = 120.0
    delay_min_s: Seconds = 0.05
    delay_max_s: Seconds = 5.0
    calls_s: Seconds = 10.0


class Backoff:
    """Decides after each break of one stream. `clock` counts seconds, monotonic; `draw` is uniform in [0, 1)."""

    def __init__(self, retry: Retry, clock: Callable[[], float], draw: Callable[[], float] = random.random) -> None:
        self._retry = retry
        self._clock = clock
        self._draw = draw
        self._allowance_s = retry.first_s
        self._attempts = 0
        self._broken_since: float | None = None
        self._open_since: float | None = None

    def opened(self) -> None:
        """The stream is open; it counts as progress once it has stayed so for the longest delay."""
        self._allowance_s = self._retry.later_s
        self._open_since = self._clock()

    def progressed(self) -> None:
        """The stream did what it is for: breaks before do not count any more."""
        self._attempts = 0
        self._broken_since = None

    def delay_s(self, error: MemstreamError) -> float | None:
        """Seconds to wait before opening again, None to give up with this error.

        A stream that was open and is then ended UNAUTHENTICATED is opened again, with the token of now; to be refused
        so at the opening is final.
        """
        outdated = self._open_since is not None and isinstance(error, Unauthenticated)
        delay_s = self.pause_s(error)
        broken_s = self._clock() - cast("float", self._broken_since)
        return delay_s if (is_cut(error) or outdated) and broken_s <= self._allowance_s else None

    def pause_s(self, error: MemstreamError) -> float:
        """Seconds to wait after a break before the next attempt, if there is to be one."""
        now = self._clock()
        if self._open_since is not None and now - self._open_since > self._retry.delay_max_s:
            self.progressed()
        self._open_since = None
        if self._broken_since is None:
            self._broken_since = now
        ceiling = min(self._retry.delay_max_s, self._retry.delay_min_s * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        return max(error.retry_after or 0.0, ceiling * self._draw())


async def persist(attempt: Callable[[], Awaitable[None]], backoff: Backoff) -> None:
    """Runs `attempt`, one connection of a stream, again after each break until it returns.

    Raises the MemstreamError of the last break when it is final or the backoff gives up.
    """
    while True:
        try:
            return await attempt()
        except asyncio.CancelledError as raised:
            if task_is_cancelled():
                raise
            error = translate(raised)
        except (MemstreamError, grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as raised:
            error = translate(raised)
        except Exception as defect:
            raise translate(defect) from defect  # not a break: trying again would hide it
        delay_s = backoff.delay_s(error)
        if delay_s is None:
            raise error
        await asyncio.sleep(delay_s)
