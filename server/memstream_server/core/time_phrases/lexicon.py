"""The form of a language's words and phrase templates of time, lowercase and without accents.

A template is a regular expression. "~" is a gap between words, and a name in angle brackets is a group: <month>
<weekday> <season> <holiday> <unit> <n> (a number) <which> (last, this, next) <beyond> (the one before or after that)
<many> (Fridays, summers) <nth> (of four) <word> (a day such as "yesterday") <day> <year>; <ordinal> is not a group.
recognition.py chooses the window by the groups that matched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PAST, PRESENT, FUTURE = -1, 0, 1


@dataclass(frozen=True)
class Lexicon:
    """The phrases of one language."""

    months: Mapping[str, int]
    weekdays: Mapping[str, int]
    seasons: Mapping[str, str]
    holidays: Mapping[str, str]
    units: Mapping[str, str]
    days: Mapping[str, int]
    """Days relative to today, such as "yesterday"."""
    numbers: Mapping[str, int]
    vague: Mapping[str, tuple[int, int]]
    """Vague numbers: from the first to the second number of units ago."""
    which: Mapping[str, int]
    templates: tuple[str, ...]
    """Phrases that mean a time wherever they are."""
    weak: Mapping[str, str]
    """What precedes a month, weekday, season, holiday or year that means a time only then, by group."""
    modifiers: Mapping[str, str]
    """What precedes a time that is the limit of a window, by "before", "after", "since" and "until"."""
    joins: tuple[str, str, str]
    """What opens a span ("between"), and what joins its two times: after an opener, and without one."""
    offsets: tuple[str, ...] = ()
    """ "two days before": with <n>, <unit> and <offset>."""
    offset_words: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, int] = field(default_factory=dict)
    many: Mapping[str, int | str] = field(default_factory=dict)
    """Plurals of weekdays and seasons."""
    nth: Mapping[str, int] = field(default_factory=dict)
    day_alone: str = ""
    """A day without a month, which counts after the words of `weak` for "day"."""
    week_of: str = ""
    """What precedes a day that names its week."""
    ordinal: str = ""
    ambiguous: frozenset[str] = frozenset()
    """Months and seasons that are also other words: they count only after the words of `weak`, with a day or a year."""
    month_first: bool = False
    """Whether 5/7/2023 is the seventh of May."""
    rejected_before: str = ""
    """A phrase after these words is no time: "every Monday"."""
