"""Each form of a time means the same at each door: command line, MCP, JSON Lines, programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime

import click
import pytest

from memstream.mcp.tools import _filter
from memstream.times import read_time
from memstream.values import Observation
from memstream_server.cli.options import _ZONE, TimeParam
from memstream_server.cli.records import Format, MalformedLine, RecordReader

FORMS = [
    *("2026-05-08", "20260508", "2026-05-08T12:00", "2026-05-08 12:00:01.5", "2026-05-08t12:00z", "2026-05-08T24:00"),
    *("2016-12-31T23:59:60Z", "now", "today", "yesterday", "tomorrow", "7d", "90m", "1778198400", "1778198400000"),
]
REFUSED = ["noon", "2026-13-01", "08.05.2026", "7 days", "2026-05-08T25:00", "2026-05-08T12:00:61", "1e9"]
NUMBERS = [1778198400, 1778198400000, 1778198400.5, 0, -1]
WANTED = "is no time: give a date"


def read_record(key: str, value: object) -> Observation | MalformedLine:
    line = RecordReader(Format.JSONL).read_line(json.dumps({"text": "x", key: value}).encode())
    assert line is not None
    return line


def from_command_line(value: str, until: bool) -> datetime | None:
    return TimeParam(until).convert(value, None, None)


def from_mcp(value: str, until: bool) -> datetime | None:
    since, end = (None, value) if until else (value, None)
    chosen = _filter("", "", since, end, None, "", "")
    return chosen.observe_time_max if until else chosen.observe_time_min


def from_json_lines(value: str, until: bool) -> datetime | None:
    found = read_record("valid_until" if until else "time", value)
    assert isinstance(found, Observation), found
    return found.valid_until if until else found.observe_time


DOORS: list[Callable[[str, bool], datetime | None]] = [from_command_line, from_mcp, from_json_lines]


@pytest.mark.parametrize("until", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", DOORS)
def test_a_form_means_the_same_at_each_door(door: Callable[..., datetime | None], form: str, until: bool) -> None:
    earliest = read_time(form, until=until)
    found = door(form, until)
    assert found is not None
    assert earliest <= found <= read_time(form, until=until)


@pytest.mark.parametrize("form", REFUSED)
def test_a_door_that_refuses_names_the_forms(form: str) -> None:
    with pytest.raises(click.BadParameter, match=WANTED):
        from_command_line(form, False)
    with pytest.raises(ValueError, match=WANTED):
        from_mcp(form, False)
    refused = read_record("time", form)
    assert isinstance(refused, MalformedLine)
    assert WANTED in str(refused)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_in_json_lines_is_a_unix_time(number: float) -> None:
    found = read_record("time", number)
    assert isinstance(found, Observation)
    assert found.observe_time == read_time(number)


def test_a_null_time_is_refused_because_it_is_not_now() -> None:
    for key in ("time", "observe_time"):
        assert isinstance(read_record(key, None), MalformedLine)
    absent = read_record("valid_until", None)
    assert isinstance(absent, Observation)
    assert absent.valid_until is None


def test_an_unknown_zone_of_a_line_is_refused() -> None:
    for zone in ("Mars/Olympus", 5):
        refused = read_record("time_zone", zone)
        assert isinstance(refused, MalformedLine)
        assert "time" in str(refused)


def test_a_day_is_of_the_zone_of_the_call() -> None:
    zone = "Asia/Kathmandu"
    ctx = click.Context(click.Command("list"))
    ctx.meta[_ZONE] = zone
    for until in (False, True):
        assert TimeParam(until).convert("2026-05-08", None, ctx) == read_time("2026-05-08", zone, until=until)
    for line in ({"time_zone": zone}, {}):
        reader = RecordReader(Format.JSONL, "" if line else zone)
        day = {"text": "x", "time": "2026-05-08", "valid_until": "2026-05-08"}
        found = reader.read_line(json.dumps(day | line).encode())
        assert isinstance(found, Observation)
        assert found.observe_time == read_time("2026-05-08", zone)
        assert found.valid_until == read_time("2026-05-08", zone, until=True)
    chosen = _filter("", "", "2026-05-08", "2026-05-08", None, zone, "")
    assert chosen.observe_time_min == read_time("2026-05-08", zone)
    assert chosen.observe_time_max == read_time("2026-05-08", zone, until=True)
