"""Texts that are JSON, and what is wrong with those that are not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.json_text import find_fault
from tests.support.arbitrary import UNICODE

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(UNICODE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(UNICODE), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans())
def test_what_python_writes_is_json(value: object, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped)
    assert find_fault(text.encode("utf-8", "replace")) == ""


@pytest.mark.parametrize("text", ['"\\ud83d"', '["\\udc00 and more", "\\ud800\\ud800"]'])
def test_lone_surrogate_in_an_escape_is_json(text: str) -> None:
    assert find_fault(text.encode()) == ""


@pytest.mark.parametrize("text", ["", "{", "{'a': 1}", "[1,]", "01", "nul", '"\\ud83d', "1 2", '{"a": 1} x'])
def test_text_that_is_no_json_is_named(text: str) -> None:
    assert find_fault(text.encode())


def test_nesting_beyond_the_stack_is_refused() -> None:
    assert find_fault(b"[" * 100_000 + b"]" * 100_000) == "it is nested too deeply"
