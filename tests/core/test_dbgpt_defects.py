"""DB-GPT's defects that are not behaviour (as far as the core can show them), each with the right result.

Not here, because they need a server or a model: `now` frozen when the memory is made, access times lost, the LLM
called inside the lock, alpha, beta and gamma ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from memstream_server.core import lifecycle, tiers
from memstream_server.core.events import EventType, Reason
from memstream_server.core.policy import DBGPT, DEFAULT, Policy, with_value
from memstream_server.core.transition import Transition, join_all
from memstream_server.core.values import Fragment, Held, MemoryKind, State, Tier, Vector

EAST: Vector = np.array([1, 0], dtype=np.float32)
NORTH: Vector = np.array([0, 1], dtype=np.float32)


def policy(of: Policy, **values: object) -> Policy:
    for name, value in values.items():
        of = with_value(of, name.replace("__", "."), value)
    return of


def said(number: int, content: str = "", *, vector: Vector | None = None, importance: float = 0.5) -> tiers.Newcomer:
    fragment = Fragment(id=f"{number:026d}", content=content or str(number), importance=importance, position=number)
    return tiers.Newcomer(fragment, vector)


def all_of(kind: MemoryKind, of: Policy, newcomers: Sequence[tiers.Newcomer]) -> Transition:
    """The joined transition of observing the newcomers in order."""
    state, steps = State(kind, b"seed"), []
    for newcomer in newcomers:
        steps.append(tiers.observe(state, newcomer, of, 0.8))
        state = steps[-1].state
    return join_all(steps)


def contents(transition: Transition, tier: Tier) -> list[str]:
    return [fragment.content for fragment in transition.puts if fragment.tier is tier]


def test_fifo_overflow_promotes_the_oldest_and_nothing_twice() -> None:
    """DB-GPT truncated the list before it took the overflow from it: the oldest was lost, the next one duplicated."""
    for profile in (DEFAULT, DBGPT):
        fifo = policy(profile, short_term__kind="fifo", short_term__capacity=2)
        done = all_of(MemoryKind.HYBRID, fifo, [said(number) for number in (1, 2, 3, 4, 5)])
        assert contents(done, Tier.LONG_TERM) == ["1", "2", "3"]
        assert contents(done, Tier.SHORT_TERM) == ["4", "5"]


def test_every_fragment_keeps_metadata_of_its_own() -> None:
    """DB-GPT handed one dict to all fragments of a memory."""
    newcomers = [
        replace(said(number), fragment=said(number).fragment.but(metadata=(("row", number),))) for number in (1, 2, 3)
    ]
    done = all_of(MemoryKind.HYBRID, policy(DEFAULT, short_term__capacity=1), newcomers)
    assert [fragment.metadata for fragment in done.puts] == [(("row", 1),), (("row", 2),), (("row", 3),)]


def test_importance_zero_does_not_delete() -> None:
    """DB-GPT read an unparsable score as 0, which sensory then filtered; by default 0 is just the least."""
    done = all_of(MemoryKind.HYBRID, DEFAULT, [said(1, importance=0.0)])
    assert contents(done, Tier.SHORT_TERM) == ["1"]
    assert not done.removed


def test_reading_feeds_no_copies_back() -> None:
    """DB-GPT stored the results of a read as new fragments; here they enhance at most once and add none."""
    done = all_of(
        MemoryKind.HYBRID, policy(DEFAULT, short_term__capacity=1), [said(1, "tea", vector=EAST), said(2, vector=NORTH)]
    )
    state = tiers.observe(done.state, said(3, "tea again", vector=EAST), DEFAULT, 0.8).state
    found = tiers.Recollected(done.puts[0].id, "tea", EAST)
    steps = []
    for _ in range(3):
        steps.append(tiers.recollect(state, [found, found], DEFAULT, 0.8))
        state = steps[-1].state
    events = [event for step in steps for event in step.events]
    assert [(event.type, event.other) for event in events] == [(EventType.ENHANCED, found.id)]
    assert [held.fragment.content for held in state.short_term] == ["2", "tea again"]


def test_no_insight_is_an_answer() -> None:
    """DB-GPT crashed on an empty insight list; here the promotion does not depend on an insight."""
    eager = policy(DEFAULT, short_term__enhance_threshold=1)
    done = all_of(MemoryKind.HYBRID, eager, [said(1, vector=EAST), said(2, vector=EAST)])
    assert [request.texts for request in done.insight_requests] == [("1", "2")]
    assert contents(done, Tier.LONG_TERM) == ["1"]
    assert contents(done, Tier.SHORT_TERM) == ["2"]


def test_clear_clears() -> None:
    """DB-GPT's hybrid clear returned an empty list and kept everything."""
    done = all_of(MemoryKind.HYBRID, policy(DEFAULT, short_term__capacity=2), [said(number) for number in (1, 2, 3)])
    cleared = lifecycle.clear_fragments(done.state, done.puts, resets=True)
    assert set(cleared.removed) == {fragment.id for fragment in done.puts}
    assert (cleared.state.sensory, cleared.state.short_term) == ((), ())
    assert {event.reason for event in cleared.events} == {Reason.CLEARED}


def test_reflection_comes_due() -> None:
    """A to-do in DB-GPT: three observations of 0.5 reach a threshold of 1.5, which resets the sum."""
    done = all_of(
        MemoryKind.LONG_TERM, policy(DEFAULT, reflection__threshold=1.5), [said(1), said(2), said(3), said(4)]
    )
    assert done.reflect
    assert done.state.reflection_aggregate == 0.5


def test_forgetting_takes_out_of_recall_and_back() -> None:
    """A to-do in DB-GPT."""
    kept = all_of(MemoryKind.HYBRID, DEFAULT, [said(1), said(2)])
    gone = lifecycle.forget_fragments(kept.state, kept.puts[:1], time_us=7, reason=Reason.EXPIRED)
    assert [held.fragment.content for held in gone.state.short_term] == ["2"]
    assert gone.puts[0].forget_time_us == 7
    back = lifecycle.restore_fragments(gone.state, [Held(gone.puts[0])], DEFAULT)
    assert [held.fragment.content for held in back.state.short_term] == ["1", "2"]


def test_enhanced_overflow_evicts_the_weakest() -> None:
    """DB-GPT's index arithmetic is right here: evict the weakest, never the newest, and undo its enhancements."""
    enhanced = policy(DBGPT, short_term__capacity=2, short_term__similarity_rule="cosine")
    newcomers = [said(1, vector=EAST, importance=0.9), said(2, vector=EAST, importance=0.1), said(3, vector=NORTH)]
    done = all_of(MemoryKind.HYBRID, enhanced, newcomers)
    assert done.removed == (newcomers[1].fragment.id,)
    assert [held.fragment.enhancement_count for held in done.state.short_term] == [0, 0]
