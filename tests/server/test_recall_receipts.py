"""Receipts of recalls through the SDK, on a real server."""

from __future__ import annotations

import asyncio

import pytest

import memstream
from memstream import (
    EventType,
    Filter,
    FragmentKind,
    MemoryKind,
    Observation,
    RecallOptions,
    Structured,
    Tier,
    Truth,
    Weights,
)
from memstream.errors import FragmentNotFound, InvalidRequest
from tests.server.conftest import MakeServer, started
from tests.support.server import ServerProcess

OPTIONS = RecallOptions(
    limit=3,
    explain=True,
    near_misses=2,
    weights=Weights(alpha=0.5),
    truth=Truth.ALL,
    receipt=True,
    filter=Filter(
        sessions=("s",),
        tiers=(Tier.LONG_TERM,),
        kinds=(FragmentKind.OBSERVATION,),
        importance_min=0.0,
        metadata={"n": (1, 2)},
    ),
)


async def test_a_receipt_is_watched_listed_and_replayed(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    said = [Observation(text, metadata={"n": 1}) for text in ("the otter eats fish", "tea with milk")]
    await memory.observe_batch(said, session="s")
    info = await memory.describe()
    async with memory.watch(memstream.Cursor(info.uid, info.revision)) as events:
        answer = await memory.recall_once("what does the otter eat?", **OPTIONS)
        event = await anext(events)
    assert (event.type, event.receipt_id, event.fragment_id) == (EventType.RECALLED, answer.receipt_id, "")
    async with memory.recall() as recalls:
        streamed = await recalls.query(Structured(question="tea?"), receipt=True)
        plain = await recalls.query("tea?")
    assert plain.receipt_id == ""
    latest, first = [one async for one in memory.list_receipts(page_size=1)]
    assert (latest.id, latest.what) == (streamed.receipt_id, Structured(question="tea?"))
    assert (first.id, first.what, first.options) == (answer.receipt_id, "what does the otter eat?", OPTIONS)
    assert first.policy == info.policy
    assert (first.revision, first.principal, first.degraded) == (info.revision, "", "")
    assert [(one.fragment_id, one.score, one.relevance) for one in first.ranking] == [
        (hit.fragment.id, hit.score, hit.relevance) for hit in answer
    ]
    await memory.update_fragment(answer[0].fragment.id, content="said otherwise")
    replayed = await memory.replay(first.id)
    assert (replayed.receipt, replayed.same, replayed.differences) == (first, True, ())
    assert replayed.answer is not None
    assert [(hit.fragment.content, hit.explanation) for hit in replayed.answer] == [
        (hit.fragment.content, hit.explanation) for hit in answer
    ]


async def test_a_receipt_belongs_to_one_memory_and_one_answer(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    other = await client.create_memory(f"{path}-other")
    await memory.observe_batch(["the otter eats fish"])
    receipt = (await memory.recall_once("otter", receipt=True)).receipt_id
    for asked, id_ in ((other, receipt), (memory, "0" * 26)):
        with pytest.raises(FragmentNotFound):
            await asked.replay(id_)
    with pytest.raises(InvalidRequest):
        await memory.replay("nothing")
    with pytest.raises(InvalidRequest):
        await memory.recall_once("otter", receipt=True, as_of=1)
    async with memory.recall() as recalls:
        with pytest.raises(InvalidRequest):
            async with recalls.subscribe("otter", receipt=True) as changes:
                await anext(changes)
    off = await client.create_memory(f"{path}-off", policy={"history": {"receipts": 0}})
    assert (await off.recall_once("otter", receipt=True)).receipt_id == ""


def test_the_blocking_sdk_lists_and_replays(shared: ServerProcess, path: str) -> None:
    with memstream.sync.connect(shared.address) as client:
        memory = client.create_memory(path)
        memory.observe_batch(["the otter eats fish"])
        receipt = memory.recall_once("what does the otter eat?", receipt=True).receipt_id
        assert [one.id for one in memory.list_receipts()] == [receipt]
        assert memory.replay(receipt).same


async def test_a_receipt_that_was_named_survives_a_kill(make_server: MakeServer) -> None:
    server = await started(make_server())
    async with memstream.connect(server.address) as client:
        memory = await client.create_memory("kill/joy", policy={"history": {"receipts": 1_000}})
        await memory.observe_batch(["the otter eats fish", "tea with milk"])
        named: list[str] = []
        enough = asyncio.Event()

        async def recall_on() -> None:
            while True:
                named.append((await memory.recall_once("what does the otter eat?", receipt=True)).receipt_id)
                if len(named) == 40:
                    enough.set()

        recalling = [asyncio.create_task(recall_on()) for _ in range(4)]
        await enough.wait()
        server.kill()
        for task in recalling:
            task.cancel()
        await asyncio.gather(*recalling, return_exceptions=True)
    await asyncio.to_thread(server.start)
    async with memstream.connect(server.address) as client:
        memory = client.memory("kill/joy")
        kept = {one.id async for one in memory.list_receipts()}
        assert kept.issuperset(named)
        for receipt in (named[0], named[-1]):
            replayed = await memory.replay(receipt)
            assert (replayed.same, replayed.differences) == (True, ())
