"""Times as people, models and files write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import memstream
from memstream.times import read_time

NOW = datetime(2026, 5, 8, 23, 30, tzinfo=UTC)
UNDERSTOOD: list[tuple[str | float, str]] = [
    ("2026-05-08", "2026-05-08T00:00Z"),
    ("20260508", "2026-05-08T00:00Z"),
    ("2026-05-08T12:00", "2026-05-08T12:00Z"),
    ("2026-05-08 12:00:01.5", "2026-05-08T12:00:01.500Z"),
    ("2026-05-08t12:00z", "2026-05-08T12:00Z"),
    ("2026-05-08T12:00+02:00", "2026-05-08T10:00Z"),
    ("2026-05-08T24:00", "2026-05-09T00:00Z"),
    ("2026-12-31T24:00:00Z", "2027-01-01T00:00Z"),
    ("2016-12-31T23:59:60Z", "2017-01-01T00:00Z"),
    ("  2026-05-08  ", "2026-05-08T00:00Z"),
    ("now", "2026-05-08T23:30Z"),
    ("today", "2026-05-08T00:00Z"),
    ("Yesterday", "2026-05-07T00:00Z"),
    ("tomorrow", "2026-05-09T00:00Z"),
    ("7d", "2026-05-01T23:30Z"),
    ("1.5 h", "2026-05-08T22:00Z"),
    ("2W", "2026-04-24T23:30Z"),
    ("1778198400", "2026-05-08T00:00Z"),
    ("1778198400000", "2026-05-08T00:00Z"),
    ("1778198400.5", "2026-05-08T00:00:00.500Z"),
    (1778198400, "2026-05-08T00:00Z"),
    (1778198400000, "2026-05-08T00:00Z"),
    (1778198400000000, "2026-05-08T00:00Z"),
    (0, "1970-01-01T00:00Z"),
    (-1, "1969-12-31T23:59:59Z"),
]
REFUSED: list[str | float] = [
    *("", " ", "noon", "2026", "2026-05", "2026-13-01", "08.05.2026", "5/8/2026", "7", "7 days", "12:00"),
    *("2026-05-08T25:00", "2026-05-08T24:01", "2026-05-08T12:00:61", "2026-05-08T12:60", "2026-05-08TZ"),
    *("9999-12-31T24:00", "1e9", "nan", "0001-01-01T00:00+14:00", "99999999999w", "1" * 400, "\u0667d"),
    *(float("nan"), float("inf"), 1e300, True),
]


@pytest.mark.parametrize(("value", "expected"), UNDERSTOOD)
def test_time_is_understood(value: str | float, expected: str) -> None:
    assert read_time(value, now=NOW) == datetime.fromisoformat(expected)


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: str(value)[:30])
def test_other_times_are_refused_with_the_form_wanted(value: str | float) -> None:
    with pytest.raises(ValueError, match="is no time: give a date \\(2026-05-08\\)"):
        read_time(value, now=NOW)


def test_dates_are_days_of_the_time_zone() -> None:
    berlin = {"time_zone": "Europe/Berlin", "now": NOW}
    assert read_time("today", **berlin) == datetime(2026, 5, 8, 22, tzinfo=UTC)  # there it is the 9th
    assert read_time("2026-05-08", **berlin) == datetime(2026, 5, 7, 22, tzinfo=UTC)
    assert read_time("2026-05-08T12:00", **berlin) == datetime(2026, 5, 8, 10, tzinfo=UTC)
    assert read_time("2026-05-08T12:00Z", **berlin) == datetime(2026, 5, 8, 12, tzinfo=UTC)
    with pytest.raises(ValueError, match="IANA name"):
        read_time("today", "Europe/Atlantis")


@pytest.mark.parametrize("day", ["2026-05-08", "2026-03-29", "2026-10-25", "today", "yesterday"])
@pytest.mark.parametrize("zone", ["", "Europe/Berlin", "Asia/Kathmandu"])
def test_range_from_a_day_to_it_is_that_day(day: str, zone: str) -> None:
    since, until = (read_time(day, zone, until=until, now=NOW) for until in (False, True))
    changes = {"2026-03-29": -1, "2026-10-25": 1} if zone == "Europe/Berlin" else {}
    assert until - since == timedelta(hours=24 + changes.get(day, 0))
    assert read_time("2026-05-08T12:00Z", zone, until=True) == read_time("2026-05-08T12:00Z", zone)


def test_reader_is_public() -> None:
    assert memstream.read_time is read_time
