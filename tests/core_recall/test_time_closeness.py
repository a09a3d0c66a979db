"""How near a fragment is to the windows of a question."""

from __future__ import annotations

import numpy as np
import pytest

from memstream_server.core.time_phrases.calendar import Window
from memstream_server.core.time_phrases.closeness import time_closeness

DAY = 86_400_000_000
WEEK = Window(10 * DAY, 17 * DAY)


@pytest.mark.parametrize(
    ("windows", "at_days", "value"),
    [
        ([WEEK], 10, 1.0),
        ([WEEK], 16.99, 1.0),
        ([WEEK], 6.5, 0.5),
        ([WEEK], 20.5, 0.5),
        ([WEEK], 24.1, 0.0),
        ([WEEK], 3, 0.0),
        ([Window(DAY, DAY + 1_000_000)], 1.5, 0.5),  # a shorter window reaches a day
        ([Window(0, 365 * DAY)], 380, 0.5),  # a longer one 30 days
        ([Window(None, 10 * DAY)], -4_000, 1.0),
        ([Window(None, 10 * DAY)], 13.5, 0.5),
        ([Window(10 * DAY, None)], 9_000, 1.0),
        ([Window(10 * DAY, None)], 6.5, 0.5),
        ([WEEK, Window(40 * DAY, 41 * DAY)], 40.5, 1.0),
        ([Window(None, 10 * DAY), WEEK], 12, 1.0),
    ],
)
def test_value_is_one_inside_and_falls_to_zero(windows: list[Window], at_days: float, value: float) -> None:
    found = time_closeness(np.array([int(at_days * DAY)], np.int64), windows)
    assert found.tolist() == pytest.approx([value], abs=1e-4)


def test_extreme_times_stay_within_zero_and_one() -> None:
    times = np.array([-62_135_596_800_000_000, 0, 253_402_300_799_999_999], np.int64)
    values = time_closeness(times, [WEEK, Window(None, -DAY), Window(20 * DAY, None)])
    assert values.tolist() == pytest.approx([1, 6 / 7, 1])
