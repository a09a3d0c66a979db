"""How near fragments are to the windows of a question, from their observation times.

    value = 1 inside a window; after it, 1 - distance / reach, at least 0; the best over all windows

The reach is the window's own width, within REACH_MIN_US and REACH_MAX_US: "yesterday" reaches a day, "last week" a
week. People tell of a time after it, so nothing before a window is near; of a time that is still to come they speak
before it, so such a window reaches back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memstream_server.core.time_phrases.calendar import Window

_DAY_US = 86_400_000_000
REACH_MIN_US = _DAY_US
REACH_MAX_US = 30 * _DAY_US
REACH_OPEN_US = 7 * _DAY_US
"""Reach of a window with an open side."""


def time_closeness(
    observe_us: npt.NDArray[np.int64], windows: Sequence[Window], now_us: int
) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1] for the observation times `observe_us` and a question asked at `now_us`."""
    nearest = np.zeros(len(observe_us))
    for window in windows:
        reach = _reach_us(window)
        distance = np.zeros(len(observe_us))
        if window.start_us is not None:
            early = window.start_us - observe_us
            np.maximum(distance, early if window.start_us > now_us else np.where(early > 0, reach, 0), out=distance)
        if window.end_us is not None:
            np.maximum(distance, observe_us - (window.end_us - 1), out=distance)
        np.maximum(nearest, 1.0 - distance / reach, out=nearest)
    return nearest


def is_near(observe_us: npt.NDArray[np.int64], windows: Sequence[Window], now_us: int) -> npt.NDArray[np.bool_]:
    """bool[n]: where `time_closeness` is above 0; two comparisons a window, for all fragments of a memory."""
    near = np.zeros(len(observe_us), np.bool_)
    for window in windows:
        reach = _reach_us(window)
        inside = np.ones(len(observe_us), np.bool_)
        if window.start_us is not None:
            inside &= observe_us > window.start_us - (reach if window.start_us > now_us else 1)
        if window.end_us is not None:
            inside &= observe_us < window.end_us - 1 + reach
        near |= inside
    return near


def _reach_us(window: Window) -> int:
    if window.start_us is None or window.end_us is None:
        return REACH_OPEN_US
    return min(max(window.end_us - window.start_us, REACH_MIN_US), REACH_MAX_US)
