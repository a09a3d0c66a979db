"""The OpenAI embedder against a scripted server: batches, faults, refusals, malformed replies."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memstream_server.adapters.models.openai_embedder import OpenAIEmbedder, OpenAIEmbedding, parse_vectors
from memstream_server.adapters.models.resilience import Resilience, retry_after_s
from memstream_server.core.fitted_weights import FittedWeights
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
    fitted = FittedWeights(dense=0.2, lexical=0.3, context=0.5, reply=0.3, time=0.1, similarity_min=0.6)
    reading = EmbeddingModel(name="ignored", dimension=0, fitted=fitted)
    async with embedding(reading=reading) as (fake, embedder):
        assert await embedder.model() == EmbeddingModel("m", 8, fitted)
        await embedder.model()
        assert len(fake.seen) == 1


async def test_requests_failures_and_tokens_are_counted() -> None:
    async with FakeOpenAI(dimension=8) as fake:
        usage = Spent("embedder", "m")
        chosen = OpenAIEmbedding(model="m", base_url=fake.base_url, api_key="secret", resilience=QUICK)
        embedder = OpenAIEmbedder(chosen, usage=usage)
        await embedder.model()
        assert (usage.requests, usage.failed, usage.prompt_tokens) == (1, 0, 1)
        fake.fail(Fault(status=503), Fault(body=b"no json"), Fault(status=503))
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


def no_data(reply: JSON) -> None:
    reply["data"] = None


@pytest.mark.parametrize(
    "fault",
    [
        Fault(change=no_data),
        Fault(body=b"<html>"),
        Fault(body=b""),
        Fault(body=b"[]"),
        Fault(body=b"[" * 200_000),
        Fault(endless_s=0),
    ],
)
async def test_malformed_replies_are_retried_then_unavailable(fault: Fault) -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.fail(fault)
        assert (await embedder.embed(["x", "y"])).shape == (2, 8)
        fake.fail(*[fault] * 6)  # those of the harmless request, too
        with pytest.raises(ModelUnavailable, match="malformed"):
            await embedder.embed(["x", "y"])


def spoil_item(change: Callable[[list[JSON], int], None]) -> Callable[[JSON, JSON], None]:
    """Changes the items of replies to requests with the text "odd", at its place."""

    def spoil(body: JSON, reply: JSON) -> None:
        if "odd" in body["input"]:
            change(reply["data"], body["input"].index("odd"))

    return spoil


def put(embedding: object) -> Callable[[list[JSON], int], None]:
    return lambda items, place: items[place].update(embedding=embedding)


def pack(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()


UNUSABLE: dict[str, Callable[[list[JSON], int], None]] = {
    "null": put(None),
    "no numbers": put([]),
    "empty base64": put(""),
    "not base64": put("***"),
    "base64 of half a number": put(base64.b64encode(b"123").decode()),
    "fewer numbers": put([1.0] * 7),
    "more numbers": put(pack(*[1.0] * 9)),
    "not a number": put(pack(*[float("nan")] * 8)),
    "a null among the numbers": put([None] + [1.0] * 7),
    "infinite": put([float("inf")] * 8),
    "too large": put([10**400] * 8),
    "zeros": put([0.0] * 8),
    "a word": put("seven"),
    "an object": put({"values": [1.0] * 8}),
    "words": put(["x"] * 8),
    "rows of two lengths": put([[1.0], [1.0, 2.0]]),
    "no embedding": lambda items, place: items[place].pop("embedding"),
    "no index": lambda items, place: items[place].pop("index"),
    "an index that is a word": lambda items, place: items[place].update(index="0"),
    "an index of none": lambda items, place: items[place].update(index=99),
    "an index below zero": lambda items, place: items[place].update(index=-1),
    "the index of another": lambda items, place: items[place].update(index=(place + 1) % len(items) if place else 5),
    "no item": lambda items, place: items.pop(place),
    "a null item": lambda items, place: items.__setitem__(place, None),
    "an item that is a list": lambda items, place: items.__setitem__(place, [1.0] * 8),
}


@pytest.mark.parametrize("shape", UNUSABLE)
async def test_an_unusable_element_costs_one_text_its_vector(shape: str) -> None:
    texts = [*"abcdef", "odd", "g"]
    async with embedding(batch_texts=8) as (fake, embedder):
        sound = await embedder.embed(texts)
        fake.spoil = spoil_item(UNUSABLE[shape])
        if shape == "no index":  # alone, the text's vector is certain
            np.testing.assert_array_equal(await embedder.embed(texts), sound)
            return
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed(texts)
        assert raised.value.inputs == (6,)
        np.testing.assert_array_equal(await embedder.embed(["a", "g"]), sound[[0, 7]])
        assert len(fake.seen) < 30


async def test_texts_of_unusable_elements_are_sent_without_the_rest() -> None:
    async with embedding(batch_texts=8) as (fake, embedder):
        await embedder.model()
        fake.spoil = spoil_item(put(None))
        with pytest.raises(ModelRefused):
            await embedder.embed([*"abcdefg", "odd"])
        assert fake.embedded[1:] == [[*"abcdefg", "odd"], ["odd"], ["memory"], ["odd"]]


async def test_texts_that_spoil_a_whole_reply_are_isolated() -> None:
    def spoil(body: JSON, reply: JSON) -> None:
        if "odd" in body["input"]:
            reply["data"] = None

    async with embedding(batch_texts=8, resilience=replace(QUICK, attempts=1)) as (fake, embedder):
        fake.spoil = spoil
        with pytest.raises(ModelRefused) as raised:
            await embedder.embed([*"abcde", "odd", *"fg"])
        assert raised.value.inputs == (5,)


async def test_an_element_that_is_unusable_once_has_its_vector() -> None:
    async with embedding() as (fake, embedder):
        sound = await embedder.embed(["x", "y"])
        fake.fail(Fault(change=lambda reply: reply["data"][0].update(embedding=None)))
        np.testing.assert_array_equal(await embedder.embed(["x", "y"]), sound)
        fake.fail(Fault(change=lambda reply: reply["data"][0].update(embedding=None)))
        np.testing.assert_array_equal(await embedder.embed(["x"]), sound[:1])


async def test_a_model_of_another_dimension_is_unavailable() -> None:
    async with embedding() as (fake, embedder):
        await embedder.model()
        fake.vector = lambda text: np.ones(4, np.float32)
        with pytest.raises(ModelUnavailable, match="a vector of 4 numbers came, not 8"):
            await embedder.embed(["x", "y"])


@pytest.mark.parametrize("sent", ["", pack(*[float("nan")] * 8)])
async def test_floats_are_asked_for_if_base64_is_unusable(sent: str) -> None:
    def spoil(body: JSON, reply: JSON) -> None:
        for item in reply["data"] if "encoding_format" in body else []:
            item["embedding"] = sent

    async with embedding() as (fake, embedder):
        fake.spoil = spoil
        assert (await embedder.embed(["x", "y"])).shape == (2, 8)
        assert ["encoding_format" in seen.body for seen in fake.seen] == [True, False, False]


async def test_floats_are_asked_for_when_base64_becomes_empty() -> None:
    def spoil(body: JSON, reply: JSON) -> None:
        for item in reply["data"] if "encoding_format" in body else []:
            item["embedding"] = ""

    async with embedding() as (fake, embedder):
        sound = await embedder.embed(["x", "y"])
        fake.spoil = spoil
        np.testing.assert_allclose(await embedder.embed(["x", "y"]), sound, rtol=1e-6)


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
    reply = {"data": [{"index": 0, "embedding": pack(*[1.0] * 4)}]}
    assert np.shape(parse_vectors(reply, 1, None)) == (1, 4)
    assert str(parse_vectors(reply, 1, 8)) == "[MalformedError('a vector of 4 numbers came, not 8')]"


def test_a_reply_of_a_million_items_is_read_in_one_pass() -> None:
    items = [{"index": 0, "embedding": [1.0]}] * 1_000_000
    assert [str(one) for one in parse_vectors({"data": items}, 2, 1)] == ["there is no vector for a text"] * 2


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
