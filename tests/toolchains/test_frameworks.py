"""Agents of real frameworks with their sessions on a real server, each framework in an environment of its own."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import QUICK, check_log, restarted
from tests.support.fake_openai import JSON, FakeOpenAI, Fault
from tests.support.pages import find_blocks, for_another_environment
from tests.support.server import ServerProcess, free_address
from tests.toolchains.environments import ROOT, Environment, variables_for
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

FOLDER = Path(__file__).with_name("with_frameworks")
FRAMEWORKS = {
    "agent-framework": "agent_framework",
    "anthropic": "anthropic",
    "crewai": "crewai",
    "google-adk": "google_adk",
    "llama-index": "llama_index",
    "openai-agents": "openai_agents",
    "pydantic-ai": "pydantic_ai",
    "strands": "strands",
}
"""For each extra, the program of with_frameworks that runs its agent and has the tests of its adapter."""
PYTEST = "-q --noconftest -p no:cacheprovider -c /dev/null -o asyncio_mode=auto --import-mode=importlib"
ANSWER_S = 240
TESTS_HERE = 2
"""Of a framework's agent, and of its page and example."""


@dataclass(frozen=True)
class Framework:
    """A framework's environment, and a home that its processes write to."""

    name: str
    environment: Environment
    home: Path

    @property
    def module(self) -> str:
        return f"tests.toolchains.with_frameworks.{FRAMEWORKS[self.name]}"

    @property
    def command(self) -> list[str]:
        """Runs its agent."""
        return [str(self.environment.python()), "-m", self.module]


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Framework:
    environment = Environment(request.param, folder=ROOT / "requirements" / "frameworks", plain=True)
    try:
        environment.python()
    except Absent as absent:
        pytest.skip(str(absent))
    return Framework(request.param, environment, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that keeps its address when it is restarted."""
    made = ServerProcess(tmp_path_factory.mktemp("frameworks") / "data", free_address()).configure(**QUICK)
    with made:
        yield made
        assert made.stop() == 0
    check_log(made)


@dataclass
class Agent:
    """An agent in a process of its own, with a namespace of the server."""

    process: asyncio.subprocess.Process
    namespace: str

    async def say(self, session: str, text: str) -> str:
        """Its answer. Raises AssertionError when the turn fails, EOFError when the process ends."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"session": session, "text": text}).encode() + b"\n")
        said = await self.read_line()
        assert "reply" in said, said
        return str(said["reply"])

    async def read_line(self) -> Any:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        if not line:
            raise EOFError(await self.process.wait())
        return json.loads(line) if line.startswith(b"{") else line.decode().strip()


@asynccontextmanager
async def started_agents(
    command: Sequence[str], home: Path, server: ServerProcess, model: FakeOpenAI, count: int
) -> AsyncIterator[list[Agent]]:
    """Agents in `count` processes of a command, which write below `home`."""
    variables = variables_for(home) | {
        "MEMSTREAM_TARGET": server.address,
        "MEMSTREAM_TEST_NAMESPACE": uuid.uuid4().hex[:12],
        "OPENAI_BASE_URL": model.base_url,
        "OPENAI_API_KEY": "secret",
    }
    agents: list[Agent] = []
    try:
        for number in range(count):
            with (home / f"agent-{number}.log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=variables,
                    cwd=home,
                )
            agents.append(Agent(process, variables["MEMSTREAM_TEST_NAMESPACE"]))
        for number, agent in enumerate(agents):
            try:
                assert await agent.read_line() == "ready"
            except EOFError:
                pytest.fail((home / f"agent-{number}.log").read_text("utf-8")[-4000:])
        yield agents
    finally:
        for agent in agents:
            if agent.process.returncode is None:
                agent.process.kill()
            await agent.process.wait()


@asynccontextmanager
async def strict_model() -> AsyncIterator[FakeOpenAI]:
    """A model that knows only the messages of its request, calls tools, and refuses a call without its output."""
    async with FakeOpenAI() as model:
        model.complete = lambda body: answer_of(model, body)
        model.spoil = call_tools
        yield model


def answer_of(model: FakeOpenAI, body: JSON) -> str:
    outputs = {said.get("tool_call_id") for said in body["messages"] if said["role"] == "tool"}
    calls = {call["id"] for said in body["messages"] for call in said.get("tool_calls") or ()}
    if calls != outputs:
        model.fail_now(Fault(status=400))
    known, asked = json.dumps(body["messages"]), json.dumps(body["messages"][-1]["content"])
    if "name" in asked:
        return f"Your name is {'Bob' if 'I am Bob' in known else 'not known'}."
    if "password" in asked and body["messages"][-1]["role"] == "user":
        return f"The password is {'swordfish' if 'is swordfish' in known else 'not known'}."
    return "Hello."


def call_tools(body: JSON, reply: JSON) -> None:
    last = body["messages"][-1]
    for name in ("read_log", "crash"):
        if last["role"] == "user" and f"Please {name}" in json.dumps(last["content"]):
            call = {"id": f"call-{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": "{}"}}
            choice = reply["choices"][0]
            choice["finish_reason"] = "tool_calls"
            choice["message"] |= {"content": None, "tool_calls": [call]}


async def test_agent_remembers_in_another_process(framework: Framework, server: ServerProcess) -> None:
    await check_memory(framework.command, framework.home, server)


async def check_memory(command: Sequence[str], home: Path, server: ServerProcess) -> None:
    """An agent remembers in another process, after a kill of the server, after a tool output of 1 MB, and after a kill
    of its process in the middle of a turn."""
    async with strict_model() as model, started_agents(command, home, server, model, 2) as (first, second):
        assert await first.say("monday", "What is my name?") == "Your name is not known."
        assert await first.say("monday", "I am Bob") == "Hello."
        await restarted(server)
        assert await second.say("monday", "What is my name?") == "Your name is Bob."
        assert await first.say("monday", "And my name now?") == "Your name is Bob."
        assert await second.say("tuesday", "What is my name?") == "Your name is not known.", "sessions are separate"

        assert await first.say("monday", "Please read_log") == "Hello."
        assert await second.say("monday", "What is the password?") == "The password is swordfish."

        with pytest.raises(EOFError):
            await first.say("monday", "Please crash")
        assert await second.say("monday", "What is my name?") == "Your name is Bob."
        assert await second.say("monday", "What is the password?") == "The password is swordfish."
        if not model.seen:  # the program's own model
            return
        said = json.dumps(model.seen[-1].body["messages"])
        assert said.count("I am Bob") == said.count("is swordfish") - 1 == 1, "nothing is stored twice"


async def test_example_and_page_run(framework: Framework, server: ServerProcess) -> None:
    """The section of docs/frameworks.md that installs the extra, and the example that it links."""
    sections = re.split(r"^(?=## )", (ROOT / "docs" / "frameworks.md").read_text("utf-8"), flags=re.M)
    (section,) = (text for text in sections if f"'.[{framework.name}]'" in text)
    assert len(list(find_blocks(section, "python"))) > 0
    page = framework.home / "page.md"
    page.write_text(for_another_environment(section), "utf-8")
    example = f"examples/frameworks/with_{FRAMEWORKS[framework.name]}.py"
    assert f"(../{example})" in section

    async with strict_model() as model:

        async def run(*words: str) -> str:
            asked = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "secret"}
            return await asyncio.to_thread(framework.environment.run, *words, home=framework.home, **asked)

        await run("-m", "tests.support.pages", str(page), server.address, str(framework.home))
        words = [str(ROOT / example), server.address]
        if framework.name == "anthropic":  # its model is in its program
            words = ["-m", framework.module, *words]
        assert "not known" in await run(*words)
        assert "Your name is Bob" in await run(*words), "the second run remembers the first"


def test_adapter_passes_its_tests(framework: Framework, server: ServerProcess) -> None:
    """Every test of the framework's program, those of the framework's own conformance suite included."""
    printed = framework.environment.run(
        *("-m", "pytest", *PYTEST.split(), "--rootdir", str(ROOT), str(FOLDER / f"{FRAMEWORKS[framework.name]}.py")),
        home=framework.home,
        MEMSTREAM_TARGET=server.address,
    )
    ended = re.search(r"^(\d+) passed(?:, \d+ warnings?)? in ", printed, re.M)
    assert ended is not None, printed
    page = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
    (row,) = re.findall(rf"^\| .* \| `memstream\.{FRAMEWORKS[framework.name]}` \| .* \| (\d+) \|$", page, re.M)
    assert int(ended[1]) + TESTS_HERE == int(row), "the number of tests in the table of docs/frameworks.md"
