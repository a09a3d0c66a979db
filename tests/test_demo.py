"""The demo on a part of its letters: it runs, prints its results, and its checks find no loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memstream import sync
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parent.parent
LETTERS = 500


@pytest.fixture(scope="module")
def shown() -> str:
    command = [sys.executable, "examples/demo.py", "--letters", str(LETTERS)]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False, encoding="utf-8"
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_demo_reports_no_loss_and_no_duplicates(shown: str) -> None:
    assert "Nothing acknowledged was lost or duplicated, and every answer is the same." in shown
    assert f"{LETTERS} observations stored" in shown
    assert f"of {LETTERS} letters: 0 lost, {LETTERS} kept once each" in shown


def test_events_account_for_every_letter(shown: str) -> None:
    counts = {name: int(count.replace(",", "")) for name, count in re.findall(r"│ ([A-Z_]+) +│ +([\d,]+) │", shown)}
    assert counts["OBSERVED"] + counts.get("REPEATED", 0) == LETTERS
    assert counts["ADMITTED"] == counts["OBSERVED"]
    assert counts["PROMOTED"] == counts["OBSERVED"] - 10  # ten are still in short-term
    assert "UNKNOWN" not in shown


def test_demo_shows_one_path_through_the_tiers(shown: str) -> None:
    way = shown.split("One letter's path")[1].split("3  Questions")[0]
    steps = re.findall(r"│ (OBSERVED|ADMITTED|ENHANCED|PROMOTED) +│", way)
    assert steps[:2] == ["OBSERVED", "ADMITTED"]
    assert steps.count("ENHANCED") >= 2
    assert steps[-1] == "PROMOTED"
    assert re.search(r"cosine 0\.\d\d with: \w", way)


def test_answers_show_their_score_sums(shown: str) -> None:
    assert shown.count("known answers at rank 1") >= 3
    sums = re.findall(r"= (?:\w+ \d\.\d\d x [\d.]+ \+ )+\w+ \d\.\d\d x [\d.]+", shown)
    assert len(sums) >= 9


def test_producer_continues_after_kill_in_flight(shown: str) -> None:
    sent, acknowledged = re.search(r"(\d+) observations were sent, (\d+) of them acknowledged", shown).groups()  # type: ignore[union-attr]  # fails the test
    first = int(re.search(r"the agent continues from (\d+)", shown)[1])  # type: ignore[index]  # as above
    assert 0 < int(acknowledged) < int(sent) < LETTERS
    assert int(acknowledged) < first <= int(sent) + 1


def test_demo_ends_its_servers(shown: str) -> None:
    for pid in re.findall(r"\(process (\d+),", shown):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_second_quickstart_run_sends_only_new_lines(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        command = [sys.executable, "examples/quickstart.py", server.address]
        for _ in range(2):
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == 0, ended.stderr
            assert "On Sundays I bake bread" in ended.stdout.split("What does Bob do on Sundays?")[1].splitlines()[1]
        with sync.connect(server.address) as client:
            assert client.memory("comedy/joy").stats().short_term == 4
