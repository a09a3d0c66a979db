"""Agent hosts that run here: programs from npm, with a scripted model in place of their own.

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
from memstream.hosts import HOOK_TIMEOUT_S, TOOLS_TIMEOUT_S
from tests.toolchains.languages import fetch, find_program
from tests.toolchains.programs import CACHE, Absent, alone

FOLDER = Path(__file__).with_name("with_hosts")
PROGRAMS = {
    "claude-code": "@anthropic-ai/claude-code-*/claude",
    "codex": "@openai/codex-*/vendor/*/bin/codex",
    "opencode": "opencode-*-*/bin/opencode",
    "gemini-cli": "@google/gemini-cli/bundle/gemini.js",
}
PACKAGES = {
    "claude-code": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "opencode": "opencode-ai",
    "gemini-cli": "@google/gemini-cli",
}
TURN_S = 400
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "npm_config_offline": "true",  # OpenCode installs the package for plugins
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
    # The last one of OpenCode's needs no new processor.
    found = max((made / "node_modules").glob(PROGRAMS[name]), default=None)
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

    @property
    def has_hooks(self) -> bool:
        return self.name != "opencode"

    def variables(self, model: str = "") -> dict[str, str]:
        """The environment of its processes: nothing of this one but where programs are."""
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        own = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run")}
        own |= {"MCP_TIMEOUT": str(START_MS), "MCP_CONNECT_TIMEOUT_MS": str(START_MS)}
        keys = {"ANTHROPIC_API_KEY": "none", "GEMINI_API_KEY": "none", "MODEL_KEY": "none"}
        return kept | own | QUIET | keys | {"ANTHROPIC_BASE_URL": model, "GOOGLE_GEMINI_BASE_URL": model}

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
        """Writes the configuration that a person has, with the model where the host takes it from there."""
        if self.name == "codex":
            written = (
                'model = "scripted"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
                "mcp_optional_startup_grace_ms = 0\n"  # its first turn waits for the tools
                f'[analytics]\nenabled = false\n[model_providers.local]\nname = "local"\nbase_url = "{model}/v1"\n'
                'env_key = "MODEL_KEY"\nwire_api = "responses"\n'
            )
        elif self.name == "opencode":
            own = {"options": {"baseURL": f"{model}/v1"}, "models": {"scripted": {}}}
            chosen = dict.fromkeys(("model", "small_model"), "anthropic/scripted")
            written = json.dumps({**chosen, "share": "disabled", "provider": {"anthropic": own}}, indent=2)
        elif self.name == "gemini-cli":
            login = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
            quiet = {"general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False}}
            written = json.dumps({**login, **quiet, "privacy": {"usageStatisticsEnabled": False}}, indent=2)
        else:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(written, "utf-8")

    @property
    def _file(self) -> Path:
        """What `connect` changes, of the user: for Claude Code its hooks."""
        files = {
            "claude-code": ".claude/settings.json",
            "codex": ".codex/config.toml",
            "gemini-cli": ".gemini/settings.json",
            "opencode": ".config/opencode/opencode.json",
        }
        return self.home / files[self.name]

    def give_time(self) -> None:
        """Raises the time that `connect` lets the host give: a busy machine starts a process late."""
        second = 1 if self.name in ("claude-code", "codex") else 1_000
        given_s = HOOK_TIMEOUT_S if self.has_hooks else TOOLS_TIMEOUT_S
        written = self._file.read_text("utf-8")
        pattern = rf'(timeout"?\s*[:=] ){given_s * second}\b'
        given, count = re.subn(pattern, rf"\g<1>{TURN_S * second}", written)
        assert count == (len(EVENTS) if self.has_hooks else 1), written
        self._file.write_text(given, "utf-8")

    def _words(self, prompt: str) -> list[str]:
        """The command of a turn without a person, who would allow the tools of memstream."""
        if self.name == "claude-code":
            allowed = ",".join(f"mcp__memstream__{tool}" for tool in ("observe", "recall", "context", "list"))
            return ["--print", prompt, "--allowedTools", allowed]
        if self.name == "opencode":
            return ["run", prompt]
        if self.name == "gemini-cli":
            return ["--skip-trust", "--approval-mode", "yolo", "--model", "gemini-2.5-flash", "--prompt", prompt]
        # Nobody reviews the hooks and the calls of tools here; the scripted model calls memstream's alone.
        start = f"mcp_servers.memstream.startup_timeout_sec={START_MS // 1000}"
        trusted = ["--dangerously-bypass-hook-trust", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", "--skip-git-repo-check", *trusted, "-c", start, prompt]

    async def turn(self, prompt: str, model: str) -> str:
        """Runs one turn in a new session, without a person; returns what the host prints. Raises AssertionError."""
        process = await asyncio.create_subprocess_exec(
            *(str(self.program), *self._words(prompt)),
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
