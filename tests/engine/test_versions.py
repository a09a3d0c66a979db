"""The history of a fragment: what is kept, who replaced it, what erasing removes, and how far back a read reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memstream_server.adapters.models.hashing import HashingEmbedder
from memstream_server.core.events import EventType
from memstream_server.core.filters import Listing
from memstream_server.core.policy import DEFAULT, with_value
from memstream_server.core.values import Fragment, MemoryKind, Tier
from memstream_server.engine.errors import CursorCompacted, CursorVoid, EngineError, EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AsOf, MemoryChange, Query, fragment_etag
from memstream_server.engine.runtime.call_context import PRINCIPAL
from memstream_server.engine.runtime.clock import Clock
from memstream_server.ports.journal.records import FragmentVersion
from tests.engine.assembled import NAMESPACE, assembled, check, events_of
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_fragments import create, keyed, live, observe
from tests.support.scripted_models import VECTOR_BYTES

JOY = (NAMESPACE, "joy")
DAY_US = 86_400_000_000


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: SettableClock) -> AsyncIterator[PartsEngine]:
    async with assembled(tmp_path, clock=Clock(now_us=clock.now_us), maintenance_interval_s=3_600.0) as parts:
        yield parts.engine


async def change(engine: PartsEngine, id_: str, **values: object) -> int:
    wanted = FragmentChange(id=id_, **values)  # type: ignore[arg-type]  # tests name real fields
    return (await engine.fragments.update(*JOY, wanted))[1]


async def history(engine: PartsEngine, id_: str) -> list[FragmentVersion]:
    return (await engine.fragments.read_history(*JOY, id_))[1]


async def said(engine: PartsEngine, id_: str) -> list[str]:
    return [one.fragment.content for one in await history(engine, id_)]


async def at(engine: PartsEngine, id_: str, revision: int) -> str:
    return (await engine.past.get(*JOY, AsOf(revision=revision), id_))[0].content


async def test_an_update_keeps_what_was_said_and_who_replaced_it(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine)
    (id_,) = await observe(engine, keyed("lives in Paris"))
    PRINCIPAL.set("key:alice")
    first = await change(engine, id_, content="lives in Rome")
    PRINCIPAL.set("key:bob")
    await observe(engine, keyed("lives in Oslo"))
    PRINCIPAL.set("")
    versions = await history(engine, id_)
    assert [(one.fragment.content, one.principal, one.event) for one in versions] == [
        ("lives in Rome", "key:bob", EventType.UPDATED),
        ("lives in Paris", "key:alice", EventType.UPDATED),
    ]
    assert versions[1].replaced == first
    assert abs(versions[1].time_us - clock.now_us()) < 60_000_000
    assert [await at(engine, id_, one.replaced - 1) for one in versions] == ["lives in Rome", "lives in Paris"]


async def test_the_oldest_versions_beyond_the_policy_go(engine: PartsEngine) -> None:
    await create(engine, with_value(DEFAULT, "history.versions", 2))
    (id_, other) = await observe(engine, "one", "untouched")
    revisions = [await change(engine, id_, content=text) for text in ("two", "three", "four")]
    assert await said(engine, id_) == ["three", "two"]
    assert await at(engine, id_, revisions[0]) == "two"
    with pytest.raises(CursorCompacted) as error:
        await at(engine, id_, revisions[0] - 1)
    assert error.value.details == {"oldest_revision": str(revisions[0])}
    assert await at(engine, other, revisions[0] - 1) == "untouched"
    for reading in (
        engine.past.list_page(*JOY, AsOf(revision=revisions[0] - 1), Listing(), -1, 9),
        engine.recall(*JOY, Query(text="one", as_of=AsOf(revision=revisions[0] - 1))),
    ):
        with pytest.raises(CursorCompacted):
            await reading


async def test_versions_go_after_the_time_of_the_policy(engine: PartsEngine, clock: SettableClock) -> None:
    await create(engine, with_value(DEFAULT, "history.version_retention_s", 86_400))
    (id_,) = await observe(engine, "one")
    await change(engine, id_, content="two")
    clock.offset_us += DAY_US + 1_000_000
    assert await said(engine, id_) == ["one"]
    await engine.run_maintenance()
    assert await said(engine, id_) == []


async def test_no_versions_are_kept_when_the_policy_is_off(engine: PartsEngine) -> None:
    uid = await create(engine)
    (id_,) = await observe(engine, "one")
    await change(engine, id_, content="two")
    await engine.memories.update(*JOY, MemoryChange(policy=with_value(DEFAULT, "history.versions", 0)))
    assert await said(engine, id_) == []
    now = await change(engine, id_, content="three")
    assert await said(engine, id_) == []
    with pytest.raises(CursorCompacted):
        await at(engine, id_, now - 1)
    assert await at(engine, id_, now) == "three"
    assert [one.type for one in await events_of(engine, uid)].count(EventType.UPDATED) == 2


async def test_restoring_a_version_is_a_change_that_names_it(engine: PartsEngine) -> None:
    uid = await create(engine)
    (id_,) = await observe(engine, observation("lives in Paris", metadata=(("sure", True),), importance=0.9))
    version = await change(engine, id_, content="lives in Rome", metadata=(), importance=0.1, pinned=True)
    etag = fragment_etag((await live(engine))[0])
    with pytest.raises(EtagMismatch):
        await engine.fragments.restore_version(*JOY, id_, version, "stale")
    restored, revision = await engine.fragments.restore_version(*JOY, id_, version, etag)
    assert (restored.content, restored.importance, restored.pinned) == ("lives in Paris", 0.9, True)
    assert restored.metadata == (("sure", True),)
    event = (await events_of(engine, uid))[-1]
    assert (event.type, event.fragment, event.version) == (EventType.UPDATED, id_, version)
    assert await said(engine, id_) == ["lives in Rome", "lives in Paris"]
    answer = await engine.recall(*JOY, Query(text="Paris", reinforce=False))
    assert answer.revision == revision
    assert answer.recollections[0].scored.relevance > 0
    await check(engine, "joy")


@pytest.mark.parametrize("version", [1, 2, 99])
async def test_an_unknown_version_changes_nothing(engine: PartsEngine, version: int) -> None:
    await create(engine)
    (id_,) = await observe(engine, "one")
    await change(engine, id_, content="two")
    before = await engine.memories.get(*JOY)
    with pytest.raises(FragmentNotFound):
        await engine.fragments.restore_version(*JOY, id_, version)
    with pytest.raises(FragmentNotFound):
        await engine.fragments.read_history(*JOY, "0" * 26)
    assert await engine.memories.get(*JOY) == before


async def test_the_restored_vector_of_a_client_is_its_own(engine: PartsEngine) -> None:
    await create(engine, kind=MemoryKind.LONG_TERM)
    vector = HashingEmbedder().vectors(["a tree"])[0]
    (id_,) = await observe(engine, observation("one", vector=vector))
    version = await change(engine, id_, content="two")
    await engine.fragments.restore_version(*JOY, id_, version)
    query = Query(text="nothing of that", vector=vector, reinforce=False)
    (found,) = (await engine.recall(*JOY, query)).recollections
    assert found.scored.cosine == pytest.approx(1.0, abs=1e-6)
    assert found.fragment.own_vector


async def erased(engine: PartsEngine, *ids: str) -> None:
    operation = await engine.erasing.start(*JOY, ids)
    await engine.operations.wait_for_end(operation.id)


async def test_erasing_and_clearing_remove_the_versions(engine: PartsEngine) -> None:
    uid = await create(engine)
    one, two, three = await observe(engine, "one", "two", "three")
    for id_ in (one, two, three):
        await change(engine, id_, content=f"{id_} changed")
    await erased(engine, one)
    assert set(await engine.journal.version_keys(uid)) == {two, three}
    await engine.fragments.clear(*JOY, [Tier.SHORT_TERM])
    assert await engine.journal.version_keys(uid) == {}
    await check(engine, "joy")


async def test_an_erased_fragment_is_absent_from_the_past(engine: PartsEngine) -> None:
    await create(engine)
    one, two = await observe(engine, "one tree", "two trees")
    before = (await engine.memories.get(*JOY)).revision
    await change(engine, one, content="one house")
    await erased(engine, one)
    as_of = AsOf(revision=before)
    listed = (await engine.past.list_page(*JOY, as_of, Listing(), -1, 9))[0]
    assert [fragment.id for fragment in listed] == [two]
    with pytest.raises(FragmentNotFound):
        await at(engine, one, before)
    answer = await engine.recall(*JOY, Query(text="tree", as_of=as_of))
    assert [found.fragment.id for found in answer.recollections] == [two]
    assert answer.degraded == "1 fragments of that revision have left the memory since"
    assert answer.as_of_revision == answer.revision == before


MERGING = with_value(
    replace(DEFAULT, short_term=replace(DEFAULT.short_term, merge_content=True, similarity_min=0.5)),
    "short_term.enhance_threshold",
    1,
)


async def test_erasing_a_source_removes_versions_that_hold_its_words(engine: PartsEngine) -> None:
    uid = await create(engine, MERGING)
    (anchor,) = await observe(engine, "Bob likes green tea")
    (source,) = await observe(engine, "Bob likes green tea today")
    merged = next(one for one in await live(engine) if one.id == anchor)
    assert (merged.content, merged.sources) == ("Bob likes green tea;Bob likes green tea today", (source,))
    assert [one.event for one in await history(engine, anchor)] == [EventType.PROMOTED]
    before = (await engine.memories.get(*JOY)).revision
    await change(engine, anchor, content=f"{merged.content};and coffee")
    await erased(engine, source)
    assert (await live(engine))[0].content == "Bob likes green tea;and coffee"
    assert await engine.journal.version_keys(uid) == {}
    assert (await engine.past.list_page(*JOY, AsOf(revision=before), Listing(), -1, 9))[0] == []
    await check(engine, "joy")


async def test_erasing_a_source_that_is_gone_removes_versions(engine: PartsEngine) -> None:
    """The version holds words that neither the content nor the policy shows any more."""
    uid = await create(engine, MERGING)
    (anchor,) = await observe(engine, "Bob likes green tea")
    (source,) = await observe(engine, "Bob likes green tea today")
    await change(engine, anchor, content="Bob likes coffee")
    await engine.fragments.clear(*JOY, [Tier.SHORT_TERM])
    plain = with_value(MERGING, "short_term.merge_content", False)
    await engine.memories.update(*JOY, MemoryChange(policy=plain))
    assert await said(engine, anchor) == ["Bob likes green tea;Bob likes green tea today", "Bob likes green tea"]
    await erased(engine, source)
    assert await engine.journal.version_keys(uid) == {}
    assert [(one.content, one.sources) for one in await live(engine)] == [("Bob likes coffee", ())]


@pytest.mark.parametrize(
    ("as_of", "expected"),
    [
        (AsOf(revision=0), CursorCompacted),
        (AsOf(time_us=0), CursorCompacted),
        (AsOf(revision=99), CursorVoid),
        (AsOf(time_us=32_503_680_000_000_000), CursorVoid),
    ],
)
async def test_a_moment_out_of_range_is_refused(engine: PartsEngine, as_of: AsOf, expected: type[EngineError]) -> None:
    await create(engine)
    (id_,) = await observe(engine, "one")
    for reading in (
        engine.past.get(*JOY, as_of, id_),
        engine.past.list_page(*JOY, as_of, Listing(), -1, 9),
        engine.recall(*JOY, Query(text="one", as_of=as_of)),
    ):
        with pytest.raises(expected) as error:
            await reading
        if expected is CursorCompacted:
            assert error.value.details == {"oldest_revision": "1"}


async def test_a_pruned_log_reaches_as_far_as_it_is_exact(engine: PartsEngine, clock: SettableClock) -> None:
    uid = await create(engine, with_value(DEFAULT, "retention.event_retention_s", 3_600))
    (old,) = await observe(engine, "from before")
    clock.offset_us += DAY_US
    await engine.run_maintenance()
    (new,) = await observe(engine, "after it")
    first = (await engine.journal.list_events(uid, 0, 1))[0].revision
    assert first > 2
    assert [await at(engine, id_, first) for id_ in (old, new)] == ["from before", "after it"]
    with pytest.raises(CursorCompacted):
        await at(engine, old, first - 2)
    touched = await change(engine, old, importance=0.1)
    with pytest.raises(CursorCompacted) as error:
        await at(engine, old, first)
    assert error.value.details == {"oldest_revision": str(touched)}
    assert await at(engine, new, first) == "after it"


async def test_a_memory_too_large_for_ram_has_a_past(tmp_path: Path) -> None:
    async with assembled(tmp_path, dense_bytes_max=2 * VECTOR_BYTES) as parts:
        engine = parts.engine
        await create(engine, kind=MemoryKind.LONG_TERM)
        ids = await observe(engine, "the otter eats fish", *[f"tea number {number}" for number in range(6)])
        query = Query(text="what does the otter eat?", reinforce=False, now_us=1, limit=1, alpha=0.0)
        then = await engine.recall(*JOY, query)
        await change(engine, ids[0], content="a concert in Ulm")
        assert (await engine.recall(*JOY, query)).best_relevance < then.best_relevance
        past = await engine.recall(*JOY, msgspec.structs.replace(query, as_of=AsOf(revision=then.revision)))
        assert [one.fragment.content for one in past.recollections] == ["the otter eats fish"]
        assert past.recollections[0].scored.score == then.recollections[0].scored.score
        assert past.recollections[0].scored.cosine == then.recollections[0].scored.cosine


async def test_pages_of_the_past_continue_where_they_ended(engine: PartsEngine) -> None:
    await create(engine)
    ids = await observe(engine, *[f"thing {number}" for number in range(7)])
    as_of = AsOf(revision=(await engine.memories.get(*JOY)).revision)
    await engine.fragments.forget(*JOY, ids[2:4])
    await observe(engine, "later")
    seen: list[Fragment] = []
    after: int | None = -1
    while after is not None:
        page, after, _, _ = await engine.past.list_page(*JOY, as_of, Listing(), after, 3)
        seen += page
    assert [one.id for one in seen] == ids
    assert {fragment_etag(one) for one in seen} == {""}
