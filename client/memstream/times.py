"""Reads times as people, models and files write them: one reader for the command line, MCP, JSON Lines and programs."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

TIME_FORMS = (
    "a date (2026-05-08), a time (2026-05-08T12:00Z), now, today, yesterday, tomorrow, a duration before now "
    "(90m, 12h, 7d, 2w), or a Unix time"
)
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s?([smhdw])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DAYS = {"today": 0, "yesterday": -1, "tomorrow": 1}
_UNIX = re.compile(r"-?\d{9,}(?:\.\d+)?", re.ASCII)
"""Fewer digits are a date, or nothing."""
_MIDNIGHT = re.compile(r"T24(?::?00){0,2}(?:[.,]0+)?(?=[Z+-]|$)")
_LEAP_SECOND = re.compile(r"(:\d\d:?)60(?=[.,Z+-]|$)", re.ASCII)
_SECONDS_MAX = 1e11
"""Unix seconds of the year 5138; a larger number counts milliseconds, then microseconds."""


def read_time(value: str | float, time_zone: str = "", *, until: bool = False, now: datetime | None = None) -> datetime:
    """The time in UTC; `value` has one of TIME_FORMS.

    `time_zone`: IANA name of the zone of dates, and of times without one; empty: UTC.
    `until`: whether it ends a range: a date then means the end of that day, so that the range includes it.

    Raises ValueError for anything else.
    """
    zone = read_zone(time_zone)
    try:
        if isinstance(value, str):
            return _read_text(value.strip(), zone, until, now or datetime.now(UTC)).astimezone(UTC)
        return _read_number(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{value!r} is no time: give {TIME_FORMS}") from error


def read_zone(name: str) -> tzinfo:
    """The zone of an IANA name; empty: UTC. Raises ValueError."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{name!r} is no time zone: give an IANA name such as Europe/Berlin") from error


def _read_text(text: str, zone: tzinfo, until: bool, now: datetime) -> datetime:
    lower, upper = text.lower(), text.upper()
    if lower == "now":
        return now
    if span := _AGO.fullmatch(lower):
        return now - timedelta(seconds=float(span[1]) * _UNITS_S[span[2]])
    if _UNIX.fullmatch(text):
        return _read_number(float(text) if "." in text else int(text))
    day = now.astimezone(zone).date() + timedelta(_DAYS[lower]) if lower in _DAYS else _read_date(upper)
    if day is not None:
        return datetime.combine(day + timedelta(until), time.min, zone)
    whole, days = _MIDNIGHT.subn("T00:00", upper)
    whole, seconds = _LEAP_SECOND.subn(r"\g<1>59", whole)
    moment = datetime.fromisoformat(whole)
    return (moment if moment.tzinfo else moment.replace(tzinfo=zone)) + timedelta(days=days, seconds=seconds)


def _read_date(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def _read_number(value: float) -> datetime:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError
    for power in (0, 3, 6):
        if abs(value) < _SECONDS_MAX * 10**power:
            return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=int(value * 10 ** (6 - power)))
    raise ValueError
