"""Bounds of the policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memstream_server.core.policy import DBGPT, DEFAULT, find_violations


def test_profiles_are_within_their_bounds() -> None:
    assert find_violations(DEFAULT) == []
    assert find_violations(DBGPT) == []


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_value_out_of_bounds_is_named(value: float) -> None:
    policy = replace(DEFAULT, recall=replace(DEFAULT.recall, min_relevance=value))
    (found,) = find_violations(policy)
    assert found.field == "recall.min_relevance"
    assert found.description == f"must be between 0 and 1, is {value}"


def test_large_bounds_are_written_out() -> None:
    policy = replace(DEFAULT, short_term=replace(DEFAULT.short_term, echo_window_s=86_401))
    assert find_violations(policy)[0].description == "must be between 0 and 86400, is 86401"
