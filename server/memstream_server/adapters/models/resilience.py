"""Calls to a model endpoint that fails now and then: attempts, backoff, one deadline, and a circuit breaker.

The retry loop is tenacity's (Apache-2.0, maintained, async), fed with our own wait so that Retry-After is
honoured. The breaker is here: the asyncio breakers on PyPI are unmaintained, and it is one counter and one time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from memstream_server.core.printable import number_text
from memstream_server.ports.models import ModelUnavailable

Answer = TypeVar("Answer")


class TransientError(Exception):
    """One attempt failed in a way that another may not. `retry_after_s`: what the endpoint asked for, if it did.

    `summary` is what any caller of the server may read of it; the message where there is none.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, *, summary: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.summary = summary or message


class AnsweredError(TransientError):
    """The endpoint answered, if not as it was asked: perhaps because of the texts, which say nothing of others'."""


@dataclass(frozen=True, slots=True)
class Resilience:
    """How long and how often a call is tried."""

    attempts: int = 4
    """Tries of one call, the first included; at least 1."""
    deadline_s: float = 30.0
    """For one call with all its tries and waits."""
    backoff_s: float = 0.25
    """Longest wait before the second try; doubles with every try, and a random share of it is waited."""
    backoff_max_s: float = 8.0
    """A longer Retry-After is not waited for: the call fails at once."""
    failures_to_open: int = 5
    """Failed calls in a row after which the endpoint is left alone."""
    open_s: float = 10.0
    """How long it is left alone; then one call tries it."""


class CircuitBreaker:
    """Refuses calls while an endpoint is down. One probe at a time once `open_s` has passed."""

    def __init__(self, failures_to_open: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._closed_at = 0.0
        """When calls are let through again, while open."""
        self._last = self._last_summary = ""

    @property
    def open(self) -> bool:
        """Whether the last calls failed so often that the next one is refused or is a probe."""
        return self._failures >= self._failures_to_open

    def admit(self) -> None:
        """Raises ModelUnavailable while the endpoint is left alone."""
        if not self.open:
            return
        wait_s = self._closed_at - self._clock()
        if wait_s > 0:
            raise ModelUnavailable(
                f"circuit open for {wait_s:.1f} s ({self._failures} failures): {self._last}",
                summary=self._last_summary,
            )
        self._closed_at = self._clock() + self._open_s  # this caller is the probe; the next ones wait for it

    def succeeded(self) -> None:
        """The endpoint answered (a refusal of the input is an answer)."""
        self._failures = 0

    def failed(self, error: ModelUnavailable) -> None:
        """A call failed after all its tries."""
        self._failures += 1
        self._last, self._last_summary = str(error), error.summary
        if self.open:
            self._closed_at = self._clock() + self._open_s


class ResilientCalls:
    """Runs calls against one endpoint under a `Resilience`, with a breaker they share."""

    def __init__(
        self,
        settings: Resilience,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._sleep = sleep
        self.breaker = CircuitBreaker(settings.failures_to_open, settings.open_s, clock)

    async def run(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """The attempt's answer. `TransientError` is tried again; anything else it raises goes to the caller as it is
        (ModelUnavailable counts as a failure, the rest as an answer).

        Raises ModelUnavailable when tries or time run out, or the breaker is open.
        """
        self.breaker.admit()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                answer = await self._tried(attempt)
        except (TransientError, TimeoutError) as error:
            failure = self._failure(error)
            if isinstance(error, AnsweredError):
                self.breaker.succeeded()
            else:
                self.breaker.failed(failure)
            raise failure from error
        except ModelUnavailable as error:
            self.breaker.failed(error)
            raise
        except asyncio.CancelledError:
            raise  # the caller gave up, which says nothing of the endpoint
        except Exception:
            self.breaker.succeeded()  # it answered, if only to refuse
            raise
        self.breaker.succeeded()
        return answer

    def _failure(self, error: TransientError | TimeoutError) -> ModelUnavailable:
        if isinstance(error, TransientError):
            return ModelUnavailable(str(error), summary=error.summary)
        return ModelUnavailable(f"no answer within {number_text(self._settings.deadline_s)} s")

    async def _tried(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            stop=lambda state: stop_after_attempt(self._settings.attempts)(state) or self._too_long(state),
            wait=self._wait_s,
            sleep=self._sleep,
            reraise=True,
        )

        async def once() -> Answer:
            return await attempt()

        return await retrying(once)  # a lambda that gives a coroutine would not be awaited

    def _asked_s(self, state: RetryCallState) -> float | None:
        error = state.outcome.exception() if state.outcome is not None else None
        return error.retry_after_s if isinstance(error, TransientError) else None

    def _too_long(self, state: RetryCallState) -> bool:
        asked_s = self._asked_s(state)
        return asked_s is not None and asked_s > self._settings.backoff_max_s

    def _wait_s(self, state: RetryCallState) -> float:
        asked_s = self._asked_s(state)
        longest_s = min(self._settings.backoff_s * 2 ** (state.attempt_number - 1), self._settings.backoff_max_s)
        jittered_s: float = longest_s * random.random()
        # Full jitter spreads clients (AWS Architecture Blog, 2015); never earlier than the endpoint asked for.
        return jittered_s if asked_s is None else asked_s + jittered_s
