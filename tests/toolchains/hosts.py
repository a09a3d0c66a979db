"""Agent hosts that run here: Claude Code and Codex from npm, with a scripted model in place of their own.

A host has a home and a project of its own. It sends nothing to a network: its switches against telemetry and updates
are set, and its model is at a local address.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memstream.hooks import EVENTS
from memstream.hosts import HOOK_TIMEOUT_S
from tests.toolchains.languages import fetch, find_program
from tests.toolchains.programs import CACHE, Absent, alone

FOLDER = Path(__file__).with_name("with_hosts")
PROGRAMS = {
    "claude-code": "@anthropic-ai/claude-code-*/claude",
    "codex": "@openai/codex-*/vendor/*/bin/codex",
}
PACKAGES = {"claude-code": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
TURN_S = 400
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}
START_MS = 240_000
"""That a host waits for its tools: a busy machine takes long to start them."""
_KEPT = ("PATH", "LANG", "LC_ALL", "TERM", "TMPDIR")


def version_of(name: str) -> str:
    """The version of a host that tests use."""
    packages: dict[str, str] = json.loads((FOLDER / "package.json").read_text("utf-8"))["dependencies"]
    return packages[PACKAGES[name]]


def find_host(name: str) -> Path:
    """The program of a host, which is installed if it is not there. Raises Absent."""
    made = CACHE / "hosts"
    with alone("hosts"):
        made.mkdir(exist_ok=True)
        stamp, asked = made / "installed", (FOLDER / "package.json").read_text("utf-8")
        if not stamp.exists() or stamp.read_text("utf-8") != asked:
            shutil.copy(FOLDER / "package.json", made)
            words = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--cache", str(CACHE / "npm"))
            fetch("the hosts", find_program("npm"), *words, cwd=made)
            stamp.write_text(asked, "utf-8")
    found = next((made / "node_modules").glob(PROGRAMS[name]), None)
    if found is None:
        raise Absent(f"{PACKAGES[name]} has no program for this system")
    return found


@dataclass(frozen=True)
class Host:
    """A host with a home. `memstream`: the command whose path `memstream connect` writes."""

    name: str
    program: Path
    home: Path
    memstream: Path

    @property
    def project(self) -> Path:
        return self.home / "app"

    def variables(self, model: str = "") -> dict[str, str]:
        """The environment of its processes: nothing of this one but where programs are."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run")}
        own |= {"MCP_TIMEOUT": str(START_MS), "MCP_CONNECT_TIMEOUT_MS": str(START_MS)}
        keys = {"ANTHROPIC_BASE_URL": model, "ANTHROPIC_API_KEY": "none", "MODEL_KEY": "none"}
        return kept | own | QUIET | keys

    def connect(self, *options: str) -> str:
        """Runs `memstream connect` and returns what it shows."""
        done = subprocess.run(
            [str(self.memstream), "connect", self.name, *options],
            env=self.variables(),
            cwd=self.project,
            capture_output=True,
            text=True,
            timeout=TURN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def use_model(self, model: str) -> None:
        """Writes the configuration that a person has: Codex takes its model from there."""
        if self.name == "codex":
            file = self.home / ".codex" / "config.toml"
            file.parent.mkdir(exist_ok=True)
            file.write_text(
                'model = "scripted"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
                "mcp_optional_startup_grace_ms = 0\n"  # its first turn waits for the tools
                f'[analytics]\nenabled = false\n[model_providers.local]\nname = "local"\nbase_url = "{model}/v1"\n'
                'env_key = "MODEL_KEY"\nwire_api = "responses"\n'
            )

    def give_hooks_time(self) -> None:
        """Raises the time that the host gives to each hook of `connect`: a busy machine starts a process late."""
        for file in (self.home / ".claude" / "settings.json", self.home / ".codex" / "config.toml"):
            if file.exists():
                written = file.read_text("utf-8")
                given, count = re.subn(rf'(timeout"?\s*[:=] ){HOOK_TIMEOUT_S}\b', rf"\g<1>{TURN_S}", written)
                assert count == len(EVENTS), written
                file.write_text(given, "utf-8")

    async def turn(self, prompt: str, model: str) -> str:
        """Runs one turn in a new session, without a person; returns what the host prints. Raises AssertionError."""
        if self.name == "claude-code":
            allowed = ",".join(f"mcp__memstream__{tool}" for tool in ("observe", "recall", "context", "list"))
            words = ["--print", prompt, "--allowedTools", allowed]
        else:
            # Nobody reviews the hooks and the calls of tools here; the scripted model calls memstream's alone.
            start = f"mcp_servers.memstream.startup_timeout_sec={START_MS // 1000}"
            trusted = ["--dangerously-bypass-hook-trust", "--dangerously-bypass-approvals-and-sandbox"]
            words = ["exec", "--skip-git-repo-check", *trusted, "-c", start, prompt]
        process = await asyncio.create_subprocess_exec(
            *(str(self.program), *words),
            env=self.variables(model),
            cwd=self.project,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, failed = await asyncio.wait_for(process.communicate(), TURN_S)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        assert process.returncode == 0, (said.decode()[-2000:], failed.decode()[-2000:])
        return said.decode()

    def records(self) -> list[dict[str, Any]]:
        """What with_hosts/memstream recorded."""
        file = Path(f"{self.memstream}.jsonl")
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


@contextmanager
def prepared(name: str, home: Path, memstream: Path | None = None) -> Iterator[Host]:
    """A host with a new home; the helpers of its hooks end with it. Raises Absent.

    `memstream`: None takes the recording command.
    """
    program = find_host(name)
    for folder in ("app", "bin", "run"):
        (home / folder).mkdir(mode=0o700)
    if memstream is None:
        memstream = home / "bin" / "memstream"
        memstream.write_text(f"#!{sys.executable}\n{(FOLDER / 'memstream').read_text('utf-8')}", "utf-8")
        memstream.chmod(0o755)
    try:
        yield Host(name, program, home, memstream)
    finally:
        for lock in (home / "run" / "memstream").glob("*.lock"):
            for pid in lock.read_text().split():
                os.kill(int(pid), signal.SIGTERM)
