"""Calls to an unreliable model endpoint: its errors and their consequence (retry, give up, or refuse the input),
backoff, a deadline, and a circuit breaker.

The retry loop is tenacity's (Apache-2.0, maintained, async), with our own wait function, which honours Retry-After.
The breaker is our own: asyncio breakers on PyPI are unmaintained, and it is one counter and one timestamp.

Rule 1. An error text names the URL (without query values), the status and the endpoint's error code. The body may
echo the request, which may contain another tenant's words: it is shown only for harmless requests.
Rule 2. `summary` is safe for any caller of the server: it has neither the address nor the body.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from memstream_server.core.printable import number_text
from memstream_server.ports.models import ModelUnavailable

Answer = TypeVar("Answer")
_REFUSALS = frozenset({400, 413, 422})
_PASSING = frozenset({408, 409, 425, 429})
_CODE = re.compile(r"[A-Za-z][\w.\-]{0,63}")
"""An identifier; not a sentence, which might echo the request."""


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


class RefusedError(Exception):
    """The endpoint rejects this input (400, 413, 422). `summary` as in ModelError."""

    def __init__(self, message: str, *, summary: str = "") -> None:
        super().__init__(message)
        self.summary = summary or message


class MalformedError(ValueError):
    """A reply deviates from the required form; the text says where."""


class NoCompletionError(MalformedError):
    """A reply is no chat completion: it has no answer of a model."""


class MalformedReplyError(TransientError):
    """A successful answer (200) that cannot be read as a whole."""


class ForeignReplyError(MalformedReplyError):
    """A successful reply that is not of this API: another program may be listening at the address."""

    def __init__(self, url: str, what: str, excerpt: str) -> None:
        super().__init__(f"malformed reply: {url} answered with {what}", summary=f"malformed reply: {what}")
        self.excerpt = excerpt
        self.also: ForeignReplyError | None = None
        """What came of the same request at the other address that was tried."""

    def format_text(self, *, harmless: bool) -> str:
        """The full error text; with the body if the request was `harmless`."""
        said = f"{self}: {self.excerpt}" if harmless and self.excerpt else str(self)
        return said if self.also is None else f"{said}; {self.also.format_text(harmless=harmless)}"


class StatusError(Exception):
    """The endpoint answered with an error status."""

    def __init__(
        self, status: int, url: str, *, code: str = "", excerpt: str = "", retry_after_s: float | None = None
    ) -> None:
        """`excerpt` is the beginning of the body, without credentials."""
        super().__init__(f"{url} answered HTTP {status}")
        self.status = status
        self.url = url
        self.code = code
        self.excerpt = excerpt
        self.retry_after_s = retry_after_s
        self.also: StatusError | ForeignReplyError | None = None
        """What came of the same request at the other address that was tried."""

    @property
    def summary(self) -> str:
        """Status and code."""
        return f"HTTP {self.status} ({self.code})" if self.code else f"HTTP {self.status}"

    def format_text(self, *, harmless: bool) -> str:
        """The full error text; with the body if the request was `harmless`."""
        said = f"{self.url} answered {self.summary}"
        if harmless and self.excerpt:
            said = f"{said}: {self.excerpt}"
        return said if self.also is None else f"{said}; {self.also.format_text(harmless=harmless)}"

    def translate_error(self, *, harmless: bool = False) -> Exception:
        """The error as RefusedError, TransientError, or ModelUnavailable (wrong key, model or address)."""
        text = self.format_text(harmless=harmless)
        if self.status in _REFUSALS:
            return RefusedError(text, summary=self.summary)
        if self.status in _PASSING or self.status >= 500:
            return TransientError(text, self.retry_after_s, summary=self.summary, loading=self.status == 503)
        return ModelUnavailable(text, summary=self.summary)


def error_code(body: bytes) -> str:
    """The code, type or status of an error body of any server; empty if there is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if isinstance(document, list) and document:  # Google's
        document = document[0]
    if not isinstance(document, dict):
        return ""
    error = document.get("error", document)
    named = [error.get(name) for name in ("code", "type", "status")] if isinstance(error, dict) else []
    return next((name for name in named if isinstance(name, str) and _CODE.fullmatch(name)), "")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait by `retry-after-ms`, or by `Retry-After` in seconds or as an HTTP date; None without a header."""
    try:
        if "retry-after-ms" in headers:
            return max(0.0, float(headers["retry-after-ms"]) / 1000)
        if "retry-after" not in headers:
            return None
        asked = headers["retry-after"]
        if asked.replace(".", "", 1).isdigit():
            return float(asked)
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())  # noqa: TID251  (that is for the core)
    except (ValueError, TypeError):  # neither a number nor a date with a time zone
        return None


def parsed_object(body: bytes) -> Any:
    """Parse JSON. Raises MalformedError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"not JSON: {type(error).__name__}") from error
