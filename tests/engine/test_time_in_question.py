"""Phrases of time in a question, in the engine: what they bring up, what they leave, and how they are explained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from msgspec.structs import replace

from memstream_server.core.filters import Filter
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.ranking import FORMULA
from memstream_server.core.scores import PARTS, TIMED_PARTS
from memstream_server.core.values import MemoryKind
from memstream_server.engine.recall import standing_query
from memstream_server.engine.requests import AckLevel, NewMemory, Query, RecallAnswer
from memstream_server.engine.runtime.clock import Clock
from tests.engine.conftest import open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import SettableClock, observation
from tests.support.scripted_models import VECTOR_BYTES

NOW = datetime(2023, 11, 15, 12, tzinfo=UTC)
NOW_US = int(NOW.timestamp()) * 1_000_000
DIARY = {
    "Soup for lunch with Anna": NOW - timedelta(days=40),
    "Rice and beans for lunch": NOW - timedelta(days=30),
    "Noodles for lunch again": NOW - timedelta(days=20),
    "Painted the fence green": NOW - timedelta(days=7),
    "Cake for lunch": NOW - timedelta(hours=3),
}
LAST_WEEK = Query("What was that last week?", now_us=NOW_US, reinforce=False, working_memory=False)
PLAIN = replace(LAST_WEEK, text="What did we have for lunch with Anna?")


async def remember(engine: PartsEngine, diary: dict[str, datetime] = DIARY, policy: Policy = DEFAULT) -> None:
    await engine.memories.create(NewMemory("test", "joy", MemoryKind.HYBRID, policy))
    said = [
        observation(text, observe_time_us=int(at.timestamp()) * 1_000_000, session=str(at.date()))
        for text, at in diary.items()
    ]
    await engine.observe_batch("test", "joy", "once", 1, said, AckLevel.STORED)


async def ask(engine: PartsEngine, query: Query) -> RecallAnswer:
    return await engine.recall("test", "joy", query)


def contents(answer: RecallAnswer) -> list[str]:
    return [each.fragment.content for each in answer.recollections]


def parts_of(answer: RecallAnswer) -> list[tuple[str, float, Sequence[tuple[str, float, float]]]]:
    return [
        (one.fragment.id, one.scored.score, [(part.name, part.value, part.weight) for part in one.scored.parts])
        for one in answer.recollections
    ]


async def test_fragment_of_the_week_comes_first_without_its_words(engine: PartsEngine) -> None:
    await remember(engine)
    answer = await ask(engine, LAST_WEEK)
    assert contents(answer)[0] == "Painted the fence green"
    assert [each.phrase for each in answer.interpreted] == ["last week"]
    assert answer.formula == FORMULA


async def test_a_window_adds_candidates_beyond_those_of_the_legs(engine: PartsEngine) -> None:
    lunches = {f"What was that lunch of week {n}": NOW - timedelta(days=30 + n) for n in range(8)}
    policy = with_value(DEFAULT, "recall.candidates", 2)
    await remember(engine, {**lunches, "Zyx": NOW - timedelta(days=7)}, policy)
    asked = replace(LAST_WEEK, limit=2)
    assert "Zyx" in contents(await ask(engine, asked))
    assert "Zyx" not in contents(await ask(engine, replace(asked, interpret_time=False)))


async def test_nothing_outside_the_window_is_left_out(engine: PartsEngine) -> None:
    await remember(engine)
    assert sorted(contents(await ask(engine, LAST_WEEK))) == sorted(DIARY)


async def test_only_a_filter_restricts_the_answer_to_a_time(engine: PartsEngine) -> None:
    await remember(engine)
    (week,) = (await ask(engine, LAST_WEEK)).interpreted
    chosen = Filter(observe_from_us=week.window.start_us, observe_until_us=week.window.end_us)
    assert contents(await ask(engine, replace(LAST_WEEK, filter=chosen))) == ["Painted the fence green"]


async def test_scores_with_a_time_part_are_exact_sums(engine: PartsEngine) -> None:
    await remember(engine)
    for one in (await ask(engine, replace(LAST_WEEK, near_misses=5))).recollections:
        assert [part.name for part in one.scored.parts] == list(TIMED_PARTS)
        assert one.scored.score == math.fsum(part.contribution for part in one.scored.parts)
        named = {part.name: part for part in one.scored.parts}
        assert (named["time"].value == 1) is (one.fragment.content == "Painted the fence green")


async def test_time_part_is_weighted_like_relevance(engine: PartsEngine) -> None:
    await remember(engine)
    for one in (await ask(engine, replace(LAST_WEEK, beta=0.5))).recollections:
        assert one.scored.parts[-1].weight == 0.5 * 0.1


async def test_without_a_phrase_the_ranking_is_the_same_to_the_bit(engine: PartsEngine) -> None:
    await remember(engine)
    with_time, without = await ask(engine, PLAIN), await ask(engine, replace(PLAIN, interpret_time=False))
    assert parts_of(with_time) == parts_of(without)
    assert [each.name for each in with_time.recollections[0].scored.parts] == list(PARTS)
    assert with_time.interpreted == ()


async def test_query_turns_the_interpretation_off(engine: PartsEngine) -> None:
    await remember(engine)
    answer = await ask(engine, replace(LAST_WEEK, interpret_time=False))
    assert answer.interpreted == ()
    assert all(part.name != "time" for one in answer.recollections for part in one.scored.parts)


async def test_dbgpt_ranking_interprets_no_time(engine: PartsEngine) -> None:
    await remember(engine, policy=DBGPT)
    answers = [await ask(engine, replace(LAST_WEEK, interpret_time=on)) for on in (True, False)]
    assert [each.interpreted for each in answers] == [(), ()]
    assert parts_of(answers[0]) == parts_of(answers[1])


async def test_question_for_a_time_alone_is_weak_only_without_one(engine: PartsEngine) -> None:
    await remember(engine)
    for text, weak in (
        ("What did we do last week?", False),
        ("What did we do last year?", True),
        ("Which guitar did Zoltan restring last week?", True),
    ):
        assert (await ask(engine, replace(LAST_WEEK, text=text))).weak is weak, text


async def test_zone_of_the_query_decides_the_day(engine: PartsEngine) -> None:
    await remember(engine, {"Late call": datetime(2023, 11, 14, 23, 30, tzinfo=UTC), "Tea": NOW - timedelta(days=9)})
    asked = replace(LAST_WEEK, text="What was there yesterday?")
    utc, kiribati = await ask(engine, asked), await ask(engine, replace(asked, zone=ZoneInfo("Pacific/Kiritimati")))
    assert utc.recollections[0].scored.parts[-1].value == 1
    assert kiribati.recollections[0].scored.parts[-1].value == 1
    los_angeles = await ask(
        engine, replace(asked, zone=ZoneInfo("America/Los_Angeles"), now_us=NOW_US + 86_400_000_000)
    )
    assert los_angeles.interpreted[0].window.start_us == int(datetime(2023, 11, 15, 8, tzinfo=UTC).timestamp()) * 10**6


async def test_auto_language_detects_the_question(engine: PartsEngine) -> None:
    await remember(engine, policy=with_value(DEFAULT, "language", "auto"))
    asked = replace(LAST_WEEK, text="Was haben wir in der letzten Woche eigentlich alles gemacht?")
    assert [each.phrase for each in (await ask(engine, asked)).interpreted] == ["letzten Woche"]
    plain = replace(LAST_WEEK, text="Was haben wir eigentlich alles gemacht?")
    assert (await ask(engine, plain)).interpreted == ()


async def test_memory_that_answers_in_order_keeps_its_order(engine: PartsEngine) -> None:
    await engine.memories.create(NewMemory("test", "joy", MemoryKind.SHORT_TERM, DEFAULT))
    said = [observation(text, observe_time_us=int(at.timestamp()) * 1_000_000) for text, at in DIARY.items()]
    await engine.observe_batch("test", "joy", "once", 1, said, AckLevel.STORED)
    assert contents(await ask(engine, LAST_WEEK)) == list(DIARY)


async def test_window_adds_candidates_in_a_memory_beyond_ram(tmp_path: Path) -> None:
    async with open_engine(tmp_path, dense_bytes_max=1 * VECTOR_BYTES) as engine:
        await remember(engine)
        answer = await ask(engine, LAST_WEEK)
    assert contents(answer)[0] == "Painted the fence green"
    assert [each.phrase for each in answer.interpreted] == ["last week"]


@pytest.mark.parametrize("fixed", [False, True])
async def test_standing_query_reads_today_again_at_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    """Against its own `now`, if it has one, else against the clock of each ranking, as recency."""
    monkeypatch.setattr(standing_query, "PAUSE_S", 0.01)
    clock = SettableClock()
    now_us = clock.now_us()
    async with open_engine(tmp_path, clock=Clock(now_us=clock.now_us)) as engine:
        await remember(engine)
        query = replace(LAST_WEEK, text="What was yesterday?", now_us=now_us if fixed else None)

        async def again() -> None:
            """The caller keeps its right to ask."""

        async with aclosing(engine.follow_query("test", "joy", query, again)) as changes:
            first = await anext(changes)
            clock.offset_us = 3 * 86_400_000_000
            await engine.observe_batch("test", "joy", "two", 1, [observation("Another day")], AckLevel.STORED)
            second = await anext(changes)
    moved_us = [one.answer.interpreted[0].window.start_us or 0 for one in (first, second)]
    assert round((moved_us[1] - moved_us[0]) / 86_400_000_000) == (0 if fixed else 3)
