"""Edits of a block's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.blocks import Append, EditRefused, Insert, Replace, apply_edit, check_size

LINES = st.lists(st.text("ab c茶", max_size=5), max_size=6)


@pytest.mark.parametrize(
    ("text", "edit", "after"),
    [
        ("", Append("a"), "a"),
        ("a", Append("b"), "a\nb"),
        ("a\n", Append("b\n"), "a\nb\n"),
        ("I am Joy", Replace("Joy", "Jo"), "I am Jo"),
        ("I am Joy", Replace("I am ", ""), "Joy"),
        ("", Insert(0, "a"), "a"),
        ("b", Insert(0, "a"), "a\nb"),
        ("a\nc\n", Insert(1, "b\n"), "a\nb\nc\n"),
        ("a\nb\n", Insert(2, "c"), "a\nb\nc\n"),
    ],
)
def test_edit_changes_the_text(text: str, edit: Append | Replace | Insert, after: str) -> None:
    assert apply_edit(text, edit) == after


@pytest.mark.parametrize(
    ("text", "edit", "said"),
    [
        ("abc", Replace("x", "y"), "replace.old does not occur"),
        ("ab ab", Replace("ab", "y"), "replace.old occurs 2 times"),
        ("aaa", Replace("aa", "y"), "replace.old occurs 2 times"),
        ("a\nb", Insert(3, "c"), "insert.line is 3, the text has 2 lines"),
        ("", Insert(1, "c"), "insert.line is 1, the text has 0 lines"),
    ],
)
def test_edit_that_does_not_fit_is_refused(text: str, edit: Replace | Insert, said: str) -> None:
    with pytest.raises(EditRefused, match=said):
        apply_edit(text, edit)


@given(LINES, LINES, st.booleans())
def test_inserted_lines_stand_where_they_were_sent(lines: list[str], new: list[str], ended: bool) -> None:
    text = "\n".join(lines) + ("\n" if ended and lines else "")
    had = text.splitlines() if text else []
    for line in range(len(had) + 1):
        made = apply_edit(text, Insert(line, "\n".join([*new, "x"])))
        assert made.split("\n")[: len(had) + 1 + len(new)] == [*had[:line], *new, "x", *had[line:]]


def test_text_beyond_its_tokens_is_refused() -> None:
    assert check_size("x" * 40, 10) == "x" * 40
    assert check_size("x" * 41, 0) == "x" * 41
    with pytest.raises(EditRefused, match=r"would have 11 tokens \(bytes / 4\), at most 10"):
        check_size("x" * 41, 10)
