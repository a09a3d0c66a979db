"""DB-GPT's agents with their memory on a real server: DB-GPT's package in a separate environment."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import memstream
from tests.server.conftest import MakeServer, client, make_server, restarted, shared, started
from tests.support.fake_openai import JSON, FakeOpenAI
from tests.support.pages import find_blocks, for_another_environment
from tests.support.server import ServerProcess, free_address
from tests.toolchains import dbgpt
from tests.toolchains.environments import variables_for

__all__ = ["client", "make_server", "shared"]  # fixtures

pytestmark = pytest.mark.toolchain

SCRIPTS = Path(__file__).with_name("with_dbgpt")
FIRST, SECOND = "My name is Bob, please tell me a joke", "What's my name?"
JOKE = "Sure, Bob! Parallel lines have so much in common. Pity they never meet."


def answer_of(body: JSON) -> str:
    """The model's answer, which depends only on its prompt."""
    prompt = body["messages"][-1]["content"]
    if prompt.endswith(f"Question: {FIRST}\n"):
        return JOKE
    return "Your name is Bob!" if "name is Bob" in prompt else "We have not met."


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as endpoint:
        endpoint.complete = answer_of
        yield endpoint


class Agent:
    """An agent in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.session = ""

    async def ask(self, question: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n".encode())
        return str((await self.read_answer())["answer"])

    async def read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), dbgpt.RUN_S)
        assert line, "the agent has ended; its error is above"
        return dict(json.loads(line))

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await asyncio.wait_for(self._process.wait(), dbgpt.RUN_S) == 0


def variables_of(fake: FakeOpenAI, home: Path) -> dict[str, str]:
    told = {"OPENAI_API_BASE": fake.base_url, "OPENAI_API_KEY": "secret", "OPENAI_MODEL": "scripted"}
    return variables_for(home) | told | {"DBGPT_HOME": str(home)}


async def start_agent(python: Path, fake: FakeOpenAI, home: Path, *arguments: str) -> Agent:
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(SCRIPTS / "talk.py"), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
        env=variables_of(fake, home),
        cwd=home,
    )
    made = Agent(process)
    made.session = str((await made.read_answer())["session"])
    return made


def prompts_of(fake: FakeOpenAI) -> list[str]:
    return [seen.body["messages"][-1]["content"] for seen in fake.seen]


async def test_an_agent_remembers_across_a_server_restart(
    dbgpt_python: Path, make_server: MakeServer, fake: FakeOpenAI, tmp_path: Path
) -> None:
    """kill -9 between two questions of the same agent process; then another process asks."""
    server = await started(make_server(listen=free_address()))
    joy = await start_agent(dbgpt_python, fake, tmp_path, server.address, "Joy", "Comedians", "monday")
    assert await joy.ask(FIRST) == JOKE
    await restarted(server)
    assert await joy.ask(SECOND) == "Your name is Bob!"
    await joy.end()
    remembered = f"Most recent observations:\nuser: {FIRST} \nassistant: {JOKE} \nQuestion: {SECOND}\n"
    assert prompts_of(fake) == [f"Question: {FIRST}\n", remembered]
    later = await start_agent(dbgpt_python, fake, tmp_path, server.address, "Joy", "Comedians", "monday")
    assert await later.ask(SECOND) == "Your name is Bob!"
    await later.end()
    assert prompts_of(fake)[-1].count(FIRST) == 1, "rebuilding the agent wrote its history again"
    async with memstream.connect(server.address) as client:
        held = [fragment async for fragment in client.memory("comedy/joy").list_fragments()]
        said = [message async for message in client.conversation("comedy/monday").messages()]
    assert len(held) == 3
    assert {(one.session, one.speaker) for one in held} == {("monday_Comedians_Joy", "Joy")}
    assert [(one.sender, one.content) for one in said] == [
        ("Human", FIRST),
        ("Comedians", JOKE),
        *[("Human", SECOND), ("Comedians", "Your name is Bob!")] * 2,
    ]


async def test_two_agents_in_two_processes_share_a_memory(
    dbgpt_python: Path, make_server: MakeServer, fake: FakeOpenAI, tmp_path: Path
) -> None:
    server = await started(make_server())
    joy = await start_agent(dbgpt_python, fake, tmp_path, server.address, "Joy", "Comedians", "monday")
    ann = await start_agent(dbgpt_python, fake, tmp_path, server.address, "Ann", "Critics", "tuesday")
    assert (joy.session, ann.session) == ("monday_Comedians_Joy", "tuesday_Critics_Ann")
    assert await ann.ask(SECOND) == "We have not met."
    assert await joy.ask(FIRST) == JOKE
    assert await ann.ask(SECOND) == "Your name is Bob!"
    await joy.end()
    await ann.end()
    async with memstream.connect(server.address) as client:
        held = [fragment.speaker async for fragment in client.memory("comedy/joy").list_fragments()]
    assert held == ["Ann", "Joy", "Ann"]


async def test_the_example_and_the_page_run(
    dbgpt_python: Path, make_server: MakeServer, fake: FakeOpenAI, tmp_path: Path
) -> None:
    server = await started(make_server())
    page = tmp_path / "page.md"
    text = (dbgpt.ROOT / "docs" / "dbgpt.md").read_text("utf-8")
    assert len(list(find_blocks(text, "python"))) > 2
    page.write_text(for_another_environment(text), "utf-8")
    for command in (
        [str(dbgpt.ROOT / "examples" / "dbgpt_joy.py"), server.address],
        ["-m", "tests.support.pages", str(page), server.address, str(tmp_path)],
    ):
        process = await asyncio.create_subprocess_exec(
            *(str(dbgpt_python), *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=variables_of(fake, tmp_path),
            cwd=tmp_path,
        )
        out, _ = await asyncio.wait_for(process.communicate(), dbgpt.RUN_S)
        assert process.returncode == 0, out.decode()
    assert "Your name is Bob!" in [answer_of(seen.body) for seen in fake.seen]


@pytest.fixture(scope="module")
def found(dbgpt_python: Path, shared: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of interface.py."""
    return dict(dbgpt.ask(SCRIPTS / "interface.py", shared.address, home=tmp_path_factory.mktemp("dbgpt")))


def test_a_clone_is_a_handle_to_the_same_memory(found: dict[str, Any]) -> None:
    assert found["clones"] == [["tea", "rain"], ["tea", "rain"], "monday_Comedians_Joy"]


def test_a_history_is_written_once_and_restores_nothing(found: dict[str, Any]) -> None:
    assert found["batches"] == [["three", "four"], True, ["four", "five"]]


def test_one_id_given_twice_loses_nothing(found: dict[str, Any]) -> None:
    assert found["same_id"] == ["tea", "rain"]


def test_the_scope_decides_who_shares_a_memory(found: dict[str, Any]) -> None:
    everything = ["on monday", "on tuesday", "and again"]
    assert found["scopes"] == {
        "memory": [everything, everything],
        "session": [["on monday"], ["on tuesday", "and again"]],
        "without": True,
    }


def test_a_reply_follows_the_message_that_it_answers(found: dict[str, Any]) -> None:
    assert found["replies"] == ["how do I reach the harbour?", "take the tram over the iron bridge"]


def test_importances_are_converted_to_our_scale(found: dict[str, Any]) -> None:
    """Given 0.3, 1, 8 and none; then scored 7, 1 and 0, which is DB-GPT's score for an unreadable reply."""
    assert found["importances"] == [0.3, 1.0, 0.8, 0.5, 0.7, 0.1, 0.5]


def test_fragments_are_returned_in_dbgpts_types(found: dict[str, Any]) -> None:
    assert found["fragments"] == {
        "classes": ["AgentMemoryFragment"],
        "ids": True,
        "words": [
            "tea",
            '{"thought": "look", "action": "search"}',
            '{"thought": "look", "persisted_path": "/there"}',
        ],
        "first": [pytest.approx(0.4), True, "/snapshots/1", None],
        "times": True,
        "speakers": ["Joy"],
    }


def test_promoted_structured_fragments_merge_as_in_dbgpt(found: dict[str, Any]) -> None:
    own, ours, others, plain = found["merged"]
    steps = [{"question": "rain?", "thought": f"look {n}", "action": "search"} for n in range(3)]
    assert own == [steps]
    assert steps in ours
    assert [step | {"persisted_path": "/there"} for step in steps] in others
    assert plain == {"observation": "plain; words"}


def test_every_kind_can_be_read_and_cleared(found: dict[str, Any]) -> None:
    everything = ["more tea", "rain in Cork", "tea with Bob"]
    assert found["kinds"] == {
        "sensory": [[], [], []],
        "short_term": [everything[:2], everything[:2], []],
        "enhanced": [everything, everything, []],
        "long_term": [everything, everything, []],
        "hybrid": [everything, everything, []],
    }


def test_weights_change_the_ranking(found: dict[str, Any]) -> None:
    assert found["weights"] == ["tea, tea, nothing but tea", "a fire in the tea house"]


def test_messages_and_plans_equal_those_of_dbgpts_own_store(found: dict[str, Any]) -> None:
    messages, plans = found["gpts"]["own"]
    assert messages["all"]
    assert plans["changed"]
    assert found["gpts"]["remote"] == [messages, plans]


def test_messages_are_shared_and_end_with_the_conversation(found: dict[str, Any]) -> None:
    assert found["gpts"]["shared"] == [["one", "two"]] * 2 + [["one", "two"], "two"]


def test_messages_appended_during_a_read_stay_in_dbgpts_cache(found: dict[str, Any]) -> None:
    assert found["gpts"]["meanwhile"] == [["within"], ["before"]]


def test_a_memory_serves_one_event_loop_after_another(found: dict[str, Any]) -> None:
    assert found["loops"] == ["tea"]


def test_wrong_arguments_are_named(shared: ServerProcess, tmp_path: Path) -> None:
    assert dbgpt.ask(SCRIPTS / "arguments.py", shared.address, home=tmp_path) == [
        "MemoryExists kind",
        "InvalidArgument raw_observation",
        "InvalidArgument what",
        "InvalidArgument memory",
        "InvalidArgument profiles",
        "InvalidArgument scope",
        "InvalidArgument namespace",
        "InvalidArgument state",
        "InvalidArgument task_num",
        "nothing",
    ]
