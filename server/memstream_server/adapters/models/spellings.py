"""The spellings under which a token is indexed: its parts, its joined form, and each without accents.

Rule 1. A hyphenated token counts as its parts and as one word: "Wi-Fi" as wi, fi and wifi.
Rule 2. A word of mixed case, or of letters next to digits, counts as a whole and as its parts: "getUserName" also as
get, user and name; "iPhone15" also as iphone, phone and 15.
Rule 3. A word of a fragment counts as written and without its accents, a word of a question only as written: "ha noi"
finds "Hà Nội", and a question about "má" does not find "mà".
Rule 4. Nothing is lost: the words of `words.words` are among the forms, but for single letters of words with signs:
"C++" is no "C", and "A.I." counts as "AI".
Rule 5. Letters that writers choose freely between are one letter, in fragments and questions (unify_letters): Arabic
and Persian yeh, kaf, alef and heh; Devanagari nasals; traditional and simplified Chinese.
"""

# ruff: noqa: RUF001 - other alphabets have letters that look like Latin ones

from __future__ import annotations

import re
import unicodedata
from functools import cache

import opencc

JOINED_PARTS_MAX = 4
"""A token with more hyphens is a chain, such as a UUID; nobody writes it as one word."""
RUNS_MAX = 4
"""A word that alternates more often between letters and digits is an encoded value; its parts mean nothing."""
CASED_PARTS_MAX = 16
"""Parts of a word of mixed case that are indexed."""
_PARTED_CHARACTERS_MAX = 128
"""A longer word is encoded data and has no parts."""
_SIGNS = frozenset("+#.&")
_RUN = re.compile(r"d+|[Ul]+")
_PART = re.compile(r"U+(?!l)|U?l+")
_MARKS = frozenset(
    chr(code)
    for first, last in (
        (0x300, 0x36F),  # Latin, Greek
        (0x591, 0x5BD),  # Hebrew points
        (0x5BF, 0x5C7),
        (0x640, 0x640),  # Arabic tatweel
        (0x64B, 0x65F),  # Arabic vowel signs and hamza
        (0x670, 0x670),
        (0x93C, 0x93C),  # Devanagari nukta
    )
    for code in range(first, last + 1)
)
"""Marks that writers leave out. The vowel signs of Indic scripts are not among them."""
_WITHOUT_DECOMPOSITION = {
    "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "đ": "d", "ð": "d", "þ": "th", "ł": "l", "ħ": "h", "ı": "i", "ς": "σ",
}  # fmt: skip
_LETTERS_WITH_MARKS = frozenset("йїў")
"""Letters of their own that no writer replaces by the letter without the mark."""


_ARABIC = str.maketrans("ىیېےکڪأإآٱةۀہە", "ييييككااااهههه")
"""As Lucene's normalisers of Arabic and Persian."""
_FOR_STEMMER = {"arabic": str.maketrans("یک", "يك"), "persian": str.maketrans("يك", "یک")}
_NASAL = re.compile("ङ्(?=[क-घ])|ञ्(?=[च-झ])|ण्(?=[ट-ढ])|न्(?=[त-ध])|म्(?=[प-भ])|ँ")
_HAN = re.compile("[\u3400-\u9fff\U00020000-\U0003ffff]")


class _Folds(dict[int, str]):
    """Lowercase letters without their marks, computed on first use; as `str.translate` takes it."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        folded = _WITHOUT_DECOMPOSITION.get(letter, letter)
        if letter in _MARKS:
            folded = ""
        elif letter not in _LETTERS_WITH_MARKS:
            bare = unicodedata.normalize("NFD", letter)
            if bare[1:] and _MARKS.issuperset(bare[1:]):
                folded = _WITHOUT_DECOMPOSITION.get(bare[0], bare[0])  # "ǣ" is "æ" with a mark
        self[code] = folded
        return folded


_FOLDS = _Folds()


class _Simplified(dict[int, str]):
    """Chinese characters in their simplified form, by OpenCC's table of characters, computed on first use."""

    def __missing__(self, code: int) -> str:
        self[code] = _converter().convert(chr(code))
        return self[code]


@cache
def _converter() -> opencc.OpenCC:
    return opencc.OpenCC("t2s")


_SIMPLIFIED = _Simplified()


def unify_letters(stem: str) -> str:
    """A stem with one letter for those that writers choose freely between; idempotent."""
    if stem.isascii():
        return stem
    stem = stem.translate(_ARABIC)
    return stem.translate(_SIMPLIFIED) if _HAN.search(stem) else stem


def fold_accents(word: str) -> str:
    """A lowercase word without accents; idempotent. The word itself if nothing else is left of it."""
    return word if word.isascii() else word.translate(_FOLDS) or word


def lower_word(word: str, language: str = "") -> str:
    """Lowercase, in Turkish with the dotless i; the dot that lower() leaves behind the i of "İ" is removed.

    Persian, Arabic and Devanagari with the letters that the stemmer of the language knows.
    """
    if word.isascii() and language != "turkish":
        return word.lower()
    if language == "turkish":
        word = word.replace("I", "ı")
    elif language in _FOR_STEMMER:
        word = word.translate(_FOR_STEMMER[language])
    return _NASAL.sub("\u0902", word.lower().replace("i\u0307", "i"))


def list_forms(token: str) -> list[str]:
    """The forms of a token as written: words, their parts, and the joined form; without folding case or accents."""
    if not _SIGNS.isdisjoint(token):
        return [token.replace(".", "")]
    words = token.split("-")
    forms = [form for word in words for form in (word, *_list_parts(word))]
    if 1 < len(words) <= JOINED_PARTS_MAX:
        forms.append("".join(words))
    return forms


def _list_parts(word: str) -> list[str]:
    if word.isalpha() and (word[1:].islower() or word.islower() or word.isupper()):
        return []
    if word[:-1].isupper() and word[-1] == "s":  # the plural of an abbreviation: "DNAs"
        return []
    if word.isdecimal() or len(word) > _PARTED_CHARACTERS_MAX:
        return []
    kinds = "".join(map(_kind_of, word))
    runs = [match.span() for match in _RUN.finditer(kinds)]
    if len(runs) > RUNS_MAX:
        return []
    parts = [word[start:end] for start, end in runs] if len(runs) > 1 else []
    for start, end in runs:
        spans = [match.span() for match in _PART.finditer(kinds, start, end)]
        if len(spans) > 1:
            parts += [word[first:last] for first, last in spans[:CASED_PARTS_MAX]]
    bare = (part.strip("'") for part in parts)
    return [part for part in bare if len(part) > 1 or part.isdecimal()]


def _kind_of(character: str) -> str:
    if character.isdecimal():
        return "d"
    return "U" if character.isupper() else "l"
