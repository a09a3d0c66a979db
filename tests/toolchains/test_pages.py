"""The documents as a stranger runs them: all pages in order, on one server, each with only the extra that it names."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from scripts.site import named
from tests.support.fake_openai import JSON, FakeOpenAI
from tests.support.pages import find_blocks, for_another_environment
from tests.toolchains.environments import ROOT, Environment, variables_for
from tests.toolchains.programs import Absent

pytestmark = pytest.mark.toolchain

SERVER = "server"
"""What getting-started.md installs, for the pages that name no extra."""
LOCKED = {"dbgpt": ("dbgpt", "3.11"), "langgraph": ("langgraph", "")}
"""Extras with an environment of their own: their versions, and the Python that has wheels."""
_EXTRAS = re.compile(r"pip install\s(?:[^'\n]* )?'\.\[([\w,-]+)\]'")
START_S = 120
PAGE_S = 300


def extras_of(text: str) -> str:
    """The extras that a page names first."""
    found = _EXTRAS.search(text)
    return found[1] if found else SERVER


def environment_of(extras: str) -> Environment:
    name, only = LOCKED.get(extras, ("constraints", ""))
    return Environment(name, only=only, extras=extras)


def list_pages() -> dict[str, tuple[str, str]]:
    """(extras, text) of the pages with code that runs, by name, in the order of the site."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    pages = {}
    for name in ("README.md", *named(nav)):
        text = (ROOT / name).read_text("utf-8")
        extras = extras_of(text)
        if extras in LOCKED:
            text = for_another_environment(text)
        if any(block.no_run is None for block in find_blocks(text, "python", "sh")):
            pages[name] = extras, text
    return pages


@contextmanager
def serving(python: Path, home: Path) -> Iterator[str]:
    """The address of `memstream serve` of that environment."""
    port_file, log = home / "address", home / "server.log"
    command = [str(python.with_name("memstream")), "serve", "--listen", "127.0.0.1:0", "--http-listen", ""]
    command += ["--port-file", str(port_file), "--data", str(home / "data")]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=variables_for(home), cwd=home) as process,
    ):
        try:
            until = time.monotonic() + START_S
            while not port_file.exists():
                assert process.poll() is None, log.read_text("utf-8")
                assert time.monotonic() < until, log.read_text("utf-8")
                time.sleep(0.05)
            yield port_file.read_text("utf-8").strip()
        finally:
            process.terminate()


def answer_of(body: JSON) -> str:
    return "Your name is Bob!" if "name is Bob" in body["messages"][-1]["content"] else "We have not met."


async def test_pages_run_in_order_with_the_extra_they_name(tmp_path: Path) -> None:
    pages, absent = list_pages(), list[str]()
    assert {"README.md", "docs/getting-started.md", "docs/sdk.md", "docs/dbgpt.md"} <= pages.keys()
    assert {SERVER, "agent", "server,agent", *LOCKED} <= {extras for extras, _ in pages.values()}
    try:
        server = await asyncio.to_thread(environment_of(SERVER).python)
    except Absent as reason:
        pytest.skip(str(reason))
    folder = tmp_path / "folder"
    folder.mkdir()
    async with FakeOpenAI() as model:
        model.complete = answer_of
        asked = {"OPENAI_API_BASE": model.base_url, "OPENAI_API_KEY": "secret", "OPENAI_MODEL": "scripted"}
        with serving(server, tmp_path) as address:
            for name, (extras, text) in pages.items():
                try:
                    await asyncio.to_thread(environment_of(extras).python)
                except Absent as reason:
                    absent.append(f"{name}: {reason}")
                    continue
                page = tmp_path / Path(name).name
                page.write_text(text, "utf-8")
                words = (str(page), address, str(folder), str(tmp_path / "data"))
                await asyncio.to_thread(
                    environment_of(extras).run,
                    *("-m", "tests.support.pages", *words),
                    home=tmp_path,
                    DBGPT_HOME=str(tmp_path),
                    **asked,
                )
    if absent:
        pytest.skip(f"all other pages ran; not {'; '.join(absent)}")


def test_mcp_page_runs_with_its_extra_alone(tmp_path: Path) -> None:
    text = (ROOT / "docs/mcp.md").read_text("utf-8")
    (block,) = find_blocks(text, "json")
    started = json.loads(block.code)["mcpServers"]["memory"]
    try:
        server, python = environment_of(SERVER).python(), environment_of(extras_of(text)).python()
    except Absent as reason:
        pytest.skip(str(reason))
    client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "host", "version": "1"}}
    arguments = {"name": "observe", "arguments": {"content": "Bob keeps bees"}}
    lines = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": arguments},
    ]
    with serving(server, tmp_path) as address:
        words = [word.replace("127.0.0.1:7700", address) for word in started["args"]]
        with subprocess.Popen(
            [str(python.with_name(started["command"])), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables_for(tmp_path),
            cwd=tmp_path,
        ) as host:
            assert host.stdin is not None
            assert host.stdout is not None
            answers = []
            for line in lines:
                host.stdin.write(json.dumps(line) + "\n")
                host.stdin.flush()
                if "id" in line:
                    answers.append(json.loads(host.stdout.readline()))
            host.stdin.close()
            assert host.wait(60) == 0
    assert answers[0]["result"]["serverInfo"]["name"] == "memstream"
    assert answers[1]["result"]["structuredContent"]["outcome"] == "remembered"
