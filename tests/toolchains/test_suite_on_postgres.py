"""Runs all tests that need a journal on PostgreSQL, selected by its URL.

By hand: MEMSTREAM_TEST_JOURNAL_URL=postgresql://... pytest -n 2 tests/engine tests/server (or any other of these).
The cluster runs with fsync off: a test commits thousands of times, and none of them tests a power failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.journals import VARIABLE
from tests.toolchains.postgres import Cluster

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(3600)]  # the half of all tests, on a machine that others share

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ("engine", "rpc", "client/test_agent.py", "conversations", "operations", "cli", "server")
SUITE = [*(f"tests/{part}" for part in PARTS), "-k", "not scripted"]
"""Without the tests of a scripted engine, which has no journal."""


@pytest.fixture
def files() -> Iterator[Path]:
    """A folder with a short path, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="memstream-suite-", dir="/tmp") as folder:
        yield Path(folder) / "suite"


def test_the_suite_passes_on_postgres(postgres: Cluster, files: Path) -> None:
    url = postgres.database()
    ended = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-n", "2", "--basetemp", str(files)), *SUITE],
        cwd=REPOSITORY,
        env=os.environ | {VARIABLE: url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout
    skipped = re.findall(r"^SKIPPED \[(\d+)\] \S+: SQLite's own", ended.stdout, re.MULTILINE)
    counted = re.search(r"(\d+) passed(?:, (\d+) skipped)?", ended.stdout)
    assert counted is not None, ended.stdout
    assert int(counted[1]) > 20 * sum(map(int, skipped)), "most tests ran"
    assert list(files.rglob("journal.db")) == [], "a test used SQLite"
    left = postgres.execute(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'test%'")
    assert left == [], "a test left a schema"
