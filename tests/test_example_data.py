"""The demo's data: well formed, ordered, and with the answers that its questions expect."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parent.parent / "examples" / "data"
ROWS: list[dict[str, str]] = [json.loads(line) for line in (DATA / "tz.jsonl").read_text("utf-8").splitlines()]
QUESTIONS: list[dict[str, Any]] = json.loads((DATA / "questions.json").read_text("utf-8"))


def test_rows_have_exactly_four_fields() -> None:
    assert len(ROWS) > 1_000
    for row in ROWS:
        assert list(row) == ["time", "speaker", "session", "text"]
        assert all(value.strip() == value != "" for value in row.values())
        assert row["text"].startswith(f"{row['session']}: ")
        assert "://" not in row["text"]


def test_rows_are_ordered_and_not_in_the_future() -> None:
    times = [datetime.fromisoformat(row["time"]) for row in ROWS]
    assert times == sorted(times)
    assert all(time.utcoffset() == UTC.utcoffset(None) for time in times)
    assert (times[0].year, times[-1].year) == (1988, 2026)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["question"][:30])
def test_expected_notes_exist(question: dict[str, Any]) -> None:
    assert question["expected"]
    for expected in question["expected"]:
        row = ROWS[expected["line"] - 1]
        assert (row["time"], row["speaker"]) == (expected["time"], expected["speaker"])
        assert expected["contains"] in row["text"]
