"""Calls that a type checker must reject. Each `# wrong` line is one error of pyright strict, and no other line is.

It is never run. tests/test_typing.py compares it with what the checker says.
"""

from __future__ import annotations

from datetime import UTC, datetime

import memstream
import memstream.sync
from memstream import Filter, Memory, Observation, Tier, Weights


async def recall(memory: Memory) -> None:
    await memory.recall_once("x", filters=Filter())  # wrong
    await memory.recall_once("x", speaker="bob")  # wrong
    await memory.recall_once("x", top_k=3)  # wrong
    await memory.recall_once("x", limit="3")  # wrong
    await memory.recall_once("x", now="2026-05-08")  # wrong
    await memory.recall_once("x", filter={"speakers": ["bob"]})  # wrong
    await memory.recall_once("x", weights=2.0)  # wrong
    await memory.recall_once(["x"])  # wrong
    async with memory.recall() as stream:
        await stream.query("x", min_relevence=0.5)  # wrong
        stream.subscribe("x", limit=1, forever=True)  # wrong
    await memory.recall_once("x", limit=3, filter=None, now=datetime(2026, 5, 8, tzinfo=UTC), weights=Weights(beta=2))


async def observe(memory: Memory) -> None:
    await memory.observe_batch(["x"], ack_level=3)  # wrong
    await memory.observe_batch({"x": 1}, producer=7)  # wrong
    await memory.observe_batch(7)  # wrong
    await memory.observe_batch("hello")  # wrong
    await memory.observe_batch({"x": 1})  # wrong
    await memory.observe_batch(line for line in "ab")
    async with memory.observe("p") as stream:
        await stream.send("x", speakers="Bob")  # wrong
        await stream.send("x", metadata={"n": {1}})  # wrong
        await stream.send("x", observe_time="now")  # wrong
        await stream.send(b"x")  # wrong
        await stream.send(Observation("x", importance="much"))  # wrong
        await stream.send("x", speaker="Bob", ttl=None)
    await memory.put_fragment("x", external="k")  # wrong


async def manage(client: memstream.Client, memory: Memory) -> None:
    Filter(speaker=["bob"])  # wrong
    Filter(speakers="bob")  # wrong
    Filter(sessions={"monday": 1})  # wrong
    Filter(exclude_ids=iter(["x"]))  # wrong
    Filter(speakers=("bob",), sessions={"monday"}, tiers=[Tier.SENSORY], metadata={"n": [1, 2], "b": True})
    ids: list[str] = []
    keys = dict.fromkeys(ids, 1)
    Filter(speakers=keys.keys(), exclude_ids=ids, metadata={"n": (1, 2)})
    await memory.forget_fragments("01K9ZQ4J3V6Y8M2N5P7R0S1T2W")  # wrong
    await memory.forget_fragments(ids)
    await memory.supersede("01K9ZQ4J3V6Y8M2N5P7R0S1T2W", newer_id="x")  # wrong
    await memory.supersede(ids, by="x")  # wrong
    await memory.supersede(ids, newer_external_id="home")
    await memory.recall_once("x", truth="all")  # wrong
    await memory.put_fragment("x", external_id="k", supersedes="home")  # wrong
    await memory.put_fragment("x", external_id="k", supersedes=["home"], valid_from=None)
    Filter(speakers=[7])  # wrong
    Filter(metadata={"n": {"$gt": 3}})  # wrong
    Filter(tiers=["top"])  # wrong
    await memory.clear(Tier.SENSORY)  # wrong
    await client.create_memory("a/b", kinds=memstream.MemoryKind.HYBRID)  # wrong
    await client.create_memory("a/b", policy=7)  # wrong
    memstream.connect("x", timeout=3)  # wrong
    memory.watch(types="promoted")  # wrong
    memory.watch("yesterday")  # wrong
    memstream.memory_name(7)  # wrong
    await client.conversation("a/b").append("a", "x", round=1)  # wrong


def script(memory: memstream.sync.Memory) -> None:
    memory.recall_once("x", top_k=3)  # wrong
    memory.put_fragment("x", speakers="Bob")  # wrong
    with memory.recall() as stream:
        stream.submit("x", limits=3)  # wrong


async def local() -> None:
    await memstream.local("memory", index_flush_rows=[64])  # wrong
    memstream.local("memory").create_memory("ns/m")  # wrong
    memstream.sync.local(7)  # wrong
