"""Escapes untrusted text for log lines, error messages and terminals."""

from __future__ import annotations

import unicodedata

_JOINERS = "\u200c\u200d"
"""Parts of words in Persian and Indic scripts, and of emoji."""


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""`text` with non-printing characters, except those in `keep`, as \xNN, \uNNNN or \UNNNNNNNN.

    Non-printing are control characters (ESC, BEL, NUL, line breaks), bidirectional marks, lone surrogates, and
    unassigned code points: they can drive a terminal or forge a log line. Spaces of any width print.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep or _is_harmless(one) else _escape_character(one) for one in text
    )


def number_text(value: float) -> str:
    """The number with all its digits, and without an exponent if possible."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _is_harmless(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) == "Zs"


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
