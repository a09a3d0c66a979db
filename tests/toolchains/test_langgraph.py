"""LangGraph with a real server: the contract of its stores, a graph and the page, in a separate environment."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

import memstream
from tests.server.conftest import restarted, shared
from tests.support.fake_openai import FakeOpenAI
from tests.support.pages import find_blocks, for_another_environment
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.toolchains.environments import ROOT, Environment
from tests.toolchains.programs import Absent
from tests.toolchains.test_frameworks import ANSWER_S, check_memory, server, started_agents

__all__ = ["server", "shared"]  # fixtures

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


def command_of(langgraph: Environment, kind: str) -> list[str]:
    return [str(langgraph.python()), "-m", "tests.toolchains.with_langgraph.agent", kind]


@pytest.mark.parametrize("kind", ["store", "saver"])
async def test_agent_remembers_in_another_process(
    langgraph: Environment, server: ServerProcess, tmp_path: Path, kind: str
) -> None:
    await check_memory(command_of(langgraph, kind), tmp_path, server)


async def list_keys(client: memstream.Client, path: str) -> list[str]:
    """The keys of a namespace of a store, one for each fragment that is not forgotten."""
    try:
        return sorted([str(one.external_id) async for one in client.memory(path).list_fragments()])
    except memstream.MemoryNotFound:
        return []


async def test_puts_survive_a_kill_of_the_server(langgraph: Environment, server: ServerProcess, tmp_path: Path) -> None:
    """The server is killed while a process puts items and another one reads them: each item is there, once."""
    command = command_of(langgraph, "puts")
    async with (
        FakeOpenAI() as model,
        memstream.connect(server.address) as client,
        started_agents(command, tmp_path, server, model, 1) as (agent,),
    ):
        path = f"{agent.namespace}/n.busy"
        putting = asyncio.create_task(agent.say("busy", "120"))
        for fewest in (10, 60):

            async def has_so_many(fewest: int = fewest) -> bool:
                return len(await list_keys(client, path)) >= fewest

            await until(has_so_many, ANSWER_S)
            await restarted(server)
        assert await putting == "done"
        assert await list_keys(client, path) == [f"{number:04}" for number in range(120)]


@pytest.mark.parametrize("facts", [1, 150_000], ids=["small", "1 MB"])
async def test_another_process_goes_on_after_a_crash_in_a_put(
    langgraph: Environment, server: ServerProcess, tmp_path: Path, facts: int
) -> None:
    """A process ends when the server has its put, and before it is acknowledged; another one puts the same."""
    command = command_of(langgraph, "puts")
    async with (
        FakeOpenAI() as model,
        memstream.connect(server.address) as client,
        started_agents(command, tmp_path, server, model, 3) as (first, second, third),
    ):
        await first.say("cut", "2")
        with pytest.raises(EOFError):
            await first.say("cut", f"die 0002 {facts}")
        assert await list_keys(client, f"{first.namespace}/n.cut") == ["0000", "0001", "0002"]
        with pytest.raises(EOFError):
            await second.say("cut", f"die 0002 {facts}")
        assert await list_keys(client, f"{first.namespace}/n.cut") == ["0000", "0001", "0002"]
        assert await third.say("cut", "4") == "done"
        assert await list_keys(client, f"{first.namespace}/n.cut") == [f"{number:04}" for number in range(4)]
        kept = [one.name async for one in client.list_conversations(first.namespace)]
        assert kept == [], "what no item names any more is deleted"


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
