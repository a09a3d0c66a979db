"""Values of every kind that a program may pass by mistake, for tests of argument checks."""

from __future__ import annotations

import decimal
import pathlib
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import numpy as np
from hypothesis import strategies as st

import memstream

UNICODE = st.characters(exclude_categories=["Cs"])
"""Every character of UTF-8. Hypothesis' default is the same set, but takes a second of CPU in every process."""
_TEXT = st.text(st.characters(categories=("Cs", "Cc", "L", "N", "P", "S", "Z")), max_size=12)
_ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    7,
    2**31,
    2**63,
    -(2**63) - 1,
    10**5000,
    float("nan"),
    float("inf"),
    1e308,
    -0.5,
    1 + 2j,
    decimal.Decimal(1),
    "",
    "x",
    "\ud800",
    "a\x00b",
    "ü" * 200,
    "x" * 70_000,
    "namespace/name",
    "../..",
    b"",
    b"\xff",
    bytearray(b"x"),
    memoryview(b"x"),
    (),
    [],
    ["x"],
    ["\udfff"],
    ("x", 7),
    {"x"},
    [None],
    [["x"]],
    {},
    {"x": 1},
    {7: "x"},
    {"\ud800": 1},
    {"n": {"$gt": 3}},
    {"n": float("nan")},
    {"n": 2**70},
    {"profile": "nothing"},
    datetime(2026, 5, 8),
    datetime(2026, 5, 8, tzinfo=UTC),
    datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    date(2026, 5, 8),
    timedelta(seconds=1),
    timedelta.max,
    timedelta.min,
    np.float32(1.5),
    np.int64(5),
    np.bool_(True),
    np.zeros(384),
    np.zeros((2, 2)),
    np.array(["1", "2"]),
    np.array([None, 1], dtype=object),
    pathlib.Path("/nonexistent"),
    memstream.Tier.SENSORY,
    memstream.EventType.UNKNOWN,
    memstream.PlanState.UNKNOWN,
    memstream.MemoryKind.SENSORY,
    memstream.AckLevel.RECEIVED,
    memstream.Filter(speakers=["x"]),
    memstream.Weights(alpha=1e300),
    memstream.Observation("x"),
    memstream.Structured(thought="x"),
    memstream.Policy(language="none"),
    memstream.Cursor("x", 2**63 - 1),
    memstream.Plan(number=1),
    object(),
    object,
    len,
    ValueError("x"),
    ...,
]

wrong_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(_ODD),
    _TEXT,
    st.integers(),
    st.floats(),
    st.lists(st.sampled_from(_ODD), max_size=3),
    st.dictionaries(_TEXT, st.sampled_from(_ODD), max_size=3),
    st.builds(lambda items: iter(items), st.lists(st.sampled_from(_ODD), max_size=2)),
    st.builds(lambda items: (item for item in items), st.lists(_TEXT, max_size=2)),
)
