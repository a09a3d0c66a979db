"""Decides when to retry a call or reopen a broken stream, and when to give up."""

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
from memstream.errors import MemstreamError, QuotaExceeded, Unauthenticated
from memstream.status import is_cut, task_is_cancelled, translate_error


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How streams reconnect and calls are retried: exponential backoff with full jitter, at least the server's delay.

    Limits without progress, in seconds: `first_s` for the first connection (short, so that a wrong address fails
    soon), `later_s` for reconnecting (long enough to restart, upgrade or move a server), `calls_s` for retrying a call
    while the server is unavailable (0: no retry). A call never outlasts its own timeout.
    """

    first_s: Seconds = 10.0
    later_s: Seconds = 120.0
    delay_min_s: Seconds = 0.05
    delay_max_s: Seconds = 5.0
    calls_s: Seconds = 10.0


class Backoff:
    """Decides after each break of one stream. `clock` gives monotonic seconds; `draw` is uniform in [0, 1)."""

    def __init__(self, retry: Retry, clock: Callable[[], float], draw: Callable[[], float] = random.random) -> None:
        self._retry = retry
        self._clock = clock
        self._draw = draw
        self._allowance_s = retry.first_s
        self._attempts = 0
        self._broken_since: float | None = None
        self._open_since: float | None = None
        self._was_open = False
        self.error: MemstreamError | None = None
        """The error of the last break; None after progress."""

    def mark_opened(self) -> None:
        """The stream is open; this counts as progress once it has been open for the longest delay."""
        self._allowance_s = self._retry.later_s
        self._was_open = True
        self._open_since = self._clock()

    def mark_progress(self) -> None:
        """The stream made progress: earlier breaks no longer count."""
        self._attempts = 0
        self._broken_since = self.error = None

    def delay_s(self, error: MemstreamError) -> float | None:
        """Seconds to wait before reopening, None to give up with this error.

        A stream that ends UNAUTHENTICATED after it was open is reopened with the current token; UNAUTHENTICATED while
        opening is final. So is a quota at the first opening: it may be reached for as long as other streams are open.
        """
        if isinstance(error, QuotaExceeded) and not self._was_open:
            return None
        outdated = self._open_since is not None and isinstance(error, Unauthenticated)
        delay_s = self.pause_s(error)
        broken_s = self._clock() - cast("float", self._broken_since)
        return delay_s if (is_cut(error) or outdated) and broken_s <= self._allowance_s else None

    def pause_s(self, error: MemstreamError) -> float:
        """Seconds to wait between a break and the next attempt."""
        now = self._clock()
        if self._open_since is not None and now - self._open_since > self._retry.delay_max_s:
            self.mark_progress()
        self._open_since, self.error = None, error
        if self._broken_since is None:
            self._broken_since = now
        ceiling = min(self._retry.delay_max_s, self._retry.delay_min_s * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        return max(error.retry_after or 0.0, ceiling * self._draw())


async def repeat_until_done(
    attempt: Callable[[], Awaitable[None]], backoff: Backoff, revive: Callable[[], Awaitable[None]]
) -> None:
    """Runs `attempt`, one connection of a stream, and repeats it after each break until it returns.

    `revive` runs before every repetition; see Link.revive.

    Raises the MemstreamError of the last break when it is final or the backoff gives up.
    """
    while True:
        try:
            return await attempt()
        except asyncio.CancelledError as raised:
            if task_is_cancelled():
                raise
            error = translate_error(raised)
        except (MemstreamError, grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as raised:
            error = translate_error(raised)
        except Exception as defect:
            raise translate_error(defect) from defect  # a defect, not a break: a retry would hide it
        delay_s = backoff.delay_s(error)
        if delay_s is None:
            raise error
        await revive()
        await asyncio.sleep(delay_s)
