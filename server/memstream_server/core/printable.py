"""Text from outside, made fit for a log line, an error message or a terminal: what does not print is escaped."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"
"""Parts of words in Persian and in Indian scripts, and of emoji."""


def printable(text: str, keep: str = "") -> str:
    r"""`text` with every character that does not print as \xNN, \uNNNN or \UNNNNNNNN, but for those of `keep`.

    These are control characters (ESC, BEL, NUL, line breaks), marks that change the direction of a text, lone
    surrogates, and code points without a meaning: by them a text can drive a terminal or forge a line. Spaces of any
    width print.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep or _is_harmless(one) else _escape(one) for one in text)


def number_text(value: float) -> str:
    """The number as it was given: every digit, no exponent where it has none."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _is_harmless(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) == "Zs"


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
