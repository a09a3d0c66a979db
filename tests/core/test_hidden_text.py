"""Which characters count as hidden."""

from __future__ import annotations

import pytest

from memstream_server.core.printable import SHOWN_MAX, list_hidden


@pytest.mark.parametrize(
    "text",
    [
        "plain\ttext\r\nof two lines",
        "caf\xe9, \u5c0f\u660e, \u0639\u0644\u064a",
        "\u2764\ufe0f 1\ufe0f\u20e3 \U0001f44d\U0001f3fd",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
        "\U0001f3f3\ufe0f\u200d\U0001f308",
        "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
        "\u0915\u094d\u200d\u0937",
        "\u845b\U000e0100\u57ce",
    ],
)
def test_what_belongs_to_a_sign_is_not_hidden(text: str) -> None:
    assert list_hidden(text) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\U000e0041\U000e0042\U000e0041", ("U+E0041", "U+E0042")),
        ("\U0001f3f4\U000e0041\U000e007f", ("U+E0041", "U+E007F")),
        ("\U0001f600\ufe01\ufe02\ufe03", ("U+FE02", "U+FE03")),
        ("x\u200by", ("U+200B",)),
        ("x\u200dy \u0915\u200d", ("U+200D",)),
        ("to \u202eknab ym\u202c", ("U+202E", "U+202C")),
        ("\xad\u2060\ufeff\u3164\u115f\u180e", ("U+00AD", "U+2060", "U+FEFF", "U+3164", "U+115F", "U+180E")),
        ("\x1b[2J\x00\x7f", ("U+001B", "U+0000", "U+007F")),
    ],
)
def test_what_nobody_sees_is_named_once(text: str, expected: tuple[str, ...]) -> None:
    assert list_hidden(f"shown{text}") == expected


def test_a_long_smuggled_text_is_named_in_part() -> None:
    assert len(list_hidden("".join(map(chr, range(0xE0020, 0xE007F))))) == SHOWN_MAX
