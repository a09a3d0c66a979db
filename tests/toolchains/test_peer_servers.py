"""The comparison with servers, in miniature, for those that install quickly (make bench-servers runs all)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.peers.load import made_up
from benchmarks.peers.servers.compare import FRESH, compare_servers
from benchmarks.peers.servers.contenders import FLOOR, MEMSTREAM, PGVECTOR, REDIS

pytestmark = [pytest.mark.toolchain, pytest.mark.long]


def test_the_benchmark_measures_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.servers.compare.SETTLE_S", 0.0)
    with tempfile.TemporaryDirectory() as scratch:  # not tmp_path, whose parents are closed to PostgreSQL's user
        found = compare_servers([MEMSTREAM, FLOOR, PGVECTOR, REDIS], made_up(200, 10, FRESH + 10), 1, Path(scratch))
    assert [one.failed for one in found] == ["", "", "", ""]
    for one in found:
        (round_,) = one.rounds
        assert (round_.fresh, round_.kept) == (1.0, 1.0), one.contender.title
        assert (round_.proportional_mb or 0) > 10
