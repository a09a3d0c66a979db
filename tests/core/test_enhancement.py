"""Enhancement's rules at their edges: what counts as a hit, and the merged text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.enhancement import compute_cosine, draw_number, enhance_anchors, find_hit, merged_text
from memstream_server.core.policy import ShortTermPolicy, SimilarityRule
from memstream_server.core.transition import Draft
from memstream_server.core.values import Enhancement, Fragment, Held, MemoryKind, State, Vector

SEED = b"seed"
COSINE = ShortTermPolicy()
SIGMOID = ShortTermPolicy(similarity_rule=SimilarityRule.SIGMOID_DRAW)


def unit(angle: float) -> Vector:
    return np.array([math.cos(angle), math.sin(angle)], dtype=np.float32)


def anchor(id_: str = "a", *enhancements: Enhancement) -> Held:
    return Held(Fragment(id=id_, content=id_), unit(0), enhancements)


def test_model_similarity_min_is_the_default() -> None:
    other, near = Enhancement("b", "b"), unit(math.acos(0.6))
    assert find_hit(anchor(), other, near, COSINE, 0.5, SEED)
    assert not find_hit(anchor(), other, near, COSINE, 0.75, SEED)
    assert not find_hit(anchor(), other, near, ShortTermPolicy(similarity_min=0.75), 0.5, SEED)


def test_the_minimum_itself_is_a_hit() -> None:
    half = np.array([0.5, math.sqrt(0.75)], dtype=np.float32)
    assert find_hit(anchor(), Enhancement("b", "b"), half, ShortTermPolicy(similarity_min=0.5), 0.9, SEED)


def test_nothing_enhances_itself_nor_anything_twice() -> None:
    assert not find_hit(anchor("a"), Enhancement("a", "a"), unit(0), COSINE, 0.5, SEED)
    before = Enhancement("b", "b", recollection=True)
    assert not find_hit(anchor("a", before), Enhancement("b", "b"), unit(0), COSINE, 0.5, SEED)


@pytest.mark.parametrize("rule", list(SimilarityRule))
@given(st.lists(st.none() | st.integers(0, 180), max_size=8), st.integers(0, 180), st.integers(0, 180))
def test_batch_enhancement_equals_single_hits(
    rule: SimilarityRule, anchors: list[int | None], said: int, minimum: int
) -> None:
    """Angles in degrees, so that some are exactly at the minimum. The batch uses one matrix product first."""
    policy = ShortTermPolicy(similarity_rule=rule, similarity_min=math.cos(math.radians(minimum)))
    held = tuple(
        Held(Fragment(id=f"a{place}", content="c"), None if angle is None else unit(math.radians(angle)))
        for place, angle in enumerate(anchors)
    )
    other, vector = Enhancement("b", "b"), unit(math.radians(said))
    draft = Draft(State(kind=MemoryKind.HYBRID, seed=SEED, short_term=held))
    enhance_anchors(draft, other, vector, policy, 0.5)
    hits = [find_hit(each, other, vector, policy, 0.5, SEED) for each in held]
    assert [each.enhancements for each in draft.short_term] == [(other,) if found else () for found in hits]
    events = draft.finish_transition().events
    assert [(each.cosine, each.draw) for each in events] == [(found.cosine, found.draw) for found in hits if found]


def test_a_sigmoid_of_seven_tenths_takes_a_cosine_of_0847() -> None:
    """sigmoid(0.847) = 0.7. The test searches for a pair of ids that wins its draw."""
    lucky = next(id_ for id_ in map(str, range(100)) if draw_number(SEED, "a", id_) < 0.5)
    other = Enhancement(lucky, "b")
    assert not find_hit(anchor(), other, unit(math.acos(0.846)), SIGMOID, 0.0, SEED)
    found = find_hit(anchor(), other, unit(math.acos(0.848)), SIGMOID, 0.0, SEED)
    assert found is not None
    assert found.draw == draw_number(SEED, "a", lucky)


def test_a_lost_draw_is_no_hit_even_for_the_same_words() -> None:
    unlucky = next(id_ for id_ in map(str, range(100)) if draw_number(SEED, "a", id_) > 0.74)
    assert not find_hit(anchor(), Enhancement(unlucky, "b"), unit(0), SIGMOID, 0.0, SEED)


def test_cosines_stay_within_one() -> None:
    vector = np.full(384, 1 / math.sqrt(384), dtype=np.float32) * np.float32(1.0001)
    assert compute_cosine(vector, vector) == 1.0
    assert compute_cosine(vector, -vector) == -1.0


@pytest.mark.parametrize(
    ("recollections", "expected"), [(False, "tea;more tea;last"), (True, "tea;more tea;read;last")]
)
def test_merged_text_has_each_text_once(recollections: bool, expected: str) -> None:
    enhancements = [
        Enhancement("b", "more tea"),
        Enhancement("c", "tea"),
        Enhancement("d", "read", recollection=True),
        Enhancement("e", "last"),
    ]
    assert merged_text(Fragment(id="a", content="tea"), enhancements, recollections=recollections) == expected
