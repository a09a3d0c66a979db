"""Escapes untrusted text for log lines, error messages and terminals; names characters that nobody sees in a content.

Which characters of a content are hidden:
Rule 1. Hidden are Unicode's default-ignorable characters, and the controls of direction and of terminals.
Rule 2. Not hidden is what belongs to a sign that is shown: a joiner between two signs of an emoji, or between letters
of a script that joins them; one variation selector after its base; the tags of the three flags that have them.
"""

from __future__ import annotations

import re
import unicodedata

_JOINERS = "\u200c\u200d"
"""Parts of words in Persian and Indic scripts, and of emoji."""
DEFAULT_IGNORABLE = (
    (0xAD, 0xAD),
    (0x34F, 0x34F),
    (0x61C, 0x61C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFF8),
    (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE0FFF),
)
"""`Default_Ignorable_Code_Point` of DerivedCoreProperties.txt of Unicode 16.0, first and last of each range."""
SHOWN_MAX = 16
"""Characters that `list_hidden` names."""

_CONTROLS = r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f"
_PLAIN = bytes(range(0x20, 0x7F)) + b"\t\n\r"
_HIDDEN = re.compile("[" + _CONTROLS + "".join(f"{chr(low)}-{chr(high)}" for low, high in DEFAULT_IGNORABLE) + "]")
# The blocks of the scripts whose words have joiners: Arabic to N'Ko, Indic, Tibetan, Myanmar, Khmer, Mongolian.
_JOINING = "\u0600-\u07ff\u0860-\u0fff\u1000-\u109f\u1780-\u18af\u1900-\u1cff\ua800-\uaaff\ufb50-\ufdff\ufe70-\ufefc"
# Blocks of pictographs and symbols, among them all emoji that a joiner or a variation selector follows.
_SIGN = "#*0-9\xa9\xae\u203c-\u3299\U0001f000-\U0001faff"
_HAN = "\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_FLAG_TAGS = "|".join(
    "".join(chr(0xE0000 + ord(letter)) for letter in region) + "\U000e007f" for region in ("gbeng", "gbsct", "gbwls")
)
_SHOWN = re.compile(
    f"(?<=[{_JOINING}])[\u200c\u200d](?=[{_JOINING}])"
    f"|(?<=[{_SIGN}\ufe0f])\u200d(?=[{_SIGN}])"
    f"|(?<=[{_SIGN}{_HAN}])[\ufe00-\ufe0f]"
    f"|(?<=[{_HAN}])[\U000e0100-\U000e01ef]"
    "|(?<=[\u1820-\u18aa])[\u180b-\u180d\u180f]"
    f"|(?<=\U0001f3f4)(?:{_FLAG_TAGS})"
)


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


def list_hidden(text: str) -> tuple[str, ...]:
    """The hidden characters of a text, each once, in order: ("U+E0041", ...), at most SHOWN_MAX."""
    if text.isascii() and not text.encode().translate(None, _PLAIN):
        return ()  # only ASCII that is seen, in a tenth of the time of a search
    if _HIDDEN.search(text) is None:
        return ()
    found = dict.fromkeys(_HIDDEN.findall(_SHOWN.sub("", text)))
    return tuple(f"U+{ord(character):04X}" for character in list(found)[:SHOWN_MAX])
