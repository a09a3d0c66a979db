"""Every reader that asks for its revision sees a stored observation at once."""

from __future__ import annotations

import asyncio

import pytest

import memstream
from tests.server.listing import refusal_of_revision
from tests.support.server import ServerProcess


async def test_another_connection_sees_what_was_stored(
    client: memstream.Client, shared: ServerProcess, path: str
) -> None:
    memory = await client.create_memory(path)
    async with memstream.connect(shared.address) as other, memory.observe("joy") as stream:
        for number in range(30):
            stored = await (await stream.send(f"The {number}th lighthouse is at Cape {number}."))
            answer = await other.memory(path).recall_once(
                f"Cape {number}", limit=1, min_revision=stored.revision, reinforce=False
            )
            assert answer.revision >= stored.revision
            assert answer[0].fragment.content == f"The {number}th lighthouse is at Cape {number}."


async def test_flush_makes_all_visible_without_revision(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path, kind=memstream.MemoryKind.LONG_TERM)
    async with memory.observe("joy") as stream:
        for number in range(200):
            await stream.send(f"entry {number}")
        await stream.flush()
        answer = await memory.recall_once("entry 199", limit=1)
    assert (answer[0].fragment.content, answer.eligible) == ("entry 199", 200)


async def test_recall_waits_for_a_future_revision(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    to_come = (await memory.describe()).revision + 1
    async with memory.recall() as recall:
        waiting = asyncio.create_task(recall.query("Who likes tea?", min_revision=to_come))
        at_once = await recall.query("Who likes tea?")
        assert (len(at_once), waiting.done()) == (0, False)
        await memory.observe_batch(["Bob likes tea"])
        answer = await waiting
    assert answer.revision >= to_come
    assert [one.fragment.content for one in answer] == ["Bob likes tea"]


async def test_missing_revision_error_names_the_distance(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    present = (await memory.describe()).revision
    refusal = await refusal_of_revision(memory, "tea", present + 7)
    assert "at revision 1" in str(refusal)
    assert int(refusal.details["revision"]) == present
    async with memory.recall() as recall:
        with pytest.raises(memstream.DeadlineExceeded):
            await recall.query("tea", min_revision=present + 7, timeout_s=0.3)
        assert len(await recall.query("tea")) == 0


async def test_other_streams_observation_advances_the_revision(client: memstream.Client, path: str) -> None:
    memory = await client.create_memory(path)
    async with memory.observe("joy") as joy, memory.observe("ann") as ann:
        await (await joy.send("joy was here"))
        stored = await (await ann.send("ann was here"))
    answer = await memory.recall_once("who was here?", min_revision=stored.revision)
    assert {one.fragment.content for one in answer} == {"joy was here", "ann was here"}
