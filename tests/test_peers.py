"""The driver of the comparison with other memory systems, on memstream and on trivial peers."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers.compare import Outcome, Retriever, Round, compare
from benchmarks.peers.contenders import CONTENDERS, MEMSTREAM, Contender
from benchmarks.peers.load import Load, made_up, make_item
from benchmarks.peers.protocol import Item
from benchmarks.peers.results import find_out, format_page, make_record, not_first
from benchmarks.peers.runner import Recalled
from benchmarks.peers.servers.contenders import FLOOR, SERVERS
from memstream_server.core.rendering import indexed_text
from memstream_server.core.values import Fragment
from tests.test_quality import NOW, Said, conversation
from tests.toolchains.environments import Environment

ROOT = Path(__file__).parents[1]
RUNNERS = sorted({one.module for one in (*CONTENDERS, *SERVERS)})
OUR_RUNNERS = (MEMSTREAM.module, SERVERS[0].module, FLOOR.module)


def fake_contender(variant: str, **more: Any) -> Contender:
    return Contender(f"fake, {variant}", "tests.support.fake_peer", ["pytest"], "A fake.", variant, **more)


@pytest.fixture
def load() -> Load:
    return made_up(40, 6, 8)


def test_page_reports_losses_and_failures_of_each_peer(load: Load, tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_text("pytest==1.0\n", "utf-8")
    absent = Environment("nothing", only="1.0", folder=tmp_path)
    contenders = [
        MEMSTREAM,
        *map(fake_contender, ("file", "list", "breaks", "dies")),
        fake_contender("absent", environment=absent),
    ]
    outcomes = compare(contenders, load, 1, tmp_path)
    found = {one.contender.variant: one for one in outcomes}

    for keeps in (found["given"], found["file"]):
        assert keeps.failed == ""
        (one,) = keeps.rounds
        assert (one.held, one.kept, one.recalled, one.errors) == (1.0, 1.0, 1.0, []), "after kill -9"
        assert keeps.keeps
        assert min(one.ingest_per_s, one.single_per_s, one.recall_p50_ms, one.resident_empty_mb) > 0
        assert one.recall_p99_ms >= one.recall_p50_ms
    (one,) = found["list"].rounds
    assert (one.held, one.kept, one.recalled) == (1.0, 0.0, 0.0), "a list ends with its process"
    assert found["breaks"].errors == ["LookupError: there is no such thing"]
    assert not found["list"].keeps
    assert not found["breaks"].keeps
    assert "its process ended" in found["dies"].failed
    assert "Python 1.0" in found["absent"].failed
    assert found["dies"].rounds == found["absent"].rounds == []

    text = format_page(outcomes, load, 1, "by hashing", {"cores": "2"})
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "| yes: 100% listed, 100% found |" in rows["| memstream"]
    assert "no: 0% listed, 0% found" in rows["| fake, list"]
    assert "LookupError" in rows["| fake, breaks"]
    assert "not measured: its process ended" in rows["| fake, dies"]
    assert "Python 1.0" in rows["| fake, absent"]
    assert "--data DIR" in text, "the page says that quality was not measured"
    assert len(make_record(outcomes, load, "by hashing", {"cores": "2"})["rows"]["memstream"]["rounds"]) == 1


def make_outcome(contender: Contender, speed: float, *, kept: float = 1.0, quality: float = 0.5) -> Outcome:
    cost = 1 / speed
    made = Round(speed, speed, cost, cost, cost, cost, 10.0, 100 / speed, 1.0, kept, kept, [])
    return Outcome(contender, [made], {"recall@4": quality, "recall@10": quality, "recall@20": quality})


def test_page_lists_figures_where_memstream_is_not_first() -> None:
    ours = make_outcome(MEMSTREAM, 2.0)
    assert not_first([ours, make_outcome(fake_contender("slower"), 1.0, quality=0.4)]) == []
    assert not_first([ours, make_outcome(fake_contender("forgetful"), 9.0, kept=0.9)]) == [], "it lost items"
    behind = not_first(
        [ours, make_outcome(fake_contender("faster"), 9.0), make_outcome(fake_contender("wiser"), 1.0, quality=0.6)]
    )
    assert [line.split(" (memstream")[0] for line in behind] == [
        "- ingest/s", "- one at a time/s", "- recall p50 ms", "- recall p99 ms", "- ingest CPU µs",
        "- recall CPU ms", "- RSS MB", "- @4", "- @10", "- @20",
    ]  # fmt: skip
    assert "fake, faster 9" in behind[0]
    assert "fake, wiser 0.600" in behind[-1]


@dataclass(frozen=True)
class Conversation:
    """A conversation and its questions, as the measure defines them."""

    id: str = "friends"
    fragments: Sequence[Said] = field(default_factory=conversation)
    questions: Sequence[Any] = (SimpleNamespace(text="What did Biscuit break?", evidence=("D1:1",)),)
    now: datetime = NOW


def evaluate(retriever: Retriever, conversations: Sequence[Conversation], k: int) -> dict[str, Any]:
    """A measure with one question."""
    (talk,) = conversations
    (question,) = talk.questions
    retriever.ingest(talk.id, talk.fragments)
    ranked = retriever.recall(talk.id, question.text, talk.now, k)
    shares = {f"recall@{depth}": float(question.evidence[0] in ranked[:depth]) for depth in (4, 10, 20)}
    return {"answerable": shares, "errors": {}}


def test_quality_is_measured_through_the_runners(load: Load, tmp_path: Path) -> None:
    found = compare([fake_contender("file")], load, 0, tmp_path, SimpleNamespace(evaluate=evaluate), [Conversation()])
    assert found[0].quality == {"recall@4": 1.0, "recall@10": 1.0, "recall@20": 1.0}


class MergingRunner:
    """A runner that merges all its items into one text."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def open(self, memory: str) -> None: ...

    def add(self, memory: str, items: Sequence[Item]) -> float:
        self._items = list(items)
        return 0.0

    def recall(self, memory: str, queries: Sequence[Any], k: int) -> Recalled:
        return Recalled([0.0], [["; ".join(one.line for one in reversed(self._items)), self._items[0].line]], [])


def test_merged_text_yields_each_of_its_turns() -> None:
    runner: Any = MergingRunner()
    retriever = Retriever(runner)
    retriever.ingest("friends", conversation()[:3])
    assert retriever.recall("friends", "anything", NOW, 10) == ["D1:3", "D1:2", "D1:1"]


def test_peers_store_the_line_that_memstream_indexes() -> None:
    one = make_item("I moved to Oslo.", "Ada", "1", NOW)
    fragment = Fragment(id="1", content=one.text, speaker=one.speaker, observe_time_us=round(one.time_s * 1e6))
    assert one.line == "[19 March 2024] Ada: I moved to Oslo." == indexed_text(fragment)


@pytest.mark.parametrize("module", [name for name in RUNNERS if name not in OUR_RUNNERS])
def test_runners_import_nothing_of_memstream(module: str) -> None:
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
    imported = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    ours = {name for name in imported if name.split(".")[0] in ("memstream", "memstream_server", "tests", "benchmarks")}
    # These are of the standard library alone.
    starting = {"benchmarks.peers.servers.processes", "tests.toolchains.milvus", "tests.toolchains.postgres"}
    assert ours - (starting if ".servers." in module else set()) == {"benchmarks.peers.protocol"}


@pytest.mark.parametrize("contender", [*CONTENDERS, *SERVERS], ids=lambda one: one.title)
def test_compared_packages_are_locked_with_hashes(contender: Contender) -> None:
    assert all(part[-1].isdigit() for part in contender.versions.split(", "))
    if contender.environment is not None:
        locked = contender.environment.requirements.read_text("utf-8")
        pins = re.findall(r"^[\w.\[\]-]+==.*$", locked, re.M)
        assert (
            len(pins)
            == len(re.findall(r"^[\w.-]+.*\\\n    --hash=sha256:", locked, re.M))
            > (0 if contender in SERVERS else 30)
        )
        assert "://" not in locked


def test_a_partial_run_does_not_replace_the_full_table(tmp_path: Path) -> None:
    committed = ROOT / "benchmarks" / "peers"
    assert find_out(None, ["pgvector"], committed) is None
    assert find_out(tmp_path, ["pgvector"], committed) == tmp_path
    assert find_out(None, [], committed) == committed
