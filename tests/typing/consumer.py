"""A program that uses the SDK, for type checkers: mypy --strict and pyright strict find nothing in it.

It is never run. Every `assert_type` is a type that a user's editor should infer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import assert_type

import numpy as np

import memstream
import memstream.sync
from memstream import Answer, Fragment, Memory, Recollection, Sent, Stored, Tier


async def observe(memory: Memory) -> None:
    async with memory.observe(producer="joy-1", session="monday", outcomes=True) as stream:
        sent = await stream.send("user: My name is Bob", speaker="Bob", importance=0.8, metadata={"turn": 1})
        assert_type(sent, Sent)
        assert_type(await sent, Stored)
        await stream.send(memstream.Structured(thought="greet", action="say"), ttl=timedelta(days=1))
        await stream.send(memstream.Observation("words", embedding=np.zeros(384, np.float32)))
        await stream.send("x", embedding=np.ones(384), observe_time=datetime(2026, 5, 8, tzinfo=UTC))
        await stream.flush()
        for rejected in stream.rejected:
            assert_type(rejected.error, memstream.MemstreamError)
        assert_type(stream.expected_sequence, int)


async def recall(memory: Memory) -> None:
    answer = await memory.recall_once("What's my name?", limit=5, explain=True)
    assert_type(answer, Answer)
    assert_type(answer[0], Recollection)
    assert_type(answer[:2], tuple[Recollection, ...])
    for hit in answer:
        assert_type(hit.fragment, Fragment)
        assert_type(hit.fragment.content, str)
        assert_type(hit.fragment.tier, Tier | None)
        assert_type(hit.fragment.create_time, datetime | None)
        assert_type(hit.fragment.metadata, Mapping[str, memstream.MetadataValue])
        assert_type(hit.score, float)
        if hit.explanation is not None:
            assert_type(hit.explanation.parts[0].contribution, float)
    async with memory.recall(session="monday") as stream:
        answers = await asyncio.gather(*(stream.query(f"question {n}", timeout_s=1.0) for n in range(10)))
        assert_type(answers, list[Answer])
        await stream.query(
            "filtered",
            filter=memstream.Filter(speakers=["Bob"], tiers=[Tier.LONG_TERM], metadata={"turn": [1, 2]}),
            weights=memstream.Weights(beta=2.0),
        )


async def manage(client: memstream.Client) -> None:
    memory = await client.create_memory(
        "comedy/joy",
        kind=memstream.MemoryKind.HYBRID,
        profile=memstream.Profile.DBGPT,
        policy=memstream.Policy(recall=memstream.RecallPolicy(limit=4)),
        exist_ok=True,
    )
    assert_type(memory, Memory)
    await client.create_memory("comedy/sad", policy={"recall": {"limit": 4}})
    assert_type((await memory.describe()).policy, memstream.Policy)
    async for fragment in memory.list_fragments(memstream.Filter(sessions=["monday"]), page_size=50):
        assert_type(fragment, Fragment)
    async for each in client.list_memories("comedy", labels={"team": "core"}):
        assert_type(each, memstream.MemoryInfo)
    async with memory.watch("beginning", types=[memstream.EventType.PROMOTED]) as watch:
        async for event in watch:
            assert_type(event, memstream.Event)
            assert_type(event.cosine, float | None)
    try:
        await memory.get_fragment(external_id="e")
    except memstream.FragmentNotFound as error:
        assert_type(error.details, dict[str, str])
        assert_type(error.retry_after, float | None)
        assert_type(error.violations, tuple[memstream.Violation, ...])


async def main() -> None:
    async with memstream.connect("127.0.0.1:7700", token="t", retry=memstream.Retry(later_s=60.0)) as client:
        assert_type(client, memstream.Client)
        await manage(client)
        await observe(client.memory("comedy/joy"))
        await recall(client.memory("comedy/joy"))


async def local() -> None:
    async with memstream.local("memory", embedding="hashing", index_flush_rows=64) as client:
        assert_type(client, memstream.Client)
    assert_type(await memstream.local(Path("memory"), start_timeout_s=5.0), memstream.Client)
    with memstream.sync.local("memory", timeout_s=3.0) as blocking:
        assert_type(blocking, memstream.sync.Client)


def script() -> None:
    with memstream.sync.connect("127.0.0.1:7700") as client:
        memory = client.create_memory("comedy/joy", exist_ok=True)
        assert_type(memory, memstream.sync.Memory)
        with memory.observe("joy-1") as stream:
            assert_type(stream.send("hello", speaker="Bob").wait(), Stored)
        assert_type(memory.recall_once("hello", limit=1), Answer)
        with memory.recall() as recall:
            assert_type(recall.submit("hello"), concurrent.futures.Future[Answer])
        for fragment in memory.list_fragments():
            assert_type(fragment, Fragment)
        assert_type(memory.supersede(["a"], newer_id="b"), int)
        hit = memory.recall_once("hello", truth=memstream.Truth.ALL)[0]
        assert_type(hit.status, memstream.TruthStatus)
        assert_type(hit.chain, tuple[memstream.ChainLink, ...])
