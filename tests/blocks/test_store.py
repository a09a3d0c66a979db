"""Blocks in the journal: one write at a time, versions, bounds, what ends with a memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.engine.background.standing_blocks import find_own_due
from memstream_server.ports.blocks import (
    NO_REVISION,
    AskedMemory,
    Block,
    BlockContent,
    BlockDiffers,
    BlockName,
    BlocksFull,
    Decide,
    MemoryName,
    NoBlock,
    NoMemory,
    SourcesChanged,
    StandingAnswer,
    StandingQuestion,
    StandingScope,
    StandingState,
    Writing,
)
from memstream_server.ports.journal.errors import AnswerExists
from memstream_server.ports.journal.records import Answer
from tests.journal.samples import fragment, record, row, transition
from tests.support import journals

JOY = MemoryName("comedy", "joy")
PERSONA = BlockName(JOY, "persona")
GONE = MemoryName("comedy", "gone")


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqlJournal]:
    opened = await journals.open_test_journal(tmp_path / "data", lambda: 1_000, reserve_bytes=0)
    await opened.create_memory(record("u1", "joy"), ())
    yield opened
    await opened.close()


def always(text: str) -> Decide:
    return lambda _old: BlockContent(text)


def writing(now_us: int = 1_000, blocks_max: int = 9, versions_max: int = 9) -> Writing:
    return Writing(now_us, "key:ann", blocks_max, versions_max)


async def put(journal: SqlJournal, name: str, text: str, **bounds: int) -> Block:
    return await journal.blocks.write_block(BlockName(JOY, name), always(text), writing(**bounds))


async def texts(journal: SqlJournal) -> dict[str, str]:
    return {one.name: one.content.text for one in await journal.blocks.list_blocks(JOY, "", 9)}


async def test_content_and_writer_are_kept_with_each_version(journal: SqlJournal) -> None:
    content = BlockContent("a\0b 茶", 9, (("a", True), ("b", 1.5)))
    first = await journal.blocks.write_block(PERSONA, lambda _old: content, writing(7))
    assert first == Block("persona", 1, content, 7, 7, "key:ann")
    second = await put(journal, "persona", "later", now_us=8)
    assert (second.version, second.create_time_us, second.update_time_us) == (2, 7, 8)
    assert await journal.blocks.list_versions(PERSONA, None, 9) == [second, first]
    assert await journal.blocks.list_versions(PERSONA, 2, 9) == [first]
    assert await journal.blocks.get_block(PERSONA) == second
    assert await journal.blocks.get_block(PERSONA, 1) == first


async def test_write_that_changes_nothing_makes_no_version(journal: SqlJournal) -> None:
    whole, truth = BlockContent("x", 0, (("a", 1),)), BlockContent("x", 0, (("a", True),))
    first = await journal.blocks.write_block(PERSONA, lambda _old: whole, writing(1))
    assert await journal.blocks.write_block(PERSONA, lambda _old: whole, writing(2)) == first
    assert (await journal.blocks.write_block(PERSONA, lambda _old: truth, writing(3))).version == 2


async def test_older_versions_are_deleted(journal: SqlJournal) -> None:
    for number in range(5):
        await put(journal, "persona", f"{number}", versions_max=2)
        await put(journal, "task", f"{number}", versions_max=9)
    kept = await journal.blocks.list_versions(PERSONA, None, 9)
    assert [one.content.text for one in kept] == ["4", "3"]
    assert len(await journal.blocks.list_versions(BlockName(JOY, "task"), None, 9)) == 5
    with pytest.raises(NoBlock, match=r"version 1 .* is not kept"):
        await journal.blocks.get_block(PERSONA, 1)


async def test_memory_takes_no_more_blocks_than_allowed(journal: SqlJournal) -> None:
    await put(journal, "a", "1", blocks_max=2)
    await put(journal, "b", "1", blocks_max=2)
    with pytest.raises(BlocksFull):
        await put(journal, "c", "1", blocks_max=2)
    await put(journal, "b", "2", blocks_max=2)
    assert await texts(journal) == {"a": "1", "b": "2"}


async def test_concurrent_writes_see_each_other(journal: SqlJournal) -> None:
    def add_one(old: Block | None) -> BlockContent:
        return BlockContent(str(int(old.content.text) + 1 if old else 1))

    await asyncio.gather(*(journal.blocks.write_block(PERSONA, add_one, writing()) for _ in range(20)))
    assert await texts(journal) == {"persona": "20"}


async def test_error_of_a_decision_ends_only_its_write(journal: SqlJournal) -> None:
    def refuse(_old: Block | None) -> BlockContent:
        raise BlockDiffers("no", 3)

    refused, _ = await asyncio.gather(
        journal.blocks.write_block(PERSONA, refuse, writing()), put(journal, "task", "x"), return_exceptions=True
    )
    assert isinstance(refused, BlockDiffers)
    assert await texts(journal) == {"task": "x"}


async def test_deleted_block_is_gone_and_its_version_unused(journal: SqlJournal) -> None:
    first = await put(journal, "persona", "a")
    with pytest.raises(BlockDiffers) as caught:
        await journal.blocks.delete_block(PERSONA, first.version + 1)
    assert caught.value.version == first.version
    assert await journal.blocks.delete_block(PERSONA, first.version)
    assert not await journal.blocks.delete_block(PERSONA, None)
    for reading in (journal.blocks.get_block(PERSONA), journal.blocks.list_versions(PERSONA, None, 9)):
        with pytest.raises(NoBlock, match="there is no block comedy/joy#persona"):
            await reading
    assert (await put(journal, "persona", "a")).version > first.version


async def test_answer_is_stored_with_the_write(journal: SqlJournal) -> None:
    def answer(block: Block) -> Answer:
        return Answer("comedy\nPutBlock\nr", b"d", str(block.version).encode(), 1_000)

    await journal.blocks.write_block(PERSONA, always("a"), writing(), answer)
    with pytest.raises(AnswerExists):
        await journal.blocks.write_block(PERSONA, always("b"), writing(), answer)
    assert await texts(journal) == {"persona": "a"}
    stored = await journal.get_answer("comedy\nPutBlock\nr")
    assert stored is not None
    assert stored.response == b"1"


async def test_blocks_are_read_together(journal: SqlJournal) -> None:
    persona, task = await put(journal, "persona", "a"), await put(journal, "task", "b")
    names = [BlockName(JOY, "task"), PERSONA, BlockName(JOY, "none"), BlockName(GONE, "persona")]
    assert await journal.blocks.read_blocks(names) == {names[0]: task, PERSONA: persona}
    assert await journal.blocks.read_versions(JOY) == ("u1", {"persona": 1, "task": 2})


async def test_blocks_end_with_their_memory(journal: SqlJournal) -> None:
    await put(journal, "persona", "a")
    await journal.delete_memory("u1")
    await journal.create_memory(record("u2", "joy"), ())
    assert await texts(journal) == {}
    for work in (
        journal.blocks.list_blocks(GONE, "", 9),
        journal.blocks.get_block(BlockName(GONE, "persona")),
        journal.blocks.list_versions(BlockName(GONE, "persona"), None, 9),
        journal.blocks.read_versions(GONE),
        journal.blocks.write_block(BlockName(GONE, "persona"), always("a"), writing()),
        journal.blocks.delete_block(BlockName(GONE, "persona"), None),
    ):
        with pytest.raises(NoMemory):
            await work


async def test_bytes_of_all_versions_count(journal: SqlJournal) -> None:
    empty = (await journal.read_bytes(["comedy"]))["comedy"].memories
    await put(journal, "persona", "x" * 10_000, versions_max=2)
    await put(journal, "persona", "y" * 10_000, versions_max=2)
    two = (await journal.read_bytes(["comedy"]))["comedy"].memories
    assert 20_000 < two - empty < 21_000
    await put(journal, "persona", "z" * 10_000, versions_max=2)
    assert (await journal.read_bytes(["comedy"]))["comedy"].memories == two
    await journal.blocks.delete_block(PERSONA, None)
    assert (await journal.read_bytes(["comedy"]))["comedy"].memories == empty


def standing(text: str) -> Decide:
    return lambda _old: BlockContent(text, standing=StandingAnswer(StandingQuestion("Who is Joy?")))


async def test_the_state_of_an_earlier_version_changes_nothing(journal: SqlJournal) -> None:
    """A question that is replaced during its recall is not held by what was found for the earlier one."""
    asked = await journal.blocks.write_block(PERSONA, standing(""), writing())
    replaced = await journal.blocks.write_block(PERSONA, standing("x"), writing())
    await journal.blocks.set_state("u1", "persona", StandingState(9, 0, 20), asked.version)
    assert (await journal.blocks.find_due(9, 9)).each == (("u1", "persona"),)
    await journal.blocks.set_state("u1", "persona", StandingState(9, 0, 20), replaced.version)
    assert (await journal.blocks.find_due(9, 9)).each == ()


async def test_standing_block_is_due_until_it_holds(journal: SqlJournal) -> None:
    assert await journal.blocks.list_standing() == frozenset()
    await journal.blocks.write_block(PERSONA, standing(""), writing())
    assert await journal.blocks.list_standing() == {"u1"}
    assert (await journal.blocks.find_due(9, 9)).each == (("u1", "persona"),)
    await journal.blocks.set_state("u1", "persona", StandingState(9, 0, 20, "late"))
    due = await journal.blocks.find_due(9, 9)
    assert (due.each, due.next_us) == ((), 20)
    assert (await journal.blocks.find_due(20, 9)).each == (("u1", "persona"),)
    await journal.blocks.set_state("u1", "persona", StandingState(-1, 30, 30))
    read = await journal.blocks.get_block(PERSONA)
    assert read.state == StandingState(9, 30, 30), "the revision does not fall"
    assert await journal.blocks.list_blocks(JOY, "", 9) == [read]
    await put(journal, "persona", "x")
    assert (await journal.blocks.find_due(99, 9)).each == ()
    await journal.blocks.write_block(PERSONA, standing(""), writing())
    assert await journal.blocks.delete_block(PERSONA, None)
    assert await journal.blocks.list_standing() == frozenset()


async def test_due_blocks_of_other_servers_hide_none(journal: SqlJournal) -> None:
    await journal.create_memory(record("u2", "fear"), ())
    for name in ("a", "b", "c"):
        await journal.blocks.write_block(BlockName(JOY, name), standing(""), writing())
    await journal.blocks.write_block(BlockName(MemoryName("comedy", "fear"), "d"), standing(""), writing())
    assert await find_own_due(journal.blocks, lambda uid: uid == "u2", 9, most=1) == [("u2", "d")]
    assert await find_own_due(journal.blocks, lambda uid: uid == "u3", 9, most=1) == []


async def test_rounds_serve_all_blocks_that_are_always_due(journal: SqlJournal) -> None:
    """Also if each round has room for fewer than are due: those that were served wait behind the others."""
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        await journal.blocks.write_block(BlockName(JOY, name), standing(""), writing())
    served: list[str] = []
    for _ in range(5):
        for uid, name in await find_own_due(journal.blocks, lambda _: True, len(served) + 1, most=2):
            served.append(name)
            await journal.blocks.set_state(uid, name, StandingState(-1, len(served)))
    assert served == [*names, *names]


async def test_text_made_of_what_is_gone_is_not_written(journal: SqlJournal) -> None:
    made = Writing(1_000, "key:ann", 9, 9, StandingState(), {"u1": {"f1": "gone"}})
    with pytest.raises(SourcesChanged):
        await journal.blocks.write_block(PERSONA, standing("gone"), made)
    with pytest.raises(NoBlock):
        await journal.blocks.get_block(PERSONA)


USER = MemoryName("comedy", "user")


def made_of_user(text: str) -> Decide:
    question = StandingQuestion("Who is Bob?", scopes=(StandingScope(USER, b""),))
    answer = StandingAnswer(question, sources=(fragment(1).id,), memories=(str(USER),), digest=b"x")
    return lambda _old: BlockContent(text, standing=answer)


async def test_versions_made_of_another_memory_end_with_it(journal: SqlJournal) -> None:
    await journal.create_memory(record("u2", "user"), ())
    await journal.own_memory("u2")
    await journal.commit(replace(transition(1, rows=(row(fragment(1)),), added=1), memory="u2"))
    holds = StandingState(NO_REVISION, 0, None, "", (AskedMemory(USER, "u2", 2),))
    sources = {"u2": {fragment(1).id: fragment(1).content}}
    made = Writing(1_000, "key:ann", 9, 2, holds, sources)
    for text in ("first", "second"):
        await journal.blocks.write_block(PERSONA, made_of_user(text), made)
    await journal.blocks.write_block(PERSONA, made_of_user("copied"), replace(made, sources=None))  # prunes the first
    assert (await journal.blocks.get_block(PERSONA)).state == holds
    assert (await journal.blocks.find_due(1_000, 9)).each == ()
    await journal.delete_memory("u2")
    assert [one.content.text for one in await journal.blocks.list_versions(PERSONA, None, 9)] == [""]
    assert (await journal.blocks.find_due(1_000, 9)).each == (("u1", "persona"),)


async def test_question_follows_the_name_of_a_memory(journal: SqlJournal) -> None:
    await journal.blocks.write_block(PERSONA, made_of_user(""), writing())

    async def settle() -> bool:
        """Whether the block was due; it no longer is."""
        due = (await journal.blocks.find_due(1_000, 9)).each
        asked = await journal.blocks.read_asked("u1", "persona")
        await journal.blocks.set_state("u1", "persona", StandingState(NO_REVISION, 0, asked=asked))
        assert (await journal.blocks.find_due(1_000, 9)).each == ()
        return due == (("u1", "persona"),)

    assert await settle()
    assert await journal.blocks.read_asked("u1", "persona") == (AskedMemory(USER),)
    for uid in ("u2", "u3"):
        await journal.create_memory(record(uid, "user"), ())
        assert await settle()
        assert await journal.blocks.list_standing() == {"u1", uid}
        await journal.own_memory(uid)
        await journal.commit(replace(transition(1), memory=uid))
        assert await settle()
        await journal.delete_memory(uid)
        assert await settle()
    await journal.create_memory(record("u4", "user"), ())
    assert await settle()
    await journal.blocks.forget_asked()
    assert await settle()
