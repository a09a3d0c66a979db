"""Texts for which the endpoint gives no vector: counted everywhere, and embedded again later or on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

import memstream
from memstream import EventType, Memory, MemoryKind, OperationState
from tests.cli.commands import run
from tests.server.conftest import MakeServer, started, stopped
from tests.server.listing import fragments, history
from tests.server.test_models import using
from tests.support.fake_openai import JSON, FakeOpenAI
from tests.support.journals import journal_url
from tests.support.metrics import scrape_metrics
from tests.support.server import ServerProcess, free_address
from tests.support.waiting import until

TEXTS = [*(f"tea number {number}" for number in range(9)), "an odd one"]


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimension=16) as endpoint:
        yield endpoint


def spoil_odd(body: JSON, reply: JSON) -> None:
    """The answer is good except for one null."""
    for text, item in zip(body["input"], reply["data"], strict=True):
        if "odd" in text:
            item["embedding"] = None


def place_of(server: ServerProcess) -> tuple[str, str]:
    """The flag that names the server's journal."""
    url = journal_url(server.data_dir)
    return ("--journal-url", url) if url else ("--data", str(server.data_dir))


async def models_of(memory: Memory) -> dict[str, str]:
    return {one.content: one.model for one in await fragments(memory)}


async def count_missing(memory: Memory) -> int:
    return (await memory.stats()).unvectored


async def test_one_null_costs_one_fragment_its_vector(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.spoil = spoil_odd
    metrics = free_address()
    server = await started(using(make_server, fake, metrics_listen=metrics))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy")
        await memory.observe_batch(TEXTS)
        assert await models_of(memory) == dict.fromkeys(TEXTS[:-1], "fake-16") | {TEXTS[-1]: ""}
        assert await count_missing(memory) == 1
        assert (await memory.recall_once("odd", limit=1))[0].fragment.content == TEXTS[-1]
        await memory.forget_fragments([one.id for one in await fragments(memory) if not one.model])
        assert await count_missing(memory) == 0
        await memory.observe_batch(["another odd one"])
    assert await stopped(server) == 0
    found = json.loads((await asyncio.to_thread(run, "doctor", *place_of(server), "--json")).stdout)["findings"]
    (note,) = (one for one in found if one["subject"] == "vectors")
    assert note["text"].startswith("1 fragments have no vector")
    assert "memstream reindex --missing" in note["advice"]
    await started(server)
    await until(lambda: asyncio.to_thread(lambda: scrape_metrics(metrics)["memstream_unvectored_fragments"] == 1))


async def test_missing_vectors_are_made_in_the_background(make_server: MakeServer, fake: FakeOpenAI) -> None:
    fake.spoil = spoil_odd
    server = await started(using(make_server, fake, embedding_missing_interval_s=1))
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("models/joy")
        await memory.observe_batch(TEXTS)
        asked = len(fake.seen)
        await until(lambda: _is_asked_again(fake, asked))
        assert await count_missing(memory) == 1
        fake.spoil = lambda body, reply: None
        await until(lambda: _none_is_missing(memory))
        assert set((await models_of(memory)).values()) == {"fake-16"}
        assert [one.type for one in await history(memory)].count(EventType.VECTORED) == 1


async def _is_asked_again(fake: FakeOpenAI, before: int) -> bool:
    return any("odd" in text for seen in fake.seen[before:] for text in seen.body["input"])


async def _none_is_missing(memory: Memory) -> bool:
    return await count_missing(memory) == 0


async def test_reindex_missing_embeds_only_what_is_missing(make_server: MakeServer, fake: FakeOpenAI) -> None:
    """Texts over the model's limit, which the endpoint refuses, are texts without a vector, too."""
    fake.refuses = lambda text: len(text) > 100
    server = await started(using(make_server, fake))
    long = [f"tea {number} " + "leaf " * 30 for number in range(3)]
    async with memstream.connect(server.address) as client:
        kind = MemoryKind.LONG_TERM
        first, second = [await client.create_memory(name, kind=kind) for name in ("models/joy", "models/sad")]
        await first.observe_batch([*TEXTS, *long[:2]])
        await second.observe_batch([long[2]])
        failed = await client.finished(await client.start_reindex(missing=True))
        assert (failed.state, failed.done, failed.total) == (OperationState.SUCCEEDED, 0, 3)
        fake.refuses = lambda text: not text
        asked = len(fake.seen)
        done = await client.finished(await client.start_reindex(missing=True))
        assert (done.state, done.done, done.total) == (OperationState.SUCCEEDED, 3, 3)
        assert await count_missing(first) == await count_missing(second) == 0
        embedded = [text for seen in fake.seen[asked:] for text in seen.body["input"]]
        assert len(embedded) == 3
        assert (await second.recall_once("tea", limit=1))[0].fragment.content == long[2]
        with pytest.raises(memstream.InvalidRequest, match="missing"):
            await client.start_reindex(missing=True, embed=True)


async def test_what_the_next_model_refuses_is_counted(make_server: MakeServer, fake: FakeOpenAI) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        await (await client.create_memory("models/joy")).observe_batch(TEXTS)
    assert await stopped(server) == 0
    fake.spoil = spoil_odd
    server.configure(next_embedding="openai", next_embedding_model="fake-16", next_embedding_base_url=fake.base_url)
    await started(server)
    async with memstream.connect(server.address) as client:
        memory = client.memory("models/joy")
        assert await count_missing(memory) == 0
        await client.finished(await client.start_reindex(embed=True))
        assert (await count_missing(memory), (await models_of(memory))[TEXTS[-1]]) == (1, "")
        fake.spoil = lambda body, reply: None
        done = await client.finished(await client.start_reindex(missing=True))
        assert (done.done, done.total, await count_missing(memory)) == (1, 1, 0)
    assert await stopped(server) == 0
    assert (await asyncio.to_thread(run, "verify", *place_of(server))).returncode == 0
