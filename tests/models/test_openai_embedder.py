"""The OpenAI embedder against a scripted server: batches, faults, refusals, malformed replies."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding, parse_vectors
from memstream_server.adapters.models.openai_errors import retry_after_s
from memstream_server.adapters.models.resilience import Resilience, TransientError
from memstream_server.ports.models import EmbeddingModel, ModelRefused, ModelUnavailable, Spent
from tests.support.fake_openai import JSON, FakeOpenAI, Fault
from tests.support.waiting import until

QUICK = Resilience(attempts=3, deadline_s=60, backoff_s=0.001, backoff_max_s=1, failures_to_open=100)


@asynccontextmanager
async def embedding(**settings: Any) -> AsyncIterator[tuple[FakeOpenAI, OpenAIEmbedder]]:
    async with FakeOpenAI(dimension=8) as fake:
        chosen = OpenAIEmbedding(model="m", base_url=fake.base_url, api_key="secret", resilience=QUICK)
        embedder = OpenAIEmbedder(replace(chosen, **settings))
        try:
            yield fake, embedder
        finally:
            await embedder.close()


async def test_vectors_come_in_order_and_of_unit_length() -> None:
    async with embedding(batch_texts=2) as (fake, embedder):
        texts = ["one", "two", "three", "four", "five"]
        vectors = await embedder.embed(texts)
        expected = np.stack([fake.vector(text) for text in texts])
        np.testing.assert_allclose(vectors, expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-5)
        assert vectors.dtype == np.float32
        assert sorted(map(len, fake.embedded)) == [1, 1, 2, 2]  # the dimension's question among them
        assert {seen.key for seen in fake.seen} == {"secret"}
        assert (await embedder.embed([])).shape == (0, 8)


async def test_the_dimension_is_asked_once() -> None:
    reading = EmbeddingModel(name="ignored", dimension=0, similarity_min=0.6)
    async with embedding(reading=reading) as (fake, embedder):
        assert await embedder.model() == EmbeddingModel("m", 8, similarity_min=0.6)
        await embedder.model()
        assert len(fake.seen) == 1


async def test_requests_failures_and_tokens_are_counted() -> None:
    async with FakeOpenAI(dimension=8) as fake:
        usage = Spent("embedder", "m")
        chosen = OpenAIEmbedding(model="m", base_url=fake.base_url, api_key="secret", resilience=QUICK)
        embedder = OpenAIEmbedder(chosen, usage=usage)
        await embedder.model()
        assert (usage.requests, usage.failed, usage.prompt_tokens) == (1, 0, 1)
        fake.fail(Fault(status=500), Fault(body=b"no json"), Fault(body=b'{"data": [1]}'))
        with pytest.raises(ModelUnavailable):
            await embedder.embed(["x"])
        await embedder.embed(["x"])
        assert (usage.requests, usage.failed) == (len(fake.seen), 3)
        assert usage.prompt_tokens == usage.requests - usage.failed
        await embedder.close()


async def test_shorter_vectors_are_asked_for() -> None:
    async with embedding(dimensions=8) as (fake, embedder):
        await embedder.embed(["x"])
        assert [seen.body["dimensions"] for seen in fake.seen] == [8, 8]


async def test_long_texts_are_cut_and_batches_bounded_in_characters() -> None:
    async with embedding(input_characters=10, batch_characters=25) as (fake, embedder):
        await embedder.embed(["x" * 50] * 5)
        batches = fake.embedded[1:]
        assert sorted(map(len, batches)) == [1, 2, 2]
        assert {text for batch in batches for text in batch} == {"x" * 10}


async def test_requests_in_flight_are_bounded() -> None:
    async with embedding(batch_texts=1, concurrency=2) as (fake, embedder):
        await embedder.model()
        fake.hold()
        embedding_all = asyncio.create_task(embedder.embed([str(number) for number in range(8)]))
        await until(lambda: _in_flight(fake, 2))
        fake.release()
        await embedding_all
        assert fake.in_flight_max == 2


async def _in_flight(fake: FakeOpenAI, count: int) -> bool:
    return fake.in_flight == count


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=503), Fault(status=408), Fault(hang_up=True)])
async def test_passing_faults_are_tried_again(fault: Fault) -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(fault, fault)
        assert (await embedder.embed(["x"])).shape == (1, 8)
        assert len(fake.seen) == 4


async def test_throttling_is_waited_out() -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(Fault(status=429, headers={"Retry-After": "0.01"}))
        assert (await embedder.embed(["x"])).shape == (1, 8)


async def test_a_long_retry_after_is_not_waited_for() -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(Fault(status=429, headers={"Retry-After": "120"}))
        with pytest.raises(ModelUnavailable, match="429"):
            await embedder.embed(["x"])
        assert len(fake.seen) == 2


async def test_a_slow_endpoint_is_unavailable() -> None:
    async with embedding(timeout_s=0.05) as (fake, embedder):
        await embedder.model()
        fake.fail(*[Fault(delay_s=1)] * 3)
        with pytest.raises(ModelUnavailable):
            await embedder.embed(["x"])


async def test_a_wrong_key_or_model_is_not_tried_again() -> None:
    async with embedding() as (fake, embedder):
        fake.fail(Fault(status=401))
        with pytest.raises(ModelUnavailable, match="401"):
            await embedder.model()
        assert len(fake.seen) == 1
        assert (await embedder.model()).dimension == 8


def shorten(reply: JSON) -> None:
    reply["data"].pop()


def repeat_index(reply: JSON) -> None:
    reply["data"][1]["index"] = 0


def shorter_vector(reply: JSON) -> None:
    reply["data"][0]["embedding"] = [1.0] * 7


def no_data(reply: JSON) -> None:
    reply["data"] = None


def not_base64(reply: JSON) -> None:
    reply["data"][0]["embedding"] = "***"


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault(change=change) for change in (shorten, repeat_index, shorter_vector, no_data, not_base64)),
        Fault(body=b"<html>"),
        Fault(body=b""),
        Fault(body=b"[]"),
        Fault(body=b"[" * 200_000),
        Fault(endless_s=0),
    ],
)
async def test_malformed_vectors_are_retried_then_unavailable(fault: Fault) -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(fault)
        assert (await embedder.embed(["x", "y"])).shape == (2, 8)
        fake.fail(fault, fault, fault)
        with pytest.raises(ModelUnavailable, match="malformed"):
            await embedder.embed(["x", "y"])


async def test_unordered_replies_are_put_in_order() -> None:
    async with embedding() as (fake, embedder):
        straight = await embedder.embed(["x", "y"])
        fake.fail(Fault(change=lambda reply: reply["data"].reverse()))
        assert np.array_equal(await embedder.embed(["x", "y"]), straight)


async def test_numbers_as_a_list_are_read_too() -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(Fault(change=lambda reply: reply["data"][0].update(embedding=[2.0] + [0.0] * 7)))
        assert (await embedder.embed(["x"])).tolist() == [[1.0] + [0.0] * 7]


async def test_refused_inputs_are_isolated() -> None:
    async with embedding(batch_texts=8) as (fake, embedder):
        fake.refuses = lambda text: text.startswith("bad")
        texts = [f"bad {number}" if number in (3, 11) else f"good {number}" for number in range(16)]
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed(texts)
        assert raised.value.inputs == (3, 11)


async def test_endpoint_refusing_all_refuses_no_input() -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.refuses = lambda text: True
        with pytest.raises(ModelUnavailable, match="refuses any input"):
            await embedder.embed(["x", "y"])


async def test_one_refused_input_alone_is_refused() -> None:
    async with embedding() as (_, embedder):
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed([""])
        assert raised.value.inputs == (0,)


async def test_a_vector_without_direction_is_a_refusal() -> None:
    async with embedding() as (fake, embedder):
        sound = fake.vector
        fake.vector = lambda text: np.zeros(8, np.float32) if text == "void" else sound(text)
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed(["x", "void"])
        assert raised.value.inputs == (1,)


async def test_the_breaker_spares_a_dead_endpoint() -> None:
    dead = replace(QUICK, attempts=1, failures_to_open=2, open_s=60)
    async with embedding(resilience=dead) as (fake, embedder):
        fake.fail(*[Fault(status=503)] * 2)
        for _ in range(3):
            with pytest.raises(ModelUnavailable):
                await embedder.model()
        assert len(fake.seen) == 2


async def test_a_reply_that_drips_for_ever_ends_with_the_deadline() -> None:
    async with embedding(resilience=replace(QUICK, deadline_s=0.5)) as (fake, embedder):
        await embedder.model()
        fake.fail(Fault(endless_s=0.05))
        with pytest.raises(ModelUnavailable, match="no answer within"):
            await embedder.embed(["x"])


def test_reply_of_another_dimension() -> None:
    packed = base64.b64encode(np.ones(4, "<f4").tobytes()).decode()
    reply = {"data": [{"index": 0, "embedding": packed}]}
    assert parse_vectors(reply, 1, None).shape == (1, 4)
    with pytest.raises(TransientError, match="vectors of 4 numbers came, not 8"):
        parse_vectors(reply, 1, 8)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "Mon, 01 Jan 2001 00:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_the_key_is_not_printed() -> None:
    assert "secret" not in repr(OpenAIEmbedding(model="m", base_url="u", api_key="secret"))
