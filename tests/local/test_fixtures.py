"""The fixtures of memstream.testing, in a session of pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memstream.local_files import Directory
from tests.support.pages import ROOT, find_blocks

OTHERS = """
import pytest, memstream

@pytest.mark.parametrize("text", ["one", "two/ü"])
def test_each_test_has_a_fresh_memory(memory, text):
    assert list(memory.list_fragments()) == []
    assert memory.observe_batch([text]).stored

def test_memory_may_be_deleted(memory, memstream_client, memory_policy):
    memstream_client.delete_memory(memory.path)
    assert memory_policy == {"recall": {"limit": 3}}

@pytest.mark.asyncio
async def test_agent_connects_by_itself(memstream_server):
    async with memstream.connect(memstream_server) as client:
        assert (await client.server_info()).limits

@pytest.mark.asyncio
async def test_asynchronous_memory(async_memory):
    assert (await async_memory.describe()).policy.recall.limit == 3
"""
POLICY = """
import pytest

@pytest.fixture
def memory_policy():
    return {"recall": {"limit": 3}}
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_session_shares_one_server_that_ends_with_it(tmp_path: Path, workers: tuple[str, ...]) -> None:
    conftest, test = (block.code for block in find_blocks((ROOT / "docs/checks.md").read_text("utf-8"), "python"))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n", "utf-8")
    (tmp_path / "conftest.py").write_text(conftest + POLICY, "utf-8")
    (tmp_path / "test_agent.py").write_text(test + OTHERS, "utf-8")
    folder = tmp_path / "session"
    command = (sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *workers)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "--basetemp", str(folder)], cwd=tmp_path, env=kept, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
    files = Directory(folder / "memstream")
    assert files.log.read_text("utf-8").count("memstream listens on") == 1
    assert not files.is_served()
