"""Statements that a later one may replace, on a real engine: in recall, in outcomes, suspected, decided, ended."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from memstream_server.core.events import EventType
from memstream_server.core.filters import Filter
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.suspicions import ConflictDecision, ConflictReason
from memstream_server.core.values import MemoryKind, Role
from memstream_server.engine.conflicts import Verdict
from memstream_server.engine.errors import FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, AsOf, NewMemory, Query, RecallAnswer
from memstream_server.ports.journal.reading import StoredConflict
from memstream_server.ports.journal.writing import Related
from tests.engine.conftest import OpenEngine, open_engine
from tests.engine.engine_parts import PartsEngine
from tests.engine.memory import observation
from tests.engine.test_by_request import NAME, told
from tests.support.tiny_model import write_model

OLD, NEW = "I live in Munich near the river.", "I live in Berlin near the river now."
OTHERS = ("The train was late today.", "We had soup for lunch.", "My sister has a cat.")
ASKING = with_value(DEFAULT, "conflicts.ask_llm", True)
DAY_US = 86_400_000_000


async def create(engine: PartsEngine, policy: Policy = DEFAULT, kind: MemoryKind = MemoryKind.HYBRID) -> None:
    await engine.memories.create(NewMemory(*NAME, kind, policy))


async def tell(engine: PartsEngine, *contents: str, **fields: object) -> list[str]:
    items = [observation(content, **{"speaker": "Ada", "session": "letters"} | fields) for content in contents]  # type: ignore[arg-type]  # real fields
    return [one.fragment for one in (await engine.observe_batch(*NAME, "", 1, items, AckLevel.STORED)).outcomes]


async def near(engine: PartsEngine, content: str, count: int = 3, **fields: object) -> tuple[Related, ...]:
    item = observation(content, **{"speaker": "Ada", "session": "letters"} | fields)  # type: ignore[arg-type]  # real fields
    done = await engine.observe_batch(*NAME, "", 1, [item], AckLevel.STORED, related=count)
    return done.outcomes[0].related


async def conflicts(engine: PartsEngine, decided: bool = False) -> list[StoredConflict]:
    return (await engine.conflicts.list_page(*NAME, decided, ("", ""), 100))[0]


async def pairs(engine: PartsEngine) -> list[tuple[str, str]]:
    return [(one.suspicion.newer, one.suspicion.older) for one in await conflicts(engine)]


async def ended(engine: PartsEngine) -> list[tuple[str, str]]:
    return [(one.fragment, one.other) for one in await told(engine, EventType.CONFLICT_ENDED)]


async def recall(engine: PartsEngine, text: str = "Where does Ada live, near a river?", **more: object) -> RecallAnswer:
    return await engine.recall(*NAME, Query(text, reinforce=False, working_memory=False, **more))  # type: ignore[arg-type]  # real fields


def ids_of(answer: RecallAnswer) -> list[str]:
    return [one.fragment.id for one in answer.recollections]


async def decide(engine: PartsEngine, newer: str, older: str, decision: ConflictDecision) -> StoredConflict:
    return (await engine.conflicts.resolve(*NAME, Verdict(newer, older, decision, "asked Ada"), None))[0]


@pytest.fixture
async def pair(engine: PartsEngine) -> tuple[str, str]:
    """(newer, older) in a memory that suspects them."""
    await create(engine, ASKING)
    (older,) = await tell(engine, OLD)
    await tell(engine, *OTHERS)
    (newer,) = await tell(engine, NEW)
    return newer, older


# ---- recall
@pytest.mark.parametrize("sessions", [("", ""), ("a", "b"), ("a", "a")])
@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_the_later_of_two_statements_comes_first(
    engine: PartsEngine, sessions: tuple[str, str], limit: int
) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD, session=sessions[0])
    await tell(engine, *OTHERS)
    (newer,) = await tell(engine, NEW, session=sessions[1])
    answer = await recall(engine, limit=limit)
    assert ids_of(answer)[:2] == [newer, older][:limit]
    assert [one.later_id for one in answer.recollections[:2]] == ["", newer][:limit]
    assert [one.fragment.content for one in answer.recollections[:2]] == [NEW, OLD][:limit]
    assert await conflicts(engine) == []


async def test_of_several_the_last_one_comes_first(engine: PartsEngine) -> None:
    await create(engine)
    said = [f"My meeting with Grace is on {day}." for day in ("Monday", "Friday", "Sunday")]
    monday, friday, sunday = await tell(engine, *said)
    await tell(engine, said[0])  # a repeat of the first
    answer = await recall(engine, "When is the meeting with Grace?")
    assert ids_of(answer) == [monday, sunday, friday]
    assert [one.later_id for one in answer.recollections] == ["", monday, monday]


async def test_a_clearly_higher_score_keeps_its_place(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, "My bicycle with the yellow basket is in the cellar.")
    (newer,) = await tell(engine, "My bicycle is in the garden.")
    answer = await recall(engine, "yellow basket cellar")
    scores = [one.scored.score for one in answer.recollections]
    assert scores[0] - scores[1] > 0.1
    assert ids_of(answer) == [older, newer]
    assert not any(one.later_id for one in answer.recollections)


@pytest.mark.parametrize(
    "fields",
    [{"speaker": "Grace"}, {"role": Role.ASSISTANT}, {"role": Role.TOOL}, {"valid_until_us": 4_000_000 * DAY_US}],
)
async def test_others_and_what_has_a_validity_are_no_twins(engine: PartsEngine, fields: dict[str, object]) -> None:
    await create(engine)
    await tell(engine, OLD, session="a")
    await tell(engine, NEW, session="b", **fields)
    assert not any(one.later_id for one in (await recall(engine)).recollections)


@pytest.mark.parametrize("older", ["Do I live in Munich near the river?", OLD + " And so on" * 20])
async def test_a_question_and_a_long_text_are_no_statements(engine: PartsEngine, older: str) -> None:
    await create(engine)
    await tell(engine, older)
    await tell(engine, NEW)
    assert not any(one.later_id for one in (await recall(engine)).recollections)


@pytest.mark.parametrize("policy", [with_value(DEFAULT, "conflicts.suspect", False), DBGPT])
async def test_the_policy_turns_twins_off(engine: PartsEngine, policy: Policy) -> None:
    await create(engine, policy)
    await tell(engine, OLD)
    await tell(engine, NEW)
    assert not any(one.later_id for one in (await recall(engine)).recollections)
    assert await conflicts(engine) == []


async def test_a_question_about_a_past_time_wants_its_statement(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD, observe_time_us=10 * DAY_US)
    (newer,) = await tell(engine, NEW, observe_time_us=40 * DAY_US)
    now_us = 50 * DAY_US  # 1970-02-20
    answer = await recall(engine, "Where did Ada live on 11 January 1970?", now_us=now_us)
    assert [one.phrase for one in answer.interpreted] == ["11 January 1970"]
    assert ids_of(answer) == [older, newer]
    assert ids_of(await recall(engine, "Where does Ada live?", now_us=now_us)) == [newer, older]


async def test_a_changed_text_is_compared_as_it_is_now(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, "I bought a bicycle in Berlin.")
    assert not any(one.later_id for one in (await recall(engine)).recollections)
    await engine.fragments.update(*NAME, FragmentChange(newer, content=NEW))
    assert ids_of(await recall(engine)) == [newer, older]
    operation = await engine.erasing.start(*NAME, [newer])
    await engine.operations.wait_for_end(operation.id)
    async with engine.actors.use(*NAME) as actor:
        assert newer not in actor.working.words, "no trace of erased words"


async def test_a_filter_is_never_widened_by_twins(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD, session="a")
    await tell(engine, NEW, session="b")
    assert ids_of(await recall(engine, filter=Filter(sessions=("a",)))) == [older]


async def test_an_earlier_revision_shows_its_own_order(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, NEW)
    revision = (await recall(engine)).revision
    await decide(engine, newer, older, ConflictDecision.BOTH)
    before, after = [(await recall(engine, as_of=AsOf(at))).recollections for at in (revision, revision + 1)]
    assert [one.later_id for one in before] == ["", newer]
    assert [one.later_id for one in after] == ["", ""]


# ---- outcomes
async def test_an_outcome_names_the_nearest_earlier_ones(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD)
    (other,) = await tell(engine, "My sister lives by the sea.")
    assert [one.fragment for one in await near(engine, NEW)] == [older, other]
    assert [one.fragment for one in await near(engine, "I live in Oslo near the river.", 1)] != [older, other]


async def test_an_outcome_names_those_of_its_own_batch(engine: PartsEngine) -> None:
    await create(engine)
    items = [observation(text, speaker="Ada") for text in (OLD, OTHERS[0], NEW)]
    done = await engine.observe_batch(*NAME, "", 1, items, AckLevel.STORED, related=3)
    first, _, last = done.outcomes
    assert [one.fragment for one in last.related] == [first.fragment]
    assert last.related[0].share == pytest.approx(3 / 4)  # live, near, river of four words
    assert first.related == ()


async def test_only_who_asks_is_named_related_statements(engine: PartsEngine) -> None:
    await create(engine)
    await tell(engine, OLD)
    assert await near(engine, NEW, 0) == ()


@pytest.mark.parametrize("fields", [{"speaker": "Grace"}, {"role": Role.ASSISTANT}, {"observe_time_us": 1}])
async def test_others_and_later_ones_are_not_related(engine: PartsEngine, fields: dict[str, object]) -> None:
    await create(engine)
    await tell(engine, OLD)
    assert await near(engine, NEW, **fields) == ()


async def test_a_repeat_and_an_update_by_key_name_no_self(engine: PartsEngine) -> None:
    await create(engine)
    await tell(engine, OLD, external_id="home")
    assert await near(engine, NEW, external_id="home") == ()
    await tell(engine, OTHERS[0])
    assert await near(engine, OTHERS[0]) == ()


async def test_what_is_superseded_or_forgotten_is_not_related(engine: PartsEngine) -> None:
    await create(engine)
    (first,) = await tell(engine, OLD)
    (second,) = await tell(engine, "I live in Rome near the river.", supersedes=(first,))
    (third,) = await tell(engine, "I live in Oslo near the river.")
    await engine.fragments.forget(*NAME, [third])
    assert [one.fragment for one in await near(engine, NEW)] == [second]


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "in two"])
@pytest.mark.parametrize(("model", "named"), [("all-minilm-l6-v2", [0, 1]), ("", [1])], ids=["measured", "other"])
async def test_a_measured_model_names_related_without_a_shared_word(
    tmp_path: Path, model: str, named: list[int], together: bool
) -> None:
    pytest.importorskip("onnx", reason="the extra onnx is not installed")
    directory = write_model(tmp_path / "model")
    if model:
        (directory / "memstream.json").write_text(json.dumps({"model": model, "space": "tiny"}))
    said = [
        ("I rent a flat in Munich.", 1.0),
        ("Our cat hates the rain.", 0.0),
        ("We signed a lease, said the cat.", 0.9),
    ]
    vectors = [np.array([cosine, (1 - cosine**2) ** 0.5, 0], np.float32) for _, cosine in said]
    items = [observation(text, vector=vector, speaker="Ada") for (text, _), vector in zip(said, vectors, strict=True)]
    async with open_engine(tmp_path / "data", embedding="onnx", embedding_model_dir=directory) as engine:
        await create(engine)
        outcomes = []
        for number, group in enumerate([items] if together else [items[:2], items[2:]]):
            done = await engine.observe_batch(*NAME, f"{number}", 1, group, AckLevel.STORED, related=3)
            outcomes += done.outcomes
    assert [one.fragment for one in outcomes[-1].related] == [outcomes[place].fragment for place in named]
    assert [one.share > 0 for one in outcomes[-1].related] == [place == 1 for place in named]


# ---- suspicions
async def test_a_twin_is_suspected_with_its_observation(engine: PartsEngine, pair: tuple[str, str]) -> None:
    (found,) = await conflicts(engine)
    assert (found.suspicion.newer, found.suspicion.older) == pair
    assert (found.suspicion.reason, found.decision) == (ConflictReason.TWINS, None)
    (event,) = await told(engine, EventType.CONFLICT_SUSPECTED)
    assert (event.fragment, event.other, event.conflict_reason) == (*pair, "twins")
    assert [len(one.suspicions) for one in (await recall(engine)).recollections[:2]] == [1, 1]


async def test_both_statements_of_one_batch_are_compared(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    older, *_, newer = await tell(engine, OLD, *OTHERS, NEW)
    assert await pairs(engine) == [(newer, older)]


@pytest.mark.parametrize("kind", [MemoryKind.LONG_TERM, MemoryKind.SHORT_TERM])
async def test_fragments_of_every_tier_are_compared(engine: PartsEngine, kind: MemoryKind) -> None:
    await create(engine, ASKING, kind)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, NEW)
    assert await pairs(engine) == [(newer, older)]


async def test_an_observation_brings_three_suspicions_at_most(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    await tell(engine, *(f"Order number {number} is paid" for number in range(9)))
    counts: dict[str, int] = {}
    for event in await told(engine, EventType.CONFLICT_SUSPECTED):
        counts[event.fragment] = counts.get(event.fragment, 0) + 1
    assert max(counts.values()) == 3


async def test_a_late_arrival_is_the_older_one(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    (newer,) = await tell(engine, NEW, observe_time_us=2_000_000)
    (older,) = await tell(engine, OLD, observe_time_us=1_000_000)
    assert await pairs(engine) == [(newer, older)]


async def test_what_its_sender_says_about_truth_is_not_suspected(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    await tell(engine, OLD, external_id="home")
    await tell(engine, NEW, supersedes=("home",))
    await tell(engine, "My rent is 900 euros.", valid_until_us=1)
    await tell(engine, "My rent is 950 euros.")
    assert await conflicts(engine) == []


async def test_a_repeat_is_not_suspected_again(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    await tell(engine, OLD)
    for _ in range(2):
        await tell(engine, NEW)
    assert len(await conflicts(engine)) == len(await told(engine, EventType.CONFLICT_SUSPECTED)) == 1


# ---- decisions
@pytest.mark.parametrize("decision", [ConflictDecision.BOTH, ConflictDecision.NEITHER])
@pytest.mark.parametrize("restart", [False, True])
async def test_a_pair_without_a_winner_is_kept_apart(
    engines: OpenEngine, tmp_path: Path, decision: ConflictDecision, restart: bool
) -> None:
    async with engines(tmp_path / "data") as engine:
        await create(engine, ASKING)
        (older,) = await tell(engine, OLD)
        (newer,) = await tell(engine, NEW)
        done = await decide(engine, newer, older, decision)
        assert (done.decision, done.note, done.decide_time_us is not None) == (decision, "asked Ada", True)
        assert (await conflicts(engine), await conflicts(engine, decided=True)) == ([], [done])
        (event,) = await told(engine, EventType.CONFLICT_RESOLVED)
        assert (event.fragment, event.other, event.conflict_decision) == (newer, older, decision)
        if not restart:
            assert not any(one.later_id or one.suspicions for one in (await recall(engine)).recollections)
    if restart:
        async with engines(tmp_path / "data") as engine:
            assert not any(one.later_id or one.suspicions for one in (await recall(engine)).recollections)


@pytest.mark.parametrize("decision", [ConflictDecision.NEWER, ConflictDecision.OLDER])
async def test_the_winner_supersedes_the_other(
    engine: PartsEngine, pair: tuple[str, str], decision: ConflictDecision
) -> None:
    winner, loser = pair if decision is ConflictDecision.NEWER else pair[::-1]
    await decide(engine, *pair, decision)
    (event,) = await told(engine, EventType.SUPERSEDED)
    assert (event.fragment, event.other) == (loser, winner)
    fragment, _, _ = await engine.fragments.get(*NAME, id=loser)
    assert fragment.superseded_by == winner
    assert [one.decision for one in await conflicts(engine, decided=True)] == [decision]
    assert await ended(engine) == []


async def test_two_that_are_not_suspected_can_be_decided(engine: PartsEngine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, NEW)
    await decide(engine, newer, older, ConflictDecision.BOTH)
    (found,) = await conflicts(engine, decided=True)
    assert (found.suspicion.reason, found.decision) == (ConflictReason.TWINS, ConflictDecision.BOTH)
    assert not any(one.later_id for one in (await recall(engine)).recollections)
    await decide(engine, newer, older, ConflictDecision.NEWER)
    assert ids_of(await recall(engine)) == [newer]


async def test_the_older_one_cannot_be_named_first(engine: PartsEngine, pair: tuple[str, str]) -> None:
    with pytest.raises(FragmentNotFound, match="was not observed after"):
        await decide(engine, *pair[::-1], ConflictDecision.BOTH)


@pytest.mark.parametrize("forgotten", [0, 1])
async def test_a_forgotten_fragment_is_not_decided_about(engine: PartsEngine, forgotten: int) -> None:
    await create(engine)
    both = [*await tell(engine, OLD), *await tell(engine, NEW)]
    await engine.fragments.forget(*NAME, [both[forgotten]])
    with pytest.raises(FragmentNotFound):
        await decide(engine, both[1], both[0], ConflictDecision.BOTH)


# ---- the end of a pair
@pytest.mark.parametrize("side", [0, 1])
async def test_an_edit_is_compared_again(engine: PartsEngine, pair: tuple[str, str], side: int) -> None:
    texts = ("I live in Berlin near the river now, in the east.", "I live in Munich, Germany, near the river.")
    await engine.fragments.update(*NAME, FragmentChange(pair[side], content=texts[side]))
    assert await ended(engine) == [pair]
    assert await pairs(engine) == [pair]
    kinds = [one.type for one in await told(engine, EventType.CONFLICT_ENDED, EventType.CONFLICT_SUSPECTED)]
    assert kinds == [EventType.CONFLICT_SUSPECTED, EventType.CONFLICT_ENDED, EventType.CONFLICT_SUSPECTED]
    assert ids_of(await recall(engine))[:2] == list(pair)


async def test_another_text_ends_a_suspicion(engine: PartsEngine, pair: tuple[str, str]) -> None:
    await engine.fragments.update(*NAME, FragmentChange(pair[0], content="I bought a bicycle."))
    assert (await conflicts(engine), await ended(engine)) == ([], [pair])
    assert not any(one.suspicions for one in (await recall(engine)).recollections)


async def test_another_text_ends_a_decision_to_keep_apart(engine: PartsEngine, pair: tuple[str, str]) -> None:
    await decide(engine, *pair, ConflictDecision.BOTH)
    await engine.fragments.update(*NAME, FragmentChange(pair[0], content="I live in Rome near the river now."))
    assert (await pairs(engine), await ended(engine)) == ([pair], [pair])
    assert await conflicts(engine, decided=True) == []


@pytest.mark.parametrize("side", [0, 1])
async def test_forgetting_closes_and_restoring_compares_again(
    engine: PartsEngine, pair: tuple[str, str], side: int
) -> None:
    await engine.fragments.forget(*NAME, [pair[side]])
    assert (await conflicts(engine), await ended(engine)) == ([], [pair])
    await engine.fragments.restore(*NAME, [pair[side]])
    assert await pairs(engine) == [pair]


async def test_a_decided_pair_is_not_suspected_again(engine: PartsEngine, pair: tuple[str, str]) -> None:
    newer, older = pair
    await decide(engine, newer, older, ConflictDecision.NEWER)
    await engine.fragments.restore(*NAME, [older])  # undoes the supersession
    await engine.fragments.forget(*NAME, [older])
    await engine.fragments.restore(*NAME, [older])
    assert await conflicts(engine) == []
    assert len(await told(engine, EventType.CONFLICT_SUSPECTED)) == 1


async def test_superseding_closes_a_suspicion(engine: PartsEngine, pair: tuple[str, str]) -> None:
    newer, older = pair
    await engine.fragments.supersede(*NAME, [older], newer)
    assert (await conflicts(engine), await ended(engine)) == ([], [pair])


async def test_an_erased_fragment_leaves_no_suspicion(engine: PartsEngine, pair: tuple[str, str]) -> None:
    operation = await engine.erasing.start(*NAME, [pair[1]])
    await engine.operations.wait_for_end(operation.id)
    assert (await conflicts(engine), await ended(engine)) == ([], [pair])
    assert not any(one.suspicions for one in (await recall(engine)).recollections)


async def test_an_update_by_key_is_compared_again(engine: PartsEngine) -> None:
    await create(engine, ASKING)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, "We had soup for lunch.", external_id="home")
    assert await pairs(engine) == []
    await tell(engine, NEW, external_id="home")
    assert await pairs(engine) == [(newer, older)]


async def test_the_log_has_what_is_known_at_each_revision(engines: OpenEngine, tmp_path: Path) -> None:
    async with engines(tmp_path / "data") as engine:
        await create(engine, ASKING)
        (older,) = await tell(engine, OLD)
        (newer,) = await tell(engine, NEW)
        at = (await recall(engine)).revision
        await engine.fragments.forget(*NAME, [older])
        await engine.fragments.restore(*NAME, [older])
        await decide(engine, newer, older, ConflictDecision.BOTH)
    async with engines(tmp_path / "data") as engine:
        seen = [
            [len(one.suspicions) for one in (await recall(engine, as_of=AsOf(at + step))).recollections]
            for step in range(4)
        ]
        assert seen == [[1, 1], [0], [1, 1], [0, 0]]
        async with engine.actors.use(*NAME) as actor:
            assert [one.apart for one in actor.working.suspicions] == [True]
