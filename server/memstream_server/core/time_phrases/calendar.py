"""Windows of days, weeks, months, seasons and holidays in a time zone, and how near a fragment is to them.

A window is [start, end) in microseconds since the epoch. Days, weeks (from Monday) and so on begin at local midnight. A
phrase without a year means its latest begin that is not in the future. Seasons are those of the northern hemisphere, by
whole months.

    closeness = 1 inside a window; after it, 1 - distance / reach, at least 0; the best over all windows

The reach is the window's own width, within REACH_MIN_US and REACH_MAX_US: "yesterday" reaches a day, "last week" a
week. People tell of a time after it, so nothing before a window is near; of a time that is still to come they speak
before it, so such a window reaches back.
"""

from __future__ import annotations

from calendar import isleap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import cached_property

import numpy as np
import numpy.typing as npt

YEAR_MIN, YEAR_MAX = 1000, 9000
"""Windows outside these years are not interpreted."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_DAY = timedelta(days=1)
UNIT_SECONDS = {"minute": 60, "hour": 3_600}
SEASON_MONTHS = {"spring": 3, "summer": 6, "autumn": 9, "winter": 12}
"""First of the three months."""
FIXED_HOLIDAYS = {
    "christmas": (12, 24, 3),
    "christmas eve": (12, 24, 1),
    "new year": (1, 1, 1),
    "new year's eve": (12, 31, 1),
    "valentine": (2, 14, 1),
    "halloween": (10, 31, 1),
}
"""Month, day, and number of days."""
_DAY_US = 86_400_000_000
REACH_MIN_US = _DAY_US
REACH_MAX_US = 30 * _DAY_US
REACH_OPEN_US = 7 * _DAY_US
"""Reach of a window with an open side."""


class NoSuchTime(ValueError):
    """The phrase names no time, or one outside the years that are interpreted."""


@dataclass(frozen=True, slots=True)
class Window:
    """[start_us, end_us) in microseconds since the epoch; None is open."""

    start_us: int | None
    end_us: int | None


@dataclass(frozen=True)
class Calendar:
    """The calendar of a question: its moment and its zone. Functions raise NoSuchTime, ValueError or OverflowError."""

    now_us: int
    zone: tzinfo

    @cached_property
    def today(self) -> date:
        """The local date."""
        return self.local(self.now_us).date()

    def local(self, moment_us: int) -> datetime:
        """A moment in the zone."""
        return (_EPOCH + timedelta(microseconds=moment_us)).astimezone(self.zone)

    def midnight_us(self, day: date, hour: int = 0) -> int:
        """The moment at which a local day begins, or an hour of it."""
        if not YEAR_MIN <= day.year <= YEAR_MAX:
            raise NoSuchTime
        moment = datetime(day.year, day.month, day.day, hour, tzinfo=self.zone)
        return (moment.astimezone(UTC) - _EPOCH) // _MICROSECOND

    def days(self, first: date, count: int = 1) -> Window:
        """`count` local days from `first`."""
        return self.between(first, first + count * _DAY)

    def between(self, first: date, end: date) -> Window:
        """The local days from `first` up to, not including, `end`."""
        return Window(self.midnight_us(first), self.midnight_us(end))

    def day_offset(self, offset: int) -> Window:
        """The day `offset` days from today."""
        return self.days(self.today + offset * _DAY)

    def last_night(self) -> Window:
        """From yesterday 18:00 to today 06:00."""
        return Window(self.midnight_us(self.today - _DAY, 18), self.midnight_us(self.today, 6))

    def unit(self, unit: str, offset: int) -> Window:
        """The calendar day, week, weekend, month, quarter or year `offset` ones from the present."""
        today = self.today
        monday = today - today.weekday() * _DAY
        if unit == "day":
            return self.day_offset(offset)
        if unit == "week":
            return self.days(monday + 7 * offset * _DAY, 7)
        if unit == "weekend":
            # The last weekend is over: on a Saturday or Sunday it is not the present one.
            return self.days(monday + (7 * offset + 5) * _DAY, 2)
        if unit == "month":
            return self.months(add_months(today.replace(day=1), offset), 1)
        if unit == "quarter":
            return self.months(add_months(date(today.year, 3 * ((today.month - 1) // 3) + 1, 1), 3 * offset), 3)
        if unit == "year":
            return self.months(date(today.year + offset, 1, 1), 12)
        raise NoSuchTime

    def months(self, first: date, count: int) -> Window:
        """`count` months from the first day of one."""
        return self.between(first, add_months(first, count))

    def ago(self, unit: str, count: int, until: int | None = None) -> Window:
        """The span of one unit around the moment `count` units ago; from `count` to `until` units ago if given."""
        if until is not None:
            return self.between(self.shifted(unit, -count), self.shifted(unit, -until))
        if unit in ("weekend", "quarter"):
            return self.unit(unit, -count)
        if unit in UNIT_SECONDS:
            span_us = UNIT_SECONDS[unit] * 1_000_000
            middle_us = self.now_us - count * span_us
            self.midnight_us(self.local(middle_us).date())  # raises for a year that is not interpreted
            return Window(middle_us - span_us // 2, middle_us + span_us // 2)
        middle = self.shifted(unit, -count)
        before, after = {"day": (0, 1), "week": (3, 4), "month": (15, 16), "year": (182, 183)}[unit]
        return self.between(middle - before * _DAY, middle + after * _DAY)

    def within(self, unit: str, count: int) -> Window:
        """The last `count` units, today included."""
        if unit in UNIT_SECONDS:
            start_us = self.now_us - count * UNIT_SECONDS[unit] * 1_000_000
            self.midnight_us(self.local(start_us).date())
            return Window(start_us, self.midnight_us(self.today + _DAY))
        return self.between(self.shifted(unit, -count), self.today + _DAY)

    def shifted(self, unit: str, count: int, start: date | None = None) -> date:
        """A date `count` units after `start` (today)."""
        start = start or self.today
        if unit in ("day", "week"):
            return start + count * (7 if unit == "week" else 1) * _DAY
        if unit in ("month", "year"):
            return add_months(start, count * (12 if unit == "year" else 1))
        raise NoSuchTime

    def earlier(self, window: Window, unit: str, count: int) -> Window:
        """The same days `count` weeks or years earlier."""
        if window.start_us is None or window.end_us is None:
            raise NoSuchTime
        first, end = (self.local(limit_us).date() for limit_us in (window.start_us, window.end_us))
        return self.between(self.shifted(unit, -count, first), self.shifted(unit, -count, end))

    def week_of(self, window: Window) -> Window:
        """The calendar week of a window's first day."""
        if window.start_us is None:
            raise NoSuchTime
        first = self.local(window.start_us).date()
        return self.days(first - first.weekday() * _DAY, 7)

    def part_of_year(self, year: int, part: int, months: int) -> Window:
        """A quarter (of 3 months) or half (of 6) of a year, from 1."""
        if not 1 <= part <= 12 // months:
            raise NoSuchTime
        return self.months(date(year, months * (part - 1) + 1, 1), months)

    def day_of_month(self, day: int, month_offset: int | None = None) -> Window:
        """That day of the month `month_offset` ones from the present; without one, the latest that has begun."""
        first = self.today.replace(day=1)
        if month_offset is not None:
            return self.days(add_months(first, month_offset).replace(day=day))
        if not 1 <= day <= 31:
            raise NoSuchTime
        while True:  # at most two steps: of two neighbouring months one has 31 days
            try:
                found = first.replace(day=day)
            except ValueError:
                found = None
            if found is not None and found <= self.today:
                return self.days(found)
            first = add_months(first, -1)

    def weekday(self, weekday: int, offset: int) -> Window:
        """-1: the latest one before today; 0: that of this week; 1: the next one after today. Monday is 0.

        -2, 2: a week before the latest, after the next.
        """
        today = self.today
        if abs(offset) == 2:
            nearest = self.weekday(weekday, offset // 2)
            return self.earlier(nearest, "week", -offset // 2)
        if offset == 0:
            return self.days(today + (weekday - today.weekday()) * _DAY)
        ahead = (weekday - today.weekday() - 1) % 7 + 1
        return self.days(today + (ahead if offset > 0 else ahead - 7 - 7 * (ahead == 7)) * _DAY)

    def month(self, month: int, year: int | None = None) -> Window:
        """A month of that year, or the latest that has begun."""
        if year is None:
            year = self._latest_year(month, 1)
        return self.months(date(year, month, 1), 1)

    def month_relative(self, month: int, offset: int) -> Window:
        """-1: the latest such month that is over; 0: that of this year; 1: the next one that has not begun."""
        return self._relative(date(self.today.year, month, 1), 1, offset)

    def day(self, month: int, day: int, year: int | None = None, count: int = 1) -> Window:
        """A day of that year, or the latest that has begun; 29 February is the latest one that existed."""
        if year is not None:
            return self.days(date(year, month, day), count)
        year = self._latest_year(month, day)
        if (month, day) == (2, 29):
            year = next(each for each in range(year, year - 9, -1) if isleap(each) and each >= YEAR_MIN)
        return self.days(date(year, month, day), count)

    def season(self, season: str, year: int | None = None) -> Window:
        """A season of that year (a winter begins in it), or the latest that has begun."""
        month = SEASON_MONTHS[season]
        return self.months(date(self._latest_year(month, 1) if year is None else year, month, 1), 3)

    def season_relative(self, season: str, offset: int) -> Window:
        """-1: the latest such season that is over; 0: this year's, or one that is not over; 1: the next."""
        return self._relative(date(self.today.year, SEASON_MONTHS[season], 1), 3, offset)

    def holiday(self, name: str, year: int | None = None) -> Window:
        """A holiday of that year, or the latest that has begun."""
        if name in FIXED_HOLIDAYS:
            month, day, count = FIXED_HOLIDAYS[name]
            return self.day(month, day, year, count)
        of_year = {"easter": easter, "thanksgiving": thanksgiving}[name]
        first, count = of_year(self.today.year if year is None else year), 2 if name == "easter" else 1
        if year is None and first > self.today:
            first = of_year(self.today.year - 1)
        return self.days(first, count)

    def holiday_relative(self, name: str, offset: int) -> Window:
        """-1: the latest one that has begun; 0: that of this year; 1: the next."""
        if offset < 0:
            return self.holiday(name)
        window = self.holiday(name, self.today.year)
        if offset and window.start_us is not None and window.start_us <= self.now_us:
            return self.holiday(name, self.today.year + 1)
        return window

    def _relative(self, first: date, months: int, offset: int) -> Window:
        """`first`: the first day of such a span in this year."""
        if offset < 0:
            while add_months(first, months) > self.today:
                first = add_months(first, -12)
        elif offset > 0 and first <= self.today:
            first = add_months(first, 12)
        elif offset == 0 and add_months(first, months - 12) > self.today:
            first = add_months(first, -12)  # a winter that began last year
        return self.months(first, months)

    def _latest_year(self, month: int, day: int) -> int:
        today = self.today
        return today.year if (month, day) <= (today.month, today.day) else today.year - 1


def add_months(day: date, count: int) -> date:
    """The same day of a month `count` months later, or the last of that month."""
    index = day.year * 12 + day.month - 1 + count
    year, month = divmod(index, 12)
    if not YEAR_MIN <= year <= YEAR_MAX:
        raise NoSuchTime
    for last in (day.day, 30, 29, 28):
        try:
            return date(year, month + 1, min(day.day, last))
        except ValueError:
            continue
    raise NoSuchTime


def easter(year: int) -> date:
    """Easter Sunday of a Gregorian year, by the anonymous algorithm (Meeus, Astronomical Algorithms, chapter 8)."""
    a, b, c = year % 19, year // 100, year % 100
    h = (19 * a + b - b // 4 - (b - (b + 8) // 25 + 1) // 3 + 15) % 30
    f = (32 + 2 * (b % 4) + 2 * (c // 4) - h - c % 4) % 7
    month, day = divmod(h + f - 7 * ((a + 11 * h + 22 * f) // 451) + 114, 31)
    return date(year, month, day + 1)


def thanksgiving(year: int) -> date:
    """The fourth Thursday of November."""
    first = date(year, 11, 1)
    return first + ((3 - first.weekday()) % 7 + 21) * _DAY


def time_closeness(
    observe_us: npt.NDArray[np.int64], windows: Sequence[Window], now_us: int
) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1] for the observation times `observe_us` and a question asked at `now_us`."""
    nearest = np.zeros(len(observe_us))
    for window in windows:
        reach = _reach_us(window)
        distance = np.zeros(len(observe_us))
        if window.start_us is not None:
            early = window.start_us - observe_us
            np.maximum(distance, early if window.start_us > now_us else np.where(early > 0, reach, 0), out=distance)
        if window.end_us is not None:
            np.maximum(distance, observe_us - (window.end_us - 1), out=distance)
        np.maximum(nearest, 1.0 - distance / reach, out=nearest)
    return nearest


def is_near(observe_us: npt.NDArray[np.int64], windows: Sequence[Window], now_us: int) -> npt.NDArray[np.bool_]:
    """bool[n]: where `time_closeness` is above 0; two comparisons a window, for all fragments of a memory."""
    near = np.zeros(len(observe_us), np.bool_)
    for window in windows:
        reach = _reach_us(window)
        inside = np.ones(len(observe_us), np.bool_)
        if window.start_us is not None:
            inside &= observe_us > window.start_us - (reach if window.start_us > now_us else 1)
        if window.end_us is not None:
            inside &= observe_us < window.end_us - 1 + reach
        near |= inside
    return near


def _reach_us(window: Window) -> int:
    if window.start_us is None or window.end_us is None:
        return REACH_OPEN_US
    return min(max(window.end_us - window.start_us, REACH_MIN_US), REACH_MAX_US)
