"""`memstream check`: expectations of answers, wrong files, and results for machines."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.commands import call
from tests.support.server import ServerProcess

ROOT = Path(__file__).resolve().parents[2]

GOOD = """\
observations:
  - {id: train, text: The train to Ulm leaves at noon, speaker: ann}
  - {id: bees, text: I keep bees on the roof, speaker: bob, time: 2026-05-01T12:00:00Z}
now: 2026-06-01
questions:
  - question: When does the train leave?
    limit: 1
    expect:
      - {id: train, first: 1}
      - {contains: AT NOON}
      - {id: bees, absent: true}
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "file.yaml"
    file.write_text(text, "utf-8")
    return file


def test_example_of_the_letters_passes() -> None:
    done = call("check", str(ROOT / "examples/letters_check.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed, 0 failed" in done.stdout


def test_met_expectations_exit_with_0(server: ServerProcess, tmp_path: Path) -> None:
    done = call("check", str(write(tmp_path, GOOD)), "--address", server.address, "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [(result["passed"], result["place"]) for result in results] == [(True, 1), (True, 1), (True, None)]
    assert call("list", "check", target=server.address).stdout.count("check/") == 0, "the memory of the check is left"


def test_a_reply_is_at_the_place_of_its_message(server: ServerProcess, tmp_path: Path) -> None:
    text = """\
observations:
  - {id: asked, text: "how do I reach the harbour?", speaker: user, session: s}
  - {id: told, text: take the tram over the iron bridge, speaker: assistant, session: s}
questions:
  - question: how do I reach the harbour?
    expect: [{id: told, first: 1}, {contains: IRON BRIDGE}]
"""
    done = call("check", str(write(tmp_path, text)), "--address", server.address, "--json")
    assert [result["place"] for result in json.loads(done.stdout)["results"]] == [1, 1], done.stderr


def test_failed_expectations_exit_with_1_and_show_answers(server: ServerProcess, tmp_path: Path) -> None:
    text = GOOD.replace("id: train, first: 1", "id: bees").replace("id: bees, absent", "id: train, absent")
    junit = tmp_path / "results.xml"
    done = call("check", str(write(tmp_path, text)), "--address", server.address, "--junit", str(junit))
    assert done.returncode == 1, done.stderr
    assert "1 passed, 2 failed" in done.stdout
    assert "1. The train to Ulm leaves at noon" in done.stdout
    suite = ElementTree.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures")) == ("3", "2")
    failures = {case.get("name"): failure.get("message") for case in suite for failure in case}
    assert failures == {"bees in the first 1": "not in the answer", "train absent": "at place 1"}


@pytest.mark.parametrize("weak", [False, True])
def test_mark_of_a_weak_answer_is_judged(server: ServerProcess, tmp_path: Path, weak: bool) -> None:
    asked = "Who won the football match in Lisbon?" if weak else "When does the train leave?"
    for expected in (True, False):
        text = GOOD[: GOOD.index("questions:")]
        text += f"questions:\n  - question: {asked}\n    weak: {str(expected).lower()}\n"
        done = call("check", str(write(tmp_path, text)), "--address", server.address)
        assert done.returncode == (0 if expected is weak else 1), done.stdout + done.stderr
        assert ("answer is weak" if expected else "answer is not weak") in done.stdout


def test_repeated_observation_counts_as_the_first_one(server: ServerProcess, tmp_path: Path) -> None:
    text = GOOD.replace(
        "now: 2026-06-01", "  - {id: again, text: The train to Ulm leaves at noon, speaker: ann}\nnow: 2026-06-01"
    ).replace("{contains: AT NOON}", "{id: again, first: 1}")
    done = call("check", str(write(tmp_path, text)), "--address", server.address)
    assert done.returncode == 0, done.stdout + done.stderr


def test_current_expectation_follows_corrections(server: ServerProcess, tmp_path: Path) -> None:
    text = """\
observations:
  - {id: paris, text: Ann lives in Paris}
  - {id: berlin, text: Ann lives in Berlin, supersedes: paris}
  - {id: fair, text: Ann visits the fair in Ulm, valid_until: 2020-01-01}
questions:
  - question: Where does Ann live?
    expect:
      - {id: berlin, first: 1, current: true}
      - {contains: berlin, current: true}
      - {id: paris, current: false}
      - {id: fair, current: false}
      - {id: paris, current: true}
      - {id: berlin, current: false}
"""
    done = call("check", str(write(tmp_path, text)), "--address", server.address, "--json")
    assert done.returncode == 1, done.stderr
    results = json.loads(done.stdout)["results"]
    assert [result["passed"] for result in results] == [True, True, True, True, False, False]
    assert [result["expectation"] for result in results][2:5:2] == [
        "paris not current",
        "paris in the first 10, current",
    ]


def test_policy_file_replaces_the_policy(server: ServerProcess, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("recall:\n  min_relevance: 1.0\n", "utf-8")
    words = ("check", str(write(tmp_path, GOOD)), "--address", server.address)
    assert call(*words).returncode == 0
    strict = call(*words, "--policy", str(policy))
    assert strict.returncode == 1
    assert "train in the first 1" in strict.stdout


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("limit: 1", "limt: 1", "7: questions[1].limt: there is no such key"),
        ("limit: 1", "limit: none", "7: questions[1].limit: Input should be a valid integer"),
        ("first: 1", "first: 5", "9: questions[1].expect[1].first: is more than the question's limit of 1"),
        ("id: bees, absent", "id: wasps, absent", "11: questions[1].expect[3].id: no observation has the id 'wasps'"),
        ("contains: AT", "id: bees, contains: AT", "10: questions[1].expect[2]: needs exactly one of id and contains"),
        ("limit: 1", "weak: maybe", "7: questions[1].weak: Input should be a valid boolean"),
        ("absent: true", "absent: true, current: true", "11: questions[1].expect[3]: current does not go with absent"),
        ("first: 1", "first: 1, current: false", "9: questions[1].expect[1]: current: false needs an id and no first"),
        ("speaker: bob", "speeker: bob", "3: observations[2].speeker: 'speeker' is not a field"),
        ("{id: bees, text", "{id: train, text", "3: observations[2].id: 'train' is given twice"),
        ("now: 2026-06-01", "now: soon", "4: now: Input should be a valid datetime"),
        ("now: 2026-06-01", "policy: {recall: {limt: 3}}", "4: policy.recall.limt: is no argument"),
        ("now: 2026-06-01", "policy: {recall: {limit: 0}}", "4: policy.recall.limit: "),
        ("now: 2026-06-01", "policy_file: none.yaml", "none.yaml: cannot be read: No such file"),
        ("now: 2026-06-01", "observations_file: none.jsonl", "4: observations_file: "),
        ("now: 2026-06-01", "questions: []", "5: questions: is given twice"),
        (GOOD[: GOOD.index("now:")], "observations: 3\n", "1: observations: must be a list"),
        ("{contains: AT NOON}", "AT NOON", "10: questions[1].expect[2]: must be a mapping"),
        ("questions:", "asked:", "5: asked: there is no such key"),
        ("limit: 1", "limit: [1", "is not YAML: "),
        (GOOD, "- a list\n", "1: must be a mapping with observations and questions"),
        (GOOD, "observations: []\nquestions: []\n", "2: questions: must not be empty"),
    ],
)
def test_wrong_file_names_line_and_key(
    server: ServerProcess, tmp_path: Path, before: str, after: str, problem: str
) -> None:
    done = call("check", str(write(tmp_path, GOOD.replace(before, after, 1))), "--address", server.address)
    assert done.returncode == 2, done.stdout + done.stderr
    assert problem in done.stderr
    assert "file.yaml" in done.stderr or "none.yaml" in done.stderr


def test_missing_file_and_unreachable_server_are_told_apart(tmp_path: Path) -> None:
    assert call("check", str(tmp_path / "none.yaml")).returncode == 2
    done = call("check", str(write(tmp_path, GOOD)), "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert "no server answers at 127.0.0.1:1" in done.stderr
