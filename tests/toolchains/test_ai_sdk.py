"""Agents of the AI SDK (npm `ai`) with their conversations and memories on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.server import ServerProcess
from tests.toolchains.languages import ROOT, Node, node, node_22, run
from tests.toolchains.programs import Absent
from tests.toolchains.test_frameworks import TESTS_HERE, check_memory, server, strict_model

__all__ = ["server"]  # a fixture

pytestmark = pytest.mark.toolchain

EXAMPLE = ROOT / "examples" / "frameworks" / "with_ai_sdk.ts"


@pytest.fixture(scope="module")
def client() -> Node:
    try:
        found = node()
    except Absent as absent:
        pytest.skip(str(absent))
    assert found.built.exists()
    return found


@pytest.fixture(scope="module", params=["installed", "22"])
def program(request: pytest.FixtureRequest, client: Node) -> str:
    """The Node.js that runs the agents: the installed one, which compiles the client, and version 22."""
    if request.param == "installed":
        return "node"
    try:
        return node_22()
    except Absent as absent:
        pytest.skip(str(absent))


async def test_agent_remembers_in_another_process(
    client: Node, program: str, server: ServerProcess, tmp_path: Path
) -> None:
    await check_memory([program, str(client.built / "test" / "ai_agent.js")], tmp_path, server)


def test_adapter_passes_its_tests(client: Node, program: str, server: ServerProcess) -> None:
    variables = os.environ | {"MEMSTREAM_TARGET": server.address}
    printed = run(program, "--test", "--test-reporter=tap", str(client.built / "test" / "ai.test.js"), env=variables)
    (passed,) = re.findall(r"^# pass (\d+)$", printed, re.M)
    (row,) = re.findall(
        r"^\| .* \| `@memstream/client/ai` \| .*$", (ROOT / "docs/frameworks.md").read_text("utf-8"), re.M
    )
    assert int(row.split(" | ")[-1].rstrip(" |")) == int(passed) + TESTS_HERE


async def test_example_runs(client: Node, program: str, server: ServerProcess) -> None:
    """The page's code is run with that of all pages."""
    assert f"(../{EXAMPLE.relative_to(ROOT)})" in (ROOT / "docs/frameworks.md").read_text("utf-8")
    namespace = f"ai-example-{uuid.uuid4().hex[:12]}"  # that of the page has what another Node.js has stored
    script = client.compile_programs({0: EXAMPLE.read_text("utf-8").replace('"ai-example/', f'"{namespace}/')})[0]
    async with strict_model() as model:

        async def remember() -> str:
            asked = os.environ | {"OPENAI_BASE_URL": model.base_url, "OPENAI_API_KEY": "secret"}
            return await asyncio.to_thread(run, program, str(script), server.address, env=asked)

        assert "not known" in await remember()
        assert "Your name is Bob" in await remember(), "the second run remembers the first"


@pytest.mark.parametrize("version", ["", "6.9.9", "7.0.172", "7.1.0-beta.1", "8.0.0"])
def test_another_version_is_named_at_import(client: Node, tmp_path: Path, version: str) -> None:
    """The packed client next to a package `ai` of another version, or none."""
    run("npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(tmp_path), cwd=client.folder)
    folder = tmp_path / "node_modules"
    (folder / "@memstream").mkdir(parents=True)
    run("tar", "-xzf", *map(str, tmp_path.glob("*.tgz")), "-C", str(folder / "@memstream"))
    (folder / "@memstream" / "package").rename(folder / "@memstream" / "client")
    for package in client.package["dependencies"]:
        (folder / package).parent.mkdir(exist_ok=True)
        (folder / package).symlink_to(client.folder / "node_modules" / package)
    if version:
        (folder / "ai").mkdir()
        (folder / "ai" / "package.json").write_text(json.dumps({"name": "ai", "version": version}), "utf-8")
    words = ["node", "--input-type=module", "--eval", 'await import("@memstream/client/ai")']
    failed = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    wanted = f"ai@{client.package['peerDependencies']['ai']}"
    found = f"and {version} is installed" if version else "which is not installed"
    assert failed.returncode == 1
    assert f"@memstream/client/ai needs {wanted}, {found}: npm install '{wanted}'" in failed.stderr
