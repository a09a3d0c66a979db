"""Writes of every kind and everything that they change, for tests that make them fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from memstream_server.adapters.journal.store import SqlJournal
from memstream_server.ports.blocks import BlockContent, BlockName, MemoryName, Writing
from memstream_server.ports.conversations import ConversationName, Message, MessageQuery, Plan, PlanQuery
from memstream_server.ports.journal.records import Answer, IndexEntry, Job
from memstream_server.ports.journal.rows import Anchor
from memstream_server.ports.journal.writing import Access, Accesses, Commit
from memstream_server.ports.operations import Operation
from tests.journal.samples import MODEL, fragment, receipt, record, row, transition
from tests.support.waiting import until


def everything() -> Commit:
    """The second commit of a memory, with every part set."""
    return transition(
        2,
        rows=(row(fragment(1)), row(fragment(2, model=""))),
        removed=(fragment(0).id,),
        anchors=(Anchor(fragment(1).id, None, ()),),
        released=(fragment(2).id,),
        stored_positions=(0,),
        producers=(("p", 2),),
        index=(IndexEntry("u1", fragment(1).id),),
        jobs=(Job("j", "u1", "insight", "{}"),),
        finish_jobs=("i",),
    )


TALK = ConversationName("comedy", "talk")
PLANS = (Plan(1, "look"), Plan(2, "tell"))
_ANSWER = Answer("comedy\nDo\nr1", b"d", b"done", 1)
BLOCK, CONTENT = BlockName(MemoryName("comedy", "joy"), "persona"), BlockContent("I am Joy")
_OPERATION = Operation("o1", "purge", "comedy", "joy", "{}")

WRITES: dict[str, Callable[[SqlJournal], Any]] = {
    "commit": lambda journal: journal.commit(everything()),
    "receive": lambda journal: journal.receive(receipt(3, 2, 10)),
    "create": lambda journal: journal.create_memory(record("u2", "sad"), ()),
    "delete": lambda journal: journal.delete_memory("u1"),
    "own_memory": lambda journal: journal.own_memory("u1"),
    "open_producer": lambda journal: journal.open_producer("u1", 1, "q"),
    "add_accesses": lambda journal: journal.add_accesses(Accesses("u1", 1, (Access(fragment(9).id, 1, 1),))),
    "append": lambda journal: journal.conversations.append_message(TALK, Message("ann"), 1, lambda _: _ANSWER),
    "complete": lambda journal: journal.conversations.complete_conversation(TALK, 1, lambda _: _ANSWER),
    "save_plans": lambda journal: journal.conversations.save_plans(TALK, PLANS, 1, lambda _: _ANSWER),
    "stage": lambda journal: journal.conversations.stage_rows("o1.talk", 1, [Message("ann", number=1)], PLANS),
    "block": lambda journal: journal.blocks.write_block(
        BLOCK, lambda _: CONTENT, Writing(1, "", 9, 9), lambda _: _ANSWER
    ),
    "operation": lambda journal: journal.operations.create(_OPERATION, _ANSWER),
}


async def run_in_one_group(journal: SqlJournal, *writes: Awaitable[object]) -> list[object]:
    """Results or errors of writes that the writer finds waiting together."""

    async def all_wait() -> bool:
        return journal._writer.waiting == len(writes)

    together = threading.Event()
    holding = asyncio.create_task(journal._writer.run_exclusively(together.wait))
    writing = asyncio.gather(*writes, return_exceptions=True)
    await until(all_wait)
    together.set()
    await holding
    return await writing


async def seen(journal: SqlJournal) -> object:
    """Everything that the ports show of both memories, of conversations and operations."""
    records = await journal.list_memories("comedy", "", 9)
    images = [await journal.load_memory(one.uid, MODEL, 9) for one in records]
    events = [await journal.list_events(one.uid, 0, 9) for one in records]
    held = [[one.fragment for one in image.short_term] for image in images]
    plain = [(image.record, image.rows, image.pending, image.producers, image.next_position) for image in images]
    besides = (
        await talked(journal),
        [await journal.blocks.list_blocks(MemoryName("comedy", one.name), "", 9) for one in records],
        await journal.operations.list_page("", "", "", 9),
        await journal.get_answer(_ANSWER.request),
    )
    return besides, plain, held, events, await journal.read_outbox(9), await journal.list_jobs(9)


async def talked(journal: SqlJournal) -> object:
    """Everything of all conversations, staged ones included."""
    talks = journal.conversations
    names = [ConversationName(space, name) for space in ("", "comedy") for name in await talks.list_names(space, "", 9)]
    return [
        (
            name,
            await talks.get_status(name),
            await talks.list_messages(name, MessageQuery()),
            await talks.list_plans(name, PlanQuery()),
        )
        for name in names
    ]
