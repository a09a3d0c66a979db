"""Which reads are accesses: a recall that reinforces is one; every other read leaves the fragments as they were."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

import memstream
from memstream import Fragment, Memory, MemoryKind
from tests.support.waiting import until

KEY, LAST = "the key is under the mat", "a heron by the canal"
Read = Callable[[Memory], Awaitable[None]]


async def _recall(memory: Memory) -> None:
    for _ in range(6):
        assert (await memory.recall_once("key", limit=1, reinforce=False))[0].fragment.content == KEY
    async with memory.recall(session="monday") as recall:
        assert (await recall.query("key", limit=1, reinforce=False))[0].fragment.content == KEY


async def _follow(memory: Memory) -> None:
    async with memory.recall(session="monday") as recall, recall.subscribe("key", limit=1) as standing:
        assert [one.fragment.content for one in (await anext(standing)).entered] == [KEY]


async def _recall_past(memory: Memory) -> None:
    revision = (await memory.describe()).revision
    assert (await memory.recall_once("key", limit=1, as_of=revision))[0].fragment.content == KEY


async def _replay(memory: Memory) -> None:
    kept = (await memory.recall_once("key", limit=1, receipt=True, reinforce=False)).receipt_id
    assert (await memory.replay(kept)).same
    assert [one.id async for one in memory.list_receipts()] == [kept]


async def _list(memory: Memory) -> None:
    key = await _fragment(memory, KEY)
    assert (await memory.get_fragment(key.id)).content == KEY
    assert (await memory.fragment_history(key.id)).versions == ()
    assert [one async for one in memory.list_fragments(forgotten=True)] == []
    assert (await memory.stats()).long_term == 2
    assert [one async for one in memory.list_sessions()]


async def _fragment(memory: Memory, content: str) -> Fragment:
    return next(one for one in [each async for each in memory.list_fragments()] if one.content == content)


async def _write_accesses(memory: Memory) -> None:
    """Returns when the accesses of earlier reads, if there are any, have been written."""
    before = (await _fragment(memory, LAST)).access_count
    await memory.recall_once("heron", limit=1, reinforce=True)

    async def written() -> bool:
        return (await _fragment(memory, LAST)).access_count == before + 1

    await until(written)


@pytest.mark.parametrize("read", [_recall, _follow, _recall_past, _replay, _list])
async def test_read_leaves_no_trace(client: memstream.Client, path: str, read: Read) -> None:
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    await memory.observe_batch([KEY, LAST], session="monday")
    before = await _fragment(memory, KEY)
    await read(memory)
    await _write_accesses(memory)
    assert await _fragment(memory, KEY) == before


async def test_recall_is_an_access_by_policy_or_query(client: memstream.Client, path: str) -> None:
    recall = memstream.RecallPolicy(reinforce=False)
    policy = memstream.Policy(recall=recall)
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM, policy=policy)
    await memory.observe_batch([KEY, LAST])
    before = await _fragment(memory, KEY)
    await memory.recall_once("key", limit=1)
    await _write_accesses(memory)
    assert await _fragment(memory, KEY) == before
    await memory.recall_once("key", limit=1, reinforce=True)
    await _write_accesses(memory)
    after = await _fragment(memory, KEY)
    assert after.access_count == 1
    assert after.access_time is not None
    assert before.access_time is not None
    assert after.access_time > before.access_time


async def test_traceless_recall_without_session_makes_no_echo(client: memstream.Client, path: str) -> None:
    repeats = memstream.ShortTermPolicy(repeats=False)
    memory = await client.create_memory(path, policy=memstream.Policy(short_term=repeats))
    await memory.observe_batch([KEY])
    for reinforce, stored in ((False, 2), (True, 2)):
        await memory.recall_once("key", reinforce=reinforce)
        await memory.observe_batch([KEY])
        assert len([one async for one in memory.list_fragments()]) == stored
