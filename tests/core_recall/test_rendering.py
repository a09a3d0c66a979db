"""The text that is indexed."""

from __future__ import annotations

import pytest

from memstream_server.core.rendering import (
    clip_for_index,
    date_text,
    indexed_text,
    is_question,
    lexical_text,
    may_neighbour,
)
from memstream_server.core.values import Fragment

DAY_US = 86_400_000_000
MAY_8_2023_US = 19_485 * DAY_US


def test_date_and_speaker_come_first() -> None:
    fragment = Fragment("a", "I moved.", speaker="Ann", observe_time_us=MAY_8_2023_US + 5)
    assert indexed_text(fragment) == lexical_text(fragment) == "[8 May 2023] Ann: I moved."


def test_nobody_speaking() -> None:
    assert indexed_text(Fragment("a", "rain", observe_time_us=MAY_8_2023_US)) == "[8 May 2023] rain"


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (MAY_8_2023_US - 1, "7 May 2023"),
        (-1, "31 December 1969"),
        (10**18, ""),
        (-(10**18), ""),
    ],
)
def test_dates(time_us: int, text: str) -> None:
    assert date_text(time_us) == text


def test_a_time_outside_the_calendar_leaves_the_date_out() -> None:
    assert indexed_text(Fragment("a", "x", speaker="Ann", observe_time_us=10**18)) == "Ann: x"


def test_a_long_content_is_clipped_for_the_index_only() -> None:
    content = "h" * 1_000 + "m" * 3_000 + "t" * 500
    fragment = Fragment("a", content, observe_time_us=MAY_8_2023_US)
    assert lexical_text(fragment) == "[8 May 2023] " + "h" * 1_000 + "\n" + "t" * 500
    assert indexed_text(fragment).endswith(content)
    assert clip_for_index("x" * 1_500) == "x" * 1_500


def test_long_fragments_are_nobodys_neighbour() -> None:
    assert may_neighbour(2_000)
    assert not may_neighbour(2_001)


@pytest.mark.parametrize(
    ("content", "asks"),
    [
        ("Where is it?", True),
        ('He said "where?" ', True),
        ("(really?!)", False),
        ("Where is it? Here.", False),
        ("\u4f60\u5728\u54ea\u91cc\uff1f", True),
        ("\u0623\u064a\u0646\u061f", True),
        ("?", True),
        ("", False),
        ('"', False),
    ],
)
def test_a_question_ends_in_a_question_mark(content: str, asks: bool) -> None:
    assert is_question(content) is asks
