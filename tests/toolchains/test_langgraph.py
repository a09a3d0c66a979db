"""LangGraph with a real server: the contract of its stores, a graph and the page, in a separate environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.conftest import shared
from tests.support.pages import find_blocks, for_another_environment
from tests.support.server import ServerProcess
from tests.toolchains.environments import ROOT, Environment
from tests.toolchains.programs import Absent

__all__ = ["shared"]  # fixture

pytestmark = pytest.mark.toolchain

FOLDER = Path(__file__).with_name("with_langgraph")


@pytest.fixture(scope="module")
def langgraph() -> Environment:
    environment = Environment("langgraph")
    try:
        environment.python()
    except Absent as absent:
        pytest.skip(str(absent))
    return environment


@pytest.mark.parametrize(("file", "least"), [("conformance.py", 150), ("checkpoints.py", 10)])
def test_store_and_saver_behave_like_langgraphs_own(
    langgraph: Environment, shared: ServerProcess, tmp_path: Path, file: str, least: int
) -> None:
    """Every test of conformance.py, which runs most of them on LangGraph's InMemoryStore too, and of checkpoints.py,
    which runs LangGraph's own conformance suite of checkpointers."""
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(ROOT)]
    printed = langgraph.run(
        *("-m", "pytest", *options, str(FOLDER / file)), home=tmp_path, MEMSTREAM_TARGET=shared.address
    )
    ended = re.search(r"^(\d+) passed in ", printed, re.M)
    assert ended is not None, printed
    assert int(ended[1]) > least


def test_the_example_graph_remembers(langgraph: Environment, shared: ServerProcess, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "langgraph_store.py")
    first = langgraph.run(example, shared.address, home=tmp_path)
    assert "2 facts about Bob" in first
    assert "Bob likes plays about trains" in first
    assert langgraph.run(example, shared.address, home=tmp_path) == first, "another process finds the same items, once"


def test_another_process_continues_the_example_graph(
    langgraph: Environment, shared: ServerProcess, tmp_path: Path
) -> None:
    example = str(ROOT / "examples" / "langgraph_checkpoints.py")
    assert langgraph.run(example, shared.address, home=tmp_path) == "What is your name?\n"
    assert langgraph.run(example, shared.address, home=tmp_path) == "Hello Bob\n"


def test_the_page_runs(langgraph: Environment, shared: ServerProcess, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "langgraph.md").read_text("utf-8")
    assert len(list(find_blocks(text, "python"))) > 1
    page = tmp_path / "page.md"
    page.write_text(for_another_environment(text), "utf-8")
    langgraph.run("-m", "tests.support.pages", str(page), shared.address, str(tmp_path), home=tmp_path)
