"""An embedding endpoint that is slow, dead, selective or of another model, while the server continues."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import numpy as np
import pytest

import memstream
from memstream import AckLevel, EventType, Memory
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import contents, fragments, history
from tests.server.test_process import run
from tests.support.fake_openai import FakeOpenAI, Fault
from tests.support.server import ServerProcess
from tests.support.waiting import until

DOWN = Fault(status=503)
OUTAGE = [DOWN] * 10_000


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


def settings_for(fake: FakeOpenAI, **settings: str | float) -> dict[str, str | float]:
    """Settings of a server that embeds with the endpoint. Few retries: the tests check what follows them."""
    given: dict[str, str | float] = {
        "embedding": "openai",
        "embedding_base_url": fake.base_url,
        "embedding_model": "fake-16",
        "embedding_api_key": "sk-test",
        "embedding_retries": 0,
        "embedding_timeout_s": 60.0,
    }
    return given | settings


def using(make_server: MakeServer, fake: FakeOpenAI, **settings: str | float) -> ServerProcess:
    """A server that embeds with the endpoint."""
    return make_server(**settings_for(fake, **settings))


async def test_endpoint_gets_key_and_reports_dimension(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        model = (await client.server_info()).embedding
        assert (model.name, model.dimension) == ("fake-16", 16)
        memory = await client.create_memory("models/joy")
        await memory.observe_batch(["Bob likes tea"])
        answer = await memory.recall_once("tea")
        assert (answer[0].fragment.model, answer.degraded) == ("fake-16", "")
    assert {seen.key for seen in fake.seen} == {"sk-test"}
    assert "sk-test" not in server.log()


async def test_outage_stores_without_vectors_then_backfills(make_server: MakeServer, fake: FakeOpenAI) -> None:
    # A model of lighthouses: a vector drawn from the whole text would change with its date.
    fake.vector = lambda text: np.eye(16, dtype=np.float32)[lighthouse_in(text)]
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy")
        async with memory.observe("joy") as stream:
            await (await stream.send("The harbour freezes in January."))
            fake.fail(*OUTAGE)
            for number in range(12):
                await stream.send(f"Lighthouse {number} is out of order.")
            await stream.flush()
        answer = await memory.recall_once("Which lighthouse 7?", limit=1, reinforce=False)
        assert answer[0].fragment.content == "Lighthouse 7 is out of order."
        assert "lexical" in answer.degraded
        assert "" in {one.model for one in await fragments(memory)}
        fake.heal()
        await until(lambda: _all_have_vectors(memory))
        answer = await memory.recall_once("Which lighthouse 7?", limit=1, reinforce=False)
        assert (answer[0].fragment.content, answer.degraded) == ("Lighthouse 7 is out of order.", "")
        filled = {one.fragment_id for one in await history(memory) if one.type is EventType.VECTORED}
        assert filled
        assert filled <= {one.id for one in await fragments(memory)}
        assert len(await contents(memory)) == 13


def lighthouse_in(text: str) -> int:
    """Its number; 15 if the text names none."""
    found = re.search(r"[Ll]ighthouse (\d+)", text)
    return int(found[1]) if found else 15


async def _all_have_vectors(memory: Memory) -> bool:
    return {one.model for one in await fragments(memory)} == {"fake-16"}


async def test_dbgpt_profile_keeps_observations_received(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """They also survive a kill, and are stored once the endpoint is back, without any client."""
    server = await started(using(make_server, fake))
    fake.fail(*OUTAGE)
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory(
            "models/dbgpt", kind=memstream.MemoryKind.LONG_TERM, policy={"profile": "dbgpt", "backlog_max": 3}
        )
        told = await memory.observe_batch(["one", "two"], producer="joy", first_sequence=1, ack_level=AckLevel.RECEIVED)
        assert (told.received, told.stored) == (2, 0)
        while (await memory.stats()).backlog < 3:  # a server that stands still receives nothing within the deadline
            with pytest.raises(memstream.DeadlineExceeded):
                await memory.observe_batch(["three"], producer="joy", first_sequence=3, timeout_s=3.0)
        assert (await memory.stats()).backlog == 3
        with pytest.raises(memstream.BacklogFull) as raised:
            await memory.observe_batch(["four"], producer="joy", first_sequence=4, timeout_s=60)
        assert raised.value.retry_after
        assert await contents(memory) == []
        # It does not delay another memory.
        other = await client.create_memory("models/default")
        assert (await other.observe_batch(["stored at once"])).stored == 1
    server.kill()
    await started(server)
    fake.heal()
    async with memstream.connect(server.address) as client:
        memory = client.memory("models/dbgpt")
        await until(lambda: _backlog_is_empty(memory))
        assert await contents(memory) == ["one", "two", "three"]
        assert {one.model for one in await fragments(memory)} == {"fake-16"}


async def _backlog_is_empty(memory: Memory) -> bool:
    return (await memory.stats()).backlog == 0


async def test_slow_endpoint_delays_no_ack_and_no_other_memory(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """While the model works for one memory, *received* is acknowledged, and another memory with client vectors is
    served."""
    server = await started(using(make_server, fake, embedding_timeout_s=30))
    vector = [1.0] + [0.0] * 15
    async with memstream.connect(server.address) as client:
        slow = await client.create_memory("models/slow")
        other = await client.create_memory("models/other")
        fake.hold()
        async with slow.observe("joy", ack_level=AckLevel.RECEIVED) as stream:
            sent = await stream.send("Bob likes tea")
            await stream.flush()
            assert (stream.received, stream.stored) == (1, 0)
            await other.observe_batch([memstream.Observation("Ann likes coffee", embedding=vector)])
            answer = await other.recall_once("coffee", embedding=vector)
            assert [one.fragment.content for one in answer] == ["Ann likes coffee"]
            assert len(await slow.recall_once("tea", embedding=vector)) == 0
            assert not sent.done  # the model is still working: nothing above waited for it
            fake.release()
            await sent
        assert await contents(slow) == ["Bob likes tea"]


async def test_a_query_does_not_wait_for_a_slow_endpoint(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake, embedding_timeout_s=30))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy")
        await memory.observe_batch(["Bob likes tea"])
        fake.fail(Fault(delay_s=60.0))
        answer = await memory.recall_once("Who likes tea?", reinforce=False)
        assert [one.fragment.content for one in answer] == ["Bob likes tea"]
        assert "lexical" in answer.degraded


async def test_refused_text_is_stored_without_vector(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.refuses = lambda text: "forbidden" in text
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy", kind=memstream.MemoryKind.LONG_TERM)
        await memory.observe_batch(["tea is fine", "the forbidden word", "rain is fine"])
        models = {one.content: one.model for one in await fragments(memory)}
        assert models == {"tea is fine": "fake-16", "the forbidden word": "", "rain is fine": "fake-16"}
        assert (await memory.recall_once("word", limit=1))[0].fragment.content == "the forbidden word"
        assert [one.type for one in await history(memory)].count(EventType.UNVECTORED) == 1
        answer = await memory.recall_once("forbidden", limit=1)
        assert answer[0].fragment.content == "the forbidden word"


async def test_malformed_endpoint_reply_counts_as_outage(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy", kind=memstream.MemoryKind.LONG_TERM)
        fake.fail(Fault(body=b"<html>"), Fault(body=b'{"data": []}'), Fault(hang_up=True), Fault(endless_s=0))
        for number in range(4):
            await memory.observe_batch([f"said {number}"])
        await until(lambda: _all_have_vectors(memory))
        assert await contents(memory) == ["said 0", "said 1", "said 2", "said 3"]


async def test_another_model_is_refused_and_reindex_named(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(using(make_server, fake))
    async with memstream.connect(server.address) as client:
        await (await client.create_memory("models/joy")).observe_batch(["Bob likes tea"])
    assert await stopped(server) == 0
    for other in ("--embedding-model=fake-other", "--embedding=hashing"):
        ended = await asyncio.to_thread(run, "serve", "--data", str(server.data_dir), *_flags(fake), other)
        assert ended.returncode == 1
        assert "memstream reindex" in ended.stderr
        assert "fake-16" in ended.stderr
        assert "Traceback" not in ended.stderr
    await started(server)
    async with memstream.connect(server.address) as client:
        assert await contents(client.memory("models/joy")) == ["Bob likes tea"]


def _flags(fake: FakeOpenAI) -> list[str]:
    return ["--listen=127.0.0.1:0", "--embedding=openai", f"--embedding-base-url={fake.base_url}"]


async def test_endpoint_down_at_first_start_is_reported(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.fail(*[Fault(hang_up=True)] * 10_000)
    server = using(make_server, fake)
    with pytest.raises(AssertionError) as raised:
        await started(server)
    assert "embedding endpoint" in str(raised.value)
    assert "Traceback" not in str(raised.value)
    fake.heal()
    await started(server)
    # Later starts do not need the endpoint: the dimension is recorded.
    assert await stopped(server) == 0
    fake.fail(*OUTAGE)
    await started(server)
    async with memstream.connect(server.address) as client:
        assert (await client.server_info()).embedding.dimension == 16


async def test_first_start_waits_for_a_loading_model(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.fail(*[DOWN] * 2)
    server = await started(using(make_server, fake))
    assert server.log().count("embedding_model_loading") == 2
    async with memstream.connect(server.address) as client:
        assert (await client.server_info()).embedding.dimension == 16


async def test_signal_ends_the_wait_for_a_loading_model(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.fail(*OUTAGE)
    server = using(make_server, fake)
    starting = asyncio.create_task(started(server))
    await until(lambda: asyncio.to_thread(lambda: "embedding_model_loading" in server.log()))
    assert await stopped(server) == 0
    with pytest.raises(AssertionError, match="did not start"):
        await starting
