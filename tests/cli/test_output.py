"""Output of commands: JSON, tables and escaping."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import pytest
from rich.text import Text

from memstream.answer_values import Answer, Explanation, InterpretedTime, Recollection, ScorePart
from memstream.errors import NotFound
from memstream.resources import Cursor
from memstream.values import Fragment, FragmentKind, Structured, Tier
from memstream_server.cli.failures import Failure
from memstream_server.cli.output import (
    create_table,
    escape_line,
    escape_text,
    facts_table,
    fragment_text,
    print_json,
    print_line,
    print_parts,
    to_json_value,
)
from memstream_server.cli.output import open_console as new_console
from memstream_server.cli.recall import format_score, print_answer

NOON = datetime(2026, 5, 8, 12, tzinfo=UTC)


def fragment(content: str, structured: Structured | None = None) -> Fragment:
    return Fragment(
        id="01K9",
        kind=FragmentKind.OBSERVATION,
        tier=Tier.LONG_TERM,
        content=content,
        structured=structured,
        merged_text="",
        speaker="Bob",
        session="monday",
        importance=0.5,
        observe_time=NOON,
        create_time=NOON,
        access_time=None,
        access_count=0,
        enhancement_count=0,
        duplicate_count=0,
        sources=(),
        metadata={},
        expire_time=None,
        pinned=False,
        external_id="",
        model="hashing",
        etag="1",
        forget_time=None,
        token_count=0,
    )


def answer(*hits: Recollection, degraded: str = "") -> Answer:
    return Answer(hits, (fragment("held"),), 7, 12, 5, 0.9, degraded, (), {"search": 0.001, "score": 0.002}, 0)


EXPLAINED = Explanation(
    (ScorePart("lexical", 0.9, 0.45, 0.405, {}), ScorePart("importance", 0.5, 0.1, 0.05, {})), "absolute/4"
)
HIT = Recollection(fragment("My name is [bold]Bob[/bold]"), 0.455, 0.405, 1, False, EXPLAINED)


def test_plain_values() -> None:
    assert to_json_value(datetime(2026, 5, 8, 14, tzinfo=timezone(timedelta(hours=2)))) == "2026-05-08T12:00:00Z"
    assert to_json_value(timedelta(minutes=1)) == 60.0
    assert to_json_value({"tier": Tier.SENSORY, "set": frozenset({Tier.SENSORY})}) == {
        "tier": "sensory",
        "set": ["sensory"],
    }
    assert to_json_value(Cursor("u", 3)) == {"memory_uid": "u", "revision": 3, "ordinal": 0}
    assert to_json_value(NotFound("gone", reason="MEMORY_NOT_FOUND")) == {
        "reason": "MEMORY_NOT_FOUND",
        "message": "gone",
    }


def test_answer_json_has_the_names_of_the_sdk(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(answer(HIT))
    said = json.loads(capsys.readouterr().out)
    assert said["recollections"][0]["fragment"]["tier"] == "long_term"
    assert said["recollections"][0]["fragment"]["observe_time"] == "2026-05-08T12:00:00Z"
    assert said["recollections"][0]["explanation"]["parts"][0]["contribution"] == 0.405
    assert said["revision"] == 7
    assert list(said) == [
        "recollections",
        "working_memory",
        "revision",
        "eligible",
        "considered",
        "best_relevance",
        "degraded",
        "near_misses",
        "timings",
        "tokens",
        "weak",
        "interpreted",
        "as_of_revision",
        "receipt_id",
        "unmatched",
        "memories",
    ]


def test_folded_recollections_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(answer(replace(HIT, folded_ids=("a", "b"))), explain=False, working=False)
    assert "(+2 alike)" in capsys.readouterr().out
    print_answer(answer(HIT), explain=False, working=False)
    assert "alike" not in capsys.readouterr().out


def test_interpreted_times_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    times = (
        InterpretedTime("last week", datetime(2023, 11, 6, tzinfo=UTC), datetime(2023, 11, 13, tzinfo=UTC)),
        InterpretedTime("before Christmas", None, datetime(2022, 12, 24, tzinfo=UTC)),
        InterpretedTime("since\x1b[31m May", datetime(2023, 5, 1, tzinfo=UTC), None),
    )
    print_answer(replace(answer(HIT), interpreted=times), explain=False, working=False)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.startswith("interpreted: ")]
    assert lines == [
        'interpreted: "last week" is 2023-11-06 00:00 to 2023-11-13 00:00',
        'interpreted: "before Christmas" is before 2022-12-24 00:00',
        r'interpreted: "since\x1b[31m May" is from 2023-05-01 00:00 on',
    ]


def test_score_is_shown_as_a_sum() -> None:
    assert format_score(EXPLAINED) == "0.455 = lexical 0.900 x 0.45 + importance 0.500 x 0.1 (absolute/4)"


def test_answer_table_shows_content_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(answer(HIT, degraded="dense: index down"), explain=True, working=True)
    out = capsys.readouterr().out
    assert "1   0.455       0.405   2026-05-08 12:00 · Bob · monday" in out
    assert "My name is [bold]Bob[/bold]" in out
    assert "0.455 = lexical" in out
    assert "held" in out
    assert "1 of 12, 5 considered · best relevance 0.900 · revision 7 · 3.0 ms" in out
    assert "degraded: dense: index down" in out


def test_empty_answer_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    print_answer(answer(), explain=False, working=False)
    assert capsys.readouterr().out.startswith("nothing recalled\n0 of 12")


def test_memory_content_cannot_control_the_terminal() -> None:
    assert escape_text("a\x1b[2Jb\x9bc\u202ed\te\nf").plain == "a\\x1b[2Jb\\x9bc\\u202ed\te\nf"
    assert escape_line("a\n\n b\tc", 10).plain == "a b c"
    assert escape_text("abcdef", 4).plain == "abc…"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202e\u2066\u200f\x7f"


def test_output_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    said = replace(fragment(HOSTILE), speaker=HOSTILE, session=HOSTILE)
    parts = (ScorePart(HOSTILE, 0.9, 0.45, 0.405, {}),)
    hit = Recollection(said, 0.4, 0.4, 1, True, Explanation(parts, HOSTILE))
    grid = create_table("name", "said")
    grid.add_row(HOSTILE, Text(HOSTILE))
    print_parts(
        new_console(), grid, facts_table([(HOSTILE, HOSTILE), ("map", {HOSTILE: HOSTILE})]), Text(HOSTILE), HOSTILE
    )
    print_answer(replace(answer(hit, degraded=HOSTILE), working_memory=(said,)), explain=True, working=True)
    print_line(HOSTILE)
    Failure(f"the server says {HOSTILE}").show()
    out, err = capsys.readouterr()
    assert not {one for one in out + err if not one.isprintable()} - {"\n"}
    assert "\\x1b]0;owned\\x07" in out
    assert "\\x1b[2J" in err


def test_json_is_not_escaped_twice(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(fragment(HOSTILE))
    assert json.loads(capsys.readouterr().out)["content"] == HOSTILE


def test_facts_are_shown_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(
        new_console(), facts_table([("a", 1_000_001.0), ("b", timedelta(days=4_000)), ("c", 0.1), ("d", 12_345_678)])
    )
    assert capsys.readouterr().out.split() == ["a", "1000001", "b", "345600000", "s", "c", "0.1", "d", "12,345,678"]


def test_tables_have_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    grid = create_table("name", "count", numbers=["count"])
    grid.add_row("a", "1")
    print_parts(new_console(), grid, facts_table([("x", 1_000), ("empty", ""), ("none", None), ("on", True)]))
    assert capsys.readouterr().out == "name   count\n────────────\na          1\nx   1,000\non  yes\n"


def test_structured_fragment_is_shown_by_line() -> None:
    assert fragment_text(fragment("", Structured(thought="go", action="walk"))) == "thought: go\naction: walk"
