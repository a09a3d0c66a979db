"""Text from outside is escaped where it could drive a terminal; numbers keep their digits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstream_server.core.printable import escape_unprintable, number_text
from tests.support.arbitrary import UNICODE


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\0", r"a\nb\x00"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("\ud800", r"\ud800"),
        ("İstanbul 東京 👩\u200d🚀", "İstanbul 東京 👩\u200d🚀"),
        ("a\u3000b\u00a0c", "a\u3000b\u00a0c"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert escape_unprintable(text) == shown


def test_kept_characters_stay() -> None:
    assert escape_unprintable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@given(st.text(UNICODE))
def test_result_has_no_control_character(text: str) -> None:
    assert not any(ord(one) < 32 or 127 <= ord(one) < 160 for one in escape_unprintable(text))


@pytest.mark.parametrize(
    ("value", "shown"), [(1_000_001.0, "1000001"), (0.25, "0.25"), (3, "3"), (1e300, "1e+300"), (-2.0, "-2")]
)
def test_numbers_keep_their_digits(value: float, shown: str) -> None:
    assert number_text(value) == shown
