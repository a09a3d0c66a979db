"""The comparison with other memory systems, for the one that installs quickly (make bench-peers runs all)."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.compare import compare
from benchmarks.peers.contenders import CONTENDERS
from benchmarks.peers.load import made_up

pytestmark = pytest.mark.toolchain


def test_the_benchmark_measures_langgraphs_stores(tmp_path: Path) -> None:
    contenders = [one for one in CONTENDERS if one.title.startswith("LangGraph")]
    sqlite, memory = compare(contenders, made_up(60, 10, 10), 1, tmp_path)
    assert (sqlite.failed, memory.failed) == ("", "")
    assert sqlite.keeps
    assert (memory.rounds[0].held, memory.rounds[0].kept) == (1.0, 0.0)
    assert sqlite.errors == memory.errors == []
