"""Supersession and validity in the engine: what is refused, what a race leaves, and what every kind of recall shows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from memstream_server.app.models import Models
from memstream_server.core.events import EventType
from memstream_server.core.filters import Filter, Listing
from memstream_server.core.policy import DBGPT, DEFAULT, Overflow, Policy, Truth, with_value
from memstream_server.core.ranking import Stage
from memstream_server.core.scores import PARTS
from memstream_server.core.values import Fragment, MemoryKind, TruthStatus
from memstream_server.engine.errors import EngineError, FragmentNotFound, InvalidField
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.recall import standing_query
from memstream_server.engine.requests import AckLevel, AsOf, NewMemory, NewObservation, Query, RecallAnswer
from memstream_server.engine.runtime.clock import Clock
from tests.engine.assembled import NAMESPACE, Assembled, assembled, check, check_index
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.engine.test_standing import following
from tests.support.scripted_models import VECTOR_BYTES, ScriptedEmbedder, ScriptedInsights
from tests.support.scripts import until as until_seen
from tests.support.waiting import until

PARIS, BERLIN, ROME = "Ann lives in Paris", "Ann lives in Berlin", "Ann lives in Rome"
WHERE = "Where does Ann live?"
NAMED = (NAMESPACE, "joy")
SECOND_US = 1_000_000


async def create(engine: PartsEngine, kind: MemoryKind = MemoryKind.HYBRID, policy: Policy = DEFAULT) -> None:
    await engine.memories.create(NewMemory(*NAMED, kind, policy))


async def observe(engine: PartsEngine, *items: str | NewObservation, level: AckLevel = AckLevel.STORED) -> list[str]:
    new = [observation(item) if isinstance(item, str) else item for item in items]
    done = await engine.observe_batch(*NAMED, "", 1, new, level)
    return [outcome.fragment for outcome in done.outcomes]


async def recall(engine: PartsEngine, text: str = WHERE, **asked: object) -> RecallAnswer:
    return await engine.recall(*NAMED, Query(text=text, **({"reinforce": False} | asked)))  # type: ignore[arg-type]  # real fields


def contents(answer: RecallAnswer) -> list[str]:
    return [one.fragment.content for one in answer.recollections]


async def listed(engine: PartsEngine, truth: Truth = Truth.ALL) -> dict[str, Fragment]:
    found, _, _, _ = await engine.fragments.list_page(*NAMED, Listing(truth=truth), -1, 1_000)
    return {one.content: one for one in found}


# ---- recall


@pytest.mark.parametrize("kind", list(MemoryKind))
async def test_every_kind_recalls_what_is_current(tmp_path: Path, kind: MemoryKind) -> None:
    policy = with_value(DEFAULT, "sensory.capacity", 10)
    async with assembled(tmp_path) as parts:
        await create(parts.engine, kind, policy)
        (first,) = await observe(parts.engine, PARIS)
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        answer = await recall(parts.engine)
        assert contents(answer) == [BERLIN]
        assert first not in answer.working_ids
        both = await recall(parts.engine, truth=Truth.ALL)
        assert {one.fragment.content: one.status for one in both.recollections} == {
            BERLIN: TruthStatus.CURRENT,
            PARIS: TruthStatus.SUPERSEDED,
        }
        for found in both.recollections:
            assert [(link.id, link.status) for link in found.chain] == [
                (first, TruthStatus.SUPERSEDED),
                (second, TruthStatus.CURRENT),
            ]
        await check(parts.engine, "joy")


async def test_working_memory_follows_the_truth_of_the_query(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, PARIS)
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        assert (await recall(parts.engine)).working_ids == (second,)
        assert (await recall(parts.engine, truth=Truth.ALL)).working_ids == (first, second)


async def test_near_misses_name_what_supersedes_and_the_validity(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        first, past = await observe(parts.engine, PARIS, observation("Ann lives with Bob", valid_until_us=1))
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        answer = await recall(parts.engine, near_misses=5)
        missed = {miss.scored.id: (miss.stage, miss.superseded_by) for miss in answer.near_misses}
        assert missed == {first: (Stage.SUPERSEDED, second), past: (Stage.VALIDITY, "")}
        filtered = await recall(parts.engine, near_misses=5, filter=Filter(sessions=("other",)))
        assert {miss.stage for miss in filtered.near_misses} == {Stage.FILTER}


async def test_profile_dbgpt_recalls_superseded_fragments(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, policy=DBGPT)
        (first,) = await observe(parts.engine, PARIS)
        await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        assert sorted(contents(await recall(parts.engine))) == [BERLIN, PARIS]
        assert contents(await recall(parts.engine, truth=Truth.CURRENT)) == [BERLIN]


async def test_memory_beyond_ram_recalls_what_is_current(tmp_path: Path) -> None:
    """The index names superseded candidates; as many more are asked for."""
    policy = with_value(with_value(DEFAULT, "recall.candidates", 1), "recall.limit", 1)
    async with assembled(tmp_path, dense_bytes_max=2 * VECTOR_BYTES) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM, policy)
        last = PARIS
        (before,) = await observe(parts.engine, PARIS)
        for number in range(12):
            last = f"{PARIS}, in street {number}"
            (before,) = await observe(parts.engine, observation(last, supersedes=(before,)))
        await check_index(parts, "joy")
        async with parts.actors.use(*NAMED) as actor:
            assert actor.working.dense is None
        assert contents(await recall(parts.engine, PARIS)) == [last]
        assert len((await recall(parts.engine, PARIS, truth=Truth.ALL, limit=20)).recollections) > 1


MOVED, OTHER = "She moved to Berlin in May", "Tom lives in Rome"


@pytest.mark.parametrize("in_ram", [True, False])
async def test_correction_answers_what_the_corrected_words_match(tmp_path: Path, in_ram: bool) -> None:
    limits = {} if in_ram else {"dense_bytes_max": VECTOR_BYTES}
    async with assembled(tmp_path, **limits) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        first, _, newer = await observe(parts.engine, PARIS, OTHER, MOVED)
        before = (await parts.engine.memories.get(*NAMED)).revision
        await parts.engine.fragments.supersede(*NAMED, [first], newer)
        if not in_ram:
            await check_index(parts, "joy")
        answer = await recall(parts.engine)
        assert contents(answer) == [MOVED, OTHER]
        for one in answer.recollections:
            assert one.scored.names[-1] == "chain"
            assert one.scored.score == math.fsum(part.contribution for part in one.scored.parts)
        for asked in ({"truth": Truth.ALL}, {"as_of": AsOf(revision=before)}):
            everything = await recall(parts.engine, **asked)
            assert contents(everything)[0] == PARIS
            assert {one.scored.names for one in everything.recollections} == {PARTS}


async def test_links_survive_a_restart(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, PARIS)
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
    async with assembled(tmp_path) as parts:
        assert contents(await recall(parts.engine)) == [BERLIN]
        await observe(parts.engine, observation(ROME, supersedes=(first,)))
        there = await listed(parts.engine)
        assert (there[PARIS].superseded_by, there[BERLIN].superseded_by) == (second, there[ROME].id)
        await check(parts.engine, "joy")


async def test_validity_is_judged_by_the_clock_of_the_server(tmp_path: Path) -> None:
    clock = SettableClock()
    async with assembled(tmp_path, clock=Clock(clock.now_us)) as parts:
        await create(parts.engine)
        now_us = clock.now_us()
        begins_us = now_us + 60 * SECOND_US
        ends_us = begins_us + 60 * SECOND_US
        closed = observation("the office is closed", valid_from_us=begins_us, valid_until_us=ends_us)
        await observe(parts.engine, closed)
        seen = []
        for _ in range(3):
            answer = await recall(parts.engine, "office", now_us=0)
            every = await recall(parts.engine, "office", now_us=0, truth=Truth.ALL)
            seen.append((len(answer.recollections), every.recollections[0].status))
            assert len(answer.working_ids) == len(answer.recollections)
            assert bool(await listed(parts.engine, Truth.CURRENT)) == bool(answer.recollections)
            clock.offset_us += 60 * SECOND_US
        assert seen == [(0, TruthStatus.NOT_YET_VALID), (1, TruthStatus.CURRENT), (0, TruthStatus.NO_LONGER_VALID)]


async def test_validity_is_changed_by_an_update(tmp_path: Path) -> None:
    clock = SettableClock()
    now_us = clock.now_us()
    async with assembled(tmp_path, clock=Clock(clock.now_us)) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        (id_,) = await observe(parts.engine, PARIS)
        update, unbounded = parts.engine.fragments.update, frozenset({"valid_from_us", "valid_until_us"})
        changed, _ = await update(*NAMED, FragmentChange(id_, valid_until_us=now_us))
        assert (changed.valid_from_us, changed.valid_until_us) == (None, now_us)
        assert contents(await recall(parts.engine)) == []
        with pytest.raises(InvalidField, match="valid_until: must be after valid_from"):
            await update(*NAMED, FragmentChange(id_, valid_from_us=now_us))
        await update(*NAMED, FragmentChange(id_, valid_from_us=now_us - 1, unbounded=frozenset({"valid_until_us"})))
        assert contents(await recall(parts.engine)) == [PARIS]
        changed, _ = await update(*NAMED, FragmentChange(id_, pinned=True))
        assert changed.valid_from_us == now_us - 1
        changed, _ = await update(*NAMED, FragmentChange(id_, unbounded=unbounded))
        assert not changed.has_validity
        await check(parts.engine, "joy")


async def test_standing_query_retracts_what_is_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.01)
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, PARIS)
        async with following(parts.engine, Query(text=WHERE)) as follower:
            assert follower.contents == [PARIS]
            await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
            await until_seen(lambda: follower.contents == [BERLIN])
            assert follower.retracted == [PARIS]
            await parts.engine.fragments.restore(*NAMED, [first])
            await until_seen(lambda: sorted(follower.contents) == [BERLIN, PARIS])


async def test_standing_query_shows_a_validity_that_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.01)
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        begins_us = Clock().now_us() + SECOND_US // 2
        await observe(parts.engine, observation(BERLIN, valid_from_us=begins_us))
        async with following(parts.engine, Query(text=WHERE)) as follower:
            await until_seen(lambda: follower.contents == [BERLIN])


async def test_reflection_is_shown_what_is_current(tmp_path: Path) -> None:
    scripted = ScriptedInsights(questions=["Where does Ann live?"])
    policy = with_value(DEFAULT, "reflection.threshold", 1.0)
    async with assembled(tmp_path, models=Models(ScriptedEmbedder(), insights=scripted)) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM, policy)
        said = observation(PARIS, external_id="home"), observation(BERLIN, supersedes=("home",))
        await observe(parts.engine, *said)
        await until_seen(lambda: len(scripted.shown) == 2)
        assert scripted.shown == [(BERLIN,), (BERLIN,)]


# ---- what is refused


async def refusal(engine: PartsEngine, item: NewObservation) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await observe(engine, item)
    return caught.value


async def test_unknown_fragments_cannot_be_superseded(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        await parts.engine.memories.create(NewMemory(NAMESPACE, "other", MemoryKind.HYBRID, DEFAULT))
        done = await parts.engine.observe_batch(NAMESPACE, "other", "", 1, [observation(PARIS)], AckLevel.STORED)
        elsewhere = done.outcomes[0].fragment
        (erased,) = await observe(parts.engine, observation(PARIS, external_id="gone"))
        operation = await parts.engine.erasing.start(*NAMED, [erased])
        await parts.engine.operations.wait_for_end(operation.id)
        for key in ("nobody", elsewhere, erased, "gone"):
            error = await refusal(parts.engine, observation(BERLIN, supersedes=(key,)))
            assert isinstance(error, FragmentNotFound), key
            assert error.details == {"id": key}
            with pytest.raises(FragmentNotFound):
                await parts.engine.fragments.put(*NAMED, observation(BERLIN, external_id="k", supersedes=(key,)))
        assert await listed(parts.engine) == {}


async def test_observation_cannot_supersede_itself(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, observation(PARIS, external_id="a"))
        (second,) = await observe(parts.engine, observation(BERLIN, external_id="b", supersedes=("a",)))
        for key in ("a", first, second, "b"):
            error = await refusal(parts.engine, observation(ROME, external_id="a", supersedes=(key,)))
            assert isinstance(error, InvalidField), key
            with pytest.raises(InvalidField):
                await parts.engine.fragments.put(*NAMED, observation(ROME, external_id="a", supersedes=(key,)))
        assert list(await listed(parts.engine)) == [PARIS, BERLIN]


async def test_bad_observation_of_a_stream_is_rejected_alone(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        items = [
            observation(PARIS, external_id="a"),
            observation(BERLIN, supersedes=("nobody",)),
            observation(ROME, supersedes=("a",)),
        ]
        done = await parts.engine.observe_batch(*NAMED, "bob", 1, items, AckLevel.STORED)
        (rejected,) = done.rejected
        assert (rejected.sequence, rejected.reason, dict(rejected.details)) == (
            2,
            "FRAGMENT_NOT_FOUND",
            {"id": "nobody"},
        )
        there = await listed(parts.engine)
        assert there.keys() == {PARIS, ROME}
        assert there[PARIS].superseded_by == there[ROME].id
        again = await parts.engine.observe_batch(*NAMED, "bob", 1, items, AckLevel.STORED)
        assert again.rejected == done.rejected


async def test_request_that_fails_changes_nothing(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        first, second, third = await observe(parts.engine, PARIS, BERLIN, ROME)
        await parts.engine.fragments.supersede(*NAMED, [first], second)
        await parts.engine.fragments.forget(*NAMED, [third])
        before, revision = await listed(parts.engine), (await parts.engine.memories.get(*NAMED)).revision
        cases: list[tuple[Sequence[str], str, type[EngineError]]] = [
            ([second, "nobody"], first, FragmentNotFound),
            ([first], "nobody", FragmentNotFound),
            ([first], third, FragmentNotFound),
            ([second], first, InvalidField),
            ([first], first, InvalidField),
        ]
        for olds, new, kind in cases:
            with pytest.raises(kind):
                await parts.engine.fragments.supersede(*NAMED, olds, new)
        assert await listed(parts.engine) == before
        assert (await parts.engine.memories.get(*NAMED)).revision == revision


# ---- races and what is received


async def test_external_id_that_is_not_yet_received_may_be_superseded(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        release = parts.journal.hold("receive")
        calls = []
        async with parts.actors.use(*NAMED) as actor:
            for item in (observation(PARIS, external_id="a"), observation(BERLIN, supersedes=("a",))):
                calls.append(asyncio.create_task(observe(parts.engine, item, level=AckLevel.RECEIVED)))

                async def submitted() -> bool:
                    return actor.producers.backlog == len(calls)

                await until(submitted)
        release()
        await asyncio.gather(*calls)
        await until(lambda: _has(parts, 2))
        there = await listed(parts.engine)
        assert there[PARIS].superseded_by == there[BERLIN].id


async def _has(parts: Assembled, count: int) -> bool:
    return len(await listed(parts.engine)) == count


async def test_observation_is_stored_although_the_older_one_left(tmp_path: Path) -> None:
    """The older fragment is dropped after the newer one was received and before it is decided."""
    policy = with_value(with_value(DEFAULT, "short_term.capacity", 2), "short_term.overflow", Overflow.DROP)
    async with assembled(tmp_path) as parts:
        await create(parts.engine, policy=policy)
        (first,) = await observe(parts.engine, PARIS)
        items = ["it rained on Monday", "badgers dig at night", observation(BERLIN, supersedes=(first,))]
        await observe(parts.engine, *items)
        there = await listed(parts.engine)
        assert PARIS not in there
        assert there[BERLIN].supersedes == ()
        await check(parts.engine, "joy")


async def test_newer_one_dropped_in_its_group_leaves_the_older_current(tmp_path: Path) -> None:
    policy = with_value(with_value(DEFAULT, "short_term.capacity", 2), "short_term.overflow", Overflow.DROP)
    async with assembled(tmp_path) as parts:
        await create(parts.engine, policy=policy)
        (first,) = await observe(parts.engine, observation(PARIS, importance=0.9))
        weak = observation(BERLIN, supersedes=(first,), importance=0.1)
        await observe(parts.engine, weak, observation("it rained", importance=0.9))
        there = await listed(parts.engine)
        assert BERLIN not in there
        assert there[PARIS].superseded_by == ""
        await check(parts.engine, "joy")


async def test_batches_that_were_received_supersede_after_a_restart(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        parts.journal.hold("commit")
        await observe(parts.engine, observation(PARIS, external_id="a"), level=AckLevel.RECEIVED)
        await observe(parts.engine, observation(BERLIN, supersedes=("a",)), level=AckLevel.RECEIVED)
    async with assembled(tmp_path) as parts:
        await recall(parts.engine)
        await until(lambda: _has(parts, 2))
        there = await listed(parts.engine)
        assert there[PARIS].superseded_by == there[BERLIN].id
        await check(parts.engine, "joy")


# ---- changes of superseded fragments


async def test_update_by_external_id_adds_to_what_it_supersedes(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        first, second = await observe(parts.engine, PARIS, ROME)
        await observe(parts.engine, observation(BERLIN, external_id="home", supersedes=(first,)))
        (same,) = await observe(parts.engine, observation(f"{BERLIN} now", external_id="home", supersedes=(second,)))
        there = await listed(parts.engine)
        assert set(there[f"{BERLIN} now"].supersedes) == {first, second}
        assert {there[PARIS].superseded_by, there[ROME].superseded_by} == {same}
        await check(parts.engine, "joy")


async def test_updating_a_superseded_fragment_keeps_its_links(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, PARIS)
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        changed, _ = await parts.engine.fragments.update(*NAMED, FragmentChange(first, content="Ann lived in Paris"))
        assert changed.superseded_by == second
        assert contents(await recall(parts.engine)) == [BERLIN]


async def test_erasure_leaves_no_link_to_an_erased_fragment(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, PARIS)
        (second,) = await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        await observe(parts.engine, observation(ROME, supersedes=(second,)))
        await parts.engine.fragments.forget(*NAMED, [second])
        operation = await parts.engine.erasing.start(*NAMED, [second])
        await parts.engine.operations.wait_for_end(operation.id)
        there = await listed(parts.engine)
        assert (there[PARIS].superseded_by, there[ROME].supersedes) == (there[ROME].id, (first,))
        operation = await parts.engine.erasing.start(*NAMED, [there[ROME].id])
        await parts.engine.operations.wait_for_end(operation.id)
        there = await listed(parts.engine)
        assert [(one.superseded_by, one.supersede_time_us) for one in there.values()] == [("", None)]
        assert contents(await recall(parts.engine)) == [PARIS]
        await check(parts.engine, "joy")


async def test_restoring_by_filter_keeps_supersessions(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        await create(parts.engine)
        (first,) = await observe(parts.engine, observation(PARIS, session="s"))
        await observe(parts.engine, observation(BERLIN, supersedes=(first,)))
        await parts.engine.fragments.forget(*NAMED, [first])
        done = await parts.engine.fragments.restore(*NAMED, Filter(sessions=("s",)))
        assert done.count == 1
        assert contents(await recall(parts.engine)) == [BERLIN]
        assert (await parts.engine.fragments.restore(*NAMED, [first])).count == 1
        assert sorted(contents(await recall(parts.engine))) == [BERLIN, PARIS]
        await check(parts.engine, "joy")


async def test_undoing_a_supersession_restores_the_ranking(tmp_path: Path) -> None:
    clock = SettableClock()
    async with assembled(tmp_path, clock=Clock(clock.now_us)) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        ids = await observe(parts.engine, PARIS, "Ann has a cat", "Bob lives in Rome", BERLIN)
        before = await recall(parts.engine, now_us=0)
        await parts.engine.fragments.supersede(*NAMED, ids[:3], ids[3])
        assert contents(await recall(parts.engine, now_us=0)) == [BERLIN]
        await parts.engine.fragments.restore(*NAMED, ids[:3])
        after = await recall(parts.engine, now_us=0)
        assert [one.scored for one in after.recollections] == [one.scored for one in before.recollections]


async def test_same_words_as_a_superseded_fragment_are_kept(tmp_path: Path) -> None:
    """Ann moves back: neither a repeat nor an echo."""
    async with assembled(tmp_path) as parts:
        await create(parts.engine, MemoryKind.LONG_TERM)
        (first,) = await observe(parts.engine, observation(PARIS, session="s"))
        await recall(parts.engine, session="s")
        (second,) = await observe(parts.engine, observation(BERLIN, session="s", supersedes=(first,)))
        done = await parts.engine.observe_batch(*NAMED, "", 1, [observation(PARIS, session="s")], AckLevel.STORED)
        assert done.outcomes[0].type is EventType.OBSERVED
        every = await recall(parts.engine, truth=Truth.ALL)
        assert sorted(contents(every)) == [BERLIN, PARIS, PARIS]
        assert second != done.outcomes[0].fragment
