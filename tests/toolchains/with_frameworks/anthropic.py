"""Claude's memory tool on a server: an agent to be driven, and tests of the tool.

The tests run on the SDK's own tool for a folder too, which must answer alike. The model is scripted in this process:
requests reach it through the SDK's HTTP client.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_async_tool
from anthropic.lib.tools import BetaAbstractMemoryTool, ToolError
from anthropic.tools.memory import BetaLocalFilesystemMemoryTool

import memstream
from memstream.anthropic import AsyncMemstreamMemoryTool, MemstreamMemoryTool
from tests.toolchains.with_frameworks import driver

MODEL: dict[str, Any] = {"model": "scripted", "max_tokens": 100}


ASKED: dict[str, str] = {}
"""What the user asked, by the id of the answer: the SDK continues a turn by that id."""


def reply_to(request: httpx2.Request) -> httpx2.Response:
    """A model that has no more than the turn, and remembers by the tool."""
    body = json.loads(request.content)
    last = body["messages"][-1]["content"]
    asked = last if isinstance(last, str) else ASKED[body["thread"]["previous_message_id"]]
    known = "" if isinstance(last, str) else json.dumps(last)
    topic = "password" if "password" in asked else "name"
    path = f"/memories/{topic}.txt"
    use: tuple[str, dict[str, Any]] | None = None
    text = "Hello."
    if not known and "Please " in asked:
        use = asked.removeprefix("Please "), {}
    elif not known and "I am Bob" in asked:
        use = "memory", {"command": "create", "path": path, "file_text": "The name is Bob."}
    elif not known:
        use = "memory", {"command": "view", "path": path}
    elif "is swordfish" in known and "Please" in asked:
        use = "memory", {"command": "create", "path": "/memories/password.txt", "file_text": "It is swordfish."}
    elif "?" in asked:
        word = next((one for one in ("Bob", "swordfish") if one in known), "not known")
        text = f"{'The' if topic == 'password' else 'Your'} {topic} is {word}."
    id_ = f"msg_{uuid.uuid4().hex}"
    ASKED[id_] = asked
    content: Any = {"type": "text", "text": text}
    if use is not None:
        content = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": use[0], "input": use[1]}
    answer = {"id": id_, "type": "message", "role": "assistant", "model": "scripted", "content": [content]}
    stop = "end_turn" if use is None else "tool_use"
    return httpx2.Response(200, json=answer | {"stop_reason": stop, "usage": {"input_tokens": 1, "output_tokens": 1}})


@beta_async_tool
async def read_log() -> str:
    """Reads the log."""
    return driver.read_log()


@beta_async_tool
async def crash() -> str:
    """Ends the process."""
    return driver.crash()


async def main() -> None:
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(reply_to))
    async with (
        memstream.connect(driver.TARGET) as client,
        AsyncAnthropic(api_key="secret", http_client=http) as claude,
    ):

        async def answer(session: str, text: str) -> str:
            tools = [AsyncMemstreamMemoryTool(client, f"{driver.NAMESPACE}/{session}"), read_log, crash]
            asked: Any = [{"role": "user", "content": text}]
            runner = claude.beta.messages.tool_runner(**MODEL, tools=tools, messages=asked)
            return str((await runner.until_done()).content[0].text)  # type: ignore[union-attr]

        await driver.take_turns(answer)


@pytest.fixture(scope="module")
def client() -> Iterator[memstream.sync.Client]:
    with memstream.sync.connect(driver.TARGET) as connected:
        yield connected


@pytest.fixture
def memory() -> str:
    return f"an-{uuid.uuid4().hex[:12]}/joy"


@pytest.fixture(params=["memstream", "folder"])
def tool(
    request: pytest.FixtureRequest, client: memstream.sync.Client, memory: str, tmp_path: Path
) -> BetaAbstractMemoryTool:
    if request.param == "memstream":
        return MemstreamMemoryTool(client, memory)
    return BetaLocalFilesystemMemoryTool(str(tmp_path))


def do(tool: BetaAbstractMemoryTool, command: str, path: str = "/memories/notes.md", **more: Any) -> str:
    given = more if command == "rename" else {"path": path, **more}
    return str(tool.call({"command": command, **given}))


def test_a_file_is_created_viewed_and_edited(tool: BetaAbstractMemoryTool) -> None:
    assert do(tool, "create", file_text="one\ntwo\nthree\n") == "File created successfully at: /memories/notes.md"
    with pytest.raises(ToolError, match="already exists"):
        do(tool, "create", file_text="other")
    shown = "Here's the content of /memories/notes.md with line numbers:\n"
    assert do(tool, "view") == f"{shown}     1\tone\n     2\ttwo\n     3\tthree\n     4\t"
    assert do(tool, "view", view_range=[2, 3]) == f"{shown}     2\ttwo\n     3\tthree"
    assert do(tool, "view", view_range=[3, -1]) == f"{shown}     3\tthree\n     4\t"
    changed = "The memory file has been edited. Here is the snippet showing the change (with line numbers):\n"
    edited = do(tool, "str_replace", old_str="two", new_str="2")
    assert edited == f"{changed}     1\tone\n     2\t2\n     3\tthree\n     4\t"
    assert do(tool, "insert", insert_line=0, insert_text="zero\n") == "The file /memories/notes.md has been edited."
    do(tool, "insert", insert_line=4, insert_text="five")
    assert do(tool, "view") == f"{shown}     1\tzero\n     2\tone\n     3\t2\n     4\tthree\n     5\tfive\n     6\t"
    do(tool, "create", "/memories/empty.md", file_text="")
    do(tool, "insert", "/memories/empty.md", insert_line=0, insert_text="Grüße 🚂")
    assert do(tool, "view", "/memories/empty.md").endswith("     1\tGrüße 🚂\n     2\t")


@pytest.mark.parametrize(
    ("command", "given", "problem"),
    [
        ("view", {"path": "/memories/none"}, "does not exist"),
        ("view", {"path": "/etc/passwd"}, "must start with"),
        ("view", {"path": "/memories/../../etc/passwd"}, "escape"),
        ("create", {"path": "/memories/notes.md", "file_text": "x"}, "already exists"),
        ("str_replace", {"path": "/memories/none", "old_str": "a", "new_str": "b"}, "does not exist"),
        ("str_replace", {"path": "/memories", "old_str": "a", "new_str": "b"}, "not a file"),
        ("str_replace", {"path": "/memories/notes.md", "old_str": "none", "new_str": "b"}, "did not appear verbatim"),
        ("str_replace", {"path": "/memories/notes.md", "old_str": "a", "new_str": "b"}, "in lines: 1, 1, 3"),
        ("insert", {"path": "/memories/notes.md", "insert_line": 9, "insert_text": "x"}, r"range \[0, 3\]"),
        ("insert", {"path": "/memories/none", "insert_line": 0, "insert_text": "x"}, "does not exist"),
        ("delete", {"path": "/memories/none"}, "does not exist"),
        ("delete", {"path": "/memories"}, "Cannot delete"),
        ("rename", {"old_path": "/memories", "new_path": "/memories/x"}, "Cannot rename"),
        ("rename", {"old_path": "/memories/none", "new_path": "/memories/x"}, "does not exist"),
        ("rename", {"old_path": "/memories/notes.md", "new_path": "/memories/notes.md"}, "already exists"),
    ],
)
def test_what_cannot_be_done_is_said_to_the_model(
    tool: BetaAbstractMemoryTool, command: str, given: dict[str, Any], problem: str
) -> None:
    do(tool, "create", file_text="a a\nb\na")
    with pytest.raises(ToolError, match=problem):
        do(tool, command, **given)
    assert do(tool, "view").endswith("     1\ta a\n     2\tb\n     3\ta")


def test_folders_are_listed_renamed_and_deleted(tool: BetaAbstractMemoryTool) -> None:
    for path in ("a.md", "deep/b.md", "deep/er/c.md", "deep/er/est/d.md", ".hidden/e.md"):
        do(tool, "create", f"/memories/{path}", file_text="x" * 10)
    listed = do(tool, "view", "/memories").split("\n")
    assert listed[0].endswith("up to 2 levels deep in /memories, excluding hidden items:")
    names = [line.split("\t")[1] for line in listed[1:]]
    assert names == ["/memories", "/memories/a.md", "/memories/deep/", "/memories/deep/b.md", "/memories/deep/er/"]
    assert "10B\t/memories/a.md" in listed
    do(tool, "rename", old_path="/memories/deep", new_path="/memories/other/place")
    assert do(tool, "view", "/memories/other/place/er/c.md").endswith("\txxxxxxxxxx")
    with pytest.raises(ToolError):
        do(tool, "view", "/memories/deep/b.md")
    do(tool, "delete", "/memories/other/place/er")
    names = [line.split("\t")[1] for line in do(tool, "view", "/memories/other").split("\n")[1:]]
    assert names == ["/memories/other", "/memories/other/place/", "/memories/other/place/b.md"]
    assert tool.clear_all_memory() == "All memory cleared"
    with pytest.raises(ToolError):
        do(tool, "view", "/memories/a.md")


def test_texts_and_names_that_are_too_long_are_said_to_the_model(client: memstream.sync.Client, memory: str) -> None:
    tool = MemstreamMemoryTool(client, memory)
    do(tool, "create", file_text="x")
    for path, text in (("/memories/large", "x" * 1_000_000), (f"/memories/{'ü' * 99}", "x")):
        with pytest.raises(ToolError):
            do(tool, "create", path, file_text=text)
    with pytest.raises(ToolError):
        do(tool, "insert", insert_line=0, insert_text="x" * 1_000_000)
    assert do(tool, "view").endswith("     1\tx")


async def test_edits_at_the_same_time_are_all_kept(client: memstream.sync.Client, memory: str) -> None:
    tool = AsyncMemstreamMemoryTool(client, memory)
    await tool.call({"command": "create", "path": "/memories/n", "file_text": ""})
    given = {"command": "insert", "path": "/memories/n", "insert_line": 0}
    await asyncio.gather(*(tool.call(given | {"insert_text": f"line {n}"}) for n in range(4)))
    text = str(await tool.call({"command": "view", "path": "/memories/n"}))
    assert all(f"line {n}" in text for n in range(4))


def test_the_blocking_runner_uses_the_tool(client: memstream.sync.Client, memory: str) -> None:
    http = httpx2.Client(transport=httpx2.MockTransport(reply_to))
    with Anthropic(api_key="secret", http_client=http) as claude:
        for text, answer in (("I am Bob", "Hello."), ("What is my name?", "Your name is Bob.")):
            asked: Any = [{"role": "user", "content": text}]
            tools = [MemstreamMemoryTool(client, memory)]
            done = claude.beta.messages.tool_runner(**MODEL, tools=tools, messages=asked).until_done()
            assert done.content[0].text == answer  # type: ignore[union-attr]


def run_example(path: str, address: str) -> None:
    http = httpx2.Client(transport=httpx2.MockTransport(reply_to))
    runpy.run_path(path)["main"](address, Anthropic(api_key="secret", http_client=http))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_example(*sys.argv[1:])
    else:
        asyncio.run(main())
