"""A model that never answers shows in info, health, metrics, answers and the doctor; so does its recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

import memstream
from memstream import Client, ModelState, ModelStatus
from memstream.answer_values import Answer
from tests.access.conftest import guarded_files
from tests.server.conftest import MakeServer, restarted, started
from tests.server.test_health import NOT_SERVING, SERVING, checked
from tests.server.test_process import run
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.metrics import scrape_metrics
from tests.support.recorded_endpoint import RecordedEndpoint
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

WRONG = "sk-wrong-0123456789"
REFUSED = "HTTP 401 (invalid_api_key)"


@pytest.fixture
async def openai() -> AsyncIterator[RecordedEndpoint]:
    async with RecordedEndpoint("openai") as endpoint:
        yield endpoint


def llm_of(endpoint: RecordedEndpoint, **settings: str | float) -> dict[str, str | float]:
    """Settings of an LLM with a wrong key, without retries."""
    given: dict[str, str | float] = {"llm_model": "gpt", "llm_base_url": endpoint.base_url, "llm_api_key": WRONG}
    return given | {"llm_retries": 0, "index_flush_interval_s": 0.1} | settings


async def status_of(client: Client, role: str) -> ModelStatus:
    return next(one for one in (await client.server_info()).models if one.role == role)


async def is_failing(client: Client, role: str) -> bool:
    return (await status_of(client, role)).state is ModelState.FAILING


async def test_failing_scorer_is_seen_everywhere(make_server: MakeServer, openai: RecordedEndpoint) -> None:
    listen = free_address()
    server = await started(make_server(metrics_listen=listen, **llm_of(openai)))
    async with memstream.connect(server.address) as client:
        await until(lambda: is_failing(client, "scorer"))  # before the first use
        memory = await client.create_memory("status/joy")
        await memory.observe_batch(["Bob likes tea"])
        info = await client.server_info()
        scorer = await status_of(client, "scorer")
        assert (scorer.model, scorer.last_error, scorer.last_success_time) == ("gpt", REFUSED, None)
        assert scorer.consecutive_failures >= 2
        assert scorer.last_failure_time is not None
        assert f"scorer gpt fails: {REFUSED}" in info.degraded
        assert f"insights gpt fails: {REFUSED}" in info.degraded
        assert (await status_of(client, "embedder")).state is ModelState.SERVING
        answer = await memory.recall_once("tea", reinforce=False)
        assert answer.degraded == f"new fragments have the default importance, the scorer fails: {REFUSED}"
        plain = await client.create_memory("status/plain", policy={"score_importance": False})
        await plain.observe_batch(["Bob likes tea"])
        assert (await plain.recall_once("tea")).degraded == ""
        indifferent = await client.create_memory("status/indifferent", policy={"recall": {"gamma": 0.0}})
        await indifferent.observe_batch(["Bob likes tea"])
        assert (await indifferent.recall_once("tea")).degraded == ""
    async with grpc.aio.insecure_channel(server.address) as channel:
        names = ["memstream.model.scorer", "memstream.model.insights", "memstream.model.embedder", ""]
        await until(lambda: serving(channel, names, [NOT_SERVING, NOT_SERVING, SERVING, SERVING]))
    seen = await asyncio.to_thread(scrape_metrics, listen)
    assert seen['memstream_model_up{role="scorer"}'] == 0
    assert seen['memstream_model_up{role="embedder"}'] == 1
    assert seen['memstream_model_failures_total{role="scorer"}'] >= 2
    assert seen['memstream_model_consecutive_failures{role="scorer"}'] >= 2
    assert seen['memstream_model_last_success_timestamp_seconds{role="scorer"}'] == 0
    assert seen["memstream_index_up"] == 1
    shown = await asyncio.to_thread(run, "info", "--target", server.address)
    assert f"FAILING ({REFUSED})" in " ".join(shown.stdout.split())
    assert "Incorrect API key provided" in server.log()  # the result of the question at start
    assert WRONG not in server.log() + shown.stdout


async def serving(channel: grpc.aio.Channel, names: list[str], expected: list[int]) -> bool:
    return await checked(channel, *names) == expected


async def test_scorer_that_recovers_is_shown_so(make_server: MakeServer) -> None:
    async with FakeOpenAI() as fake:
        fake.complete = lambda body: '{"scores": [{"number": 1, "score": 9}]}'
        settings = {"llm_model": "gpt", "llm_base_url": fake.base_url, "llm_retries": 0, "llm_insights": "false"}
        server = await started(make_server(**settings))
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("status/joy")
            fake.fail(*[Fault(status=503)] * 10_000)
            await memory.observe_batch(["Bob likes tea"])
            failing = await status_of(client, "scorer")
            assert (failing.state, failing.last_error) == (ModelState.FAILING, "HTTP 503 (scripted)")
            fake.heal()
            await until(lambda: is_serving(client, "scorer"))  # the server retries its job
            recovered = await status_of(client, "scorer")
            assert (recovered.consecutive_failures, recovered.last_error) == (0, "")
            assert recovered.last_success_time is not None
            assert recovered.last_failure_time is not None
            assert (await client.server_info()).degraded == ""
            assert (await memory.recall_once("tea", reinforce=False)).degraded == ""


async def is_serving(client: Client, role: str) -> bool:
    return (await status_of(client, role)).state is ModelState.SERVING


async def test_failing_embedder_is_seen_after_a_restart(make_server: MakeServer) -> None:
    async with FakeOpenAI(dimension=16) as fake:
        settings = {"embedding": "openai", "embedding_base_url": fake.base_url, "embedding_retries": 0}
        server = await started(make_server(listen=free_address(), **settings))
        fake.fail(*[Fault(status=401, body=b'{"error": {"code": "no_money", "message": "the words"}}')] * 10_000)
        await restarted(server)
        async with memstream.connect(server.address) as client:
            await until(lambda: is_failing(client, "embedder"))
            memory = await client.create_memory("status/joy")
            await memory.observe_batch(["Bob likes tea"])
            assert "embedder text-embedding-3-small fails: HTTP 401 (no_money)" in (await client.server_info()).degraded
            answer = await memory.recall_once("tea", reinforce=False)
            assert answer.degraded == "no query vector, lexical legs only: HTTP 401 (no_money)"
            fake.heal()
            await until(lambda: is_serving(client, "embedder"))


async def test_model_of_another_dimension_under_the_same_name(make_server: MakeServer) -> None:
    async with FakeOpenAI(dimension=16) as fake:
        settings = {"embedding": "openai", "embedding_base_url": fake.base_url, "embedding_retries": 0}
        server = await started(make_server(listen=free_address(), **settings))
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("status/joy")
            await memory.observe_batch(["Bob likes tea"])
        fake.dimension = 24
        await restarted(server)
        async with memstream.connect(server.address) as client:
            memory = client.memory("status/joy")
            await until(lambda: is_failing(client, "embedder"))
            answer = await memory.recall_once("tea", reinforce=False)
            assert "have 24 numbers, those of the data 16" in answer.degraded
            assert answer[0].fragment.content == "Bob likes tea"
            await memory.observe_batch(["Ann likes tea"])
            assert len(await memory.recall_once("tea", reinforce=False)) == 2


async def test_body_of_a_shared_request_reaches_nobody(make_server: MakeServer) -> None:
    """Embedding requests contain texts of several tenants, and some servers repeat them in their errors."""
    async with FakeOpenAI(dimension=16) as fake:
        settings = {"embedding": "openai", "embedding_base_url": fake.base_url, "embedding_retries": 0}
        server = await started(make_server(**settings, log_level="debug"))
        async with memstream.connect(server.address) as client:
            memory = await client.create_memory("mine/joy")
            await memory.observe_batch(["Bob likes tea"])
            echo = b'{"error": {"message": "no: the secret of another tenant", "code": "the secret of another tenant"}}'
            answers: list[Answer] = []
            for status in (400, 401, 404, 422, 429, 500, 503):
                fake.fail(*[Fault(status=status, body=echo)] * 8)
                answers.append(await memory.recall_once("tea", reinforce=False))
                fake.heal()
            assert all(answer.degraded for answer in answers)
            shown = "".join(answer.degraded for answer in answers) + str(await client.server_info())
        assert "secret of another" not in shown
        assert "127.0.0.1" not in shown
        # The log shows the reply to a harmless question, which is asked if an error may be the fault of a text.
        told = [line for line in server.log().splitlines() if "secret of another" in line]
        assert all("refuses any input" in line or "HTTP 500" in line for line in told), told


async def test_usage_counts_need_server_wide_read(make_server: MakeServer, openai: RecordedEndpoint) -> None:
    server: ServerProcess = make_server(**llm_of(openai, llm_api_key=str(openai.recording["api_key"])))
    keys_file, policy_file, keys = guarded_files(server.data_dir.parent / "access")
    server.configure(api_keys_file=str(keys_file), access_policy_file=str(policy_file))
    await started(server)
    async with (
        memstream.connect(server.address, token=keys["alice"]) as alice,
        memstream.connect(server.address, token=keys["bob"]) as bob,
        memstream.connect(server.address, token=keys["root"]) as root,
    ):
        await (await alice.create_memory("a/joy")).observe_batch(["Bob likes tea"])
        everything = await root.server_info()
        assert sum(one.requests for one in everything.model_usage) >= 1
        assert any(one.last_success_time for one in everything.models)
        before = await bob.server_info()
        await (await alice.create_memory("a/again")).observe_batch(["Ann likes coffee"])
        assert await bob.server_info() == before  # nothing in it depends on another tenant
        assert before.model_usage == ()
        assert {one.role: one.state for one in before.models}["scorer"] is ModelState.SERVING
