"""Draws: fixed for a memory and a pair, spread evenly over [0, 1)."""

from __future__ import annotations

import pytest

from memstream_server.core.enhancement import draw_number


def test_a_draw_never_changes() -> None:
    """Stored events contain these numbers: another formula would decide retries differently."""
    assert draw_number(b"seed", "a", "b") == draw_number(b"seed", "a", "b")
    assert [round(draw_number(b"seed", "a", other), 6) for other in "bcd"] == [0.799794, 0.096105, 0.311154]


def test_pairs_are_ordered_and_ids_do_not_run_together() -> None:
    draws = {
        draw_number(b"s", "a", "b"),
        draw_number(b"s", "b", "a"),
        draw_number(b"s", "ab", ""),
        draw_number(b"s", "", "ab"),
        draw_number(b"t", "a", "b"),
    }
    assert len(draws) == 5


def test_draws_are_even() -> None:
    draws = [draw_number(b"seed", str(number), "x") for number in range(2000)]
    assert all(0 <= value < 1 for value in draws)
    tenths = [sum(tenth <= 10 * value < tenth + 1 for value in draws) for tenth in range(10)]
    assert min(tenths) > 150
    assert max(tenths) < 250


def test_a_seed_longer_than_the_hash_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="key"):
        draw_number(b"x" * 65, "a", "b")
