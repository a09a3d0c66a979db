"""Fragments changed by request: ids and filters, etags, and answers to repeats that survive a restart."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from memstream_server.core.events import Event, EventType
from memstream_server.core.filters import Filter, Listing
from memstream_server.core.policy import DEFAULT, Policy, with_value
from memstream_server.core.values import Fragment, MemoryKind, Tier
from memstream_server.engine import lifecycle
from memstream_server.engine.errors import AlreadyAnswered, EtagMismatch, FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, ChangeCount, NewMemory, Once, Put, Query, fragment_etag
from memstream_server.ports.journal.records import Answer
from tests.engine.conftest import OpenEngine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation

NAME = ("ns", "m")


async def create(engine: PartsEngine, kind: MemoryKind = MemoryKind.LONG_TERM, **overrides: object) -> None:
    policy: Policy = DEFAULT
    for name, value in overrides.items():
        policy = with_value(policy, name.replace("__", "."), value)
    await engine.memories.create(NewMemory(*NAME, kind, policy))


async def tell(engine: PartsEngine, *contents: str, **fields: object) -> list[str]:
    items = [observation(content, **fields) for content in contents]  # type: ignore[arg-type]  # real fields
    done = await engine.observe_batch(*NAME, "", 1, items, AckLevel.STORED)
    return [outcome.fragment for outcome in done.outcomes]


async def listed(engine: PartsEngine, forgotten: bool = False) -> list[Fragment]:
    return (await engine.fragments.list_page(*NAME, Listing(forgotten=forgotten), -1, 10_000))[0]


async def told(engine: PartsEngine, *types: EventType) -> list[Event]:
    found: list[Event] = []
    revision = (await engine.memories.get(*NAME)).revision
    steps = engine.watch(*NAME, "", 0, 0)
    async for _, seen, _, events in steps:
        found += [event for event in events if event.type in types]
        if seen == revision:
            break
    await steps.aclose()
    return found


@dataclass
class Kept:
    """Makes answers from results and remembers them."""

    key: str = "ns\nCall\nr1"
    result: object = None

    def once(self) -> Once[object]:
        def answer(result: object) -> Answer:
            self.result = result
            return Answer(self.key, b"digest", repr(result).encode(), time.time_ns() // 1_000)

        return Once(self.key, answer)


# ---- put
async def test_put_observes_and_then_updates_by_key(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    first = await engine.fragments.put(*NAME, observation("tea at four", external_id="tea"))
    assert first.fragment is not None
    assert (first.created, first.fragment.tier) == (True, Tier.SHORT_TERM)
    again = await engine.fragments.put(*NAME, observation("tea at five", external_id="tea"))
    assert again.fragment is not None
    assert (again.created, again.fragment.id, again.fragment.content) == (False, first.fragment.id, "tea at five")
    assert again.revision == first.revision + 1
    assert [one.content for one in await listed(engine)] == ["tea at five"]
    read, _, revision = await engine.fragments.get(*NAME, external_id="tea")
    assert (read, revision) == (again.fragment, again.revision)


async def test_put_needs_the_current_etag(engine: PartsEngine) -> None:
    await create(engine)
    with pytest.raises(EtagMismatch):
        await engine.fragments.put(*NAME, observation("a", external_id="k"), etag="any")
    first = (await engine.fragments.put(*NAME, observation("a", external_id="k"))).fragment
    assert first is not None
    second = (await engine.fragments.put(*NAME, observation("b", external_id="k"), etag=fragment_etag(first))).fragment
    assert second is not None
    with pytest.raises(EtagMismatch) as refused:
        await engine.fragments.put(*NAME, observation("c", external_id="k"), etag=fragment_etag(first))
    assert refused.value.details["etag"] == fragment_etag(second)
    assert [one.content for one in await listed(engine)] == ["b"]


async def test_put_restores_a_forgotten_fragment(engine: PartsEngine) -> None:
    await create(engine)
    first = (await engine.fragments.put(*NAME, observation("the harbour is closed", external_id="k"))).fragment
    assert first is not None
    await engine.fragments.forget(*NAME, [first.id])
    assert not (await engine.recall(*NAME, Query(text="harbour"))).recollections
    again = await engine.fragments.put(*NAME, observation("the harbour is open", external_id="k"))
    assert again.fragment is not None
    assert (again.fragment.id, again.fragment.forget_time_us, again.created) == (first.id, None, False)
    answer = await engine.recall(*NAME, Query(text="harbour open"))
    assert [found.fragment.content for found in answer.recollections] == ["the harbour is open"]


async def test_put_returns_no_fragment_that_the_policy_drops(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.SENSORY, sensory__capacity=0)
    put = await engine.fragments.put(*NAME, observation("gone", external_id="k"))
    assert (put.fragment, put.created) == (None, False)
    assert await listed(engine) == []


# ---- update
async def test_update_changes_given_fields_and_recall_finds_new_text(engine: PartsEngine) -> None:
    await create(engine)
    (id_,) = await tell(engine, "the ferry leaves at noon", expire_time_us=2**61)
    before = (await engine.fragments.get(*NAME, id=id_))[0]
    change = FragmentChange(
        id=id_,
        content="the ferry leaves at dusk",
        importance=0.9,
        metadata=(("port", "north"),),
        pinned=True,
        never_expires=True,
        etag=fragment_etag(before),
    )
    changed, revision = await engine.fragments.update(*NAME, change)
    assert (changed, revision) == ((await engine.fragments.get(*NAME, id=id_))[0], changed.version)
    assert (changed.importance, changed.metadata, changed.pinned) == (0.9, (("port", "north"),), True)
    assert changed.expire_time_us is None
    assert fragment_etag(changed) != fragment_etag(before)
    found = (await engine.recall(*NAME, Query(text="dusk", min_relevance=0.1))).recollections
    assert [one.fragment.id for one in found] == [id_]
    assert not (await engine.recall(*NAME, Query(text="noon", min_relevance=0.1))).recollections
    with pytest.raises(EtagMismatch):
        await engine.fragments.update(*NAME, change)
    with pytest.raises(FragmentNotFound):
        await engine.fragments.update(*NAME, FragmentChange(id="0" * 26, pinned=True))


# ---- forget and restore
async def test_forget_by_filter_takes_only_matches(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    await tell(engine, *(f"monday {n}" for n in range(15)), session="monday")
    await tell(engine, *(f"tuesday {n}" for n in range(5)), session="tuesday")
    gone = await engine.fragments.forget(*NAME, Filter(sessions=("monday",)))
    assert gone == ChangeCount(15, (await engine.memories.get(*NAME)).revision)
    assert {one.session for one in await listed(engine)} == {"tuesday"}
    assert (await engine.fragments.forget(*NAME, Filter(sessions=("monday",)))).count == 0
    back = await engine.fragments.restore(*NAME, Filter(sessions=("monday",)))
    assert back.count == 15
    assert len(await listed(engine)) == 20
    assert await listed(engine, forgotten=True) == []


async def test_a_large_request_is_several_decisions(engine: PartsEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "BATCH", 4)
    monkeypatch.setattr(lifecycle, "PAGE", 3)
    await create(engine)
    ids = await tell(engine, *(f"line {n}" for n in range(10)))
    kept = Kept()
    gone = await engine.fragments.forget(*NAME, [*ids, "0" * 26], kept.once())  # type: ignore[arg-type]  # any result
    assert gone == kept.result == ChangeCount(10, (await engine.memories.get(*NAME)).revision)
    assert len(await told(engine, EventType.FORGOTTEN)) == 10
    assert (await engine.fragments.restore(*NAME, Filter(tiers=(Tier.LONG_TERM,)))).count == 10


async def test_forget_counts_fragments_not_follow_up_events(engine: PartsEngine) -> None:
    """Forgetting an enhancer weakens its anchor: one more event, but not one more fragment."""
    await create(engine, MemoryKind.HYBRID, short_term__similarity_min=0.0)
    ids = await tell(engine, "tea in the garden", "tea in the garden again")
    assert (await engine.fragments.forget(*NAME, ids[1:])).count == 1
    assert len(await told(engine, EventType.WEAKENED)) == 1


async def test_clear_counts_removed_fragments(engine: PartsEngine) -> None:
    await create(engine)
    ids = await tell(engine, "one", "two", "three")
    await engine.fragments.forget(*NAME, ids[:1])
    assert (await engine.fragments.clear(*NAME, [Tier.SHORT_TERM])).count == 0
    assert (await engine.fragments.clear(*NAME, [Tier.LONG_TERM])).count == 3
    assert await listed(engine) == await listed(engine, forgotten=True) == []
    assert not (await engine.recall(*NAME, Query(text="two"))).recollections


async def test_clear_of_many_fragments_lets_others_write_between(
    engine: PartsEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts: all of a large memory in one transaction kept every other writer waiting for a second."""
    monkeypatch.setattr(lifecycle, "BATCH", 2)
    await create(engine, MemoryKind.HYBRID)
    await tell(engine, "one", "two", "three", "four", "five")
    before = (await engine.memories.get(*NAME)).revision
    new = asyncio.create_task(tell(engine, "six"))  # decided after the first part at the latest
    cleared = await engine.fragments.clear(*NAME, [])
    await new
    kept = [one.content for one in await listed(engine)]
    assert (cleared.count, kept) in [(5, ["six"]), (6, [])]
    assert (await engine.memories.get(*NAME)).revision == before + 4


async def test_clone_copies_structure_without_content(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID, recall__limit=3)
    await tell(engine, "one")
    cloned = await engine.memories.clone(*NAME, "other", "copy")
    source = await engine.memories.get(*NAME)
    assert (cloned.kind, cloned.policy, cloned.labels) == (source.kind, source.policy, source.labels)
    assert cloned.uid != source.uid
    assert cloned.seed != source.seed
    assert (await engine.memories.get_statistics("other", "copy")).counts.short_term == 0


# ---- answers
async def test_answer_commits_with_its_change_and_survives_restart(engines: OpenEngine, tmp_path: Path) -> None:
    kept = Kept()
    async with engines(tmp_path / "data") as engine:
        await create(engine)
        put = await engine.fragments.put(*NAME, observation("once", external_id="k"), once=kept.once())  # type: ignore[arg-type]  # any result
        assert isinstance(kept.result, Put)
        assert kept.result == put
    async with engines(tmp_path / "data") as engine:
        stored = await engine.stored_answer(kept.key)
        assert stored is not None
        assert stored.response == repr(put).encode()
        with pytest.raises(AlreadyAnswered):
            await engine.fragments.put(*NAME, observation("twice", external_id="k"), once=kept.once())  # type: ignore[arg-type]  # any result
        assert [one.content for one in await listed(engine)] == ["once"]


async def test_answer_is_stored_even_if_nothing_changes(engine: PartsEngine) -> None:
    await create(engine)
    before = (await engine.memories.get(*NAME)).revision
    kept = Kept()
    nothing = await engine.fragments.forget(*NAME, ["0" * 26], kept.once())  # type: ignore[arg-type]  # any result
    assert nothing == kept.result == ChangeCount(0, before + 1)
    assert (await engine.memories.get(*NAME)).revision == before + 1
    assert await engine.stored_answer(kept.key) is not None
