"""The sessions of agent hosts with `memstream mcp`, replayed from their transcripts (tests/cli/transcripts)."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream.hooks.events import read_input, write_output
from memstream.projects import project_name
from tests.cli.commands import environment
from tests.cli.transcripts import HOSTS, Transcript, load
from tests.support.forked import ForkedProgram
from tests.support.processes import paused
from tests.support.server import ServerProcess, free_address

CALLS = 40


class Session:
    """A host's process of the command, in which each request has an id of its own."""

    def __init__(self, process: ForkedProgram, transcript: Transcript, root: Path) -> None:
        self._process = process
        self._like = next(one for one in transcript.messages if one["method"] == "tools/call")
        self._root = root
        self._count = 100
        self.roots_asked = False

    def write(self, message: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def answers(self, ids: Sequence[object]) -> dict[Any, dict[str, Any]]:
        """The answers of these requests; meanwhile the host says where its project is, if it is asked."""
        found: dict[Any, dict[str, Any]] = {}
        while not found.keys() >= set(ids):
            line = self._process.stdout.readline()
            assert line, self._process.stderr.read()
            message = json.loads(line)
            if message.get("method") == "roots/list":
                self.roots_asked = True
                roots = [{"uri": self._root.as_uri(), "name": self._root.name}]
                self.write({"jsonrpc": "2.0", "id": message["id"], "result": {"roots": roots}})
            elif "method" not in message:
                found[message["id"]] = message
        return found

    def replay(self, messages: Sequence[Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
        """Sends messages as the host does, without waiting for an answer before the next; returns all answers."""
        for message in messages:
            self.write(message)
        return self.answers([one["id"] for one in messages if "id" in one and "subscriptions" not in one["method"]])

    def ask(self, tool: str, **arguments: object) -> dict[str, Any]:
        """A call in the form in which the host sends one."""
        self._count += 1
        params = dict(self._like["params"]) | {"name": tool, "arguments": arguments}
        return {**self._like, "id": self._count, "params": params}

    def call(self, tool: str, **arguments: object) -> dict[str, Any]:
        """The result of a call."""
        message = self.ask(tool, **arguments)
        answer = self.replay([message])[message["id"]]
        result: dict[str, Any] = answer["result"]
        return result


@contextmanager
def session(transcript: Transcript, memory: str, target: str, root: Path) -> Iterator[Session]:
    with ForkedProgram(["mcp", "--memory", memory, "--timeout", "20"], environment(target)) as process:
        yield Session(process, transcript, root)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data", free_address()) as running:  # the same address after a restart
        yield running


def text_of(result: Mapping[str, Any]) -> str:
    assert not result.get("isError"), result
    return str(result["content"][0]["text"])


@pytest.mark.parametrize("name", HOSTS)
def test_session_of_a_host(name: str, own_server: ServerProcess, tmp_path: Path) -> None:
    transcript, memory = load(name), f"host-{uuid.uuid4().hex[:8]}/{{project}}"
    asks_roots = name not in ("codex", "claude-code")  # Codex has none; Claude Code's revision lets no server ask
    with session(transcript, memory, own_server.address, tmp_path) as host:
        greeted = host.replay([one for one in transcript.messages if one["method"] != "tools/call"])
        check_greeting(transcript, greeted)
        said = host.replay([one for one in transcript.messages if one["method"] == "tools/call"])
        assert not [one for one in said.values() if one["result"].get("isError")], "null, empty texts, half an emoji"
        assert host.roots_asked == asks_roots
        for id in said:  # OpenCode cancels at its end what has been answered
            host.write({**transcript.cancel, "params": {**transcript.cancel["params"], "requestId": id}})
        many = [host.ask("observe", content=f"fact number {number}") for number in range(CALLS)]
        assert len({text_of(one["result"]) for one in host.replay(many).values()}) == CALLS
        check_cancelled(host, own_server, transcript.cancel)
        own_server.restart()
        while (again := host.call("observe", content="The server was restarted")).get("isError"):
            assert "no memstream server answers" in str(again), again
    restart = [one for one in transcript.messages if one["method"] != "tools/call"]
    for greeting in filter(None, (restart, transcript.reconnect)):  # a new host, a new process of the command
        with session(transcript, memory, own_server.address, tmp_path) as host:
            host.replay(greeting)
            recalled = text_of(host.call("recall", query="When do we deploy?", limit=None, speaker=""))
            assert "user: We deploy on Tuesdays" in recalled
    root = tmp_path if asks_roots else Path.cwd()
    held = asyncio.run(contents(own_server.address, memory.replace("{project}", project_name(root))))
    assert {"We deploy on Tuesdays", "The server was restarted"} <= held
    assert ("party \ufffd" in held) == (name != "codex"), "Codex refuses half an emoji before the call"
    assert {f"fact number {number}" for number in range(CALLS)} <= held


def check_greeting(transcript: Transcript, answers: Mapping[Any, Mapping[str, Any]]) -> None:
    methods = {one["id"]: one["method"] for one in transcript.messages if "id" in one}
    found = {methods[id]: one for id, one in answers.items()}
    listed = found["tools/list"]["result"]["tools"]
    assert [tool["name"] for tool in listed] == ["context", "observe", "recall", "correct", "forget", "list"]
    if "server/discover" in found:
        # A host that waits too long for the first answer asks in the older way too, and takes either.
        assert found["server/discover"]["result"]["supportedVersions"], found["server/discover"]
        assert found["initialize"].get("result") or found["initialize"]["error"]["code"] == -32022
    else:
        asked = transcript.messages[0]["params"]["protocolVersion"]
        assert found["initialize"]["result"]["protocolVersion"] == asked


def check_cancelled(host: Session, server: ServerProcess, cancel: Mapping[str, Any]) -> None:
    """A person stops a call while the server is busy: the session stays open."""
    with paused(server.pid):
        stopped = host.ask("recall", query="deploy")
        host.write(stopped)
        host.write({**cancel, "params": {**cancel["params"], "requestId": stopped["id"]}})
        listing = {**stopped, "id": "after", "method": "tools/list", "params": meta_of(stopped)}
        assert host.replay([listing])["after"]["result"]["tools"]
    assert "fact number" in text_of(host.call("recall", query="fact number"))


def meta_of(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"_meta": message["params"]["_meta"]} if "_meta" in message["params"] else {}


async def contents(address: str, path: str) -> set[str]:
    async with memstream.connect(address) as client:
        return {one.content async for one in client.memory(path).list_fragments()}


@pytest.mark.parametrize("name", [name for name in HOSTS if load(name).hooks])
def test_hooks_understand_what_a_host_says(name: str) -> None:
    hooks = load(name).hooks
    assert set(hooks) == {"session-start", "prompt", "stop"}
    read = {event: read_input(given) for event, given in hooks.items()}
    assert {one.session for one in read.values()} == {"s"}
    assert read["prompt"].prompt in ("Remember: we deploy on Tuesdays", "When do we deploy?"), "without hooks' context"
    if name != "vscode":  # it names a transcript instead
        assert read["stop"].reply == "Noted"
    for event in ("session-start", "prompt"):
        answer = json.loads(write_output(event, name, "facts"))
        assert "facts" in json.dumps(answer)
        if name != "cursor":
            assert answer["hookSpecificOutput"]["hookEventName"] == hooks[event]["hook_event_name"]
    assert write_output("stop", name, "facts") == ""
