"""Quickstarts of frameworks and importers for bench_quickstarts.py: what their pages say, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.exports import EXPORTS
from tests.support.server import free_address
from tests.toolchains.languages import ROOT, node
from tests.toolchains.test_frameworks import FRAMEWORKS, strict_model

if TYPE_CHECKING:
    from bench_quickstarts import Start

READY_S = 60
MODELS = {
    "agent-framework": ["agent-framework-openai"],
    "langgraph": ["langgraph"],
    "llama-index": ["llama-index-llms-openai-like"],
    "pydantic-ai": ["openai"],
    "strands": ["openai"],
}
"""What an example needs with its extra, as the example says."""
SERVED_APART = ("crewai", "llama-index")
"""Extras of which a package needs `openai` below 3: the server, which needs 3, has an environment of its own."""
PROGRAMS = {
    "anthropic": """
import sys, memstream
from memstream.anthropic import MemstreamMemoryTool
with memstream.sync.connect(sys.argv[1]) as client:
    tool = MemstreamMemoryTool(client, "claude/bob")
    if sys.argv[2] == "1":
        tool.call({"command": "create", "path": "/memories/bob.md", "file_text": "Your name is Bob"})
    print(tool.call({"command": "view", "path": "/memories/bob.md"}))
""",
    "langgraph": """
import sys, memstream
from memstream.langgraph import MemstreamStore
with memstream.sync.connect(sys.argv[1]) as client:
    store = MemstreamStore(client, "assistant", fields=["text"])
    if sys.argv[2] == "1":
        store.put(("users", "bob"), "name", {"text": "Your name is Bob"})
    print(store.search(("users",), query="what is his name?", limit=1)[0].value["text"])
""",
}
"""The code of the pages: the example of anthropic needs a model of its interface, that of langgraph always stores."""


@contextmanager
def serving(start: Start, environment: str = "venv") -> Iterator[str]:
    """A server, started as the pages say; its address."""
    address = free_address()
    program = start.home / environment / "bin" / "memstream"
    words = [str(program), "serve", "--data", str(start.home / "data"), "--listen", address]
    with (start.home / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            [*words, "--http-listen", ""], env=start.variables(), cwd=start.home, stdout=log, stderr=log
        )
    try:
        start.timed("memstream serve", lambda: wait_for(address, server))
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when the server accepts connections. Raises TimeoutError."""
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends and server.poll() is None:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"no server at {address} within {READY_S} s")


def start_framework(extra: str) -> Callable[[Start], None]:
    """The section of docs/frameworks.md: install, serve, and its example in two processes."""

    def quickstart(start: Start) -> None:
        environment, more = "venv", MODELS.get(extra, ())
        if extra in SERVED_APART:
            environment = "server"
            start.install(extra, *more)
            start.install("server", environment=environment)
        else:
            start.install(f"{extra},server", *more)
        program = start.home / "program.py"
        if extra in PROGRAMS:
            program.write_text(PROGRAMS[extra], "utf-8")
        else:
            shutil.copy(ROOT / "examples" / "frameworks" / f"with_{FRAMEWORKS[extra]}.py", program)
        with serving(start, environment) as address:
            asyncio.run(run_twice(start, [start.bin / "python", program, address]))

    return quickstart


async def run_twice(start: Start, command: list[str | Path]) -> None:
    """Raises AssertionError if the second process does not know the name that the first one stored."""
    async with strict_model() as model:
        asked = {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "secret", "OTEL_SDK_DISABLED": "true"}
        printed = ""
        for number, step in enumerate(("first program", "second program"), 1):
            began = time.perf_counter()
            printed = await asyncio.to_thread(start.run, *command, str(number), **asked)
            start.steps[step] = time.perf_counter() - began
        assert "Your name is Bob" in printed, printed


def start_ai_sdk(start: Start) -> None:
    """The Vercel AI SDK: the server by pip, the packages by npm, the example compiled before."""
    client = node()
    program = client.compile_programs({0: (ROOT / "examples/frameworks/with_ai_sdk.ts").read_text("utf-8")})[0]
    shutil.copy(program, start.home / "program.mjs")
    words = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(start.home)]
    subprocess.run(words, cwd=client.folder, check=True, stdout=subprocess.DEVNULL)
    (archive,) = start.home.glob("*.tgz")
    versions = client.package["devDependencies"]
    wanted = [f"{name}@{versions[name]}" for name in ("ai", "@ai-sdk/openai-compatible")]
    start.install("server")
    start.timed("npm install", lambda: start.run("npm", "install", "--silent", "--no-audit", *wanted, archive))
    with serving(start) as address:
        asyncio.run(run_twice(start, ["node", start.home / "program.mjs", address]))


def start_importers(start: Start) -> None:
    """docs/importing.md: each importer in turn, in one environment, and a recall of what it has brought in."""
    start.install("server")
    sources = {}
    for export in EXPORTS:
        folder = start.home / export.name
        folder.mkdir()
        sources[export.name] = export.build(folder)
    with serving(start) as address:
        memstream = start.bin / "memstream"
        for export in EXPORTS:

            def bring_in(name: str = export.name, options: tuple[str, ...] = export.options) -> None:
                memory = f"quick/{name}"
                start.run(memstream, "import", sources[name], memory, *options, MEMSTREAM_TARGET=address)
                asked = EXPORTS[[one.name for one in EXPORTS].index(name)].facts[0][3]
                found = start.run(memstream, "recall", memory, asked, "--json", MEMSTREAM_TARGET=address)
                assert json.dumps(asked.split("\n")[0], ensure_ascii=False).strip('"') in found, found

            start.timed(f"import {export.name}", bring_in)


FRAMEWORK_QUICKSTARTS: dict[str, Callable[[Start], None]] = {
    **{extra: start_framework(extra) for extra in [*FRAMEWORKS, *PROGRAMS]},
    "ai-sdk": start_ai_sdk,
    "importers": start_importers,
}
