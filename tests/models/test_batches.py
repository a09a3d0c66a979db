"""Requests that callers share: who is in which, what one's refusal, failure or leaving means to the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream_server.adapters.models.openai_embedder import Batches, OpenAIEmbedder, OpenAIEmbedding
from memstream_server.adapters.models.resilience import RefusedError, Resilience, ResilientCalls
from memstream_server.ports.models import ModelRefused, ModelUnavailable
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.seeds import rounds
from tests.support.waiting import until

BAD, DEAD = "bad", "dead"


class Endpoint:
    """Answers with the texts in capitals, once let go. Refuses a request with a BAD one, fails with a DEAD one."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.given_up = 0
        self.under_way_max = 0
        self.under_way = 0
        self.refusing: Callable[[], object] = lambda: None
        self._open = asyncio.Event()

    def hold(self) -> None:
        self._open.clear()

    def go(self) -> None:
        self._open.set()

    async def ask(self, texts: list[str]) -> Sequence[str]:
        self.asked.append(texts)
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            await self._open.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.under_way -= 1
        if any(text.startswith(DEAD) for text in texts):
            raise ModelUnavailable("down")
        if any(text.startswith(BAD) for text in texts):
            self.refusing()
            raise RefusedError("one of them")
        return [text.upper() for text in texts]


def of(endpoint: Endpoint, texts_max: int = 4, characters_max: int = 1_000, concurrency: int = 1) -> Batches[str]:
    return Batches(endpoint.ask, texts_max=texts_max, characters_max=characters_max, concurrency=concurrency)


async def begun(*calls: Awaitable[list[str | None]]) -> list[asyncio.Future[list[str | None]]]:
    """Each of them waits, in this order."""
    tasks: list[asyncio.Future[list[str | None]]] = []
    for call in calls:
        tasks.append(asyncio.ensure_future(call))
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def _idle(endpoint: Endpoint) -> bool:
    return endpoint.under_way == 0


async def _asked(endpoint: Endpoint, requests: int) -> bool:
    return len(endpoint.asked) >= requests


async def test_concurrent_calls_share_a_request() -> None:
    endpoint = Endpoint()
    batches = of(endpoint)
    tasks = await begun(*(batches.fetch_answers([name]) for name in "abcdefg"))
    assert endpoint.asked == [["a"]]
    endpoint.go()
    assert await asyncio.gather(*tasks) == [[name.upper()] for name in "abcdefg"]
    assert endpoint.asked == [["a"], ["b", "c", "d", "e"], ["f", "g"]]
    assert await batches.fetch_answers([]) == []
    assert len(endpoint.asked) == 3


async def test_one_text_beside_many_is_in_the_next_request() -> None:
    endpoint = Endpoint()
    batches = of(endpoint)
    many, other = [f"m{number}" for number in range(100)], [f"o{number}" for number in range(100)]
    tasks = await begun(batches.fetch_answers(many), batches.fetch_answers(other), batches.fetch_answers(["lone"]))
    endpoint.go()
    assert await tasks[2] == ["LONE"]
    assert "lone" in endpoint.asked[1]
    assert await tasks[0] == [text.upper() for text in many]
    assert await tasks[1] == [text.upper() for text in other]
    assert {len(texts) for texts in endpoint.asked} == {4, 1}


async def test_long_texts_fill_a_request_and_are_not_preferred() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=10, characters_max=25)
    tasks = await begun(
        *(batches.fetch_answers([letter * 10] * 5) for letter in "abc"), batches.fetch_answers(["z" * 99])
    )
    endpoint.go()
    assert await tasks[3] == ["Z" * 99]
    assert ["z" * 99] in endpoint.asked[:5]  # alone, for it is too long, and before what the others still want
    await asyncio.gather(*tasks)
    assert max(sum(map(len, texts)) for texts in endpoint.asked if len(texts) > 1) <= 25


async def test_a_refusal_is_theirs_who_asked_for_it() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=8)
    tasks = await begun(
        *(batches.fetch_answers([name]) for name in "abc"),
        batches.fetch_answers([BAD, "x"]),
        batches.fetch_answers([f"{BAD}2"]),
    )
    endpoint.go()
    assert await asyncio.gather(*tasks) == [["A"], ["B"], ["C"], [None, "X"], [None]]


async def test_a_failure_is_theirs_whose_text_was_asked() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=2)
    tasks = await begun(*(batches.fetch_answers(names) for names in (["a"], [DEAD, "b2", "b3"], ["c"], ["d"])))
    endpoint.go()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [done[0], done[3]] == [["A"], ["D"]]
    assert [str(one) for one in done[1:3]] == ["down", "down"]
    assert endpoint.asked == [["a"], [DEAD, "c"], ["d"]]  # not b2 and b3, which nobody waits for


async def test_failed_request_cancels_no_other_of_its_call() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=1, concurrency=3)
    (task,) = await begun(batches.fetch_answers([DEAD, "b", "c", "d"]))
    endpoint.go()
    with pytest.raises(ModelUnavailable, match="down"):
        await task
    await until(lambda: _idle(endpoint))
    assert (endpoint.asked, endpoint.given_up) == ([[DEAD], ["b"], ["c"]], 0)


async def test_who_leaves_takes_along_what_was_not_asked() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=2)
    first, second, third = await begun(*(batches.fetch_answers([name, f"{name}2"]) for name in "abc"))
    second.cancel()
    endpoint.go()
    assert await first == ["A", "A2"]
    assert await third == ["C", "C2"]
    assert endpoint.asked == [["a", "a2"], ["c", "c2"]]


async def test_cancelled_call_withdraws_its_texts() -> None:
    endpoint = Endpoint()
    batches = of(endpoint)
    first, second = await begun(batches.fetch_answers([BAD, "a", "a2"]), batches.fetch_answers(["b"]))
    endpoint.refusing = first.cancel
    endpoint.go()
    assert await second == ["B"]
    assert endpoint.asked == [[BAD, "a", "a2"], ["b"]]


async def test_a_request_is_given_up_once_nobody_waits_for_it() -> None:
    endpoint = Endpoint()
    batches = of(endpoint, texts_max=2)
    first, second, third = await begun(*(batches.fetch_answers([name]) for name in "abc"))
    first.cancel()
    await until(lambda: _asked(endpoint, 2))
    assert endpoint.asked == [["a"], ["b", "c"]]
    second.cancel()
    await asyncio.sleep(0.01)
    assert endpoint.given_up == 1  # b's is c's as well
    endpoint.go()
    assert await third == ["C"]


async def test_who_waits_when_it_is_closed_is_told() -> None:
    endpoint = Endpoint()
    batches = of(endpoint)
    tasks = await begun(*(batches.fetch_answers([name]) for name in "abc"))
    await batches.close()
    for task in tasks:
        with pytest.raises(ModelUnavailable, match="going away"):
            await task
    assert (endpoint.asked, endpoint.given_up) == ([["a"]], 1)


async def test_who_waits_for_a_half_when_it_is_closed_is_told() -> None:
    endpoint = Endpoint()
    batches = of(endpoint)
    tasks = await begun(*(batches.fetch_answers([name]) for name in ("first", "a", BAD, "c", "d")))
    endpoint.refusing = endpoint.hold
    endpoint.go()
    assert await tasks[0] == ["FIRST"]
    await until(lambda: _asked(endpoint, 3))
    assert endpoint.asked == [["first"], ["a", BAD, "c", "d"], ["a", BAD]]
    await batches.close()
    done = await asyncio.wait_for(asyncio.gather(*tasks[1:], return_exceptions=True), 60)
    assert [str(one) for one in done] == ["the server is going away"] * 4
    assert len(endpoint.asked) == 3


async def test_inner_cancellation_fails_callers() -> None:
    async def ask(texts: list[str]) -> list[str]:
        raise asyncio.CancelledError

    batches: Batches[str] = Batches(ask, texts_max=4, characters_max=100, concurrency=1)
    with pytest.raises(ModelUnavailable, match="given up"):
        await asyncio.wait_for(batches.fetch_answers(["a", "b"]), 60)


async def test_wrong_answer_count_fails_callers() -> None:
    async def ask(texts: list[str]) -> list[str]:
        return texts[1:]

    batches: Batches[str] = Batches(ask, texts_max=4, characters_max=100, concurrency=1)
    with pytest.raises(ValueError, match="shorter"):
        await batches.fetch_answers(["a", "b"])


@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(["a", "bb", "ccc", BAD]), max_size=6), st.booleans(), st.integers(0, 4)),
        max_size=12,
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 6),
)
@settings(max_examples=rounds(150, 60), deadline=None)
def test_everyone_gets_what_is_theirs(
    callers: list[tuple[list[str], bool, int]], texts_max: int, concurrency: int, characters_max: int
) -> None:
    """For any interleaving of calls and cancellations."""

    async def scenario() -> None:
        endpoint = Endpoint()
        endpoint.go()
        batches = of(endpoint, texts_max, characters_max, concurrency)
        tasks = []
        for texts, leaves, turns in callers:
            tasks.append(asyncio.ensure_future(batches.fetch_answers(texts)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if leaves:
                tasks[-1].cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for (texts, leaves, _), answers in zip(callers, done, strict=True):
            if not (leaves and isinstance(answers, asyncio.CancelledError)):
                assert answers == [None if text == BAD else text.upper() for text in texts]
        assert endpoint.under_way_max <= concurrency
        assert all(len(texts) <= texts_max for texts in endpoint.asked)
        assert all(len(texts) == 1 or sum(map(len, texts)) <= characters_max for texts in endpoint.asked)
        await asyncio.sleep(0)
        assert await batches.fetch_answers(["still"]) == ["STILL"]

    asyncio.run(scenario())


# ---- over HTTP
@asynccontextmanager
async def embedding(**given: int) -> AsyncIterator[tuple[FakeOpenAI, OpenAIEmbedder]]:
    async with FakeOpenAI(dimension=8) as fake:
        quick = Resilience(attempts=1, deadline_s=60, failures_to_open=100)
        embedder = OpenAIEmbedder(OpenAIEmbedding(model="m", base_url=fake.base_url, resilience=quick, **given))
        await embedder.model()
        fake.seen.clear()
        try:
            yield fake, embedder
        finally:
            await embedder.close()


def direction(fake: FakeOpenAI, text: str) -> np.ndarray:
    return fake.vector(text) / np.linalg.norm(fake.vector(text))


async def test_many_callers_take_few_requests() -> None:
    async with embedding(concurrency=2) as (fake, embedder):
        fake.hold()
        texts = [f"text {number}" for number in range(100)]
        finding = asyncio.gather(*(embedder.embed([text]) for text in texts))
        await until(lambda: _in_flight(fake, 2))
        fake.release()
        found = await finding
        for text, vectors in zip(texts, found, strict=True):
            np.testing.assert_allclose(vectors, direction(fake, text)[None], rtol=1e-5)
        assert sorted(map(len, fake.embedded)) == [1, 1, 34, 64]
        assert fake.in_flight_max == 2


async def test_a_callers_refused_text_strips_nobody_else() -> None:
    async with embedding(concurrency=1) as (fake, embedder):
        fake.refuses = lambda text: text.startswith(BAD)
        fake.latency_s = 0.01
        calls: list[Callable[[], Awaitable[np.ndarray]]] = [
            lambda: embedder.embed(["first"]),
            lambda: embedder.embed(["good"]),
            lambda: embedder.embed([BAD]),
            lambda: embedder.embed(["fine", f"{BAD} too", "sound"]),
        ]
        done = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        assert isinstance(done[1], np.ndarray)
        np.testing.assert_allclose(done[1], direction(fake, "good")[None], rtol=1e-5)
        assert [one.inputs for one in done if isinstance(one, ModelRefused)] == [(0,), (1,)]


async def test_dead_endpoint_fails_each_caller() -> None:
    async with embedding(concurrency=1) as (fake, embedder):
        fake.hold()
        fake.fail(Fault(status=503))
        first = asyncio.create_task(embedder.embed(["a"]))
        await until(lambda: _in_flight(fake, 1))
        second, third = asyncio.create_task(embedder.embed(["b"])), asyncio.create_task(embedder.embed(["c"]))
        await asyncio.sleep(0)  # both wait for the next request
        await asyncio.sleep(0)
        fake.release()
        with pytest.raises(ModelUnavailable):
            await first
        np.testing.assert_allclose(await second, direction(fake, "b")[None], rtol=1e-5)
        np.testing.assert_allclose(await third, direction(fake, "c")[None], rtol=1e-5)
        assert fake.embedded == [["a"], ["b", "c"]]


async def _in_flight(fake: FakeOpenAI, count: int) -> bool:
    return fake.in_flight == count


async def test_circuit_closes_when_calls_need_many_requests() -> None:
    resilience, now_s = Resilience(attempts=1, deadline_s=60, failures_to_open=2, open_s=10), 0.0
    calls = ResilientCalls(resilience, lambda: now_s)
    async with FakeOpenAI(dimension=8) as fake:
        model = OpenAIEmbedding(model="m", base_url=fake.base_url, resilience=resilience, batch_texts=2)
        embedder = OpenAIEmbedder(model, calls=calls)
        texts = [f"text {number}" for number in range(16)]
        await embedder.embed(texts)
        fake.fail(*[Fault(status=503)] * 100)
        while not calls.breaker.open:
            with pytest.raises(ModelUnavailable):
                await embedder.embed(texts)
        fake.heal()
        fake.latency_s = 0.02  # the probe is in flight while the call's other requests are rejected
        for _ in range(3):
            now_s += 10
            with contextlib.suppress(ModelUnavailable):
                await embedder.embed(texts)
            await until(lambda: _in_flight(fake, 0))
        assert not calls.breaker.open
        assert len(await embedder.embed(texts)) == len(texts)
        await embedder.close()
