"""Requests and tokens a minute that one model endpoint may be asked for: two token buckets, taken in order of asking.

A bucket holds ten seconds' worth, so that no minute sees more than 7/6 of its limit. What is taken may exceed what is
there; the next ones then wait for the debt. An asker is told at once when its wait would be too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from memstream_server.ports.models import ModelUnavailable

BURST_S = 10.0
"""How many seconds' worth may be taken at once."""


class _Bucket:
    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, self._rate * BURST_S)
        self._level = self._most
        self._seen_s = 0.0

    def take(self, amount: float, now_s: float) -> float:
        """Take it and return the seconds until it would have been there; a negative amount gives back."""
        if not self._rate:
            return 0.0
        self._level = min(self._most, self._level + (now_s - self._seen_s) * self._rate) - amount
        self._seen_s = now_s
        return max(0.0, -self._level / self._rate)


class Budget:
    """Of one endpoint. A limit of 0 is none."""

    def __init__(
        self,
        requests_per_minute: int = 0,
        tokens_per_minute: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._requests = _Bucket(requests_per_minute)
        self._tokens = _Bucket(tokens_per_minute)
        self._clock = clock
        self._sleep = sleep

    async def admit(self, tokens: int, wait_max_s: float) -> Allowance:
        """Wait for room for one request of `tokens`. Raises ModelUnavailable when that takes over `wait_max_s`."""
        wait_s = self.take(1, tokens)
        if wait_s > wait_max_s:
            self.take(-1, -tokens)
            raise ModelUnavailable(f"the budget of requests and tokens is used up for {wait_s:.0f} s more")
        allowance = Allowance(self, tokens)
        try:
            if wait_s > 0:
                await self._sleep(wait_s)
        except asyncio.CancelledError:
            allowance.close()
            raise
        return allowance

    def take(self, requests: int, tokens: int) -> float:
        """Take (or give back, if negative) without waiting; returns the seconds until there is room again."""
        now_s = self._clock()
        return max(self._requests.take(requests, now_s), self._tokens.take(tokens, now_s))


class Allowance:
    """Room for one request. Repeats of it are taken without waiting: their wait is the retry's."""

    def __init__(self, budget: Budget, tokens: int) -> None:
        self._budget = budget
        self._tokens = tokens
        self._used = False

    def sending(self) -> None:
        """A request goes out: the first is covered, further ones are a debt."""
        if self._used:
            self._budget.take(1, self._tokens)
        self._used = True

    def spent(self, tokens: int) -> None:
        """The endpoint says how many tokens the request took."""
        self._budget.take(0, tokens - self._tokens)

    def close(self) -> None:
        """Give back what no request has used."""
        if not self._used:
            self._budget.take(-1, -self._tokens)
            self._used = True
