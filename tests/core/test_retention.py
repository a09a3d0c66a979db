"""Retention: the strength of a fragment, what is due, who is weakest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core import retention
from memstream_server.core.events import Reason
from memstream_server.core.policy import RetentionPolicy
from memstream_server.core.values import Fragment

HOUR_US = 3_600_000_000
HOUR_S = 3_600
NOW_US = 1_000 * HOUR_US

hours = st.integers(0, 900)
fragments = st.builds(
    Fragment,
    id=st.text("abc", min_size=1, max_size=3),
    content=st.just("words"),
    importance=st.floats(0, 1),
    access_count=st.integers(0, 1_000),
    create_time_us=hours.map(lambda h: h * HOUR_US),
    access_time_us=hours.map(lambda h: h * HOUR_US),
    expire_time_us=st.none() | st.integers(0, 2_000).map(lambda h: h * HOUR_US),
    pinned=st.booleans(),
    forget_time_us=st.none() | st.just(7),
)
policies = st.builds(
    RetentionPolicy,
    ttl_s=st.integers(0, 1_000).map(lambda h: h * HOUR_S),
    retention_min=st.floats(0, 1),
    strength_half_life_s=st.integers(1, 1_000).map(lambda h: h * HOUR_S),
)


def aged(age_hours: float, **changes: object) -> Fragment:
    seen_us = int(NOW_US - age_hours * HOUR_US)
    plain = Fragment(id="f", content="words", create_time_us=seen_us, access_time_us=seen_us)
    return plain.but(**changes)


@pytest.mark.parametrize(
    ("fragment", "expected"),
    [
        (aged(0), 1.0),
        (aged(10), 0.5),
        (aged(30), 0.125),
        (aged(10, importance=0.0), 0.25),
        (aged(10, importance=1.0), 0.75),
        (aged(10, access_count=1), 0.5 * 1.693147),
        (aged(0, importance=1.0, access_count=9), 1.0),
    ],
)
def test_an_average_fragment_halves_every_half_life(fragment: Fragment, expected: float) -> None:
    assert retention.compute_strength(fragment, NOW_US, 10 * HOUR_S) == pytest.approx(expected, rel=1e-6)


def test_access_restarts_the_decay() -> None:
    old = aged(100)
    again = old.but(access_time_us=NOW_US, access_count=1)
    assert retention.compute_strength(old, NOW_US, HOUR_S) < 1e-6
    assert retention.compute_strength(again, NOW_US, HOUR_S) == 1.0


@given(fragments, st.integers(1, 10_000), st.integers(0, 500))
def test_strength_is_bounded_and_only_time_lowers_it(fragment: Fragment, half_life_s: int, later_hours: int) -> None:
    now = retention.compute_strength(fragment, NOW_US, half_life_s)
    later = retention.compute_strength(fragment, NOW_US + later_hours * HOUR_US, half_life_s)
    assert 0 <= later <= now <= 1
    valued = fragment.but(importance=1.0, access_count=fragment.access_count + 1)
    assert retention.compute_strength(valued, NOW_US, half_life_s) >= now


@given(st.lists(fragments, max_size=20), policies)
def test_due_fragments_have_one_reason_and_no_pin(held: list[Fragment], policy: RetentionPolicy) -> None:
    found = retention.find_due(held, NOW_US, policy)
    assert not {id(one) for one in found[Reason.EXPIRED]} & {id(one) for one in found[Reason.RETENTION]}
    for one in (*found[Reason.EXPIRED], *found[Reason.RETENTION]):
        assert not one.pinned
        assert one.forget_time_us is None
    assert all(retention.is_expired(one, NOW_US, policy) for one in found[Reason.EXPIRED])
    assert all(retention.is_faded(one, NOW_US, policy) for one in found[Reason.RETENTION])
    kept = [one for one in held if not any(one is gone for gone in (*found[Reason.EXPIRED], *found[Reason.RETENTION]))]
    for one in kept:
        exempt = one.pinned or one.forget_time_us is not None
        assert exempt or not (retention.is_expired(one, NOW_US, policy) or retention.is_faded(one, NOW_US, policy))


def test_nothing_is_due_where_the_policy_asks_for_nothing() -> None:
    assert not any(retention.find_due([aged(900)], NOW_US, RetentionPolicy()).values())


def test_the_ttl_is_for_fragments_without_an_expiry_of_their_own() -> None:
    policy = RetentionPolicy(ttl_s=HOUR_S)
    assert retention.is_expired(aged(1), NOW_US, policy)
    assert not retention.is_expired(aged(0.99), NOW_US, policy)
    assert not retention.is_expired(aged(1, expire_time_us=NOW_US + 1), NOW_US, policy)
    assert retention.is_expired(aged(0, expire_time_us=NOW_US), NOW_US, policy)


@given(st.lists(st.floats(0, 1), max_size=30), st.integers(-1, 40))
def test_the_weakest_are_not_stronger_than_those_kept(strengths: list[float], count: int) -> None:
    ids = [str(number) for number in range(len(strengths))]
    gone = retention.select_weakest(ids, strengths, count)
    assert len(gone) == min(max(count, 0), len(ids))
    left = [strength for id_, strength in zip(ids, strengths, strict=True) if id_ not in gone]
    weak = [strengths[int(id_)] for id_ in gone]
    assert weak == sorted(weak)
    assert not weak or not left or max(weak) <= min(left)


def test_of_equals_the_first_given_leaves() -> None:
    assert retention.select_weakest(["a", "b", "c"], [0.5, 0.5, 0.5], 2) == ["a", "b"]
