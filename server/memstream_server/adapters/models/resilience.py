"""Calls to an unreliable model endpoint: retries, backoff, a deadline, and a circuit breaker.

The retry loop is tenacity's (Apache-2.0, maintained, async), with our own wait function, which honours Retry-After.
The breaker is our own: asyncio breakers on PyPI are unmaintained, and it is one counter and one timestamp.
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
    """A failed attempt that may succeed on retry. `retry_after_s`: as the endpoint requests, if it does.

    `summary` is safe for any caller of the server; defaults to the message. `loading` as in ModelUnavailable.
    """

    def __init__(
        self, message: str, retry_after_s: float | None = None, *, summary: str = "", loading: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.summary = summary or message
        self.loading = loading


class AnsweredError(TransientError):
    """The endpoint gave a malformed answer, perhaps because of the texts: no evidence of an outage."""


@dataclass(frozen=True, slots=True)
class Resilience:
    """Limits of the attempts of a call."""

    attempts: int = 4
    """Attempts per call, including the first; at least 1."""
    deadline_s: float = 30.0
    """Per call, including all attempts and waits."""
    backoff_s: float = 0.25
    """Maximum wait before the second attempt; doubles with every attempt. The wait is a random share of it."""
    backoff_max_s: float = 8.0
    """A call with a longer Retry-After fails immediately."""
    failures_to_open: int = 5
    """Consecutive failed calls that open the circuit."""
    open_s: float = 10.0
    """How long the circuit stays open before one call probes the endpoint."""


class CircuitBreaker:
    """Rejects calls while an endpoint is down. After `open_s`, admits one probe at a time."""

    def __init__(self, failures_to_open: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._closed_at = 0.0
        """While open: when the next probe is admitted."""
        self._last = ModelUnavailable("")

    @property
    def open(self) -> bool:
        """Whether the next call is rejected or is a probe."""
        return self._failures >= self._failures_to_open

    def admit_call(self) -> None:
        """Raises ModelUnavailable while the circuit is open."""
        if not self.open:
            return
        wait_s = self._closed_at - self._clock()
        if wait_s > 0:
            raise ModelUnavailable(
                f"circuit open for {wait_s:.1f} s ({self._failures} failures): {self._last}",
                summary=self._last.summary,
                loading=self._last.loading,
            )
        self._closed_at = self._clock() + self._open_s  # this call is the probe; reject others meanwhile

    def record_success(self) -> None:
        """Record an answer, which may be a refusal of the input."""
        self._failures = 0

    def record_failure(self, error: ModelUnavailable) -> None:
        """Record a call that failed after all attempts."""
        self._failures += 1
        self._last = error
        if self.open:
            self._closed_at = self._clock() + self._open_s


class ResilientCalls:
    """Runs calls to one endpoint under a `Resilience`, with a shared breaker."""

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
        """The answer of `attempt`. Retries TransientError; propagates any other exception (ModelUnavailable counts as a
        failure, any other as an answer).

        Raises ModelUnavailable when attempts or time run out, or while the circuit is open.
        """
        self.breaker.admit_call()
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                answer = await self._try_repeatedly(attempt)
        except (TransientError, TimeoutError) as error:
            failure = self._unavailable_error(error)
            if isinstance(error, AnsweredError):
                self.breaker.record_success()
            else:
                self.breaker.record_failure(failure)
            raise failure from error
        except ModelUnavailable as error:
            self.breaker.record_failure(error)
            raise
        except asyncio.CancelledError:
            raise  # the caller cancelled: no evidence about the endpoint
        except Exception:
            self.breaker.record_success()  # a refusal is an answer
            raise
        self.breaker.record_success()
        return answer

    def _unavailable_error(self, error: TransientError | TimeoutError) -> ModelUnavailable:
        if isinstance(error, TransientError):
            return ModelUnavailable(str(error), summary=error.summary, loading=error.loading)
        return ModelUnavailable(f"no answer within {number_text(self._settings.deadline_s)} s")

    async def _try_repeatedly(self, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(TransientError),
            stop=lambda state: stop_after_attempt(self._settings.attempts)(state) or self._is_wait_too_long(state),
            wait=self._wait_s,
            sleep=self._sleep,
            reraise=True,
        )

        async def attempt_once() -> Answer:
            return await attempt()

        return await retrying(attempt_once)  # tenacity does not await the coroutine of a lambda

    def _retry_after_s(self, state: RetryCallState) -> float | None:
        error = state.outcome.exception() if state.outcome is not None else None
        return error.retry_after_s if isinstance(error, TransientError) else None

    def _is_wait_too_long(self, state: RetryCallState) -> bool:
        asked_s = self._retry_after_s(state)
        return asked_s is not None and asked_s > self._settings.backoff_max_s

    def _wait_s(self, state: RetryCallState) -> float:
        asked_s = self._retry_after_s(state)
        longest_s = min(self._settings.backoff_s * 2 ** (state.attempt_number - 1), self._settings.backoff_max_s)
        jittered_s: float = longest_s * random.random()
        # Full jitter spreads clients (AWS Architecture Blog, 2015); never earlier than Retry-After.
        return jittered_s if asked_s is None else asked_s + jittered_s
