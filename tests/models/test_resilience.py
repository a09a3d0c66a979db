"""Retries, backoff, deadline and breaker, on a clock and a sleep of the test's own."""

from __future__ import annotations

import asyncio

import pytest

from memstream_server.adapters.models.resilience import CircuitBreaker, Resilience, ResilientCalls, TransientError
from memstream_server.ports.models import ModelUnavailable


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class Endpoint:
    """Raises the errors given, one a call, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def calls_on(time: Time, settings: Resilience) -> ResilientCalls:
    return ResilientCalls(settings, time.clock, time.sleep)


async def test_transient_failures_are_retried_with_backoff() -> None:
    time, endpoint = Time(), Endpoint(*[TransientError("busy")] * 3)
    settings = Resilience(attempts=4, backoff_s=1.0, backoff_max_s=3.0)
    assert await calls_on(time, settings).run(endpoint) == "answer"
    assert endpoint.calls == 4
    assert [0 <= slept <= longest for slept, longest in zip(time.slept, (1.0, 2.0, 3.0), strict=True)] == [True] * 3


async def test_a_retry_is_never_earlier_than_asked() -> None:
    time, endpoint = Time(), Endpoint(TransientError("busy", retry_after_s=2.5))
    await calls_on(time, Resilience(backoff_s=0.5)).run(endpoint)
    assert 2.5 <= time.slept[0] <= 3.0


async def test_a_wait_longer_than_allowed_fails_at_once() -> None:
    time, endpoint = Time(), Endpoint(TransientError("quota", retry_after_s=3600))
    with pytest.raises(ModelUnavailable, match="quota"):
        await calls_on(time, Resilience(backoff_max_s=8)).run(endpoint)
    assert (endpoint.calls, time.slept) == (1, [])


async def test_tries_run_out() -> None:
    time, endpoint = Time(), Endpoint(*[TransientError("busy")] * 9)
    with pytest.raises(ModelUnavailable, match="busy"):
        await calls_on(time, Resilience(attempts=3)).run(endpoint)
    assert endpoint.calls == 3


async def test_time_runs_out() -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    calls = ResilientCalls(Resilience(deadline_s=0.01, failures_to_open=1))
    with pytest.raises(ModelUnavailable, match=r"no answer within 0\.01 s"):
        await calls.run(hang)
    assert calls.breaker.open


async def test_a_refusal_is_an_answer_and_closes_the_breaker() -> None:
    time = Time()
    calls = calls_on(time, Resilience(attempts=1, failures_to_open=2))
    with pytest.raises(ModelUnavailable):
        await calls.run(Endpoint(TransientError("busy")))
    with pytest.raises(KeyError):
        await calls.run(Endpoint(KeyError("refused")))
    with pytest.raises(ModelUnavailable):
        await calls.run(Endpoint(TransientError("busy")))
    assert not calls.breaker.open


async def test_the_breaker_opens_probes_once_and_closes() -> None:
    time = Time()
    calls = calls_on(time, Resilience(attempts=1, failures_to_open=2, open_s=10))
    for _ in range(2):
        with pytest.raises(ModelUnavailable, match="down"):
            await calls.run(Endpoint(TransientError("down")))
    endpoint = Endpoint()
    with pytest.raises(ModelUnavailable, match="circuit open"):
        await calls.run(endpoint)
    assert endpoint.calls == 0
    time.now_s = 10.0
    with pytest.raises(ModelUnavailable, match="down"):
        await calls.run(Endpoint(TransientError("down")))  # the probe fails: open again
    with pytest.raises(ModelUnavailable, match="circuit open"):
        await calls.run(endpoint)
    time.now_s = 20.0
    assert await calls.run(endpoint) == "answer"
    assert not calls.breaker.open


def test_only_one_probe_at_a_time() -> None:
    time = Time()
    breaker = CircuitBreaker(1, 10, time.clock)
    breaker.record_failure(ModelUnavailable("down"))
    time.now_s = 10.0
    breaker.admit_call()
    with pytest.raises(ModelUnavailable):
        breaker.admit_call()


async def test_cancelled_caller_does_not_open_breaker() -> None:
    started = asyncio.Event()

    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    calls = ResilientCalls(Resilience(failures_to_open=1))
    task = asyncio.create_task(calls.run(hang))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not calls.breaker.open
