"""A server runs with the lowest and with the newest versions of its packages that pyproject.toml allows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.toolchains.environments import INSTALL_S, ROOT

pytestmark = [pytest.mark.toolchain, pytest.mark.long]

EXTRAS = "server,postgres,otel,mcp,models,languages,agent"
TOOLS = (
    "aiohttp",
    "pytest",
    "pytest-asyncio",
    "pytest-randomly",
    "pytest-timeout",
    "cryptography",
    "hypothesis",
    "jsonschema",
)
SAMPLE = (
    "tests/server/test_calls.py",
    "tests/server/test_standing.py",
    "tests/server/test_traces.py",
    "tests/http_port/test_access.py",
    "tests/http_port/test_listener.py",
    "tests/cli/test_against_server.py",
    "tests/cli/test_mcp.py",
    "tests/index/test_milvus_lite.py",
    "tests/models/test_openai_embedder.py",
    "tests/models/test_onnx_embedder.py",
    "tests/journal/test_sqlite.py",
    "tests/client/test_agent.py",
)
"""A start, the SDK, both ports, the command line, and each package that we subclass or whose inner parts we use."""
LOWEST_PYTHON = (3, 11)
"""The lowest versions of numpy and others have wheels for it alone."""


def _install(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode and any(said in done.stderr for said in ("Failed to fetch", "error sending request")):
        pytest.skip(f"the package index does not answer: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("versions", ["lowest", "newest"])
def test_server_runs_with_allowed_versions(versions: str, tmp_path: Path) -> None:
    if versions == "lowest" and sys.version_info[:2] != LOWEST_PYTHON:
        pytest.skip("the lowest versions have wheels for Python 3.11 only")
    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "environment/bin/python"
    _install(uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment")
    install = (uv, "pip", "install", "--quiet", "--python", python)
    resolution = "lowest-direct" if versions == "lowest" else "highest"
    _install(*install, "--resolution", resolution, "--editable", f"{ROOT}[{EXTRAS}]")
    _install(*install, *TOOLS)
    # Old packages warn of what newer ones have changed; the suite itself treats a warning as an error.
    command = (python, "-m", "pytest", "-q", "-x", "-o", "filterwarnings=default", "-p", "no:cacheprovider", *SAMPLE)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MEMSTREAM_", "PYTEST_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1_500, check=False
    )
    assert done.returncode == 0, done.stdout[-8_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout


def test_constraints_fix_what_pip_installs(tmp_path: Path) -> None:
    """pip, not uv: it refuses constraints with extras."""
    report = tmp_path / "report.json"
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", report)
    constraints = ("--constraint", ROOT / "requirements/constraints.txt")
    _install(sys.executable, "-m", "pip", "install", *options, *constraints, f"{ROOT}[server,postgres,otel]")
    said = (ROOT / "requirements/constraints.txt").read_text("utf-8").splitlines()
    fixed = {line.split(" ;")[0].lower() for line in said if "==" in line}
    packages = [one["metadata"] for one in json.loads(report.read_text("utf-8"))["install"]]
    chosen = {f"{one['name']}=={one['version']}".lower().replace("_", "-") for one in packages}
    assert {one for one in chosen if not one.startswith("memstream==")} <= fixed
