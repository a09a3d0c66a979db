"""The comparison with servers: its driver on trivial peers, its page, and how it measures processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.contenders import Contender
from benchmarks.peers.load import made_up
from benchmarks.peers.servers.compare import FRESH, Outcome, Round, compare_servers
from benchmarks.peers.servers.contenders import CHROMA, FLOOR, MEMSTREAM, PGVECTOR, REDIS
from benchmarks.peers.servers.processes import accepts, find_free_port, list_tree, measure, name_of
from benchmarks.peers.servers.results import format_page, list_aims, make_record
from tests.test_peers import fake_contender


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.servers.compare.SETTLE_S", 0.0)


def test_rounds_measure_writes_recalls_and_the_kill(tmp_path: Path) -> None:
    once = fake_contender("file")
    contenders = [fake_contender("list"), once, fake_contender("breaks"), fake_contender("dies")]
    found = compare_servers(contenders, made_up(150, 6, FRESH + 4), 2, tmp_path, [once])
    forgets, keeps, breaks, dies = found
    assert (len(forgets.rounds), len(keeps.rounds)) == (2, 1)
    assert [one.kept for one in forgets.rounds] == [0.0, None], "the kill is of the first round"
    (round_,) = keeps.rounds
    assert (round_.fresh, round_.kept) == (1.0, 1.0)
    assert min(round_.texts_per_s, round_.lone_p50_ms, round_.recall_p50_ms, round_.resident_mb or 0) > 0
    assert "no such thing" in breaks.failed
    assert "its process ended" in dies.failed
    text = format_page(found, made_up(150, 6, FRESH + 4), 2, {"cores": "2"})
    assert "not measured: LookupError" in text
    assert "Not all the servers" in text
    assert make_record(found, made_up(10, 2, FRESH), {})["rows"]["fake, file"]["rounds"][0]["kept"] == 1.0


def _outcome(contender: Contender, *, texts_per_s: float, lone_ms: float, recall_ms: float, mb: float) -> Outcome:
    rounds = [Round(texts_per_s, lone_ms, recall_ms, recall_ms, mb, mb, 1.0, 1.0)]
    rounds.append(Round(texts_per_s, lone_ms, recall_ms, recall_ms, None, None, 1.0, None))
    return Outcome(contender, rounds)


def test_aims_compare_with_the_named_servers() -> None:
    ours = _outcome(MEMSTREAM, texts_per_s=2_000, lone_ms=2.0, recall_ms=2.0, mb=150)
    chroma = _outcome(CHROMA, texts_per_s=1_000, lone_ms=8.0, recall_ms=1.5, mb=150)
    postgres = _outcome(PGVECTOR, texts_per_s=4_000, lone_ms=1.0, recall_ms=2.0, mb=50)
    redis = _outcome(REDIS, texts_per_s=4_000, lone_ms=1.0, recall_ms=0.5, mb=50)
    assert list_aims([ours, chroma, postgres, redis]) == [
        "- more texts/s than Chroma: met, 2.00 times",
        "- lone p50 below Chroma's: met, 0.25 times",
        "- recall p50 below Chroma's: missed, 1.33 times",
        "- lone p50 at most twice pgvector's: met, 2.00 times",
        "- recall p50 at most twice Redis Stack's: missed, 4.00 times",
        "- RSS with all texts at most 200 MB: met, 150 MB",
    ]
    page = format_page([ours, chroma], made_up(10, 2, FRESH), 2, {"cores": "2"})
    assert "| Chroma | 1,000 (0.50) | 8.00 (4.00) | 1.50 (0.75) | 1.50 (0.75) | 150 (1.00) | 150 (1.00) |" in page


def test_page_compares_memstream_with_the_floor() -> None:
    ours = _outcome(MEMSTREAM, texts_per_s=2_000, lone_ms=2.0, recall_ms=3.0, mb=150)
    floor = _outcome(FLOOR, texts_per_s=4_000, lone_ms=0.5, recall_ms=1.0, mb=50)
    page = format_page([ours, floor], made_up(10, 2, FRESH), 2, {"cores": "2"})
    assert "a lone write takes 2.00 ms, the floor's 0.50 ms (4.0 times)" in page
    assert "a recall takes 3.00 ms, the floor's 1.00 ms (3.0 times)" in page
    assert "the floor" not in format_page([ours], made_up(10, 2, FRESH), 2, {"cores": "2"})


def test_page_says_why_a_killed_server_does_not_serve() -> None:
    row = Outcome(CHROMA, [Round(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None, "it does not load")])
    assert "| 100% | unknown: it does not load |" in format_page([row], made_up(10, 2, FRESH), 1, {"cores": "2"})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_that_of_a_server_and_its_descendants() -> None:
    inner = "import time; held = bytes(range(256)) * 120_000; print(); time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        parent, child = list_tree(process.pid)
        both, alone = measure([parent, child]), measure([parent])
        process.kill()
        os.kill(child, 9)
    assert parent == process.pid
    assert name_of(os.getpid())
    assert both.resident_mb - alone.resident_mb > 30
    assert both.resident_mb > both.proportional_mb > 30
    deadline_s = time.monotonic() + 60  # the child's new parent, not this process, waits for its end
    while measure([child]).resident_mb:
        assert time.monotonic() < deadline_s, "the memory of an ended process is still counted"
        time.sleep(0.01)


def test_a_free_port_accepts_nothing() -> None:
    assert not accepts(find_free_port())
