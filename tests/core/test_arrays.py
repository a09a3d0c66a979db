"""What sorts and numbers values without numpy.ma."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.arrays import mark_firsts, sort_distinct
from memstream_server.core.columns import Codes

few = st.lists(st.integers(0, 8), max_size=12)


@given(few, few)
def test_distinct_values_are_those_of_both_arrays_in_order(first: list[int], second: list[int]) -> None:
    assert sort_distinct(np.array(first, np.int64), np.array(second, np.int64)).tolist() == sorted({*first, *second})


@given(few)
def test_firsts_mark_where_each_run_begins(values: list[int]) -> None:
    marked = mark_firsts(np.array(values, np.int64)).tolist()
    assert marked == [at == 0 or values[at - 1] != values[at] for at in range(len(values))]


@given(few)
def test_packed_codes_name_what_the_codes_named(values: list[int]) -> None:
    codes = Codes()
    given_codes = codes.give_all([f"name {value}" for value in range(9)])
    packed, names = codes.pack(np.array([given_codes[value] for value in values], np.int32))
    assert [names[code] for code in packed.tolist()] == [f"name {value}" for value in values]
    assert names == list(dict.fromkeys(f"name {value}" for value in values))
