"""Chooses the window of a match by the groups of its pattern."""

from __future__ import annotations

from datetime import date

from memstream_server.core.time_phrases.calendar import Calendar, NoSuchTime, Window
from memstream_server.core.time_phrases.patterns import Compiled

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
