"""Phrases of time: what the table of questions promises by language, and what holds for every text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from memstream_server.core.time_phrases.recognition import (
    TimePhrase,
    find_times,
)

NOW = datetime(2023, 11, 15, 12, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TABLE = Path(__file__).with_suffix("").with_name("time_phrases.tsv")


def _rows() -> list[tuple[str, str, str]]:
    """(language, expected windows, question) of each row of the table."""
    lines = [line for line in _TABLE.read_text("utf-8").splitlines() if not line.startswith("#")]
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
