"""Every benchmark runs in a tiny size, and its output has the shape of the table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted({file.stem.removeprefix("bench_") for file in BENCHMARKS.glob("bench_*.py")} - {"fair", "quickstarts"})


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs(name: str, tmp_path: Path) -> None:
    file, page = tmp_path / "figures.json", tmp_path / "results.md"
    command = [
        sys.executable,
        str(BENCHMARKS / "bench.py"),
        name,
        "--tiny",
        "--json",
        str(file),
        "--results",
        str(page),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(file.read_text("utf-8"))
    assert document["failed"] == []
    assert document["benchmarks"][name]["machine"]["cores"]
    assert document["benchmarks"][name]["rows"]
    claims = document["benchmarks"][name]["claims"]
    assert claims
    for claim in claims:
        assert math.isfinite(claim["ours"]), claim
        assert claim["other_name"], claim
        assert math.isfinite(claim["other"]), claim
        assert claim["met"] in (("yes", "no") if claim["aim"] else ("-",)), claim
        assert claim["name"] in ended.stdout
        assert claim["name"] in page.read_text("utf-8")


@pytest.mark.long
def test_bench_fair_measures_each_rpc_on_both_ports(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "bench_fair.py"), "--tiny", "--rpcs", "RecallOnce,ObserveBatch,Observe"]
    ended = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    cells = json.loads(file.read_text("utf-8"))["cells"]
    assert all(cell["ratio"] > 0 and math.isfinite(cell["ratio"]) for cell in cells)
    for rpc in ("RecallOnce", "ObserveBatch", "Observe"):
        assert f"| {rpc} | gRPC |" in ended.stdout
    assert "| RecallOnce | HTTP |" in ended.stdout


def test_unknown_benchmark_is_rejected() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench.py"), "nothing"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "there is no benchmark nothing" in ended.stderr
