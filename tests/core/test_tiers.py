"""What of a transition the scenario files do not show: the values themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memstream_server.core.events import EventType
from memstream_server.core.policy import DBGPT, DEFAULT, Overflow, SimilarityRule
from memstream_server.core.tiers import Newcomer, observe
from memstream_server.core.transition import anchors_changed
from memstream_server.core.values import Fragment, FragmentKind, MemoryKind, State, Structured, Tier, Vector

EAST: Vector = np.array([1, 0], dtype=np.float32)
NORTH: Vector = np.array([0, 1], dtype=np.float32)
EMPTY = State(MemoryKind.HYBRID, b"seed")
EAGER = replace(DEFAULT, short_term=replace(DEFAULT.short_term, enhance_threshold=1))
MERGING = replace(
    DBGPT,
    short_term=replace(DBGPT.short_term, enhance_threshold=1, similarity_rule=SimilarityRule.COSINE),
)
STEP = Structured(thought="tea")


def newcomer(id_: str, vector: Vector = EAST, **fields: object) -> Newcomer:
    fragment = Fragment(id=id_, content=id_, position=ord(id_))
    return Newcomer(fragment.but(**fields), vector)


def test_a_merged_promotion_says_that_its_vector_is_stale() -> None:
    """The content is no longer the structured observation's text, so it needs a new vector."""
    first = observe(EMPTY, newcomer("a", structured=STEP, observe_time_us=7, session="s"), MERGING, 0.8)
    second = observe(first.state, newcomer("b"), MERGING, 0.8)
    promoted = next(fragment for fragment in second.puts if fragment.id == "a")
    assert second.merged == ("a",)
    merged = '[{"thought": "tea"}, {"observation": "b"}]'
    assert (promoted.content, promoted.structured, promoted.tier) == (merged, None, Tier.LONG_TERM)
    assert (promoted.observe_time_us, promoted.session) == (7, "s")


def test_an_unmerged_promotion_keeps_what_it_was() -> None:
    first = observe(EMPTY, newcomer("a", structured=STEP), EAGER, 0.8)
    second = observe(first.state, newcomer("b"), EAGER, 0.8)
    promoted = next(fragment for fragment in second.puts if fragment.id == "a")
    assert second.merged == ()
    assert (promoted.content, promoted.structured, promoted.sources) == ("a", STEP, ("b",))


def test_overflow_without_enhancers_merges_nothing() -> None:
    policy = replace(MERGING, short_term=replace(MERGING.short_term, capacity=1, overflow=Overflow.PROMOTE))
    first = observe(EMPTY, newcomer("a", structured=STEP), policy, 0.8)
    second = observe(first.state, newcomer("b", NORTH), policy, 0.8)
    assert second.merged == ()
    assert next(fragment for fragment in second.puts if fragment.id == "a").structured == STEP


def test_imported_insight_does_not_count_to_reflection() -> None:
    empty = replace(EMPTY, kind=MemoryKind.LONG_TERM)
    insight = newcomer("i", kind=FragmentKind.INSIGHT, sources=("a",))
    assert observe(empty, insight, DEFAULT, 0.8).state.reflection_aggregate == 0
    assert observe(empty, newcomer("a"), DEFAULT, 0.8).state.reflection_aggregate == 0.5


def test_moved_anchor_is_not_written() -> None:
    waiting = replace(DEFAULT, sensory=replace(DEFAULT.sensory, capacity=1))
    first = observe(EMPTY, newcomer("a"), waiting, 0.8)
    assert [held.fragment.id for held, _ in anchors_changed(EMPTY, first.state)[0]] == ["a"]
    second = observe(first.state, newcomer("b", NORTH), waiting, 0.8)
    assert [event.fragment for event in second.events if event.type is EventType.ADMITTED] == ["a", "b"]
    changed, released = anchors_changed(first.state, second.state)
    assert ([held.fragment.id for held, _ in changed], released) == (["b"], [])


def test_promoted_anchors_are_released() -> None:
    first = observe(EMPTY, newcomer("a"), EAGER, 0.8)
    second = observe(first.state, newcomer("b"), EAGER, 0.8)
    changed, released = anchors_changed(first.state, second.state)
    assert ([held.fragment.id for held, _ in changed], [held.fragment.id for held in released]) == (["b"], ["a"])
