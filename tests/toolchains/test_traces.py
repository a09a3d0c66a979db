"""Spans of the Go and TypeScript clients in an OTLP receiver: one trace from an agent to the journal."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.collector import Collector
from tests.support.server import ServerProcess
from tests.toolchains.languages import Go, fetch, find_program, node, run
from tests.toolchains.programs import CACHE, Absent, alone

pytestmark = [pytest.mark.toolchain, pytest.mark.timeout(900)]

HERE = Path(__file__).with_name("with_traces")
STORE = "private-namespace/private-memory"
SECRETS = ("private words", "private home")
Use = Callable[[str, str], object]


def go_program() -> Use:
    """Builds the Go program. Raises Absent."""
    go, folder = Go(), CACHE / "traces-go"
    with alone("traces-go"):
        folder.mkdir(exist_ok=True)
        for name in ("main.go", "go.mod"):
            shutil.copy(HERE / name, folder)
        (folder / "go.sum").unlink(missing_ok=True)
        words = (find_program("go"), "mod", "edit", f"-replace=memstream.dev/go={go.folder}")
        run(*words, cwd=folder, env=go.environment)
        fetch("OpenTelemetry for Go", find_program("go"), "mod", "tidy", cwd=folder, env=go.environment)
        go.go("build", "-o", str(folder / "traces"), ".", cwd=folder)
    return lambda *addresses: run(str(folder / "traces"), *addresses, env=os.environ)


def typescript_program() -> Use:
    """Compiles the client and installs OpenTelemetry's packages. Raises Absent."""
    built, folder = node().built, CACHE / "traces-node"
    with alone("traces-node"):
        folder.mkdir(exist_ok=True)
        for name in ("main.js", "package.json"):
            shutil.copy(HERE / name, folder)
        words = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(CACHE / "npm"))
        fetch("OpenTelemetry for Node.js", find_program("npm"), *words, cwd=folder)
    return lambda *addresses: run("node", "main.js", *addresses, str(built), cwd=folder)


@pytest.mark.parametrize("program", [go_program, typescript_program], ids=["go", "typescript"])
async def test_agent_to_journal_is_one_trace(program: Callable[[], Use], tmp_path: Path) -> None:
    try:
        use = await asyncio.to_thread(program)
    except Absent as absent:
        pytest.skip(str(absent))
    async with Collector() as collector:
        endpoint = f"http://{collector.address}"
        server = ServerProcess(tmp_path / "data", otlp_endpoint=endpoint)
        await asyncio.to_thread(server.start)
        try:
            await asyncio.to_thread(use, server.address, collector.address)
            assert await asyncio.to_thread(server.stop) == 0
        finally:
            server.kill()
    check_spans(collector)


def check_spans(collector: Collector) -> None:
    (agent,) = collector.find_spans("invoke_agent joy")
    assert {one.trace for one in collector.spans if one.service == "agent"} == {agent.trace}
    memory = [one for one in collector.spans if one.service == "agent" and "gen_ai.operation.name" in one.attributes]
    seen = [(one.name, int(one.attributes.get("gen_ai.memory.record.count", 0))) for one in memory]
    assert sorted(seen) == [
        *[("create_memory", 1)] * 2,
        ("create_memory_store", 0),
        ("delete_memory", 1),
        *[("search_memory", 0), ("search_memory", 1), ("search_memory", 2)],
        ("upsert_memory", 1),
    ]
    for one in memory:
        assert one.attributes["gen_ai.operation.name"] == one.name
        assert one.attributes["gen_ai.provider.name"] == "memstream"
        assert collector.list_ancestors(one)[-1:] == [agent.name]
    (asking,) = collector.find_spans("asking")
    (asked,) = (one for one in memory if one.parent == asking.id)
    assert (asked.name, asked.attributes["gen_ai.memory.record.count"]) == ("search_memory", 1), "not below the stream"
    (query,) = collector.find_spans("memstream.v1.StreamService/RecallQuery")
    assert query.parent == asked.id
    (refused,) = (one for one in memory if "error.type" in one.attributes)
    assert refused.attributes["error.type"] == "MEMORY_NOT_FOUND"
    assert refused.attributes["gen_ai.memory.store.id"] == "private-namespace/other"
    assert {one.attributes["gen_ai.memory.store.id"] for one in memory if one is not refused} == {STORE}
    talks = {one.attributes.get("gen_ai.conversation.id") for one in memory if one.name == "create_memory"}
    assert talks == {"monday", "tuesday"}
    commits = [collector.list_ancestors(one) for one in collector.find_spans("journal.commit")]
    assert any(path[-1:] == [agent.name] for path in commits), commits
    served = [one for one in collector.spans if one.name == "memstream.v1.StreamService/RecallOnce"]
    assert agent.trace in {one.trace for one in served}
    assert not [one for one in collector.spans if any(secret in str(one.span) for secret in SECRETS)]
