"""Writes of every kind, and all that can be seen of their effect: for tests that make them fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memstream_server.ports.journal import Access, Anchor, Commit, IndexEntry, Job, Journal
from tests.journal.conformance import MODEL, fragment, receipt, record, row, transition


def everything() -> Commit:
    """A commit with something in every part, the second of a memory."""
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


WRITES: dict[str, Callable[[Journal], Any]] = {
    "commit": lambda journal: journal.commit(everything()),
    "receive": lambda journal: journal.receive(receipt(3, 2, 10)),
    "create": lambda journal: journal.create_memory(record("u2", "sad"), ()),
    "delete": lambda journal: journal.delete_memory("u1"),
    "own": lambda journal: journal.own("u1"),
    "open_producer": lambda journal: journal.open_producer("u1", 1, "q"),
    "touch": lambda journal: journal.touch("u1", [Access(fragment(9).id, 1, 1)]),
}


async def seen(journal: Journal) -> object:
    """All that the port shows of both memories."""
    records = await journal.list_memories("comedy", "", 9)
    images = [await journal.load(one.uid, MODEL, 9) for one in records]
    events = [await journal.events(one.uid, 0, 9) for one in records]
    held = [[one.fragment for one in image.short_term] for image in images]
    plain = [(image.record, image.rows, image.pending, image.producers, image.next_position) for image in images]
    return plain, held, events, await journal.outbox(9), await journal.jobs(9)
