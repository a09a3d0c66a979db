"""Versions and reads of the past through the SDK, on a real server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import memstream
from memstream import EventType, MemoryKind, Observation
from memstream.errors import CursorCompacted, CursorVoid, EtagMismatch, FragmentNotFound, InvalidRequest
from tests.server.listing import fragments


async def moved(client: memstream.Client, path: str) -> tuple[memstream.Memory, str, int]:
    """(memory, id of a fragment that was changed once, the revision before the change)."""
    memory = await client.create_memory(path, kind=MemoryKind.LONG_TERM)
    put = await memory.put_fragment(Observation("Bob lives in Paris", external_id="home"))
    assert put.fragment is not None
    await memory.put_fragment(Observation("Bob lives in Rome", external_id="home"))
    return memory, put.fragment.id, put.revision


async def test_history_and_the_past_show_what_was_said(client: memstream.Client, path: str) -> None:
    memory, id_, before = await moved(client, path)
    history = await memory.fragment_history(external_id="home")
    (version,) = history.versions
    assert (history.fragment.content, version.fragment.content) == ("Bob lives in Rome", "Bob lives in Paris")
    assert (version.replaced_by, version.version, version.principal) == (EventType.UPDATED, before + 1, "")
    assert version.fragment.etag == ""
    assert version.replace_time is not None
    for as_of in (before, version.replace_time - timedelta(microseconds=1)):
        assert (await memory.get_fragment(id_, as_of=as_of)).content == "Bob lives in Paris"
        listed = [fragment async for fragment in memory.list_fragments(as_of=as_of)]
        assert [(one.content, one.etag) for one in listed] == [("Bob lives in Paris", "")]
        answer = await memory.recall_once("where does Bob live?", as_of=as_of)
        assert [hit.fragment.content for hit in answer] == ["Bob lives in Paris"]
        assert (answer.revision, answer.as_of_revision, answer.degraded) == (before, before, "")
    async with memory.recall() as recalls:
        assert (await recalls.query("Bob", as_of=before))[0].fragment.content == "Bob lives in Paris"
        assert (await recalls.query("Bob"))[0].fragment.content == "Bob lives in Rome"


async def test_restoring_checks_the_etag_and_the_version(client: memstream.Client, path: str) -> None:
    memory, id_, before = await moved(client, path)
    revision = (await memory.describe()).revision
    with pytest.raises(EtagMismatch):
        await memory.restore_version(id_, before + 1, etag="stale")
    for version in (before, 10**12):
        with pytest.raises(FragmentNotFound):
            await memory.restore_version(id_, version)
    with pytest.raises(InvalidRequest):
        await memory.restore_version(id_, 0)
    assert (await memory.describe()).revision == revision
    info = await memory.describe()
    async with memory.watch(memstream.Cursor(info.uid, revision)) as events:
        restored = await memory.restore_version(id_, before + 1, etag=(await memory.get_fragment(id_)).etag)
        event = await anext(events)
    assert restored.content == "Bob lives in Paris"
    assert (event.type, event.fragment_id, event.version) == (EventType.UPDATED, id_, before + 1)
    assert [one.fragment.content for one in (await memory.fragment_history(id_)).versions] == [
        "Bob lives in Rome",
        "Bob lives in Paris",
    ]


async def test_a_moment_that_is_not_kept_is_refused(client: memstream.Client, path: str) -> None:
    memory, id_, _ = await moved(client, path)
    await memory.update(policy={"history": {"versions": 1}})
    last = (await memory.put_fragment(Observation("Bob lives in Oslo", external_id="home"))).revision
    with pytest.raises(CursorCompacted) as error:
        await memory.get_fragment(id_, as_of=1 + 1)
    assert int(error.value.details["oldest_revision"]) < last
    with pytest.raises(CursorCompacted):
        await memory.recall_once("Bob", as_of=2)
    with pytest.raises(CursorCompacted):
        await fragments_as_of(memory, 0)
    for future in (last + 1, datetime(2999, 1, 1, tzinfo=UTC)):
        with pytest.raises(CursorVoid):
            await memory.get_fragment(id_, as_of=future)
        with pytest.raises(CursorVoid):
            await fragments_as_of(memory, future)
        with pytest.raises(CursorVoid):
            await memory.recall_once("Bob", as_of=future)
    with pytest.raises(InvalidRequest, match="min_revision"):
        await memory.recall_once("Bob", as_of=last, min_revision=last)
    assert [one.content for one in await fragments(memory)] == ["Bob lives in Oslo"]


async def fragments_as_of(memory: memstream.Memory, as_of: int | datetime) -> list[str]:
    return [one.content async for one in memory.list_fragments(as_of=as_of)]


async def test_a_standing_query_cannot_be_of_the_past(client: memstream.Client, path: str) -> None:
    memory, _, before = await moved(client, path)
    async with memory.recall() as recalls:
        with pytest.raises(InvalidRequest, match="as_of"):
            async with recalls.subscribe("Bob", as_of=before) as changes:
                await anext(changes)
