"""Suspicions on a real engine: found with the observation, shown by recall, decided, and removed with a fragment."""

from __future__ import annotations

from pathlib import Path

import pytest

from memstream_server.core.events import EventType
from memstream_server.core.filters import Filter
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.suspicions import ConflictDecision, ConflictReason
from memstream_server.core.values import MemoryKind
from memstream_server.engine.conflicts import Verdict
from memstream_server.engine.engine import Engine
from memstream_server.engine.errors import FragmentNotFound
from memstream_server.engine.lifecycle import FragmentChange
from memstream_server.engine.requests import AckLevel, NewMemory, Query, RecallAnswer
from memstream_server.ports.journal.reading import StoredConflict
from tests.engine.conftest import OpenEngine
from tests.engine.memory import observation
from tests.engine.test_by_request import NAME, told

OLD, NEW = "I live in Munich near the river.", "I moved to Berlin last month."
OTHERS = ("The train was late today.", "We had soup for lunch.", "My sister lives in Hamburg.")


async def create(engine: Engine, policy: Policy = DEFAULT, kind: MemoryKind = MemoryKind.HYBRID) -> None:
    await engine.memories.create(NewMemory(*NAME, kind, policy))


async def tell(engine: Engine, *contents: str, **fields: object) -> list[str]:
    items = [observation(content, **{"speaker": "Ada", "session": "letters"} | fields) for content in contents]  # type: ignore[arg-type]  # real fields
    return [one.fragment for one in (await engine.observe_batch(*NAME, "", 1, items, AckLevel.STORED)).outcomes]


async def conflicts(engine: Engine, decided: bool = False) -> list[StoredConflict]:
    return (await engine.conflicts.list_page(*NAME, decided, ("", ""), 100))[0]


async def recall(engine: Engine, text: str = "Where does Ada live?", **more: object) -> RecallAnswer:
    return await engine.recall(*NAME, Query(text, reinforce=False, working_memory=False, **more))  # type: ignore[arg-type]  # real fields


async def decide(engine: Engine, newer: str, older: str, decision: ConflictDecision) -> StoredConflict:
    return (await engine.conflicts.resolve(*NAME, Verdict(newer, older, decision, "asked Ada"), None))[0]


@pytest.fixture
async def pair(engine: Engine) -> tuple[str, str]:
    """(newer, older) in a memory that suspects them, and folds."""
    await create(engine, with_value(DEFAULT, "conflicts.fold", True))
    (older,) = await tell(engine, OLD)
    await tell(engine, *OTHERS)
    (newer,) = await tell(engine, NEW)
    return newer, older


async def test_an_update_is_suspected_with_its_observation(engine: Engine, pair: tuple[str, str]) -> None:
    (found,) = await conflicts(engine)
    assert (found.suspicion.newer, found.suspicion.older) == pair
    assert (found.suspicion.reason, found.decision) == (ConflictReason.PLACE, None)
    (event,) = await told(engine, EventType.CONFLICT_SUSPECTED)
    assert (event.fragment, event.other, event.conflict_reason) == (*pair, "place")


async def test_numbered_statements_are_all_returned(engine: Engine) -> None:
    await create(engine, with_value(DEFAULT, "conflicts.fold", True))
    for number in range(20):
        await tell(engine, f"Order {number} is paid since week {number}.", observe_time_us=(number + 1) * 60_000_000)
    assert await conflicts(engine) == []
    assert len((await recall(engine, "Which order is paid?", limit=20, fold=False)).recollections) == 20


async def test_both_statements_of_one_batch_are_compared(engine: Engine) -> None:
    await create(engine)
    older, *_, newer = await tell(engine, OLD, *OTHERS, NEW)
    (found,) = await conflicts(engine)
    assert (found.suspicion.newer, found.suspicion.older) == (newer, older)


@pytest.mark.parametrize("kind", [MemoryKind.LONG_TERM, MemoryKind.SHORT_TERM])
async def test_fragments_of_every_tier_are_compared(engine: Engine, kind: MemoryKind) -> None:
    await create(engine, kind=kind)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, NEW)
    assert [(one.suspicion.newer, one.suspicion.older) for one in await conflicts(engine)] == [(newer, older)]


async def test_a_list_said_at_once_is_not_suspected(engine: Engine) -> None:
    """ "Order 1 is paid", "order 2 is paid": both are true. Months apart, the second may replace the first."""
    await create(engine)
    await tell(engine, *(f"Order number {number} is paid" for number in range(20)))
    assert await conflicts(engine) == []
    first = await tell(engine, "My rent is 900 euros.", observe_time_us=1_000_000)
    later = await tell(engine, "My rent is 950 euros.", observe_time_us=60_000_000)
    assert [[one.suspicion.older, one.suspicion.newer] for one in await conflicts(engine)] == [first + later]


async def test_another_speaker_is_not_suspected(engine: Engine) -> None:
    await create(engine)
    await tell(engine, OLD, speaker="Grace")
    await tell(engine, NEW)
    assert await conflicts(engine) == []


async def test_a_late_arrival_is_the_older_one(engine: Engine) -> None:
    await create(engine)
    (newer,) = await tell(engine, NEW, observe_time_us=2_000_000)
    (older,) = await tell(engine, OLD, observe_time_us=1_000_000)
    (found,) = await conflicts(engine)
    assert (found.suspicion.newer, found.suspicion.older) == (newer, older)


async def test_what_its_sender_says_about_truth_is_not_suspected(engine: Engine) -> None:
    await create(engine)
    await tell(engine, OLD, external_id="home")
    await tell(engine, NEW, supersedes=("home",))
    await tell(engine, "My rent is 900 euros.", valid_until_us=1)
    await tell(engine, "My rent is now 950 euros.")
    assert await conflicts(engine) == []


async def test_a_cut_recollection_keeps_its_suspicions(engine: Engine, pair: tuple[str, str]) -> None:
    answer = await recall(engine, token_budget=2, limit=1)
    (hit,) = answer.recollections
    assert (hit.truncated, hit.fragment.id) == (True, pair[0])
    assert [(one.newer, one.older) for one in hit.suspicions] == [pair]


async def test_a_repeat_is_not_suspected_again(engine: Engine) -> None:
    await create(engine)
    await tell(engine, OLD)
    for _ in range(2):
        await tell(engine, NEW)
    assert len(await conflicts(engine)) == len(await told(engine, EventType.CONFLICT_SUSPECTED)) == 1


async def test_an_update_by_key_is_no_fragment_to_suspect(engine: Engine) -> None:
    await create(engine)
    await tell(engine, OLD, external_id="home")
    await tell(engine, NEW, external_id="home")
    assert await conflicts(engine) == []


@pytest.mark.parametrize("policy", [with_value(DEFAULT, "conflicts.suspect", False), DBGPT])
async def test_the_policy_turns_suspicions_off(engine: Engine, policy: Policy) -> None:
    await create(engine, policy, MemoryKind.HYBRID)
    await tell(engine, OLD)
    await tell(engine, NEW)
    assert await conflicts(engine) == []


# ---- recall
async def test_the_newer_fragment_comes_first_and_both_say_so(engine: Engine, pair: tuple[str, str]) -> None:
    newer, older = pair
    answer = await recall(engine, near_misses=10)
    ids = [one.fragment.id for one in answer.recollections]
    first = answer.recollections[ids.index(newer)]
    assert older not in ids
    assert first.under == (older,)
    assert [(one.newer, one.older) for one in first.suspicions] == [pair]
    assert [one.stage for one in answer.near_misses if one.scored.id == older] == ["suspected"]


async def test_without_folding_both_are_returned(engine: Engine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD)
    (newer,) = await tell(engine, NEW)
    answer = await recall(engine)
    assert [one.fragment.id for one in answer.recollections] == [newer, older]
    assert [len(one.suspicions) for one in answer.recollections] == [1, 1]


async def test_a_filter_is_never_widened_by_a_suspicion(engine: Engine) -> None:
    await create(engine)
    (older,) = await tell(engine, OLD, session="a")
    await tell(engine, NEW, session="b")
    answer = await recall(engine, filter=Filter(sessions=("a",)))
    assert [one.fragment.id for one in answer.recollections] == [older]


# ---- decisions
@pytest.mark.parametrize("decision", [ConflictDecision.BOTH, ConflictDecision.NEITHER])
async def test_without_a_winner_only_the_suspicion_ends(
    engine: Engine, pair: tuple[str, str], decision: ConflictDecision
) -> None:
    done = await decide(engine, *pair, decision)
    assert (done.decision, done.note, done.decide_time_us is not None) == (decision, "asked Ada", True)
    assert (await conflicts(engine), await conflicts(engine, decided=True)) == ([], [done])
    answer = await recall(engine)
    assert set(pair) <= {one.fragment.id for one in answer.recollections}
    assert not any(one.suspicions for one in answer.recollections)
    (event,) = await told(engine, EventType.CONFLICT_RESOLVED)
    assert (event.fragment, event.other, event.conflict_decision) == (*pair, decision)


@pytest.mark.parametrize("decision", [ConflictDecision.NEWER, ConflictDecision.OLDER])
async def test_the_winner_supersedes_the_other(
    engine: Engine, pair: tuple[str, str], decision: ConflictDecision
) -> None:
    winner, loser = pair if decision is ConflictDecision.NEWER else pair[::-1]
    await decide(engine, *pair, decision)
    (event,) = await told(engine, EventType.SUPERSEDED)
    assert (event.fragment, event.other) == (loser, winner)
    fragment, _, _ = await engine.fragments.get(*NAME, id=loser)
    assert fragment.superseded_by == winner
    assert [one.decision for one in await conflicts(engine, decided=True)] == [decision]


async def test_an_unknown_pair_cannot_be_decided(engine: Engine, pair: tuple[str, str]) -> None:
    with pytest.raises(FragmentNotFound):
        await decide(engine, *pair[::-1], ConflictDecision.BOTH)


async def test_a_decision_survives_a_restart(engines: OpenEngine, tmp_path: Path) -> None:
    async with engines(tmp_path / "data") as engine:
        await create(engine)
        (first,) = await tell(engine, OLD)
        (second,) = await tell(engine, NEW)
        (rent,) = await tell(engine, "My rent is 900 euros.")
        (raised,) = await tell(engine, "My rent is now 950 euros.")
        await decide(engine, second, first, ConflictDecision.BOTH)
    async with engines(tmp_path / "data") as engine:
        assert [(one.suspicion.newer, one.suspicion.older) for one in await conflicts(engine)] == [(raised, rent)]
        answer = await recall(engine, "How much is Ada's rent?")
        assert answer.recollections[0].fragment.id == raised
        assert {first, second} <= {one.fragment.id for one in answer.recollections}


async def test_supersession_of_others_hides_no_suspicion(engine: Engine, pair: tuple[str, str]) -> None:
    newer, older = pair
    (tea, coffee) = await tell(engine, "Bob prefers tea.", "Bob prefers coffee.", speaker="Eve")
    await engine.fragments.supersede(*NAME, [tea], coffee)
    first = (await recall(engine)).recollections[0]
    assert (first.fragment.id, first.under) == (newer, (older,))
    assert [(one.newer, one.older) for one in first.suspicions] == [pair]


# ---- the end of a fragment
async def test_an_erased_fragment_leaves_no_suspicion(engine: Engine, pair: tuple[str, str]) -> None:
    operation = await engine.erasing.start(*NAME, [pair[1]])
    await engine.operations.wait_for_end(operation.id)
    assert await conflicts(engine) == []
    assert not any(one.suspicions for one in (await recall(engine)).recollections)


async def test_a_changed_content_ends_its_suspicions(engine: Engine, pair: tuple[str, str]) -> None:
    await engine.fragments.update(*NAME, FragmentChange(pair[0], content="I bought a bicycle."))
    assert await conflicts(engine) == []
    assert not any(one.suspicions for one in (await recall(engine)).recollections)
