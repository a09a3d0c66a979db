"""Compiles a lexicon: its templates, the words that must be present, and what may precede or join two times."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from memstream_server.core.time_phrases.lexicons import ENGLISH, FRENCH, GERMAN, PORTUGUESE, SPANISH, Lexicon

LEXICONS: Mapping[str, Lexicon] = {
    "english": ENGLISH,
    "german": GERMAN,
    "french": FRENCH,
    "spanish": SPANISH,
    "portuguese": PORTUGUESE,
}
"""By the name of the Snowball stemmer, as in a policy."""

GAP = r"\s{1,4}"
"""Between two words of a phrase; bounded, so that a flood of spaces costs nothing."""
_BEGIN = r"(?<![\w$€£#@/\\])(?<!\d[.,:-])(?<!\w-)"
_END = r"(?![\w%€£$/\\]|-\w|\.\w|[,:]\d)"
"""No part of a number, price, path, identifier or compound."""
_NIGHTS = frozenset(("night", "nacht", "nuit", "anoche"))
_DIGITS = {
    "day": r"[0-3]?\d",
    "day2": r"[0-3]?\d",
    "monthnum": r"[01]?\d",
    "year": r"(?:1[89]|20|21)\d\d",
}
DIGIT, NIGHT = "digit", "night"
_GROUP = re.compile(r"(?<!\(\?P)<(\w+)>")
"""A group of a template that is not one of its own."""
WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One form of phrase. `needs`: kinds of word that the text must have for it."""

    regex: re.Pattern[str]
    needs: frozenset[str]
    weak: str = ""
    """The kind of a time that counts only after the right words; empty if it always does."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lexicon, compiled."""

    lexicon: Lexicon
    kinds: dict[str, frozenset[str]]
    """Kinds of a word, by the word: the cheap test."""
    patterns: tuple[Pattern, ...]
    weak: dict[str, re.Pattern[str]]
    modifiers: dict[str, re.Pattern[str]]
    opener: re.Pattern[str]
    opened_join: re.Pattern[str]
    join: re.Pattern[str]
    offsets: re.Pattern[str] | None
    rejected_before: re.Pattern[str]
    week_of: re.Pattern[str]


@cache
def compiled(language: str) -> Compiled | None:
    """The compiled lexicon of a language; None without one."""
    lexicon = LEXICONS.get(language)
    return None if lexicon is None else _compile(lexicon)


def _compile(lexicon: Lexicon) -> Compiled:
    groups = {
        "month": _one_of(lexicon.months),
        "weekday": _one_of(lexicon.weekdays),
        "season": _one_of(lexicon.seasons),
        "holiday": _one_of(lexicon.holidays),
        "unit": _one_of(lexicon.units),
        "word": _one_of(lexicon.days),
        "which": _one_of(lexicon.which),
        "n": rf"\d{{1,7}}|{_one_of([*lexicon.vague, *lexicon.numbers])}",
        "offset": _one_of(lexicon.offset_words),
        "beyond": _one_of(lexicon.beyond),
        "many": _one_of(lexicon.many),
        "nth": _one_of(lexicon.nth),
        **_DIGITS,
    }
    patterns = [_compile_template(template, groups, lexicon.ordinal) for template in lexicon.templates]
    alone = {"day": lexicon.day_alone}
    patterns += [
        _compile_template(alone.get(kind, f"<{kind}>"), groups, lexicon.ordinal, kind) for kind in lexicon.weak
    ]
    opener, opened, join = lexicon.joins
    dash = r"\s?-\s?"
    return Compiled(
        lexicon,
        _kinds_of_words(lexicon),
        tuple(patterns),
        {kind: _at_end(words) for kind, words in lexicon.weak.items()},
        {kind: _at_end(words) for kind, words in lexicon.modifiers.items()},
        _at_end(opener),
        re.compile(rf"{GAP}(?:{_expand(opened)}){GAP}|{dash}"),
        re.compile(rf"{GAP}(?:{_expand(join)}){GAP}|{dash}"),
        _at_end("|".join(_fill(each, groups, "", count) for count, each in enumerate(lexicon.offsets)))
        if lexicon.offsets
        else None,
        _at_end(lexicon.rejected_before),
        _at_end(rf"(?:{lexicon.week_of})(?:~(?:{groups['weekday']}),?)?"),
    )


def _compile_template(template: str, groups: dict[str, str], ordinal: str, weak: str = "") -> Pattern:
    names = set(_GROUP.findall(template))
    needs = names & {"month", "weekday", "season", "holiday", "unit", "word", "many"}
    if names & _DIGITS.keys():
        needs |= set() if needs else {DIGIT}
    if "(?P<night>" in template:
        needs.add(NIGHT)
    if "<year>" in template and not template.endswith("?"):
        needs.add(DIGIT)
    return Pattern(re.compile(_BEGIN + f"(?:{_fill(template, groups, ordinal)})" + _END), frozenset(needs), weak)


def _fill(template: str, groups: dict[str, str], ordinal: str, number: int = 0) -> str:
    suffix = str(number) if number else ""
    named = {name: f"(?P<{name}{suffix}>{words})" for name, words in groups.items()}
    return _GROUP.sub(lambda match: ordinal if match[1] == "ordinal" else named[match[1]], _expand(template))


def _expand(template: str) -> str:
    return template.replace("~", GAP)


def _at_end(words: str) -> re.Pattern[str]:
    """The words at the end of what precedes a time, with a gap after them unless they end in an elision or hyphen."""
    if not words:
        return re.compile(r"(?!)")
    return re.compile(rf"(?<!\w)(?:{_expand(words)})(?:{GAP}|(?<=['-]))$")


def _one_of(words: Iterable[str]) -> str:
    longest_first = sorted(words, key=lambda word: (-len(word), word))
    return "|".join(GAP.join(map(re.escape, word.split(" "))) for word in longest_first)


def _kinds_of_words(lexicon: Lexicon) -> dict[str, frozenset[str]]:
    """Kinds by the last word of each entry: the others are frequent words, such as "the" of a phrase."""
    kinds: dict[str, set[str]] = {}

    def add(words: Collection[str], kind: str) -> None:
        for word in words:
            kinds.setdefault(WORD.findall(word)[-1], set()).add(kind)

    add(lexicon.months, "month")
    add(lexicon.weekdays, "weekday")
    add(lexicon.seasons, "season")
    add(lexicon.holidays, "holiday")
    add(lexicon.units, "unit")
    add(lexicon.days, "word")
    add(lexicon.many, "many")
    add(_NIGHTS, NIGHT)
    return {word: frozenset(found) for word, found in kinds.items()}
