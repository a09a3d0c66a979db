"""Complete contents and history of a memory, read through the SDK."""

from __future__ import annotations

import asyncio
from collections import Counter

import memstream
from memstream import Cursor, Event, EventType, Fragment, Memory

GONE = frozenset({EventType.FILTERED, EventType.DROPPED, EventType.MERGED, EventType.ERASED})
"""Events after which a fragment is gone."""


async def fragments(memory: Memory, forgotten: bool = False) -> list[Fragment]:
    """All live fragments (or all forgotten ones), in order of receipt."""
    return [one async for one in memory.list_fragments(forgotten=forgotten)]


async def contents(memory: Memory) -> list[str]:
    """The texts of all live fragments, in order of receipt."""
    return [one.content for one in await fragments(memory)]


async def refusal_of_revision(memory: Memory, what: str, revision: int) -> memstream.RevisionNotReached:
    """The refusal of a recall at a revision that does not come.

    The server gives its reason half a second before the deadline. If the machine stalls longer than that, the client
    sees its deadline first, and the query is sent again.
    """
    for _ in range(5):
        try:
            await memory.recall_once(what, min_revision=revision, timeout_s=3.0)
        except memstream.RevisionNotReached as error:
            return error
        except memstream.DeadlineExceeded:
            continue
        raise AssertionError("the recall was answered at a revision that no write has reached")
    raise AssertionError("the deadline passed in every try before the server gave its reason")


async def history(memory: Memory, since: Cursor | None = None) -> list[Event]:
    """Every event so far; a change of the labels marks the end."""
    found: list[Event] = []
    revision = (await memory.update(labels={"mark": "now"})).revision
    async with memory.watch(since or "beginning") as watch:
        while not found or found[-1].cursor.revision < revision:
            found.append(await asyncio.wait_for(anext(watch), 60))
    return found


async def observed_once(memory: Memory) -> int:
    """Number of observations in the events: each entered once, and is listed or left with an event."""
    events = await history(memory)
    entered = Counter(one.fragment_id for one in events if one.type is EventType.OBSERVED)
    assert set(entered.values()) <= {1}
    gone = {one.fragment_id for one in events if one.type in GONE}
    listed = {one.id for one in await fragments(memory)} | {one.id for one in await fragments(memory, forgotten=True)}
    assert listed == set(entered) - gone
    return len(entered) + sum(one.type in (EventType.REPEATED, EventType.ECHOED) for one in events)


async def listed_twice(memory: Memory) -> list[str]:
    """Contents that occur more than once."""
    return [words for words, count in Counter(await contents(memory)).items() if count > 1]


async def indexed(client: memstream.Client, *memories: Memory) -> bool:
    """Whether the vector index has everything of these memories."""
    info = await client.server_info()
    failing = [f"{one.role} {one.model} fails: {one.last_error}" for one in info.models if one.last_error]
    if info.degraded != "; ".join(failing):
        return False
    return all([(await memory.stats()).unindexed == 0 for memory in memories])
