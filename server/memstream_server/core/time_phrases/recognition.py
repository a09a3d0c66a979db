"""Finds the phrases of time in a question and the windows that they mean. Pure: the caller gives moment and zone.

Rule 1. Text in quotes or backticks is no phrase of the question, nor is a text of more than TEXT_CHARACTERS_MAX.
Rule 2. A cheap test of the words comes first: most questions have no word of time and cost nothing more.
Rule 3. Words that also mean something else ("may", "march", "fall", a bare year) count only where the words around
them say so. A phrase that is missed costs little; a wrong window moves the wrong fragments up.
Rule 4. The same text, language, moment and zone give the same answer. Nothing is raised.
Rule 5. Only a question that names nothing but a time ("What did I do yesterday?") is answered by any fragment of that
time (`asks_only_time`); of other questions a fragment of the right week may say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, tzinfo

from memstream_server.core.time_phrases import east_asian
from memstream_server.core.time_phrases.calendar import Calendar, NoSuchTime, Window
from memstream_server.core.time_phrases.lexicons import DIGIT, LEXICONS, WORD, Compiled, compiled

TEXT_CHARACTERS_MAX = 2_000
"""A longer text is a document, whose dates say nothing about the question."""
PHRASES_MAX = 8
_BEFORE_CHARACTERS = 48
"""What precedes a phrase is read this far."""
_QUOTED = re.compile(
    r"\"[^\"]{0,300}\"|“[^”]{0,300}”|„[^“”]{0,300}[“”]|«[^»]{0,300}»|`[^`]{0,300}`|「[^」]{0,300}」|『[^』]{0,300}』"
    r"|(?<!\w)'[^']{0,300}'(?!\w)"
)
_QUOTES = frozenset("\"“„«`「『'")
_NUMERIC = re.compile(
    r"(?<![\w.,:/\\#$€£-])(?:"
    r"(?P<year>(?:1[89]|20|21)\d\d)(?:-(?P<month>[01]\d)(?:-(?P<day>[0-3]\d))?|/(?P<m2>[01]?\d)/(?P<d2>[0-3]?\d))"
    r"|(?P<first>[0-3]?\d)(?P<sign>[./])(?P<second>[0-3]?\d)(?P=sign)(?P<y2>(?:1[89]|20|21)\d\d)"
    r")(?:[t ]\d\d:\d\d(?::\d\d)?z?)?(?![\w:/\\]|[.,-]\w)"
)
_QUARTER = re.compile(
    r"(?<![\w.,#/-])(?:(?P<kind>[qht])(?P<part>[1-4])(?:(?:[ /-]| of )?(?P<year>(?:19|20|21)\d\d))?"
    r"|(?P<y2>(?:19|20|21)\d\d)[ /-]?(?P<k2>[qh])(?P<p2>[1-4]))(?![\w/]|[.,-]\w)"
)
"""A quarter or half of a year: Q2 2025, 2025-Q2, H1 2025, T2 2025; Q2 alone only after the words of _IN_QUARTER."""
_IN_QUARTER = re.compile(
    r"\b(?:in|im|during|of|for|since|by|before|after|until|till|from|to|and|between|en|em|no|seit|vor|nach|bis|und|depuis|"
    r"avant|apres|desde|hasta|ate)\s{1,4}$"
)
_SHORT_DATE = re.compile(r"\d\.[01]?\d\.|\b(?:the|am|vom|zum|dem|le|du|au|el|del|dia) [0-3]?\d(?!\d)|[qht][1-4]\b")
"""A day without a month or year ("am 7.5.", "the 12th"), or a quarter."""
_FOLDED = str.maketrans(
    "àáâãäåçèéêëìíîïñòóôõöùúûüýÿāăąćčďēėęěğīįłńňōőŕřśşšťūůűųźżž\u2018\u2019\u2013",
    "aaaaaaceeeeiiiinooooouuuuyyaaaccdeeeegiilnnoorrssstuuuuzzz''-",
)
"""Accents, typographic apostrophes, and the en dash that people write between two dates."""
_SENTENCE_ENDS = ".?!:;\n¿¡"
_ASIAN = "\u3040"
"""From this code point on, scripts of Chinese and Japanese."""
_ASKING_WORDS = {
    "english": """
        what whats who whom which when where how did do does done doing have has had was were is are be been i we you he
        she they it me us my our the a an there that this about of on in at to from and so up all any happen happened
        happening go going went new say said tell told talk talked talking anything something everything thing things
        s d ve t please remember
        """,
    "german": """
        was wer wen wem wann wo wie habe hast hat haben habt hatte hatten war waren ist sind bin ich du er sie es wir
        ihr mir mich uns mein unser der die das den dem ein eine einen denn alles so los passiert geschehen gemacht
        getan gesagt erzahlt erlebt gab gibt an in im am um auf und etwas eigentlich
        """,
    "french": """
        que qu quoi qui quand ou comment est ce c a ai as avons avez ont etait etaient suis j je tu il elle on nous vous
        ils elles me m moi le la les l un une des de d y en et s t se passe fait dit raconte arrive quel quelle
        """,
    "spanish": """
        que quien cuando donde como he has ha hemos han hice hiciste hizo hicimos hicieron paso pasado dije dijo dijimos
        yo tu el ella nosotros me se lo la los las un una de en a y hubo hay fue era hecho
        """,
    "portuguese": """
        o que quem quando onde como eu tu ele ela nos voce fiz fez fizemos fizeram feito aconteceu houve ha foi era
        disse me se a os as um uma de em no na e
        """,
}
_ASKING = frozenset(word for words in _ASKING_WORDS.values() for word in words.split())
"""Of all languages: hardly one of these words names something in another."""
_ASKING_ASIAN = frozenset(
    "我你您他她它们們的地得做干了什么甚麼怎样樣吗嗎呢有发發生事情过過是在都何誰をしたてはがあっのにとでますか私"
)


@dataclass(frozen=True, slots=True)
class TimePhrase:
    """A phrase at text[start:end] and its window."""

    phrase: str
    start: int
    end: int
    window: Window


@dataclass(slots=True)
class _Found:
    """A match before the words around it are read."""

    start: int
    end: int
    window: Window
    weak: str
    groups: dict[str, str] = field(default_factory=dict)


def has_time_words(text: str) -> bool:
    """The cheap test: whether the text may have a phrase in any language."""
    if len(text) > TEXT_CHARACTERS_MAX:
        return False
    low = fold_text(text)
    return _is_asian(text) or any(_word_kinds(low, compiled(language)) for language in LEXICONS)


def find_times(text: str, language: str, now_us: int, zone: tzinfo) -> tuple[TimePhrase, ...]:
    """The phrases in order, at most PHRASES_MAX. `language`: a Snowball stemmer's name; Chinese, Japanese and ISO dates
    are found in every language.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        return ()
    asian, low = _is_asian(text), fold_text(text)
    lexicon = compiled(language)
    kinds = _word_kinds(low, lexicon)
    if not kinds and not asian:
        return ()
    if not _QUOTES.isdisjoint(low):
        low = _QUOTED.sub(lambda match: "\x00" * len(match[0]), low)
    calendar = Calendar(now_us, zone)
    found = _find_numeric(low, lexicon is not None and lexicon.lexicon.month_first, calendar) if DIGIT in kinds else []
    if lexicon is not None:
        found += _find_matches(text, low, lexicon, kinds, calendar)
    found = _without_overlaps(low, found)
    if lexicon is None:
        phrases = [_phrase(text, each, each.start, each.window) for each in found]
    else:
        phrases = _read_around(text, low, found, lexicon, calendar)
    if asian:
        phrases += [
            TimePhrase(text[start:end], start, end, window)
            for start, end, window in east_asian.find_windows(low, calendar)
        ]
        phrases.sort(key=lambda each: each.start)
    return tuple(phrases[:PHRASES_MAX])


def fold_text(text: str) -> str:
    """Lowercase without accents, of the same length."""
    low = text.lower()
    if len(low) != len(text):  # "İ" becomes two characters
        low = "".join(each.lower() if len(each.lower()) == 1 else each for each in text)
    return low if low.isascii() else low.translate(_FOLDED)


def _is_asian(text: str) -> bool:
    return not text.isascii() and max(text) >= _ASIAN


def _word_kinds(low: str, lexicon: Compiled | None) -> frozenset[str]:
    """The kinds of the words of time in the text, of which each pattern needs some."""
    words = WORD.findall(low)
    found: set[str] = set()
    if lexicon is not None:
        known = lexicon.kinds
        for word in known.keys() & words:
            found |= known[word]
    if any(word.isdecimal() and len(word) == 4 for word in words) or _SHORT_DATE.search(low):
        found.add(DIGIT)
    return frozenset(found)


def _find_numeric(low: str, month_first: bool, calendar: Calendar) -> list[_Found]:
    found = []
    for match in _NUMERIC.finditer(low):
        given = match.groupdict()
        try:
            if given["first"]:
                day, month = int(given["first"]), int(given["second"])
                if given["sign"] == "/" and ((month_first and day <= 12) or month > 12):
                    day, month = month, day
                window = calendar.day(month, day, int(given["y2"]))
            elif day_text := given["day"] or given["d2"]:
                window = calendar.day(int(given["month"] or given["m2"]), int(day_text), int(given["year"]))
            else:
                window = calendar.month(int(given["month"]), int(given["year"]))
        except (ValueError, OverflowError):
            continue
        found.append(_Found(match.start(), match.end(), window, "", {"year": given["year"] or given["y2"]}))
    return found + _find_quarters(low, calendar)


def _find_quarters(low: str, calendar: Calendar) -> list[_Found]:
    found = []
    for match in _QUARTER.finditer(low):
        kind, part = match["kind"] or match["k2"], int(match["part"] or match["p2"])
        year = match["year"] or match["y2"]
        if year is None and (kind == "t" or not _IN_QUARTER.search(low[: match.start()])):
            continue
        months = 6 if kind == "h" else 3
        try:
            window = calendar.part_of_year(int(year) if year else calendar.today.year, part, months)
            if year is None and window.start_us is not None and window.start_us > calendar.now_us:
                window = calendar.earlier(window, "year", 1)
        except (ValueError, OverflowError):
            continue
        found.append(_Found(match.start(), match.end(), window, "", {"year": year or ""}))
    return found


def _find_matches(text: str, low: str, lexicon: Compiled, kinds: frozenset[str], calendar: Calendar) -> list[_Found]:
    found = []
    for pattern in lexicon.patterns:
        if not pattern.needs <= kinds:
            continue
        for match in pattern.regex.finditer(low):
            groups = {name: words for name, words in match.groupdict().items() if words is not None}
            start, end = match.span()
            if not _is_plausible(text, low, start, end, groups, lexicon, pattern.weak):
                continue
            try:
                window = window_of(groups, lexicon, calendar)
            except (ValueError, OverflowError, KeyError):
                continue  # no such day, or beyond the years of the calendar
            found.append(_Found(start, end, window, pattern.weak, groups))
    return found


_DATED = frozenset(("day", "year"))
_DATE_FOLLOWS = re.compile(r",?\s{1,3}(?:the\s|dem\s|den\s|le\s)?")


def _is_its_date(low: str, weekday: _Found, date: _Found) -> bool:
    return not _DATED.isdisjoint(date.groups) and bool(_DATE_FOLLOWS.fullmatch(low, weekday.end, date.start))


def _without_overlaps(low: str, found: list[_Found]) -> list[_Found]:
    """Leftmost and longest first; of equals, the one that is not weak. A weekday goes if its date follows it."""
    kept: list[_Found] = []
    for each in sorted(found, key=lambda each: (each.start, -each.end, each.weak != "")):
        if kept and each.start < kept[-1].end:
            continue
        last = kept[-1] if kept else None
        if last is not None and last.groups.keys() == {"weekday"} and _is_its_date(low, last, each):
            kept.pop()
        kept.append(each)
    return kept


def _is_plausible(
    text: str, low: str, start: int, end: int, groups: dict[str, str], lexicon: Compiled, weak: str
) -> bool:
    """Whether capitals and neighbours allow the words to be a time."""
    before = low[max(0, start - _BEFORE_CHARACTERS) : start]
    if lexicon.rejected_before.search(before):
        return False
    opens = not before.strip(" ¿¡(,-") or before.rstrip()[-1:] in _SENTENCE_ENDS
    if "month" not in groups and "weekday" not in groups and "holiday" not in groups and "season" not in groups:
        titled = text[start].isupper() and not opens and not text.isupper()
        if titled:  # the title of a song, a show or a newspaper: "Yesterday", "Last Week Tonight"
            return False
    name = groups.get("month") or groups.get("weekday") or ""
    if name not in lexicon.lexicon.ambiguous or groups.keys() & {"year", "which"}:
        return True
    if groups.keys() == {"weekday"}:
        return not low[end:].strip(" ?.!")  # "na segunda", but not "na segunda vez"
    if weak or "day" not in groups:
        return True
    # "may 7 people come?" and "March 5 miles": a date has a capital, or words around it that say so.
    followed = WORD.match(low[end:].lstrip())
    capital = text[low.find(name, start)].isupper()
    said = bool(
        re.search(r"(?:\bon|\bof|\bthe|\bsince|\bbefore|\bafter|\buntil|\bby|\bfrom|\bbetween|\band|\bto)\s*$", before)
    )
    return said or (capital and not (opens and followed)) or not followed


def _read_around(text: str, low: str, found: list[_Found], lexicon: Compiled, calendar: Calendar) -> list[TimePhrase]:
    """Join spans, apply what precedes each time, and drop weak ones that nothing supports."""
    phrases: list[TimePhrase] = []
    number, reached = 0, 0
    while number < len(found):
        each = found[number]
        before = low[max(reached, each.start - _BEFORE_CHARACTERS) : each.start]
        span = _join(low, before, each, found[number + 1], lexicon, calendar) if number + 1 < len(found) else None
        if span is not None:
            phrases.append(_phrase(text, span, span.start, span.window))
            number, reached = number + 2, span.end
            continue
        read = _apply_before(before, each, lexicon, calendar)
        if read is not None:
            length, window = read
            phrases.append(_phrase(text, each, each.start - length, window))
            reached = each.end
        number += 1
    return phrases


def _phrase(text: str, found: _Found, start: int, window: Window) -> TimePhrase:
    return TimePhrase(text[start : found.end], start, found.end, window)


def _join(low: str, before: str, first: _Found, second: _Found, lexicon: Compiled, calendar: Calendar) -> _Found | None:
    """The span from the first to the second of two times, if the words before and between them say so."""
    between = low[first.end : second.start]
    opener = lexicon.opener.search(before)
    join = lexicon.opened_join if opener else lexicon.join
    if not join.fullmatch(between):
        return None
    groups = first.groups
    window = first.window
    if "year" in second.groups and "year" not in groups and groups.keys() & {"month", "season"}:
        groups = groups | {"year": second.groups["year"]}
        try:
            window = window_of(groups, lexicon, calendar)
        except (ValueError, OverflowError):
            return None
    start_us, end_us = window.start_us, second.window.end_us
    if start_us is None or end_us is None:
        return None
    if start_us >= end_us:  # "between Friday and Tuesday": the first one is the earlier
        unit = "week" if "weekday" in groups else "year"
        try:
            days = calendar.local(start_us).date()
            start_us = calendar.midnight_us(
                calendar.shifted("day", -7, days) if unit == "week" else calendar.shifted("year", -1, days)
            )
        except (ValueError, OverflowError):
            return None
        if start_us >= end_us:
            return None
    start = first.start - (len(opener[0]) if opener else 0)
    return _Found(start, second.end, Window(start_us, end_us), "", groups | second.groups)


def _apply_before(before: str, found: _Found, lexicon: Compiled, calendar: Calendar) -> tuple[int, Window] | None:
    """(number of characters before it that belong to the phrase, window); None for a weak time without support."""
    words = lexicon.lexicon
    name = found.groups.get("month") or found.groups.get("season") or found.groups.get("weekday") or ""
    weak_name = found.weak and name in words.ambiguous
    if lexicon.offsets is not None and (match := lexicon.offsets.search(before)):
        window = _offset_window(match, found, lexicon, calendar)
        if window is not None:
            return len(match[0]), window
    if match := lexicon.week_of.search(before):
        try:
            return len(match[0]), calendar.week_of(found.window)
        except (ValueError, OverflowError):
            return None
    for kind, pattern in lexicon.modifiers.items():
        if match := pattern.search(before):
            doubtful = match[0].startswith("by") or " " in match[0].strip()
            if weak_name and doubtful and "end of" not in match[0]:
                return None  # "written by April", "after the fall"
            return len(match[0]), _limited(kind, found.window)
    if found.weak and (match := lexicon.weak[found.weak].search(before)):
        return len(match[0]), found.window
    return None if found.weak else (0, found.window)


def _limited(kind: str, window: Window) -> Window:
    if kind == "before":
        return Window(None, window.start_us)
    if kind == "after":
        return Window(window.end_us, None)
    return Window(window.start_us, None) if kind == "since" else Window(None, window.end_us)


def _offset_window(match: re.Match[str], found: _Found, lexicon: Compiled, calendar: Calendar) -> Window | None:
    """ "two days before Christmas", "the week after 7 May"."""
    given = {name.rstrip("0123456789"): value for name, value in match.groupdict().items() if value is not None}
    words, number = lexicon.lexicon, plain_words(given.get("n", ""))
    if number in words.vague:
        return None
    count = int(number) if number.isdecimal() else words.numbers.get(number, 1)
    unit, direction = words.units[plain_words(given["unit"])], words.offset_words[given["offset"]]
    limit_us = found.window.start_us if direction < 0 else found.window.end_us
    if limit_us is None:
        return None
    anchor = calendar.local(limit_us).date()
    try:
        far, near = (calendar.shifted(unit, direction * each, anchor) for each in (count, count - 1))
        return calendar.between(min(far, near), max(far, near))
    except (ValueError, OverflowError):
        return None


# Chooses the window of a match by the groups of its pattern.


Groups = dict[str, str]
"""The words of a match by the name of their group."""


def plain_words(words: str) -> str:
    """The words with one space between them."""
    return " ".join(words.split())


def window_of(groups: Groups, lexicon: Compiled, calendar: Calendar) -> Window:
    """The window of a match by the groups that matched. Raises ValueError, OverflowError or KeyError."""
    words = lexicon.lexicon
    if "night" in groups:
        return calendar.last_night()
    if "word" in groups:
        return calendar.day_offset(words.days[plain_words(groups["word"])])
    if "many" in groups:
        return _nth_before(words.many[groups["many"]], _number(groups, lexicon), calendar)
    if "n" in groups:
        return _counted(groups, lexicon, calendar)
    if "beyond" in groups:
        return _relative_window(groups, lexicon, calendar, words.beyond[plain_words(groups["beyond"])])
    if "nth" in groups:
        return _quarter(groups, lexicon, calendar)
    year = int(groups["year"]) if "year" in groups else None
    if "day" in groups:
        return _day_window(groups, lexicon, calendar, year)
    if "which" in groups:
        return _relative_window(groups, lexicon, calendar, words.which[plain_words(groups["which"])])
    if "within" in groups:
        return calendar.within(*_days_of(words.units[plain_words(groups["unit"])], 1))
    if "weekend" in groups:
        unit = words.units[plain_words(groups["unit"])]
        if unit != "weekend":
            raise NoSuchTime
        return calendar.unit(unit, -1)
    return _named_window(groups, lexicon, calendar, year)


def _named_window(groups: Groups, lexicon: Compiled, calendar: Calendar, year: int | None) -> Window:
    words = lexicon.lexicon
    if "month" in groups:
        return calendar.month(words.months[groups["month"]], year)
    if "season" in groups:
        return calendar.season(words.seasons[groups["season"]], year)
    if "holiday" in groups:
        return calendar.holiday(words.holidays[plain_words(groups["holiday"])], year)
    if "weekday" in groups:
        return calendar.weekday(words.weekdays[groups["weekday"]], -1)
    if year is None:
        raise NoSuchTime
    return calendar.months(date(year, 1, 1), 12)


def _counted(groups: Groups, lexicon: Compiled, calendar: Calendar) -> Window:
    words, number = lexicon.lexicon, plain_words(groups["n"])
    unit = words.units[plain_words(groups["unit"])]
    if number in words.vague:
        most, least = words.vague[number]
        return calendar.within(unit, most) if "within" in groups else calendar.ago(unit, most, least)
    unit, count = _days_of(unit, _number(groups, lexicon))
    if unit == "day" and count in (14, 15) and not number.isdecimal():  # "vierzehn Tage", "quinze jours": two weeks
        unit, count = "week", 2
    return calendar.within(unit, count) if "within" in groups else calendar.ago(unit, count)


def _number(groups: Groups, lexicon: Compiled) -> int:
    number = plain_words(groups["n"])
    return int(number) if number.isdecimal() else lexicon.lexicon.numbers[number]


def _days_of(unit: str, count: int) -> tuple[str, int]:
    """A number of fortnights as weeks; others as they are."""
    return ("week", 2 * count) if unit == "fortnight" else (unit, count)


def _nth_before(name: int | str, count: int, calendar: Calendar) -> Window:
    """The weekday or season that was last `count` ones ago: "two Fridays ago"."""
    if not count:
        raise NoSuchTime
    window = calendar.weekday(name, -1) if isinstance(name, int) else calendar.season_relative(name, -1)
    return calendar.earlier(window, "week" if isinstance(name, int) else "year", count - 1)


def _quarter(groups: Groups, lexicon: Compiled, calendar: Calendar) -> Window:
    words = lexicon.lexicon
    offset = words.which[groups["which"]] if "which" in groups else 0
    year = int(groups["year"]) if "year" in groups else calendar.today.year + offset
    return calendar.part_of_year(year, words.nth[groups["nth"]], 3)


def _day_window(groups: Groups, lexicon: Compiled, calendar: Calendar, year: int | None) -> Window:
    if "month" not in groups and "monthnum" not in groups:
        which = groups.get("which")
        return calendar.day_of_month(int(groups["day"]), None if which is None else lexicon.lexicon.which[which])
    month = int(groups["monthnum"]) if "monthnum" in groups else lexicon.lexicon.months[groups["month"]]
    day, last = int(groups["day"]), int(groups.get("day2", groups["day"]))
    if not day <= last <= 31:
        raise NoSuchTime
    calendar.day(month, last, year)  # raises for a day that the month does not have
    return calendar.day(month, day, year, last - day + 1)


def _relative_window(groups: Groups, lexicon: Compiled, calendar: Calendar, offset: int) -> Window:
    words = lexicon.lexicon
    if "weekday" in groups:
        return calendar.weekday(words.weekdays[groups["weekday"]], offset)
    if "month" in groups:
        return calendar.month_relative(words.months[groups["month"]], offset)
    if "season" in groups:
        return calendar.season_relative(words.seasons[groups["season"]], offset)
    if "holiday" in groups:
        return calendar.holiday_relative(words.holidays[plain_words(groups["holiday"])], offset)
    unit = words.units[plain_words(groups["unit"])]
    if unit == "fortnight" and offset == -1:
        return calendar.within("week", 2)
    if unit == "day":
        raise NoSuchTime  # "the last day", "the next day": of what?
    return calendar.unit(unit, offset)


def asks_only_time(text: str, phrases: Sequence[TimePhrase]) -> bool:
    """Whether there are phrases, and all words outside them only ask."""
    if not phrases:
        return False
    rest = fold_text(text)
    for each in reversed(phrases):
        rest = f"{rest[: each.start]} {rest[each.end :]}"
    return all(word in _ASKING or _ASKING_ASIAN.issuperset(word) for word in WORD.findall(rest))
