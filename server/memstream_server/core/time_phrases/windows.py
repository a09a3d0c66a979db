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
    if "n" in groups:
        return _counted(groups, lexicon, calendar)
    year = int(groups["year"]) if "year" in groups else None
    if "day" in groups:
        return _day_window(groups, lexicon, calendar, year)
    if "which" in groups:
        return _relative_window(groups, lexicon, calendar, words.which[plain_words(groups["which"])])
    if "within" in groups:
        return calendar.within(words.units[plain_words(groups["unit"])], 1)
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
    count = int(number) if number.isdecimal() else words.numbers[number]
    return calendar.within(unit, count) if "within" in groups else calendar.ago(unit, count)


def _day_window(groups: Groups, lexicon: Compiled, calendar: Calendar, year: int | None) -> Window:
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
    if unit == "day":
        raise NoSuchTime  # "the last day", "the next day": of what?
    return calendar.unit(unit, offset)
