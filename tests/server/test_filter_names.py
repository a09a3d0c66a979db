"""Names in a filter: how they may be spelled, and that an answer says which ones the memory does not have."""

from __future__ import annotations

import pytest

import memstream
from memstream import Filter, Memory, Observation, Unmatched
from tests.server.conftest import client, shared

__all__ = ["client", "shared"]  # fixtures


@pytest.fixture
async def memory(client: memstream.Client, path: str) -> Memory:
    made = await client.create_memory(path)
    said = [("Ann  Lee", "monday", 1), ("ANN LEE", "monday", 2), ("José", "tuesday", 3)]
    await made.observe_batch(
        [
            Observation(f"likes tea number {number}", speaker=speaker, session=session, metadata={"cup": number})
            for speaker, session, number in said
        ]
    )
    return made


async def test_recall_and_list_take_any_spelling(memory: Memory) -> None:
    for name, count in (("ann lee", 2), ("JOSE\u0301", 1), ("Jose", 0)):
        chosen = Filter(speakers=[name])
        answer = await memory.recall_once("tea", filter=chosen)
        listing = memory.list_fragments(chosen, page_size=1)
        assert (len(answer), len([one async for one in listing])) == (count, count), name
        expected = () if count else (Unmatched("speakers", name),)
        assert (answer.unmatched, listing.unmatched) == (expected, expected)


async def test_the_answer_names_what_the_memory_lacks(memory: Memory) -> None:
    chosen = Filter(speakers=["ann lee", "Bobb"], sessions=["monday", "mnday"], metadata={"cup": 1, "cop": 1})
    lacks = (Unmatched("speakers", "Bobb"), Unmatched("sessions", "mnday"), Unmatched("metadata", "cop"))
    assert (await memory.recall_once("tea", filter=chosen)).unmatched == lacks
    listing = memory.list_fragments(chosen)
    assert [one async for one in listing] == []
    assert listing.unmatched == lacks
    async with memory.recall() as recall:
        assert (await recall.query("tea", filter=chosen)).unmatched == lacks
    assert str(lacks[0]) == 'no fragment has the speaker "Bobb"'


async def test_known_names_that_do_not_meet_are_matched(memory: Memory) -> None:
    chosen = Filter(speakers=["josé"], sessions=["monday"], metadata={"cup": 9})
    listing = memory.list_fragments(chosen)
    assert [one async for one in listing] == []
    assert (await memory.recall_once("tea", filter=chosen)).unmatched == listing.unmatched == ()


async def test_a_list_of_forgotten_ones_knows_only_those(memory: Memory) -> None:
    assert await memory.forget_fragments(filter=Filter(speakers=["ann lee"])) == 2
    for forgotten, unknown in ((False, "Ann Lee"), (True, "José")):
        listing = memory.list_fragments(Filter(speakers=["Ann Lee", "José"]), forgotten=forgotten)
        assert [one async for one in listing] != []
        assert listing.unmatched == (Unmatched("speakers", unknown),)


async def test_the_past_takes_any_spelling(memory: Memory) -> None:
    revision = (await memory.describe()).revision
    assert len([one async for one in memory.list_fragments(Filter(speakers=["ann lee"]), as_of=revision)]) == 2
    assert len(await memory.recall_once("tea", filter=Filter(speakers=["ann lee"]), as_of=revision)) == 2


async def test_erase_takes_any_spelling(client: memstream.Client, memory: Memory) -> None:
    await client.finished(await memory.erase_fragments(filter=Filter(speakers=["ann lee"])))
    assert [one.speaker async for one in memory.list_fragments()] == ["José"]


async def test_the_past_names_what_it_lacks(memory: Memory) -> None:
    revision = (await memory.describe()).revision
    await memory.observe_batch([Observation("of later", speaker="Zoe", session="friday", metadata={"pot": 1})])
    chosen = Filter(speakers=["zoe", "ann lee"], sessions=["friday"], metadata={"pot": 1})
    lacks = (Unmatched("speakers", "zoe"), Unmatched("sessions", "friday"), Unmatched("metadata", "pot"))
    listing = memory.list_fragments(chosen, as_of=revision)
    assert [one async for one in listing] == []
    assert listing.unmatched == (await memory.recall_once("tea", filter=chosen, as_of=revision)).unmatched == lacks
    now = memory.list_fragments(chosen)
    assert [one.speaker async for one in now] == ["Zoe"]
    assert now.unmatched == ()


async def test_forget_restore_and_erase_name_what_is_lacking(client: memstream.Client, memory: Memory) -> None:
    chosen, lacks = Filter(speakers=["ann lee", "Bobb"]), (Unmatched("speakers", "Bobb"),)
    forgotten = await memory.forget_fragments(filter=chosen)
    assert (forgotten, forgotten.unmatched) == (2, lacks)
    again = await memory.forget_fragments(filter=Filter(speakers=["ann lee"], metadata={"cop": 1}))
    assert (again, again.unmatched) == (0, (Unmatched("speakers", "ann lee"), Unmatched("metadata", "cop")))
    restored = await memory.restore_fragments(filter=chosen)
    assert (restored, restored.unmatched) == (2, lacks)
    by_id = await memory.forget_fragments([one.id async for one in memory.list_fragments(chosen)])
    assert (by_id, by_id.unmatched) == (2, ())
    operation = await memory.erase_fragments(filter=chosen)  # finds the forgotten ones, too
    assert operation.unmatched == lacks
    await client.finished(operation)
    assert [one.speaker async for one in memory.list_fragments()] == ["José"]
