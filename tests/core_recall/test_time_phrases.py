"""Phrases of time: what the table of questions promises by language, and what holds for every text."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstream_server.core.time_phrases.lexicons import LEXICONS
from memstream_server.core.time_phrases.recognition import (
    PHRASES_MAX,
    TEXT_CHARACTERS_MAX,
    TimePhrase,
    asks_only_time,
    find_times,
    has_time_words,
)
from tests.support.arbitrary import UNICODE
from tests.support.seeds import rounds

NOW = datetime(2023, 11, 15, 12, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TABLE = Path(__file__).with_name("time_phrases.tsv")
_HELD_OUT = Path(__file__).with_name("time_phrases_held_out.tsv")


def _rows(table: Path = _TABLE) -> list[tuple[str, str, str]]:
    """(language, expected windows, question) of each row of a table."""
    lines = [line for line in table.read_text("utf-8").splitlines() if not line.startswith("#")]
    rows = [line.split("\t") for line in lines]
    return [(row[0], " .. ".join(row[1:-1]), row[-1]) for row in rows]


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _find(text: str, language: str = "english", now: datetime = NOW, zone: str = "UTC") -> tuple[TimePhrase, ...]:
    return find_times(text, language, _microseconds(now), ZoneInfo(zone))


def _days(found: tuple[TimePhrase, ...]) -> str:
    """Windows as in the table."""
    return " + ".join(f"{_day(each.window.start_us)} .. {_day(each.window.end_us)}" for each in found)


def _day(moment_us: int | None) -> str:
    if moment_us is None:
        return "-"
    moment = _EPOCH + timedelta(microseconds=moment_us)
    return f"{moment:%Y-%m-%d}" if moment.hour == 0 else f"{moment:%Y-%m-%dT%H:%M}"


@pytest.mark.parametrize(("language", "expected", "question"), _rows())
def test_questions_of_the_table_mean_their_windows(language: str, expected: str, question: str) -> None:
    wanted = "" if expected == "none .. none" else expected
    assert _days(_find(question, language)) == wanted


def test_rules_hold_on_questions_they_were_not_tuned_on() -> None:
    found = [(expected, _days(_find(question, language))) for language, expected, question in _rows(_HELD_OUT)]
    phrases = [(wanted, got) for wanted, got in found if wanted != "none .. none"]
    traps = [got for wanted, got in found if wanted == "none .. none"]
    assert sum(wanted == got for wanted, got in phrases) / len(phrases) >= 0.95
    assert sum(got != "" for got in traps) / len(traps) <= 0.05


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("UTC", "2023-11-14 .. 2023-11-15"),
        ("Europe/Berlin", "2023-11-13T23:00 .. 2023-11-14T23:00"),
        ("Pacific/Kiritimati", "2023-11-14T10:00 .. 2023-11-15T10:00"),  # 14 hours ahead: the 16th has begun
        ("America/Los_Angeles", "2023-11-14T08:00 .. 2023-11-15T08:00"),
        ("Asia/Kathmandu", "2023-11-13T18:15 .. 2023-11-14T18:15"),
    ],
)
def test_yesterday_is_a_day_of_the_zone(zone: str, expected: str) -> None:
    assert _days(_find("What did I do yesterday?", zone=zone)) == expected


@pytest.mark.parametrize(
    ("now", "zone", "hours"),
    [
        (datetime(2024, 4, 1, 12, tzinfo=UTC), "Europe/Berlin", 23),  # clocks went forward on 31 March
        (datetime(2024, 10, 28, 12, tzinfo=UTC), "Europe/Berlin", 25),
        (datetime(2018, 11, 5, 12, tzinfo=UTC), "America/Sao_Paulo", 23),  # at midnight: the day began at 01:00
        (datetime(2024, 7, 2, 12, tzinfo=UTC), "Europe/Berlin", 24),
    ],
)
def test_a_day_with_a_change_of_clocks_has_its_real_length(now: datetime, zone: str, hours: int) -> None:
    (found,) = _find("yesterday", now=now, zone=zone)
    assert found.window.start_us is not None
    assert found.window.end_us is not None
    assert (found.window.end_us - found.window.start_us) / 3.6e9 == hours


@pytest.mark.parametrize(
    ("text", "now", "expected"),
    [
        ("on February 29", datetime(2024, 3, 1, tzinfo=UTC), "2024-02-29 .. 2024-03-01"),
        ("on February 29", datetime(2024, 2, 28, tzinfo=UTC), "2020-02-29 .. 2020-03-01"),
        ("on February 29, 2023", datetime(2024, 3, 1, tzinfo=UTC), ""),
        ("on February 29, 1900", datetime(2024, 3, 1, tzinfo=UTC), ""),
        ("last month", datetime(2024, 3, 31, tzinfo=UTC), "2024-02-01 .. 2024-03-01"),
        ("a year ago", datetime(2024, 2, 29, tzinfo=UTC), "2022-08-30 .. 2023-08-30"),
        ("in the last month", datetime(2024, 3, 31, tzinfo=UTC), "2024-02-01 .. 2024-03-01"),
        ("in December", datetime(2024, 1, 5, tzinfo=UTC), "2023-12-01 .. 2024-01-01"),
        ("last week", datetime(2024, 1, 1, tzinfo=UTC), "2023-12-25 .. 2024-01-01"),
        ("an hour ago", NOW, "2023-11-15T10:30 .. 2023-11-15T11:30"),
    ],
)
def test_edges_of_months_and_years_are_kept(text: str, now: datetime, expected: str) -> None:
    assert _days(_find(text, now=now)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "9999999 years ago",
        "8000000 weeks ago",
        "1000000 days before May 7, 2023",
        "in the last 9999999 months",
        "9999999 minutes ago" * 20,
        "9999999年前",
        "vor 9999999 Jahren",
    ],
)
def test_numbers_beyond_the_calendar_raise_nothing(text: str) -> None:
    for language in LEXICONS:
        for found in _find(text, language):
            assert found.window.start_us is None or abs(found.window.start_us) < 10**18


def test_moments_at_the_ends_of_time_raise_nothing() -> None:
    for now_us in (-62_135_596_800_000_000, 253_402_300_799_999_999, 0):
        for zone in ("UTC", "Pacific/Kiritimati", "Etc/GMT+12"):
            for text in (
                "yesterday",
                "last year",
                "tomorrow",
                "100 years ago",
                "next year",
                "since May",
                "an hour ago",
            ):
                find_times(text, "english", now_us, ZoneInfo(zone))


@pytest.mark.parametrize(
    "flood",
    [
        "last ",
        "may 7 ",
        " ",
        "in the ",
        "1",
        "'",
        "“",
        "between May 3 and ",
        "12.12.",
        "昨天",
        "3月",
        "the last 3 ",
        "ago",
    ],
)
@pytest.mark.timeout(30)
def test_hostile_texts_take_bounded_time(flood: str) -> None:
    """60 KB are not read at all; the longest text that is read takes milliseconds, so the timeout means a flaw."""
    assert find_times(flood * (60_000 // len(flood)), "english", _microseconds(NOW), UTC) == ()
    longest = flood * (TEXT_CHARACTERS_MAX // len(flood))
    for language in LEXICONS:
        assert len(_find(longest, language)) <= PHRASES_MAX


_WORDS = [
    "last", "next", "week", "May", "7", "31", "2023", "ago", "two", "days", "before", "between", "and", "to", "since",
    "Christmas", "vor", "drei", "Tagen", "il y a", "jours", "hace", "mayo", "de", "há", "上周", "三天前", "5月", "から",
    "'", '"', "-", "30. Februar", "9999999", "2023-13-45", "İ", "\x00", "\ud800", "́", "99月99日",
]  # fmt: skip


@given(
    st.one_of(st.text(UNICODE, max_size=80), st.lists(st.sampled_from(_WORDS), max_size=14).map(" ".join)),
    st.sampled_from([*LEXICONS, "english", "finnish"]),
    st.datetimes(datetime(1000, 1, 1), datetime(9000, 1, 1)),
    st.sampled_from(["UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Tokyo"]),
)
@settings(max_examples=rounds(300, 100), deadline=None)
def test_any_text_gives_ordered_windows_and_the_same_again(text: str, language: str, at: datetime, zone: str) -> None:
    now = at.replace(tzinfo=UTC)
    found = _find(text, language, now, zone)
    assert found == _find(text, language, now, zone)
    assert len(found) <= PHRASES_MAX
    for each in found:
        assert each.phrase == text[each.start : each.end] != ""
        assert each.window.start_us is not None or each.window.end_us is not None
        if each.window.start_us is not None and each.window.end_us is not None:
            assert each.window.start_us < each.window.end_us
        assert has_time_words(text)
    assert all(one.end <= other.start for one, other in itertools.pairwise(found)), "phrases do not overlap"


@pytest.mark.parametrize(
    ("language", "text", "only"),
    [
        ("english", "What did I do yesterday?", True),
        ("english", "What happened between May 3 and May 7?", True),
        ("english", "last week", True),
        ("english", "What did I eat yesterday?", False),
        ("english", "Who was in Rome last week?", False),
        ("english", "What did I do?", False),
        ("german", "Was habe ich gestern gemacht?", True),
        ("german", "Was hat Anna gestern gemacht?", False),
        ("french", "Qu'ai-je fait hier ?", True),
        ("spanish", "¿Qué hice ayer?", True),
        ("portuguese", "O que fizemos ontem?", True),
        ("english", "我昨天做了什么", True),
        ("english", "我昨天吃了什么", False),
        ("english", "昨日は何をしましたか", True),
        ("english", "昨日は何を食べましたか", False),
    ],
)
def test_question_that_names_only_a_time_is_recognised(language: str, text: str, only: bool) -> None:
    assert asks_only_time(text, _find(text, language)) is only
