"""Rate limits of a model endpoint in requests and tokens per minute: token buckets, first come, first served.

A bucket holds ten seconds' worth, so no minute exceeds 7/6 of the limit. A bucket may go into debt; later requests
then wait for it. A request whose wait would be too long fails immediately. In addition to the server's buckets, every
namespace has its own, so that none can use up the server's.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from memstream_server.ports.models import BudgetExhausted

BURST_S = 10.0
"""Bucket capacity in seconds of the rate."""
NAMESPACES_MAX = 10_000
"""Namespaces with buckets; the least recently used one is evicted, and starts with full buckets again."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits per minute. 0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class _Bucket:
    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60
        self._most = max(1.0, self._rate * BURST_S)
        self._level = self._most
        self._seen_s = 0.0

    def take_amount(self, amount: float, now_s: float) -> float:
        """Take `amount`; return the seconds to wait for it. A negative amount is a refund."""
        if not self._rate:
            return 0.0
        self._level = min(self._most, self._level + (now_s - self._seen_s) * self._rate) - amount
        self._seen_s = now_s
        return max(0.0, -self._level / self._rate)


class _Buckets:
    """The buckets of the server, or of one namespace."""

    def __init__(self, rates: Rates) -> None:
        self._requests = _Bucket(rates.requests_per_minute)
        self._tokens = _Bucket(rates.tokens_per_minute)

    def take_request(self, requests: int, tokens: int, now_s: float) -> float:
        return max(self._requests.take_amount(requests, now_s), self._tokens.take_amount(tokens, now_s))


class ModelBudget:
    """The budget of one endpoint: in total, and for each namespace."""

    def __init__(
        self,
        server: Rates = Rates(),
        namespace: Rates = Rates(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server = _Buckets(server)
        self._rates = namespace
        self._namespaces: OrderedDict[str, _Buckets] = OrderedDict()
        self._clock = clock
        self._sleep = sleep

    async def admit_request(self, tokens: int, wait_max_s: float, namespace: str = "") -> Allowance:
        """Wait until one request of `tokens` is allowed. Raises BudgetExhausted if that takes over `wait_max_s`."""
        allowance = Allowance(self, tokens, namespace)
        own_s, all_s = (
            self._buckets_of(namespace).take_request(1, tokens, self._clock()),
            self._server.take_request(1, tokens, self._clock()),
        )
        wait_s = max(own_s, all_s)
        if wait_s > wait_max_s:
            allowance.close()
            whose = f"namespace {namespace!r}" if own_s > all_s else "this server"
            raise BudgetExhausted(
                f"the budget of {whose}, in requests and tokens, is used up for {wait_s:.0f} s more",
                summary="the budget for model calls is used up",
            )
        try:
            if wait_s > 0:
                await self._sleep(wait_s)
        except asyncio.CancelledError:
            allowance.close()
            raise
        return allowance

    def charge_namespace(self, namespace: str, requests: int, tokens: int) -> None:
        """Take (or refund, if negative) without waiting."""
        now_s = self._clock()
        self._server.take_request(requests, tokens, now_s)
        self._buckets_of(namespace).take_request(requests, tokens, now_s)

    def _buckets_of(self, namespace: str) -> _Buckets:
        buckets = self._namespaces.get(namespace)
        if buckets is None:
            buckets = self._namespaces[namespace] = _Buckets(self._rates)
            if len(self._namespaces) > NAMESPACES_MAX:
                self._namespaces.popitem(last=False)
        self._namespaces.move_to_end(namespace)
        return buckets


class Allowance:
    """The admission of one request. Retries are charged without waiting: the retry's backoff is their wait."""

    def __init__(self, budget: ModelBudget, tokens: int, namespace: str) -> None:
        self._budget = budget
        self._tokens = tokens
        self._namespace = namespace
        self._used = False

    def charge_request(self) -> None:
        """Charge a request. The first is already charged; further ones go into debt."""
        if self._used:
            self._budget.charge_namespace(self._namespace, 1, self._tokens)
        self._used = True

    def correct_charge(self, tokens: int) -> None:
        """Correct the charge to the tokens that the endpoint reports."""
        self._budget.charge_namespace(self._namespace, 0, tokens - self._tokens)

    def close(self) -> None:
        """Refund the charge if no request was sent."""
        if not self._used:
            self._budget.charge_namespace(self._namespace, -1, -self._tokens)
            self._used = True
