"""The configuration of agent hosts: which files `memstream connect` writes for each, and what.

Each host documents these files and its hooks; OpenCode has plugins in place of hooks. Modules:
files: additions to files, and their removal.
jsonc: edits of JSON with comments.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memstream.errors import InvalidArgument
from memstream.hooks import SERVER_VARIABLES
from memstream.hosts.files import Addition, Change, add_to_json, add_to_toml, remove

HOSTS = ("claude-code", "codex", "cursor", "vscode", "opencode", "gemini-cli")
Scope = Literal["user", "project"]
HOOK_TIMEOUT_S = 5
"""After which a host ends a hook; one takes 0.3 s at most."""
TOOLS_TIMEOUT_S = 60
"""Of Codex and OpenCode for the start of the tools, which may start the server too; their defaults are 10 and 5 s."""
_EVENTS = {"SessionStart": "session-start", "UserPromptSubmit": "prompt", "Stop": "stop"}
_CURSOR_EVENTS = {"sessionStart": "session-start", "beforeSubmitPrompt": "prompt", "afterAgentResponse": "stop"}
_GEMINI_EVENTS = {"SessionStart": "session-start", "BeforeAgent": "prompt", "AfterAgent": "stop"}
_OPENCODE_SCHEMA = "https://opencode.ai/config.json"
"""OpenCode adds it to a file without it, which then is no longer the file that `connect` wrote."""


@dataclass(frozen=True, slots=True)
class Connection:
    """What is connected. `command`: of memstream, in words; `server`: `--local DIR` or `--target ADDRESS`."""

    host: str
    scope: Scope
    command: Sequence[str]
    memory: str
    server: Sequence[str]
    name: str = "memstream"
    hooks: bool = True
    keep_secrets: bool = False

    def tool_words(self) -> list[str]:
        """The command that serves the tools."""
        return [*self.command, "mcp", *self.server, "--memory", self.memory]

    def hook_command(self, event: str) -> str:
        """The command of an event's hook, for a shell."""
        kept = ["--keep-secrets"] if self.keep_secrets else []
        words = [*self.command, "hook", event, "--host", self.host, "--memory", self.memory, *self.server, *kept]
        return shlex.join(words)


def plan_connection(what: Connection, home: Path, project: Path) -> list[Change]:
    """The changes that connect a host. Raises InvalidRequest for a file that cannot be changed."""
    if what.host == "codex":
        return [add_to_toml(_codex_file(what.scope, home, project), _codex_tables(what))]
    return [add_to_json(file, additions) for file, additions in _additions(what, home, project)]


def plan_removal(what: Connection, home: Path, project: Path) -> list[Change]:
    """The changes that take a connection away, the last file that was added first; those of files without one have the
    same text twice."""
    if what.host == "codex":
        return [remove(_codex_file(what.scope, home, project), ())]
    return [remove(file, additions) for file, additions in reversed(_additions(what, home, project))]


def _additions(what: Connection, home: Path, project: Path) -> list[tuple[Path, list[Addition]]]:
    command, *arguments = what.tool_words()
    entry: dict[str, Any] = {"command": command, "args": arguments}
    base = home if what.scope == "user" else project
    if what.host == "claude-code":
        tools = home / ".claude.json" if what.scope == "user" else project / ".mcp.json"
        settings = base / ".claude" / ("settings.json" if what.scope == "user" else "settings.local.json")
        loaded = {"type": "stdio", **entry, "alwaysLoad": True}  # else a model has to search for the tools first
        found = [(tools, [Addition(("mcpServers", what.name), loaded)])]
        return [*found, *([(settings, _hook_groups(what, _EVENTS, HOOK_TIMEOUT_S))] if what.hooks else [])]
    if what.host == "gemini-cli":
        base = Path(os.environ.get("GEMINI_CLI_HOME") or home) if what.scope == "user" else project
        # It withholds variables whose names look like secrets, unless an entry names them.
        entry["env"] = {name: f"${name}" for name in SERVER_VARIABLES}
        hooks = _hook_groups(what, _GEMINI_EVENTS, 1_000 * HOOK_TIMEOUT_S) if what.hooks else []
        return [(base / ".gemini/settings.json", [Addition(("mcpServers", what.name), entry), *hooks])]
    if what.host == "opencode":
        shared = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "opencode"
        local = {"type": "local", "command": [command, *arguments], "timeout": 1_000 * TOOLS_TIMEOUT_S}
        added = [Addition(("$schema",), _OPENCODE_SCHEMA, default=True), Addition(("mcp", what.name), local)]
        return [((shared if what.scope == "user" else project) / "opencode.json", added)]
    if what.host == "cursor":
        found = [(base / ".cursor/mcp.json", [Addition(("mcpServers", what.name), entry)])]
        return [*found, *([(base / ".cursor/hooks.json", _cursor_hooks(what))] if what.hooks else [])]
    if what.scope == "user":
        raise InvalidArgument("scope", "VS Code keeps a user's servers in its profile: use --scope project")
    found = [(project / ".vscode/mcp.json", [Addition(("servers", what.name), {"type": "stdio", **entry})])]
    hooks = [
        Addition(
            ("hooks", event), {"type": "command", "command": what.hook_command(ours), "timeout": HOOK_TIMEOUT_S}, True
        )
        for event, ours in _EVENTS.items()
    ]
    return [*found, *([(project / ".github/hooks/memstream.json", hooks)] if what.hooks else [])]


def _hook_groups(what: Connection, events: Mapping[str, str], timeout: int) -> list[Addition]:
    return [
        Addition(
            ("hooks", event),
            {"hooks": [{"type": "command", "command": what.hook_command(ours), "timeout": timeout}]},
            item=True,
        )
        for event, ours in events.items()
    ]


def _cursor_hooks(what: Connection) -> list[Addition]:
    hooks = [
        Addition(("hooks", event), {"command": what.hook_command(ours)}, item=True)
        for event, ours in _CURSOR_EVENTS.items()
    ]
    return [Addition(("version",), 1), *hooks]


def _codex_file(scope: Scope, home: Path, project: Path) -> Path:
    if scope == "project":
        return project / ".codex/config.toml"
    return Path(os.environ.get("CODEX_HOME") or home / ".codex") / "config.toml"


def _codex_tables(what: Connection) -> str:
    command, *arguments = what.tool_words()
    lines = [f"[mcp_servers.{what.name}]", f"command = {_toml(command)}"]
    lines.append(f"args = [{', '.join(map(_toml, arguments))}]")
    lines.append(f"env_vars = [{', '.join(map(_toml, SERVER_VARIABLES))}]")  # Codex hands on what is named alone
    lines.append(f"startup_timeout_sec = {TOOLS_TIMEOUT_S}")
    for event, ours in _EVENTS.items() if what.hooks else ():
        lines += ["", f"[[hooks.{event}]]", f"[[hooks.{event}.hooks]]", 'type = "command"']
        lines += [f"command = {_toml(what.hook_command(ours))}", f"timeout = {HOOK_TIMEOUT_S}"]
    return "\n".join(lines)


def _toml(text: str) -> str:
    """A basic string of TOML: JSON's, but for DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")
