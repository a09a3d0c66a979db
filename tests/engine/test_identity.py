"""Repeats in long-term and across restarts, filters for the whole answer, folding, and the values that a put
replaces.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.core.events import EventType
from memstream_server.core.filters import Filter, Listing
from memstream_server.core.metadata import Condition
from memstream_server.core.policy import DBGPT
from memstream_server.core.ranking import Stage
from memstream_server.core.replay_events import fold_all, place_of
from memstream_server.core.values import FragmentKind, MemoryKind, Tier
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, AsOf, NewMemory, Query
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.engine.test_by_request import NAME, create, listed, tell, told

KEY = "the key is under the mat"
ALL = tuple(EventType)


async def tell_among_talk(engine: PartsEngine, times: int, session: str = "s") -> list[str]:
    """Send the sentence repeatedly, each time followed by more observations than short-term holds."""
    ids = []
    for number in range(times):
        ids += await tell(engine, KEY, session=session)
        await tell(engine, *(f"line {number} {n} of talk" for n in range(11)), session=session)
    return ids


async def check_fold(engine: PartsEngine) -> None:
    """The events of every fragment equal its listing."""
    there = [*await listed(engine), *await listed(engine, forgotten=True)]
    events = [event for event in await told(engine, *ALL) if event.fragment]
    folded, places = fold_all(events), {one.id: place_of(one) for one in there}
    assert folded.keys() == places.keys()
    for id_, place in places.items():
        assert (folded[id_].duplicate_count, folded[id_].enhancement_count) == (
            place.duplicate_count,
            place.enhancement_count,
        )


async def test_thirty_repeats_make_one_fragment(tmp_path: Path) -> None:
    async with open_engine(tmp_path) as engine:
        await create(engine, MemoryKind.HYBRID)
        first, *_ = await tell_among_talk(engine, 15)
    async with open_engine(tmp_path) as engine:  # the identity index is rebuilt from the journal
        await tell_among_talk(engine, 15)
        alike = [one for one in await listed(engine) if one.content == KEY]
        assert [(one.id, one.tier, one.duplicate_count) for one in alike] == [(first, Tier.LONG_TERM, 29)]
        answer = await engine.recall(*NAME, Query(text="where is the key?", reinforce=False))
        assert [one.fragment.id for one in answer.recollections if one.fragment.content == KEY] == [first]
        await check_fold(engine)


async def test_one_batch_repeats_its_own_fragments(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    texts = [KEY, *(f"line {n} of talk" for n in range(11)), KEY, *(f"more {n} of talk" for n in range(11)), KEY]
    ids = await tell(engine, *texts, session="s")
    alike = [one for one in await listed(engine) if one.content == KEY]
    assert [(one.id, one.duplicate_count) for one in alike] == [(ids[0], 2)]
    await check_fold(engine)


async def test_repeat_refreshes_the_last_access(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.LONG_TERM)
    (first,) = await tell(engine, KEY)
    before, _, _ = await engine.fragments.get(*NAME, id=first)
    await tell(engine, KEY)
    await engine.write_accesses()  # the background task does it every few seconds
    after, _, _ = await engine.fragments.get(*NAME, id=first)
    assert after.access_time_us > before.access_time_us


async def test_repeats_follow_update_forget_and_erase(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.LONG_TERM)
    (first,) = await tell(engine, KEY)
    await engine.fragments.update(*NAME, FragmentChange(id=first, metadata=(("room", "hall"),)))
    (second,) = await tell(engine, KEY)
    (again,) = await tell(engine, KEY, metadata=(("room", "hall"),))
    assert {one.id: one.duplicate_count for one in await listed(engine)} == {first: 1, second: 0}
    await engine.fragments.forget(*NAME, [second])
    (third,) = await tell(engine, KEY)
    await engine.fragments.restore(*NAME, [second])
    await tell(engine, KEY)
    counts = {one.id: one.duplicate_count for one in await listed(engine)}
    assert sorted(counts.values()) == [0, 1, 1]
    assert set(counts) == {first, second, third}
    await engine.fragments.clear(*NAME, [])
    (last,) = await tell(engine, KEY)
    assert [one.id for one in await listed(engine)] == [last]
    assert again not in counts


@pytest.mark.parametrize(
    "chosen",
    [
        Filter(sessions=("a",)),
        Filter(speakers=("bob",)),
        Filter(kinds=(FragmentKind.INSIGHT,)),
        Filter(tiers=(Tier.LONG_TERM,)),
        Filter(observe_from_us=2_000_000),
        Filter(observe_until_us=2_000_000),
        Filter(importance_min=0.6),
        Filter(importance_max=0.6),
        Filter(metadata=(Condition("n", (1,)),)),
        Filter(metadata=(Condition("n", (True,)),)),
    ],
    ids=str,
)
async def test_filter_applies_to_working_memory(engine: PartsEngine, chosen: Filter) -> None:
    await create(engine, MemoryKind.HYBRID)
    alice = {"session": "a", "speaker": "alice", "observe_time_us": 1_000_000, "importance": 0.2}
    bob = {"session": "b", "speaker": "bob", "observe_time_us": 3_000_000, "importance": 0.9}
    (one,) = await tell(engine, "the heron by the canal", metadata=(("n", 1),), **alice)
    (other,) = await tell(engine, "the heron by the lake", metadata=(("n", 2),), **bob)
    plain = await engine.recall(*NAME, Query(text="heron"))
    assert plain.working_ids == (one, other)
    answer = await engine.recall(*NAME, Query(text="heron", filter=chosen, token_budget=1_000))
    ranked = {found.fragment.id for found in answer.recollections}
    assert set(answer.working_ids) == ranked < {one, other}
    assert {found.id for found in answer.working} <= ranked
    excluded = await engine.recall(*NAME, Query(text="heron", filter=Filter(excluded=(one,))))
    assert excluded.working_ids == (other,)
    assert answer.tokens == sum(-(-len(found.fragment.content) // 4) for found in answer.recollections)


async def test_sessions_fold_by_default(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    ids = [id_ for n in range(30) for id_ in await tell(engine, KEY, session=f"s{n}")]
    await tell(engine, *(f"the key number {n} is lost" for n in range(20)), session="other")
    answer = await engine.recall(*NAME, Query(text="is the key under the mat?", reinforce=False, near_misses=50))
    contents = [one.fragment.content for one in answer.recollections]
    assert len(contents) == 10
    assert contents.count(KEY) == 1
    (hit,) = (one for one in answer.recollections if one.fragment.content == KEY)
    assert {*hit.folded, hit.fragment.id} == set(ids)
    folded = {missed.scored.id for missed in answer.near_misses if missed.stage is Stage.FOLDED}
    assert folded == set(hit.folded)
    plain = await engine.recall(*NAME, Query(text="is the key under the mat?", fold=False))
    assert [one.fragment.content for one in plain.recollections].count(KEY) > 1
    assert not any(one.folded for one in plain.recollections)


@pytest.mark.parametrize("fold", [None, True])
async def test_dbgpt_folds_on_request_alone(engine: PartsEngine, fold: bool | None) -> None:
    await engine.memories.create(NewMemory(*NAME, MemoryKind.HYBRID, DBGPT))
    items = [observation(KEY, session=f"s{n}", external_id=f"k{n}") for n in range(8)]
    await engine.observe_batch(*NAME, "", 1, items, AckLevel.STORED)
    answer = await engine.recall(*NAME, Query(text="where is the key?", fold=fold, limit=20))
    there = await listed(engine)
    assert len(answer.recollections) == (1 if fold else len(there))
    assert sum(len(one.folded) for one in answer.recollections) == (len(there) - 1 if fold else 0)


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.LONG_TERM])
@pytest.mark.parametrize("put", [True, False], ids=["put", "observe"])
async def test_put_replaces_all_a_client_gives(tmp_path: Path, kind: MemoryKind, put: bool) -> None:
    full = observation(
        "the heron by the canal",
        external_id="k",
        session="monday",
        speaker="bob",
        importance=0.9,
        observe_time_us=5,
        metadata=(("n", 1),),
        ttl_us=9_000_000_000,
        token_count=7,
    )
    bare = observation("the heron by the lake", external_id="k")
    async with open_engine(tmp_path) as engine:
        await create(engine, kind)
        for new in (full, bare):
            if put:
                await engine.fragments.put(*NAME, new)
            else:
                await engine.observe_batch(*NAME, "", 1, [new], AckLevel.STORED)
            await tell(engine, "the canal is long", "the lake is deep", session="monday")
        (found,) = (one for one in await listed(engine) if one.external_id == "k")
        assert found.content == bare.content
        assert (found.session, found.speaker, found.importance, found.metadata) == ("", "", 0.5, ())
        assert (found.expire_time_us, found.ttl_us, found.token_count) == (None, None, 0)
        assert found.observe_time_us >= found.create_time_us
        in_session = Filter(sessions=("monday",))
        assert found.id not in [
            one.id for one in (await engine.fragments.list_page(*NAME, Listing(in_session), -1, 99))[0]
        ]
        query = Query(text="canal lake heron", limit=9, now_us=found.observe_time_us, reinforce=False)
        before = await engine.recall(*NAME, query)
    async with open_engine(tmp_path) as engine:  # the neighbours of another session are linked as after a restart
        after = await engine.recall(*NAME, query)
    ranked = [{one.fragment.id: one.scored.score for one in each.recollections} for each in (before, after)]
    assert ranked[0] == pytest.approx(ranked[1])


async def test_what_was_said_last_is_last(tmp_path: Path) -> None:
    monday, friday = "the meeting is on Monday", "the meeting is on Friday"
    async with open_engine(tmp_path) as engine:
        await create(engine, MemoryKind.HYBRID)
        for text in (monday, friday, monday):
            await tell(engine, text)
        rows = {one.content: one for one in await listed(engine)}
        assert rows.keys() == {monday, friday}
        assert rows[monday].last_observed > rows[friday].last_observed
        assert rows[monday].observe_time_us < rows[friday].observe_time_us
        before = await engine.recall(*NAME, Query(text="meeting", as_of=AsOf(revision=3)))
        assert before.working_ids == (rows[monday].id, rows[friday].id)
        now = await engine.recall(*NAME, Query(text="meeting", reinforce=False))
        assert now.working_ids == (rows[friday].id, rows[monday].id)
    async with open_engine(tmp_path) as engine:  # a load keeps the order
        again = await engine.recall(*NAME, Query(text="meeting", reinforce=False))
        assert again.working_ids == now.working_ids


async def test_one_batch_keeps_what_was_said_last(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    await tell(engine, "tea is best", "coffee is best", "tea is best")
    first, last = sorted(await listed(engine), key=lambda one: one.last_observed)
    assert [first.content, last.content] == ["coffee is best", "tea is best"]


async def test_old_observation_sent_again_is_not_last(engine: PartsEngine) -> None:
    await create(engine, MemoryKind.HYBRID)
    for text, time_us in (("tea is best", 1_000), ("coffee is best", 2_000), ("tea is best", 1_000)):
        await engine.observe_batch(*NAME, "", 1, [observation(text, observe_time_us=time_us)], AckLevel.STORED)
    first, last = sorted(await listed(engine), key=lambda one: one.last_observed)
    assert [first.content, last.content] == ["tea is best", "coffee is best"]
    assert first.duplicate_count == 1
